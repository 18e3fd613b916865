"""Reading journals: whole, or on from the end of the last look. Local folders and those behind URLs alike."""

from __future__ import annotations

import contextlib

from ..checkpoint.folder import Folder, FolderLike, folder_at
from .lines import Record, decode_lines
from .names import CHECKPOINT_FOLDER, journal_file, run_of

KINDS = frozenset({"start", "plan", "step", "save", "load", "eval", "metrics", "action", "warning", "end"})
"""Records of other kinds are passed over."""

_MOST_BYTES = 64 * 1024 * 1024
"""Bytes that are read at a time."""


def journals(folder: FolderLike) -> list[str]:
    """Return the names of the journals in a folder, in alphabetical order; of a local one also the paths of those in folders
    `checkpoint-60` and `step=60.ckpt` that a loop makes. Raises FileNotFoundError if there is no folder."""
    place = folder_at(folder)
    entries = place.entries()
    found = list(entries.files)
    for name in entries.folders:
        if place.is_local and CHECKPOINT_FOLDER.fullmatch(name) and not (place.path / name).is_symlink():
            with contextlib.suppress(OSError):  # it may be removed meanwhile
                found += [f"{name}/{file}" for file in place.child(name).entries().files]
    return sorted(path for path in found if run_of(path) is not None)


def journal_of(folder: FolderLike, run_id: str) -> str:
    """Return the path of a run's journal in a folder, whether it is there or not. Raises FileNotFoundError if there is no
    folder."""
    return next((name for name in journals(folder) if run_of(name) == run_id), journal_file(run_id))


def read_from(folder: FolderLike, file: str, offset: int = 0) -> tuple[list[Record], int]:
    """Return the records of a journal from byte `offset` on, and the offset to go on from at the next call.

    Text behind the last newline is still being written, and is not read. At most 64 MiB are read: call again as long as
    the offset grows. A file that is shorter than `offset` was replaced, and is read from its beginning: the offset that is
    returned is then smaller than the one given. Raises FileNotFoundError if the file is missing.
    """
    place = folder_at(folder)
    size = place.size(file)
    if size < offset:
        offset = 0
    if size == offset:
        return [], offset
    data = place.read_range(file, offset, min(size, offset + _MOST_BYTES))
    end = data.rfind(b"\n") + 1
    if not end and len(data) == _MOST_BYTES:
        end = len(data)  # no journal's line
    return [record for record in decode_lines(data[:end]) if record["kind"] in KINDS], offset + end


def read_file(folder: FolderLike, file: str) -> list[Record]:
    """Return all records of a journal."""
    place: Folder = folder_at(folder)
    records: list[Record] = []
    offset, before = 0, -1
    while offset > before:
        before = offset
        more, offset = read_from(place, file, offset)
        records += more
    return records


def read(folder: FolderLike, run_id: str | None = None) -> list[Record]:
    """Return the records of the journal of a run in a folder, by default the one whose last record is the newest.

    Raises FileNotFoundError if there is none.
    """
    place = folder_at(folder)
    if run_id is not None:
        return read_file(place, journal_of(place, run_id))
    found = [read_file(place, name) for name in journals(place)]
    if not found:
        raise FileNotFoundError(f"{place} has no journal: expected a file journal-RUN_ID.jsonl")
    return max(found, key=lambda records: records[-1]["at"] if records else 0.0)
