"""The checkpoints of a run, and the bytes of their files.

A committed checkpoint never changes, except for the names that its files have elsewhere. So records and files are read once for
each state of the run's folder (inode and time of every folder in it), and afterwards only the names are counted again. See
[Note: sizes] in `zstore.checkpoint.folder`. Behind a URL one listing counts for a few seconds.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..checkpoint.catalog import LOOPS_FOLDER, Catalog, TagInfo, default_tag, list_nested, newest_tag, scan
from ..checkpoint.folder import Folder, StoredFiles, joined_files, shared_bytes, stored_files
from ..checkpoint.layout import LATEST_FILE, parse_working_name
from ..errors import CheckpointNotFoundError
from .models import CheckpointEntry, CheckpointList, Newest, RefusedFolder

_MIN_AGE_S, _AGE_FACTOR = 0.5, 10.0
"""A list is remade after this time, or after this many times the time that it took."""
_REMOTE_AGE_S = 10.0
_TICK_NS = 50_000_000
"""Two changes within this time may have the same time in a file system."""
Signature = tuple[Any, ...]


@dataclass
class _Found:
    """The checkpoints found last, by their path in the run's folder."""

    signature: Signature | None = None
    catalog: Catalog = field(default_factory=lambda: Catalog(tags=(), refusals=()))
    infos: dict[str, TagInfo] = field(default_factory=dict)
    files: dict[str, StoredFiles] = field(default_factory=dict)


class RunCheckpoints:
    """The checkpoints of one run. Usable from any thread; calls block on the file system."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._found = _Found()
        self._answer: CheckpointList | None = None
        self._expires_at_s = 0.0
        self._lock = threading.RLock()

    def all(self) -> dict[str, TagInfo]:
        """Return the checkpoints by path, oldest first. Raises CheckpointNotFoundError if the folder is missing."""
        with self._lock:
            return self._refresh().infos

    def newest(self) -> tuple[str, TagInfo] | None:
        """Return the path and the newest checkpoint; None if there is none."""
        found = self.all()
        return _with_path(found, newest_tag(list(found.values()))) if found else None

    def find(self, checkpoint: str) -> tuple[str, TagInfo]:
        """Return path and checkpoint of a path, a tag, or `latest`. Raises CheckpointNotFoundError."""
        found = self.all()
        if checkpoint == LATEST_FILE and (newest := self.newest()) is not None:
            return self._latest(found, newest)
        if checkpoint in found:
            return checkpoint, found[checkpoint]
        named = [(path, info) for path, info in found.items() if info.tag == checkpoint]
        if named:
            return named[-1]
        some = ", ".join(list(found)[-5:]) or "none"
        raise CheckpointNotFoundError(
            f"there is no checkpoint {checkpoint!r:.200} in {self._folder}; the newest are: {some}"
        )

    def _latest(self, found: Mapping[str, TagInfo], newest: tuple[str, TagInfo]) -> tuple[str, TagInfo]:
        """Return what the run's own `latest` names, unless a loop's folder in the run has the newest checkpoint."""
        own = tuple(info for path, info in found.items() if "/" not in path)
        if "/" in newest[0]:
            return newest
        return _with_path(found, default_tag(self._folder, replace(self._found.catalog, tags=own))[0])

    def summary(self) -> tuple[int, Newest | None]:
        """Return the number of checkpoints, and the newest."""
        newest = self.newest()
        if newest is None:
            return 0, None
        path, info = newest
        at = info.record.committed_ns / 1e9
        return len(self.all()), Newest(checkpoint=path, tag=info.tag, step=info.record.step, committed_at=at)

    def entry(self, checkpoint: str) -> tuple[CheckpointEntry, TagInfo]:
        """Return an entry of the list, by path, tag or `latest`. Raises CheckpointNotFoundError."""
        with self._lock:
            path, info = self.find(checkpoint)
            if all(each.checkpoint != path for each in self.listed().checkpoints):
                self._answer = None  # it is newer than the list
            return next(each for each in self.listed().checkpoints if each.checkpoint == path), info

    def listed(self) -> CheckpointList:
        """Return the answer of `/api`. Raises CheckpointNotFoundError if the folder is missing."""
        with self._lock:
            began_s = time.monotonic()
            if self._answer is None or began_s > self._expires_at_s:
                self._answer, ended_s = self._list(), time.monotonic()
                self._expires_at_s = ended_s + max(_MIN_AGE_S, _AGE_FACTOR * (ended_s - began_s))
            return self._answer

    def _refresh(self) -> _Found:
        began_ns = time.time_ns()
        signature = _signature_of(self._folder)
        if signature != self._found.signature:
            catalog, nested = scan(self._folder), list_nested(self._folder)
            tags = sorted(catalog.tags + nested.tags, key=lambda info: (info.record.committed_ns, info.record.step))
            infos = {_path_of(info, self._folder): info for info in tags}
            before = self._found
            known = {path: files for path, files in before.files.items() if _same(infos.get(path), before.infos[path])}
            is_sure = not self._folder.is_local or all(at < began_ns - _TICK_NS for _, _, at in signature)
            refusals = catalog.refusals + nested.refusals
            self._found = _Found(
                signature if is_sure else None, replace(catalog, tags=tuple(tags), refusals=refusals), infos, known
            )
        return self._found

    def _list(self) -> CheckpointList:
        found = self._refresh()
        for path, info in found.infos.items():
            if self._folder.is_local or path not in found.files:  # links are created and removed
                found.files[path] = stored_files(info.folder)
        tables = [found.files[path] for path in found.infos]
        entries = []
        for (path, info), table, shared in zip(found.infos.items(), tables, shared_bytes(tables), strict=True):
            record = info.record
            entries.append(
                CheckpointEntry(
                    checkpoint=path,
                    tag=info.tag,
                    step=record.step,
                    run_id=record.run,
                    world_size=record.world_size,
                    committed_at=record.committed_ns / 1e9,
                    size_bytes=table.size_bytes,
                    shared_bytes=shared,
                    freed_bytes=table.freed_bytes,
                    num_files=table.num_files,
                    metrics=_known_metrics(record.state),
                )
            )
        refused = [RefusedFolder(name=one.folder.name, reason=one.reason) for one in found.catalog.refusals]
        return CheckpointList(
            checkpoints=entries,
            refused=refused,
            total_bytes=joined_files(tables).size_bytes,
        )


def _with_path(found: Mapping[str, TagInfo], target: TagInfo) -> tuple[str, TagInfo]:
    return next((path, info) for path, info in found.items() if info is target)


def _same(one: TagInfo | None, other: TagInfo) -> bool:
    return one is not None and one.record.id == other.record.id and one.record.committed_ns == other.record.committed_ns


def _path_of(info: TagInfo, run: Folder) -> str:
    """Return the path of a checkpoint inside the run's folder; one that is being replaced still has its own name."""
    own, holder = parse_working_name(info.folder.name), info.folder.parent
    name = own[0] if own else info.folder.name
    return name if holder.location == run.location else f"{holder.name}/{name}"


def _known_metrics(state: Mapping[str, Any]) -> dict[str, float]:
    metrics = state.get("metrics")
    found = metrics.items() if isinstance(metrics, Mapping) else ()
    return {
        name: float(value)
        for name, value in found
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _signature_of(folder: Folder) -> Signature:
    """Return the folders below a run's, and below those that loops make, each with its inode and time."""
    if not folder.is_local:
        return (int(time.monotonic() / _REMOTE_AGE_S),)
    try:
        found = _subfolders(str(folder.path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(f"{folder} no longer exists: its folder was removed or renamed") from error
    for name, _, _ in list(found):
        if LOOPS_FOLDER.fullmatch(name):
            with contextlib.suppress(OSError):
                found += [(f"{name}/{each}", ino, at) for each, ino, at in _subfolders(folder.path / name)]
    return tuple(found)


def _subfolders(path: str | os.PathLike[str]) -> list[tuple[str, int, int]]:
    """Return name, inode and time of the folders in a folder, by name; folders removed during the call are left out."""
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_dir():
                    status = entry.stat()
                    found.append((entry.name, status.st_ino, status.st_mtime_ns))
    return sorted(found)
