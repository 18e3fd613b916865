"""Asking a run to save or to stop, as a person does: from another process, or from its own loop."""

from __future__ import annotations

import time
from pathlib import Path

from zstore.engine import Engine
from zstore.journal import journals, read
from zstore.journal.names import request_file, run_of
from zstore.journal.requests import request

_LIMIT_S = 20.0


def ask(engine: Engine, folder: Path, action: str) -> str:
    """Ask the run of `engine` (rank 0), wait until it has seen that, and return the request's id: the ranks carry it out at
    the end of the next step."""
    run_id = engine.training_state.run_id
    made = request(folder, run_id, action)
    deadline = time.monotonic() + _LIMIT_S
    while (folder / request_file(run_id)).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return made.id


def ask_and_wait(folder: Path, action: str) -> None:
    """Ask the run in `folder`, whoever's it is, and wait until its journal says that it was carried out."""
    deadline = time.monotonic() + _LIMIT_S
    while not (found := journals(folder) if folder.exists() else []):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    made = request(folder, str(run_of(found[0])), action)
    while (action, made.id, False) not in actions(folder):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def actions(folder: Path) -> list[tuple[str, str, bool]]:
    """Return the actions in a run's journal: what was asked for, the request's id, whether it was refused."""
    return [(r["action"], r["id"], "problem" in r) for r in read(folder) if r["kind"] == "action"]
