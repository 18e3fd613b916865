"""The index of a long journal: what was read of it, on disk.

[Note: the index]
Beside a journal of several MiB there is `.<journal>.index`, an SQLite database: a table of blocks of rows (see [Note: levels]
in `steptable`) and one row with everything else that a reader knows, such as how many bytes were read. A process of its own
writes it, in transactions of some MiB each; of two such processes each goes on from where the other stopped. The service
reads it, reads on from there in memory, and has it continued once there is much to read. It is a cache: its values have
checksums, one that is damaged or of another journal is made anew, and anybody may delete it. For a folder that cannot be
written to, and for one behind a URL, it is in a temporary folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import numpy as np
from pydantic import TypeAdapter

from ...checkpoint.folder import Folder, LocalFolder
from ...errors import CorruptionError
from ...journal.names import run_of
from .columns import Matrix
from .journals import MOST_LINE_BYTES, read_on, read_part
from .journalview import JournalView
from .steptable import StepTable, TableState

_HEAD_BYTES = 256
_WAIT_S = 10.0
"""How long the database may be in use by another process."""


def index_name(journal: str) -> str:
    """Return the name of a journal's index, which is in the run's folder."""
    return f".{journal.replace('/', '~')}.index"


@dataclass
class _IndexState:
    version: Literal[2]
    head: str
    """A digest of the journal's first bytes."""
    view: JournalView
    table: TableState


_STATE = TypeAdapter(_IndexState)


class IndexLostError(CorruptionError):
    """An index is gone or damaged."""


class JournalIndex:
    """An index, which may be missing, as the blocks of a table too: those that are put outside of `extend` stay in memory."""

    def __init__(self, path: Path, folder: Folder, journal: str) -> None:
        self.path = path
        self._folder, self._journal = folder, journal
        self._db: sqlite3.Connection | None = None
        self._newer: dict[tuple[int, int], Matrix] = {}
        self.is_lost = False

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Change it within a `with` block: all or nothing."""
        with contextlib.closing(sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            db.execute("CREATE TABLE IF NOT EXISTS blocks (level, number, columns, rows, PRIMARY KEY (level, number))")
            db.execute("CREATE TABLE IF NOT EXISTS state (id INTEGER PRIMARY KEY, text)")
            self._db = db
            try:
                yield db
            finally:
                self._db = None
            db.execute("COMMIT")

    def _reading(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        if self._db is not None:
            return contextlib.nullcontext(self._db)
        return contextlib.closing(sqlite3.connect(f"file:{quote(str(self.path))}?mode=ro", uri=True, timeout=_WAIT_S))

    def __getitem__(self, key: tuple[int, int]) -> Matrix:
        if key in self._newer:
            return self._newer[key]
        query = "SELECT columns, rows FROM blocks WHERE level = ? AND number = ?"
        try:
            with self._reading() as db:
                columns, rows = db.execute(query, key).fetchone()
            return np.frombuffer(zlib.decompress(rows)).reshape(columns, -1)
        except (sqlite3.Error, ValueError, TypeError, zlib.error) as error:
            self.is_lost = True
            raise IndexLostError(f"{self.path} is gone or damaged ({error}): it is made again") from error

    def __setitem__(self, key: tuple[int, int], rows: Matrix) -> None:
        if self._db is None:
            self._newer[key] = rows
            return
        values = (*key, len(rows), zlib.compress(rows.tobytes(), 1))
        self._db.execute("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?)", values)

    def _head(self) -> str:
        return hashlib.sha256(read_part(self._folder, self._journal, 0, _HEAD_BYTES)).hexdigest()

    def load(self) -> JournalView | None:
        """Return what was read of the journal; None if it is not known."""
        self._newer = {}
        try:
            with self._reading() as db:
                (text,) = db.execute("SELECT text FROM state").fetchone()
            state = _STATE.validate_python(json.loads(zlib.decompress(text)))
            if state.head != self._head() or state.view.offset > self._folder.size(self._journal):
                return None
            state.view.table = StepTable(self, state.table)
        except (sqlite3.Error, ValueError, TypeError, zlib.error, OSError, IndexLostError):
            return None
        return state.view

    def remove(self) -> None:
        """Remove it, and what it has under way first, which would be put into the next one."""
        for path in (f"{self.path}-journal", self.path):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def extend(self) -> bool:
        """Read a part of the journal that was not read; return whether there was one. Raises sqlite3.Error, IndexLostError."""
        with self._writing() as db:
            view = self.load()
            if view is None:
                view = JournalView(run_of(self._journal) or self._journal)
                view.table = StepTable(self)
            before = view.offset
            until = min(self._folder.size(self._journal), before + MOST_LINE_BYTES)
            read_on(self._folder, self._journal, view, until)
            state = _IndexState(version=2, head=self._head(), view=view, table=view.table.save())
            text = zlib.compress(json.dumps(_STATE.dump_python(state)).encode(), 1)
            db.execute("INSERT OR REPLACE INTO state VALUES (1, ?)", (text,))
        return view.offset > before


def main(folder: str, journal: str, path: str, parent: str) -> None:
    """Extend an index as far as its journal goes, or until the process `parent` has ended."""
    os.nice(5)
    index = JournalIndex(Path(path), LocalFolder(Path(folder)), journal)
    was_damaged = False
    while os.getppid() == int(parent):
        try:
            if not index.extend():
                break
        except (sqlite3.DatabaseError, IndexLostError) as error:
            if was_damaged or isinstance(error, sqlite3.OperationalError):  # no room, or in use for too long
                raise
            was_damaged = True
            index.remove()


if __name__ == "__main__":
    main(*sys.argv[1:])
