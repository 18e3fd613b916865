"""Ranks that meet in a shared folder, or on a board: messages that they leave there for each other, and waiting for them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..io.files import Files
from .agreement import Board

MOST_PAUSE_S = 0.1
"""Pause between two looks at the folder, once the wait has lasted for a while."""
_LEAST_PAUSE_S = 0.001


class Rendezvous:
    """The folder `folder`, which need not be there yet; with a `board`, the texts under its name there.

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
        most_pause_s: float = MOST_PAUSE_S,
        board: Board | None = None,
    ) -> None:
        self.folder = folder
        self._files = files
        self._check = check
        self._pause = pause
        self._most_pause_s = most_pause_s
        self._board = board

    def post(self, name: str, message: Mapping[str, Any]) -> None:
        """Leave the file `name` with a message, whole or not there; it need not outlive the save."""
        if self._board is not None:
            self._board.post(f"{self.folder.name}/{name}", json.dumps(message))
            return
        part = self.folder / f"{name}.part"
        self._files.write_small(part, json.dumps(message).encode(), sync=False)
        self._files.rename(part, self.folder / name)

    def posted(self, name: str) -> dict[str, Any] | None:
        """Return the message in the file `name`; None if there is none."""
        with contextlib.suppress(OSError, ValueError):
            if self._board is None:
                message = json.loads((self.folder / name).read_bytes())
            else:
                message = json.loads(self._board.read(f"{self.folder.name}/{name}") or "null")
            return message if isinstance(message, dict) else None
        return None

    def wait_until(self, ready: Callable[[], bool], timeout_s: float, failure: Callable[[], str]) -> None:
        """Return once `ready()` is true; look again after pauses that double, beginning with 1 ms.

        Raises the errors of `check`, and CheckpointError with the text of `failure()` after `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = _LEAST_PAUSE_S
        while not ready():
            self._check()
            if time.monotonic() > deadline:
                raise CheckpointError(failure())
            self._pause(pause_s)
            pause_s = min(2 * pause_s, self._most_pause_s)
