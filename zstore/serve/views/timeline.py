"""The checkpoints of a run, their files' bytes, and the shared ones. See [Note: sizes] in `zstore.checkpoint.usage`.

[Note: repeated looks]
A committed checkpoint never changes, except for the names that its files have elsewhere. So records and files are read once for
each state of a tag's folder (its inode and time), and afterwards only the number of names is asked for again: of files that
something outside of the run's checkpoints names too, and of all of them every `_ALL_AGAIN_S` or when checkpoints came or went.
Behind a URL one listing tells all sizes; it counts for `_REMOTE_FRESH_S`.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...checkpoint.catalog import Catalog, Refusal, TagInfo, newest_of
from ...checkpoint.folder import Folder
from ...checkpoint.marks import Marks, read_marks
from ...checkpoint.names import LATEST_FILE
from ...checkpoint.usage import SharedFiles, StoredFiles, shared_files, stored_files
from ...errors import CheckpointNotFoundError, ZstoreError
from ..files.visible import Signature, read_catalog, signature_of
from ..models import CheckpointEntry, CheckpointList, RefusedFolder
from .unfinished import find_unfinished

_FRESH_S = 0.5
_ALL_AGAIN_S = 30.0
_REMOTE_FRESH_S = 20.0
_EMPTY = Catalog(tags=(), refusals=())


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
    files: dict[Signature, StoredFiles] = field(default_factory=dict)
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

    def find(self, checkpoint: str) -> Listed:
        """Return the checkpoint of that path, tag or moving tag, or the newest for `latest`.

        Only checkpoints in the list are found. Raises CheckpointNotFoundError.
        """
        found = self.listed()
        if checkpoint == LATEST_FILE and found:
            newest = newest_of([one.info for one in found])
            return next(one for one in found if one.info is newest)
        named = [one for one in found if one.entry.checkpoint == checkpoint]
        named = named or [one for one in found if one.entry.tag == checkpoint]
        named = named or [one for one in found if checkpoint in one.entry.moving_tags]
        if named:
            return named[-1]
        some = ", ".join(one.entry.checkpoint for one in found[-5:]) or "none"
        raise CheckpointNotFoundError(
            f"there is no checkpoint {checkpoint!r} in {self._folder}; the newest are: {some}"
        )

    def mark(self) -> str:
        """Return 16 hexadecimal digits that change when checkpoints, their marks, or saves under way, come or go."""
        answer = self.answer()
        listed = [(one.checkpoint, one.committed_at, one.moving_tags, one.held, one.note) for one in answer.checkpoints]
        text = repr((listed, answer.refused, answer.unfinished, answer.dangling))
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
        signature = signature_of(self._folder)
        changed = signature != known.signature
        if changed:
            catalog = read_catalog(self._folder)
            keys = {key[0]: key for key in signature}
            named = ((info, keys.get(checkpoint_of(info, self._folder))) for info in catalog.tags)
            present = [(info, key) for info, key in named if key is not None]
            known.files = {key: known.files.get(key) or stored_files(info.folder) for info, key in present}
            known.catalog = replace(catalog, tags=tuple(info for info, _ in present))
            known.signature = signature
        tables = list(known.files.values())
        shared = shared_files(tables)
        everything = changed or time.monotonic() - known.counted_s > _ALL_AGAIN_S
        if everything:
            known.counted_s = time.monotonic()
        for table, in_run in zip(tables, shared.names_seen, strict=True):
            table.count_again(np.ones(table.keys.size, bool) if everything else table.names > in_run)
        return self._listed(tables, shared)

    def _look_there(self) -> CheckpointList:
        catalog = read_catalog(self._folder)
        sizes = self._folder.sizes("")
        tables = []
        for info in catalog.tags:
            start = f"{checkpoint_of(info, self._folder)}/"
            tables.append(stored_files(info.folder, {name: n for name, n in sizes.items() if name.startswith(start)}))
        self._known.catalog = catalog
        return self._listed(tables, shared_files(tables))

    def _listed(self, tables: Sequence[StoredFiles], shared: SharedFiles) -> CheckpointList:
        known, marks, refusals = self._known, Marks(), list(self._known.catalog.refusals)
        try:
            marks = read_marks(self._folder)
        except (OSError, ZstoreError) as error:
            refusals.append(Refusal(folder=self._folder, reason=str(error)))
        known.listed = []
        for info, table, holders in zip(known.catalog.tags, tables, shared.num_holders, strict=True):
            record, checkpoint = info.record, checkpoint_of(info, self._folder)
            name = checkpoint if "/" in checkpoint else info.tag  # marks are of the run's own folder
            entry = CheckpointEntry(
                checkpoint=checkpoint,
                tag=info.tag,
                step=record.step,
                run_id=record.run,
                world_size=record.world_size,
                committed_at=record.committed_ns / 1e9,
                size_bytes=table.size_bytes,
                shared_bytes=int(table.sizes[holders > 1].sum()),
                freed_bytes=table.freed_bytes,
                num_files=table.num_files,
                metrics=_known_metrics(record.state),
                moving_tags=marks.tags_of(name),
                held=name in marks.held,
                note=marks.notes.get(name),
            )
            known.listed.append(Listed(info=info, entry=entry))
        return CheckpointList(
            checkpoints=[one.entry for one in known.listed],
            refused=[RefusedFolder(name=refusal.folder.name, reason=refusal.reason) for refusal in refusals],
            dangling=marks.dangling([one.info.tag for one in known.listed]),
            unfinished=find_unfinished(self._folder),
            total_bytes=shared.total_bytes,
        )
