"""The page: one HTML file whose views are fragments of its URL, and the files that it loads.

Plain ES modules without a build step, in `assets`. All links and redirects are relative: a proxy may serve it below any path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter
from fastapi.responses import FileResponse, RedirectResponse
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from .library import Runs

ASSETS = Path(__file__).parent / "assets"
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
router = APIRouter(include_in_schema=False)


class Assets(StaticFiles):
    """The files that the page loads."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Return the answer with a file, or that it did not change."""
        answer = super().file_response(*args, **kwargs)
        answer.headers.update(HEADERS)
        return answer


@router.get("/")
def _page() -> FileResponse:
    return FileResponse(ASSETS / "index.html", headers=HEADERS)


@router.get("/{run}")
def _run(run: str, runs: Runs) -> RedirectResponse:
    runs.get(run)
    return RedirectResponse(f"./#/run/{quote(run, safe='')}", 307)
