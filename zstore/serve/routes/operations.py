"""An operation of `/api`, described once: its route and its part of the OpenAPI document are made from the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import anyio
import anyio.to_thread
from pydantic import BaseModel, ValidationError
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ...checkpoint.catalog import LOOPS_FOLDER
from ...errors import UsageError, ZstoreError
from ..auth import require_role
from ..replies import disconnected, reply
from ..service import run_of, service_of
from ..tokens import Role


class _CheckpointPath(PathConvertor):
    """The path of a checkpoint in its run's folder: what else is below it is not one, and so can refuse a method itself."""

    regex = rf"(?:{LOOPS_FOLDER.pattern}/)?[^/]+"


register_url_convertor("checkpoint", _CheckpointPath())
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_GZIP = [Middleware(GZipMiddleware, minimum_size=1024, compresslevel=3)]
_MOST_BODY_BYTES = 64 * 1024
_WRITE_BYTES = 1024 * 1024
"""Bytes of a file that are collected before they are written."""
_MOST_TEXT = 4096
HEARTBEAT_S = 15.0
"""Between two heartbeats of an event stream."""

Values = Mapping[str, Any]
"""The parameters of a query, by name; None: not given."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of a query."""

    name: str
    help: str
    kind: Literal["integer", "string"] = "string"
    required: bool = False
    default: int | None = None
    least: int = 0
    most: int = 2**53

    def parse(self, text: str) -> int | str:
        """Return the value in a query. Raises UsageError."""
        if self.kind == "string":
            if len(text) > _MOST_TEXT:
                raise UsageError(f"{self.name}: expected at most {_MOST_TEXT} characters, got {len(text)}")
            return text
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 18 and self.least <= int(text) <= self.most):
            raise UsageError(
                f"{self.name}: expected a whole number from {self.least} to {self.most}, got {text[:40]!r}"
            )
        return int(text)


@dataclass(frozen=True, kw_only=True)
class Description:
    """The document's description of one method of one path."""

    path: str
    summary: str
    answer: type[BaseModel] | None
    """Model of the answer; None: it is of another kind, and `media` says which."""
    method: Literal["GET", "POST", "PUT", "DELETE"] = "GET"
    parameters: tuple[Parameter, ...] = ()
    headers: tuple[Parameter, ...] = ()
    body: type[BaseModel] | None = None
    body_media: str = "application/json"
    """Content type of the body; one without a model has another than JSON."""
    status: int = 200
    """204: the answer is empty."""
    other: Mapping[int, str] = field(default_factory=dict)
    """Other statuses with the same answer, and their meanings."""
    media: str = "application/json"
    problems: tuple[int, ...] = ()
    """Statuses of answers that it may give instead of this, beside those that all of its kind may give."""
    access: Literal["read", "write", "act", "open"] = "read"
    """write and act: need a token of that role, and a service that takes actions; open: needs no token."""
    audit: str = ""
    """What the audit log calls it; empty: it is not noted there."""

    def admit(self, request: Request) -> None:
        """Raise HTTPException unless a request may carry it out."""
        if self.audit:
            request.scope["state"]["audit"] = self.audit
        if self.access in ("write", "act"):
            require_role(request, Role(self.access))


@dataclass(frozen=True, kw_only=True)
class Exchange(Description):
    """An operation that reads its request itself, and is a part of uploads unless it says otherwise."""

    handle: Callable[[Request], Awaitable[Response]]
    access: Literal["read", "write", "act", "open"] = "write"

    def route(self) -> Route:
        """Return its route."""

        async def endpoint(request: Request) -> Response:
            self.admit(request)
            return await self.handle(request)

        return Route(self.path, endpoint, methods=[self.method])


@dataclass(frozen=True, kw_only=True)
class Operation(Description):
    """An operation whose query is read by its description."""

    handle: Callable[[Request, Values], Awaitable[Response]]

    def route(self) -> Route:
        """Return its route."""

        async def endpoint(request: Request) -> Response:
            values = self.parse_query(request)
            self.admit(request)
            return await self.handle(request, values)

        middleware = _GZIP if self.media == "application/json" else []
        return Route(self.path, endpoint, methods=[self.method], middleware=middleware)

    def parse_query(self, request: Request) -> dict[str, Any]:
        """Return the parameters. Raises UsageError for one that is unknown, missing, invalid, or repeated."""
        known = {parameter.name: parameter for parameter in self.parameters}
        found: dict[str, Any] = {name: parameter.default for name, parameter in known.items()}
        given: set[str] = set()
        for name, text in request.query_params.multi_items():
            if name not in known:
                expected = ", ".join(known) or "none"
                raise UsageError(f"unknown parameter {name[:80]!r}; expected: {expected}")
            if name in given:
                raise UsageError(f"{name}: expected once, got it several times")
            given.add(name)
            found[name] = known[name].parse(text)
        for name in known.keys() - given:
            if known[name].required:
                raise UsageError(f"the parameter {name} is missing: {known[name].help}")
        return found


async def receive(request: Request, write: Callable[[bytearray], object], length: int, header: str) -> None:
    """Write a body of `length` bytes, as `header` says, as it comes; bytes that came before the connection broke are written
    too. Raises UsageError for more or fewer bytes."""
    pending = bytearray()
    received = 0
    try:
        async for data in request.stream():
            received += len(data)
            if received > length:
                raise UsageError(f"the body has more than the {length} bytes that its {header} says")
            pending += data
            if len(pending) >= _WRITE_BYTES:
                await anyio.to_thread.run_sync(write, pending)
                pending = bytearray()
    finally:
        if pending and received <= length:
            await anyio.to_thread.run_sync(write, pending)
    if received != length:
        raise UsageError(f"the body has {received} bytes, its {header} says {length}")


async def parse_body(request: Request, model: type[M]) -> M:
    """Return a request's body. Raises UsageError for one that is not JSON of that model, or is too large."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UsageError(f"expected a body of content type application/json, got {kind[:80] or 'none'}")
    data = b""
    async for block in request.stream():
        data += block
        if len(data) > _MOST_BODY_BYTES:
            raise UsageError(f"expected a body of at most {_MOST_BODY_BYTES} bytes")
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}" for one in error.errors(include_url=False)[:5]
        )
        raise UsageError(f"the body is not as expected: {wrong[:500]}") from None


async def answer(work: Callable[[], BaseModel], status: int = 200) -> Response:
    """Answer with the model that `work` returns; it runs in a thread, and so does making JSON of it."""
    return await anyio.to_thread.run_sync(lambda: reply(work(), status))


def of_run(
    work: Callable[..., BaseModel], status: int = 200, *, heavy: bool = False, body: type[BaseModel] | None = None
) -> Callable[[Request, Values], Awaitable[Response]]:
    """Return the handler that answers with the result of `work` on the service, the run, the checkpoint if the path names one,
    and the body if there is one; the query's parameters are passed by name. See `answer`, and if it is heavy `answer_heavy`."""

    async def handle(request: Request, values: Values) -> Response:
        service, path = service_of(request), request.path_params
        given: list[Any] = [path["checkpoint"]] if "checkpoint" in path else []
        if body is not None:
            given.append(await parse_body(request, body))
        if heavy:
            return await answer_heavy(
                request, lambda advance: work(service, run_of(request), *given, **values, advance=advance)
            )
        return await answer(lambda: work(service, run_of(request), *given, **values), status)

    return handle


class _CancelledError(ZstoreError):
    """Nobody waits for the answer any more."""


async def answer_heavy(request: Request, work: Callable[[Callable[[int], None]], BaseModel]) -> Response:
    """Answer with the model that `work` returns: one of few at a time, and given up when its client goes away.

    `work` gets a function to call as it proceeds, which ends it by raising.
    """
    # A GET has no body: the next event is the end of the connection.
    watching = asyncio.create_task(disconnected(request.receive))

    def advance(nbytes: int) -> None:
        if watching.done():
            raise _CancelledError("the client went away")

    def carry_out() -> Response:
        advance(0)
        return reply(work(advance))

    try:
        return await anyio.to_thread.run_sync(carry_out, limiter=service_of(request).heavy)
    except _CancelledError as error:
        raise ClientDisconnect from error
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
