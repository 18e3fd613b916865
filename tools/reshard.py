"""`zstore reshard`: the same state laid out for another number of ranks, or compressed. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from zstore.checkpoint import open_checkpoint, reshard_checkpoint
from zstore.sizes import format_bytes

from .opening import DEFAULTS, Common, open_location, print_json
from .progress import Progress


def reshard_command(
    ckpt: str | os.PathLike[str],
    out: Path,
    world_size: int | None = None,
    *,
    codec: str = "none",
    common: Common = DEFAULTS,
) -> int:
    """Write the checkpoint `ckpt` laid out for `world_size` ranks (default: as many as it has) into the folder `out`, its
    chunks compressed with `codec`; return the exit code.

    The tag stays the same. Raises CheckpointExistsError where `out` has it already.
    """
    with open_location(ckpt, common) as source:
        total = sum(array.spec.nbytes for array in source.arrays.values())
        ranks = source.record.world_size if world_size is None else world_size
        with Progress(f"reshard {source.location}", total) as progress:
            how = "" if codec == "none" else f", compressed with {codec}"
            progress.say(
                f"plan: {len(source.arrays)} arrays of {format_bytes(total)}, from {source.record.world_size} to "
                f"{ranks} rank(s){how}, into {out}"
            )
            path = reshard_checkpoint(source, out, ranks, progress.advance, codec=codec)
            file_bytes = _file_bytes(path)
            ratio = total / file_bytes if file_bytes else 1.0
            progress.say(
                f"wrote {path} for {ranks} rank(s), from {source.record.world_size}, in {format_bytes(file_bytes)}"
                + ("" if codec == "none" else f" (compressed {ratio:.2f} times)")
            )
        if common.json:
            facts = {"path": str(path), "world_size": ranks, "codec": codec, "file_bytes": file_bytes}
            print_json({**facts, **progress.summary()})
    return 0


def _file_bytes(path: Path) -> int:
    with open_checkpoint(path) as written:
        return sum(array.file_bytes for array in written.arrays.values())
