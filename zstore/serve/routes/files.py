"""`/zarr/<run>/<path>`: files of checkpoints as they are on disk, with ranges and tags, and listings of folders.

[Note: names in paths]
A component of a path is percent-encoded in a URL, even if it has a `%` of its own: the folder `a%20b` is `a%2520b`. Many
clients put paths into URLs as they are, and then it arrives as `a%20b`. One that is not there decoded is therefore looked for
as it is. A decoded component never has a `/`, so neither reading leads anywhere else.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import unquote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from ...errors import CheckpointNotFoundError
from ..files.downloads import ZERO_COPY, Downloads
from ..files.listing import Listing, list_place
from ..files.opened import IsFolderError, Opened, open_local
from ..files.ranges import Part, choose
from ..files.visible import Place
from ..replies import disconnected
from ..service import Service, runs_of, service_of

_AT_ONCE_BYTES = 256 * 1024
"""Bytes that are read with the opening of the file: that costs less than going to a thread once more."""

_T = TypeVar("_T")


class FileResponse(Response):
    """Part of a file; `data` are its bytes if they were read already. Reading ends when the client has gone."""

    def __init__(self, opened: Opened, part: Part, downloads: Downloads, data: bytes | None = None) -> None:
        self._opened, self._part, self._downloads, self._data = opened, part, downloads, data
        self.status_code = part.status
        headers = {"Accept-Ranges": "bytes", "Cache-Control": "private, no-cache", **part.headers}
        if opened.etag is not None:
            headers["ETag"] = opened.etag
        if part.status in (200, 206):
            headers["Content-Type"] = opened.media_type
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, and close the file."""
        try:
            await self._answer(scope, receive, send)
        finally:
            self._opened.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if scope["method"] == "GET" and self._data is not None:
            await send({"type": "http.response.body", "body": self._data, "more_body": False})
            return
        if scope["method"] == "GET" and self._part.nbytes:
            gone = asyncio.create_task(disconnected(receive))
            try:
                await send_part(self._downloads, self._opened, self._part, scope, send, gone)
                if gone.done():
                    return
            finally:
                gone.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_part(
    downloads: Downloads, opened: Opened, part: Part, scope: Scope, send: Send, gone: asyncio.Task[None]
) -> None:
    """Send bytes of a file that belong to an answer that was begun, until the client has gone."""
    with downloads.read(opened, part, cached=ZERO_COPY in scope.get("extensions", {})) as blocks:
        async for block in blocks:
            if gone.done():
                return
            message: Message = {"type": "http.response.body", "body": block}
            if isinstance(block, range):
                message = {"type": ZERO_COPY, "file": opened.file, "offset": block.start, "count": len(block)}
            await send({**message, "more_body": True})


def routes() -> list[BaseRoute]:
    """Return the routes of files."""
    return [Route("/zarr/{run}", run_without_slash), Route("/zarr/{run}/{path:path}", answer_file)]


async def run_without_slash(request: Request) -> Response:
    """Point to the run's folder."""
    await run_in_threadpool(runs_of(request).split, request.path_params["run"])
    return with_slash(request)


async def answer_file(request: Request) -> Response:
    """Answer with a file as it is, or with the content of a folder."""
    service = service_of(request)
    parts = parts_of(request)
    if parts[-1] == "":
        recursive = request.query_params.get("recursive", "0") not in ("0", "false")
        listing = await run_in_threadpool(first, request, parts, lambda place: list_place(place, recursive=recursive))
        return _index(request, listing)
    try:
        if _is_near(service, parts):
            opened, part, data = _open(request, parts)
        else:
            opened, part, data = await run_in_threadpool(_open, request, parts)
    except IsFolderError:
        return with_slash(request)
    return FileResponse(opened, part, service.downloads, data)


def parts_of(request: Request) -> tuple[str, ...]:
    """Return the components of a path from the run's name on, as they are; the last is empty if it ends in `/`."""
    raw: bytes = request.scope["raw_path"]
    return tuple(raw.decode("ascii", "replace").split("/")[2:])


def _candidates(parts: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the meanings of a path; the first that exists counts. See [Note: names in paths]."""
    decoded = tuple(unquote(part) for part in parts)
    return list(dict.fromkeys([decoded, decoded[:1] + parts[1:], parts]))


def first(request: Request, parts: tuple[str, ...], use: Callable[[Place], _T]) -> _T:
    """Return the result of `use` for the place that `parts_of` names. Raises CheckpointNotFoundError if nothing is there."""
    service = service_of(request)
    run, tag = runs_of(request).split(unquote(parts[0]))
    missing: Exception | None = None
    for candidate in _candidates(parts[1:]):
        try:
            return use(service.checkpoints.place(run.folder, tag + candidate))
        except (FileNotFoundError, NotADirectoryError) as error:
            missing = missing or error
    raise CheckpointNotFoundError(f"the run {run.name!r} has no file {'/'.join(parts[1:])!r}") from missing


def open_place(service: Service, place: Place) -> Opened:
    """Return the file at a place. Raises FileNotFoundError or CheckpointNotFoundError, and IsFolderError for a folder."""
    if place.is_folder or (place.info is not None and not place.path):
        raise IsFolderError
    return open_local(place) if place.folder.is_local else service.remote_sizes.open(place)


def _is_near(service: Service, parts: tuple[str, ...]) -> bool:
    """Return whether a path is of a known checkpoint on a drive of this machine: to open a file there costs less than to have
    a thread do it."""
    run = (service.runs.fresh or {}).get(unquote(parts[0]))
    return run is not None and service.checkpoints.is_near(run.folder, unquote(parts[1]))


def _open(request: Request, parts: tuple[str, ...]) -> tuple[Opened, Part, bytes | None]:
    """Return the file that a request names, the part that it gets, and the bytes of that if they are few."""
    opened = first(request, parts, lambda place: open_place(service_of(request), place))
    part = choose(request.method, request.headers, opened.etag, opened.size)
    if opened.file is None or not 0 < part.nbytes <= _AT_ONCE_BYTES or request.method != "GET":
        return opened, part, None
    data = os.pread(opened.file.fileno(), part.nbytes, part.start)
    return opened, part, data if len(data) == part.nbytes else None


def _index(request: Request, listing: Listing) -> Response:
    headers = {"Cache-Control": "private, no-cache", "Vary": "Accept"}
    if "application/json" in request.headers.get("accept", ""):
        return Response(listing.as_json(), headers=headers, media_type="application/json")
    page = listing.as_html(request.scope["path"]).encode("utf-8", "replace")
    return Response(page, headers=headers, media_type="text/html")


def with_slash(request: Request) -> Response:
    """Point to the folder's URL, relative to that of the request."""
    raw: bytes = request.scope["raw_path"]
    return RedirectResponse(f"./{raw.rpartition(b'/')[2].decode('ascii', 'replace')}/")
