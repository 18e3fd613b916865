"""Shard files of earlier checkpoints that still hold what a shard holds: the next checkpoint links them.

[Note: links of unchanged shards]
A shard of which no pass changed anything has the version that it had when it was saved. Its file is then linked from that
checkpoint, where it is still the very file that was written, and the checksums of what is in memory now are those of the
file: whoever has a parameter may have written to its memory without a pass. Else the shard is written.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import StorageError
from ..io.files import Files


@dataclass(frozen=True, kw_only=True)
class KnownFile:
    """A shard file in a committed checkpoint."""

    version: int
    """Of the shard that it holds; see `Tier.version`."""
    path: Path
    crcs: tuple[int, ...]
    """crc32c of each present chunk."""
    identity: tuple[int, ...]
    """What no other file has, nor this one after a write."""

    @staticmethod
    def of(
        path: Path, *, version: int | None, crcs: tuple[int, ...], written_as: Path | None = None
    ) -> KnownFile | None:
        """Return the file that is at `written_as` now and at `path` later (None: it is there); None where there is none.

        None as well for a version that is not known.
        """
        identity = _identity(written_as or path)
        if version is None or identity is None:
            return None
        return KnownFile(version=version, path=path, crcs=crcs, identity=identity)

    def is_there(self) -> bool:
        """Return whether the file is still there, unchanged."""
        return _identity(self.path) == self.identity

    def link(self, files: Files, target: Path) -> bool:
        """Make the hard link `target`; false, and nothing made, where the file is another one now or cannot be linked."""
        if not self.is_there():
            return False
        try:
            files.link(self.path, target)
        except OSError:
            return False
        # It may have been replaced meanwhile.
        if _identity(target) == self.identity:
            return True
        with contextlib.suppress(StorageError):
            files.unlink(target)
        return False


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
