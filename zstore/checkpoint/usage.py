"""The size of checkpoints on disk: the bytes of their files, and which of them other names share.

[Note: sizes]
Three numbers describe a checkpoint, each with one name in every command and page: its *array data* are the values alone;
its *shard files* hold these with index, checksums and padding; its *size on disk* is that of all its files, metadata and
manifests included, as `ls -l` shows it. A file that has several names (hard links) is *shared*; removing a checkpoint
*frees* the files that have no name outside of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .folder import FolderLike, folder_at

Numbers = npt.NDArray[np.int64]


@dataclass
class StoredFiles:
    """The files of one checkpoint, each once; behind a URL, where files have one name each, all of them as one."""

    keys: Numbers
    """The same for the same file of any checkpoint."""
    sizes: Numbers
    names_here: Numbers
    """Hard links to it in the checkpoint."""
    names: Numbers
    """Hard links to it anywhere."""
    paths: str
    """One path of each, separated by NUL."""
    num_files: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, each once."""
        return int(self.sizes.sum())

    @property
    def freed_bytes(self) -> int:
        """Bytes that removing the checkpoint frees."""
        return int(self.sizes[self.names_here >= self.names].sum())

    def count_again(self, which: npt.NDArray[np.bool_]) -> None:
        """Count the names of the chosen files again."""
        if which.any():
            paths = self.paths.split("\0")
            for place in np.flatnonzero(which):
                try:
                    self.names[place] = os.lstat(paths[place]).st_nlink
                except OSError:
                    self.names[place] = self.names_here[place]


def stored_files(place: FolderLike, listed: Mapping[str, int | None] | None = None) -> StoredFiles:
    """Return the files of the checkpoint in the tag's folder `place`; those that somebody else removes are left out.

    `listed` are the sizes of its files behind a URL, if somebody has them.
    """
    folder = folder_at(place)
    if not folder.is_local:
        plain = list((folder.sizes("") if listed is None else listed).values())
        key, nbytes = hash(folder.location) & (2**63 - 1), sum(size or 0 for size in plain)
        ones = np.ones(1, np.int64)
        return StoredFiles(np.array([key]), np.array([nbytes], np.int64), ones, ones.copy(), "", len(plain))
    found: dict[int, list[Any]] = {}
    num_files = 0
    waiting = [str(folder.path)]
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
                continue
            try:
                status = os.lstat(entry.path)
            except OSError:
                continue
            num_files += 1
            # Two file systems in one checkpoint are rare, but their inodes must not be mixed up.
            key = (status.st_ino ^ status.st_dev << 44) & (2**63 - 1)
            if key in found:
                found[key][1] += 1
            else:
                found[key] = [status.st_size, 1, status.st_nlink, entry.path]
    rows = list(found.values())
    sizes, names_here, names = (np.array([row[n] for row in rows], np.int64) for n in range(3))
    paths = "\0".join(row[3] for row in rows)
    return StoredFiles(np.array(list(found), np.int64), sizes, names_here, names, paths, num_files)


@dataclass(frozen=True, kw_only=True)
class SharedFiles:
    """Of the files of several checkpoints, by checkpoint:"""

    num_holders: list[Numbers]
    """For each file the number of checkpoints that have it."""
    names_seen: list[Numbers]
    """For each file the number of its names in all checkpoints."""
    total_bytes: int
    """Bytes of all files, each once."""
    freed_bytes: int
    """Bytes that removing all checkpoints frees."""


def shared_files(tables: Sequence[StoredFiles]) -> SharedFiles:
    """Return which files checkpoints share."""
    if not tables:
        return SharedFiles(num_holders=[], names_seen=[], total_bytes=0, freed_bytes=0)
    keys, sizes, names_here, names = (
        np.concatenate([getattr(table, name) for table in tables]) for name in ("keys", "sizes", "names_here", "names")
    )
    _, first, places, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    seen = np.bincount(places, weights=names_here, minlength=first.size).astype(np.int64)
    ends = np.cumsum([table.keys.size for table in tables])[:-1]
    return SharedFiles(
        num_holders=np.split(counts[places], ends),
        names_seen=np.split(seen[places], ends),
        total_bytes=int(sizes[first].sum()),
        freed_bytes=int(sizes[first][seen >= names[first]].sum()),
    )


def bytes_freed(places: Iterable[FolderLike]) -> int:
    """Return the bytes that removing all the checkpoints `places` frees: a file that has another name elsewhere stays."""
    return shared_files([stored_files(place) for place in places]).freed_bytes
