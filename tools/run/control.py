"""Messages from a launcher to the agents on other machines: lines on the agent's stdin.

The first line is the job. Then come `signal N`, `failed` (ranks of another machine failed), `kill`, and `alive` now and then.
The end of the lines, or a long silence, means that the launcher or the connection is gone.
"""

from __future__ import annotations

import os
import time

from .job import RunJob

ALIVE_EVERY_S = 10.0
"""Time between a launcher's signs of life."""
_SILENCE_S = 120.0


class Control:
    """The agent's end, of a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self._ended = False
        self._heard = time.monotonic()
        self.said_lost = False
        """For the reader to note that it acted on the loss."""

    def fileno(self) -> int:
        """Return the descriptor, to wait for."""
        return self._descriptor

    def job(self) -> RunJob:
        """Return the job of the first line; wait for it. Raises EOFError if there is none."""
        while b"\n" not in self._rest:
            self._take()
            if self._ended:
                raise EOFError("no job came")
        line, _, self._rest = self._rest.partition(b"\n")
        return RunJob.from_json(line.decode())

    def words(self) -> list[tuple[str, int]]:
        """Return the words that came, each with the number of a signal or 0; call it when the descriptor can be read."""
        self._take()
        *lines, self._rest = self._rest.split(b"\n")
        found = []
        for line in lines:
            word, _, number = line.decode().partition(" ")
            found.append((word, int(number or 0)))
        return found

    def is_lost(self) -> bool:
        """Return whether the other side is gone."""
        return self._ended or time.monotonic() - self._heard > _SILENCE_S

    def _take(self) -> None:
        got = b"" if self._ended else os.read(self._descriptor, 65536)
        self._ended = not got
        self._heard = time.monotonic()
        self._rest += got
