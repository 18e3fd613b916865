"""The page's views of runs and their checkpoints, as models: for `/api`, and for reports. All block on file systems."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from ...checkpoint.format import encode_state
from ..models import (
    CheckpointDetail,
    CheckpointList,
    PlacedArray,
    Placement,
    PlanPart,
    RunDetail,
    Steps,
)
from ..runs import Run
from .history import History
from .journalview import MOST_ACTIONS, MOST_SAVES, MOST_WARNINGS, count_of, text_of
from .library import Library

_MOST_STATE_BYTES = 64 * 1024
_TIERS = ("device", "host", "disk")
PAGE = 20
"""Sessions and warnings that are shown unless more are asked for."""
T = TypeVar("T")


def fresh_history(service: Library, run: Run, *, is_whole: bool = False) -> History:
    """Return the history of a run, read as far as its journals go now; see `History.refresh`."""
    history = service.history(run)
    history.refresh(is_whole=is_whole)
    return history


def run_detail(service: Library, run: Run, *, limit: int = PAGE, skip: int = 0) -> RunDetail:
    """Return a run with its saves, requests, and a page of its sessions and warnings: `limit` before the `skip` newest."""
    history = fresh_history(service, run)
    with history.lock:
        views = history.views
        sessions = [session for view in views for session in view.sessions]
        saves = [save for view in views for _, save in view.saves.values()]
        warnings = [warned for view in views for _, warned in view.warnings]
        actions = [action for view in views for action in view.actions]
        not_finite = [found for view in views for found in view.not_finite]
    return RunDetail(
        summary=service.summaries.of(run),
        sessions=_page(sorted(sessions, key=lambda session: session.started_at), limit, skip),
        num_sessions=len(sessions),
        saves=sorted(saves, key=lambda save: save.at)[-MOST_SAVES:],
        actions=sorted(actions, key=lambda action: action.at)[-MOST_ACTIONS:],
        warnings=_page(sorted(warnings, key=lambda warned: warned.at), limit, skip),
        num_warnings=len(warnings),
        not_finite=sorted(not_finite, key=lambda found: found.at)[-MOST_WARNINGS:],
    )


def _page(rows: list[T], limit: int, skip: int) -> list[T]:
    end = max(0, len(rows) - skip)
    return rows[max(0, end - limit) : end]


def run_steps(
    service: Library,
    run: Run,
    *,
    after: int | None = None,
    until: int | None = None,
    points: int = 1000,
) -> Steps:
    """Return the steps of a run after one and up to another, as at most `points` rows; see `History.refresh`."""
    history = fresh_history(service, run)
    with history.lock:
        view = history.current
        if view is None:
            return Steps(columns={}, last_step=None, is_whole=True)
        last = view.table.last.get("step")
        columns = history.columns(
            points=points,
            after_step=float("-inf") if after is None else after,
            until_step=float("inf") if until is None else until,
        )
        is_whole = all(view.is_whole for view in history.views)
    return Steps.model_construct(columns=columns, last_step=None if last is None else int(last), is_whole=is_whole)


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
