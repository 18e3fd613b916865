"""`zstore consolidate`: a checkpoint's weights as safetensors in the Hugging Face layout, in bounded memory. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from zstore.checkpoint import ArraySource, new_folder
from zstore.errors import CheckpointError, UsageError
from zstore.sizes import format_bytes
from zstore.weights import DTYPES, Overflow, list_weights, lost_text, plan_files, write_weights

from .companions import copy_companions
from .opening import DEFAULTS, Common, open_location, print_json
from .progress import Progress

OVERFLOWS: dict[str, Overflow] = {"error": "error", "inf": "inf", "clamp": "clamp"}


def consolidate_command(
    ckpt: str | os.PathLike[str],
    out: Path | None,
    dtype: str,
    max_shard_size: int,
    overflow: str,
    *,
    common: Common = DEFAULTS,
) -> int:
    """Write the weights of `ckpt` into the new folder `out` (default: `ckpt`-`dtype` beside it); return the exit code.

    `dtype` is one of `DTYPES`, `max_shard_size` the bytes of the largest file. Raises CheckpointError, with the tensors
    named and nothing published, for values that `dtype` cannot hold (unless `overflow` says "inf" or "clamp");
    CheckpointExistsError where `out` exists.
    """
    mode = OVERFLOWS.get(overflow)
    if dtype not in DTYPES or mode is None:
        raise UsageError(f"expected a type of {', '.join(DTYPES)} and {', '.join(OVERFLOWS)}, got {dtype}, {overflow}")
    target = out or _beside(os.fspath(ckpt), f"-{dtype}")
    with open_location(ckpt, common) as source:
        files = plan_files(list_weights(source, DTYPES[dtype]), max_shard_size)
        total = sum(source.arrays[weight.array].spec.nbytes for file in files for weight in file.weights)
        size = format_bytes(sum(file.file_bytes for file in files))
        with Progress(f"consolidate {source.location}", total) as progress:
            progress.say(
                f"plan: {sum(len(f.weights) for f in files)} tensors, {size} in {len(files)} file(s) to {target}"
            )
            with new_folder(source.resources.files, target) as folder:
                lost = write_weights(source, files, folder, overflow=mode, advance=progress.advance)
                if lost and mode == "error":
                    advice = "Choose `--dtype bf16`, or `--overflow clamp` (or `inf`) to go on"
                    raise CheckpointError(lost_text(lost, dtype, advice))
                copied = _copy_companions(source, folder)
            progress.say(f"wrote {size} in {len(files)} file(s) to {target}" + (f", with {copied}" if copied else ""))
            num_lost = sum(each.count for each in lost)
            if lost:
                progress.say(f"{num_lost} values do not fit {dtype}: written as {mode}")
        if common.json:
            names = [file.name for file in files]
            print_json({"path": str(target), "files": names, "values_lost": num_lost, **progress.summary()})
    return 0


def _beside(ckpt: str, suffix: str) -> Path:
    if "://" in ckpt:
        raise UsageError(f"name the folder to write: `zstore consolidate {ckpt} OUT`; nothing lies beside a URL")
    path = Path(os.path.abspath(ckpt))
    return path.with_name(path.name + suffix)


def _copy_companions(source: ArraySource, folder: Path) -> str:
    """Copy config and tokenizer files that lie in the checkpoint or beside it; return their names."""
    place = Path(source.location)
    return ", ".join(copy_companions([place.parent, place], folder)) if place.is_dir() else ""
