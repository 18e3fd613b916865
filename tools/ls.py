"""`zstore ls`: lists the checkpoints in a folder, with their sizes on disk. Reads records and file sizes; no torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from zstore.checkpoint import Folder, TagInfo, list_nested, list_tags, shared_bytes, stored_files
from zstore.errors import CheckpointNotFoundError, format_bytes
from zstore.open.sources import folder_of

from .options import DEFAULTS, FolderLocation, Listing
from .printing import cell, make_console, make_table, print_json, printable

if TYPE_CHECKING:
    from rich.table import Table

_AGES = ((86400 * 2, 86400, "d"), (3600 * 2, 3600, "h"), (120, 60, "min"))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A checkpoint as a row of the list."""

    tag: str
    path: str
    step: int
    world_size: int
    committed_ns: int
    age_s: float
    size_bytes: int
    """Size on disk: the bytes of all its files."""
    shared_bytes: int
    """Bytes of files that are shared with other checkpoints of the folder."""
    freed_bytes: int
    """Bytes freed by removing only this checkpoint: those of files that no other checkpoint or run links."""
    newest: bool


def ls_command(folder: FolderLocation, common: Listing = DEFAULTS) -> int:
    """Print the checkpoints in `folder`, oldest first; return the exit code.

    With `json`, one object: `path`, `checkpoints` (see `Entry`) and `refused`. Raises CheckpointNotFoundError if there are
    none.
    """
    place = folder_of(folder, common.storage_options)
    nested = list_nested(place)
    catalog = list_tags(place)
    refusals = catalog.refusals + nested.refusals
    entries = list_entries(catalog.tags + nested.tags, time.time_ns(), place)
    if common.json and (entries or refusals):
        refused = [{"path": refusal.location, "reason": refusal.reason} for refusal in refusals]
        print_json({"path": place.location, "checkpoints": [asdict(entry) for entry in entries], "refused": refused})
        return 0
    if entries:
        make_console().print(_table(entries))
    for refusal in refusals:
        print(printable(f"{refusal.location} is not a checkpoint: {refusal.reason}"), file=sys.stderr)
    if not entries:
        raise CheckpointNotFoundError(f"{place} has no committed checkpoint")
    return 0


def list_entries(infos: Sequence[TagInfo], now_ns: int, place: Folder) -> list[Entry]:
    """Return an entry per checkpoint in the folder `place`, in the same order; those in subfolders `checkpoint-N` are named
    `checkpoint-N/TAG`."""
    files_by_info = [stored_files(info.folder) for info in infos]
    newest = max((info.record.committed_ns for info in infos), default=0)
    return [
        Entry(
            tag=_name(info, place),
            path=info.location,
            step=info.record.step,
            world_size=info.record.world_size,
            committed_ns=info.record.committed_ns,
            age_s=max(0.0, (now_ns - info.record.committed_ns) / 1e9),
            size_bytes=files.size_bytes,
            shared_bytes=shared,
            freed_bytes=files.freed_bytes,
            newest=info.record.committed_ns == newest,
        )
        for info, files, shared in zip(infos, files_by_info, shared_bytes(files_by_info), strict=True)
    ]


def _name(info: TagInfo, place: Folder) -> str:
    parent = info.folder.parent
    is_nested = parent.parent.location == place.location != parent.location
    return f"{parent.name}/{info.tag}" if is_nested else info.tag


def _table(entries: Sequence[Entry]) -> Table:
    table = make_table(("tag",), ("step", "world size", "on disk", "shared", "freed if removed", "age", ""))
    for entry in entries:
        sizes = (format_bytes(n) for n in (entry.size_bytes, entry.shared_bytes, entry.freed_bytes))
        suffix = (_age(entry.age_s), "newest" if entry.newest else "")
        table.add_row(cell(entry.tag), str(entry.step), str(entry.world_size), *sizes, *suffix)
    return table


def _age(age_s: float) -> str:
    for min_s, unit_s, unit in _AGES:
        if age_s >= min_s:
            return f"{age_s / unit_s:.0f} {unit}"
    return f"{age_s:.0f} s"
