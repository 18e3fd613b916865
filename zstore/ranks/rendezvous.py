"""Boards, on which ranks leave bytes for each other, from any thread and without collectives; and waiting for them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..errors import CheckpointError
from ..io.files import Files

T = TypeVar("T")

MOST_PAUSE_S = 0.1
"""Pause between two looks at the folder, once the wait has lasted for a while."""
_LEAST_PAUSE_S = 0.001
_VALUE_BYTES = 4 * 1024 * 1024
"""Most bytes of one value: a store of torch.distributed refuses 8 MiB."""
_CONNECT = timedelta(seconds=20)
"""Most time until a connection to the ranks' store is there."""


class Board(Protocol):
    """A place for bytes that ranks leave for each other."""

    def post(self, key: str, data: bytes) -> None:
        """Set a key."""

    def read(self, key: str) -> bytes | None:
        """Return its value; None if it has none."""

    def remove(self, key: str) -> None:
        """Remove a key."""


class FolderBoard:
    """A folder that all ranks see, and that somebody makes, for ranks without torch.distributed."""

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder = folder
        self._files = files

    def post(self, key: str, data: bytes) -> None:
        """Set a key, whole or not at all; it need not outlive the run."""
        part = self._folder / f"{key}.part"
        self._files.write_small(part, data, sync=False)
        self._files.rename(part, self._folder / key)

    def read(self, key: str) -> bytes | None:
        """Return its value; None if it has none."""
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / key).read_bytes()
        return None

    def remove(self, key: str) -> None:
        self._files.unlink(self._folder / key)


class StoreBoard:
    """A connection of its own to the store by which the ranks of torch.distributed found each other. Its keys are those of the
    board `name`."""

    def __init__(self, name: str = "") -> None:
        import torch.distributed as torch_dist

        shared: Any = torch_dist.distributed_c10d._get_default_store()
        usual = shared.timeout
        shared.set_timeout(_CONNECT)  # a store that went with rank 0 is asked again and again until then
        try:
            own = shared.clone()
        finally:
            shared.set_timeout(usual)
        self._store: Any = torch_dist.PrefixStore(f"zstore/board{name}", own)  # type: ignore[attr-defined]
        self._lock = threading.Lock()
        """The connection is for one thread at a time."""

    def post(self, key: str, data: bytes) -> None:
        parts = [data[at : at + _VALUE_BYTES] for at in range(0, len(data), _VALUE_BYTES)]
        with self._lock:
            for number, part in enumerate(parts):
                self._store.set(f"{key}/{number}", part)
            self._store.set(key, str(len(parts)))

    def read(self, key: str) -> bytes | None:
        with self._lock:
            if not self._store.check([key]):
                return None
            return b"".join(self._store.get(f"{key}/{number}") for number in range(int(self._store.get(key))))

    def remove(self, key: str) -> None:
        with self._lock:
            for number in range(int(self._store.get(key))):
                self._store.delete_key(f"{key}/{number}")
            self._store.delete_key(key)


class Rendezvous:
    """The folder `folder`, which need not be there yet; with a `board`, the messages under its name there.

    `check` is called while a rank waits, and raises if waiting has become pointless; `pause` sleeps for so many
    seconds, or until something else ends it.
    """

    def __init__(
        self,
        folder: Path,
        files: Files,
        check: Callable[[], None],
        *,
        pause: Callable[[float], object] = time.sleep,
        board: Board | None = None,
    ) -> None:
        self.folder = folder
        self._board = FolderBoard(folder.parent, files) if board is None else board
        self._check = check
        self._pause = pause

    def post(self, name: str, message: Mapping[str, Any]) -> None:
        """Leave the file `name` with a message, whole or not there; it need not outlive the save."""
        self._board.post(f"{self.folder.name}/{name}", json.dumps(message).encode())

    def posted(self, name: str) -> dict[str, Any] | None:
        """Return the message in the file `name`; None if there is none."""
        with contextlib.suppress(OSError, ValueError):
            message = json.loads(self._board.read(f"{self.folder.name}/{name}") or b"null")
            return message if isinstance(message, dict) else None
        return None

    def wait_until(self, ready: Callable[[], T | None], timeout_s: float, failure: Callable[[], str]) -> T:
        """Return what `ready()` returns, once that is true; look again after pauses that double, beginning with 1 ms.

        Raises the errors of `check`, and CheckpointError with the text of `failure()` after `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = _LEAST_PAUSE_S
        while not (found := ready()):
            self._check()
            if time.monotonic() > deadline:
                raise CheckpointError(failure())
            self._pause(pause_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)
        return found
