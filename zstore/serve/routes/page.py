"""The page: one HTML file for all its URLs, and the files that it loads.

[Note: the page]
Plain ES modules without a build step, in `assets`. The service answers `/` with `index.html`; `main.js` then
shows the view that the URL's fragment names. All links and redirects are relative: a proxy may serve it below any path. All
files are kept in memory once one was asked for: they change only with
the package. A browser keeps them too, and asks whether they changed (`no-cache` and an ETag).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from ..auth import set_cookie, token_of
from ..replies import problem
from ..service import run_of

ASSETS = Path(__file__).parents[1] / "assets"
_SHELL = "index.html"
_TYPES: Mapping[str, str] = MappingProxyType(
    {
        ".css": "text/css; charset=utf-8",
        ".html": "text/html; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)


@dataclass(frozen=True, kw_only=True)
class Asset:
    """A file that the page is made of."""

    body: bytes
    media_type: str
    etag: str


@functools.cache
def _assets() -> Mapping[str, Asset]:
    """Return the files of the page by name (`views/run.js`)."""
    found: dict[str, Asset] = {}
    for path in sorted(ASSETS.rglob("*")):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
            name = path.relative_to(ASSETS).as_posix()
            found[name] = Asset(body=body, media_type=_TYPES[path.suffix], etag=etag)
    return found


def routes() -> list[Route]:
    """Return the routes of the page; the ones with a run's name come last among all of the service."""
    return [
        Route("/", _answer),
        Route("/jobs", _view),
        Route("/runs/compare", _view),
        Route("/run/{rest:path}", _view),
        Route("/assets/{file:path}", _answer),
        Route("/{run}", _redirect),
    ]


async def _view(request: Request) -> Response:
    """Redirect from the address of a view to the page that shows it; a link signs the browser in first."""
    link, path = request.scope["state"].get("link"), request.scope["raw_path"].decode("ascii", "replace")
    if link is not None and "rest" in request.path_params:
        request.scope["state"] |= {"audit": "link opened", "run": request.path_params["rest"].partition("/")[0]}
        signed_in = RedirectResponse(f"./{path.rpartition('/')[2]}", 303, headers={"Cache-Control": "no-store"})
        set_cookie(request, signed_in, link)
        return signed_in
    query = request.scope["query_string"].decode("ascii", "replace")
    above = "../" * (path.count("/") - 1) or "./"
    return RedirectResponse(f"{above}#{path}{'?' if query else ''}{query}", 307, headers={"Cache-Control": "no-store"})


async def _answer(request: Request) -> Response:
    """Answer with the file that the path names, with the shell if it names none."""
    name = request.path_params.get("file", _SHELL)
    asset = (await run_in_threadpool(_assets)).get(name)
    if asset is None:
        return problem(404, f"the page has no file {name!r}")
    headers = {"ETag": asset.etag, "Cache-Control": "no-cache"}
    known = request.headers.get("if-none-match", "")
    if known.strip() == "*" or asset.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)


async def _redirect(request: Request) -> Response:
    """Redirect from the address of a run to its page; clients that may not read learn nothing about the run."""
    if token_of(request) is not None:
        await run_in_threadpool(run_of, request)
    name, link = quote(request.path_params["run"], safe=""), request.scope["state"].get("link")
    place = f"./#/run/{name}" if link is None else f"./run/{name}?share={link}"
    return RedirectResponse(place, 307, headers={"Cache-Control": "no-store"})
