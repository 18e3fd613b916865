"""Files of earlier checkpoints that the next one of the run links.

[Note: links of unchanged shards]
A shard of which no pass changed anything has the version that it had when it was saved. Its file is then linked from that
checkpoint, if it is still the very file that was written, and the checksums of the values in memory are those of the
file: any code with a parameter may have written to its memory without a pass. Otherwise the shard is written.
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
    """Version of the shard that it holds; see `Tier.version`."""
    path: str
    crcs: tuple[int, ...]
    """crc32c of each present chunk."""
    device: int
    """Number of the file system."""
    identity: str
    """An identity that no other file there has, nor this one after a write."""

    @staticmethod
    def of(
        path: str | Path, *, version: int | None, crcs: tuple[int, ...], written_as: Path | None = None
    ) -> KnownFile | None:
        """Return the file that is at `written_as` now and at `path` later (None: it is there); None if there is none.

        None as well for a version that is not known.
        """
        found = _identity(written_as or path)
        if version is None or found is None:
            return None
        return KnownFile(version=version, path=str(path), crcs=crcs, device=found[0], identity=found[1])

    def is_there(self) -> bool:
        """Return whether the file is still there, unchanged."""
        return self._is(self.path)

    def _is(self, path: str | Path) -> bool:
        return _identity(path) == (self.device, self.identity)

    def link(self, files: Files, target: Path) -> bool:
        """Make the hard link `target`; false, and nothing made, if the file is another one now or cannot be linked."""
        if not self.is_there():
            return False
        try:
            files.link(self.path, target)
        except OSError:
            return False
        # It may have been replaced meanwhile.
        if self._is(target):
            return True
        with contextlib.suppress(StorageError):
            files.unlink(target)
        return False


def _identity(path: str | Path) -> tuple[int, str] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    # One object, which the collector does not count: see [Note: objects of a save].
    return found.st_dev, f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"
