"""`zstore prune`: removes the checkpoints of a folder that no rule keeps, and says what that frees. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from zstore.checkpoint import Fate, Folder, Keep, TagInfo, bytes_freed, prune, weigh
from zstore.errors import CheckpointNotFoundError, UsageError
from zstore.files import Files
from zstore.remote import RemoteFolder, remove_checkpoints
from zstore.sizes import format_bytes
from zstore.sources import folder_of, maker_of

from .listing import check_listing, records_bytes
from .opening import DEFAULTS, Common, print_json, require_listing_memory
from .printable import printable
from .progress import Progress


def prune_command(
    folder: str | os.PathLike[str], keep: Keep, *, dry_run: bool = False, common: Common = DEFAULTS
) -> int:
    """Print what stays and what goes of the checkpoints in `folder`, and the bytes that are freed; then remove what goes.

    `folder` may be a URL. With `dry_run` nothing is removed. With `json`, the plan goes to stderr, and one object is
    printed: `path`, `dry_run`, `freed_bytes`, `checkpoints` with `tag`, `step`, `bytes` and `reasons` to stay (none: it
    goes), `removed`, `messages`, and `Progress.summary` of what was removed. Returns the exit code, 1 where something could
    not be removed. Raises CheckpointNotFoundError where nothing is there, or no checkpoint has the metric to go by,
    UsageError for other software's, BudgetError where a limit of memory does not hold the list.
    """
    place = folder_of(folder, common.storage_options)
    fates = _weigh(place, keep, common)
    doomed = [fate for fate in fates if not fate.reasons]
    freed_bytes = _freed_bytes(place, doomed)
    for line in _lines(fates, freed_bytes, dry_run=dry_run):
        print(printable(line), file=sys.stderr if common.json else sys.stdout, flush=True)
    removed: list[str] = []
    with Progress(f"prune {place}", sum(fate.file_bytes for fate in doomed)) as progress:
        sizes = {fate.info.location: fate.file_bytes for fate in doomed}

        def gone(info: TagInfo) -> None:
            removed.append(info.tag)
            progress.advance(sizes[info.location])

        messages = [] if dry_run else _remove(place, doomed, gone)
        for message in messages:
            progress.say(f"zstore: {message}")
    if common.json:
        print_json(
            {
                "path": place.location,
                "dry_run": dry_run,
                "freed_bytes": freed_bytes,
                "checkpoints": [_describe(fate) for fate in fates],
                "removed": removed,
                "messages": messages,
                **progress.summary(),
            }
        )
    return 1 if messages else 0


def _weigh(place: Folder, keep: Keep, common: Common) -> list[Fate]:
    """Return what becomes of each checkpoint; see `prune_command` for errors."""
    check_listing(place, common)
    try:
        fates = weigh(place, keep)
    except CheckpointNotFoundError:
        if (maker := maker_of(place)) is not None:
            raise UsageError(
                f"zstore prune removes checkpoints of zstore: {place} looks like one of {maker}, where you remove yourself "
                "what is not needed"
            ) from None
        raise
    read_bytes = records_bytes(place, [fate.info for fate in fates])
    require_listing_memory(common, place.location, num_files=0, records_bytes=read_bytes)
    return fates


def _freed_bytes(place: Folder, doomed: Sequence[Fate]) -> int:
    if place.is_local:
        return bytes_freed([fate.info.path for fate in doomed])
    return sum(fate.file_bytes for fate in doomed)


def _remove(place: Folder, doomed: Sequence[Fate], gone: Callable[[TagInfo], None]) -> list[str]:
    """Remove what goes, and return a message for each that could not be removed."""
    if isinstance(place, RemoteFolder):
        return remove_checkpoints(place, [fate.info for fate in doomed], gone)
    return prune(Files(), doomed, lambda fate: gone(fate.info))


def _describe(fate: Fate) -> dict[str, Any]:
    record = fate.info.record
    return {
        "tag": fate.info.tag,
        "path": fate.info.location,
        "step": record.step,
        "bytes": fate.file_bytes,
        "reasons": list(fate.reasons),
    }


def _lines(fates: list[Fate], freed_bytes: int, *, dry_run: bool) -> list[str]:
    """Return the plan: what is removed and freed, and a line for each checkpoint, the oldest first."""
    width = max(len(fate.info.tag) for fate in fates)
    doomed = [fate for fate in fates if not fate.reasons]
    total = sum(fate.file_bytes for fate in doomed)
    what = (
        f"{'would remove' if dry_run else 'removes'} {len(doomed)} of {len(fates)} checkpoints of {format_bytes(total)}"
    )
    lines = [f"plan: {what}, which frees {format_bytes(freed_bytes)}: files that others link stay"]
    for fate in fates:
        word = f"stays ({', '.join(fate.reasons)})" if fate.reasons else "goes"
        lines.append(
            f"{fate.info.tag:{width}}  step {fate.info.record.step:>8}  {format_bytes(fate.file_bytes):>10}  {word}"
        )
    return lines
