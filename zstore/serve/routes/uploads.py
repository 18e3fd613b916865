"""Taking checkpoints in: `/api/uploads`. See [Note: an upload] in `upload` for the places of files.

[Note: the protocol of an upload]
    POST   /api/uploads                   the record, and which files there are; refused here if it may not be
    PUT    /api/uploads/ID/files/PATH     the root's zarr.json and the manifests, each checked against the record
    POST   /api/uploads/ID/plan           which files are wanted; refused here if the drive has no room
    POST   /api/uploads/ID/claims         (each rank) the SHA-256 of files that a committed checkpoint seems to have
    PUT    /api/uploads/ID/files/PATH     (each rank) the others; `Content-Range` says from which byte on
    POST   /api/uploads/ID/commit         the checkpoint is visible from here on, whole
    GET    /api/uploads?run=RUN           which are under way; refused if the run takes none
    GET    /api/uploads/ID?rank=R         the missing files, of all ranks or one
    GET    /api/uploads/ID/files/PATH     how much of a file is there; a client that lost its connection resumes there
    DELETE /api/uploads/ID                gives it up
All but the claims may be repeated. An offer of the same save finds the files that came before, even if the service restarted.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ...errors import CheckpointError, CheckpointNotFoundError, UsageError
from ..auth import require_token
from ..inbox.models import Claims, Committed, Linked, UploadFile, UploadList, UploadOffer, UploadState
from ..inbox.upload import Arrival, Upload
from ..replies import problem, reply
from ..service import runs_of, service_of
from .operations import Exchange, Parameter, receive

_OFFER_BYTES = 160 * 1024 * 1024
"""An offer's JSON has the record as text, with its quotes escaped."""
_CLAIMS_BYTES = 4 * 1024 * 1024
_LARGE_BYTES = 1024 * 1024
"""Of larger JSON one is read at a time."""
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
M = TypeVar("M", bound=BaseModel)


async def _begin(request: Request) -> Response:
    async with _body(request, UploadOffer, _OFFER_BYTES) as offer:
        runs = runs_of(request)
        await run_in_threadpool(runs.folder_for_uploads, offer.run)
        return reply(await run_in_threadpool(service_of(request).inbox.begin, offer, runs))


async def _list(request: Request) -> Response:
    name = request.query_params.get("run")
    return reply(await run_in_threadpool(_listed, request, name))


def _listed(request: Request, name: str | None) -> UploadList:
    if name is not None:
        runs_of(request).folder_for_uploads(name)
    token, inbox = require_token(request), service_of(request).inbox
    states = [upload.state(files=False) for upload in inbox.all() if token.sees(upload.offer.run)]
    return UploadList(
        uploads=[state for state in states if name in (None, state.run)],
        held_bytes=None if token.quota is None else inbox.held(token),
        quota_bytes=token.quota,
        run_quota_bytes=inbox.run_quota,
    )


def _of_upload(work: Callable[[Request, Upload], BaseModel | None]) -> Callable[[Request], Awaitable[Response]]:
    """Return the function that answers with the result of `work` on the upload of a request, in a thread."""

    async def handle(request: Request) -> Response:
        upload = await _upload_of(request)
        found = await run_in_threadpool(work, request, upload)
        return Response(status_code=204) if found is None else reply(found)

    return handle


def _state(request: Request, upload: Upload) -> UploadState:
    text = request.query_params.get("rank")
    if text is not None and not re.fullmatch(r"\d{1,7}", text):
        raise UsageError(f"rank is {text!r:.50}, expected a number")
    return upload.state(rank=None if text is None else int(text))


async def _plan(request: Request) -> Response:
    upload = await _upload_of(request)
    async with service_of(request).large_bodies:
        return reply(await run_in_threadpool(service_of(request).inbox.plan, upload, require_token(request)))


async def _claim(request: Request) -> Response:
    upload = await _upload_of(request)
    async with _body(request, Claims, _CLAIMS_BYTES) as claims:

        def link() -> Linked:
            upload.touch()
            return Linked(linked=[file for file, sha256 in claims.files.items() if upload.link(file, sha256)])

        return reply(await run_in_threadpool(link))


async def _put(request: Request) -> Response:
    """Take a file, or its remaining bytes. Bytes from a connection that breaks stay."""
    service = service_of(request)
    async with service.upload_files:
        upload = await _upload_of(request)
        file = request.path_params["path"]
        content = await run_in_threadpool(upload.content_of, file)
        offset, length = _place_of(request, file, content.num_bytes)
        await run_in_threadpool(upload.touch)
        if await run_in_threadpool(upload.is_whole, file):
            return reply(await run_in_threadpool(lambda: upload.state(files=False)))
        try:
            async with _opened(upload, file, offset) as arrival:
                try:
                    await receive(request, arrival.write, length, "Content-Range")
                except ClientDisconnect as error:
                    upload.holds_room = False
                    raise UsageError("the connection ended early") from error
                whole = await run_in_threadpool(arrival.finish)
        except CheckpointError as error:
            if isinstance(error, CheckpointNotFoundError):
                raise
            return problem(409, str(error))
    return reply(await run_in_threadpool(lambda: upload.state(files=False)), 201 if whole else 202)


@contextlib.asynccontextmanager
async def _opened(upload: Upload, file: str, offset: int) -> AsyncIterator[Arrival]:
    opened = upload.writing(file, offset)
    arrival = await run_in_threadpool(opened.__enter__)
    try:
        yield arrival
    finally:
        # The block's error is its own: the file is closed in any case.
        await run_in_threadpool(opened.__exit__, None, None, None)


def _place_of(request: Request, file: str, num_bytes: int) -> tuple[int, int]:
    """Return from which byte on the body goes, and how many it has."""
    text = request.headers.get("content-range")
    if text is None:
        return 0, num_bytes
    found = _RANGE.fullmatch(text)
    if found is None or int(found[3]) != num_bytes or not int(found[1]) <= int(found[2]) < num_bytes:
        raise UsageError(
            f"Content-Range is {text!r:.100}: expected `bytes FIRST-LAST/{num_bytes}`, for {file!r:.200} has {num_bytes} bytes"
        )
    return int(found[1]), int(found[2]) - int(found[1]) + 1


async def _upload_of(request: Request) -> Upload:
    inbox, sees = service_of(request).inbox, require_token(request).sees
    upload = await run_in_threadpool(inbox.get, request.path_params["upload"], sees)
    request.scope["state"]["run"] = upload.offer.run
    return upload


@contextlib.asynccontextmanager
async def _body(request: Request, kind: type[M], most_bytes: int) -> AsyncIterator[M]:
    """Yield the model in the body of a request. Raises UsageError for anything else."""
    length = request.headers.get("content-length", "")
    if not re.fullmatch(r"\d{1,12}", length) or int(length) > most_bytes:
        raise UsageError(f"expected JSON of up to {most_bytes} bytes with its Content-Length, got {length[:20]!r}")
    large = service_of(request).large_bodies if int(length) > _LARGE_BYTES else contextlib.nullcontext()
    async with large:
        data = bytearray()
        async for piece in request.stream():
            data += piece
        try:
            model = await run_in_threadpool(kind.model_validate_json, bytes(data))
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in found["loc"])
            raise UsageError(f"{place[:200] or 'the body'}: {found['msg'][:200]}") from error
        data.clear()
        yield model


_ONE = "/api/uploads/{upload}"
_FILE = f"{_ONE}/files/{{path:path}}"
OPERATIONS = (
    Exchange(
        path="/api/uploads",
        method="POST",
        summary="Offer a checkpoint: the upload begins, or goes on where it was",
        answer=UploadState,
        handle=_begin,
        body=UploadOffer,
        problems=(422, 507),
    ),
    Exchange(
        path="/api/uploads",
        summary="Uploads that are not committed",
        answer=UploadList,
        handle=_list,
        parameters=(Parameter(name="run", help="Those of this run; refused where it takes none."),),
    ),
    Exchange(
        path=_ONE,
        summary="What is missing of an upload",
        answer=UploadState,
        handle=_of_upload(_state),
        parameters=(Parameter(name="rank", help="Files of this rank alone.", kind="integer", most=10**7 - 1),),
    ),
    Exchange(
        path=_ONE,
        method="DELETE",
        summary="Give an upload up",
        answer=None,
        handle=_of_upload(lambda request, upload: service_of(request).inbox.remove(upload)),
        status=204,
    ),
    Exchange(
        path=f"{_ONE}/plan",
        method="POST",
        summary="Find out which files are wanted, once metadata and manifests are there",
        answer=UploadState,
        handle=_plan,
        problems=(422, 507),
    ),
    Exchange(
        path=f"{_ONE}/claims",
        method="POST",
        summary="Show the SHA-256 of files that the service seems to have",
        answer=Linked,
        handle=_claim,
        body=Claims,
        problems=(507,),
    ),
    Exchange(
        path=f"{_ONE}/commit",
        method="POST",
        summary="Make the checkpoint visible, whole",
        answer=Committed,
        handle=_of_upload(lambda request, upload: service_of(request).inbox.commit(upload, require_token(request))),
        audit="upload",
        problems=(422, 507),
    ),
    Exchange(
        path=_FILE,
        summary="How much of a file is there",
        answer=UploadFile,
        handle=_of_upload(lambda request, upload: upload.file_state(request.path_params["path"])),
    ),
    Exchange(
        path=_FILE,
        method="PUT",
        summary="The file was whole before",
        answer=UploadState,
        handle=_put,
        headers=(Parameter(name="Content-Range", help="Which bytes the body is, as `bytes 0-9/10`; without it, all."),),
        body_media="application/octet-stream",
        other={201: "The file is whole, and was checked.", 202: "The file goes on behind these bytes."},
        problems=(507,),
    ),
)
