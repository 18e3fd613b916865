"""`zstore reshard`: the same state laid out for another number of ranks. No torch."""

from __future__ import annotations

from pathlib import Path

from zstore.checkpoint import open_checkpoint, reshard_checkpoint

from .progress import Progress


def reshard_command(ckpt: Path, out: Path, world_size: int) -> int:
    """Write the checkpoint `ckpt` laid out for `world_size` ranks into the folder `out`; return the exit code.

    The tag stays the same. Raises CheckpointExistsError where `out` has it already.
    """
    with open_checkpoint(ckpt) as reader:
        total = sum(array.spec.nbytes for array in reader.arrays.values())
        with Progress(f"reshard {reader.path}", total) as progress:
            path = reshard_checkpoint(reader, out, world_size, progress.advance)
            progress.say(f"wrote {path} for {world_size} rank(s), from {reader.record.world_size}")
    return 0
