"""The application: all routes together, and what stands around them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import anyio.to_thread
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from . import api, page
from .replies import HANDLED, answer_error
from .service import Service
from .settings import Settings


def make_app(settings: Settings) -> Starlette:
    """Return the ASGI application that serves what `settings` say."""
    app = Starlette(routes=_routes(), exception_handlers=dict.fromkeys(HANDLED, answer_error), lifespan=_lifespan)
    app.state.service = Service(settings)
    app.state.hubs = {}
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    yield
    service: Service = app.state.service
    await anyio.to_thread.run_sync(service.close)


def _routes() -> list[BaseRoute]:
    return [*api.routes(), *page.routes()]
