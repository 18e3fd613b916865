"""The routes of `/api`, and the document that describes all below `/api`."""

from __future__ import annotations

import functools
import json

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from . import actions, events, queries, run_files, sessions, uploads
from .openapi import document
from .operations import Exchange, Operation, Values


@functools.cache
def _text() -> str:
    return json.dumps(document(OPERATIONS), separators=(",", ":"))


async def _document(request: Request, values: Values) -> Response:
    return Response(_text(), media_type="application/json", headers={"Cache-Control": "no-cache"})


OPERATIONS: tuple[Operation | Exchange, ...] = (
    Operation(path="/api/openapi.json", summary="This document", answer=None, handle=_document),
    # A checkpoint may be in a folder of a loop: paths that end in a word of their own are tried before its own.
    *actions.OPERATIONS,
    *events.OPERATIONS,
    *queries.OPERATIONS,
    *sessions.OPERATIONS,
    # An upload has no id that is `journals` or `companions`.
    *run_files.OPERATIONS,
    *uploads.OPERATIONS,
)


def routes() -> list[Route]:
    """Return the routes of `OPERATIONS`, in the order in which paths are tried."""
    return [operation.route() for operation in OPERATIONS]
