"""Data sets of rows to train on: JSONL files, and those of Hugging Face. A row is read when it is asked for."""

from __future__ import annotations

import bisect
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zstore.errors import ConfigError

JSONL = (".jsonl", ".ndjson")
"""Endings of files with a JSON object in each line."""
_STRIDE = 64
"""Of so many lines the beginning of one is remembered."""
_SCAN_BYTES = 16 * 1024 * 1024
IDS = "input_ids"


class Rows(ABC):
    """Numbered rows. `name` is for messages."""

    name: str

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def row(self, number: int) -> Any:
        """Return a row, a mapping of columns."""

    def content(self, number: int, text_key: str) -> str | list[int]:
        """Return the tokens of a row where it has "input_ids", else its text. Raises ConfigError where it has neither."""
        row = self.row(number)
        if isinstance(row, dict):
            ids = row.get(IDS)
            if isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids):
                return ids
            text = row.get(text_key)
            if isinstance(text, str):
                return text
        has = ", ".join(map(repr, row)) if isinstance(row, dict) else type(row).__name__
        raise ConfigError(
            f"{self.name}, row {number + 1}: expected a text under {text_key!r}, or a list of token numbers under "
            f'"{IDS}"; the row has {has or "nothing"}: name the column with --text-key'
        )


class JsonlRows(Rows):
    """The lines of JSONL files, one file after another; empty lines are rows without text. Memory: an eighth of a byte a
    row."""

    def __init__(self, files: Sequence[Path], name: str) -> None:
        self.name = name
        self._files = list(files)
        found = [_scan(file) for file in self._files]
        self._marks = [marks for marks, _ in found]
        self._ends = list(itertools.accumulate(count for _, count in found))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, number: int) -> Any:
        """See Rows."""
        index = bisect.bisect_right(self._ends, number)
        line = number - (self._ends[index - 1] if index else 0)
        with self._files[index].open("rb") as file:
            file.seek(int(self._marks[index][line // _STRIDE]))
            for _ in range(line % _STRIDE):
                file.readline()
            text = file.readline()
        if not text.strip():
            return {IDS: []}
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"{self._files[index]}, line {line + 1}: expected a JSON object in each line: {error}"
            ) from error


def _scan(file: Path) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
    """Return where every 64th line of a file begins, and its number of lines."""
    marks: list[int] = [0]
    lines = place = 0
    try:
        with file.open("rb", buffering=0) as stream:
            while block := stream.read(_SCAN_BYTES):
                ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
                first = (-lines - 1) % _STRIDE
                marks += (ends[first::_STRIDE] + place + 1).tolist()
                lines += ends.size
                place += len(block)
                last = block[-1:]
    except OSError as error:
        raise ConfigError(f"the text in {file} cannot be read: {error}") from error
    return np.array(marks, np.int64), lines + (1 if place and last != b"\n" else 0)


class DatasetRows(Rows):
    """A data set of the library `datasets`, mapped from the drive."""

    def __init__(self, dataset: Any, name: str) -> None:
        self.name = name
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, number: int) -> Any:
        """See Rows."""
        return self._dataset[number]


def open_rows(root: Path) -> Rows | None:
    """Return the rows of a JSONL file, of a folder of them, or of a Hugging Face data set's folder (extra `data`); None for
    anything else, which is plain text. Raises ConfigError for a folder that mixes JSONL with other files."""
    if root.is_file():
        return JsonlRows([root], str(root)) if root.suffix in JSONL else None
    if not root.is_dir():
        return None
    if any((root / name).is_file() for name in ("dataset_dict.json", "state.json")) or _parquet(root):
        return _dataset_rows(root)
    files = sorted(path for path in root.rglob("*") if path.is_file() and not _is_hidden(path, root))
    lines = [path for path in files if path.suffix in JSONL]
    if lines and len(lines) < len(files):
        other = next(path for path in files if path.suffix not in JSONL)
        raise ConfigError(
            f"{root} holds both {lines[0].name} and {other.name}: keep JSONL and other text in folders apart"
        )
    return JsonlRows(lines, str(root)) if lines else None


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _parquet(root: Path) -> list[str]:
    return sorted(str(path) for path in root.rglob("*.parquet") if not _is_hidden(path, root))


def _dataset_rows(root: Path) -> Rows:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"{root} needs datasets, which is not installed: pip install 'zstore[data]'") from error
    try:
        datasets.disable_progress_bars()
        files = _parquet(root)
        train = [file for file in files if "train" in Path(file).relative_to(root).as_posix()]
        if files:
            found: Any = datasets.load_dataset("parquet", data_files=train or files, split="train")
        else:
            found = datasets.load_from_disk(str(root))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"datasets cannot read {root}: {error}") from error
    if isinstance(found, dict):
        if "train" not in found:
            raise ConfigError(f"{root} has splits {', '.join(found)} and no 'train': give the folder of one of them")
        found = found["train"]
    return DatasetRows(found, str(root))
