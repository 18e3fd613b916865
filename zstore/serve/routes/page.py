"""The page: one HTML file for all its URLs, and the files that it loads.

[Note: the page]
Plain ES modules without a build step, in `assets`. The service answers each URL of the page with the same `index.html`;
`main.js` then shows the view that the URL names. All files are kept in memory once one was asked for: they change only with
the package. A browser keeps them too, and asks whether they changed (`no-cache` and an ETag).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote

import aiofiles
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from ..auth import may_read
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


class Assets:
    """The files of the page by name (`views/run.js`), read from the package once."""

    def __init__(self, folder: Path = ASSETS) -> None:
        self._folder = folder
        self._found: Mapping[str, Asset] | None = None

    async def get(self, name: str) -> Asset | None:
        """Return the file of that name; None if the page has none."""
        if self._found is None:
            self._found = await self._read()
        return self._found.get(name)

    async def _read(self) -> Mapping[str, Asset]:
        found: dict[str, Asset] = {}
        for path in await run_in_threadpool(lambda: sorted(self._folder.rglob("*"))):
            if path.suffix in _TYPES:
                async with aiofiles.open(path, "rb") as file:
                    body = await file.read()
                etag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
                found[path.relative_to(self._folder).as_posix()] = Asset(
                    body=body, media_type=_TYPES[path.suffix], etag=etag
                )
        return found


def routes() -> list[Route]:
    """Return the routes of the page; the ones with a run's name come last among all of the service."""
    assets = Assets()

    async def shell(request: Request) -> Response:
        return await _answer(assets, _SHELL, request)

    async def asset(request: Request) -> Response:
        return await _answer(assets, request.path_params["file"], request)

    return [
        Route("/", shell),
        Route("/jobs", shell),
        Route("/run/{rest:path}", shell),
        Route("/assets/{file:path}", asset),
        Route("/{run}", _redirect),
    ]


async def _answer(assets: Assets, name: str, request: Request) -> Response:
    asset = await assets.get(name)
    if asset is None:
        return problem(404, f"the page has no file {name!r}")
    headers = {"ETag": asset.etag, "Cache-Control": "no-cache"}
    known = request.headers.get("if-none-match", "")
    if known.strip() == "*" or asset.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)


async def _redirect(request: Request) -> Response:
    """Redirect from the address of a run to its page; clients that may not read learn nothing about the run."""
    if may_read(request):
        await run_in_threadpool(run_of, request)
    name = quote(request.path_params["run"], safe="")
    return RedirectResponse(f"/run/{name}", 307, headers={"Cache-Control": "no-store"})
