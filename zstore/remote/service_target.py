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

from ..checkpoint.names import METADATA_FILE, RECORD_FILE, manifest_file, tag_folder
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
from .bucket import Advance
from .service import ServiceBusyError, ServiceFolder, find_service, parse_url, quote_path
from .target import Target, files_here
from .url import Retries

_PIECE_BYTES = 256 * 1024
_COMMIT_S = 1800.0
"""The service makes all files durable, and removes old checkpoints, before it answers."""
_MOST_WRONG = 3
"""Times that a file may arrive wrong: then it is not the network that is broken."""


@dataclass(frozen=True)
class ServicePlace:
    """A run in a service, which was not asked yet."""

    url: str = field(repr=False)
    storage_options: Mapping[str, Any] = field(repr=False)

    @property
    def location(self) -> str:
        """The URL as people write it."""
        address, inside = parse_url(self.url)
        if not inside:
            raise UsageError(f"{address}: checkpoints are uploaded to a run of a service: name it as {address}/RUN")
        return f"{address}/{quote_path('/'.join(inside))}"

    def location_of(self, file: str) -> str:
        """Return the URL of a file or folder in it."""
        return f"{self.location}/{quote_path(file)}"

    def __str__(self) -> str:
        return self.location

    def open(self, retries: Retries) -> ServiceFolder:
        """Return the run's folder.

        Raises UsageError if no service of zstore answers, or for something inside a run, StorageError if nobody answers.
        """
        found = find_service(self.url, self.storage_options, retries=retries)
        if found is None:
            raise UsageError(
                f"{self.location} is no service of zstore: checkpoints are uploaded to `zstore serve`, or to a storage like "
                "s3://bucket/run"
            )
        if not found.run or found.folder:
            run = f"{found.connection.base}/{quote_path(found.run) or 'RUN'}"
            raise UsageError(f"{self.location}: checkpoints are uploaded to a run of a service: name it as {run}")
        return found


class ServiceTarget(Target):
    """An upload to the run at `place`. Usable from any thread."""

    def __init__(self, place: ServicePlace, retries: Retries, tag: str) -> None:
        self.location = place.location_of(tag_folder(tag))
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
    def _path(self) -> str:
        return f"/api/uploads/{self._upload}"

    def _ask(self, method: str, path: str, document: Any = None, *, is_slow: bool = False) -> Any:
        limit = {"timeout_s": _COMMIT_S} if is_slow else {}
        return self._folder.connection.ask(method, path, document, **limit)

    def begin(self, *, overwrite: bool, replaces_own: bool = False, keep: Keep | None = None) -> list[str]:
        """Asks who is there, and no more: the service wants to see the record."""
        self._options = {"overwrite": overwrite, "replaces_own": replaces_own}
        if keep is not None:
            rules = {"last": keep.last, "every": keep.every, "best": keep.best, "tags": list(keep.tags)}
            self._options["keep"] = rules
        _ = self._folder
        return []

    def offer(self, reader: CheckpointReader) -> Mapping[str, Any]:
        """Sends metadata and manifests, by which the service plans the upload.

        Raises DiskFullError if it has no room for the other files.
        """
        files = files_here(reader)
        manifests = [manifest_file(rank) for rank in range(reader.record.world_size)]
        extras = {name: size for name, size in files.items() if "/" not in name}
        self._offered = {
            "run": self._folder.run,
            "record": (reader.path / RECORD_FILE).read_text(encoding="utf-8"),
            "documents": {METADATA_FILE: reader.folder.size(METADATA_FILE)} | {name: files[name] for name in manifests},
            "extras": {name: {"bytes": size, "sha256": _sha256(reader.path / name)} for name, size in extras.items()},
            **self._options,
        }
        state = self._ask("POST", "/api/uploads", self._offered)
        self._upload = str(state["id"])
        self._committed = state["state"] == "committed"
        if not self._committed:
            for each in state["files"]:
                if each["path"] in self._offered["documents"]:
                    self._send_file(reader.path / each["path"], each, lambda _: None)
            self._ask("POST", f"{self._path}/plan", is_slow=True)
        return {"upload": self._upload, "committed": self._committed}

    def join(self, facts: Mapping[str, Any]) -> None:
        self._upload, self._committed = str(facts["upload"]), bool(facts["committed"])

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
            if wanted["path"] in self._ask("POST", f"{self._path}/claims", claims, is_slow=True)["linked"]:
                advance(wanted["bytes"])
                return 0
        return self._send_file(source, wanted, advance)

    def _send_file(self, source: Path, wanted: dict[str, Any], advance: Advance) -> int:
        """Send the part of a file that the service lacks, and go on from there if the connection breaks; return its bytes."""
        connection, path = self._folder.connection, f"{self._path}/files/{quote(wanted['path'])}"
        size, received = int(wanted["bytes"]), int(wanted["received"])
        tries = wrong = sent = noted = 0

        def note(done: int) -> None:
            nonlocal noted
            advance(done - noted)  # negative if it has to be sent again
            noted = done

        def attempt() -> None:
            nonlocal tries, wrong, sent
            there = received if tries == 0 else int(connection.request("GET", path).json()["received"])
            tries += 1
            if there < size or not size:
                headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size - there)}
                if size:
                    headers["Content-Range"] = f"bytes {there}-{size - 1}/{size}"
                pieces = _pieces(source, there, size, note)
                answer = connection.request("PUT", path, body=pieces, headers=headers, accept=(409, 422))
                wrong += answer.status == 422
                if wrong == _MOST_WRONG:
                    raise CorruptionError(
                        f"{source} arrived {wrong} times with other bytes than its manifest says: the file is damaged"
                    )
                if answer.status in (409, 422):
                    text = answer.data[:500].decode(errors="replace")
                    raise ServiceBusyError(f"the answer was {answer.status}: {text}")
                sent = size - there
            note(size)

        note(min(received, size))
        connection.call(attempt, f"upload {source}", f"{connection.base}{path}")
        connection.traffic.count(written_bytes=sent)
        return sent

    def commit(self, reader: CheckpointReader) -> list[str]:
        """The service applies retention too."""
        if self._committed:
            return []
        try:
            answer = self._ask("POST", f"{self._path}/commit", is_slow=True)
        except (CheckpointNotFoundError, CheckpointExistsError) as error:
            # Committed, but the answer was lost, or by another client: then an offer of the same says so.
            if self._ask("POST", "/api/uploads", self._offered)["state"] != "committed":
                raise
            return [str(error)] if isinstance(error, CheckpointExistsError) else []
        return [str(message) for message in answer["messages"]]

    def discard(self, *, ended: bool, cancelled: bool) -> None:
        """Unless it was cancelled, received files stay, for the next try to resume."""
        if cancelled and self._upload and not self._committed:
            with contextlib.suppress(OSError, ZstoreError):
                self._folder.connection.request("DELETE", self._path)


def _pieces(source: Path, start: int, size: int, note: Advance) -> Iterator[bytes]:
    """Yield the bytes of a file from `start` on; `note` is called with how far it is."""
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
