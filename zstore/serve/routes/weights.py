"""`/weights/<run>/<checkpoint>/...`: a model's safetensors files, made while they are downloaded, and their companions.

[Note: bytes that are made on the way]
Length, tag and every byte of a file follow from the record of the checkpoint and from the query of the URL, so ranges and
resumed downloads are of one and the same file. It is the one that `zstore consolidate` writes. A value that cannot be
read, fails its checksum or does not fit its type ends the connection before all bytes were sent: a client sees that the
download is incomplete, and never a wrong byte. `latest`, or a moving tag, may be another checkpoint at the next request: there
a range is given only with the tag of the file that the client has begun (`If-Range`), otherwise the whole file.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import BinaryIO, cast, get_args

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from ...checkpoint.catalog import TagInfo
from ...checkpoint.folder import Folder
from ...checkpoint.reader import CheckpointReader
from ...errors import CheckpointMismatchError, CheckpointNotFoundError, UsageError, ZstoreError
from ...format.arrays import SUFFIX
from ...sizes import parse_bytes
from ...weights.cast import Overflow
from ...weights.companions import companions, is_companion
from ...weights.from_checkpoint import DTYPES
from ...weights.layout import MAX_FILE_BYTES, FileLayout, index_document, index_file
from ...weights.parts import cut_blocks, read_block
from ..files.downloads import BusyError, Make
from ..files.opened import Opened
from ..files.ranges import Part, choose
from ..files.visible import Place
from ..models import WeightsFile, WeightsFolder
from ..replies import disconnected, problem, reply, status_of
from ..runs import Run
from ..service import Service, runs_of, service_of
from .files import FileResponse, open_place, send_part

_log = logging.getLogger(__name__)
_VERSION = 1
"""Raised when the same checkpoint would give other bytes."""
_DEFAULT_DTYPE = "fp16"
"""As `zstore consolidate` has it."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The options for weights in a URL's query."""

    dtype: str = _DEFAULT_DTYPE
    max_file_bytes: int = MAX_FILE_BYTES
    overflow: Overflow = "error"

    @classmethod
    def of(cls, request: Request) -> Wanted:
        """Return the options of a request. Raises UsageError for unknown ones."""
        query = dict(request.query_params)
        dtype = query.pop("dtype", _DEFAULT_DTYPE)
        overflow = query.pop("overflow", "error")
        size = query.pop("max_shard_size", str(MAX_FILE_BYTES))
        if query:
            raise UsageError(f"expected dtype, max_shard_size or overflow in the URL's query, got {min(query)!r}")
        if dtype not in DTYPES:
            raise UsageError(f"dtype={dtype}: expected one of {', '.join(DTYPES)}")
        if overflow not in get_args(Overflow):
            raise UsageError(f"overflow={overflow}: expected one of {', '.join(get_args(Overflow))}")
        try:
            return cls(dtype=dtype, max_file_bytes=parse_bytes(size), overflow=cast(Overflow, overflow))
        except ValueError as error:
            raise UsageError(f"max_shard_size: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _File:
    """A file that is made of a checkpoint."""

    name: str
    size: int
    etag: str
    data: bytes = b""
    """Its bytes, if they are few."""
    layout: FileLayout | None = None


def routes() -> list[BaseRoute]:
    """Return the routes of weights."""
    return [Route("/weights/{run}/{path:path}", _weights)]


async def _weights(request: Request) -> Response:
    wanted = Wanted.of(request)
    checkpoint, name = _split(request.path_params["path"])
    if not name:
        return reply(await run_in_threadpool(_folder, request, checkpoint, wanted))
    return await run_in_threadpool(_answer, request, checkpoint, name, wanted)


def _split(path: str) -> tuple[str, str]:
    """Return checkpoint and file of a path; no file if it is the checkpoint's own."""
    folder, _, name = path.rpartition("/")
    if name.endswith((SUFFIX, f"{SUFFIX}.index.json")) or is_companion(name):
        return folder, name
    return path.rstrip("/"), ""


@dataclass(frozen=True)
class _Source:
    """A checkpoint that weights are made of."""

    service: Service
    run: Run
    info: TagInfo
    reader: CheckpointReader

    @property
    def checkpoint(self) -> str:
        """Its path in the run's folder."""
        return self.info.folder.location.removeprefix(self.run.folder.location).strip("/")


def _find(request: Request, checkpoint: str) -> _Source:
    service = service_of(request)
    run, tag = runs_of(request).split(request.path_params["run"])
    info = service.checkpoints.find(run.folder, "/".join(tag + ((checkpoint,) if checkpoint else ())))
    return _Source(service, run, info, service.readers.open(info))


def _folder(request: Request, checkpoint: str, wanted: Wanted) -> WeightsFolder:
    source = _find(request, checkpoint)
    files = [WeightsFile(name=file.name, size=file.size, etag=file.etag) for file in _files(source, wanted)]
    info = source.info
    for name in _beside(info):
        with (
            contextlib.suppress(CheckpointNotFoundError),
            contextlib.closing(_companion(source, name)) as opened,
        ):
            files.append(WeightsFile(name=name, size=opened.size, etag=opened.etag))
    return WeightsFolder(
        run=source.run.name,
        checkpoint=source.checkpoint,
        id=info.record.id,
        tag=info.tag,
        step=info.record.step,
        dtype=wanted.dtype,
        overflow=wanted.overflow,
        files=files,
    )


def _answer(request: Request, checkpoint: str, name: str, wanted: Wanted) -> Response:
    """Return the answer to a request for a file. Raises CheckpointNotFoundError if there is none of that name,
    CheckpointMismatchError if the weights are known not to fit their type."""
    source = _find(request, checkpoint)
    headers = dict(request.headers)
    if checkpoint != source.checkpoint and not {"if-range", "if-match"} & headers.keys():
        headers.pop("range", None)
    files = {file.name: file for file in _files(source, wanted)}
    file = files.get(name)
    if file is None and SUFFIX in name:
        raise CheckpointNotFoundError(
            f"{source.info.location} gives no {name!r}; with this query it gives {_some(files)}"
        )
    if file is None:
        opened = _companion(source, name)
        return FileResponse(opened, choose(request.method, headers, opened.etag, opened.size), source.service.downloads)
    reason = source.service.layouts.refused(source.reader, wanted.dtype) if wanted.overflow == "error" else None
    if reason is not None:
        raise CheckpointMismatchError(reason)
    part = choose(request.method, headers, file.etag, file.size)
    own = {"ETag": file.etag, "Accept-Ranges": "bytes", "Cache-Control": "private, no-cache"}
    own |= part.headers
    if part.status in (412, 416):
        return Response(None, part.status, own)
    if request.method == "HEAD" or part.status == 304:
        return Response(None, part.status, own, _media_type(name))
    if file.layout is None:
        return Response(file.data[part.start : part.stop], part.status, own, _media_type(name))
    work = _Work(source, file.layout, file.etag, part, wanted)
    if (kept := source.service.castings.open(file.etag)) is None:
        return _WeightsResponse(work, own)
    return FileResponse(work.opened(kept), part, source.service.downloads)


def _some(names: Iterable[str]) -> str:
    some = list(names)
    return ", ".join(some[:3] if len(some) < 4 else [some[0], "...", *some[-2:]])


def _media_type(name: str) -> str:
    return "application/json" if name.endswith(".json") else "application/octet-stream"


def _files(source: _Source, wanted: Wanted) -> Iterator[_File]:
    """Yield the safetensors files, the index last if there are several."""
    layouts = source.service.layouts.files(source.reader, wanted.dtype, wanted.max_file_bytes)
    for layout in layouts:
        etag = _etag(source, wanted, layout.header)
        yield _File(name=layout.name, size=layout.file_bytes, etag=etag, layout=layout)
    if len(layouts) > 1:
        data = json.dumps(index_document(layouts), indent=2).encode()
        yield _File(name=index_file(layouts), size=len(data), etag=_etag(source, wanted, data), data=data)


def _etag(source: _Source, wanted: Wanted, data: bytes) -> str:
    text = f"{_VERSION} {source.reader.record.id} {wanted.dtype} {wanted.overflow} "
    return f'"{hashlib.sha256(text.encode() + data).hexdigest()[:32]}"'


def _beside(info: TagInfo) -> dict[str, Folder]:
    """Return config and tokenizer files by name, with the folder: in a checkpoint, or beside it."""
    return {name: folder for folder in (info.folder.parent, info.folder) for name in companions(folder)}


def _companion(source: _Source, name: str) -> Opened:
    """Return a config or tokenizer file, which the caller closes; raises CheckpointNotFoundError if there is none."""
    folder = _beside(source.info).get(name)
    if folder is None:
        raise CheckpointNotFoundError(
            f"{source.info.location} has no weights or files beside them that are called {name!r}"
        )
    return open_place(source.service, Place(folder=folder, path=name, info=None, is_folder=False))


@dataclass(frozen=True)
class _Work:
    """The part of a file that is to be made."""

    source: _Source
    layout: FileLayout
    etag: str
    part: Part
    wanted: Wanted

    def cut(self, block_bytes: int) -> Iterator[Make]:
        """Yield functions that make the blocks, in order."""
        reader, overflow = self.source.reader, self.wanted.overflow
        for block in cut_blocks(reader, self.layout, self.part.start, self.part.stop, block_bytes):
            yield partial(read_block, reader, block, overflow)

    def opened(self, file: BinaryIO) -> Opened:
        """Return the kept file, or one that is being made, for reading."""
        size = self.layout.file_bytes
        return Opened(folder=self.source.info.folder, path=self.layout.name, size=size, etag=self.etag, file=file)

    def failed(self, error: Exception) -> None:
        """Remember that the weights do not fit; say in the log why a download ends."""
        if isinstance(error, CheckpointMismatchError):
            self.source.service.layouts.refuse(self.source.reader, self.wanted.dtype, str(error))
        _log.warning("a download of %s from %s ended: %s", self.layout.name, self.source.reader.location, error)


class _WeightsResponse(Response):
    """Part of a file that is made on the way. See [Note: bytes that are made on the way]."""

    def __init__(self, work: _Work, headers: dict[str, str]) -> None:
        self._work = work
        self._begun = False
        """Whether the status was sent: errors up to here can be told."""
        self.status_code = work.part.status
        self.init_headers({"Content-Type": _media_type(work.layout.name), **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        work, gone = self._work, asyncio.create_task(disconnected(receive))
        try:
            at = await self._send_cast(scope, send, gone)
            if at < work.part.stop and not gone.done():
                rest = replace(work, part=replace(work.part, start=at))
                async with work.source.service.downloads.cast(rest.cut) as blocks:
                    async for block in blocks:
                        await self._begin(send)
                        if gone.done():
                            return
                        await send({"type": "http.response.body", "body": block, "more_body": True})
            if not gone.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except BusyError as error:
            if self._begun:
                work.failed(error)
            else:
                await problem(503, f"{error}: try again", {"Retry-After": "10"})(scope, receive, send)
        except (ZstoreError, OSError) as error:
            work.failed(error)
            if not self._begun:
                await problem(status_of(error), str(error))(scope, receive, send)
        finally:
            gone.cancel()

    async def _begin(self, send: Send) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _send_cast(self, scope: Scope, send: Send, gone: asyncio.Task[None]) -> int:
        """Send the bytes that are made for all who want them, if they are; return where that ended."""
        work, part, service = self._work, self._work.part, self._work.source.service
        at, size = part.start, work.layout.file_bytes
        whole = replace(work, part=replace(part, start=0, stop=size))
        if (casting := service.castings.join(work.etag, size, at, whole.cut)) is None:
            return at
        with casting.reading():
            opened = work.opened(casting.file)
            while at < part.stop and not gone.done() and (there := await casting.more(at)) > at:
                await self._begin(send)
                some = replace(part, start=at, stop=min(there, part.stop))
                await send_part(service.downloads, opened, some, scope, send, gone)
                at = some.stop
        return at
