"""`/api`: runs, their journals and their checkpoints as JSON."""

from __future__ import annotations

import json
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query

from .._version import __version__
from ..checkpoint.format import encode_state
from ..checkpoint.layout import natural_key
from ..errors import ZstoreError
from .library import Library, NamedRun, Shared
from .models import (
    ArrayEntry,
    ArrayList,
    CheckpointDetail,
    CheckpointList,
    Placement,
    RunDetail,
    RunList,
    RunSummary,
    ServiceInfo,
    Steps,
)
from .runs import Run

_MOST_STATE_BYTES = 64 * 1024
_MOST_STEP = 2**53
open_router = APIRouter(tags=["service"])
router = APIRouter(prefix="/api", tags=["runs"])


@open_router.get("/healthz")
def _health() -> dict[str, str]:
    return {"status": "ok"}


@open_router.get("/api")
def _service(library: Shared) -> ServiceInfo:
    settings = library.settings
    return ServiceInfo(version=__version__, needs_token=not settings.is_open, takes_uploads=settings.token is not None)


@router.get("/runs")
def _runs(library: Shared) -> RunList:
    return RunList(runs=[_summary(library, run) for run in library.runs.all().values()])


@router.get("/runs/{run}")
def _run(run: NamedRun, library: Shared) -> RunDetail:
    return library.journals(run).detail(_summary(library, run))


@router.get("/runs/{run}/steps")
def _steps(
    run: NamedRun,
    library: Shared,
    after: Annotated[int, Query(ge=-1, le=_MOST_STEP)] = -1,
    points: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Steps:
    return library.journals(run).steps(after, points)


@router.get("/runs/{run}/placement")
def _placement(run: NamedRun, library: Shared) -> Placement:
    return library.journals(run).placement()


@router.get("/runs/{run}/checkpoints")
def _checkpoints(run: NamedRun, library: Shared) -> CheckpointList:
    return library.checkpoints(run).listed()


@router.get("/runs/{run}/checkpoints/{checkpoint:path}/arrays")
def _arrays(run: NamedRun, checkpoint: str, library: Shared) -> ArrayList:
    path, info = library.checkpoints(run).find(checkpoint)
    arrays = library.reader(info).arrays
    base = f"zarr/{quote(run.name, safe='')}/{quote(path)}"
    return ArrayList(
        arrays=[
            ArrayEntry(
                name=name,
                dtype=arrays[name].spec.dtype,
                shape=list(arrays[name].spec.shape),
                nbytes=arrays[name].spec.nbytes,
                num_shards=arrays[name].grid.num_shards,
                url=f"{base}/{quote(arrays[name].folder)}",
            )
            for name in sorted(arrays, key=natural_key)
        ]
    )


@router.get("/runs/{run}/checkpoints/{checkpoint:path}")
def _checkpoint(run: NamedRun, checkpoint: str, library: Shared) -> CheckpointDetail:
    entry, info = library.checkpoints(run).entry(checkpoint)
    arrays, record = library.reader(info).arrays, info.record
    return CheckpointDetail(
        entry=entry,
        location=info.location,
        id=record.id,
        training_world_size=record.training_world_size,
        num_arrays=len(arrays),
        array_bytes=sum(array.spec.nbytes for array in arrays.values()),
        state=_cut(encode_state(record.state, "state")),
    )


def _summary(library: Library, run: Run) -> RunSummary:
    """Return a run in short: the last lines of its newest journal, and its newest checkpoint."""
    num_checkpoints, newest, problem = 0, None, None
    try:
        num_checkpoints, newest = library.checkpoints(run).summary()
    except (ZstoreError, OSError) as error:
        problem = str(error)
    summary = library.short_journals(run).summary(run.name, run.folder.location)
    times = [summary.updated_at, newest.committed_at if newest else None]
    return summary.model_copy(
        update={
            "num_checkpoints": num_checkpoints,
            "newest": newest,
            "problem": problem,
            "updated_at": max((at for at in times if at is not None), default=None),
        }
    )


def _cut(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state within `_MOST_STATE_BYTES`, its largest values replaced by their size. Numbers are finite."""
    found = json.loads(json.dumps(state), parse_constant=lambda _: None)
    sizes = {key: len(json.dumps(value)) for key, value in found.items()}
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        if len(json.dumps(found)) > _MOST_STATE_BYTES:
            found[key] = f"({sizes[key]} bytes of JSON, not shown)"
    return dict(found)
