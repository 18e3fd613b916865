"""Killing what trains, again and again, and seeing that it lost nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zstore.testing.ranks import kill_ranks


def notes_of(folder: Path, rank: int) -> Callable[..., None]:
    """Return what notes a line of JSON in the folder's log of a rank, whole whenever the rank is killed after it."""
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(**line: Any) -> None:
        os.write(log, json.dumps(line).encode() + b"\n")

    return note


class Killing:
    """One run in `folder`, killed and started again as often as asked; `check` sees that it lost nothing.

    `program(rank, run as a dict, folder, stop, points)` resumes the run and trains to step `stop`; a rank dies at its file
    operation in `points`. It notes by `notes_of` what it resumed, each step and its end. `expected` are the digests by rank
    and step of the run that is not killed.
    """

    def __init__(self, program: Callable[..., None], run: Any, folder: Path, expected: list[list[Any]]) -> None:
        self.program = program
        self.run = run
        self.folder = folder
        self.expected = expected
        folder.mkdir(parents=True, exist_ok=True)

    def go(self, stop: int, *, points: list[int] | None = None, after_s: list[float] | None = None) -> bool:
        """Start, and kill at operations or times; return whether any rank was killed."""
        for rank in range(self.run.world_size):
            (self.folder / f"log-{rank}").unlink(missing_ok=True)
        arguments = (asdict(self.run), str(self.folder), stop, points or [])
        ended = kill_ranks(self.program, self.run.world_size, *arguments, after_s=after_s or (), timeout_s=120)
        return not all(ended)

    def lines(self) -> list[list[dict[str, Any]]]:
        """Return what each rank noted in the last start; a last line may be cut off."""
        found = []
        for rank in range(self.run.world_size):
            path = self.folder / f"log-{rank}"
            text = path.read_text() if path.exists() else ""
            found.append([json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")])
        return found

    def check(self, least: int) -> int:
        """Compare what the ranks noted with the uninterrupted run; at least step `least` was resumed.

        Returns the least step that the next start must resume at.
        """
        lines = self.lines()
        resumed = {line["resumed"] for rank in lines for line in rank if "resumed" in line}
        assert len(resumed) <= 1
        assert all(step >= least for step in resumed)
        for rank, noted in enumerate(lines):
            for line in noted:
                at = line.get("resumed", line.get("ended"))
                if at is not None:
                    assert line["digests"] == self.expected[rank][at], f"rank {rank}, step {at}"
        finished = [line["step"] for rank in lines for line in rank if "step" in line]
        durable = [line["durable"] for rank in lines for line in rank if line.get("durable") is not None]
        # A step that returned had waited for the snapshot of the one before.
        return max([least, *resumed, *(step - 1 for step in finished), *durable])
