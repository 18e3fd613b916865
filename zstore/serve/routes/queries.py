"""The queries of `/api`, which change nothing."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ..._version import __version__
from ..auth import ANYBODY, require_token, token_of
from ..models import (
    ArrayList,
    ArrayStatistics,
    CheckpointDetail,
    CheckpointList,
    Difference,
    Job,
    JobList,
    Placement,
    RunDetail,
    RunList,
    ServiceInfo,
    Steps,
)
from ..replies import reply
from ..service import service_of
from ..views import run as views
from ..views.arrays import array_statistics, list_arrays
from ..views.difference import compare
from .operations import Operation, Parameter, Values, answer, of_run

_MOST_POINTS = 20_000
_RUN = "/api/runs/{run}"
_CHECKPOINT = "/checkpoints/{checkpoint:checkpoint}"
CHECKPOINT = _RUN + _CHECKPOINT


async def _info(request: Request, values: Values) -> Response:
    settings, token = service_of(request).settings, token_of(request)
    authorized = token not in (None, ANYBODY)
    return reply(
        ServiceInfo(
            version=__version__,
            allows_actions=settings.allow_actions,
            authorized=authorized,
            role=token.role if token is not None and authorized else None,
            needs_token=token is None,
        )
    )


async def _runs(request: Request, values: Values) -> Response:
    service, sees = service_of(request), require_token(request).sees

    def search() -> RunList:
        seen = [run for run in service.listing.get() if sees(run.name)]
        return RunList(runs=[run for run in seen if run.has_words(values["q"] or "")], num_runs=len(seen))

    return await answer(search)


async def _jobs(request: Request, values: Values) -> Response:
    return reply(service_of(request).jobs.all(require_token(request).sees))


async def _job(request: Request, values: Values) -> Response:
    return reply(service_of(request).jobs.get(request.path_params["job"], require_token(request).sees))


def _of_run(
    path: str,
    summary: str,
    model: type[BaseModel],
    view: Callable[..., BaseModel],
    *,
    heavy: bool = False,
    parameters: tuple[Parameter, ...] = (),
) -> Operation:
    """Return the query below a run's path that answers with `view`: see `of_run`."""
    return Operation(
        path=_RUN + path,
        summary=summary,
        answer=model,
        handle=of_run(view, heavy=heavy),
        parameters=parameters,
        problems=(422,) if heavy or path.startswith(_CHECKPOINT) else (),
    )


_SEARCH = Parameter(name="q", help="Words that are in the run's name, tags, group, note, or settings like `lr=0.001`.")
_PAGE = (
    Parameter(name="limit", help="Most sessions and warnings.", kind="integer", default=views.PAGE, least=1, most=100),
    Parameter(name="skip", help="How many of the newest to leave out.", kind="integer", default=0),
)
_STEPS = (
    Parameter(name="after", help="Steps after this one only.", kind="integer"),
    Parameter(name="until", help="Steps up to this one only.", kind="integer"),
    Parameter(name="points", help="Most values a column.", kind="integer", default=1000, least=1, most=_MOST_POINTS),
)
_ARRAY = Parameter(name="array", help="Name of the array.", required=True)
_PAIR = (
    Parameter(name="before", help="The first checkpoint.", required=True),
    Parameter(name="after", help="The second checkpoint.", required=True),
    Parameter(name="array", help="Compare the values of this array alone."),
)

OPERATIONS = (
    Operation(path="/api", summary="The service, and what it allows", answer=ServiceInfo, handle=_info),
    Operation(path="/api/runs", summary="Runs in short", answer=RunList, handle=_runs, parameters=(_SEARCH,)),
    _of_run("", "A run: its sessions, saves and warnings", RunDetail, views.run_detail, parameters=_PAGE),
    _of_run("/placement", "The tier of every byte of a run", Placement, views.run_placement),
    _of_run("/steps", "Steps of a run as columns", Steps, views.run_steps, parameters=_STEPS),
    _of_run("/checkpoints", "Checkpoints of a run, the oldest first", CheckpointList, views.list_checkpoints),
    _of_run(f"{_CHECKPOINT}/arrays", "Arrays of a checkpoint, in natural order", ArrayList, list_arrays),
    _of_run(
        f"{_CHECKPOINT}/stats",
        "Statistics of an array's values",
        ArrayStatistics,
        array_statistics,
        heavy=True,
        parameters=(_ARRAY,),
    ),
    _of_run(_CHECKPOINT, "A checkpoint", CheckpointDetail, views.checkpoint_detail),
    _of_run(
        "/diff",
        "How two checkpoints differ: by checksums, or one array by its values",
        Difference,
        compare,
        heavy=True,
        parameters=_PAIR,
    ),
    Operation(path="/api/jobs", summary="The newest jobs, the oldest first", answer=JobList, handle=_jobs),
    Operation(path="/api/jobs/{job}", summary="A job", answer=Job, handle=_job),
)
