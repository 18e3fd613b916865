"""The page's views of runs and their checkpoints, as models: for `/api`, and for reports. All block on file systems."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...checkpoint.format import encode_state
from ...errors import ZstoreError
from ..models import (
    CheckpointDetail,
    CheckpointList,
    Newest,
    PlacedArray,
    Placement,
    PlanPart,
    RunDetail,
    RunList,
    RunSummary,
    Steps,
)
from ..runs import Run
from .history import MOST_ACTIONS, MOST_SAVES, MOST_WARNINGS, History, count_of, text_of
from .library import Library
from .timeline import newest_of

_MOST_STATE_BYTES = 64 * 1024
_TIERS = ("device", "host", "disk")


def list_runs(service: Library) -> RunList:
    """Return all runs in short."""
    return RunList(runs=[run_summary(service, run) for run in service.runs.all().values()])


def run_summary(service: Library, run: Run) -> RunSummary:
    """Return a run in short: the ends of its journal, and its checkpoints."""
    newest, num_checkpoints, problem = None, 0, None
    try:
        listed = service.timeline(run).listed()
        num_checkpoints = len(listed)
        if (found := newest_of(listed)) is not None:
            entry = found.entry
            newest = Newest(
                checkpoint=entry.checkpoint, tag=entry.tag, step=entry.step, committed_at=entry.committed_at
            )
    except (ZstoreError, OSError) as error:
        problem = str(error)
    summary = service.summaries.of(run.folder)
    times = [summary.last_at, newest.committed_at if newest else None]
    return RunSummary(
        name=run.name,
        location=run.folder.location,
        state=summary.state,
        error=summary.error,
        not_finite_step=summary.not_finite_step,
        run_id=summary.run_id,
        step=summary.step,
        total_steps=summary.total_steps,
        loss=summary.loss,
        tokens_per_s=summary.tokens_per_s,
        updated_at=max((at for at in times if at is not None), default=None),
        num_checkpoints=num_checkpoints,
        newest=newest,
        problem=problem,
    )


def fresh_history(service: Library, run: Run) -> History:
    """Return the history of a run, read as far as its journals go now."""
    history = service.history(run)
    history.refresh()
    return history


def run_detail(service: Library, run: Run) -> RunDetail:
    """Return a run with its sessions, saves, requests and warnings."""
    history = fresh_history(service, run)
    with history.lock:
        views = history.views
        sessions = [session for view in views for session in view.sessions]
        saves = [numbered.event for view in views for numbered in view.saves.values()]
        warnings = [numbered.event for view in views for numbered in view.warnings]
        actions = [action for view in views for action in view.actions]
        not_finite = [found for view in views for found in view.not_finite]
    return RunDetail(
        summary=run_summary(service, run),
        sessions=sorted(sessions, key=lambda session: session.started_at),
        saves=sorted(saves, key=lambda save: save.at)[-MOST_SAVES:],
        actions=sorted(actions, key=lambda action: action.at)[-MOST_ACTIONS:],
        warnings=sorted(warnings, key=lambda warned: warned.at)[-MOST_WARNINGS:],
        not_finite=sorted(not_finite, key=lambda found: found.at)[-MOST_WARNINGS:],
    )


def run_steps(
    service: Library, run: Run, *, after: int | None = None, until: int | None = None, points: int = 1000
) -> Steps:
    """Return the steps of a run after one and up to another, as at most `points` rows."""
    history = fresh_history(service, run)
    with history.lock:
        view = history.current
        if view is None:
            return Steps(columns={}, last_step=None)
        last = view.table.last.get("step")
        columns = history.columns(
            points=points,
            after_step=float("-inf") if after is None else after,
            until_step=float("inf") if until is None else until,
        )
    return Steps.model_construct(columns=columns, last_step=None if last is None else int(last))


def run_placement(service: Library, run: Run) -> Placement:
    """Return the tiers of a run's bytes: by the plan of its newest journal, and the memory of its last step."""
    history = fresh_history(service, run)
    with history.lock:
        view = history.current
        plan, memory = (view.plan, view.memory) if view is not None else ({}, {})
    parts = [_part(part) for part in _list(plan, "parts") if isinstance(part, dict) and part.get("tier") in _TIERS]
    for tier in _TIERS:
        # The measured bytes of a step are not told apart by kind.
        measured = count_of(memory, tier)
        if measured and all(part.measured_bytes is None for part in parts if part.tier == tier):
            parts.append(PlanPart(tier=tier, kind="all", planned_bytes=None, measured_bytes=measured))
    arrays = [
        PlacedArray(name=entry[0], tier=entry[1], kind=entry[2], nbytes=entry[3])
        for entry in _list(plan, "arrays")
        if _is_array(entry)
    ]
    return Placement(
        host_budget_bytes=count_of(plan, "host_budget_bytes"),
        device_bytes=count_of(plan, "device_bytes"),
        parts=parts,
        arrays=arrays,
    )


def _list(line: Mapping[str, Any], key: str) -> list[Any]:
    value = line.get(key)
    return value if isinstance(value, list) else []


def _part(part: Mapping[str, Any]) -> PlanPart:
    return PlanPart(
        tier=part["tier"],
        kind=text_of(part, "kind"),
        planned_bytes=count_of(part, "planned_bytes"),
        measured_bytes=count_of(part, "measured_bytes"),
    )


def _is_array(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 4 or entry[1] not in _TIERS:
        return False
    return isinstance(entry[0], str) and isinstance(entry[2], str) and type(entry[3]) is int


def list_checkpoints(service: Library, run: Run) -> CheckpointList:
    """Return the checkpoints of a run, the files that they share, and unfinished saves."""
    return service.timeline(run).answer()


def checkpoint_detail(service: Library, run: Run, checkpoint: str) -> CheckpointDetail:
    """Return one checkpoint. Raises CheckpointNotFoundError, or CorruptionError if its metadata is damaged."""
    listed = service.timeline(run).find(checkpoint)
    reader = service.readers.open(listed.info)
    record = listed.info.record
    return CheckpointDetail(
        entry=listed.entry,
        location=listed.info.location,
        id=record.id,
        training_world_size=record.training_world_size,
        num_arrays=len(reader.arrays),
        array_bytes=sum(array.spec.nbytes for array in reader.arrays.values()),
        state=_cut(encode_state(record.state, "state")),
    )


def _cut(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state within `_MOST_STATE_BYTES`: the largest values are replaced by their size."""
    sizes = {key: len(json.dumps(value)) for key, value in state.items()}
    total = sum(sizes.values()) + sum(map(len, sizes))
    found = dict(state)
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        if total <= _MOST_STATE_BYTES:
            break
        found[key] = f"({sizes[key]} bytes of JSON, not shown)"
        total -= sizes[key] - len(found[key])
    return found
