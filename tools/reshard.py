"""`zstore reshard`: the same state for another number of ranks, or compressed, in a folder or at a URL. No torch."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from zstore.checkpoint import ArraySource, CheckpointReader, open_checkpoint, reshard_checkpoint, stored_files
from zstore.errors import CheckpointExistsError, UsageError
from zstore.io import is_url, user_path
from zstore.remote.upload import upload_checkpoint
from zstore.remote.url import shown
from zstore.sizes import format_bytes, format_count
from zstore.weights.companions import Companions

from .opening import DEFAULTS, Common, array_bytes, open_location, read_of
from .options import Location, Tag
from .printing import print_json
from .progress import ProgressBar, say_left


def reshard_command(
    ckpt: Location,
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="Folder to write; not needed with --to.")] = None,
    world_size: Annotated[
        int | None,
        typer.Option(help="Number of ranks to partition the state for (default: unchanged).", min=1, metavar="N"),
    ] = None,
    *,
    tag: Tag = None,
    codec: Annotated[
        Literal["none", "zstd", "blosc"],
        typer.Option(help="Compress the chunks; the result reads like any checkpoint."),
    ] = "none",
    to: Annotated[
        str | None, typer.Option(help="Upload the result to the folder of checkpoints at this URL.", metavar="URL")
    ] = None,
    common: Common = DEFAULTS,
) -> int:
    """Write the checkpoint `ckpt`, of a folder `tag` or the newest, laid out for `world_size` ranks (default: as many as it
    has) into the folder `out`, its chunks compressed with `codec`; return the exit code.

    With `to` it is then uploaded to the folder of checkpoints at that URL; without `out` it is written to a temporary
    folder first, and if neither layout nor codec is asked for, a checkpoint on this machine is uploaded as it is. The tag
    stays the same. With `json`, one object: `path` (null if nothing of it stays on this machine), the bytes read and
    written, and with `to` also `url` and `upload`. Raises CheckpointExistsError if `out` or `to` has it already.
    """
    if to is None and out is None:
        raise typer.BadParameter("give the folder to write as OUT, or a URL to upload to with --to")
    if to is not None and not is_url(to):
        raise UsageError(f"--to {to}: expected a URL like s3://bucket/run; give a local folder as OUT")
    with contextlib.ExitStack() as temporary:
        folder = (
            user_path(out)
            if out
            else Path(temporary.enter_context(tempfile.TemporaryDirectory(prefix="zstore-reshard-")))
        )
        with open_location(ckpt, common, tag) as source:
            ranks = source.record.world_size if world_size is None else world_size
            plan = (
                f"plan: {format_count(len(source.arrays), 'array')}, {format_bytes(array_bytes(source))} of array data"
            )
            document: dict[str, Any] = {"world_size": ranks, "codec": codec}
            is_ours_here = isinstance(source, CheckpointReader) and source.folder.is_local
            if is_ours_here and to is not None and (out, world_size, codec) == (None, None, "none"):
                path = Path(source.location)
                plan += f", uploaded unchanged from {path} to {shown(to)}"
                document["path"] = str(path)
            else:
                where = "a temporary folder" if out is None else str(folder)
                then = "" if to is None else f", and from there to {shown(to)}"
                compressed = "" if codec == "none" else f", compressed with {codec}"
                ranks_text = f"from {source.record.world_size} to {format_count(ranks, 'rank')}"
                plan += f", {ranks_text}{compressed}, into {where}{then}"
                path, facts = _reshard(source, folder, (ranks, codec), plan, kept=out is not None)
                document |= {"path": None if out is None else str(path), **facts}
                plan = ""
        if to is not None:  # the source's buffers are free again
            upload = _upload(path, to, common, plan)
            document = {**upload["upload"], **document, **upload}
    if common.json:
        print_json(document)
    return 0


def reshard_into(source: ArraySource, folder: Path, ranks: int, progress: ProgressBar, *, codec: str = "none") -> Path:
    """Write the checkpoint into `folder`, laid out for `ranks`; return the tag's folder.

    Raises CheckpointExistsError if its tag is there already.
    """
    try:
        beside = Companions.of(source, beside=False)
        path = reshard_checkpoint(
            source,
            folder,
            ranks,
            progress.advance,
            codec=codec,
            before_commit=lambda tag: beside.copy_into_checkpoint(tag, source.resources.files),
        )
        if beside.copied:
            progress.say(f"copied into {os.fspath(path)}: {', '.join(beside.copied)}")
        say_left(progress, beside)
        return path
    except CheckpointExistsError as error:
        raise CheckpointExistsError(
            f"{os.fspath(folder)} has a checkpoint {source.tag!r} already: name another folder, or remove that one first"
        ) from error


def _reshard(
    source: ArraySource, folder: Path, made: tuple[int, str], plan: str, *, kept: bool
) -> tuple[Path, dict[str, Any]]:
    """Write it, for so many ranks and with a codec; return the tag's folder, and a summary as JSON."""
    (ranks, codec), total_bytes = made, array_bytes(source)
    with ProgressBar(f"reshard {source.location}", total_bytes) as progress:
        progress.say(plan)
        for note in source.notes:
            progress.say(f"not carried over: {note}")
        path = reshard_into(source, folder, ranks, progress, codec=codec)
        read = read_of(progress, source)
        file_bytes = _file_bytes(path)
        files = stored_files(path)
        ratio = total_bytes / file_bytes if file_bytes else 1.0
        progress.say(
            f"wrote {path if kept else source.tag} for {format_count(ranks, 'rank')}: "
            f"{format_bytes(files.size_bytes)} on disk in {format_count(files.num_files, 'file')}"
            + ("" if codec == "none" else f", the array data compressed {ratio:.2f} times")
        )
    return path, {"file_bytes": file_bytes, "size_bytes": files.size_bytes, **read, **progress.summary()}


def _file_bytes(path: Path) -> int:
    with open_checkpoint(path) as written:
        return sum(array.file_bytes for array in written.arrays.values())


def _upload(path: Path, url: str, common: Common, plan: str) -> dict[str, Any]:
    with ProgressBar(f"upload {path.name} to {shown(url)}", _file_bytes(path)) as progress:
        if plan:
            progress.say(plan)
        place, messages = upload_checkpoint(
            path,
            url,
            common.storage_options,
            advance=progress.advance,
            memory_bytes=None if common.memory_bytes is None else common.free_bytes,
        )
        for message in messages:
            progress.say(message)
        progress.say(f"uploaded to {place}")
    return {"url": place, "upload": progress.summary()}
