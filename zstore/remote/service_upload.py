"""Uploading to a service of zstore: only files that it does not have, and from the byte at which a broken connection ended.

The service says at every point which files are missing, so that the same save offered again goes on from there. See [Note: the
protocol of an upload] in `zstore.serve.receive`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..checkpoint.names import METADATA_FILE, RECORD_FILE, tag_folder
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.retention import Keep
from ..errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptionError,
    StorageError,
    UsageError,
    ZstoreError,
)
from ..io.pool import Workers
from .retries import Retries
from .service import ServiceBusyError, ServiceConnection
from .service_folder import ServiceFolder
from .service_url import ServiceUrl, quote_path
from .target import NUM_THREADS, Advance, UploadTarget
from .uploaded import document_files, extra_files

_PIECE_BYTES = 256 * 1024
_COMMIT_S = 1800.0
"""The service makes all files durable, and removes old checkpoints, before it answers."""
_MOST_WRONG = 3
"""Times that a file may arrive wrong: then it is not the network that is broken."""


@dataclass(frozen=True, kw_only=True)
class ServicePlace:
    """A run in a service, which was not asked yet."""

    address: str = field(repr=False)
    """The URL as it was given."""
    url: ServiceUrl
    """What it means if the service is not below a path, for messages."""
    storage_options: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, url: str, storage_options: Mapping[str, Any] | None = None) -> ServicePlace:
        """Return the run that a URL names. Raises UsageError if it names none."""
        place = ServiceUrl.parse(url)
        _require_run(place)
        return cls(address=url, url=place, storage_options=dict(storage_options or {}))

    @property
    def location(self) -> str:
        """The URL, without a password."""
        return self.url.text

    def location_of(self, file: str) -> str:
        """Return the URL of a file or folder in it."""
        return f"{self.location}/{quote_path(file)}"

    def __str__(self) -> str:
        return self.location

    def open(self, retries: Retries) -> ServiceFolder:
        """Return the run's folder.

        Raises UsageError if no service of zstore answers, or for something inside a run, StorageError if nobody answers.
        """
        found = ServiceConnection.find(self.address, self.storage_options, retries=retries)
        if found is None:
            raise UsageError(
                f"{self.url.base} is no service of zstore: checkpoints are uploaded to `zstore serve`, or to a storage like "
                "s3://bucket/run"
            )
        connection, place = found
        _require_run(place, may_be_inside=False)
        return ServiceFolder(connection, place)

    def require_uploads(self) -> None:
        """Raise UsageError if the service takes no uploads of this run, or does not accept the token."""
        folder = self.open(Retries())
        folder.connection.ask("GET", f"/api/uploads?run={quote(folder.url.run, safe='')}")


def _require_run(place: ServiceUrl, *, may_be_inside: bool = True) -> None:
    if not place.run or (place.folder and not may_be_inside):
        raise UsageError(
            f"{place.text}: checkpoints are uploaded to a run of a service of zstore: name it as {place.base}/"
            f"{quote_path(place.run) or 'RUN'}"
        )


class ServiceTarget(UploadTarget):
    """An upload to the run at `place`. Usable from any thread."""

    def __init__(self, place: ServicePlace, retries: Retries, tag: str, save_id: str) -> None:
        super().__init__(place.location_of(tag_folder(tag)), tag, save_id)
        self._place = place
        self._retries = retries
        self._options: dict[str, Any] = {}
        self._offered: dict[str, Any] = {}
        self._upload = ""
        self._committed = False

    @cached_property
    def _folder(self) -> ServiceFolder:
        return self._place.open(self._retries)

    @property
    def _connection(self) -> ServiceConnection:
        return self._folder.connection

    def begin(self, *, overwrite: bool, replaces_own: bool = False, keep: Keep | None = None) -> list[str]:
        """Asks who is there, and no more: the service wants to see the record."""
        self._options = {"overwrite": overwrite, "replaces_own": replaces_own}
        if keep is not None:
            rules = {"last": keep.last, "every": keep.every, "best": keep.best, "tags": list(keep.tags)}
            self._options["keep"] = rules
        _ = self._folder
        return []

    def offer(self, reader: CheckpointReader) -> None:
        """Sends metadata and manifests, by which the service plans the upload.

        Raises DiskFullError if it has no room for the other files.
        """
        extras = extra_files(reader)
        self._offered = {
            "run": self._folder.url.run,
            "record": (reader.path / RECORD_FILE).read_text(encoding="utf-8"),
            "documents": document_files(reader),
            "extras": {name: {"bytes": size, "sha256": _sha256(reader.path / name)} for name, size in extras.items()},
            **self._options,
        }
        state = self._ask("POST", "/api/uploads", self._offered)
        self._upload = str(state["id"])
        self._committed = state["state"] == "committed"
        if not self._committed:
            documents = [each for each in state["files"] if each["path"] in self._offered["documents"]]
            for each in documents:
                self._send_file(reader.path / each["path"], each, lambda _: None)
            self._ask("POST", f"{self._path}/plan", timeout_s=_COMMIT_S)

    @property
    def _path(self) -> str:
        return f"/api/uploads/{self._upload}"

    def _ask(self, method: str, path: str, document: Any = None, *, timeout_s: float | None = None) -> Any:
        return self._connection.ask(method, path, document, timeout_s=timeout_s)

    def ticket(self) -> Mapping[str, Any]:
        return {"upload": self._upload, "committed": self._committed}

    def join(self, ticket: Mapping[str, Any]) -> None:
        self._upload, self._committed = str(ticket["upload"]), bool(ticket["committed"])

    def send(
        self, workers: Workers, top: Path, files: Mapping[str, int], advance: Advance, *, rank: int | None = None
    ) -> int:
        """Files that the service has, or links, are not sent."""
        wanted: dict[str, Any] = {}
        if not self._committed:
            # One answer for one rank, and one for all.
            query = f"?rank={rank}" if rank else ""
            wanted = {each["path"]: each for each in self._ask("GET", f"{self._path}{query}")["files"]}
        documents = self._offered.get("documents", {})
        for file, size in files.items():
            if not (file in wanted or file in documents or file.endswith(f"/{METADATA_FILE}")):
                advance(size)
        tasks = [partial(self._deliver, top / file, each, advance) for file, each in wanted.items() if file in files]
        return sum(workers.run(tasks))

    def _deliver(self, source: Path, wanted: dict[str, Any], advance: Advance) -> int:
        """Let the service link a file, or send it; return the bytes that went."""
        if wanted["candidate"]:
            claims = {"files": {wanted["path"]: _sha256(source)}}
            if wanted["path"] in self._ask("POST", f"{self._path}/claims", claims, timeout_s=_COMMIT_S)["linked"]:
                advance(wanted["bytes"])
                return 0
        return self._send_file(source, wanted, advance)

    def _send_file(self, source: Path, wanted: dict[str, Any], advance: Advance) -> int:
        """Send the part of a file that the service lacks, and go on from there if the connection breaks; return its bytes."""
        path = f"{self._path}/files/{quote(wanted['path'])}"
        size, tries, wrong = int(wanted["bytes"]), 0, 0
        sent = 0
        told = min(int(wanted["received"]), size)
        advance(told)

        def note(done: int) -> None:
            """Tell how far the file is: less far if it has to be sent again."""
            nonlocal told
            done, told = done - told, done
            if done:
                advance(done)

        def attempt() -> None:
            nonlocal tries, wrong, sent
            tries += 1
            there = int(wanted["received"]) if tries == 1 else int(self._file_state(path)["received"])
            if there >= size > 0:
                note(size)
                return
            headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size - there)}
            if size:
                headers["Content-Range"] = f"bytes {there}-{size - 1}/{size}"
            answer = self._connection.request(
                "PUT", path, body=_pieces(source, there, size, note), headers=headers, accept=(409, 422)
            )
            if answer.status == 422:
                wrong += 1
                if wrong == _MOST_WRONG:
                    raise CorruptionError(
                        f"{source} arrived {wrong} times with other bytes than its manifest says: the file is damaged"
                    )
            if answer.status in (409, 422):
                raise ServiceBusyError(f"the answer was {answer.status}: {answer.data[:500].decode(errors='replace')}")
            sent = size - there
            note(size)

        self._connection.call(attempt, f"upload {source}", f"{self._folder.url.base}{path}")
        self._connection.traffic.count(written_bytes=sent)
        return sent

    def _file_state(self, path: str) -> dict[str, Any]:
        answer = self._connection.request("GET", path)
        found: dict[str, Any] = answer.json()
        return found

    def commit(self, reader: CheckpointReader) -> list[str]:
        """The service applies retention too."""
        if self._committed:
            return []
        try:
            answer = self._ask("POST", f"{self._path}/commit", timeout_s=_COMMIT_S)
        except (CheckpointNotFoundError, CheckpointExistsError) as error:
            # Committed, but the answer was lost, or by another client: then an offer of the same says so.
            if self._ask("POST", "/api/uploads", self._offered)["state"] != "committed":
                raise
            return [str(error)] if isinstance(error, CheckpointExistsError) else []
        return [str(message) for message in answer["messages"]]

    def abort(self, *, ended: bool = True, cancelled: bool = False) -> None:
        """Unless it was cancelled, received files stay, for the next try to resume."""
        if cancelled and self._upload and not self._committed:
            with contextlib.suppress(OSError, ZstoreError):
                self._connection.request("DELETE", self._path)

    def files_at_a_time(self, largest_bytes: int, memory_bytes: int | None) -> int:
        """A file takes a quarter of a megabyte."""
        return NUM_THREADS


def _pieces(source: Path, start: int, size: int, note: Advance) -> Iterator[bytes]:
    """Yield the bytes of a file from `start` on; `note` is told how far it is."""
    with source.open("rb", buffering=0) as file:
        file.seek(start)
        done = start
        while done < size:
            data = file.read(min(_PIECE_BYTES, size - done))
            if not data:
                raise StorageError(f"the file ends after {done} bytes, expected {size}", path=str(source))
            yield data
            done += len(data)
            note(done)


def _sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
