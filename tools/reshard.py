"""`zstore reshard`: the same state for another number of ranks, or compressed, in a folder or at a URL. No torch."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from zstore.checkpoint import ArraySource, CheckpointReader, open_checkpoint, reshard_checkpoint, stored_files
from zstore.errors import CheckpointExistsError, format_bytes, format_count, shown
from zstore.io import is_url, user_location
from zstore.remote.upload import upload_checkpoint
from zstore.weights.from_checkpoint import Companions

from .options import DEFAULTS, Common, Location, Tag, array_bytes, open_location, report_left_behind, reporting
from .printing import ProgressBar


def reshard_command(
    ckpt: Location,
    out: Annotated[
        str,
        typer.Argument(metavar="OUT", help="Folder of checkpoints to write to, or its URL.", parser=user_location),
    ],
    world_size: Annotated[
        int | None,
        typer.Option(help="Number of ranks to partition the state for (default: unchanged).", min=1, metavar="N"),
    ] = None,
    *,
    tag: Tag = None,
    compression: Annotated[
        Literal["none", "zstd"],
        typer.Option(help="Compress the chunks; the result reads like any checkpoint."),
    ] = "none",
    common: Common = DEFAULTS,
) -> int:
    """Write the checkpoint `ckpt`, of a folder `tag` or the newest, laid out for `world_size` ranks (default: as many as it
    has) into `out`, its chunks compressed with `compression`; return the exit code.

    The tag stays the same. To a URL goes a copy in a temporary folder, or a checkpoint of this machine unchanged if neither
    layout nor compression is asked for. With `json`, one object: `path` or `url`, and the bytes read and written. Raises
    CheckpointExistsError if `out` has it already.
    """
    place = user_location(out)
    with contextlib.ExitStack() as temporary:
        with open_location(ckpt, common, tag) as source:
            ranks = source.record.world_size if world_size is None else world_size
            is_unchanged = is_url(place) and isinstance(source, CheckpointReader) and source.folder.is_local
            if is_unchanged and (world_size, compression) == (None, "none"):
                path = Path(source.location)
            else:
                folder = Path(place)
                if is_url(place):
                    folder = Path(temporary.enter_context(tempfile.TemporaryDirectory(prefix="zstore-reshard-")))
                part = replace(common, json=common.json and not is_url(place))
                path = _reshard(source, folder, ranks, compression, part, shown(place))
        if is_url(place):  # the source's buffers are free again
            with reporting(f"upload {path.name} to {shown(place)}", common, total_bytes=_file_bytes(path)) as progress:
                url, messages = upload_checkpoint(
                    path,
                    place,
                    common.storage_options,
                    advance=progress.advance,
                    memory_bytes=None if common.memory_bytes is None else common.free_bytes,
                )
                for message in messages:
                    progress.say(message)
                progress.say(f"uploaded to {url}")
                progress.document |= {"url": url, "world_size": ranks, "compression": compression}
    return 0


def reshard_into(
    source: ArraySource, folder: Path, ranks: int, progress: ProgressBar, *, compression: str = "none"
) -> Path:
    """Write the checkpoint into `folder`, laid out for `ranks`; return the tag's folder.

    Raises CheckpointExistsError if its tag exists already.
    """
    try:
        beside = Companions.of(source, with_parent=False)
        path = reshard_checkpoint(
            source,
            folder,
            ranks,
            progress.advance,
            codec=compression,
            before_commit=lambda tag: beside.copy_into_checkpoint(tag, source.resources.files),
        )
    except CheckpointExistsError as error:
        raise CheckpointExistsError(
            f"{folder} has a checkpoint {source.tag!r} already: name another folder, or remove that one first"
        ) from error
    if beside.copied:
        progress.say(f"copied into the checkpoint: {', '.join(beside.copied)}")
    report_left_behind(progress, beside)
    return path


def _reshard(source: ArraySource, folder: Path, ranks: int, compression: str, common: Common, shown_place: str) -> Path:
    """Write it into a folder, and say so; of one that is temporary `shown_place` is the URL that it goes to."""
    total_bytes = array_bytes(source)
    compressed = "" if compression == "none" else f", compressed with {compression}"
    plan = (
        f"plan: {format_count(len(source.arrays), 'array')}, {format_bytes(total_bytes)} of array data, from "
        f"{source.record.world_size} to {format_count(ranks, 'rank')}{compressed}, into {shown_place}"
    )
    with reporting(f"reshard {source.location}", common, source, total_bytes=total_bytes) as progress:
        progress.say(plan)
        for note in source.notes:
            progress.say(f"not carried over: {note}")
        path = reshard_into(source, folder, ranks, progress, compression=compression)
        file_bytes, files = _file_bytes(path), stored_files(path)
        ratio = f", the array data compressed {total_bytes / (file_bytes or 1):.2f} times" if compressed else ""
        progress.say(
            f"wrote {source.tag} for {format_count(ranks, 'rank')}: {format_bytes(files.size_bytes)} on disk in "
            f"{format_count(files.num_files, 'file')}{ratio}"
        )
        progress.document |= {
            "path": str(path),
            "world_size": ranks,
            "compression": compression,
            "file_bytes": file_bytes,
            "size_bytes": files.size_bytes,
        }
    return path


def _file_bytes(path: Path) -> int:
    with open_checkpoint(path) as written:
        return sum(array.file_bytes for array in written.arrays.values())
