"""Asking a run to save or to stop, as a person does: from another process, or from its own loop."""

from __future__ import annotations

from pathlib import Path

from tests.waiting import until
from zstore.engine import Engine
from zstore.journal import journals, read
from zstore.journal.names import request_file, run_of
from zstore.journal.requests import request


def ask(engine: Engine, folder: Path, action: str) -> str:
    """Ask the run of `engine` (rank 0), wait until it has seen that, and return the request's id: the ranks carry it out at
    the end of the next step."""
    run_id = engine.training_state.run_id
    made = request(folder, run_id, action)
    until(lambda: not (folder / request_file(run_id)).exists())
    return made.id


def ask_and_wait(folder: Path, action: str) -> None:
    """Ask the run in `folder`, whoever's it is, and wait until its journal says that it was carried out."""
    until(lambda: folder.exists() and journals(folder))
    made = request(folder, str(run_of(journals(folder)[0])), action)
    until(lambda: (action, made.id, False) in actions(folder))


def actions(folder: Path) -> list[tuple[str, str, bool]]:
    """Return the actions in a run's journal: what was asked for, the request's id, whether it was refused."""
    return [(r["action"], r["id"], "problem" in r) for r in read(folder) if r["kind"] == "action"]
