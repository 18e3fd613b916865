"""JSON answers, and which HTTP status an error of ours is."""

from __future__ import annotations

from http import HTTPStatus

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive

from ..errors import (
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptionError,
    DiskFullError,
    UsageError,
    ZstoreError,
)
from .models import Problem, json_of


class ConflictError(UsageError):
    """The request does not fit the present state; asked again later, it may."""


_STATUS = (
    (ConflictError, 409),
    (CheckpointNotFoundError, 404),
    (FileNotFoundError, 404),
    (NotADirectoryError, 404),
    (CheckpointExistsError, 409),
    (DiskFullError, 507),
    (UsageError, 400),
    (CheckpointMismatchError, 422),
    (CorruptionError, 422),
)


def reply(model: BaseModel, status: int = 200) -> Response:
    """Return the answer with a model as its JSON."""
    return Response(json_of(model), status, media_type="application/json", headers={"Cache-Control": "no-store"})


def problem(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    """Return an answer that describes a problem."""
    body = json_of(Problem(error=text))
    return Response(body, status, {"Cache-Control": "no-store", **(headers or {})}, media_type="application/json")


def status_of(error: Exception) -> int:
    """Return the status that an error of ours becomes."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer an error that a route raised: one of ours with its text."""
    return problem(status_of(error), str(error))


async def answer_refusal(request: Request, error: Exception) -> Response:
    """Answer a status that a route, or the router, raised as HTTPException."""
    if not isinstance(error, HTTPException):
        raise error
    text = error.detail
    if text == HTTPStatus(error.status_code).phrase:  # the router's
        where = f"{request.method} {request.url.path!r:.200}"
        text = f"{text}: the service has nothing for {where}; runs are at /RUN, JSON is described by /api/openapi.json"
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(sorted(_methods(request)))
    return problem(error.status_code, text, headers)


async def disconnected(receive: Receive) -> None:
    """Return once the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _methods(request: Request) -> set[str]:
    """Return the methods of the path that a request names: each of them may be a route of its own."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    path = next((route.path for route in routes if route.path_regex.match(request.scope["path"])), None)
    return {method for route in routes if route.path == path for method in route.methods or ()}


HANDLED = (ZstoreError, FileNotFoundError, NotADirectoryError)
"""Errors that `answer_error` is for; others are bugs, logged and answered with 500 and no detail."""
