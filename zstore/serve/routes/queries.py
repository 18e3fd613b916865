"""The queries of `/api`, which change nothing."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ..._version import __version__
from ..auth import is_authorized
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
from ..runs import Run
from ..service import Service, run_of, service_of
from ..views import run as views
from ..views.arrays import array_statistics, list_arrays
from ..views.difference import compare
from .operations import Operation, Parameter, Values, answer, answer_heavy

_MOST_POINTS = 20_000
_RUN = "/api/runs/{run}"
CHECKPOINT = f"{_RUN}/checkpoints/{{checkpoint:path}}"


def _of_run(request: Request, view: Callable[[Service, Run], BaseModel]) -> Callable[[], BaseModel]:
    return lambda: view(service_of(request), run_of(request))


def _of_checkpoint(request: Request, view: Callable[[Service, Run, str], BaseModel]) -> Callable[[], BaseModel]:
    return lambda: view(service_of(request), run_of(request), request.path_params["checkpoint"])


async def _info(request: Request, values: Values) -> Response:
    settings = service_of(request).settings
    authorized = is_authorized(request)
    return reply(
        ServiceInfo(
            version=__version__,
            allows_actions=settings.allow_actions,
            authorized=authorized,
            needs_token=settings.token is not None and not authorized,
        )
    )


async def _runs(request: Request, values: Values) -> Response:
    return await answer(lambda: views.list_runs(service_of(request)))


async def _run(request: Request, values: Values) -> Response:
    return await answer(_of_run(request, views.run_detail))


async def _placement(request: Request, values: Values) -> Response:
    return await answer(_of_run(request, views.run_placement))


async def _steps(request: Request, values: Values) -> Response:
    asked = {name: values[name] for name in ("after", "until", "points")}
    return await answer(_of_run(request, lambda service, run: views.run_steps(service, run, **asked)))


async def _checkpoints(request: Request, values: Values) -> Response:
    return await answer(_of_run(request, views.list_checkpoints))


async def _checkpoint(request: Request, values: Values) -> Response:
    return await answer(_of_checkpoint(request, views.checkpoint_detail))


async def _arrays(request: Request, values: Values) -> Response:
    return await answer(_of_checkpoint(request, list_arrays))


async def _stats(request: Request, values: Values) -> Response:
    place = request.path_params["checkpoint"]
    return await answer_heavy(
        request,
        lambda advance: array_statistics(service_of(request), run_of(request), place, values["array"], advance),
    )


async def _difference(request: Request, values: Values) -> Response:
    pair = (values["before"], values["after"])
    return await answer_heavy(
        request, lambda advance: compare(service_of(request), run_of(request), pair, values["array"], advance)
    )


async def _jobs(request: Request, values: Values) -> Response:
    return reply(service_of(request).jobs.all())


async def _job(request: Request, values: Values) -> Response:
    return reply(service_of(request).jobs.get(request.path_params["job"]))


_AFTER = Parameter(name="after", help="Steps after this one only.", kind="integer")
_UNTIL = Parameter(name="until", help="Steps up to this one only.", kind="integer")
_POINTS = Parameter(
    name="points", help="Most values a column.", kind="integer", default=1000, least=1, most=_MOST_POINTS
)
_ARRAY = Parameter(name="array", help="Name of the array.", required=True)
_PAIR = (
    Parameter(name="before", help="The first checkpoint.", required=True),
    Parameter(name="after", help="The second checkpoint.", required=True),
    Parameter(name="array", help="Compare the values of this array alone."),
)

OPERATIONS = (
    Operation(path="/api", summary="The service, and what it allows", answer=ServiceInfo, handle=_info),
    Operation(path="/api/runs", summary="All runs in short", answer=RunList, handle=_runs),
    Operation(
        path=_RUN, summary="A run: its sessions, saves and warnings", answer=RunDetail, handle=_run, problems=(404,)
    ),
    Operation(
        path=f"{_RUN}/placement",
        summary="Where every byte of a run rests",
        answer=Placement,
        handle=_placement,
        problems=(404,),
    ),
    Operation(
        path=f"{_RUN}/steps",
        summary="Steps of a run as columns",
        answer=Steps,
        handle=_steps,
        parameters=(_AFTER, _UNTIL, _POINTS),
        problems=(404,),
    ),
    Operation(
        path=f"{_RUN}/checkpoints",
        summary="Checkpoints of a run, the oldest first",
        answer=CheckpointList,
        handle=_checkpoints,
        problems=(404,),
    ),
    Operation(
        path=f"{CHECKPOINT}/arrays",
        summary="Arrays of a checkpoint, in natural order",
        answer=ArrayList,
        handle=_arrays,
        problems=(404, 422),
    ),
    Operation(
        path=f"{CHECKPOINT}/stats",
        summary="Statistics of an array's values",
        answer=ArrayStatistics,
        handle=_stats,
        parameters=(_ARRAY,),
        problems=(404, 422),
    ),
    Operation(
        path=CHECKPOINT, summary="A checkpoint", answer=CheckpointDetail, handle=_checkpoint, problems=(404, 422)
    ),
    Operation(
        path=f"{_RUN}/diff",
        summary="How two checkpoints differ: by checksums, or one array by its values",
        answer=Difference,
        handle=_difference,
        parameters=_PAIR,
        problems=(404, 422),
    ),
    Operation(path="/api/jobs", summary="The newest jobs, the oldest first", answer=JobList, handle=_jobs),
    Operation(path="/api/jobs/{job}", summary="A job", answer=Job, handle=_job, problems=(404,)),
)
