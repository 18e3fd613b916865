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
    Target,
    common,
    finish,
    parse_size,
)


def inspect(
    ckpt: Location,
    *,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read all values: min, max, mean, norm, NaN count and a histogram.")
    ] = False,
    json: Json = False,
    memory: Memory = None,
    storage_option: StorageOption = None,
) -> None:
    """Show tags, step, world size and arrays with shapes, types and bytes."""
    from .inspect import inspect_command

    finish(inspect_command(ckpt, common(json, memory, storage_option), stats=stats))


def ls(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A folder of checkpoints, or its URL.")],
    *,
    json: Json = False,
    memory: Memory = None,
    storage_option: StorageOption = None,
) -> None:
    """List a folder's checkpoints: step, world size, size, bytes shared with others, age."""
    from .ls import ls_command

    finish(ls_command(folder, common(json, memory, storage_option)))


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, as of the other commands.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The one to compare with it.")],
    *,
    values: Annotated[
        bool, typer.Option("--values", help="Read what differs, and say how many elements and by how much.")
    ] = False,
    json: Json = False,
    memory: Memory = None,
    storage_option: StorageOption = None,
) -> None:
    """Show which arrays of two checkpoints differ, by their checksums; exit code 1 when one does."""
    from .diff import diff_command

    finish(diff_command(before, after, values=values, common=common(json, memory, storage_option)))


def verify(
    ckpt: Location,
    *,
    json: Json = False,
    memory: Memory = None,
    storage_option: StorageOption = None,
) -> None:
    """Check the checksum of every chunk; exit code 1 when one is wrong."""
    from .verify import verify_command

    finish(verify_command(ckpt, common(json, memory, storage_option)))


def consolidate(  # noqa: PLR0913 - one parameter per option
    ckpt: Location,
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="Folder to write (default: CKPT-<type> beside CKPT).")
    ] = None,
    *,
    dtype: Annotated[Dtype, typer.Option(help="Type of the weights.")] = Dtype.FP16,
    max_shard_size: Annotated[
        int,
        typer.Option(
            help="Largest file, in bytes or as 5GB, 512MiB.", metavar="SIZE", parser=parse_size, show_default="5GB"
        ),
    ] = 5 * 10**9,
    overflow: Annotated[
        Overflow, typer.Option(help="For values that the type cannot hold: stop, write infinity, or the largest value.")
    ] = Overflow.ERROR,
    include: Annotated[
        list[str] | None,
        typer.Option(help="Only weights whose name matches, as `h.0.*`; may be repeated.", metavar="PATTERN"),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Leave those out that match; may be repeated.", metavar="PATTERN")
    ] = None,
    exclude_frozen: Annotated[
        bool, typer.Option("--exclude-frozen", help="Leave parameters out that the optimizer did not train.")
    ] = False,
    json: Json = False,
    memory: Memory = None,
    storage_option: StorageOption = None,
) -> None:
    """Write a checkpoint's weights as safetensors in the Hugging Face layout."""
    from .consolidate import Which, consolidate_command

    options = common(json, memory, storage_option)
    which = Which(include=tuple(include or ()), exclude=tuple(exclude or ()), without_frozen=exclude_frozen)
    finish(consolidate_command(ckpt, out, dtype, max_shard_size, overflow, which=which, common=options))


def reshard(  # noqa: PLR0913 - one parameter per option
    ckpt: Location,
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="Folder to write; may be left out with --to.")
    ] = None,
    *,
    world_size: Annotated[
        int | None, typer.Option(help="Ranks to lay the state out for (default: as it is).", min=1, metavar="N")
    ] = None,
    codec: Annotated[
        CodecName, typer.Option(help="Compress the chunks: a smaller archive, read as it is.")
    ] = CodecName.NONE,
    to: Annotated[
        str | None, typer.Option(help="Upload the result to the folder of checkpoints at this URL.", metavar="URL")
    ] = None,
    json: Json = False,
    memory: Memory = None,
    storage_option: StorageOption = None,
) -> None:
    """Write the same state laid out for another number of ranks, or compressed."""
    from .reshard import reshard_command

    if out is None and to is None:
        raise typer.BadParameter("name the folder to write as OUT, or with --to the URL to upload to")
    options = common(json, memory, storage_option)
    finish(reshard_command(ckpt, out, world_size, codec=codec, to=to, common=options))


def convert(  # noqa: PLR0913 - one parameter per option
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="A checkpoint of zstore, DeepSpeed, torch.distributed.checkpoint, or safetensors."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; with --to torch a file, as model.pt.")],
    *,
    to: Annotated[Target, typer.Option(help="What to write.")] = Target.ZSTORE,
    world_size: Annotated[
        int | None,
        typer.Option(help="With --to zstore: ranks to lay it out for (default: the source's).", min=1, metavar="N"),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="With --to torch or safetensors: type of the weights (default: their own).")
    ] = None,
    json: Json = False,
    memory: Memory = None,
    storage_option: StorageOption = None,
) -> None:
    """Write a checkpoint of one kind as one of another."""
    from .convert import ConvertOptions, convert_command

    try:
        options = ConvertOptions(to=to, world_size=world_size, dtype=dtype)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error
    finish(convert_command(src, out, options, common=common(json, memory, storage_option)))


def prune(  # noqa: PLR0913 - one parameter per option
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A folder of checkpoints, or its URL.")],
    *,
    keep_last: Annotated[
        int | None, typer.Option(help="Keep the newest N (without this option: the newest).", min=1, metavar="N")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Keep those whose step is a multiple of K.", min=1, metavar="K")
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(
            help="Keep the one with the least or greatest value: a name of save_checkpoint(metrics=...) or client_state.",
            metavar="METRIC:min|max",
        ),
    ] = None,
    keep_tag: Annotated[
        list[str] | None, typer.Option(help="Keep this one, or those of a pattern; may be repeated.", metavar="NAME")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, say what would go.")] = False,
    json: Json = False,
    memory: Memory = None,
    storage_option: StorageOption = None,
) -> None:
    """Remove the checkpoints that no rule keeps; says what goes, what stays, and the bytes that are really freed."""
    from zstore.checkpoint import Keep

    from .prune import prune_command

    if (keep_last, keep_every, keep_best, keep_tag or None) == (None, None, None, None):
        raise typer.BadParameter("say what to keep: --keep-last, --keep-every, --keep-best or --keep-tag")
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
