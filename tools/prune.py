"""`zstore prune`: removes the checkpoints of a folder that no rule keeps, and says what that frees. No torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from zstore.checkpoint import Fate, Keep, bytes_freed, prune, weigh
from zstore.errors import UsageError
from zstore.files import Files
from zstore.sizes import format_bytes

from .opening import DEFAULTS, Common, print_json
from .printable import printable


def prune_command(
    folder: str | os.PathLike[str], keep: Keep, *, dry_run: bool = False, common: Common = DEFAULTS
) -> int:
    """Print what stays and what goes of the checkpoints in `folder`, and the bytes that are freed; then remove what goes.

    With `dry_run` nothing is removed. With `json`, one object: `path`, `dry_run`, `freed_bytes`, `checkpoints` with
    `tag`, `step`, `bytes` and `reasons` to stay (none: it goes), `removed`, `messages`. Returns the exit code, 1 where
    something could not be removed. Raises UsageError for a URL, CheckpointNotFoundError where nothing is there, or no
    checkpoint has the metric to go by.
    """
    where = os.fspath(folder)
    if "://" in where:
        raise UsageError(f"zstore prune works on folders of this machine, got {where}: remove what is not needed there")
    fates = weigh(Path(where), keep)
    doomed = [fate.info.path for fate in fates if not fate.reasons]
    freed_bytes = bytes_freed(doomed)
    if not common.json:
        for line in _lines(fates, freed_bytes, dry_run=dry_run):
            print(printable(line))
    removed: list[str] = []
    messages = [] if dry_run else prune(Files(), fates, lambda fate: removed.append(fate.info.tag))
    for message in messages:
        print(printable(f"zstore: {message}"), file=sys.stderr)
    if common.json:
        print_json(
            {
                "path": where,
                "dry_run": dry_run,
                "freed_bytes": freed_bytes,
                "checkpoints": [_describe(fate) for fate in fates],
                "removed": removed,
                "messages": messages,
            }
        )
    return 1 if messages else 0


def _describe(fate: Fate) -> dict[str, Any]:
    record = fate.info.record
    return {
        "tag": fate.info.tag,
        "path": str(fate.info.path),
        "step": record.step,
        "bytes": fate.file_bytes,
        "reasons": list(fate.reasons),
    }


def _lines(fates: list[Fate], freed_bytes: int, *, dry_run: bool) -> list[str]:
    """Return what is printed: a line for each checkpoint, the oldest first, and what its removal comes to."""
    width = max(len(fate.info.tag) for fate in fates)
    lines = []
    for fate in fates:
        word = f"stays ({', '.join(fate.reasons)})" if fate.reasons else "goes"
        lines.append(
            f"{fate.info.tag:{width}}  step {fate.info.record.step:>8}  {format_bytes(fate.file_bytes):>10}  {word}"
        )
    doomed = [fate for fate in fates if not fate.reasons]
    total = sum(fate.file_bytes for fate in doomed)
    lines.append(
        f"{'would remove' if dry_run else 'removes'} {len(doomed)} of {len(fates)} checkpoints of {format_bytes(total)}, "
        f"which frees {format_bytes(freed_bytes)}: files that others link stay"
    )
    return lines
