"""Writing a journal: lines are collected, and a thread appends them.

[Note: what writing costs]
`append` puts a dict into a queue. Every half second a thread makes JSON of the new ones, and appends it in one write. So a
killed process loses less than a second, a slow file system holds nobody up, and the file is not forced to the drive. If a
write fails, for instance on a full disk, the torn last line is cut off, the first failure is reported, and the same lines
are tried again with the next ones; of those the newest few MiB are kept.

Lines wait as long as their file is not known; if there are many, every other one of the older half is dropped.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..io.closing import Closing, join_threads, start_threads
from .lines import encode

_PAUSE_S = 0.5
"""Seconds between two writes."""
_MOST_WAITING = 4096
"""Most records that wait for a sink."""
_MOST_UNWRITTEN_BYTES = 4 * 1024 * 1024
_BLOCK_BYTES = 64 * 1024


class FileSink:
    """Appends to a local file, whose folder is made if it is missing. A last line that was cut off is removed first. Called by
    one thread at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        self.path = path
        self._fd = os.open(path, flags, 0o666)
        try:
            self.begin_bytes = _cut_torn_line(self._fd)
            """Size of the file before anything is appended."""
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, lines: bytes) -> None:
        """Keep some whole lines, all or none of them; raises anything if it cannot."""
        written = 0
        try:
            while written < len(lines):
                written += os.write(self._fd, lines[written:])
        except BaseException:
            if written:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _cut_torn_line(fd: int) -> int:
    """Cut a file behind its last newline; return its size."""
    size = end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)
    return end


class JournalWriter(Closing):
    """Takes records from any thread, in microseconds; they are written once there is a sink. See [Note: what writing costs].

    `failed` is called with the first failure, in the thread that writes. A record must not change once it is given. Close it:
    all records are written by then.
    """

    def __init__(self, failed: Callable[[str], None]) -> None:
        self._failed = failed
        self._has_failed = False
        self._records: deque[Mapping[str, Any]] = deque()
        self._adding = threading.Lock()
        self._writing = threading.Lock()
        self._unwritten: deque[bytes] = deque()
        self._sink: FileSink | None = None
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()

    @property
    def is_open(self) -> bool:
        """Whether there is a sink."""
        return self._sink is not None

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record at the end."""
        with self._adding:
            self._records.append(record)
            if self._sink is None and len(self._records) > _MOST_WAITING:
                self._thin()

    def _thin(self) -> None:
        half = len(self._records) // 2
        self._records = deque(r for i, r in enumerate(self._records) if i >= half or i % 2)

    def open(self, sink: FileSink, first: Iterable[Mapping[str, Any]] = ()) -> None:
        """Write to `sink`, which is this object's from now on: the records `first`, then those that wait, then new ones."""
        with self._writing, self._adding:
            self._unwritten.appendleft(b"".join(map(encode, first)))  # ahead of lines that the sink before did not take
            self._sink = sink
        self._ending.clear()
        self._threads = start_threads(1, self._serve, "zstore-journal")

    def _serve(self) -> None:
        while not self._ending.wait(_PAUSE_S):
            self.flush()

    def flush(self) -> None:
        """Write the waiting records, in the caller's thread; if that fails it is tried again later."""
        with self._writing:
            if self._sink is None or os.getpid() != self._pid:
                return
            with self._adding:
                records, self._records = self._records, deque()
            if records:
                self._unwritten.append(b"".join(map(encode, records)))
            try:
                while self._unwritten:
                    self._sink.append(self._unwritten[0])
                    self._unwritten.popleft()
            except Exception as error:
                self._drop_oldest()
                self._tell(error)

    def _drop_oldest(self) -> None:
        while len(self._unwritten) > 1 and sum(map(len, self._unwritten)) > _MOST_UNWRITTEN_BYTES:
            self._unwritten.popleft()

    def _tell(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._failed(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Write the waiting records and close the sink; from here on records wait for another one."""
        threads, self._threads = self._threads, []
        if os.getpid() == self._pid:
            self._ending.set()
            join_threads(threads)
        self.flush()
        with self._writing:
            sink, self._sink = self._sink, None
            if sink is not None:
                sink.close()
