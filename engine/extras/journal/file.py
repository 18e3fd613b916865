"""The file of a run's journal: the folder that it is in, who named that, and what becomes of it.

[Note: the journal's folder]
It is beside the checkpoints, in a folder that a `Namer` named: a later one of them takes it over, and of equals the first
counts. Records wait as long as there is no folder (see `zstore.journal.writer`). The file is opened by the first step or save
that finds one, so that a process that only loads leaves none. From then on

    a save names another folder     it ends, and the records of this process go along into a file there (`name`)
    the loop has it follow          it goes there itself; without a folder it stays behind, and records wait again (`follow`)
    another run was loaded          it ends, and that run's file is opened (`RunJournal`)
    the run ends                    it ends

Of a run that saves to a URL the journal is in the local folder that its saves go through, and is sent along with each of them,
and at the end; to a service of zstore its lines are sent about once a second.

The training thread alone changes anything. Threads of uploads, which send the file, read `current`, which is replaced as
a whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from zstore.journal.lines import decode_lines, encode
from zstore.journal.names import CHECKPOINT_FOLDER, journal_file
from zstore.journal.reader import journal_of
from zstore.journal.writer import FileSink, JournalWriter
from zstore.remote.journal_tail import JournalTail
from zstore.remote.service_target import ServicePlace

from ...checkpoint.destinations import Destination


class Namer(IntEnum):
    """Who named the folder of a journal."""

    NOBODY = 0
    GUESS = 1
    """A load that resumes a run: until a save."""
    RUN = 2
    """The loop at its start, or the first save; `RunFile.follow` may name another one at any time."""
    CONFIG = 3
    """The config: nobody names another."""


@dataclass(frozen=True, kw_only=True)
class OpenJournal:
    """A file that is being written."""

    place: Destination
    run_folder: Path
    """The local folder of the run: that of the file, or the one above if that is a loop's checkpoint."""
    run_id: str
    sink: FileSink
    tail: JournalTail | None
    """Sends it to a service, if the run saves to one."""


@dataclass(kw_only=True)
class RunFile:
    """The file that `writer` writes, if any. See [Note: the journal's folder]."""

    writer: JournalWriter
    failed: Callable[[str], None]
    """Told of failures."""
    place: Destination | None
    """The folder in which it is, or is to be."""
    namer: Namer
    """Who named that."""
    current: OpenJournal | None = None

    def open(self, run_id: str, first: Callable[[], Iterable[Mapping[str, Any]]] = tuple) -> None:
        """Open the file of a run, if its folder is known, and write to it: `first`, then what waits."""
        self.current = None if self.place is None else self._opened(self.place, run_id)
        if self.current is not None:
            self.writer.open(self.current.sink, first())

    def _opened(self, place: Destination, run_id: str) -> OpenJournal | None:
        path = place.folder / journal_file(run_id)
        run = place.folder.parent if CHECKPOINT_FOLDER.fullmatch(place.folder.name) else place.folder
        try:
            if run.is_dir() and not path.exists() and (former := run / journal_of(run, run_id)).exists():
                os.replace(former, path)  # of a run that was resumed, in one of its checkpoints
            sink, tail = FileSink(path), None
            remote = None if place.upload is None else place.upload
            if isinstance(remote, ServicePlace):
                tail = JournalTail(path, remote, run_id, sink.begin_bytes, failed=self.failed)
            return OpenJournal(place=place, run_folder=run, run_id=run_id, sink=sink, tail=tail)
        except OSError as error:
            self._tell(error)
            return None

    def name(self, place: Destination, namer: Namer, end: Mapping[str, Any]) -> None:
        """Name the folder, as a later `namer`; if the file is in another one, it ends with `end` there."""
        self.place, self.namer, former = place, namer, self.current
        if former is None or former.place == place:
            return
        self.close()
        lines = b""
        try:
            with open(former.sink.path, "r+b") as file:
                file.seek(former.sink.begin_bytes)
                lines = file.read()
                file.write(encode(end))
        except OSError as error:
            self._tell(error)
        self.open(former.run_id, lambda: decode_lines(lines))

    def follow(self, folder: Path | None) -> None:
        """Have the journal in `folder` from now on and in no other, unless the config names one: its file moves along.
        None: records wait until there is a folder."""
        if self.namer is Namer.CONFIG:
            return
        self.place, self.namer, former = None if folder is None else Destination(folder), Namer.RUN, self.current
        if former is None or former.sink.path.parent == folder:
            return
        self.close()
        if folder is None:
            return
        try:
            os.replace(former.sink.path, folder / former.sink.path.name)
        except OSError as error:
            self._tell(error)
        self.open(former.run_id)

    def send(self) -> None:
        """Send the file as it is to the URL that the run saves to, if to one that takes files."""
        opened = self.current
        if opened is None or opened.place.upload is None or isinstance(opened.place.upload, ServicePlace):
            return
        remote, path = opened.place.upload, opened.sink.path
        self.writer.flush()
        try:
            remote.send(path, path.name)
        except Exception as error:
            self.failed(f"it was not sent to {remote}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Write what waits, and close the file: from here on records wait."""
        opened, self.current = self.current, None
        self.writer.close()
        if opened is not None and opened.tail is not None:
            opened.tail.close()

    def _tell(self, error: OSError) -> None:
        self.failed(f"{type(error).__name__}: {error}")
