"""Text to train on: files read as bytes, and samples that depend on the seed and the sample's number alone.

[Note: sample order] Sample n of a run with seed s starts at the same byte however many ranks share the work and
whenever the run was resumed: the place is a hash of (s, n), taken from the raw output of numpy's counter-based Philox
generator (raw output is the same in every numpy version, which numpy does not promise for its distributions).
"""

from __future__ import annotations

import bisect
import itertools
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zstore.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Concatenated files. Only their sizes are kept; a sample's bytes are read when it is asked for."""

    files: tuple[Path, ...]
    ends: tuple[int, ...]
    """Where each file ends, in bytes from the beginning of the corpus."""
    name: str
    """For messages: the path given, or the name of its default."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the text; a byte is a token."""
        return self.ends[-1]

    def require(self, seq_len: int) -> None:
        """Raise `ConfigError` unless a sample of `seq_len` tokens can be made from the text."""
        if self.num_bytes < seq_len:
            raise ConfigError(
                f"{self.name} holds {self.num_bytes} bytes, but one sample takes {seq_len}: "
                "give more text or a smaller --seq-len"
            )

    def sample(self, number: int, seq_len: int, seed: int) -> Tensor:
        """Sample `number`, int64 [seq_len], also the labels: the model does the shift by one. See [Note: sample order]."""
        self.require(seq_len)
        key = np.array([seed % 2**64, number % 2**64], dtype=np.uint64)
        start = int(np.random.Philox(key=key).random_raw()) * (self.num_bytes - seq_len + 1) >> 64
        return torch.from_numpy(np.frombuffer(self.read(start, seq_len), dtype=np.uint8).astype(np.int64))

    def batch(self, numbers: Sequence[int], seq_len: int, seed: int) -> Tensor:
        """The samples of `numbers`, int64 [len(numbers), seq_len]."""
        return torch.stack([self.sample(number, seq_len, seed) for number in numbers])

    def read(self, start: int, num_bytes: int) -> bytes:
        """The bytes from `start` on, across files; `ConfigError` when a file was truncated."""
        pieces = []
        index = bisect.bisect_right(self.ends, start)
        while num_bytes > 0:
            begin = self.ends[index - 1] if index else 0
            wanted = min(num_bytes, self.ends[index] - start)
            with self.files[index].open("rb", buffering=0) as stream:
                stream.seek(start - begin)
                pieces.append(stream.read(wanted))
            if len(pieces[-1]) != wanted:
                raise ConfigError(f"{self.files[index]}: the file was changed while the run read it")
            start += wanted
            num_bytes -= wanted
            index += 1
        return b"".join(pieces)


def open_corpus(path: str | os.PathLike[str] | None = None) -> Corpus:
    """The text file at `path`, or all files below the folder `path` in the order of their paths, hidden ones left out.

    Without a path the modules of Python's own standard library that are single files. Raises `ConfigError` for a path that
    is missing, cannot be read, or holds no text.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else Path(path).expanduser()
    name = f"the standard library ({root})" if path is None else str(root)
    if not root.exists():
        raise ConfigError(f"expected a text file or a folder of them, but {root} does not exist: check --data")
    if root.suffix in (".jsonl", ".ndjson", ".parquet", ".arrow"):
        raise ConfigError(f"{root}: expected plain text, got a file of rows: write their text to a file of its own")
    found = sorted(root.glob("*.py" if path is None else "**/*")) if root.is_dir() else [root]
    shown = (file for file in found if not any(part.startswith(".") for part in file.relative_to(root).parts))
    files = [file for file in shown if file.is_file()]
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
