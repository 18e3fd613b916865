"""`zstore consolidate`: writes a checkpoint's weights as Hugging Face safetensors, in bounded memory. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from zstore.checkpoint import ArraySource, Record, new_folder
from zstore.errors import CheckpointError, CheckpointMismatchError, UsageError, format_bytes, format_count
from zstore.io import user_path
from zstore.weights.files import FileLayout, Lost, lost_text, plan_model
from zstore.weights.from_checkpoint import DTYPES, Companions, frozen_weights, list_weights, write_weights

from .options import DEFAULTS, Common, Dtype, Location, Tag, open_location, report_skipped, reporting, size_option
from .printing import ProgressBar


def consolidate_command(
    ckpt: Location,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    dtype: Annotated[
        Dtype, typer.Option(help="Data type of the weights: that of the training gives the same outputs.")
    ] = "fp16",
    max_shard_size: Annotated[int, size_option("Maximum file size, such as 5GB or 512MiB.", show_default="5GB")] = 5
    * 10**9,
    *,
    tag: Tag = None,
    exclude_frozen: Annotated[
        bool, typer.Option("--exclude-frozen", help="Omit parameters that the optimizer did not train.")
    ] = False,
    common: Common = DEFAULTS,
) -> int:
    """Write the weights of `ckpt` to the new folder `out`; return the exit code.

    Raises CheckpointError, naming the tensors and publishing nothing, for values that `dtype` cannot represent;
    CheckpointExistsError if `out` exists; CheckpointMismatchError if no weights remain.
    """
    plan_files = partial(plan_model, max_file_bytes=max_shard_size)
    return consolidate(ckpt, user_path(out), dtype, plan_files, tag, exclude_frozen, common)


def consolidate(
    ckpt: str,
    target: Path,
    dtype: str,
    plan_files: Callable[..., list[FileLayout]],
    tag: str | None,
    exclude_frozen: bool,
    common: Common,
) -> int:
    """Write the weights as `consolidate_command` does, to the files that `plan_files(weights, state=...)` returns."""
    if dtype not in DTYPES:  # typer checks only command-line values
        raise UsageError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    with open_location(ckpt, common, tag) as source:
        weights = list_weights(source, DTYPES[dtype])
        frozen = frozen_weights(source) if exclude_frozen else set()
        omitted = [weight.name for weight in weights if weight.name in frozen]
        weights = [weight for weight in weights if weight.name not in frozen]
        if not weights:
            raise CheckpointMismatchError(f"{source.location} has only frozen weights: omit --exclude-frozen")
        total_bytes = sum(source.arrays[weight.array].spec.nbytes for weight in weights)
        with reporting(f"consolidate {source.location}", common, source, total_bytes=total_bytes) as progress:
            layouts = plan_files(weights, state=source.record.state)
            plan = f"plan: {format_count(len(weights), 'tensor')} as {dtype}, {size_of(layouts)}, to {target}"
            progress.print_line(plan + _omitted_text(omitted, source.record))
            write_folder(source, target, layouts, dtype, Companions.of(source, with_parent=True), progress)
            progress.document |= {"left_out": omitted, "not_saved": source.record.absent_parameters}
    return 0


def size_of(layouts: Sequence[FileLayout]) -> str:
    """Return the size of weight files as text."""
    num_bytes = sum(layout.file_bytes for layout in layouts)
    return f"{format_bytes(num_bytes)} in {format_count(len(layouts), 'file')}"


def write_folder(
    source: ArraySource,
    target: Path,
    layouts: Sequence[FileLayout],
    dtype: str,
    companions: Companions,
    progress: ProgressBar,
) -> None:
    """Write the weight files, and the model's other files, to the new folder `target`.

    Raises CheckpointError, naming the tensors and publishing nothing, for values that their type cannot represent.
    """
    for name in layouts[0].conflicting_files & companions.files.keys():
        del companions.files[name]
        companions.skipped.append(f"{name} (next to it, transformers would expect the whole model)")
    with new_folder(source.resources.files, target) as folder:
        lost = write_weights(source, layouts, folder, overflow="error", advance=progress.advance)
        refuse_lost(lost, dtype)
        companions.copy(folder, source.resources.files)
    progress.print_line(f"wrote {size_of(layouts)} to {target}{companions.text}")
    progress.document |= {"path": str(target), "files": [layout.name for layout in layouts]}
    report_skipped(progress, companions)


def refuse_lost(lost: Sequence[Lost], dtype: str) -> None:
    """Raise CheckpointError if a cast to `dtype` lost values."""
    if lost:
        raise CheckpointError(lost_text(lost, dtype, "Choose `--dtype bf16` or `fp32`"))


def _omitted_text(omitted: Sequence[str], record: Record) -> str:
    text, absent = "", record.absent_parameters
    if omitted:
        text = f"; omitting {len(omitted)}: {', '.join(omitted[:3])}{', ...' if len(omitted) > 3 else ''}"
    if absent:
        text += f"; without {len(absent)} frozen parameters that were not saved, such as {', '.join(absent[:3])}"
    return text
