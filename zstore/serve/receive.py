"""Taking in checkpoints and a run's journal.

[Note: the protocol of an upload]
    POST   /api/uploads                   the record, and which files there are; refused here if it may not be
    PUT    /api/uploads/ID/files/PATH     the root's zarr.json and the manifests, each checked against the record
    POST   /api/uploads/ID/plan           which files are needed; refused here if the drive has no room
    POST   /api/uploads/ID/claims         (each rank) the SHA-256 of files that a committed checkpoint seems to have
    PUT    /api/uploads/ID/files/PATH     (each rank) the others; `Content-Range` gives the first byte
    POST   /api/uploads/ID/commit         the checkpoint is visible from now on, whole
    GET    /api/uploads?run=RUN           which are running; refused if the run takes none
    GET    /api/uploads/ID?rank=R         the missing files, of all ranks or one
    GET    /api/uploads/ID/files/PATH     how much of a file arrived; a client that lost its connection resumes there
    DELETE /api/uploads/ID                abandons it
All except the claims may be repeated. An offer of the same save finds the files that have arrived, even after a restart.

[Note: journals that are sent]
A client sends the lines of its journal as it writes them, with their offset in the file. Existing text is compared and not
written again, so a request whose answer was lost may be repeated. A line that the end of the service cut off is removed first.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import aiofiles
from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..errors import CheckpointError, UsageError, storage_error
from ..journal import JournalFile, journal_file
from .api import Library, Shared, library_of
from .uploads.inbox import require_own
from .uploads.offer import Claims, Committed, JournalSize, Linked, UploadFile, UploadList, UploadOffer, UploadState
from .uploads.upload import Upload

MAX_LINES_BYTES = 1024 * 1024
"""Of a request's lines of a journal."""
_WRITE_BYTES = 1024 * 1024
"""Bytes written at once."""
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_JOURNALS = threading.Lock()
"""Journals grow by a few lines at once."""
M = TypeVar("M", bound=BaseModel)
router = APIRouter(prefix="/api", tags=["uploads"])


def _upload_of(upload: str, request: Request) -> Upload:
    return library_of(request).inbox.get(upload)


NamedUpload = Annotated[Upload, Depends(_upload_of)]


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"content": content, "required": True}}


def _body(model: type[M], max_bytes: int) -> Callable[[Request], Awaitable[M]]:
    """Return a dependency that parses a body once the token was checked: FastAPI itself reads the body first."""

    async def parse(request: Request) -> M:
        try:
            return model.model_validate_json(await _small_body(request, max_bytes))
        except ValidationError as error:
            raise RequestValidationError(error.errors(include_input=False)) from error

    return parse


_Offer = Annotated[UploadOffer, Depends(_body(UploadOffer, 160 * 1024 * 1024))]
"""Its JSON has the record as text, with its quotes escaped."""
_Claims = Annotated[Claims, Depends(_body(Claims, 4 * 1024 * 1024))]


@router.post("/uploads", openapi_extra=_schema(UploadOffer))
def _begin(offer: _Offer, library: Shared) -> UploadState:
    """Offer a checkpoint: the upload begins, or resumes."""
    return library.inbox.begin(offer)


@router.get("/uploads")
def _list(library: Shared, run: str | None = None) -> UploadList:
    """Uploads that are not committed, of one run or of all; refused for a run that takes none."""
    if run is not None:
        library.runs.folder_for_uploads(run)
    states = (upload.state(files=False) for upload in library.inbox.all())
    return UploadList(uploads=[state for state in states if run in (None, state.run)])


@router.get("/uploads/{upload}")
def _state(upload: NamedUpload, rank: Annotated[int | None, Query(ge=0, lt=10**7)] = None) -> UploadState:
    """What is missing of an upload."""
    return upload.state(rank=rank)


@router.delete("/uploads/{upload}", status_code=204)
def _remove(upload: NamedUpload, library: Shared) -> None:
    """Give an upload up."""
    library.inbox.remove(upload)


@router.post("/uploads/{upload}/plan")
def _plan(upload: NamedUpload) -> UploadState:
    """Return which files are needed, once metadata and manifests exist; refused if they do not fit on the drive."""
    upload.plan()
    upload.require_room()
    upload.touch()
    return upload.state()


@router.post("/uploads/{upload}/claims", openapi_extra=_schema(Claims))
def _claim(upload: NamedUpload, claims: _Claims) -> Linked:
    """Show the SHA-256 of files that the service seems to have."""
    upload.touch()
    return Linked(linked=[file for file, sha256 in claims.files.items() if upload.link(file, sha256)])


@router.post("/uploads/{upload}/commit")
def _commit(upload: NamedUpload, library: Shared) -> Committed:
    """Make the checkpoint visible, whole."""
    return library.inbox.commit(upload)


@router.get("/uploads/{upload}/files/{path:path}")
def _file(upload: NamedUpload, path: str) -> UploadFile:
    """How much of a file arrived."""
    return upload.file_state(path)


@router.put("/uploads/{upload}/files/{path:path}", response_model=UploadFile, responses={201: {}, 202: {}})
async def _put(
    upload: NamedUpload, path: str, request: Request, content_range: Annotated[str | None, Header()] = None
) -> JSONResponse:
    """Receive a file, or its remaining bytes: 201 if it is now complete and checked, 202 if more bytes are missing. Bytes
    from a connection that breaks are kept."""
    content = await run_in_threadpool(upload.content_of, path)
    offset, length = _place_of(content_range, path, content.num_bytes)
    await run_in_threadpool(upload.touch)
    if await run_in_threadpool(upload.is_whole, path):
        return JSONResponse((await run_in_threadpool(upload.file_state, path)).model_dump())
    received = await run_in_threadpool(upload.received, path)
    if offset not in (0, received):
        raise CheckpointError(f"{path} has {received} bytes, not {offset}: continue at byte {received}")
    upload.senders[path] = sender = object()
    try:
        await _receive(upload, path, request, offset, length)
        whole = offset + length == content.num_bytes
        if whole:
            await run_in_threadpool(upload.accept, path)
    finally:
        if upload.senders.get(path) is sender:
            del upload.senders[path]
    return JSONResponse((await run_in_threadpool(upload.file_state, path)).model_dump(), 201 if whole else 202)


async def _receive(upload: Upload, path: str, request: Request, offset: int, length: int) -> None:
    """Write the body of a request into a file from byte `offset` on, as it arrives.

    Raises CheckpointError if another connection now sends it, UsageError unless `length` bytes arrive, DiskFullError if
    there is no room; what arrived until then is in the file.
    """
    sender, part = upload.senders[path], upload.part(path)
    arrived, waiting = 0, bytearray()
    try:
        async with aiofiles.open(part, "r+b" if offset else "wb") as file:
            await file.seek(offset)

            async def write() -> None:
                if upload.senders.get(path) is not sender:
                    raise CheckpointError(f"another connection sends {path}, or the upload was abandoned")
                await file.write(bytes(waiting))
                waiting.clear()

            try:
                async for piece in request.stream():
                    waiting += piece
                    arrived += len(piece)
                    if arrived > length:
                        raise UsageError(f"{path}: more than the {length} bytes that Content-Range names were sent")
                    if len(waiting) >= _WRITE_BYTES:
                        await write()
                await write()
            except ClientDisconnect as error:
                await write()
                raise UsageError("the connection ended early") from error
    except OSError as error:
        raise storage_error(error, "the file cannot be written", path=str(part)) from error
    if arrived < length:
        raise UsageError(f"{path}: got {arrived} bytes, expected {length}")


def _place_of(content_range: str | None, file: str, num_bytes: int) -> tuple[int, int]:
    """Return the offset of the body, and its length."""
    if content_range is None:
        return 0, num_bytes
    found = _RANGE.fullmatch(content_range)
    if found is None or int(found[3]) != num_bytes or not int(found[1]) <= int(found[2]) < num_bytes:
        raise UsageError(
            f"Content-Range is {content_range!r:.100}: expected `bytes FIRST-LAST/{num_bytes}`, for {file!r:.200} has "
            f"{num_bytes} bytes"
        )
    return int(found[1]), int(found[2]) - int(found[1]) + 1


@router.get("/runs/{run}/journals/{run_id}")
def _journal(run: str, run_id: str, library: Shared) -> JournalSize:
    """How much of a journal arrived."""
    return JournalSize(bytes=_appended(library, run, run_id, 0, b""))


@router.post("/runs/{run}/journals/{run_id}")
async def _append(
    run: str, run_id: str, request: Request, library: Shared, offset: Annotated[int, Query(ge=0, lt=10**18)]
) -> JournalSize:
    """Append lines to a journal. See [Note: journals that are sent]."""
    lines = await _small_body(request, MAX_LINES_BYTES)
    *whole, rest = lines.split(b"\n")
    if rest or not whole or not all(line.startswith(b"{") and line.endswith(b"}") for line in whole):
        raise UsageError("expected lines of a journal, a JSON object each, and a newline after every one")
    return JournalSize(bytes=await run_in_threadpool(_appended, library, run, run_id, offset, lines))


def _appended(library: Library, run: str, run_id: str, offset: int, lines: bytes) -> int:
    """Write `lines` into a journal from byte `offset` on; return its size.

    Raises CheckpointError if the journal has other lines there, or ends before, CheckpointExistsError for a name with the
    checkpoints of another training run.
    """
    path = library.runs.folder_for_uploads(run) / journal_file(run_id)
    with _JOURNALS:
        if not path.exists():
            require_own(path.parent, run, run_id)
            if not lines:
                return 0
        with JournalFile(path) as journal:
            size = journal.begin_bytes
            with path.open("rb") as file:
                file.seek(offset)
                known = file.read(min(len(lines), max(0, size - offset)))
            if offset > size or not lines.startswith(known):
                raise CheckpointError(
                    f"the journal has {size} bytes, and other lines from byte {offset} on than were sent"
                )
            journal.append(lines[len(known) :])
            if not size:
                library.runs.invalidate()  # a run may have started
            return size + len(lines) - len(known)


async def _small_body(request: Request, most_bytes: int) -> bytes:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > most_bytes:
            raise HTTPException(413, f"the body of this request may have {most_bytes} bytes")
    return bytes(data)
