"""What `/api` does, on a service that takes actions: verify, prune, mark checkpoints, and ask a run to save or to stop."""

from __future__ import annotations

import time
from functools import partial
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from ...checkpoint.catalog import resolve
from ...checkpoint.marks import change_marks, change_run_marks
from ...checkpoint.names import tag_text
from ...journal.requests import request as ask
from ..models import CheckpointList, Job, MarkChange, PruneResult, PruneRules, RunAction, RunMarksChange, RunSummary
from ..replies import ConflictError
from ..runs import Run
from ..service import Service, run_of, service_of
from ..views.journalview import LEAST_HEARTBEAT_S, has_heartbeat
from ..views.run import fresh_history
from .operations import Operation, Values, answer, of_run, parse_body
from .pruning import prune, start_verify
from .queries import CHECKPOINT

_ACCEPTED = 202


async def _prune(request: Request, values: Values) -> Response:
    rules = await parse_body(request, PruneRules)
    request.scope["state"]["audit"] = "prune" if rules.plan is not None else "plan of a prune"
    return await answer(lambda: prune(service_of(request), run_of(request), rules))


def mark(service: Service, run: Run, change: MarkChange) -> CheckpointList:
    """Change the marks of a run's checkpoints; return the list with the new ones.

    Raises UsageError for a name that cannot be one, CheckpointNotFoundError if there is no such checkpoint.
    """
    files = service.settings.files
    found = None if change.checkpoint is None else resolve(run.folder, tag_text(change.checkpoint)).tag
    change_marks(run.folder, found, tag=change.tag, held=change.held, note=change.note, files=files)
    timeline = service.timeline(run)
    timeline.forget()
    return timeline.answer()


def mark_run(service: Service, run: Run, change: RunMarksChange) -> RunSummary:
    """Change the marks of a run itself; return it with the new ones. Raises UsageError for marks that cannot be some."""
    change_run_marks(run.folder, **change.model_dump(), files=service.settings.files)
    service.listing.forget()
    return service.summaries.of(run)


def _asks(action: Literal["save", "stop"], summary: str) -> Operation:
    """Return the operation that asks a run for `action`."""
    return Operation(
        path=f"/api/runs/{{run}}/actions/{action}",
        method="POST",
        summary=summary,
        answer=RunAction,
        handle=of_run(partial(request_of_run, action=action), _ACCEPTED),
        status=_ACCEPTED,
        problems=(507,),
        access="act",
        audit=action,
    )


def request_of_run(service: Service, run: Run, action: Literal["save", "stop"]) -> RunAction:
    """Ask a run that trains to save, or to stop after its step.

    Raises ConflictError if its journal says that it does not train, or has nothing recent; UsageError behind a URL.
    """
    history = fresh_history(service, run)
    with history.lock:
        view = history.current
        state = "unknown" if view is None else view.state
        if view is None or state != "training":
            raise ConflictError(
                f"run {run.name!r} does not train: its state is {state!r}, so nobody would take the request up"
            )
        step_s = view.table.last.get("step_s", 0.0)
        if not has_heartbeat(view.arrived_at, step_s):
            raise ConflictError(
                f"run {run.name!r} wrote nothing into its journal for {time.time() - view.arrived_at:.0f} s: expected a line "
                f"within {LEAST_HEARTBEAT_S:.0f} s, or ten of its steps; see whether it still runs"
            )
        run_id = view.run_id
    made = ask(run.folder, run_id, action)
    return RunAction(id=made.id, action=action, run_id=run_id, requested_at=made.at)


OPERATIONS = (
    Operation(
        path=f"{CHECKPOINT}/verify",
        method="POST",
        summary="Check every byte of a checkpoint, as a job",
        answer=Job,
        handle=of_run(start_verify, _ACCEPTED),
        status=_ACCEPTED,
        access="act",
        audit="verify",
    ),
    Operation(
        path="/api/runs/{run}/prune",
        method="POST",
        summary="Show what rules leave of the checkpoints; with the plan's digest, remove the others, as a job",
        answer=PruneResult,
        handle=_prune,
        body=PruneRules,
        access="act",
        audit="prune",
    ),
    Operation(
        path="/api/runs/{run}/tags",
        method="POST",
        summary="Move a tag to a checkpoint, or remove it; hold, release or note a checkpoint",
        answer=CheckpointList,
        handle=of_run(mark, body=MarkChange),
        body=MarkChange,
        problems=(422, 507),
        access="act",
        audit="tag",
    ),
    Operation(
        path="/api/runs/{run}/marks",
        method="POST",
        summary="Give a run tags, a group or a note",
        answer=RunSummary,
        handle=of_run(mark_run, body=RunMarksChange),
        body=RunMarksChange,
        problems=(422, 507),
        access="act",
        audit="mark run",
    ),
    _asks("save", "Have a run save at the end of its step"),
    _asks("stop", "Have a run stop after its step"),
)
