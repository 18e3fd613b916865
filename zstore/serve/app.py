"""The application: all routes together, and the middleware around them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator

import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from .guard.guard import Guard
from .replies import HANDLED, answer_error, answer_refusal
from .routes import api, datasets, files, operator, page, weights
from .service import Service
from .settings import Settings


def make_app(settings: Settings) -> Starlette:
    """Return the ASGI application that serves the runs in `settings`."""
    service = Service(settings)
    app = Starlette(
        routes=_routes(),
        middleware=[Middleware(Guard, service=service)],
        exception_handlers={**dict.fromkeys(HANDLED, answer_error), HTTPException: answer_refusal},
        lifespan=_lifespan,
    )
    app.state.service = service
    app.state.broadcasts = {}
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    service: Service = app.state.service
    threading.Thread(target=service.listing.get, name="zstore-list", daemon=True).start()  # so that nobody waits for it
    service.webhooks.start()
    yield
    await anyio.to_thread.run_sync(service.close)


def _routes() -> list[BaseRoute]:
    # The page's come last: `/<run>` takes all paths that no other route has.
    return [*files.routes(), *weights.routes(), *datasets.routes(), *operator.routes(), *api.routes(), *page.routes()]
