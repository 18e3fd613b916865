"""Parts of earlier checkpoints for the next one of the run: files to link, and the folder of one that goes.

[Note: links of unchanged shards]
A shard of which no pass changed anything has the version that it had when it was saved. Its file is then linked from that
checkpoint, if it is still the very file that was written, and the checksums of the values in memory are those of the
file: any code with a parameter may have written to its memory without a pass. Otherwise the shard is written.

[Note: spare folders]
A spare folder is a formerly committed checkpoint under the name of a living save, so that nobody sweeps it. It has no
record, no manifests, and no file that was linked into it, whose bytes would stay on the drive for nothing. It has
the metadata, the folders, and the shards that were written: `UnsyncedFiles` rewrites them in place, if no other
name leads to them. A save takes it only if it has the same arrays, laid out alike: it may hold nothing else.
Making hundreds of files and folders is most of the cost of a small save.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import StorageError
from ..io.files import Files
from .catalog import TagInfo, noting, scan
from .commit import discard
from .format import Manifest, read_json
from .lock import SaveLock
from .names import LOCK, RECORD_FILE, TEMPORARY, manifest_file, new_save_id, own_name
from .plan import CheckpointPlan


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


@dataclass(frozen=True, kw_only=True)
class Spare:
    """A spare folder. Give it to the next request of the same run, or `remove` it. See [Note: spare folders]."""

    path: Path
    metadata_sha256: str
    """SHA-256 of its root's metadata, which names all arrays."""
    lock: SaveLock

    def take(self, files: Files, path: Path) -> None:
        """Let the folder be `path` from now on. Raises StorageError if it is gone."""
        files.rename(self.path, path)
        self.lock.release()

    def remove(self, files: Files) -> None:
        """Remove the folder."""
        with self.lock:
            files.remove_tree(self.path)


def make_spare(
    files: Files, folder: Path, plan: CheckpointPlan, metadata_sha256: str
) -> tuple[Spare | None, list[str]]:
    """Remove all but the newest checkpoint of `plan`'s run in `folder`, and make a spare folder of the last one removed.

    `metadata_sha256` is that of `plan`. Returns the spare folder, None if no checkpoint has the arrays of `plan`, and
    messages for the user.
    """
    messages: list[str] = []
    spare: Spare | None = None
    own = [info for info in scan(folder).tags if info.record.run == plan.run_id]
    for info in reversed(own[:-1]):
        with noting(messages, f"snapshot {info.tag!r} is not needed any more, but could not be removed"):
            fits = (info.record.metadata_sha256, info.record.world_size) == (metadata_sha256, plan.world_size)
            if spare is None and fits:
                spare = _strip(files, plan, info)
            else:
                discard(files, info.path)
    return spare, messages


def _strip(files: Files, plan: CheckpointPlan, info: TagInfo) -> Spare:
    """Make a spare folder of a checkpoint with the arrays of `plan`."""
    ranks = range(plan.world_size)
    manifests = [Manifest.decode(read_json(info.path / manifest_file(rank)), str(info.path)) for rank in ranks]
    save_id = new_save_id()
    lock = SaveLock(info.path.with_name(own_name(info.path.name, LOCK, save_id)))
    path = info.path.with_name(own_name(info.path.name, TEMPORARY, save_id))
    try:
        files.rename(info.path, path)
        files.unlink(path / RECORD_FILE)
        for rank, manifest in zip(ranks, manifests, strict=True):
            files.unlink(path / manifest_file(rank))
            for entry in manifest.shards:
                if entry.linked:
                    files.unlink(path / plan.shard_path(entry.array, entry.shard))
    except BaseException:
        # Leftovers under that name are swept by the next save.
        lock.release()
        raise
    return Spare(path=path, metadata_sha256=info.record.metadata_sha256, lock=lock)
