"""The size of checkpoints on disk: the bytes of their files, and which of them other names share.

[Note: sizes]
Three numbers describe a checkpoint, each with one name in every command and page: its *array data* are the values alone;
its *shard files* hold these with index, checksums and padding; its *size on disk* is that of all its files, metadata and
manifests included, as `ls -l` shows it. A file that has several names (hard links) is *shared*; removing a checkpoint
*frees* the files that have no name outside of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .folder import FolderLike, folder_at

FileKey = tuple[int, int] | str
"""Device and inode of a file; behind a URL, where files have one name each, the checkpoint's location for all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file of one or more checkpoints."""

    num_bytes: int
    num_names: int = 1
    """Hard links to it, anywhere."""
    names_seen: int = 1
    """Those of them in the checkpoints that were examined."""

    @property
    def is_freed(self) -> bool:
        """Whether removing the names that were found frees it."""
        return self.names_seen >= self.num_names


def stored_files(place: FolderLike) -> dict[FileKey, StoredFile]:
    """Return the files of the checkpoint in the tag's folder `place`."""
    folder = folder_at(place)
    if not folder.is_local:
        return {folder.location: StoredFile(num_bytes=sum(size or 0 for size in folder.sizes("").values()))}
    files: dict[FileKey, StoredFile] = {}
    for parent, _, names in os.walk(folder.path):
        for name in names:
            try:
                status = os.lstat(os.path.join(parent, name))
            except FileNotFoundError:  # somebody else removes it
                continue
            key = (status.st_dev, status.st_ino)
            seen = files[key].names_seen if key in files else 0
            files[key] = StoredFile(num_bytes=status.st_size, num_names=status.st_nlink, names_seen=seen + 1)
    return files


def size_bytes(files: Mapping[FileKey, StoredFile]) -> int:
    """Return the bytes of all files, each once."""
    return sum(file.num_bytes for file in files.values())


def count_files(place: FolderLike) -> tuple[int, int]:
    """Return how many files the checkpoint in the tag's folder `place` has, and its size on disk in bytes."""
    folder = folder_at(place)
    if folder.is_local:
        files = stored_files(folder)
        return sum(file.names_seen for file in files.values()), size_bytes(files)
    sizes = folder.sizes("")
    return len(sizes), sum(size or 0 for size in sizes.values())


def bytes_freed(places: Iterable[FolderLike]) -> int:
    """Return the bytes that removing all the checkpoints `places` frees: a file that has another name elsewhere stays."""
    found: dict[FileKey, StoredFile] = {}
    for place in places:
        for key, file in stored_files(place).items():
            before = found[key].names_seen if key in found else 0
            found[key] = replace(file, names_seen=before + file.names_seen)
    return sum(file.num_bytes for file in found.values() if file.is_freed)
