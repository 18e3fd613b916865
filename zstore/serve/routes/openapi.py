"""The OpenAPI 3.1 document of `/api`, made from the table of operations and the models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ..._version import __version__
from ..models import CheckpointsChanged, Ended, Job, Problem, RunDetail, SaveEvent, Steps, Warned
from .operations import Operation, Parameter

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
"""Where a model's schema is, by the model."""

_SEGMENT = re.compile(r"\{(\w+)(?::path)?\}")
_HELP = {
    "run": "Name of a run, percent-encoded.",
    "checkpoint": "Path of the tag's folder inside the run's, or `latest`.",
    "job": "Id of a job.",
}
_ABOUT = (
    "Runs, checkpoints and arrays that a service has, and what it can do with them. Not described here: `/api/session`, by "
    "which the page signs in, and `/api/uploads`, by which zstore sends checkpoints."
)
_ALWAYS = {400: "The request is not as expected.", 401: "The token is missing or wrong."}
_MEANINGS = _ALWAYS | {
    403: "The service takes no actions.",
    404: "There is no such run, checkpoint, array or job.",
    409: "It does not fit how things are now.",
    422: "The checkpoint is damaged.",
    507: "The drive is full.",
}


def document(operations: Iterable[Operation]) -> dict[str, Any]:
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
        "security": [{"token": []}, {}],
    }


def _operation(one: Operation, refs: Refs) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": _name(one),
        "summary": one.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "description": _HELP[name], "schema": {"type": "string"}}
            for name in _SEGMENT.findall(one.path)
        ]
        + [_parameter(parameter) for parameter in one.parameters],
        "responses": {str(one.status): _success(one, refs)}
        | {
            str(status): {
                "description": _MEANINGS[status],
                "content": {"application/json": {"schema": refs[Problem]}},
            }
            for status in sorted({*_ALWAYS, *one.problems})
        },
    }
    if one.body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": refs[one.body]}}}
    return found


def _name(one: Operation) -> str:
    parts = [part for part in one.path.split("/")[1:] if part]
    return "_".join([one.method.lower(), *(_SEGMENT.sub(r"\1", part).replace(".", "_") for part in parts)])


def _parameter(parameter: Parameter) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": parameter.kind}
    if parameter.kind == "integer":
        schema |= {"minimum": parameter.least, "maximum": parameter.most}
    if parameter.default is not None:
        schema["default"] = parameter.default
    return {
        "name": parameter.name,
        "in": "query",
        "required": parameter.required,
        "description": parameter.help,
        "schema": schema,
    }


def _success(one: Operation, refs: Refs) -> dict[str, Any]:
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
