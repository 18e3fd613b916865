"""The folder of a snapshot that goes, used again for the next: making hundreds of files and folders is most of what a
small save costs.

[Note: spare folders]
A spare folder is what a committed checkpoint was, under the name of a save that is alive, so that nobody sweeps it. It has no
record, no manifests, and no file that was linked into it, whose bytes would stay on the drive for nothing. What it has is
the metadata, the folders, and the shards that were written: `UnsyncedFiles` writes them anew in place, where no other
name leads to them. A save takes it only where it has the same arrays, laid out alike: nothing else may be in it.
"""

from __future__ import annotations

from ..errors import ZstoreError
from .catalog import TagInfo, scan
from .commit import discard
from .format import Manifest, read_json
from .lock import SaveLock
from .names import LOCK, RECORD_FILE, TEMPORARY, manifest_file, new_save_id, own_name
from .request import SaveRequest, Spare


def lay_aside(request: SaveRequest, metadata_sha256: str) -> tuple[Spare | None, list[str]]:
    """Remove what `request.run_id` committed before its newest in the folder, and make a spare folder of the last of it.

    `metadata_sha256` is that of the request. Returns the spare folder, None where none is as the request would have it,
    and what the user should know.
    """
    files, messages = request.resources.files, []
    spare: Spare | None = None
    own = [info for info in scan(request.folder).tags if info.record.run == request.run_id]
    for info in reversed(own[:-1]):
        try:
            fits = (info.record.metadata_sha256, info.record.world_size) == (metadata_sha256, request.world_size)
            if spare is None and fits:
                spare = _strip(request, info)
            else:
                discard(files, info.path)
        except (OSError, ZstoreError) as error:
            messages.append(f"snapshot {info.tag!r} is not needed any more, but could not be removed: {error}")
    return spare, messages


def _strip(request: SaveRequest, info: TagInfo) -> Spare:
    """Make a spare folder of a checkpoint with the arrays of `request`."""
    files, ranks = request.resources.files, range(request.world_size)
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
                    files.unlink(path / request.shard_path(entry.array, entry.shard))
    except BaseException:
        # What is left under that name is swept by the next save.
        lock.release()
        raise
    return Spare(path=path, metadata_sha256=info.record.metadata_sha256, lock=lock)
