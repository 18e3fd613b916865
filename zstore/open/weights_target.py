"""The place that versions of weights are published to: a folder, or a run of a service.

[Note: how a version appears]
    (rank 0)      `begin`: one run has a place, by the lock `.publishing` there, which ends with its process; through a service
                  by a request that the service answers as long as the process reads on
    (all ranks)   `place`, a folder on this machine that the files of the version are written to
    (each rank)   `send` its files
    (rank 0)      `commit`, once all were sent: the version is there from here on, whole; or `discard`
A folder's versions get their names by a rename. Those that are removed lose theirs first. A version that is there already, of
somebody else, is not replaced. Files are not made durable: after a power cut checksums tell a version that lost some.
"""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from ..checkpoint.folder import Folder, LocalFolder
from ..checkpoint.lock import LockedError, SaveLock, hold
from ..errors import UsageError, storage_error
from ..io.files import Files
from ..remote.retries import Retries
from ..remote.service_folder import ServiceFolder
from ..remote.url import is_url
from ..weights.versions import INDEX_FILE, PREFIX, WEIGHTS_FOLDER, folder_name, numbers_in
from .room import temporary_room
from .sources import folder_of

_TRIES = 3
"""Training waits for them: a service that is gone is asked again with the next version."""


class WeightsTarget:
    """A folder that all ranks see. See [Note: how a version appears]."""

    def __init__(self, folder: Folder, rank: int, room: AbstractContextManager[Path]) -> None:
        self.folder = folder
        self._held = ExitStack()
        self._release = weakref.finalize(self, self._held.close)
        self.room = self._held.enter_context(room)
        """A folder on this machine for files of versions to come."""
        self._rank = rank

    def begin(self) -> None:
        """Have the place, or have it again; before each version (rank 0). Raises UsageError if another run has it."""

    def newest(self) -> int:
        """Return the number of the newest version, 0: there is none."""
        return max(numbers_in(self.folder), default=0)

    def place(self, number: int) -> Path:
        """Return the folder for the files of a version, which is made."""
        path = self.room / f".{folder_name(number)}"
        path.mkdir(exist_ok=True)
        return path

    def send(self, number: int, names: Iterable[str]) -> None:
        """Take files of a version. Raises StorageError, and UsageError from a service that may not take them."""

    def commit(self, number: int, index: bytes, oldest: int) -> None:
        """Publish a version with this index, and remove those before `oldest`. Raises as `send` does."""
        commit_in(self.room, self.place(number), number, index, oldest)

    def discard(self) -> None:
        """Remove what is left of versions that were not committed; no rank writes any now."""
        if self._rank == 0:
            sweep(self.room)

    def close(self) -> None:
        """Do as `discard`, and let another run publish there."""
        self.discard()
        self._release()


class ServiceVersions(WeightsTarget):
    """A run of a service."""

    def __init__(self, folder: ServiceFolder, rank: int, publisher: str) -> None:
        if not folder.url.run or folder.url.folder != WEIGHTS_FOLDER:
            raise UsageError(
                f"{folder}: a service has the versions of a run's weights in one place: expected a URL like "
                f"{folder.url.base}/RUN/{WEIGHTS_FOLDER}"
            )
        super().__init__(folder, rank, temporary_room())
        self._service = folder.with_retries(Retries(attempts=_TRIES))
        self._query = urlencode({"publisher": publisher})
        self._place = ExitStack()
        self._held.push(lambda *_: self._place.close())

    def begin(self) -> None:
        """Begin the next version. The place is asked for again before it is let go: nobody else gets it in between."""
        former, self._place = self._place, ExitStack()
        with former:
            self._place.enter_context(self._service.connection.held("POST", self._path()))

    def _path(self, *parts: object) -> str:
        names = (self._service.url.run, *map(str, parts))
        return "/".join(("/api/uploads/weights", *(quote(name, safe="") for name in names))) + f"?{self._query}"

    def send(self, number: int, names: Iterable[str]) -> None:
        connection, place = self._service.connection, self.place(number)
        for name in names:
            path = self._path(number, name)

            def put(source: Path = place / name, path: str = path) -> None:
                with source.open("rb") as body:
                    headers = {"Content-Length": str(os.fstat(body.fileno()).st_size)}
                    connection.request("PUT", path, body=body, headers=headers)

            connection.call(put, "send", f"{connection.base}{path}")
            connection.traffic.count(written_bytes=(place / name).stat().st_size)
        sweep(self.room)

    def commit(self, number: int, index: bytes, oldest: int) -> None:
        body, path = json.dumps({"index": index.decode(), "oldest": oldest}).encode(), self._path(number)
        connection = self._service.connection
        connection.call(lambda: connection.request("POST", path, body=body), "publish", f"{connection.base}{path}")

    def discard(self) -> None:
        sweep(self.room)


def target_of(location: str, rank: int, publisher: str, storage_options: Mapping[str, Any]) -> WeightsTarget:
    """Return the target at a path or URL; `publisher` names the ranks of one run, and of no other.

    Raises UsageError for a URL of something else than a run of a service, or a folder that another run publishes to,
    StorageError for a folder that cannot be made.
    """
    if is_url(location):
        folder = folder_of(location, storage_options)
        if not isinstance(folder, ServiceFolder):
            raise UsageError(f"{folder} is no service of zstore: weights are published to `zstore serve`, or to a path")
        return ServiceVersions(folder, rank, publisher)
    path = Path(location)
    Files().make_folder(path)
    return WeightsTarget(LocalFolder(path), rank, publishing(path, publisher) if rank == 0 else nullcontext(path))


def is_taken(folder: Path, who: str) -> UsageError:
    """Return the error for a folder that another run publishes to."""
    return UsageError(
        f"{folder}: a run publishes its weights there already: end it, or name another place. It is {who}"
    )


@contextmanager
def publishing(folder: Path, publisher: str) -> Iterator[Path]:
    """Hold a folder for the one run that publishes to it. Raises UsageError, which names that, if it is another one."""
    try:
        lock = SaveLock(folder / ".publishing", wait=False, publisher=publisher)
    except LockedError as error:
        raise is_taken(folder, str(error)) from error
    with lock:
        yield folder


def commit_in(folder: Path, place: Path, number: int, index: bytes, oldest: int) -> None:
    """Publish the files in `place` as a version in `folder`, and remove those before `oldest` that nobody reads. Raises
    StorageError."""
    try:
        (place / INDEX_FILE).write_bytes(index)
        os.rename(place, folder / folder_name(number))
    except OSError as error:
        raise storage_error(error, f"cannot publish version {number}", path=str(folder)) from error
    for old in numbers_in(LocalFolder(folder)):
        path = folder / folder_name(old)
        if old < oldest and (held := hold(path / INDEX_FILE)) is not None:
            gone = path.with_name(f".{path.name}.gone")
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
            os.close(held)


def sweep(folder: Path) -> None:
    """Remove what killed processes left of versions to come or removed ones."""
    for path in folder.glob(f".{PREFIX}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
