"""`zstore convert`: a checkpoint of one kind written as another, in bounded memory. Torch only for `--to dcp`.

[Note: directions]
Whatever `open_source` opens is read as arrays, so there is one reader, and a writer for each kind: zstore's own (the
same as `reshard`), DCP's and DeepSpeed's folders with all that the checkpoint has, and the weights alone as safetensors or
as a `.pt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from zstore.checkpoint import ArraySource, new_folder_of, temporary_folder
from zstore.errors import CheckpointError, CheckpointExistsError, UsageError
from zstore.interop.deepspeed.universal import UniversalFolder
from zstore.io import user_path
from zstore.ranks.team import ALONE, Team
from zstore.sizes import format_bytes, format_count
from zstore.weights.companions import copy_companions
from zstore.weights.from_checkpoint import DTYPES, list_weights, write_weights
from zstore.weights.layout import MAX_FILE_BYTES, plan_files
from zstore.weights.writer import Lost, lost_text

from .export import arrays_read, write_state_dict, write_universal
from .opening import DEFAULTS, Common, open_location, reporting
from .options import Dtype, Tag, require_choice
from .progress import ProgressBar
from .reshard import reshard_into

OutputKind = Literal["zstore", "dcp", "deepspeed", "torch", "safetensors"]
_WEIGHTS_ALONE = ("torch", "safetensors")


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of `zstore convert` beside source and target."""

    tag: Tag = None
    to: Annotated[OutputKind, typer.Option(help="Kind of checkpoint to write.")] = "zstore"
    world_size: Annotated[
        int | None,
        typer.Option(
            help="With --to zstore: number of ranks to partition it for (default: as the source).", min=1, metavar="N"
        ),
    ] = None
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="With --to torch or safetensors: data type of the weights (default: as stored)."),
    ] = None

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        require_choice("--to", self.to, OutputKind)
        if self.dtype is not None and (self.dtype not in DTYPES or self.to not in _WEIGHTS_ALONE):
            raise UsageError(
                f"--dtype {self.dtype} with --to {self.to}: expected one of {', '.join(DTYPES)}, and --to torch or "
                "safetensors; a whole checkpoint keeps its types"
            )
        if self.world_size is not None and self.to != "zstore":
            raise UsageError(f"--world-size with --to {self.to}: only zstore's own checkpoints are laid out for ranks")

    @property
    def stored_dtype(self) -> str | None:
        """Name of the type of the weights, None: as they are stored."""
        return DTYPES[self.dtype] if self.dtype else None


AS_ZSTORE = ConvertOptions()


def convert_command(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A checkpoint of zstore, DeepSpeed or torch.distributed.checkpoint, or a folder of safetensors; SRC:TAG "
            "means the same as --tag.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; with --to torch a file, like model.pt.")],
    options: ConvertOptions = AS_ZSTORE,
    *,
    common: Common = DEFAULTS,
) -> int:
    """Write the checkpoint `src` as `out`: a folder of zstore checkpoints, a new folder, or a new file (`--to torch`).

    Returns the exit code. Raises CheckpointExistsError if `out` exists; a partial result never has its name.
    """
    out = user_path(out)
    with open_location(src, common, options.tag) as source:
        names = _arrays_read(source, options)
        total_bytes = sum(source.arrays[name].spec.nbytes for name in names)
        title = f"convert {source.location}"
        parted = replace(common, team=ALONE) if options.to == "torch" else common
        with reporting(title, parted, source, total_bytes=total_bytes) as progress:
            what = f"{format_count(len(set(names)), 'tensor')}, {format_bytes(total_bytes)}"
            with common.team.agreeing():  # before any rank writes
                planned = _plan(source, out, options)
            progress.say(f"plan: {what}, from {source.kind} to {planned}")
            for note in source.notes:
                progress.say(f"not carried over: {note}")
            progress.document |= {"from": source.kind, "to": options.to}
            progress.document |= _WRITERS[options.to](source, out, options, _Showing(progress, common.team))
    return 0


def _arrays_read(source: ArraySource, options: ConvertOptions) -> list[str]:
    if options.to in _WEIGHTS_ALONE:
        return [weight.array for weight in list_weights(source, None)]
    if options.to == "deepspeed":
        return arrays_read(UniversalFolder(source))
    return list(source.arrays)


def _plan(source: ArraySource, out: Path, options: ConvertOptions) -> str:
    if options.to == "zstore":
        ranks = options.world_size or source.record.world_size
        return f"the checkpoint {source.tag!r} in {out}, for {format_count(ranks, 'rank')}"
    _require_new(out)
    if options.to == "dcp":
        return f"{out}, for torch.distributed.checkpoint"
    if options.to == "deepspeed":
        return f"{out}, a universal checkpoint of DeepSpeed with the tag {source.tag!r}"
    what = "a plain torch state dict" if options.to == "torch" else "safetensors files"
    return f"{out}: the weights as {what}, in {options.dtype or 'the types that they have'}"


def _require_new(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise CheckpointExistsError(f"{out} exists: remove it, or name another place to write")


@dataclass(frozen=True)
class _Showing:
    """The ranks that write, and their progress."""

    progress: ProgressBar
    team: Team


def _to_zstore(source: ArraySource, out: Path, options: ConvertOptions, show: _Showing) -> dict[str, Any]:
    ranks = options.world_size or source.record.world_size
    path = reshard_into(source, out, ranks, show.progress, team=show.team)
    copied = copy_companions(source, out, beside=False) if show.team.rank == 0 else ""
    show.progress.say(f"wrote {path}{copied}")
    return {"path": str(path), "world_size": ranks}


def _to_dcp(source: ArraySource, out: Path, options: ConvertOptions, show: _Showing) -> dict[str, Any]:
    from .export_dcp import write_dcp

    with new_folder_of(show.team, source.resources.files, out) as folder:
        names = write_dcp(source, folder, show.progress.advance, show.team)
    show.progress.say(f"wrote {out}")
    return {"path": str(out), "files": names}


def _to_deepspeed(source: ArraySource, out: Path, options: ConvertOptions, show: _Showing) -> dict[str, Any]:
    universal = UniversalFolder(source)
    for note in universal.notes:
        show.progress.say(f"not carried over: {note}")
    with new_folder_of(show.team, source.resources.files, out) as folder:
        write_universal(source, universal, folder, show.progress.advance, show.team)
    show.progress.say(f'wrote {out}: {{"checkpoint": {{"load_universal": true}}}} in DeepSpeed\'s config loads it')
    return {"path": str(out), "tag": source.tag, "not_carried_over": universal.notes}


def _to_torch(source: ArraySource, out: Path, options: ConvertOptions, show: _Showing) -> dict[str, Any]:
    # An archive with a checksum of each tensor before the next one: one process writes it.
    with show.team.agreeing():
        if show.team.rank == 0:
            files, parent = source.resources.files, out.absolute().parent
            with temporary_folder(files, parent, out.name) as folder:
                part = folder / "state.pt"
                _refuse(write_state_dict(source, part, options.stored_dtype, show.progress.advance), options)
                _require_new(out)
                files.rename(part, out)
                files.sync_folder(parent)
    show.progress.say(f"wrote {out}")
    return {"path": str(out)}


def _to_safetensors(source: ArraySource, out: Path, options: ConvertOptions, show: _Showing) -> dict[str, Any]:
    layouts, copied = plan_files(list_weights(source, options.stored_dtype), MAX_FILE_BYTES), ""
    with new_folder_of(show.team, source.resources.files, out) as folder:
        advance = show.progress.advance
        _refuse(write_weights(source, layouts, folder, overflow="error", advance=advance, team=show.team), options)
        if show.team.rank == 0:
            copied = copy_companions(source, folder, beside=False)
    show.progress.say(f"wrote {format_count(len(layouts), 'file')} to {out}{copied}")
    return {"path": str(out), "files": [layout.name for layout in layouts]}


def _refuse(lost: Sequence[Lost], options: ConvertOptions) -> None:
    if lost:
        raise CheckpointError(lost_text(lost, options.dtype or "", "Choose `--dtype bf16` or `fp32`"))


_WRITERS = {
    "zstore": _to_zstore,
    "dcp": _to_dcp,
    "deepspeed": _to_deepspeed,
    "torch": _to_torch,
    "safetensors": _to_safetensors,
}
