"""Uploading to a service of zstore: only files that it does not have, and from the byte at which a broken connection ended;
and the lines of a run's journal as they are written.

The service says at every point which files are missing, so that the same save offered again goes on from there. See [Note: the
protocol of an upload] in `zstore.serve.receive`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..checkpoint.names import METADATA_FILE, RECORD_FILE, manifest_file, tag_folder
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.retention import Keep
from ..errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptionError,
    StorageError,
    UsageError,
    ZstoreError,
)
from ..io.pool import Workers
from .bucket import UrlFolder, checked_parts
from .service import ServiceBusyError, ServiceFolder, UploadPlace
from .target import Advance, files_here
from .url import Retries

_COMMIT_S = 1800.0
"""The service makes all files durable, and removes old checkpoints, before it answers."""
_MOST_WRONG = 3
"""Times that a file may arrive wrong: then it is not the network that is broken."""
_MOST_LINES_BYTES = 512 * 1024
"""Bytes of a journal that go in one request, unless one line is longer."""
_BLOCK_BYTES = 256 * 1024
"""Bytes of a file that are sent at a time."""


class ServiceTarget:
    """An upload to the run `folder`. See `BucketTarget` for its calls."""

    def __init__(self, folder: ServiceFolder, tag: str) -> None:
        self.location = folder.location_of(tag_folder(tag))
        self._run, self._connection = folder.run, folder.connection
        self._offered: dict[str, Any] = {}
        self.facts: Mapping[str, Any] = {}

    @property
    def _path(self) -> str:
        return f"/api/uploads/{self.facts['upload']}"

    def begin(
        self, reader: CheckpointReader, *, overwrite: bool, replaces_own: bool = False, keep: Keep | None = None
    ) -> list[str]:
        """Sends metadata and manifests, by which the service plans the upload.

        Raises DiskFullError if it has no room for the other files.
        """
        files = files_here(reader)
        manifests = [manifest_file(rank) for rank in range(reader.record.world_size)]
        extras = {name: size for name, size in files.items() if "/" not in name}
        self._offered = {
            "run": self._run,
            "record": (reader.path / RECORD_FILE).read_text(encoding="utf-8"),
            "documents": {METADATA_FILE: reader.folder.size(METADATA_FILE)} | {name: files[name] for name in manifests},
            "extras": {name: {"bytes": size, "sha256": _sha256(reader.path / name)} for name, size in extras.items()},
            "overwrite": overwrite,
            "replaces_own": replaces_own,
            "keep": None if keep is None else vars(keep),
        }
        state = self._connection.ask("POST", "/api/uploads", self._offered)
        self.facts = {"upload": str(state["id"]), "committed": state["state"] == "committed"}
        if not self.facts["committed"]:
            for each in state["files"]:
                if each["path"] in self._offered["documents"]:
                    self._send_file(reader.path / each["path"], each, lambda _: None)
            self._connection.ask("POST", f"{self._path}/plan", timeout_s=_COMMIT_S)
        return []

    def send(
        self, workers: Workers, top: Path, files: Mapping[str, int], advance: Advance, *, rank: int | None = None
    ) -> int:
        """Files that the service has, or links, are not sent."""
        wanted: dict[str, Any] = {}
        if not self.facts["committed"]:
            # One answer for one rank, and one for all.
            query = f"?rank={rank}" if rank else ""
            wanted = {each["path"]: each for each in self._connection.ask("GET", f"{self._path}{query}")["files"]}
        advance(sum(size for file, size in files.items() if file not in wanted))
        tasks = [partial(self._deliver, top / file, each, advance) for file, each in wanted.items() if file in files]
        return sum(workers.run(tasks))

    def _deliver(self, source: Path, wanted: dict[str, Any], advance: Advance) -> int:
        """Let the service link a file, or send it; return the bytes that went."""
        is_linked = False
        if wanted["candidate"]:
            claims = {"files": {wanted["path"]: _sha256(source)}}
            answer = self._connection.ask("POST", f"{self._path}/claims", claims, timeout_s=_COMMIT_S)
            is_linked = wanted["path"] in answer["linked"]
        nbytes = 0 if is_linked else self._send_file(source, wanted, advance)
        advance(wanted["bytes"])
        return nbytes

    def _send_file(self, source: Path, wanted: Mapping[str, Any], advance: Advance) -> int:
        """Send the part of a file that the service lacks, and go on from there if the connection breaks; return its bytes."""
        connection, path = self._connection, f"{self._path}/files/{quote(wanted['path'])}"
        size, received, tries, wrong = int(wanted["bytes"]), int(wanted["received"]), 0, 0

        def attempt() -> int:
            nonlocal tries, wrong
            there = int(json.loads(connection.request("GET", path).data)["received"]) if tries else received
            tries += 1
            if there == size > 0:
                return 0
            headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size - there)}
            if size:
                headers["Content-Range"] = f"bytes {there}-{size - 1}/{size}"
            with source.open("rb", buffering=0) as file:
                if (found := os.fstat(file.fileno()).st_size) != size:
                    raise StorageError(f"the file has {found} bytes, expected {size}", path=str(source))
                file.seek(there)
                parts = checked_parts(file, _BLOCK_BYTES, partial(advance, 0))
                answer = connection.request("PUT", path, body=parts, headers=headers, accept=(409, 422))
            wrong += answer.status == 422
            if wrong == _MOST_WRONG:
                raise CorruptionError(
                    f"{source} arrived {wrong} times with other bytes than its manifest says: the file is damaged"
                )
            if answer.status in (409, 422):
                raise ServiceBusyError(f"the answer was {answer.status}: {answer.data[:500].decode(errors='replace')}")
            return size - there

        return connection.call(attempt, f"upload {source}", f"{connection.base}{path}")

    def commit(self, reader: CheckpointReader) -> list[str]:
        """The service applies retention too."""
        if self.facts["committed"]:
            return []
        try:
            answer = self._connection.ask("POST", f"{self._path}/commit", timeout_s=_COMMIT_S)
        except (CheckpointNotFoundError, CheckpointExistsError) as error:
            # Committed, but the answer was lost, or by another client: then an offer of the same says so.
            if self._connection.ask("POST", "/api/uploads", self._offered)["state"] != "committed":
                raise
            return [str(error)] if isinstance(error, CheckpointExistsError) else []
        return [str(message) for message in answer["messages"]]

    def discard(self, *, ended: bool) -> None:
        """Unless it was cancelled, received files stay for a day, for the next try to resume."""
        connection = self._connection
        if connection.retries.cancelled.is_set() and self.facts and not self.facts["committed"]:
            with contextlib.suppress(OSError, ZstoreError):
                connection.call(lambda: connection.request("DELETE", self._path), "give up", self.location)


def _sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class JournalTail:
    """Sends the lines of the journal of training run `run_id` in the file `path`, from byte `start` on, to `place`, a run of a
    service, after those that it has. Called by one thread at a time. `failed` is told of a refusal, and of lines that could not
    be sent."""

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
        """Send the new whole lines. A network that fails is tried at the next call, `is_end` says that there is none."""
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
        """Return whole lines that were not sent."""
        lines: list[bytes] = []
        room = _MOST_LINES_BYTES
        with self._path.open("rb") as file:
            file.seek(self._sent)
            for line in file:
                room -= len(line)
                if not line.endswith(b"\n") or (lines and room < 0):
                    break
                lines.append(line)
        return b"".join(lines)
