"""`zstore convert`: a checkpoint of one kind written as another, in bounded memory. No torch.

[Note: directions]
Whatever `open_source` opens is read as arrays, so there is one reader, and a writer for each kind: zstore's own (the
same as `reshard`), with all that the checkpoint has, and the weights alone as safetensors or as a `.pt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from zstore.checkpoint import ArraySource, new_folder, temporary_folder
from zstore.errors import CheckpointError, CheckpointExistsError, UsageError
from zstore.io import user_path
from zstore.sizes import format_bytes, format_count
from zstore.weights.companions import Companions
from zstore.weights.from_checkpoint import DTYPES, list_weights, write_weights
from zstore.weights.layout import MAX_FILE_BYTES, plan_model
from zstore.weights.writer import Lost, lost_text

from .export import write_state_dict
from .opening import DEFAULTS, Common, open_location, reporting
from .options import Dtype, Tag, require_choice
from .progress import ProgressBar, say_left
from .reshard import reshard_into

OutputKind = Literal["zstore", "torch", "safetensors"]
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
        with reporting(title, common, source, total_bytes=total_bytes) as progress:
            what = f"{format_count(len(set(names)), 'tensor')}, {format_bytes(total_bytes)}"
            progress.say(f"plan: {what}, from {source.kind} to {_plan(source, out, options)}")
            for note in source.notes:
                progress.say(f"not carried over: {note}")
            progress.document |= {"from": source.kind, "to": options.to}
            progress.document |= _WRITERS[options.to](source, out, options, progress)
    return 0


def _arrays_read(source: ArraySource, options: ConvertOptions) -> list[str]:
    if options.to in _WEIGHTS_ALONE:
        return [weight.array for weight in list_weights(source, None)]
    return list(source.arrays)


def _plan(source: ArraySource, out: Path, options: ConvertOptions) -> str:
    if options.to == "zstore":
        ranks = options.world_size or source.record.world_size
        return f"the checkpoint {source.tag!r} in {out}, for {format_count(ranks, 'rank')}"
    _require_new(out)
    what = "a plain torch state dict" if options.to == "torch" else "safetensors files"
    return f"{out}: the weights as {what}, in {options.dtype or 'the types that they have'}"


def _require_new(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise CheckpointExistsError(f"{out} exists: remove it, or name another place to write")


def _to_zstore(source: ArraySource, out: Path, options: ConvertOptions, progress: ProgressBar) -> dict[str, Any]:
    ranks = options.world_size or source.record.world_size
    path = reshard_into(source, out, ranks, progress)
    progress.say(f"wrote {path}")
    return {"path": str(path), "world_size": ranks}


def _to_torch(source: ArraySource, out: Path, options: ConvertOptions, progress: ProgressBar) -> dict[str, Any]:
    files, parent = source.resources.files, out.absolute().parent
    with temporary_folder(files, parent, out.name) as folder:
        part = folder / "state.pt"
        _refuse(write_state_dict(source, part, options.stored_dtype, progress.advance), options)
        _require_new(out)
        files.rename(part, out)
        files.sync_folder(parent)
    progress.say(f"wrote {out}")
    beside = Companions.of(source, beside=False)
    beside.left = [*beside.files, *beside.left]
    say_left(progress, beside)
    return {"path": str(out)}


def _to_safetensors(source: ArraySource, out: Path, options: ConvertOptions, progress: ProgressBar) -> dict[str, Any]:
    layouts = plan_model(list_weights(source, options.stored_dtype), MAX_FILE_BYTES, source.record.state)
    beside = Companions.of(source, beside=False)
    with new_folder(source.resources.files, out) as folder:
        _refuse(write_weights(source, layouts, folder, overflow="error", advance=progress.advance), options)
        beside.copy(folder, source.resources.files)
    progress.say(f"wrote {format_count(len(layouts), 'file')} to {out}{beside.text}")
    say_left(progress, beside)
    return {"path": str(out), "files": [layout.name for layout in layouts]}


def _refuse(lost: Sequence[Lost], options: ConvertOptions) -> None:
    if lost:
        raise CheckpointError(lost_text(lost, options.dtype or "", "Choose `--dtype bf16` or `fp32`"))


_WRITERS = {
    "zstore": _to_zstore,
    "torch": _to_torch,
    "safetensors": _to_safetensors,
}
