"""`zstore consolidate`: a checkpoint's weights as safetensors in the Hugging Face layout, in bounded memory. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from zstore.checkpoint import new_folder, open_checkpoint
from zstore.errors import CheckpointError, UsageError
from zstore.sizes import format_bytes
from zstore.weights import DTYPES, Overflow, list_weights, lost_text, plan_files, write_weights

from .companions import copy_companions
from .progress import Progress

OVERFLOWS: dict[str, Overflow] = {"error": "error", "inf": "inf", "clamp": "clamp"}


def consolidate_command(ckpt: Path, out: Path | None, dtype: str, max_shard_size: int, overflow: str) -> int:
    """Write the weights of `ckpt` into the new folder `out` (default: `ckpt`-`dtype` beside it); return the exit code.

    `dtype` is one of `DTYPES`, `max_shard_size` the bytes of the largest file. Raises CheckpointError, with the tensors
    named and nothing published, for values that `dtype` cannot hold (unless `overflow` says "inf" or "clamp");
    CheckpointExistsError where `out` exists.
    """
    mode = OVERFLOWS.get(overflow)
    if dtype not in DTYPES or mode is None:
        raise UsageError(f"expected a type of {', '.join(DTYPES)} and {', '.join(OVERFLOWS)}, got {dtype}, {overflow}")
    target = out or _beside(ckpt, f"-{dtype}")
    with open_checkpoint(ckpt) as reader:
        files = plan_files(list_weights(reader, DTYPES[dtype]), max_shard_size)
        total = sum(reader.arrays[weight.array].spec.nbytes for file in files for weight in file.weights)
        with Progress(f"consolidate {reader.path}", total) as progress:
            with new_folder(reader.resources.files, target) as folder:
                lost = write_weights(reader, files, folder, overflow=mode, advance=progress.advance)
                if lost and mode == "error":
                    advice = "Choose `--dtype bf16`, or `--overflow clamp` (or `inf`) to go on"
                    raise CheckpointError(lost_text(lost, dtype, advice))
                copied = _copy_companions(reader.path, folder)
            size = format_bytes(sum(file.file_bytes for file in files))
            progress.say(f"wrote {size} in {len(files)} file(s) to {target}" + (f", with {copied}" if copied else ""))
            if lost:
                progress.say(f"{sum(each.count for each in lost)} values do not fit {dtype}: written as {mode}")
    return 0


def _beside(ckpt: Path, suffix: str) -> Path:
    path = Path(os.path.abspath(ckpt))
    return path.with_name(path.name + suffix)


def _copy_companions(checkpoint: Path, folder: Path) -> str:
    """Copy config and tokenizer files that lie in the checkpoint or beside it; return their names."""
    return ", ".join(copy_companions([checkpoint.parent, checkpoint], folder))
