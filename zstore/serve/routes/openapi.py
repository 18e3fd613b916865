"""The OpenAPI 3.1 document of `/api`, made from the table of operations and the models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ..._version import __version__
from ..models import CheckpointsChanged, Ended, Job, Problem, RunDetail, SaveEvent, Steps, Warned
from .operations import Description, Parameter

EVENTS: Mapping[str, type[BaseModel]] = {
    "steps": Steps,
    "run": RunDetail,
    "save": SaveEvent,
    "warning": Warned,
    "checkpoints": CheckpointsChanged,
    "job": Job,
    "end": Ended,
}
"""Models of the data of events, by the event's name."""

Refs = Mapping[Any, dict[str, Any]]
"""The reference to a model's schema, by the model."""

_SEGMENT = re.compile(r"\{(\w+)(?::\w+)?\}")
_HELP = {
    "run": "Name of a run, percent-encoded.",
    "checkpoint": "Path of the tag's folder inside the run's, `latest`, or a moving tag.",
    "job": "Id of a job.",
    "upload": "Id of an upload.",
    "path": "Path of a file inside the checkpoint.",
    "run_id": "Id of the training run, 32 hex digits.",
    "name": "Name of a file.",
    "number": "Number of a version of weights.",
}
_ABOUT = (
    "Runs, checkpoints and arrays that a service has, what it can do with them, and how checkpoints are sent to it. Files are "
    "below `/zarr`, `/xarray` and `/weights`."
)
_MEANINGS = {
    400: "The request is not as expected.",
    401: "The token is missing or wrong.",
    403: "The service takes no actions, has no token, or the role of the token is less than this needs.",
    404: "There is no such run, checkpoint, array, job, upload or file.",
    409: "It does not fit how things are now.",
    413: "The body is too large.",
    422: "The checkpoint is damaged.",
    429: "Too many wrong tokens: wait a second.",
    507: "The drive is full.",
}
_ACCESS: Mapping[str, list[dict[str, list[str]]]] = {
    "read": [{"token": []}, {}],
    "write": [{"token": []}],
    "act": [{"token": []}],
    "open": [{}],
}
"""Requirements of security; a service without a token lets everybody read."""


def document(operations: Iterable[Description]) -> dict[str, Any]:
    """Return the document as JSON."""
    listed = list(operations)
    bodies = {one.body for one in listed if one.body is not None}
    answers: set[type[BaseModel]] = {
        Problem,
        *EVENTS.values(),
        *(one.answer for one in listed if one.answer is not None),
    }
    modes: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = [
        *((model, "serialization") for model in answers - bodies),
        *((model, "validation") for model in bodies),
    ]
    modes.sort(key=lambda pair: pair[0].__name__)
    keys, schemas = models_json_schema(modes, ref_template="#/components/schemas/{model}")
    refs: Refs = {model: schema for (model, _), schema in keys.items()}
    paths: dict[str, dict[str, Any]] = {}
    for one in listed:
        paths.setdefault(_SEGMENT.sub(r"{\1}", one.path), {})[one.method.lower()] = _operation(one, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "zstore serve", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": _ACCESS["read"],
    }


def _operation(one: Description, refs: Refs) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": _name(one),
        "summary": one.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "description": _HELP[name], "schema": {"type": "string"}}
            for name in _SEGMENT.findall(one.path)
        ]
        + [_parameter(parameter, "query") for parameter in one.parameters]
        + [_parameter(parameter, "header") for parameter in one.headers],
        "responses": {str(one.status): _success(one, refs)}
        | {str(status): _success(one, refs) | {"description": text} for status, text in one.other.items()}
        | {
            str(status): {
                "description": _MEANINGS[status],
                "content": {"application/json": {"schema": refs[Problem]}},
            }
            for status in sorted(_problems(one))
        },
    }
    if one.access != "read":
        found["security"] = _ACCESS[one.access]
    if one.body is not None or one.body_media != "application/json":
        schema = {} if one.body is None else {"schema": refs[one.body]}
        found["requestBody"] = {"required": True, "content": {one.body_media: schema}}
    return found


def _problems(one: Description) -> set[int]:
    found = {400, 401, *one.problems}
    if _SEGMENT.search(one.path):
        found.add(404)
    return found | {403, 404, 409} if one.access in ("write", "act") else found


def _name(one: Description) -> str:
    parts = [part for part in one.path.split("/")[1:] if part]
    return "_".join([one.method.lower(), *(_SEGMENT.sub(r"\1", part).replace(".", "_") for part in parts)])


def _parameter(parameter: Parameter, where: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": parameter.kind}
    if parameter.kind == "integer":
        schema |= {"minimum": parameter.least, "maximum": parameter.most}
    if parameter.default is not None:
        schema["default"] = parameter.default
    return {
        "name": parameter.name,
        "in": where,
        "required": parameter.required,
        "description": parameter.help,
        "schema": schema,
    }


def _success(one: Description, refs: Refs) -> dict[str, Any]:
    if one.status == 204:
        return {"description": one.summary}
    if one.answer is not None:
        return {"description": one.summary, "content": {one.media: {"schema": refs[one.answer]}}}
    if one.media != "text/event-stream":
        return {"description": one.summary, "content": {one.media: {"schema": {"type": "object"}}}}
    text = (
        "Server-sent events; each has the name of one of these models' events and its JSON as data. The id of an event, sent "
        "back as Last-Event-ID, resumes behind it."
    )
    events = {name: refs[model] for name, model in EVENTS.items()}
    return {"description": text, "content": {one.media: {"schema": {"type": "string"}, "x-events": events}}}
