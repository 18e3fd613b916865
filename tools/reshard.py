"""`zstore reshard`: the same state laid out for another number of ranks, or compressed, here or behind a URL. No torch."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from zstore.checkpoint import ArraySource, CheckpointReader, open_checkpoint, reshard_checkpoint
from zstore.errors import UsageError
from zstore.remote import is_url, shown, upload_checkpoint
from zstore.sizes import format_bytes

from .opening import DEFAULTS, Common, open_location, print_json, reading
from .progress import Progress


def reshard_command(
    ckpt: str | os.PathLike[str],
    out: Path | None,
    world_size: int | None = None,
    *,
    codec: str = "none",
    to: str | None = None,
    common: Common = DEFAULTS,
) -> int:
    """Write the checkpoint `ckpt` laid out for `world_size` ranks (default: as many as it has) into the folder `out`, its
    chunks compressed with `codec`; return the exit code.

    With `to` it is then uploaded to the folder of checkpoints at that URL; without `out` it lies in a temporary folder
    meanwhile, and where neither layout nor codec is asked for a checkpoint on this machine is uploaded as it is. The tag
    stays the same. Raises CheckpointExistsError where `out` or `to` has it already.
    """
    if to is None and out is None:
        raise UsageError("name the folder to write as OUT, or with --to the URL to upload to")
    if to is not None and not is_url(to):
        raise UsageError(f"--to {to}: expected a URL, as s3://bucket/run; a folder is named as OUT")
    with open_location(ckpt, common) as source, _folder(out) as folder:
        ranks = source.record.world_size if world_size is None else world_size
        document: dict[str, object] = {"world_size": ranks, "codec": codec}
        path = _as_it_is(source) if (out, world_size, codec) == (None, None, "none") else None
        if path is None:
            path, facts = _reshard(source, folder, ranks, codec)
            document |= facts
        if to is not None:
            document |= _upload(path, to, common)
    if common.json:
        print_json({"path": str(path), **document})
    return 0


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="zstore-reshard-") as folder:
        yield Path(folder)


def _as_it_is(source: ArraySource) -> Path | None:
    """Return the folder of a checkpoint of zstore's on this machine, None for others."""
    return source.path if isinstance(source, CheckpointReader) and source.folder.is_local else None


def _reshard(source: ArraySource, out: Path, ranks: int, codec: str) -> tuple[Path, dict[str, object]]:
    total = sum(array.spec.nbytes for array in source.arrays.values())
    with Progress(f"reshard {source.location}", total) as progress:
        how = "" if codec == "none" else f", compressed with {codec}"
        progress.say(
            f"plan: {len(source.arrays)} arrays of {format_bytes(total)}, from {source.record.world_size} to "
            f"{ranks} rank(s){how}, into {out}"
        )
        path = reshard_checkpoint(source, out, ranks, progress.advance, codec=codec)
        read = reading(source, progress)
        file_bytes = _file_bytes(path)
        ratio = total / file_bytes if file_bytes else 1.0
        progress.say(
            f"wrote {path} for {ranks} rank(s), from {source.record.world_size}, in {format_bytes(file_bytes)}"
            + ("" if codec == "none" else f" (compressed {ratio:.2f} times)")
        )
    return path, {"file_bytes": file_bytes, **read, **progress.summary()}


def _file_bytes(path: Path) -> int:
    with open_checkpoint(path) as written:
        return sum(array.file_bytes for array in written.arrays.values())


def _upload(path: Path, url: str, common: Common) -> dict[str, object]:
    with Progress(f"upload {path.name} to {shown(url)}", _file_bytes(path)) as progress:
        place, messages = upload_checkpoint(path, url, common.storage_options, advance=progress.advance)
        for message in messages:
            progress.say(message)
        progress.say(f"uploaded to {place}")
    return {"url": place, "upload": progress.summary()}
