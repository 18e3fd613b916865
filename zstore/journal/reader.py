"""Reading journals: whole, or on from the end of the last look. Local folders and those behind URLs alike.

[Note: samples of steps]
A long run has more steps than a curve has points. So whoever follows a journal keeps of its steps every n-th, and the newest
ones; n doubles whenever more than wanted are kept. Other lines are few, and are all read.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable

from ..checkpoint.folder import Folder, FolderLike, folder_at
from .lines import Record, decode, decode_lines
from .names import CHECKPOINT_FOLDER, journal_file, run_of

KINDS = frozenset({"start", "plan", "step", "save", "load", "eval", "metrics", "warning", "end"})
"""Records of other kinds are passed over."""

_BLOCK_BYTES = 16 * 1024 * 1024
_HEAD = 80
"""Bytes of a line in which its kind is."""
_MARKS = tuple((f'"kind":"{kind}"'.encode(), kind) for kind in ("step", "metrics", "eval"))


def journals(folder: FolderLike) -> list[str]:
    """Return the names of the journals in a folder, in alphabetical order; of a local one also the paths of those in folders
    `checkpoint-60` and `step=60.ckpt` that a loop makes. Raises FileNotFoundError if there is no folder."""
    place = folder_at(folder)
    entries = place.entries()
    found = list(entries.files)
    for name in entries.folders:
        if place.is_local and CHECKPOINT_FOLDER.fullmatch(name) and not (place.path / name).is_symlink():
            with contextlib.suppress(OSError):  # it may be removed meanwhile
                found += [f"{name}/{file}" for file in place.child(name).entries().files]
    return sorted(path for path in found if run_of(path) is not None)


def journal_of(folder: FolderLike, run_id: str) -> str:
    """Return the path of a run's journal in a folder, whether it is there or not. Raises FileNotFoundError if there is no
    folder."""
    return next((name for name in journals(folder) if run_of(name) == run_id), journal_file(run_id))


def read_from(folder: FolderLike, file: str, offset: int = 0) -> tuple[list[Record], int]:
    """Return the records of a journal from byte `offset` on, and the offset to go on from at the next call.

    Text behind the last newline is still being written, and is not read. At most 16 MiB are read: call again as long as
    the offset grows. A file that is shorter than `offset` was replaced, and is read from its beginning: the offset that is
    returned is then smaller than the one given. Raises FileNotFoundError if the file is missing.
    """
    place = folder_at(folder)
    size = place.size(file)
    data = _whole_lines(place, file, offset if offset <= size else 0, size)
    end = (offset if offset <= size else 0) + len(data)
    return [record for record in decode_lines(data) if record["kind"] in KINDS], end


def _whole_lines(place: Folder, file: str, start: int, size: int) -> bytes:
    data = place.read_range(file, start, min(size, start + _BLOCK_BYTES)) if start < size else b""
    end = data.rfind(b"\n") + 1
    return data[: end or (len(data) if len(data) == _BLOCK_BYTES else 0)]  # a line so long is no journal's


def read_file(folder: FolderLike, file: str) -> list[Record]:
    """Return all records of a journal."""
    place: Folder = folder_at(folder)
    records: list[Record] = []
    offset, before = 0, -1
    while offset > before:
        before = offset
        more, offset = read_from(place, file, offset)
        records += more
    return records


def read(folder: FolderLike, run_id: str | None = None) -> list[Record]:
    """Return the records of the journal of a run in a folder, by default the one whose last record is the newest.

    Raises FileNotFoundError if there is none.
    """
    place = folder_at(folder)
    if run_id is not None:
        return read_file(place, journal_of(place, run_id))
    found = [read_file(place, name) for name in journals(place)]
    if not found:
        raise FileNotFoundError(f"{place} has no journal: expected a file journal-RUN_ID.jsonl")
    return max(found, key=lambda records: records[-1]["at"] if records else 0.0)


class Sample:
    """Lines of which every n-th is kept, at most `most`, and the newest quarter of as many. See [Note: samples of steps]."""

    def __init__(self, most: int) -> None:
        self._most, self._every, self._count = most, 1, 0
        self._kept: list[tuple[int, bytes]] = []
        self._newest: deque[tuple[int, bytes]] = deque(maxlen=max(1, most // 4))

    def add(self, line: bytes) -> None:
        """Add the next line."""
        numbered = self._count, line
        if self._count % self._every == 0:
            self._kept.append(numbered)
            if len(self._kept) > self._most:
                self._every *= 2
                self._kept = [each for each in self._kept if each[0] % self._every == 0]
        self._newest.append(numbered)
        self._count += 1

    def records(self) -> list[Record]:
        """Return the records of the lines that are kept, in their order."""
        first = self._newest[0][0] if self._newest else 0
        lines = [line for number, line in self._kept if number < first] + [line for _, line in self._newest]
        return [record for line in lines if (record := decode(line)) is not None]

    @property
    def last(self) -> Record:
        """The last one, empty if there is none."""
        return (decode(self._newest[-1][1]) if self._newest else None) or {}


class Follower:
    """Reads a journal on whenever asked, and keeps a sample of its steps and of the loop's own numbers."""

    def __init__(self, folder: FolderLike, file: str, most_steps: int = 2000) -> None:
        self._folder, self._file, self._most = folder_at(folder), file, most_steps
        self.offset = 0
        """Bytes that were read."""
        self.identity: tuple[int, int] | None = None
        self.steps, self.metrics = Sample(most_steps), Sample(most_steps)

    def read_on(self) -> tuple[list[Record], bool]:
        """Return the new records but those that are sampled, unless they have numbers that are not finite, and whether another
        file took the name, so that everything is new. Raises FileNotFoundError if the file is missing."""
        size, identity = self._folder.size(self._file), self._identity()
        is_other = self.offset > size or (self.identity is not None and identity != self.identity)
        self.identity = identity
        if is_other:
            self.offset, self.steps, self.metrics = 0, Sample(self._most), Sample(self._most)
        found: list[Record] = []
        while data := _whole_lines(self._folder, self._file, self.offset, size):
            self.offset += len(data)
            found += self._take(data.split(b"\n"))
        return found, is_other

    def _take(self, lines: Iterable[bytes]) -> list[Record]:
        found = []
        for line in lines:
            sample = next((self._samples[kind] for mark, kind in _MARKS if line.find(mark, 0, _HEAD) >= 0), None)
            if sample is not None:
                sample.add(line)
                if b'"not_finite":{' not in line:
                    continue  # which are most: they are not decoded
            record = decode(line) if line else None
            if record is None or record["kind"] not in KINDS:
                continue
            if (
                sample is None and record["kind"] in self._samples
            ):  # of another writer, who puts blanks or keys elsewhere
                self._samples[record["kind"]].add(line)
                if "not_finite" not in record:
                    continue
            found.append(record)
        return found

    @property
    def _samples(self) -> dict[str, Sample]:
        return {"step": self.steps, "metrics": self.metrics, "eval": self.metrics}

    def _identity(self) -> tuple[int, int]:
        if not self._folder.is_local:
            return 0, 0
        status = os.stat(self._folder.path / self._file)
        return status.st_dev, status.st_ino
