"""The application: all routes together, and what stands around them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from .._version import __version__
from . import files, page, sessions, weights
from .auth import is_authorized
from .guard import Guard
from .models import RunList, RunSummary, ServiceInfo
from .replies import HANDLED, answer_error, answer_refusal, reply
from .runs import Run
from .service import Service, service_of
from .settings import Settings


def make_app(settings: Settings) -> Starlette:
    """Return the ASGI application that serves what `settings` say."""
    service = Service(settings)
    app = Starlette(
        routes=_routes(),
        middleware=[Middleware(Guard, service=service)],
        exception_handlers={**dict.fromkeys(HANDLED, answer_error), HTTPException: answer_refusal},
    )
    app.state.service = service
    return app


def _routes() -> list[BaseRoute]:
    return [
        Route("/api", _info),
        Route("/api/runs", _runs),
        *sessions.routes(),
        *files.routes(),
        *weights.routes(),
        *page.routes(),
    ]


async def _info(request: Request) -> Response:
    settings = service_of(request).settings
    return reply(
        ServiceInfo(version=__version__, allows_actions=settings.allow_actions, authorized=is_authorized(request))
    )


async def _runs(request: Request) -> Response:
    runs = await run_in_threadpool(service_of(request).runs.all)
    return reply(RunList(runs=[_summary(run) for run in runs.values()]))


def _summary(run: Run) -> RunSummary:
    return RunSummary(
        name=run.name, location=run.folder.location, state="unknown", run_id=None, step=None, total_steps=None, loss=None,
        tokens_per_s=None, updated_at=None, num_checkpoints=0, newest=None, problem=None,
    )  # fmt: skip
