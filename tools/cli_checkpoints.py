"""The commands on checkpoints. Each imports its module when it is run, so that they start without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zstore.errors import UsageError

from .arguments import (
    CodecName,
    Dtype,
    Json,
    Location,
    Memory,
    Overflow,
    StorageOption,
    Tag,
    Target,
    common,
    finish,
    parse_size,
)


def inspect(
    ckpt: Location,
    *,
    tag: Tag = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read all values and show min, max, mean, norm, NaN count and a histogram.")
    ] = False,
    json: Json = False,
    memory: Memory = None,
    storage_option: StorageOption = None,
) -> None:
    """Show a checkpoint's step, world size and size on disk, and its arrays with shapes, types and bytes."""
    from .inspect import inspect_command

    finish(inspect_command(ckpt, common(json, memory, storage_option), tag=tag, stats=stats))


def ls(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A folder of checkpoints, or its URL.")],
    *,
    json: Json = False,
    memory: Memory = None,
    storage_option: StorageOption = None,
) -> None:
    """List the checkpoints in a folder: step, world size, size on disk, how much of it others share, age."""
    from .ls import ls_command

    finish(ls_command(folder, common(json, memory, storage_option)))


def diff(
    before: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A checkpoint: its folder or URL, DIR:TAG, or a folder of checkpoints (then the newest)."
        ),
    ],
    after: Annotated[
        str, typer.Argument(metavar="B", help="The checkpoint to compare it with, given in the same way.")
    ],
    *,
    values: Annotated[
        bool, typer.Option("--values", help="Read what differs, and show how many elements differ and by how much.")
    ] = False,
    json: Json = False,
    memory: Memory = None,
    storage_option: StorageOption = None,
) -> None:
    """Show which arrays differ between two checkpoints, by their checksums; exit code 1 if any does."""
    from .diff import diff_command

    finish(diff_command(before, after, values=values, common=common(json, memory, storage_option)))


def verify(
    ckpt: Location,
    *,
    tag: Tag = None,
    json: Json = False,
    memory: Memory = None,
    storage_option: StorageOption = None,
) -> None:
    """Read a checkpoint and check every checksum; exit code 1 if one is wrong or a file is missing."""
    from .verify import verify_command

    finish(verify_command(ckpt, common(json, memory, storage_option), tag=tag))


def consolidate(  # noqa: PLR0913 - one parameter per option
    ckpt: Location,
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="Folder to write (default: CKPT-<type> beside CKPT).")
    ] = None,
    *,
    tag: Tag = None,
    dtype: Annotated[Dtype, typer.Option(help="Data type to write the weights in.")] = Dtype.FP16,
    max_shard_size: Annotated[
        int,
        typer.Option(
            help="Size of the largest file, like 5GB or 512MiB.", metavar="SIZE", parser=parse_size, show_default="5GB"
        ),
    ] = 5 * 10**9,
    overflow: Annotated[
        Overflow,
        typer.Option(
            help="Values that the type cannot hold: stop with an error, write infinity, or the largest value."
        ),
    ] = Overflow.ERROR,
    include: Annotated[
        list[str] | None,
        typer.Option(help="Only the weights whose names match, like `h.0.*`; may be repeated.", metavar="PATTERN"),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Leave out the weights whose names match; may be repeated.", metavar="PATTERN"),
    ] = None,
    exclude_frozen: Annotated[
        bool, typer.Option("--exclude-frozen", help="Leave out parameters that the optimizer did not train.")
    ] = False,
    json: Json = False,
    memory: Memory = None,
    storage_option: StorageOption = None,
) -> None:
    """Write a checkpoint's weights as safetensors in the Hugging Face layout."""
    from .consolidate import Which, consolidate_command

    options = common(json, memory, storage_option)
    which = Which(tag=tag, include=tuple(include or ()), exclude=tuple(exclude or ()), without_frozen=exclude_frozen)
    finish(consolidate_command(ckpt, out, dtype, max_shard_size, overflow, which=which, common=options))


def reshard(  # noqa: PLR0913 - one parameter per option
    ckpt: Location,
    out: Annotated[Path | None, typer.Argument(metavar="[OUT]", help="Folder to write; not needed with --to.")] = None,
    *,
    tag: Tag = None,
    world_size: Annotated[
        int | None,
        typer.Option(help="Number of ranks to lay the state out for (default: unchanged).", min=1, metavar="N"),
    ] = None,
    codec: Annotated[
        CodecName, typer.Option(help="Compress the chunks: smaller, and read like any checkpoint.")
    ] = CodecName.NONE,
    to: Annotated[
        str | None, typer.Option(help="Upload the result to the folder of checkpoints at this URL.", metavar="URL")
    ] = None,
    json: Json = False,
    memory: Memory = None,
    storage_option: StorageOption = None,
) -> None:
    """Write a copy laid out for another number of ranks, compressed, or behind a URL."""
    from .reshard import reshard_command

    if out is None and to is None:
        raise typer.BadParameter("give the folder to write as OUT, or a URL to upload to with --to")
    options = common(json, memory, storage_option)
    finish(reshard_command(ckpt, out, world_size, tag=tag, codec=codec, to=to, common=options))


def convert(  # noqa: PLR0913 - one parameter per option
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A checkpoint of zstore, DeepSpeed or torch.distributed.checkpoint, or a folder of safetensors; SRC:TAG "
            "means the same as --tag.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; with --to torch a file, like model.pt.")],
    *,
    tag: Tag = None,
    to: Annotated[Target, typer.Option(help="Kind of checkpoint to write.")] = Target.ZSTORE,
    world_size: Annotated[
        int | None,
        typer.Option(
            help="With --to zstore: number of ranks to lay it out for (default: as the source).", min=1, metavar="N"
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="With --to torch or safetensors: data type of the weights (default: as stored)."),
    ] = None,
    json: Json = False,
    memory: Memory = None,
    storage_option: StorageOption = None,
) -> None:
    """Convert a checkpoint between zstore, DCP, safetensors and torch files; reads those of DeepSpeed too."""
    from .convert import ConvertOptions, convert_command

    try:
        options = ConvertOptions(tag=tag, to=to, world_size=world_size, dtype=dtype)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error
    finish(convert_command(src, out, options, common=common(json, memory, storage_option)))


def prune(  # noqa: PLR0913 - one parameter per option
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A folder of checkpoints, or its URL.")],
    *,
    keep_last: Annotated[
        int | None, typer.Option(help="Keep the newest N (the newest is always kept).", min=1, metavar="N")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Keep those whose step is a multiple of K.", min=1, metavar="K")
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(
            help="Keep the one with the smallest or largest value of a metric in save_checkpoint(metrics=...) or client_state.",
            metavar="METRIC:min|max",
        ),
    ] = None,
    keep_tag: Annotated[
        list[str] | None,
        typer.Option(help="Keep this tag, or those that match a pattern; may be repeated.", metavar="TAG"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; show what would be removed.")] = False,
    json: Json = False,
    memory: Memory = None,
    storage_option: StorageOption = None,
) -> None:
    """Remove the checkpoints that no --keep option keeps, and show what that frees (files that others share stay)."""
    from zstore.checkpoint.keep import Keep

    from .prune import prune_command

    if (keep_last, keep_every, keep_best, keep_tag or None) == (None, None, None, None):
        raise typer.BadParameter("say what to keep with --keep-last, --keep-every, --keep-best or --keep-tag")
    try:
        keep = Keep(last=keep_last or 1, every=keep_every, best=keep_best, tags=tuple(keep_tag or ()))
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error
    finish(prune_command(folder, keep, dry_run=dry_run, common=common(json, memory, storage_option)))


COMMANDS = (
    ls,
    inspect,
    verify,
    diff,
    consolidate,
    reshard,
    convert,
    prune,
)
