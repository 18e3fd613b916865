"""`zstore reshard`: the same state laid out for another number of ranks. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from zstore.checkpoint import reshard_checkpoint
from zstore.sizes import format_bytes

from .opening import DEFAULTS, Common, open_location, print_json
from .progress import Progress


def reshard_command(ckpt: str | os.PathLike[str], out: Path, world_size: int, *, common: Common = DEFAULTS) -> int:
    """Write the checkpoint `ckpt` laid out for `world_size` ranks into the folder `out`; return the exit code.

    The tag stays the same. Raises CheckpointExistsError where `out` has it already.
    """
    with open_location(ckpt, common) as source:
        total = sum(array.spec.nbytes for array in source.arrays.values())
        with Progress(f"reshard {source.location}", total) as progress:
            progress.say(
                f"plan: {len(source.arrays)} arrays of {format_bytes(total)}, from {source.record.world_size} to "
                f"{world_size} rank(s), into {out}"
            )
            path = reshard_checkpoint(source, out, world_size, progress.advance)
            progress.say(f"wrote {path} for {world_size} rank(s), from {source.record.world_size}")
        if common.json:
            print_json({"path": str(path), "world_size": world_size, **progress.summary()})
    return 0
