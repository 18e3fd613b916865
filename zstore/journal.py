"""The journal of a run: a line of JSON for each step, save and load, next to its checkpoints. Does not import torch.

[Note: the journal]
Rank 0 appends to `journal-<run_id>.jsonl`; docs/metrics.md has the kinds of lines. Numbers that are not finite are null, and
`not_finite` has them as text, by name. A resumed run continues the file and repeats the steps since its checkpoint: the later
ones count. A last line without a newline was cut off when the process was killed: readers skip it, the next writer removes it.
Readers skip kinds and keys that they do not know.

`append` only queues a record; every half second a thread writes the new ones in one call. So a killed process loses less than a
second, and a slow file system does not delay training. Lines that cannot be written are lost: the first failure is reported,
and training continues.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .checkpoint.folder import FolderLike, folder_at
from .errors import CheckpointError, UsageError, ZstoreError
from .io.closing import Closing, join_threads, start_threads
from .remote.bucket import Retries, UrlFolder
from .remote.service import ServiceFolder, UploadPlace

Record = dict[str, Any]
COLUMNS = (
    "step", "at", "loss", "lr", "grad_norm", "samples", "tokens", "tokens_per_s", "step_s", "forward_s", "backward_s",
    "optimizer_s", "stall_s",
)  # fmt: skip
"""Columns that `steps` always returns, even if no step has a number for them."""

_NAME = re.compile(r"journal-([A-Za-z0-9_.-]{1,100})\.jsonl")
_PAUSE_S = 0.5
_TAIL_BYTES = 64 * 1024
_MAX_REQUEST_BYTES = 512 * 1024
"""Bytes of lines in one request, unless one line is longer."""
_MAX_WAITING = 4096
"""Records that wait while no file is open; older ones are dropped."""


def journal_file(run_id: str) -> str:
    """Return the name of a run's journal. Raises UsageError for an id that cannot be part of a file's name."""
    name = f"journal-{run_id}.jsonl"
    if run_of(name) is None:
        raise UsageError(f"expected a run's id (letters, digits and `-_.`), got {run_id!r:.120}")
    return name


def run_of(file: str) -> str | None:
    """Return the id of the run in the name of a journal; None for any other file name."""
    found = _NAME.fullmatch(file)
    return None if found is None else found.group(1)


def journals(folder: FolderLike) -> list[str]:
    """Return the names of the journals in a folder or at a URL, sorted. Raises FileNotFoundError without the folder."""
    return sorted(name for name in folder_at(folder).entries().files if run_of(name) is not None)


def read(folder: FolderLike, run_id: str | None = None) -> list[Record]:
    """Return the records of a run's journal in a folder, by default the journal with the newest last record.

    Raises FileNotFoundError if there is none.
    """
    place = folder_at(folder)
    names = journals(place) if run_id is None else [journal_file(run_id)]
    found = [decode_lines(place.read_range(name, 0, place.size(name))) for name in names]
    if not found:
        raise FileNotFoundError(f"{place} has no journal: expected a file journal-RUN_ID.jsonl")
    return max(found, key=lambda records: records[-1].get("at") or 0.0 if records else 0.0)


def steps(records: Iterable[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Return the steps that count as columns of one length: `COLUMNS`, and every other number of a step or metric, by name.
    None: a step has no such number. Metrics are in the row of their step."""
    rows: list[dict[str, Any]] = []
    for record in records:
        step, kind = record.get("step"), record.get("kind")
        if not isinstance(step, int) or kind not in ("step", "metrics"):
            continue
        while kind == "step" and rows and rows[-1]["step"] >= step:  # the run went back to an earlier checkpoint
            rows.pop()
        if not rows or rows[-1]["step"] < step:
            rows.append({})
        if not rows[-1] or rows[-1]["step"] == step:
            rows[-1] |= record
    numbers = (name for row in rows for name, value in row.items() if number(value) is not None)
    return {name: [number(row.get(name)) for row in rows] for name in dict.fromkeys((*COLUMNS, *numbers))}


def number(value: Any) -> float | None:
    """Return a finite number of a journal; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def encode(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of JSON. Functions among its values are called; values of no JSON type are written as text."""
    not_finite: dict[str, str] = {}
    found = _finite(record, not_finite)
    found |= {"not_finite": not_finite} if not_finite else {}
    return json.dumps(found, separators=(",", ":"), default=str).encode() + b"\n"


def _finite(value: Any, not_finite: dict[str, str], key: str = "") -> Any:
    if callable(value):
        value = value()
    if isinstance(value, float) and not math.isfinite(value):
        not_finite[key] = str(value)
        return None
    if isinstance(value, Mapping):
        return {str(name): _finite(item, not_finite, str(name)) for name, item in value.items()}
    return [_finite(item, not_finite, key) for item in value] if isinstance(value, list | tuple) else value


def decode_lines(data: bytes) -> list[Record]:
    """Return the records in a part of a journal, without lines that are no records, as a torn one."""
    found = []
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("kind"), str):
                found.append(record)
    return found


class JournalFile(Closing):
    """Appends whole lines to a local file; creates its folder if missing."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self.begin_bytes, self.tail = 0, b""
        """Size of the file when it was opened, and its last lines."""
        if size := os.fstat(self._fd).st_size:
            with mmap.mmap(self._fd, size, prot=mmap.PROT_READ) as content:
                self.begin_bytes = content.rfind(b"\n") + 1
                self.tail = content[max(0, self.begin_bytes - _TAIL_BYTES) : self.begin_bytes]
            os.ftruncate(self._fd, self.begin_bytes)

    def append(self, lines: bytes) -> None:
        """Append all of `lines`; if that fails, none, and raise OSError."""
        size, written = os.fstat(self._fd).st_size, 0
        try:
            while written < len(lines):
                written += os.write(self._fd, lines[written:])
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
            raise

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class JournalWriter(Closing):
    """Takes records from any thread, in microseconds, and writes them once there is a file. See [Note: the journal].

    `failed` is called with the first failure. Records must not change after `append`.
    """

    def __init__(self, failed: Callable[[str], None]) -> None:
        self._failed: Callable[[str], None] | None = failed
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()
        self.file: JournalFile | None = None
        """The open file."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record at the end."""
        self._waiting.append(record)
        if self.file is None and len(self._waiting) > _MAX_WAITING:
            with self._lock:
                if self.file is None:
                    self._waiting.popleft()

    def open(
        self, file: JournalFile, first: Sequence[Mapping[str, Any]] = (), after: Callable[[], None] = lambda: None
    ) -> None:
        """Write to `file`, which this object closes: the records `first`, those that wait, then new ones. The writing thread
        calls `after` each time that it has looked for new ones."""

        def serve() -> None:
            while not self._ending.wait(_PAUSE_S):
                self.flush()
                after()

        with self._lock:
            self.file = file
            self._write(first)
        self._ending.clear()
        self._threads = start_threads(1, serve, "zstore-journal")

    def flush(self) -> None:
        """Write the waiting records, in the caller's thread."""
        if os.getpid() == self._pid:
            with self._lock:
                if self.file is not None:
                    self._write([self._waiting.popleft() for _ in range(len(self._waiting))])

    def _write(self, records: Sequence[Mapping[str, Any]]) -> None:
        if self.file is not None and records:
            try:
                self.file.append(b"".join(map(encode, records)))
            except Exception as error:
                self.fail(f"{type(error).__name__}: {error}")

    def fail(self, text: str) -> None:
        """Report a failure, but only the first one."""
        failed, self._failed = self._failed, None
        if failed is not None:
            failed(text)

    def close(self) -> None:
        """Write the waiting records and close the file; later records wait for another one."""
        threads, self._threads = self._threads, []
        if os.getpid() == self._pid:
            self._ending.set()
            join_threads(threads)
        self.flush()
        with self._lock:
            file, self.file = self.file, None
            if file is not None:
                file.close()


class JournalTail:
    """Sends the lines of the journal of training run `run_id` in the file `path`, from byte `start` on, to `place`, a run of a
    service, which appends them. Called by one thread at a time. `failed` is called with a refusal, and if the last lines could
    not be sent."""

    def __init__(
        self, path: Path, place: UploadPlace, run_id: str, start: int, *, failed: Callable[[str], None]
    ) -> None:
        self._path, self._place, self._run_id, self._failed = path, place, run_id, failed
        self._sent = start
        self._shift: int | None = None
        """Bytes of the service's file before the first byte of this one; None: not known yet."""
        self._folder: UrlFolder | None = None
        self._is_refused = False

    def send(self, *, is_end: bool = False) -> None:
        """Send the new whole lines. After a network error the next call tries again, unless this one `is_end`."""
        if self._is_refused:
            return
        try:
            retries = Retries(attempts=3 if is_end else 1)
            folder = self._folder = self._folder or self._place.open(retries)
            if isinstance(folder, ServiceFolder):
                folder.connection.retries = retries
                self._send(folder)
        except (ZstoreError, OSError) as error:
            self._is_refused = isinstance(error, UsageError | CheckpointError)
            if is_end or self._is_refused:
                self._failed(f"{error}")

    def _send(self, folder: ServiceFolder) -> None:
        url = f"/api/runs/{quote(folder.run, safe='')}/journals/{quote(self._run_id, safe='')}"
        if self._shift is None:
            self._shift = int(folder.connection.ask("GET", url)["bytes"]) - self._sent
        while lines := self._next():
            folder.connection.ask("POST", f"{url}?offset={self._shift + self._sent}", lines)
            self._sent += len(lines)

    def _next(self) -> bytes:
        """Return whole lines that were not sent yet."""
        with self._path.open("rb") as file:
            file.seek(self._sent)
            lines = file.read(_MAX_REQUEST_BYTES)
            if b"\n" not in lines:
                lines += file.readline()
        return lines[: lines.rfind(b"\n") + 1]
