"""The checkpoints of a run, their files' bytes, and the shared ones. See [Note: sizes] in `zstore.checkpoint.usage`.

[Note: repeated looks]
A committed checkpoint never changes, except for the names that its files have elsewhere. So records and files are read once for
each state of a tag's folder (its inode and time), and afterwards only the number of names is asked for again: of files that
something outside of the run's checkpoints names too, and of all of them every `_ALL_AGAIN_S` or when checkpoints came or went.
Behind a URL one listing tells all sizes; it counts for `_REMOTE_FRESH_S`.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...checkpoint.catalog import Catalog, TagInfo, list_nested, scan
from ...checkpoint.folder import Folder
from ...checkpoint.names import LATEST_FILE, RECORD_FILE
from ...errors import CheckpointNotFoundError
from ..models import CheckpointEntry, CheckpointList, RefusedFolder
from .unfinished import find_unfinished

Numbers = npt.NDArray[np.int64]

_FRESH_S = 0.5
_ALL_AGAIN_S = 30.0
_REMOTE_FRESH_S = 20.0
_EMPTY = Catalog(tags=(), refusals=())

Signature = tuple[Any, ...]


@dataclass
class FileTable:
    """The files of one checkpoint: their keys, their bytes, their names in it and anywhere."""

    keys: Numbers
    sizes: Numbers
    names_here: Numbers
    names: Numbers
    paths: str
    """One path of each, separated by NUL."""
    num_files: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, each once."""
        return int(self.sizes.sum())

    def count_again(self, which: npt.NDArray[np.bool_]) -> None:
        """Count the names of the chosen files again."""
        if which.any():
            paths = self.paths.split("\0")
            for place in np.flatnonzero(which):
                try:
                    self.names[place] = os.lstat(paths[place]).st_nlink
                except OSError:
                    self.names[place] = self.names_here[place]


def read_files(folder: Folder) -> FileTable:
    """Return the files of the checkpoint in a local tag's folder."""
    found: dict[int, list[Any]] = {}
    num_files = 0
    waiting = [str(folder.path)]
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:  # it is being removed
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
                continue
            try:
                status = os.lstat(entry.path)
            except OSError:
                continue
            num_files += 1
            # Two file systems in one checkpoint are rare, but their inodes must not be mixed up.
            key = (status.st_ino ^ status.st_dev << 44) & (2**63 - 1)
            if key in found:
                found[key][1] += 1
            else:
                found[key] = [status.st_size, 1, status.st_nlink, entry.path]
    rows = list(found.values())
    sizes, names_here, names = (np.array([row[n] for row in rows], np.int64) for n in range(3))
    paths = "\0".join(row[3] for row in rows)
    return FileTable(np.array(list(found), np.int64), sizes, names_here, names, paths, num_files)


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A checkpoint of the list."""

    info: TagInfo
    entry: CheckpointEntry


@dataclass
class _Known:
    """The files and names that were found last."""

    signature: Signature = ()
    catalog: Catalog = _EMPTY
    files: dict[Signature, FileTable] = field(default_factory=dict)
    listed: list[Listed] = field(default_factory=list)
    answer: CheckpointList | None = None
    looked_s: float = -math.inf
    counted_s: float = -math.inf


def checkpoint_of(info: TagInfo, run: Folder) -> str:
    """Return the path of a tag's folder inside the run's, for URLs of the service."""
    holder = info.folder.parent
    return info.folder.name if holder.location == run.location else f"{holder.name}/{info.folder.name}"


def _known_metrics(state: Mapping[str, Any]) -> dict[str, float]:
    metrics = state.get("metrics")
    found = metrics.items() if isinstance(metrics, Mapping) else ()
    return {
        name: float(value)
        for name, value in found
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


class Timeline:
    """The checkpoints of one run. Usable from any thread; calls block on the file system."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._known = _Known()
        self._lock = threading.Lock()

    def answer(self) -> CheckpointList:
        """Return the list as `/api` has it. Raises CheckpointNotFoundError if the folder is gone."""
        with self._lock:
            return self._look()

    def listed(self) -> list[Listed]:
        """Return the checkpoints, the oldest first; raises like `answer`."""
        with self._lock:
            self._look()
            return self._known.listed

    def signature(self) -> Signature:
        """Return a value that changes if checkpoints come or go; cheap for a local folder, the last known one behind a URL."""
        if not self._folder.is_local:
            with self._lock:
                return self._known.signature
        return _signature(self._folder)

    def find(self, checkpoint: str) -> Listed:
        """Return the checkpoint of that path or tag, or the newest for `latest`.

        Only checkpoints in the list are found. Raises CheckpointNotFoundError.
        """
        found = self.listed()
        if checkpoint == LATEST_FILE and (newest := newest_of(found)) is not None:
            return newest
        named = [one for one in found if one.entry.checkpoint == checkpoint]
        named = named or [one for one in found if one.entry.tag == checkpoint]
        if named:
            return named[-1]
        some = ", ".join(one.entry.checkpoint for one in found[-5:]) or "none"
        raise CheckpointNotFoundError(
            f"there is no checkpoint {checkpoint!r} in {self._folder}; the newest are: {some}"
        )

    def mark(self) -> str:
        """Return 16 hexadecimal digits that change when checkpoints, or saves under way, come or go."""
        answer = self.answer()
        listed = [(one.checkpoint, one.committed_at) for one in answer.checkpoints]
        text = repr((listed, answer.refused, answer.unfinished))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def forget(self) -> None:
        """Look again at the next call."""
        with self._lock:
            self._known.looked_s = -math.inf

    def _look(self) -> CheckpointList:
        known = self._known
        age_s = time.monotonic() - known.looked_s
        if known.answer is not None and age_s < (_FRESH_S if self._folder.is_local else _REMOTE_FRESH_S):
            return known.answer
        known.answer = self._look_here() if self._folder.is_local else self._look_there()
        known.looked_s = time.monotonic()
        return known.answer

    def _look_here(self) -> CheckpointList:
        known = self._known
        signature = _signature(self._folder)
        changed = signature != known.signature
        if changed:
            catalog = self._read_catalog()
            present = [(info, key) for info in catalog.tags if (key := _folder_signature(info.folder)) is not None]
            known.files = {key: known.files.get(key) or read_files(info.folder) for info, key in present}
            known.catalog = replace(catalog, tags=tuple(info for info, _ in present))
            known.signature = signature
        tables = list(known.files.values())
        shared = _share(tables)
        everything = changed or time.monotonic() - known.counted_s > _ALL_AGAIN_S
        if everything:
            known.counted_s = time.monotonic()
        for table, in_run in zip(tables, shared.names_seen, strict=True):
            table.count_again(np.ones(table.keys.size, bool) if everything else table.names > in_run)
        return self._listed(tables, shared)

    def _look_there(self) -> CheckpointList:
        catalog = self._read_catalog()
        sizes = self._folder.sizes("")
        tables = []
        for info in catalog.tags:
            start = f"{checkpoint_of(info, self._folder)}/"
            found = [size or 0 for name, size in sizes.items() if name.startswith(start)]
            one = np.ones(1, np.int64)
            key = np.array([hash(info.location) & (2**63 - 1)], np.int64)
            tables.append(FileTable(key, np.array([sum(found)], np.int64), one, one, "", len(found)))
        self._known.catalog = catalog
        self._known.signature = tuple((info.location, info.record.id) for info in catalog.tags)
        return self._listed(tables, _share(tables))

    def _read_catalog(self) -> Catalog:
        catalog = scan(self._folder) if not self._folder.has(RECORD_FILE) else _EMPTY
        nested = list_nested(self._folder)
        tags = sorted(catalog.tags + nested.tags, key=lambda info: (info.record.committed_ns, info.record.step))
        return Catalog(tags=tuple(tags), refusals=catalog.refusals + nested.refusals)

    def _listed(self, tables: Sequence[FileTable], shared: _Shared) -> CheckpointList:
        known = self._known
        known.listed = []
        for info, table, holders in zip(known.catalog.tags, tables, shared.num_holders, strict=True):
            record = info.record
            entry = CheckpointEntry(
                checkpoint=checkpoint_of(info, self._folder),
                tag=info.tag,
                step=record.step,
                run_id=record.run,
                world_size=record.world_size,
                committed_at=record.committed_ns / 1e9,
                size_bytes=table.size_bytes,
                shared_bytes=int(table.sizes[holders > 1].sum()),
                freed_bytes=int(table.sizes[table.names_here >= table.names].sum()),
                num_files=table.num_files,
                metrics=_known_metrics(record.state),
            )
            known.listed.append(Listed(info=info, entry=entry))
        return CheckpointList(
            checkpoints=[one.entry for one in known.listed],
            refused=[
                RefusedFolder(name=refusal.folder.name, reason=refusal.reason) for refusal in known.catalog.refusals
            ],
            unfinished=find_unfinished(self._folder),
            total_bytes=shared.total_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """Of the files of several checkpoints, by table:"""

    num_holders: list[Numbers]
    """For each file the number of checkpoints that have it."""
    names_seen: list[Numbers]
    """For each file the number of its names in all checkpoints."""
    total_bytes: int
    """Bytes of all files, each once."""


def _share(tables: Sequence[FileTable]) -> _Shared:
    if not tables:
        return _Shared(num_holders=[], names_seen=[], total_bytes=0)
    keys, sizes, names = (
        np.concatenate([getattr(table, name) for table in tables]) for name in ("keys", "sizes", "names_here")
    )
    _, first, places, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    seen = np.bincount(places, weights=names).astype(np.int64)
    ends = np.cumsum([table.keys.size for table in tables])[:-1]
    return _Shared(
        num_holders=np.split(counts[places], ends),
        names_seen=np.split(seen[places], ends),
        total_bytes=int(sizes[first].sum()),
    )


def _folder_signature(folder: Folder) -> Signature | None:
    """Return a value that changes when another checkpoint takes the place of a tag's folder; None if it was removed."""
    try:
        status = os.stat(folder.path)
    except FileNotFoundError:
        return None
    return folder.location, status.st_ino, status.st_mtime_ns


def _signature(folder: Folder) -> Signature:
    """Return the folders below a run's, and below those that loops make, each with its inode and time."""
    try:
        found = _subfolders(str(folder.path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(f"{folder} is gone: its folder was removed or renamed") from error
    for name, _, _ in list(found):
        if name.startswith(("checkpoint-", "checkpoint_")):
            with contextlib.suppress(OSError):
                inner = _subfolders(os.path.join(folder.path, name))
                found += [(f"{name}/{each}", ino, at) for each, ino, at in inner]
    return tuple(found)


def _subfolders(path: str) -> list[tuple[str, int, int]]:
    """Return name, inode and time of the folders in a folder, by name; those that are removed meanwhile are left out."""
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_dir():
                    status = entry.stat()
                    found.append((entry.name, status.st_ino, status.st_mtime_ns))
    return sorted(found)


def newest_of(listed: Sequence[Listed]) -> Listed | None:
    """Return the checkpoint that `latest` means, None if there is none."""
    return next((one for one in reversed(listed) if one.info.record.is_latest), listed[-1] if listed else None)
