"""Agreement of ranks, step by step, by texts that they leave for each other: from any thread, without collectives.

[Note: agreeing]
In each step a rank posts its error, or that it has none, in place of its former post. Rank 0 answers once all have posted, and
nobody posts again before it has the answer. A dead run may have left texts: so a rank that does not know the run's id, which
rank 0 generates, first asks for it with a number of its own, which the answer repeats. Rank 0 answers while it waits for the
others in a step.
"""

from __future__ import annotations

import hashlib
import json
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..errors import RankError
from .rendezvous import Board

T = TypeVar("T")

TIMEOUT_S = 1800.0
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.001, 0.05


class Agreement:
    """Rank `rank` of `world_size`, which all `agree` in the same order, each in one thread at a time. See [Note: agreeing]."""

    def __init__(self, board: Board, rank: int, world_size: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self._board, self._rank, self._world_size, self._timeout_s = board, rank, world_size, timeout_s
        self._run = uuid.uuid4().hex if rank == 0 else ""
        self._step = 0

    @property
    def run_id(self) -> str:
        """The run's 32 hex digits, the same on all ranks; waits until rank 0 agrees on something."""
        if not self._run:
            asks = {"asks": uuid.uuid4().hex}
            self._post(self._own(self._rank), asks)
            self._run = self._wait(lambda: self._read(f"to-{self._rank}", asks), lambda: [0])["run"]
        return self._run

    @property
    def step_id(self) -> str:
        """32 hex digits unique to the next `agree`, the same on all ranks; waits as `run_id` does."""
        return hashlib.sha256(f"{self.run_id} {self._step}".encode()).hexdigest()[:32]

    def agree(self, error: Exception | None) -> None:
        """Return once all ranks called this with None; else raise `error`, or RankError with that of the others (all
        ranks)."""
        step = {"run": self.run_id, "step": self._step}
        text = None if error is None else "".join(traceback.format_exception(error))
        if self._rank:
            self._post(self._own(self._rank), {**step, "error": text})
            errors = self._wait(lambda: self._read("all", step), lambda: [0])["errors"]
        else:
            errors = self._collect(step, text)
            self._post("all", {**step, "errors": errors})
        self._step += 1
        if error is not None:
            raise error
        failures = {rank: text for rank, text in enumerate(errors) if text is not None}
        if failures:
            ranks = ", ".join(map(str, failures))
            raise RankError(f"rank {ranks} of {self._world_size} failed; rank {self._rank} stops with it", failures)

    def _collect(self, step: Mapping[str, Any], text: str | None) -> list[str | None]:
        """Wait for the posts of all ranks in a step; answer those that ask for the run's id (rank 0)."""
        missing, errors, answered = set(range(1, self._world_size)), {0: text}, set[str]()

        def look() -> bool | None:
            for rank in sorted(missing):
                found = self._read(self._own(rank), {}) or {}
                if found.items() >= step.items():
                    errors[rank] = found["error"]
                    missing.discard(rank)
                elif found.get("asks", "") not in {"", *answered}:
                    self._post(f"to-{rank}", {"asks": found["asks"], "run": self._run})
                    answered.add(found["asks"])
            return True if not missing else None

        self._wait(look, lambda: sorted(missing))
        return [errors[rank] for rank in range(self._world_size)]

    @staticmethod
    def _own(rank: int) -> str:
        return f"of-{rank}"

    def _post(self, key: str, text: Mapping[str, Any]) -> None:
        self._board.post(key, json.dumps(text).encode())

    def _read(self, key: str, expected: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the post, if it is as `expected`."""
        found: dict[str, Any] = json.loads(self._board.read(key) or b"{}")
        return found if found.items() >= expected.items() else None

    def _wait(self, look: Callable[[], T | None], missing: Callable[[], list[int]]) -> T:
        deadline, pause_s = time.monotonic() + self._timeout_s, _LEAST_PAUSE_S
        while (found := look()) is None:
            if time.monotonic() > deadline:
                raise RankError(
                    f"rank {self._rank} of {self._world_size} waited {self._timeout_s:g} s for ranks {missing()[:20]}: all "
                    "ranks make the calls that are for all, in the same order",
                    {},
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        return found
