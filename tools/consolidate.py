"""`zstore consolidate`: a checkpoint's weights as safetensors in the Hugging Face layout, in bounded memory. No torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zstore.checkpoint import ArraySource, Record, new_folder, tag_folder
from zstore.errors import CheckpointError, CheckpointMismatchError, UsageError
from zstore.io import UserPath, is_url, user_path
from zstore.open.sources import split_location
from zstore.remote.url import shown
from zstore.sizes import format_bytes, format_count
from zstore.weights.cast import Overflow
from zstore.weights.choose import choose, frozen_weights
from zstore.weights.companions import Companions
from zstore.weights.from_checkpoint import DTYPES, list_weights, write_weights
from zstore.weights.layout import Weight, plan_model
from zstore.weights.writer import lost_text

from .opening import DEFAULTS, Common, open_location, reporting
from .options import Dtype, Location, Tag, require_choice, size_option
from .progress import say_left


@dataclass(frozen=True, kw_only=True)
class Which:
    """Which checkpoint of a folder, and which of its weights, are written."""

    tag: Tag = None
    include: Annotated[
        list[str] | None,
        typer.Option(help="Only the weights whose names match, like `h.0.*`; may be repeated.", metavar="PATTERN"),
    ] = None
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Leave out the weights whose names match; may be repeated.", metavar="PATTERN"),
    ] = None
    exclude_frozen: Annotated[
        bool, typer.Option("--exclude-frozen", help="Leave out parameters that the optimizer did not train.")
    ] = False

    def of(self, source: ArraySource, weights: Sequence[Weight]) -> tuple[list[Weight], list[str]]:
        """Return the selected `weights`, and the names of the others.

        Raises CheckpointMismatchError if none remains, and for a pattern that matches no name.
        """
        chosen = set(choose([weight.name for weight in weights], self.include or (), self.exclude or ()))
        if self.exclude_frozen:
            chosen -= frozen_weights(source)
        if not chosen:
            raise CheckpointMismatchError(
                f"{source.location} has {len(weights)} weights, and the options leave out all of them"
            )
        return (
            [weight for weight in weights if weight.name in chosen],
            [weight.name for weight in weights if weight.name not in chosen],
        )


ALL = Which()


def consolidate_command(
    ckpt: Location,
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Folder to write (default: CKPT-<type> beside CKPT).")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Data type to write the weights in.")] = "fp16",
    max_shard_size: Annotated[int, size_option("Size of the largest file, like 5GB or 512MiB.", show_default="5GB")] = 5
    * 10**9,
    overflow: Annotated[
        Overflow,
        typer.Option(
            help="Values that the type cannot hold: stop with an error, write infinity, or the largest value."
        ),
    ] = "error",
    *,
    which: Which = ALL,
    common: Common = DEFAULTS,
) -> int:
    """Write the weights of `ckpt` into the new folder `out` (default: `ckpt`-`dtype` beside it, of a tag `ckpt/tag-dtype`);
    return the exit code.

    Raises CheckpointError, with the tensors named and nothing published, for values that `dtype` cannot hold (unless
    `overflow` says otherwise); CheckpointExistsError if `out` exists; see `Which` for others.
    """
    require_choice("--dtype", dtype, Dtype)
    require_choice("--overflow", overflow, Overflow)
    target = user_path(out) if out else _beside(ckpt, which.tag, f"-{dtype}")
    with open_location(ckpt, common, which.tag) as source:
        weights, left_out = which.of(source, list_weights(source, DTYPES[dtype]))
        files = plan_model(weights, max_shard_size, source.record.state)
        size = f"{format_bytes(sum(file.file_bytes for file in files))} in {format_count(len(files), 'file')}"
        total_bytes = sum(source.arrays[weight.array].spec.nbytes for weight in weights)
        title = f"consolidate {source.location}"
        with reporting(title, common, source, total_bytes=total_bytes) as progress:
            plan = f"plan: {format_count(len(weights), 'tensor')} as {dtype}, {size}, to {target}"
            progress.say(plan + _left_out_text(left_out, source.record))
            beside = Companions.of(source, beside=True)
            with new_folder(source.resources.files, target) as folder:
                lost = write_weights(source, files, folder, overflow=overflow, advance=progress.advance)
                if lost and overflow == "error":
                    advice = "Choose `--dtype bf16`, or `--overflow clamp` (or `inf`) to write them anyway"
                    raise CheckpointError(lost_text(lost, dtype, advice))
                beside.copy(folder, source.resources.files)
            num_lost = sum(each.count for each in lost)
            became = "became infinite" if overflow == "inf" else "were clamped to the largest value"
            changed = f"; {num_lost} values did not fit and {became}" if lost else ""
            progress.say(f"wrote {size} to {target}{changed}{beside.text}")
            say_left(progress, beside)
            progress.document |= {
                "path": str(target),
                "files": [file.name for file in files],
                "left_out": left_out,
                "not_saved": source.record.absent_parameters,
                "values_lost": num_lost,
            }
    return 0


def _left_out_text(left_out: Sequence[str], record: Record) -> str:
    text, absent = "", record.absent_parameters
    if left_out:
        text = f"; leaving out {len(left_out)}: {', '.join(left_out[:3])}{', ...' if len(left_out) > 3 else ''}"
    if absent:
        text += f"; without {len(absent)} frozen parameters that the save left out, such as {', '.join(absent[:3])}"
    return text


def _beside(ckpt: UserPath, tag: str | None, suffix: str) -> Path:
    place, named = split_location(ckpt, tag)
    if is_url(place):
        raise UsageError(
            f"name the folder to write: `zstore consolidate {shown(os.fspath(ckpt))} OUT`, since the source is a URL"
        )
    path = Path(place)
    if named is not None:
        path = path / tag_folder(named)
    return path.with_name(path.name + suffix)
