"""Files of the run folder that small shards share, so that neighbours go to and from the drive in one request.

[Note: shared files]
A shard of 64 to 256 KiB would be a separate request. Those whose arrays are of one kind (the first part of the name)
are neighbours in one file, a pack, in the order in which they were made, which is the order of passes: each has a
region, whole slots without an index. A pass brings several groups of them in one buffer, laid out as in the file, so
that adjacent regions are one request.

A version is a region. A pack has generations: files of the same regions, made as pins ask for them. While a shard's
version is pinned a pass writes its region of another generation. A snapshot pins all, so all of them change to the same
generation, and stay adjacent. Regions that are not adjacent, since some were pinned alone, only take more requests.

A checkpoint's file cannot be a link of a region: it is written from it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...errors import StorageError
from ...format.arrays import Bytes
from ...format.shardfile import ShardLayout
from ...io.files import Files

PACKED_BYTES = 256 * 1024
"""Shards whose values are fewer bytes share a file."""
MANY_SMALL = 64
"""From so many small shards on they share files: the requests of fewer cost less than links to their files save."""


def is_packed(nbytes: int) -> bool:
    """Return whether a shard on disk of so many bytes, padding left out, may share a file with others."""
    return 0 < nbytes < PACKED_BYTES


def run_file_bytes(layout: ShardLayout, *, packed: bool) -> int:
    """Return a shard's bytes in the run folder: of its file, or of its part of one."""
    return layout.file_bytes - (layout.data_offset if packed else 0)


class Pack:
    """The generations of one file of regions; `path(n)` is the path of number n. Usable from any thread."""

    def __init__(self, files: Files, folder: Path, kind: str) -> None:
        self._files = files
        self._stem = folder / f"{kind}-pack"
        self._reserved: list[int] = [0]
        """Bytes that the file of each generation has."""
        self.nbytes = 0
        """Bytes up to the end of the last region."""
        self._free: dict[int, list[int]] = {}
        """Offsets of regions that were given back, by size."""
        self._lock = threading.Lock()

    def path(self, generation: int) -> Path:
        """Return the file of a generation."""
        return self._stem.with_name(f"{self._stem.name}.{generation}.shard")

    def add(self, nbytes: int) -> int:
        """Return the offset of a new region of `nbytes`; its space in the first generation is reserved."""
        with self._lock:
            if self._free.get(nbytes):
                return self._free[nbytes].pop()
            self._reserve(0, self.nbytes + nbytes)
            self.nbytes += nbytes
            return self.nbytes - nbytes

    def give_back(self, offset: int, nbytes: int) -> None:
        """Let a region be used by another shard of that size."""
        with self._lock:
            self._free.setdefault(nbytes, []).append(offset)

    def missing_bytes(self, generation: int) -> int:
        """Return the bytes that `make` of the generation takes on the drive."""
        made = self._reserved[generation] if generation < len(self._reserved) else 0
        return max(self.nbytes - made, 0)

    def make(self, generation: int) -> Path:
        """Return the file of a generation, with space for every region."""
        with self._lock:
            while len(self._reserved) <= generation:
                self._reserved.append(0)
            self._reserve(generation, self.nbytes)
        return self.path(generation)

    def _reserve(self, generation: int, nbytes: int) -> None:
        if nbytes <= self._reserved[generation]:
            return
        path = self.path(generation)
        is_new = not self._reserved[generation]
        with self._files.opened(path, write=True, create=is_new) as file:
            try:
                self._files.allocate(file, nbytes)
            except StorageError:
                if is_new:
                    self._files.unlink(path)
                raise
        self._reserved[generation] = nbytes

    def close(self) -> None:
        """Remove the files."""
        for generation, nbytes in enumerate(self._reserved):
            if nbytes:
                self._files.unlink(self.path(generation))
        self._reserved, self.nbytes, self._free = [0], 0, {}


@dataclass(frozen=True, kw_only=True)
class PackRun:
    """Bytes of one file, from `offset` on, in the same order in memory."""

    path: Path
    offset: int
    first: int
    """Their offset in memory."""
    nbytes: int

    def of(self, memory: Bytes) -> Bytes:
        """Return them."""
        return memory[self.first : self.first + self.nbytes]


def runs_of(places: Iterable[PackRun]) -> list[PackRun]:
    """Return as few runs as cover `places`."""
    found: list[PackRun] = []
    for place in sorted(places, key=lambda one: (str(one.path), one.offset)):
        last = found[-1] if found else None
        if last and (last.path, last.offset + last.nbytes, last.first + last.nbytes) == (
            place.path,
            place.offset,
            place.first,
        ):
            found[-1] = PackRun(path=last.path, offset=last.offset, first=last.first, nbytes=last.nbytes + place.nbytes)
        else:
            found.append(place)
    return found
