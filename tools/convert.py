"""`zstore convert`: converts a checkpoint to another kind, in bounded memory. Needs torch only for `--to torch`.

All kinds are read as arrays. zstore's own kind has all arrays, written as by `reshard`; the others have only the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np
import typer

from zstore.checkpoint import ArraySource, ReadAhead, temporary_folder
from zstore.errors import CheckpointExistsError, UsageError, format_bytes, format_count
from zstore.format import Bytes, numpy_dtype
from zstore.io import Files, user_path
from zstore.weights.cast import cast_into
from zstore.weights.files import MAX_FILE_BYTES, Lost, Weight, plan_model
from zstore.weights.from_checkpoint import DTYPES, Companions, list_weights

from .consolidate import refuse_lost, write_folder
from .options import DEFAULTS, Common, Dtype, Tag, open_location, report_skipped, reporting
from .printing import ProgressBar
from .reshard import reshard_into

OutputKind = Literal["zstore", "torch", "safetensors"]


def convert_command(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A checkpoint of zstore, DeepSpeed or torch.distributed.checkpoint, or a folder of safetensors; SRC@TAG "
            "is the same as --tag.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write, or a file (model.pt) with --to torch.")],
    to: Annotated[OutputKind, typer.Option(help="Kind of checkpoint to write.")] = "zstore",
    world_size: Annotated[
        int | None,
        typer.Option(
            help="With --to zstore: number of ranks to partition it for (default: the source's).", min=1, metavar="N"
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="With --to torch or safetensors: data type of the weights (default: as stored)."),
    ] = None,
    *,
    tag: Tag = None,
    common: Common = DEFAULTS,
) -> int:
    """Write the checkpoint `src` to `out`: a folder of zstore checkpoints, a new folder, or a new file (`--to torch`).

    Returns the exit code. Raises CheckpointExistsError if `out` exists; a partial result never gets the name `out`.
    """
    if to not in get_args(OutputKind):  # typer checks only command-line values
        raise UsageError(f"--to {to}: expected one of {', '.join(get_args(OutputKind))}")
    if dtype is not None and (dtype not in DTYPES or to == "zstore"):
        raise UsageError(
            f"--dtype {dtype} with --to {to}: expected one of {', '.join(DTYPES)}, and --to torch or safetensors; a full "
            "checkpoint keeps its types"
        )
    if world_size is not None and to != "zstore":
        raise UsageError(f"--world-size with --to {to}: only zstore's own checkpoints are partitioned for ranks")
    out = user_path(out)
    with open_location(src, common, tag) as source:
        weights = [] if to == "zstore" else list_weights(source, DTYPES[dtype] if dtype else None)
        names = [weight.array for weight in weights] if weights else list(source.arrays)
        total_bytes = sum(source.arrays[name].spec.nbytes for name in names)
        ranks = world_size or source.record.world_size
        target = f"the checkpoint {source.tag!r} in {out}, for {format_count(ranks, 'rank')}"
        if to != "zstore":
            description = "a plain torch state dict" if to == "torch" else "safetensors files"
            target = f"{out}: the weights as {description}, in {dtype or 'their own types'}"
            _require_new(out)
        with reporting(f"convert {source.location}", common, source, total_bytes=total_bytes) as progress:
            description = f"{format_count(len(set(names)), 'tensor')}, {format_bytes(total_bytes)}"
            progress.print_line(f"plan: {description}, from {source.kind} to {target}")
            for note in source.notes:
                progress.print_line(f"not carried over: {note}")
            progress.document |= {"from": source.kind, "to": to}
            if to == "zstore":
                path = reshard_into(source, out, ranks, progress)
                progress.print_line(f"wrote {path}")
                progress.document |= {"path": str(path), "world_size": ranks}
            elif to == "torch":
                _to_torch(source, out, weights, dtype or "", progress)
            else:
                layouts = plan_model(weights, MAX_FILE_BYTES, source.record.state)
                write_folder(source, out, layouts, dtype or "", Companions.of(source, with_parent=False), progress)
    return 0


def _require_new(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise CheckpointExistsError(f"{out} exists: remove it, or choose another path")


def _to_torch(source: ArraySource, out: Path, weights: list[Weight], dtype: str, progress: ProgressBar) -> None:
    files, parent = source.resources.files, out.absolute().parent
    with temporary_folder(files, parent, out.name) as folder:
        partial = folder / "state.pt"
        refuse_lost(_write_state_dict(source, partial, weights, progress), dtype)
        _require_new(out)
        files.rename(partial, out)
        files.sync_folder(parent)
    progress.print_line(f"wrote {out}")
    progress.document |= {"path": str(out)}
    companions = Companions.of(source, with_parent=False)
    companions.skipped = [*companions.files, *companions.skipped]
    report_skipped(progress, companions)


def _write_state_dict(source: ArraySource, path: Path, weights: Sequence[Weight], progress: ProgressBar) -> list[Lost]:
    """Write the new file `path`, which `torch.load(path, weights_only=True)` reads as weights by name.

    Tied parameters are stored under all their names, and share memory once loaded. Returns the values that the types cannot
    represent. The file is durable when this returns.
    """
    names = {weight.name: weight for weight in weights}
    for weight in weights:
        names = dict.fromkeys(source.arrays[weight.array].spec.aliases, weight) | names
    files, nbytes = Files(direct=False), sum(weight.nbytes for weight in weights)
    files.require_room(path.parent, nbytes, f"the weights need {nbytes} bytes")
    offsets = _save_placeholders(path, names)
    lost: dict[str, int] = {}
    with (
        files.opened(path, write=True) as file,
        ReadAhead(source, [(weight.array, 0, weight.numel) for weight in weights if weight.numel]) as reader,
    ):
        for weight in weights:
            offset = offsets[weight.name]
            for data, count in _cast_values(source, reader, weight, progress):
                files.write_from(file, data, offset)
                offset += data.size
                if count:
                    lost[weight.name] = lost.get(weight.name, 0) + count
        files.sync_data(file)
    return [Lost(name=name, count=count) for name, count in lost.items()]


def _save_placeholders(path: Path, names: Mapping[str, Weight]) -> dict[str, int]:
    """Save tensors of these names to a file with holes for the values; return the offset of each in the file."""
    import torch
    from torch._subclasses import FakeTensorMode

    from zstore.io.memory import torch_dtype

    with FakeTensorMode():
        tensors = {w.name: torch.empty(w.shape, dtype=torch_dtype(w.dtype)) for w in names.values()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({name: tensors[weight.name] for name, weight in names.items()}, path)
    with FakeTensorMode():  # makes torch record the offsets, also in 2.9
        saved = torch.load(path, weights_only=True)
    return {name: int(tensor.untyped_storage()._checkpoint_offset) for name, tensor in saved.items()}


def _cast_values(
    source: ArraySource, reader: ReadAhead, weight: Weight, progress: ProgressBar
) -> Iterator[tuple[Bytes, int]]:
    """Yield the bytes of the weight that `reader` returns next, in its type, with the number of values that the cast made
    infinite. The bytes are valid until the next ones are requested."""
    remaining = weight.numel
    while remaining and (span := reader.take()) is not None:
        stored = span.data.view(numpy_dtype(source.arrays[weight.array].spec.dtype))
        cast, lost = stored, 0
        if stored.dtype != numpy_dtype(weight.dtype):
            cast = np.empty(stored.size, numpy_dtype(weight.dtype))
            lost = cast_into(stored, cast, weight.dtype, "error")
        yield cast.view(np.uint8), lost
        remaining -= span.stop - span.first
        progress.advance(span.nbytes)
        reader.release(span)
