"""`zstore consolidate`: a checkpoint's weights as safetensors in the Hugging Face layout, in bounded memory. No torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zstore.checkpoint.commit import new_folder
from zstore.checkpoint.names import tag_folder
from zstore.checkpoint.reader import CheckpointReader
from zstore.checkpoint.source import ArraySource
from zstore.errors import CheckpointError, CheckpointMismatchError, UsageError
from zstore.open.sources import split_location
from zstore.remote.url import is_url, shown
from zstore.sizes import format_bytes, format_count
from zstore.weights.cast import Overflow
from zstore.weights.choose import choose, frozen_weights
from zstore.weights.from_checkpoint import DTYPES, list_weights, write_weights
from zstore.weights.layout import FileLayout, Weight, plan_files
from zstore.weights.writer import Lost, lost_text

from .companions import copy_companions
from .opening import DEFAULTS, Common, open_location, print_json, reading
from .progress import Progress

OVERFLOWS: dict[str, Overflow] = {"error": "error", "inf": "inf", "clamp": "clamp"}


@dataclass(frozen=True, kw_only=True)
class Which:
    """Which checkpoint of a folder, and which of its weights, are written."""

    tag: str | None = None
    """None: the newest."""
    include: Sequence[str] = ()
    """Patterns of names; none: all."""
    exclude: Sequence[str] = ()
    without_frozen: bool = False
    """Leave parameters out that the optimizer did not train."""

    def of(self, source: ArraySource, weights: Sequence[Weight]) -> tuple[list[Weight], list[str]]:
        """Return those of `weights` that are meant, and the names of the others.

        Raises CheckpointMismatchError where none is left, and for a pattern that matches no name.
        """
        chosen = set(choose([weight.name for weight in weights], self.include, self.exclude))
        if self.without_frozen:
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
_MOST_NAMED = 3
"""Weights that the plan names of those left out."""


def consolidate_command(
    ckpt: str | os.PathLike[str],
    out: Path | None,
    dtype: str,
    max_shard_size: int,
    overflow: str,
    *,
    which: Which = ALL,
    common: Common = DEFAULTS,
) -> int:
    """Write the weights of `ckpt` into the new folder `out` (default: `ckpt`-`dtype` beside it, of a tag `ckpt/tag-dtype`);
    return the exit code.

    `dtype` is one of `DTYPES`, `max_shard_size` the bytes of the largest file. Raises CheckpointError, with the tensors
    named and nothing published, for values that `dtype` cannot hold (unless `overflow` says "inf" or "clamp");
    CheckpointExistsError where `out` exists; see `Which` for others.
    """
    mode = OVERFLOWS.get(overflow)
    if dtype not in DTYPES or mode is None:
        raise UsageError(f"expected a type of {', '.join(DTYPES)} and {', '.join(OVERFLOWS)}, got {dtype}, {overflow}")
    target = out or _beside(ckpt, which.tag, f"-{dtype}")
    with open_location(ckpt, common, which.tag) as source:
        weights, left_out = which.of(source, list_weights(source, DTYPES[dtype]))
        files = plan_files(weights, max_shard_size)
        with Progress(
            f"consolidate {source.location}", sum(source.arrays[weight.array].spec.nbytes for weight in weights)
        ) as progress:
            progress.say(_plan_text(files, left_out, dtype, target) + _absent_text(source))
            with new_folder(source.resources.files, target) as folder:
                lost = write_weights(source, files, folder, overflow=mode, advance=progress.advance)
                if lost and mode == "error":
                    advice = "Choose `--dtype bf16`, or `--overflow clamp` (or `inf`) to write them anyway"
                    raise CheckpointError(lost_text(lost, dtype, advice))
                copied = _copy_companions(source, folder)
            progress.say(_done_text(files, lost, mode, target) + (f", with {copied}" if copied else ""))
            read = reading(progress, source)
        if common.json:
            print_json(
                {
                    "path": str(target),
                    "files": [file.name for file in files],
                    "left_out": left_out,
                    "not_saved": source.record.absent_parameters,
                    "values_lost": sum(each.count for each in lost),
                    **read,
                    **progress.summary(),
                }
            )
    return 0


def _plan_text(files: Sequence[FileLayout], left_out: Sequence[str], dtype: str, target: Path) -> str:
    size = format_bytes(sum(file.file_bytes for file in files))
    num_tensors = sum(len(file.weights) for file in files)
    text = f"plan: {format_count(num_tensors, 'tensor')} as {dtype}, {size} in {format_count(len(files), 'file')}, to {target}"
    if not left_out:
        return text
    more = ", ..." if len(left_out) > _MOST_NAMED else ""
    return f"{text}; leaving out {len(left_out)}: {', '.join(left_out[:_MOST_NAMED])}{more}"


def _absent_text(source: ArraySource) -> str:
    absent = source.record.absent_parameters
    if not absent:
        return ""
    return f"; without {len(absent)} frozen parameters that the save left out, as {', '.join(absent[:3])}"


def _done_text(files: Sequence[FileLayout], lost: Sequence[Lost], mode: str, target: Path) -> str:
    text = f"wrote {format_bytes(sum(file.file_bytes for file in files))} in {format_count(len(files), 'file')} to {target}"
    changed = {"inf": "became infinite", "clamp": "were clamped to the largest value"}.get(mode, mode)
    return f"{text}; {sum(each.count for each in lost)} values did not fit and {changed}" if lost else text


def _beside(ckpt: str | os.PathLike[str], tag: str | None, suffix: str) -> Path:
    place, named = split_location(ckpt, tag)
    if is_url(place):
        raise UsageError(
            f"name the folder to write: `zstore consolidate {shown(os.fspath(ckpt))} OUT`, since the source is a URL"
        )
    path = Path(os.path.abspath(place))
    if named is not None:
        path = path / tag_folder(named)
    return path.with_name(path.name + suffix)


def _copy_companions(source: ArraySource, folder: Path) -> str:
    """Copy config and tokenizer files that lie in the checkpoint or beside it; return their names."""
    if isinstance(source, CheckpointReader):
        return ", ".join(copy_companions([source.folder.parent, source.folder], folder))
    place = Path(source.location)
    return ", ".join(copy_companions([place.parent, place], folder)) if place.is_dir() else ""
