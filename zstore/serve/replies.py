"""JSON answers, and which HTTP status an error of ours is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..errors import (
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptionError,
    DiskFullError,
    UsageError,
    ZstoreError,
)
from .models import Problem


class ConflictError(UsageError):
    """What was asked for does not fit how things are now; asked again later, it may."""


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


def json_of(model: BaseModel) -> str:
    """Return a model as JSON in UTF-8, numbers that are not finite as null and what is no Unicode in a text as `?`."""
    try:
        return model.model_dump_json()
    except PydanticSerializationError:  # a lone surrogate, out of a journal or the name of a file
        return json.dumps(_encodable(model.model_dump()), separators=(",", ":"), ensure_ascii=False)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list | tuple) else value


def problem(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    """Return an answer that says what is wrong."""
    body = json_of(Problem(error=text))
    return Response(body, status, {"Cache-Control": "no-store", **(headers or {})}, media_type="application/json")


def status_of(error: Exception) -> int:
    """Return the status that an error of ours becomes."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer what a route raised: an error of ours with its text."""
    return problem(status_of(error), str(error))


async def answer_refusal(request: Request, error: Exception) -> Response:
    """Answer a status that a route, or the router, raised as HTTPException."""
    if not isinstance(error, HTTPException):
        raise error
    text = error.detail
    if text == HTTPStatus(error.status_code).phrase:  # the router's
        where = f"{request.method} {request.url.path!r:.200}"
        text = f"{text}: the service has nothing for {where}; runs are at /RUN, JSON is described by /api/openapi.json"
    return problem(error.status_code, text, dict(error.headers or {}))


HANDLED = (ZstoreError, FileNotFoundError, NotADirectoryError)
"""Errors that `answer_error` is for; others are bugs, logged and answered with 500 and no detail."""
