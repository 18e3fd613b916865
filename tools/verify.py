"""`zstore verify`: every checksum of a checkpoint, in parallel. No torch."""

from __future__ import annotations

from pathlib import Path

from zstore.checkpoint import Fault, open_checkpoint, refused, verify_checkpoint
from zstore.errors import CorruptionError

from .progress import Progress


def verify_command(ckpt: Path) -> int:
    """Check `ckpt` and print each fault on stdout; return the exit code, 1 where there is one.

    In a folder of checkpoints the newest committed one is checked, and those whose record is not valid are faults too.
    """
    faults = [Fault(file=str(refusal.path), problem=refusal.reason) for refusal in refused(ckpt)]
    try:
        with open_checkpoint(ckpt) as reader:
            total = sum(array.file_bytes for array in reader.arrays.values())
            with Progress(f"verify {reader.path}", total) as progress:
                faults += verify_checkpoint(reader, progress.advance)
    except CorruptionError as error:
        faults.append(Fault(file=str(ckpt), problem=str(error)))
    for fault in faults:
        print(fault)
    return 1 if faults else 0
