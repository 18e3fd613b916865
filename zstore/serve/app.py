"""The application: its routes, their permissions, the status of each error; and the server that runs it.

[Note: who may do what]
One token reads and writes, another only reads; without any, the service listens only on this machine and only reads. Programs
send `Authorization: Bearer TOKEN`. A browser asks for the token itself (HTTP Basic, under any name), and sends it with
requests of any page: so writing requires Bearer. Without a token `Host` must be this machine: docs/design/0008-service.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from secrets import compare_digest
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBasic, HTTPBasicCredentials, HTTPBearer
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from .._version import __version__
from ..errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptionError,
    DiskFullError,
    UsageError,
    ZstoreError,
)
from . import api, files, receive, weights
from .api import Library, Runs
from .runs import Settings

_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (CheckpointNotFoundError, 404),
    (FileNotFoundError, 404),
    (NotADirectoryError, 404),
    (CheckpointExistsError, 409),
    (DiskFullError, 507),
    (UsageError, 400),
    (CheckpointMismatchError, 422),
    (CorruptionError, 422),
    (CheckpointError, 409),
)
"""The first match counts; zstore's other errors are 500."""
_GRACE_S = 3
"""How long requests may take to end after a signal."""
_BACKLOG = 2048
ASSETS = Path(__file__).parent / "assets"
_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
_Basic = Annotated[HTTPBasicCredentials | None, Depends(HTTPBasic(auto_error=False, realm="zstore"))]


_page_router = APIRouter(include_in_schema=False)


class Json(JSONResponse):
    """JSON in ASCII: names of files and texts of journals may have characters that UTF-8 has not."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def make_app(settings: Settings) -> FastAPI:
    """Return the ASGI application that serves the runs in `settings`."""
    app = FastAPI(
        title="zstore",
        version=__version__,
        description="Runs and checkpoints of zstore. Errors have a body `{error}`.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        redirect_slashes=False,
        default_response_class=Json,
        lifespan=_lifespan,
    )
    app.state.library = Library(settings)
    app.add_api_route("/api/docs", _docs, include_in_schema=False)
    app.include_router(api.open_router)
    for router in (api.router, files.router, weights.router):
        app.include_router(router, dependencies=[Depends(may_read)])
    app.include_router(receive.router, dependencies=[Depends(may_write)])
    app.mount("/assets", _Assets(directory=ASSETS))
    app.include_router(_page_router, dependencies=[Depends(may_read)])  # `/{run}` takes all that no other route has
    for kind in (ZstoreError, FileNotFoundError, NotADirectoryError):
        app.exception_handler(kind)(_answer_error)
    app.exception_handler(AnyHTTPException)(_answer_refusal)
    app.exception_handler(RequestValidationError)(_answer_invalid)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await run_in_threadpool(app.state.library.close)


def may_read(request: Request, bearer: _Bearer, basic: _Basic) -> None:
    """Raise HTTPException unless the request may read. See [Note: who may do what]."""
    settings: Settings = request.app.state.library.settings
    if settings.is_open:
        _require_this_machine(request)
        return
    given = bearer.credentials if bearer is not None else None if basic is None else basic.password
    if not (_matches(given, settings.token) or _matches(given, settings.read_token)):
        raise HTTPException(401, "this service needs a token that reads", {"WWW-Authenticate": 'Basic realm="zstore"'})


def may_write(request: Request, bearer: _Bearer) -> None:
    """Raise HTTPException unless the request may write. See [Note: who may do what]."""
    settings: Settings = request.app.state.library.settings
    if settings.token is None:
        raise HTTPException(403, "this service takes no uploads: start it with a token that writes (ZSTORE_TOKEN)")
    given = None if bearer is None else bearer.credentials
    if _matches(given, settings.read_token):
        raise HTTPException(403, "the token only reads: uploads need the one that writes")
    if not _matches(given, settings.token):
        raise HTTPException(401, "uploads need the token that writes", {"WWW-Authenticate": "Bearer"})


def _matches(given: str | None, token: str | None) -> bool:
    return given is not None and token is not None and compare_digest(given.encode(), token.encode())


def _require_this_machine(request: Request) -> None:
    try:
        name = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        name = ""
    if name not in ("localhost", "127.0.0.1", "::1", request.app.state.library.settings.host):
        raise HTTPException(421, f"{name!r:.100} is not this machine: use localhost, or start the service with a token")


def _docs() -> HTMLResponse:
    return get_swagger_ui_html(openapi_url="openapi.json", title="zstore")  # relative: there may be a path above


def _problem(status: int, text: str, headers: dict[str, str] | None = None) -> Json:
    return Json({"error": text}, status, {"Cache-Control": "no-store", **(headers or {})})


async def _answer_error(request: Request, error: Exception) -> Json:
    """Answer an error of zstore's with its text."""
    return _problem(next((status for kind, status in _STATUS if isinstance(error, kind)), 500), str(error))


async def _answer_refusal(request: Request, error: AnyHTTPException) -> Json:
    text = error.detail
    if text in ("Not Found", "Method Not Allowed"):  # the router's
        text = f"{text}: the service has nothing for {request.method} {request.url.path!r:.200}; see /api/docs"
    return _problem(error.status_code, text, dict(error.headers or {}))


async def _answer_invalid(request: Request, error: RequestValidationError) -> Json:
    found = error.errors()[0]
    return _problem(400, f"{'.'.join(map(str, found['loc']))[:200]}: {found['msg'][:300]}")


# -- the page: modules without a build step; all links and redirects are relative, since a proxy may serve it below any path


class _Assets(StaticFiles):
    """The files that the page loads."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Return the answer with a file, or that it did not change."""
        answer = super().file_response(*args, **kwargs)
        answer.headers.update(_PAGE_HEADERS)
        return answer


@_page_router.get("/")
def _page() -> FileResponse:
    return FileResponse(ASSETS / "index.html", headers=_PAGE_HEADERS)


@_page_router.get("/{run}")
def _run(run: str, runs: Runs) -> RedirectResponse:
    runs.get(run)
    return RedirectResponse(f"./#/run/{quote(run, safe='')}", 307)


def run(settings: Settings, announce: Callable[[str], None] = lambda _: None) -> None:
    """Serve until SIGINT or SIGTERM; `announce` is called with the URL once it listens.

    Raises UsageError for an address that cannot be listened on.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a client takes two
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    with listen(settings) as listening:
        announce(url_of(settings, listening))
        _server(settings).run(sockets=[listening])


def _server(settings: Settings) -> uvicorn.Server:
    config = uvicorn.Config(
        make_app(settings), ws="none", log_level="error", access_log=False, timeout_graceful_shutdown=_GRACE_S
    )
    return uvicorn.Server(config)


def listen(settings: Settings) -> socket.socket:
    """Return the listening socket. Raises UsageError with the reason if it cannot listen."""
    host, port = settings.host, settings.port
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except socket.gaierror as error:
        raise UsageError(f"{host!r} is no address of this machine: {error.strerror}") from error
    except OSError as error:
        advice = "choose another with --port, or 0 for a free one"
        raise UsageError(f"cannot listen on {host}, port {port}: {os.strerror(error.errno or 0)}; {advice}") from error


def url_of(settings: Settings, listening: socket.socket) -> str:
    """Return the URL of the service, without a `/` at its end."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listening.getsockname()[1]}"


@contextlib.contextmanager
def serving(settings: Settings) -> Iterator[str]:
    """Serve from a thread for the length of a `with` block; yields the base URL, without a `/` at its end."""
    server = _server(settings)
    with listen(settings) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="zstore-serve", daemon=True)
        thread.start()
        try:
            yield url_of(settings, listening)
        finally:
            server.should_exit = True
            thread.join()
