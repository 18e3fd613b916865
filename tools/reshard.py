"""`zstore reshard`: copies a checkpoint for another number of ranks, or compressed, to a folder or URL. No torch."""

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

from .options import DEFAULTS, Common, Location, Tag, array_bytes, open_location, report_skipped, reporting
from .printing import ProgressBar


def reshard_command(
    ckpt: Location,
    out: Annotated[
        str,
        typer.Argument(metavar="OUT", help="Folder of checkpoints to write to, or its URL.", parser=user_location),
    ],
    world_size: Annotated[
        int | None,
        typer.Option(help="Number of ranks to partition the state for (default: the same).", min=1, metavar="N"),
    ] = None,
    *,
    tag: Tag = None,
    compression: Annotated[
        Literal["none", "zstd"],
        typer.Option(help="Compress the chunks; the result is read like any checkpoint."),
    ] = "none",
    common: Common = DEFAULTS,
) -> int:
    """Write the checkpoint `ckpt` (in a folder of checkpoints: `tag`, or the newest) to `out`, partitioned for `world_size`
    ranks (default: its own), with its chunks compressed with `compression`; return the exit code.

    The tag stays the same. For a URL, a copy is made in a temporary folder and uploaded; a local checkpoint that needs no
    change is uploaded directly. With `json`, one object: `path` or `url`, and the bytes read and written. Raises
    CheckpointExistsError if `out` already has the checkpoint.
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
                options = replace(common, json=common.json and not is_url(place))
                path = _reshard(source, folder, ranks, compression, options, shown(place))
        if is_url(place):  # the source's buffers have been freed
            with reporting(f"upload {path.name} to {shown(place)}", common, total_bytes=_file_bytes(path)) as progress:
                url, messages = upload_checkpoint(
                    path,
                    place,
                    common.storage_options,
                    advance=progress.advance,
                    memory_bytes=None if common.memory_bytes is None else common.free_bytes,
                )
                for message in messages:
                    progress.print_line(message)
                progress.print_line(f"uploaded to {url}")
                progress.document |= {"url": url, "world_size": ranks, "compression": compression}
    return 0


def reshard_into(
    source: ArraySource, folder: Path, ranks: int, progress: ProgressBar, *, compression: str = "none"
) -> Path:
    """Write the checkpoint to `folder`, partitioned for `ranks`; return the tag's folder.

    Raises CheckpointExistsError if its tag already exists.
    """
    try:
        companions = Companions.of(source, with_parent=False)
        path = reshard_checkpoint(
            source,
            folder,
            ranks,
            progress.advance,
            codec=compression,
            before_commit=lambda tag: companions.copy_into_checkpoint(tag, source.resources.files),
        )
    except CheckpointExistsError as error:
        raise CheckpointExistsError(
            f"{folder} already has a checkpoint {source.tag!r}: choose another folder, or remove that one first"
        ) from error
    if companions.copied:
        progress.print_line(f"copied into the checkpoint: {', '.join(companions.copied)}")
    report_skipped(progress, companions)
    return path


def _reshard(source: ArraySource, folder: Path, ranks: int, compression: str, common: Common, destination: str) -> Path:
    """Write the checkpoint to a folder and report it; `destination` is the final folder or URL, for messages."""
    total_bytes = array_bytes(source)
    compressed = "" if compression == "none" else f", compressed with {compression}"
    plan = (
        f"plan: {format_count(len(source.arrays), 'array')}, {format_bytes(total_bytes)} of array data, from "
        f"{source.record.world_size} to {format_count(ranks, 'rank')}{compressed}, into {destination}"
    )
    with reporting(f"reshard {source.location}", common, source, total_bytes=total_bytes) as progress:
        progress.print_line(plan)
        for note in source.notes:
            progress.print_line(f"not carried over: {note}")
        path = reshard_into(source, folder, ranks, progress, compression=compression)
        file_bytes, files = _file_bytes(path), stored_files(path)
        ratio = f", the array data compressed {total_bytes / (file_bytes or 1):.2f} times" if compressed else ""
        progress.print_line(
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
    with open_checkpoint(path) as checkpoint:
        return sum(array.file_bytes for array in checkpoint.arrays.values())
