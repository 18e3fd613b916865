"""Files of a run besides its checkpoints that a client uploads: its journal, its model's config and tokenizer, and versions of
its weights.

[Note: journals that are sent]
A client sends the lines of its journal as it writes them, each time with the place in the file that they begin at. Text that is
there already is compared and not written again, so that a request whose answer was lost may be repeated. A line that the end of
the service cut off is removed before the next ones come. A request to the run (see [Note: requests] in
`zstore.journal`) is in the answers, until the client says `taken=ID`: then it has the request on its own machine. One that
waits when a process begins was meant for a process that is gone, and is removed. Under `/api/uploads`, since bodies may be
larger there than JSON elsewhere.

[Note: versions that are sent]
    POST  /api/uploads/weights/RUN               (rank 0) the run has this place until it ends the answer, or is killed
    PUT   /api/uploads/weights/RUN/NUMBER/FILE   (each rank) its file of changes, and rank 0 all weights of a full version
    POST  /api/uploads/weights/RUN/NUMBER        (rank 0) the version's index: it is there from here on, whole
The last two may be repeated until then. Readers take files from `/zarr/RUN/weights/`, like any others, after
    GET   /api/runs/RUN/weights?since=ID         which versions lead from the one of that id to the newest
With `held=1` that answer does not end before the reader ends it, and its versions are not removed before.
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
from ...checkpoint.folder import plain_sizes
from ...checkpoint.names import RECORD_FILE
from ...errors import CheckpointExistsError, CheckpointNotFoundError, UsageError
from ...io.files import Files, NewFile
from ...journal.lines import decode
from ...journal.names import journal_file, request_file
from ...journal.requests import read_request
from ...journal.writer import FileSink
from ...open.weights_target import commit_in
from ...weights.companions import is_companion
from ...weights.layout import SUFFIX
from ...weights.versions import INDEX_FILE, WEIGHTS_FOLDER, folder_name, follow, parse_index
from ..files.visible import is_plain, is_real_folder
from ..models import json_of
from ..replies import ConflictError, reply
from ..runs import Runs
from ..service import run_of, runs_of, service_of
from .operations import Exchange, HeldAnswer, Operation, Parameter, Values, receive

MOST_LINES_BYTES = 1024 * 1024
"""Of a request's lines."""
MOST_COMPANION_BYTES = 64 * 1024 * 1024
_MOST_DIGITS = 12
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


class WeightsChain(BaseModel, extra="forbid", frozen=True):
    """Answer to `GET /api/runs/{run}/weights`: indexes of versions, as their `model.safetensors.index.json` has them."""

    full: str | None = None
    """The full version to begin with; null: begin with the weights that are there."""
    deltas: list[str] = []
    """Those whose changes follow, the oldest first; none and no full one: the newest version is there."""


async def _since(request: Request, values: Values) -> Response:
    with contextlib.ExitStack() as opened:

        def find() -> WeightsChain:
            run = run_of(request).folder
            if not is_real_folder(run, WEIGHTS_FOLDER):
                raise CheckpointNotFoundError(f"{run} has no version of weights: none was published there")
            chain = follow(run.child(WEIGHTS_FOLDER), values["since"] or None, opened)
            if chain is None:
                return WeightsChain()
            full = None if chain.full is None else chain.full.index().decode()
            return WeightsChain(full=full, deltas=[version.index().decode() for version in chain.deltas])

        found = await run_in_threadpool(find)
        return HeldAnswer(json_of(found), opened.pop_all()) if values["held"] else reply(found)


async def _have(request: Request) -> Response:
    with contextlib.ExitStack() as opened:
        publisher = request.query_params.get("publisher", "")

        def begin() -> None:
            folder, files = _folder_of(request), service_of(request).settings.files
            if not 0 < len(publisher) <= 1000:
                raise UsageError(f"publisher: expected a name of up to 1000 characters, got {len(publisher)}")
            _require_free(folder)
            files.make_folder(folder)
            opened.enter_context(service_of(request).publishers.holding(folder, publisher))

        await run_in_threadpool(begin)
        return HeldAnswer("{}", opened.pop_all())


class VersionIndex(BaseModel, extra="forbid", frozen=True):
    """Body of `POST /api/uploads/weights/{run}/{number}`."""

    index: str
    """The text of the version's `model.safetensors.index.json`."""
    oldest: int = 0
    """Versions before this one are removed."""


async def _put_weights(request: Request) -> Response:
    folder, number = await run_in_threadpool(_version_of, request)
    name, length = request.path_params["name"], request.headers.get("content-length", "")
    if not name.startswith("delta-") and not name.endswith(SUFFIX) and not is_companion(name):
        raise UsageError(f"{name!r:.100}: expected a file of changes, of weights, or a model's config or tokenizer")
    if not is_plain(name) or name.startswith(".") or not length.isdecimal():
        raise UsageError(f"expected a plain name and a Content-Length, got {name!r:.100} and {length[:20]!r}")
    service = service_of(request)
    files = service.settings.files
    async with service.upload_files:
        place = await run_in_threadpool(_place_of, folder, number, files)
        part = place / f".{name}.{uuid.uuid4().hex}.part"
        with contextlib.ExitStack() as opened:
            await run_in_threadpool(files.require_room, place, int(length), f"{name} needs {length} bytes")
            opened.callback(files.unlink, part)
            await receive(request, NewFile(files, part, opened).write, int(length), "Content-Length")
            await run_in_threadpool(files.rename, part, place / name)
    return Response(status_code=204)


async def _commit_weights(request: Request) -> Response:
    folder, number = await run_in_threadpool(_version_of, request)
    data = await _small_body(request, MOST_COMPANION_BYTES)

    def commit() -> None:
        try:
            sent = VersionIndex.model_validate_json(data)
            index = sent.index.encode()
            version = parse_index(index, f"the index of version {number}")
        except ValueError as error:
            raise UsageError(f"expected the index of a version: {error!s:.300}") from error
        there = folder / folder_name(number) / INDEX_FILE
        if there.exists() and there.read_bytes() == index:  # sent again, since no answer came
            return
        place = _place_of(folder, number, service_of(request).settings.files)
        sizes = plain_sizes(place, [*version.deltas, *version.files.values()])
        missing = [name for name, (size, _) in version.deltas.items() if sizes.get(name) != size]
        missing += [name for name in version.files.values() if sizes.get(name) is None]
        if missing or version.number != number:
            raise UsageError(
                f"version {version.number} is not whole: {', '.join(missing[:3])}: send its files before its index"
            )
        commit_in(folder, place, number, index, sent.oldest)
        runs_of(request).forget()

    await run_in_threadpool(commit)
    return Response(status_code=204)


def _folder_of(request: Request) -> Path:
    """Return the folder of the run's versions. Raises CheckpointNotFoundError."""
    return runs_of(request).folder_for_uploads(request.path_params["run"], behind_urls=False) / WEIGHTS_FOLDER


def _version_of(request: Request) -> tuple[Path, int]:
    """Return the folder of the run's versions, and the number of that which is sent. Raises CheckpointNotFoundError, and
    UsageError if another run has that place."""
    folder, number = _folder_of(request), request.path_params["number"]
    if not number.isascii() or not number.isdecimal() or len(number) > _MOST_DIGITS:
        raise UsageError(f"{number!r:.50}: expected the number of a version")
    service_of(request).publishers.check(folder, request.query_params.get("publisher", ""))
    return folder, int(number)


def _require_free(folder: Path, number: int = 0) -> None:
    """Raise ConflictError if a version is there, or `weights` is a checkpoint."""
    if folder.is_symlink() or (folder / RECORD_FILE).exists() or (folder / folder_name(number)).exists():
        raise ConflictError(
            f"{folder.parent.name!r}: {folder.name!r} is a checkpoint or a link, or has version {number} already"
        )


def _place_of(folder: Path, number: int, files: Files) -> Path:
    """Return the folder for the files of a version to come, which is made. Raises ConflictError if it is there."""
    _require_free(folder, number)
    place = folder / f".{folder_name(number)}"
    files.make_folder(place)
    return place


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


_WEIGHTS = "/api/uploads/weights/{run}"
_PUBLISHER = Parameter(name="publisher", help="Who publishes: a name that no other run has.")
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
    Operation(
        path="/api/runs/{run}/weights",
        summary="The versions of weights that lead to the newest one, in as few bytes as possible",
        answer=WeightsChain,
        handle=_since,
        parameters=(
            Parameter(name="since", help="Id of the version that is there; none: there is none."),
            Parameter(
                name="held",
                help="1: keep these versions until the client ends the answer, an event stream.",
                kind="integer",
                default=0,
                most=1,
            ),
        ),
        problems=(422,),
    ),
    Exchange(
        path=_WEIGHTS,
        method="POST",
        summary="Be the one that publishes to a run, until the answer ends",
        answer=None,
        media="text/event-stream",
        handle=_have,
        parameters=(_PUBLISHER,),
        problems=(507,),
    ),
    Exchange(
        path=f"{_WEIGHTS}/{{number}}/{{name}}",
        method="PUT",
        summary="Send a file of a version of weights",
        answer=None,
        handle=_put_weights,
        parameters=(_PUBLISHER,),
        body_media="application/octet-stream",
        status=204,
        problems=(507,),
    ),
    Exchange(
        path=f"{_WEIGHTS}/{{number}}",
        method="POST",
        summary="Make a version of weights visible, whole",
        answer=None,
        handle=_commit_weights,
        parameters=(_PUBLISHER,),
        body=VersionIndex,
        status=204,
        audit="publish",
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
