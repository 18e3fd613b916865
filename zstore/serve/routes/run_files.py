"""Files of a run besides its checkpoints that a client uploads: its journal, and its model's config and tokenizer.

[Note: journals that are sent]
A client sends the lines of its journal as it writes them, each time with the place in the file that they begin at. Text that is
there already is compared and not written again, so that a request whose answer was lost may be repeated. A line that the end of
the service cut off is removed before the next ones come. A request to the run (see [Note: requests] in
`zstore.journal`) is in the answers, until the client says `taken=ID`: then it has the request on its own machine. One that
waits when a process begins was meant for a process that is gone, and is removed. Under `/api/uploads`, since bodies may be
larger there than JSON elsewhere.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from pathlib import Path

from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ...checkpoint.catalog import scan
from ...errors import CheckpointExistsError, UsageError
from ...journal.lines import decode
from ...journal.names import journal_file, request_file
from ...journal.requests import read_request
from ...journal.writer import FileSink
from ...weights.companions import is_companion
from ..replies import ConflictError, reply
from ..runs import Runs
from ..service import runs_of, service_of
from .operations import Exchange, Operation, Parameter

MOST_LINES_BYTES = 1024 * 1024
"""Of a request's lines."""
MOST_COMPANION_BYTES = 64 * 1024 * 1024
_LOCK = threading.Lock()
"""Journals grow by a few lines at a time."""


class RunRequest(BaseModel, extra="forbid", frozen=True):
    """A request to a run that trains on another machine."""

    id: str
    action: str


class JournalSize(BaseModel, extra="forbid", frozen=True):
    """Answer to `GET` and `POST /api/uploads/journals/{run}/{run_id}`."""

    bytes: int
    """Of the whole lines that are there."""
    request: RunRequest | None = None
    """The request to the run."""


async def _size(request: Request) -> Response:
    run, run_id = request.path_params["run"], request.path_params["run_id"]
    return reply(await run_in_threadpool(append_lines, runs_of(request), run, run_id, 0, b""))


async def _append(request: Request) -> Response:
    run, run_id = request.path_params["run"], request.path_params["run_id"]
    offset = request.query_params.get("offset", "")
    if not offset.isascii() or not offset.isdigit() or len(offset) > 18:
        raise UsageError(f"offset is {offset!r:.50}: expected the place in the journal that the lines begin at")
    lines = await _small_body(request, MOST_LINES_BYTES)
    *whole, rest = lines.split(b"\n")
    if rest or not whole or not all(line.startswith(b"{") and line.endswith(b"}") for line in whole):
        raise UsageError("expected lines of a journal, a JSON object each, with a newline behind every one")
    taken = request.query_params.get("taken")

    def append() -> JournalSize:
        runs = runs_of(request)
        size = append_lines(runs, run, run_id, int(offset), lines)
        path = runs.folder_for_uploads(run) / request_file(run_id)
        return size.model_copy(update={"request": _pending(path, taken)})

    return reply(await run_in_threadpool(append))


async def _put(request: Request) -> Response:
    run, name = request.path_params["run"], request.path_params["name"]
    if not is_companion(name) or name.startswith(".") or "/" in name or "\\" in name:
        raise UsageError(f"{name!r:.100}: expected a model's config or tokenizer, as config.json")
    data = await _small_body(request, MOST_COMPANION_BYTES)
    await run_in_threadpool(_keep, request, run, name, data)
    return Response(status_code=204)


async def _small_body(request: Request, most_bytes: int) -> bytes:
    data = bytearray()
    async with service_of(request).large_bodies:
        async for piece in request.stream():
            data += piece
            if len(data) > most_bytes:
                raise HTTPException(413, f"the body of this request may have {most_bytes} bytes")
    return bytes(data)


def append_lines(runs: Runs, run: str, run_id: str, offset: int, lines: bytes) -> JournalSize:
    """Let the journal of training run `run_id` have `lines` from byte `offset` on; return its size.

    Raises CheckpointExistsError for a name with the checkpoints of another training run, ConflictError if the journal has
    other lines there, or ends before.
    """
    path = runs.folder_for_uploads(run) / journal_file(run_id)
    with _LOCK:
        if not path.exists():
            _require_own(path.parent, run, run_id)
            if not lines:
                return JournalSize(bytes=0)
        with contextlib.closing(FileSink(path)) as sink:
            size = sink.begin_bytes
            with path.open("rb") as file:
                file.seek(offset)
                there = file.read(min(len(lines), max(0, size - offset)))
            if offset > size or not lines.startswith(there):
                raise ConflictError(
                    f"the journal has {size} bytes, and other lines from byte {offset} on than were sent"
                )
            new = lines[len(there) :]
            if _begins(new):
                path.with_name(request_file(run_id)).unlink(missing_ok=True)
            sink.append(new)
            size += len(new)
    return JournalSize(bytes=size)


def _begins(lines: bytes) -> bool:
    """Return whether lines of a journal say that a process began."""
    likely = (text for text in lines.splitlines() if b'"start"' in text)
    return any((line := decode(text)) is not None and line["kind"] == "start" for text in likely)


def _pending(path: Path, taken: str | None) -> RunRequest | None:
    """Return the request to the run; one that it has taken is removed."""
    try:
        found = read_request(path)
    except FileNotFoundError:
        return None
    if found is None or found.id == taken:
        path.unlink(missing_ok=True)
        return None
    return RunRequest(id=found.id, action=found.action)


def _require_own(folder: Path, run: str, run_id: str) -> None:
    if folder.is_dir() and (runs := {info.record.run for info in scan(folder).tags}) and run_id not in runs:
        raise CheckpointExistsError(f"{run!r} has the checkpoints of another training run: save under another name")


def _keep(request: Request, run: str, name: str, data: bytes) -> None:
    """Write a file beside the checkpoints. If there are some, it may be made, but not replaced."""
    folder = runs_of(request).folder_for_uploads(run)
    path, files = folder / name, service_of(request).settings.files
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ConflictError(f"{name} is no file in the folder of {run!r}")
    if path.is_file():
        if path.read_bytes() == data:
            return
        if scan(folder).tags:
            raise ConflictError(
                f"{run!r} has another {name} beside its checkpoints: expected a run of the same model; save under another name"
            )
    files.make_folder(folder)
    part = folder / f".{name}.{uuid.uuid4().hex}.part"  # two clients may send one name at the same time
    try:
        files.write_small(part, data)
        files.rename(part, path)
    except BaseException:
        files.unlink(part)
        raise


_JOURNAL = "/api/uploads/journals/{run}/{run_id}"
OPERATIONS: tuple[Operation | Exchange, ...] = (
    Exchange(
        path=_JOURNAL,
        summary="How much of a journal is there",
        answer=JournalSize,
        handle=_size,
    ),
    Exchange(
        path=_JOURNAL,
        method="POST",
        summary="Append lines to a journal",
        answer=JournalSize,
        handle=_append,
        parameters=(
            Parameter(
                name="offset", help="Byte of the journal that the lines begin at.", kind="integer", required=True
            ),
            Parameter(name="taken", help="Id of a request that the run has taken."),
        ),
        body_media="application/x-ndjson",
        problems=(413, 507),
    ),
    Exchange(
        path="/api/uploads/companions/{run}/{name}",
        method="PUT",
        summary="Put a config or tokenizer file beside the checkpoints",
        answer=None,
        handle=_put,
        body_media="application/octet-stream",
        status=204,
        problems=(413, 507),
    ),
)
