"""The size of checkpoints on disk: the bytes of their files, and which of them other names share.

[Note: sizes]
Three numbers describe a checkpoint, each with one name in every command and page: its *array data* are the values alone;
its *shard files* hold these with index, checksums and padding; its *size on disk* is that of all its files, metadata and
manifests included, as `ls -l` shows it. A file that has several names (hard links) is *shared*; removing a checkpoint
*frees* the files that have no name outside of it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .folder import FolderLike, folder_at


@dataclass(frozen=True)
class StoredFile:
    """A file."""

    nbytes: int
    names_here: int
    """Hard links to it in the checkpoint."""
    names: int
    """Hard links to it anywhere."""


@dataclass(frozen=True)
class StoredFiles:
    """The files of one checkpoint, each once; behind a URL, where files have one name each, all of them as one."""

    files: Mapping[Hashable, StoredFile]
    """By a key that is the same for the same file of any checkpoint."""
    num_files: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, each once."""
        return sum(file.nbytes for file in self.files.values())

    @property
    def freed_bytes(self) -> int:
        """Bytes that removing the checkpoint frees."""
        return sum(file.nbytes for file in self.files.values() if file.names_here >= file.names)


def stored_files(place: FolderLike) -> StoredFiles:
    """Return the files of the checkpoint in the tag's folder `place`; those that somebody else removes are left out."""
    folder = folder_at(place)
    if not folder.is_local:
        sizes = folder.sizes("").values()
        return StoredFiles({folder.location: StoredFile(sum(size or 0 for size in sizes), 1, 1)}, len(sizes))
    found: dict[Hashable, StoredFile] = {}
    num_files = 0
    for parent, _, names in os.walk(folder.path):
        for name in names:
            try:
                status = os.lstat(os.path.join(parent, name))
            except OSError:
                continue
            num_files += 1
            key = status.st_dev, status.st_ino
            here = found[key].names_here if key in found else 0
            found[key] = StoredFile(status.st_size, here + 1, status.st_nlink)
    return StoredFiles(found, num_files)


def shared_bytes(tables: Sequence[StoredFiles]) -> list[int]:
    """Return, of each checkpoint, the bytes of the files that others of them have too."""
    holders = Counter(key for table in tables for key in table.files)
    return [sum(file.nbytes for key, file in table.files.items() if holders[key] > 1) for table in tables]


def joined_files(tables: Iterable[StoredFiles]) -> StoredFiles:
    """Return the files of several checkpoints together: what removing all of them frees is no sum."""
    found: dict[Hashable, StoredFile] = {}
    num_files = 0
    for table in tables:
        num_files += table.num_files
        for key, file in table.files.items():
            here = found[key].names_here if key in found else 0
            found[key] = replace(file, names_here=here + file.names_here)
    return StoredFiles(found, num_files)
