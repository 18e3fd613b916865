"""Text to train and to evaluate on: files read as bytes, or as a model's own tokenizer sees them, and samples that depend on
the seed and the sample's number alone.

[Note: sample order] Sample n of a run with seed s starts at the same byte however many ranks share the work and
whenever the run was resumed: the place is a hash of (s, n), taken from the raw output of numpy's counter-based Philox
generator (raw output is the same in every numpy version, which numpy does not promise for its distributions).

[Note: samples of tokens] Like a sample of bytes, sample n of a run with seed s begins at a place that depends on (s, n)
alone. The text from there on is tokenised until there are as many tokens as are needed, from the beginning again after
its end. So nothing is prepared or cached, and any number of ranks sees the same samples.
"""

from __future__ import annotations

import bisect
import itertools
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zstore.errors import ConfigError

STDLIB_BYTES = 8_000_000
"""Size of the part of the standard library's sources: enough for the demo, and the same few hundred files anywhere."""

_ROWS = (".jsonl", ".ndjson", ".parquet", ".arrow")
_NOT_TEXT = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})


class Text(ABC):
    """Text that samples are cut from."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the text."""

    @abstractmethod
    def sample(self, number: int, seq_len: int, seed: int) -> tuple[Tensor, Tensor]:
        """Sample `number` as `(input_ids, labels)`, int64 [seq_len] and equal: the model does the shift by one."""

    def batch(self, numbers: Sequence[int], seq_len: int, seed: int) -> tuple[Tensor, Tensor]:
        """The samples of `numbers` as `(input_ids, labels)`, int64 [len(numbers), seq_len]."""
        ids, labels = zip(*(self.sample(number, seq_len, seed) for number in numbers), strict=True)
        return torch.stack(ids), torch.stack(labels)

    def require(self, seq_len: int) -> None:
        """Raise `ConfigError` unless a sample of `seq_len` tokens can be made from the text."""
        if seq_len < 2:
            raise ConfigError(f"expected a sequence length of 2 tokens or more, got {seq_len}")


@dataclass(frozen=True, kw_only=True)
class Corpus(Text):
    """Concatenated files. Only their sizes are kept; a sample's bytes are read when it is asked for."""

    files: tuple[Path, ...]
    ends: tuple[int, ...]
    """Where each file ends, in bytes from the beginning of the corpus."""
    name: str
    """For messages: the path given, or the name of its default."""
    first: int = 0
    """Where the part that is taken begins, in bytes from the beginning of the files."""
    stop: int | None = None
    """Where it ends; None: with the files."""

    @property
    def num_bytes(self) -> int:
        """Of the part that is taken; a byte is a token."""
        return (self.ends[-1] if self.stop is None else self.stop) - self.first

    def split(self, part: float) -> tuple[Corpus, Corpus]:
        """Return the text without its last `part`, and that."""
        cut = self.first + self.num_bytes - int(self.num_bytes * part)
        return replace(self, stop=cut), replace(self, first=cut, stop=self.first + self.num_bytes)

    def require(self, seq_len: int) -> None:
        super().require(seq_len)
        if self.num_bytes < seq_len:
            raise ConfigError(
                f"{self.name} holds {self.num_bytes} bytes, but one sample takes {seq_len}: "
                "give more text or a smaller --seq-len"
            )

    def sample(self, number: int, seq_len: int, seed: int) -> tuple[Tensor, Tensor]:
        self.require(seq_len)
        start = start_of(number, seed, self.num_bytes - seq_len + 1)
        ids = torch.from_numpy(np.frombuffer(self.read(start, seq_len), dtype=np.uint8).astype(np.int64))
        return ids, ids.clone()

    def read(self, start: int, num_bytes: int) -> bytes:
        """The bytes from `start` on, across files; `ConfigError` when a file was truncated."""
        pieces = []
        start += self.first
        index = bisect.bisect_right(self.ends, start)
        while num_bytes > 0:
            begin = self.ends[index - 1] if index else 0
            wanted = min(num_bytes, self.ends[index] - start)
            piece = _read_at(self.files[index], start - begin, wanted)
            pieces.append(piece)
            start += wanted
            num_bytes -= wanted
            index += 1
        return b"".join(pieces)


def open_corpus(path: str | os.PathLike[str] | None = None) -> Corpus:
    """The text file at `path`, or all files below the folder `path` in the order of their names, hidden ones left out.

    Without a path the sources of Python's own standard library, up to `STDLIB_BYTES`. Raises `ConfigError` for a path
    that is missing, cannot be read, or holds no text.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        return _corpus(list(_stdlib_files(root)), f"the standard library ({root})")
    root = Path(path).expanduser()
    if not root.exists():
        raise ConfigError(f"expected a text file or a folder of them, but {root} does not exist: check --data")
    if root.suffix in _ROWS:
        raise ConfigError(
            f"{root}: expected plain text, got a file of rows: write the text of its rows to a file of its own"
        )
    if root.is_dir():
        return _corpus(_files_below(root), str(root))
    return _corpus([root], str(root))


def _corpus(files: Sequence[Path], name: str) -> Corpus:
    try:
        sizes = [file.stat().st_size for file in files]
        for file in files:
            with file.open("rb"):
                pass
    except OSError as error:
        raise ConfigError(f"the text in {name} cannot be read: {error}") from error
    if not sum(sizes):
        raise ConfigError(f"{name} holds no text ({len(files)} files, 0 bytes): give a file or folder with text in it")
    return Corpus(files=tuple(files), ends=tuple(itertools.accumulate(sizes)), name=name)


def _files_below(root: Path, skip: frozenset[str] = frozenset()) -> list[Path]:
    """Files in the order of their names; hidden ones and folders named in `skip` are left out."""
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if not name.startswith(".") and name not in skip]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(root).as_posix())


def _stdlib_files(root: Path) -> Iterator[Path]:
    taken = 0
    for file in _files_below(root, skip=_NOT_TEXT):
        size = file.stat().st_size
        if file.suffix == ".py" and taken + size <= STDLIB_BYTES:
            taken += size
            yield file


def _read_at(file: Path, offset: int, num_bytes: int) -> bytes:
    with file.open("rb", buffering=0) as stream:
        stream.seek(offset)
        piece = stream.read(num_bytes)
    if len(piece) != num_bytes:
        raise ConfigError(
            f"{file}: expected {num_bytes} bytes at offset {offset}, got {len(piece)}: "
            "the file was changed while the run read it"
        )
    return piece


def start_of(number: int, seed: int, span: int) -> int:
    """Return a place in [0, span) that depends on (seed, number) alone: see [Note: sample order]."""
    if number < 0:
        raise ValueError(f"sample numbers start at 0, got {number}")
    key = np.array([seed % 2**64, number % 2**64], dtype=np.uint64)
    raw = int(np.random.Philox(key=key).random_raw())
    return raw * span >> 64


_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_BYTES_PER_TOKEN = 6
"""More than a token has on average: one tokenisation is enough, mostly."""


@dataclass(frozen=True, kw_only=True)
class TokenCorpus(Text):
    """A corpus as tokens. `encode` gives the tokens of a text."""

    corpus: Corpus
    encode: Callable[[str], list[int]]

    @property
    def num_bytes(self) -> int:
        return self.corpus.num_bytes

    def require(self, seq_len: int) -> None:
        super().require(seq_len)
        self.sample(0, seq_len, 0)

    def sample(self, number: int, seq_len: int, seed: int) -> tuple[Tensor, Tensor]:
        """Sample `number` as `(input_ids, labels)`, int64 [seq_len] and equal. See [Note: samples of tokens]."""
        total = self.corpus.num_bytes
        start = start_of(number, seed, total)
        wanted = seq_len * _BYTES_PER_TOKEN
        while True:
            tokens = self.encode(self._text(start, wanted))
            if len(tokens) >= seq_len:
                ids = torch.tensor(tokens[:seq_len], dtype=torch.int64)
                return ids, ids.clone()
            if not tokens and wanted > total:
                raise ConfigError(f"the tokenizer makes no tokens of the text in {self.corpus.name}: give other text")
            wanted *= 2

    def _text(self, start: int, num_bytes: int) -> str:
        """The text of `num_bytes` from `start` on, from the beginning again after the end; characters cut apart are left
        out."""
        pieces, position = [], start
        while num_bytes > 0:
            size = min(num_bytes, self.corpus.num_bytes - position)
            pieces.append(self.corpus.read(position, size))
            num_bytes -= size
            position = 0
        return b"".join(pieces).decode("utf-8", errors="ignore")


def has_tokenizer(model: str) -> bool:
    """Return whether `model` is a folder with a tokenizer's files."""
    folder = Path(model).expanduser()
    return folder.is_dir() and any((folder / name).is_file() for name in _FILES)


def _tokenizer_in(folder: Path) -> Any:
    """Return the tokenizer in a folder (extra `hf`)."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"{folder} needs transformers, which is not installed: pip install 'zstore[hf]'") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"transformers cannot read the tokenizer in {folder}: {error}") from error
    # A sample is longer than the model's window before it is cut, which is no mistake.
    tokenizer.model_max_length = int(1e30)
    return tokenizer


def with_tokenizer(corpus: Corpus, model: str) -> Text:
    """Return the corpus as the tokenizer in the folder `model` sees it; as bytes if that has none (extra `hf`)."""
    if not has_tokenizer(model):
        return corpus
    tokenizer = _tokenizer_in(Path(model).expanduser())
    return TokenCorpus(corpus=corpus, encode=lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]))


_SEED = 0
"""Of the samples to evaluate on, which are the same in every run."""


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Text to train on, and text to evaluate on, None if there is none."""

    train: Text
    validation: Text | None


def open_data(
    path: Path | None, model: str, *, validation: Path | None = None, validation_split: float = 0.0
) -> TrainingData:
    """Return the text at `path` as the model's tokenizer sees it, and the text to evaluate on: that at `validation`, or the
    last part of the other. Raises ConfigError for text that cannot be read."""
    corpus = open_corpus(path)
    parts = list(corpus.split(validation_split)) if validation_split else [corpus]
    parts += [] if validation is None else [open_corpus(validation)]
    texts = [with_tokenizer(part, model) for part in parts]
    return TrainingData(train=texts[0], validation=texts[-1] if texts[1:] else None)


def validation_samples(text: Text, count: int, seq_len: int) -> Tensor:
    """Return at most `count` samples of `text` to evaluate on, int64 [samples, seq_len]. Raises ConfigError if there is not
    one."""
    text.require(seq_len)
    return text.batch(range(max(1, min(count, text.num_bytes // seq_len))), seq_len, _SEED)[0]
