"""Sends the new lines of a journal on this machine to a service."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import quote

from ..errors import CheckpointError, UsageError, ZstoreError
from .service import ServiceFolder
from .service_target import ServicePlace
from .url import Retries

_MOST_BYTES = 512 * 1024
"""About how many bytes of lines go in one request."""


class JournalTail:
    """Sends the lines of the journal of training run `run_id` in the file `path`, from byte `start` on, to `place`, after those
    that it has. Called by one thread at a time. `failed` is told of a refusal, and of lines that could not be sent."""

    def __init__(
        self, path: Path, place: ServicePlace, run_id: str, start: int, *, failed: Callable[[str], None]
    ) -> None:
        self._path, self._place, self._run_id, self._failed = path, place, run_id, failed
        self._sent = start
        self._shift: int | None = None
        """Bytes of the service's file before the first byte of this one; None: not known yet."""
        self._folder: ServiceFolder | None = None
        self._is_refused = False

    def send(self, *, is_end: bool = False) -> None:
        """Send the new whole lines. A network that fails is tried at the next call, `is_end` says that there is none."""
        if self._is_refused:
            return
        try:
            self._send(Retries(attempts=3 if is_end else 1))
        except (UsageError, CheckpointError) as error:
            self._is_refused = True
            self._failed(f"{error}")
        except (ZstoreError, OSError) as error:
            if is_end:
                self._failed(f"{error}")

    def _send(self, retries: Retries) -> None:
        folder = self._folder = self._folder or self._place.open(retries)
        connection = folder.connection.with_retries(retries)
        url = f"/api/runs/{quote(folder.run, safe='')}/journals/{quote(self._run_id, safe='')}"
        if self._shift is None:
            self._shift = int(connection.ask("GET", url)["bytes"]) - self._sent
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

    def _next(self) -> bytes:
        """Return whole lines that were not sent."""
        with self._path.open("rb") as file:
            file.seek(self._sent)
            data = file.read(_MOST_BYTES)
            if len(data) == _MOST_BYTES and b"\n" not in data:
                data += file.readline()
        return data[: data.rfind(b"\n") + 1]
