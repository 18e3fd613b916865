"""Sends the new lines of a journal on this machine to a service, about once a second, behind training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import quote

from ..errors import CheckpointError, UsageError, ZstoreError
from ..io.closing import Closing, join_threads, start_threads
from .service import ServiceFolder
from .service_target import ServicePlace
from .url import Retries

_PAUSE_S = 1.0
_MOST_BYTES = 512 * 1024
"""About how many bytes of lines go in one request."""


class JournalTail(Closing):
    """Sends the lines of the journal of training run `run_id` in the file `path`, from byte `start` on, to `place`.

    Lines that an earlier process of the run left unsent go too, if they are still in the file. `failed` is called, once,
    with the service's refusal, or if lines could not be sent before `close`: a network that is gone for a while is not a
    failure.
    """

    def __init__(
        self, path: Path, place: ServicePlace, run_id: str, start: int, *, failed: Callable[[str], None]
    ) -> None:
        self._path = path
        self._place = place
        self._run_id = run_id
        self._start = start
        self._failed = failed
        self._folder: ServiceFolder | None = None
        self._sent = -1
        """Bytes of the file that are there; -1: not known."""
        self._shift = 0
        """Bytes of the service's file before the first byte of this one."""
        self._refused = False
        self._ending = threading.Event()
        self._threads = start_threads(1, self._serve, "zstore-journal-tail")

    def _serve(self) -> None:
        while not self._ending.wait(_PAUSE_S):
            try:
                self._send(Retries(attempts=1))
            except (UsageError, CheckpointError) as error:  # it is refused, and will be the next time
                self._refused = True
                self._failed(f"{error}")
                return
            except (ZstoreError, OSError):  # the network: the next time, or the end
                continue

    def _send(self, retries: Retries) -> None:
        folder = self._folder = self._folder or self._place.open(retries)
        connection = folder.connection.with_retries(retries)
        url = f"/api/runs/{quote(folder.run, safe='')}/journals/{quote(self._run_id, safe='')}"
        if self._sent < 0:
            self._find_place(int(connection.ask("GET", url)["bytes"]))
        while lines := self._next():
            post = partial(
                connection.request,
                "POST",
                f"{url}?offset={self._shift + self._sent}",
                body=lines,
                headers={"Content-Type": "application/x-ndjson"},
            )
            connection.call(post, "send the journal", self._place.location)
            self._sent += len(lines)

    def _find_place(self, there: int) -> None:
        """Go on at the end of the service's file of `there` bytes, if that file is the beginning of ours."""
        self._sent = self._start
        if there <= self._start:
            with self._path.open("rb") as file:
                file.seek(max(there - 1, 0))
                if there == 0 or file.read(1) == b"\n":
                    self._sent = there
        self._shift = there - self._sent

    def _next(self) -> bytes:
        """Return whole lines that were not sent."""
        with self._path.open("rb") as file:
            file.seek(self._sent)
            data = file.read(_MOST_BYTES)
            if len(data) == _MOST_BYTES and b"\n" not in data:
                data += file.readline()
        return data[: data.rfind(b"\n") + 1]

    def close(self) -> None:
        """Send the remaining lines."""
        if self._ending.is_set():
            return
        self._ending.set()
        join_threads(self._threads)
        if self._refused:
            return
        try:
            self._send(Retries(attempts=3))
        except (ZstoreError, OSError) as error:
            self._failed(f"{error}")
