"""The journals of a run, read as far as they go and then on from there.

Journals of one folder are sessions of one run: the newest one counts for its state, and for steps that several have.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path

import numpy as np

from ...checkpoint.folder import Folder
from ...journal.names import run_of
from .columns import SEEN, Part, columns_of
from .index import IndexLostError, JournalIndex, index_name
from .journals import JournalFile, arrival, journals_in, read_on, read_some
from .journalview import JournalView
from .steptable import StepTable

_LONG_BYTES = 4 * 1024 * 1024
"""More than this is not read at once in this process, but by another one into an index."""
_NUM_SAMPLES = 1000
_MOST_AT_ONCE = 2
_building: list[subprocess.Popen[bytes]] = []


class JournalReader:
    """Reads a journal on, with an index if it is long. While that is made `view` is of a sample of the lines."""

    def __init__(self, folder: Folder, name: str, identity: tuple[int, int]) -> None:
        self._folder, self._name, self.identity = folder, name, identity
        self.view = JournalView(run_of(name) or name)
        self._is_indexed = True
        self._index: JournalIndex | None = None
        self._indexed_bytes = 0
        self._builder: subprocess.Popen[bytes] | None = None
        self._builds_itself = not folder.is_local

    def read_on(self, file: JournalFile, *, is_whole: bool) -> None:
        """Read the new lines; all of them if it shall be whole, however long that takes."""
        before, arrived_at = self.view.offset, self.view.arrived_at
        try:
            self._read_on(file.nbytes, is_whole)
        except IndexLostError:
            self._read_on(file.nbytes, is_whole)
        self.view.arrived_at = arrived_at
        if self.view.offset > before or self._folder.is_local:
            self.view.arrived_at = arrival(self._folder, file, self.view.last_at, is_new=not before)

    def _read_on(self, nbytes: int, is_whole: bool) -> None:
        if self._index is not None and self._index.is_lost:
            self._index.remove()
            self.view, self._index, self._indexed_bytes = JournalView(self.view.run_id), None, 0
        if self._index is None and self._is_indexed and nbytes > _LONG_BYTES:
            self._index = self._open()
            self._load()
        if self._builder is not None and (is_whole or self._builder.poll() is not None):
            self._end_build(self._builder)
        if self._index is not None and self._builder is None and nbytes - self._indexed_bytes > _LONG_BYTES:
            self._extend(self._index, is_whole)
        if self._is_indexed and nbytes - self.view.offset > _LONG_BYTES:
            read_some(self._folder, self._name, self.view, nbytes, samples=_NUM_SAMPLES)
        else:
            read_on(self._folder, self._name, self.view, nbytes)

    def _open(self) -> JournalIndex | None:
        name, place = index_name(self._name), None if self._builds_itself else self._folder.path
        if place is None or os.path.islink(place / name) or not os.access(place, os.W_OK):
            try:
                place = Path(tempfile.mkdtemp(prefix="zstore-index-"))
            except OSError:
                self._keep_all()
                return None
            weakref.finalize(self, shutil.rmtree, place, ignore_errors=True)
        return JournalIndex(place / name, self._folder, self._name)

    def _keep_all(self) -> None:
        """Read without an index, of which there is no room even in a temporary folder: all rows are kept in memory."""
        self.view, self._index, self._is_indexed = JournalView(self.view.run_id), None, False

    def _load(self) -> None:
        if self._index is not None and (found := self._index.load()) is not None:
            self.view, self._indexed_bytes = found, found.offset

    def _extend(self, index: JournalIndex, is_whole: bool) -> None:
        if self._builds_itself or is_whole:
            try:
                while index.extend():
                    pass
            except (sqlite3.Error, IndexLostError):
                self._keep_all()
            self._load()
            return
        _building[:] = [one for one in _building if one.poll() is None]
        if len(_building) < _MOST_AT_ONCE:
            arguments = [str(self._folder.path), self._name, str(index.path), str(os.getpid())]
            command = [sys.executable, "-P", "-m", "zstore.serve.views.index", *arguments]
            self._builder = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            _building.append(self._builder)

    def _end_build(self, builder: subprocess.Popen[bytes]) -> None:
        self._builder, before = None, self._indexed_bytes
        failed = builder.wait() != 0
        self._load()
        if failed or self._indexed_bytes == before:
            self._builds_itself = True
            self._index = self._open()


class History:
    """The journals in a run's folder. Usable from any thread: hold `lock` while using its results."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._readers: dict[str, JournalReader] = {}
        self.lock = threading.RLock()

    def refresh(self, *, is_whole: bool = False) -> None:
        """Read the new lines; blocks on the file system. Of a long journal those are a sample at first, unless it shall be
        whole."""
        with self.lock:
            found = journals_in(self._folder)
            self._readers = {name: reader for name, reader in self._readers.items() if name in found}
            for name, file in found.items():
                reader = self._readers.get(name)
                if reader is None or reader.identity != file.identity or file.nbytes < reader.view.offset:
                    reader = self._readers[name] = JournalReader(self._folder, name, file.identity)
                reader.read_on(file, is_whole=is_whole)

    @property
    def views(self) -> list[JournalView]:
        """The views of all journals, the one that began first at the head."""
        views = (reader.view for reader in self._readers.values())
        return sorted(views, key=lambda view: view.sessions[0].started_at if view.sessions else 0.0)

    @property
    def current(self) -> JournalView | None:
        """The newest journal, None if there is none."""
        return max(self.views, key=lambda view: view.last_at, default=None)

    def columns(self, *, points: int, after_step: float, until_step: float) -> dict[str, list[float | None]]:
        """Return the steps of all journals as those of one run: of those that several have, the last one's."""
        try:
            return self._columns(points, after_step, until_step)
        except IndexLostError:
            self.refresh()
            return self._columns(points, after_step, until_step)

    def _columns(self, points: int, after_step: float, until_step: float) -> dict[str, list[float | None]]:
        tables, until = list[tuple[StepTable, float]](), until_step
        for view in sorted(self.views, key=lambda view: view.last_at, reverse=True):
            tables.insert(0, (view.table, until))
            until = min(until, view.table.first_step - 1)
        parts, seen = list[Part](), 0.0
        for table, until in tables:
            names, rows = table.part(points=points, after_step=after_step, until_step=until)
            if seen:
                rows = rows + seen * (np.array(names) == SEEN)[:, None]
            parts.append((names, rows))
            seen += np.nan_to_num(table.tokens_until(until))
        return columns_of(parts, points)
