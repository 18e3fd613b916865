"""`zstore ls`: the checkpoints of a folder, and the size of each on disk. Reads records and file sizes; no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from zstore.checkpoint import Catalog, Folder, TagInfo, list_nested, list_tags, shared_bytes, stored_files
from zstore.errors import CheckpointNotFoundError, CorruptionError
from zstore.open.sources import folder_of
from zstore.sizes import format_bytes

from .listing import check_listing, check_records, describe_refusals, print_refusals
from .opening import DEFAULTS, Common, array_bytes, open_location, reporting
from .options import FolderLocation
from .printing import cell, make_console, make_table

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS_OF_ONE = {"world_size": "world size", "array_bytes": "array data"}
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
    """Its size on disk: the bytes of all its files."""
    shared_bytes: int
    """Bytes of those files that other checkpoints of the folder have too."""
    freed_bytes: int
    """Bytes that removing it alone frees: of files that no other checkpoint or run links."""
    newest: bool


def ls_command(folder: FolderLocation, common: Common = DEFAULTS) -> int:
    """Print the checkpoints in `folder`, the oldest first; return the exit code.

    With `json`, one object: `path`, `checkpoints` (see `Entry`), `refused`, and `Progress.summary` of the records that were
    read. Raises CheckpointNotFoundError if there is none, BudgetError if a memory limit is too small for the list.
    """
    place = folder_of(folder, common.storage_options)
    with reporting(f"ls {place}", common) as progress:
        check_listing(place, common)
        try:
            found = list_tags(place)
        except (CheckpointNotFoundError, CorruptionError):
            found = Catalog(tags=(), refusals=())
        nested = list_nested(place)
        found = Catalog(tags=found.tags + nested.tags, refusals=found.refusals + nested.refusals)
        nbytes = check_records(place, found.tags, common)
        progress.expect(nbytes)
        entries = list_entries(found.tags, time.time_ns(), place)
        progress.advance(nbytes)
        listed = bool(found.tags or found.refusals)
        one = None if listed else _describe_one(folder, common)
        progress.document |= {
            "path": place.location if listed else os.fspath(folder),
            "checkpoints": [asdict(entry) for entry in entries] if one is None else [one],
            "refused": describe_refusals(found.refusals),
        }
    if common.json:
        return 0
    if entries or one is not None:
        make_console().print(_table(entries) if one is None else _table_of_one(one))
    print_refusals(found.refusals)
    if listed and not entries:
        raise CheckpointNotFoundError(f"{place} has no committed checkpoint")
    return 0


def list_entries(infos: Sequence[TagInfo], now_ns: int, place: Folder) -> list[Entry]:
    """Return an entry for each checkpoint in the folder `place`, in their order; those of its folders `checkpoint-N` are
    called `checkpoint-N/TAG`."""
    found = [stored_files(info.folder) for info in infos]
    newest = max((info.record.committed_ns for info in infos), default=0)
    names = [_name(info, place) for info in infos]
    return [
        Entry(
            tag=name,
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
        for name, info, files, shared in zip(names, infos, found, shared_bytes(found), strict=True)
    ]


def _name(info: TagInfo, place: Folder) -> str:
    holder = info.folder.parent
    within = holder.parent.location == place.location != holder.location
    return f"{holder.name}/{info.tag}" if within else info.tag


def _describe_one(location: str | os.PathLike[str], common: Common) -> dict[str, Any]:
    """Return the one checkpoint that `location` opens, as JSON: other software's, or a tag's own folder that is damaged."""
    with open_location(location, common) as source:
        return {
            "tag": source.tag,
            "path": source.location,
            "kind": source.kind,
            "step": source.record.step,
            "world_size": source.record.world_size,
            "array_bytes": array_bytes(source),
        }


def _table_of_one(document: Mapping[str, Any]) -> Table:
    table = make_table([_COLUMNS_OF_ONE.get(column, column) for column in document])
    shown = {**document, "array_bytes": format_bytes(document["array_bytes"])}
    table.add_row(*(cell(str(value)) for value in shown.values()))
    return table


def _table(entries: Sequence[Entry]) -> Table:
    table = make_table(("tag",), ("step", "world size", "on disk", "shared", "freed if removed", "age", ""))
    for entry in entries:
        sizes = (format_bytes(n) for n in (entry.size_bytes, entry.shared_bytes, entry.freed_bytes))
        table.add_row(
            cell(entry.tag),
            str(entry.step),
            str(entry.world_size),
            *sizes,
            _age(entry.age_s),
            "newest" if entry.newest else "",
        )
    return table


def _age(age_s: float) -> str:
    for least_s, unit_s, unit in _AGES:
        if age_s >= least_s:
            return f"{age_s / unit_s:.0f} {unit}"
    return f"{age_s:.0f} s"
