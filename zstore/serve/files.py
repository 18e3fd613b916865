"""`/zarr/<run>/<path>`: the files of checkpoints, unchanged, with ranges and entity tags; and listings of folders.

[Note: visible paths]
A path in a run's folder begins with the folder of a checkpoint (`step-00000060`), with a folder created by a training
loop and a checkpoint folder in it (`checkpoint-60/step-00000060`), or with `latest`, which is the newest. Temporary
files of a save are not visible; a checkpoint that is being replaced is found by its tag, as on disk. Besides
checkpoints, `latest`, journals, and config and tokenizer files are visible. Links are not, except to another checkpoint
in the same folder.

[Note: names in paths]
A component of a path is percent-encoded in a URL: the folder `a%20b` is `a%2520b`. Many clients do not encode it, and
send `a%20b`. A path that does not exist decoded is therefore tried undecoded. A component never has a `/` in either
form.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import html
import json
import os
import re
import stat
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from urllib.parse import quote, unquote

import anyio
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response, StreamingResponse

from ..checkpoint.catalog import LOOPS_FOLDER
from ..checkpoint.folder import Folder
from ..checkpoint.layout import LATEST_FILE
from ..errors import CheckpointNotFoundError, UsageError
from ..weights.from_checkpoint import COMPANIONS
from .api import Library, NamedRun, Shared
from .runs import Run

_RUN_FILES = (LATEST_FILE, "journal-*.jsonl", *COMPANIONS)
_TYPES = {
    ".json": "application/json",
    ".jsonl": "application/x-ndjson",
    ".txt": "text/plain; charset=utf-8",
    ".py": "text/plain; charset=utf-8",
}
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.EMLINK})
_BLOCK_BYTES = 1024 * 1024
_MAX_FILES = 500_000
_ONE_RANGE = re.compile(r"bytes=[ \t]*(\d{0,19})-(\d{0,19})[ \t]*", re.ASCII | re.IGNORECASE)
_NOT_PLAIN = re.compile(r"[/\\\x00]")
Blocks = AsyncIterator[bytes | memoryview]
T = TypeVar("T")
router = APIRouter(tags=["files"])


@dataclass(frozen=True, kw_only=True)
class Place:
    """Something visible: the file or folder `path` in `folder`; an empty path means the folder itself."""

    folder: Folder
    path: str
    identity: str | None
    """Id of the checkpoint that it belongs to; None for a file of the run."""
    is_run: bool = False
    """Whether it is a folder of checkpoints. The kind of a path inside a checkpoint is determined when it is read."""


class IsFolderError(Exception):
    """The place is a folder inside a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Representation:
    """The bytes of a URL. Must be closed, or read to the end."""

    size: int
    etag: str | None
    """Changes whenever the bytes under the same URL do. None: not known."""
    media_type: str
    """Never a type that a browser runs."""
    blocks: Callable[[int, int], Blocks]
    """Yields bytes `[start, stop)`, and closes what they are read from."""
    close: Callable[[], None] = lambda: None


@router.get("/zarr/{run}", response_class=Response)
@router.head("/zarr/{run}", include_in_schema=False)
def _without_slash(run: NamedRun, request: Request) -> Response:
    """Redirect to the run's folder."""
    return _with_slash(request)


@router.get("/zarr/{run}/{path:path}", response_class=Response, responses={206: {}, 304: {}, 307: {}, 416: {}})
@router.head("/zarr/{run}/{path:path}", include_in_schema=False)
async def _file(run: NamedRun, path: str, request: Request, library: Shared, recursive: bool = False) -> Response:
    """A file unchanged, or with a trailing `/` the contents of a folder."""
    parts = tuple(request.scope["raw_path"].decode("ascii", "replace").partition("/zarr/")[2].split("/")[1:])
    if parts[-1] == "":
        return await run_in_threadpool(_listing, library, run, parts, request, recursive)
    try:
        found = await run_in_threadpool(resolve, library, run, parts, open_place)
    except IsFolderError:
        return _with_slash(request)
    return await answer(request, request.headers, found)


def _with_slash(request: Request) -> Response:
    """Redirect to the folder's URL, relative to the request's."""
    name = request.scope["raw_path"].rpartition(b"/")[2].decode("ascii", "replace")
    return RedirectResponse(f"./{name}/")


@dataclass(frozen=True, kw_only=True)
class Part:
    """The response to send: a status, and bytes `[start, stop)` of `size` for 200 and 206."""

    status: int
    start: int
    stop: int
    size: int

    @property
    def headers(self) -> dict[str, str]:
        """The headers for the status, in addition to the representation's."""
        if self.status == 206:
            return {
                "Content-Range": f"bytes {self.start}-{self.stop - 1}/{self.size}",
                "Content-Length": str(self.nbytes),
            }
        if self.status == 416:
            return {"Content-Range": f"bytes */{self.size}"}
        return {"Content-Length": str(self.nbytes)} if self.status == 200 else {}

    @property
    def nbytes(self) -> int:
        """Bytes of the body."""
        return self.stop - self.start


def choose(method: str, headers: Mapping[str, str], etag: str | None, size: int) -> Part:
    """Return the part that a request gets of a representation of `size` bytes with the strong tag `etag` (None: it has
    none).

    `headers` has lower-case names. The status is 200, 206, 304, 412 or 416. Several ranges in one request are answered
    with all bytes, which RFC 9110 allows; so are a malformed range and any range in a HEAD request.
    """
    whole = Part(status=200, start=0, stop=size, size=size)
    if "if-match" in headers and not _has_etag(headers["if-match"], etag, weak=False):
        return Part(status=412, start=0, stop=0, size=size)
    if "if-none-match" in headers and _has_etag(headers["if-none-match"], etag, weak=True):
        return Part(status=304, start=0, stop=0, size=size)
    if method != "GET" or "range" not in headers:
        return whole
    if "if-range" in headers and (etag is None or headers["if-range"].strip() != etag):
        return whole
    return _range_of(headers["range"], whole)


def _range_of(text: str, whole: Part) -> Part:
    found = _ONE_RANGE.fullmatch(text)
    if found is None or not (found[1] or found[2]):
        return whole
    size = whole.size
    if not found[1]:  # the last bytes
        start, stop = max(size - int(found[2]), 0), size
    else:
        start, stop = int(found[1]), size
        if found[2]:
            if int(found[2]) < start:
                return whole
            stop = min(int(found[2]) + 1, size)
    if start >= stop:
        return Part(status=416, start=0, stop=0, size=size)
    return Part(status=206, start=start, stop=stop, size=size)


def _has_etag(header: str, etag: str | None, *, weak: bool) -> bool:
    """Return whether a list of tags has `etag`."""
    tags = [tag.strip() for tag in header.split(",")]
    if weak:
        tags = [tag.removeprefix("W/") for tag in tags]
    return "*" in tags or etag in tags


async def answer(request: Request, headers: Mapping[str, str], found: Representation) -> Response:
    """Return the response to a request with `headers`. Its first block is made before anything is sent, so that an
    error in it can still be sent as an error response; an error in a later block ends the connection before all bytes
    are sent."""
    part = choose(request.method, headers, found.etag, found.size)
    shown = {"Accept-Ranges": "bytes", "Cache-Control": "private, no-cache", "X-Content-Type-Options": "nosniff"}
    shown |= part.headers | ({} if found.etag is None else {"ETag": found.etag})
    has_bytes = part.status in (200, 206)
    if request.method == "HEAD" or part.nbytes == 0 or not has_bytes:
        found.close()
        return Response(None, part.status, shown, found.media_type if has_bytes else None)
    blocks = found.blocks(part.start, part.stop)
    return StreamingResponse(_chain(await anext(blocks), blocks), part.status, shown, found.media_type)


async def _chain(first: bytes | memoryview, blocks: Blocks) -> Blocks:
    yield first
    async for block in blocks:
        yield block


def _listing(library: Library, run: Run, parts: tuple[str, ...], request: Request, recursive: bool) -> Response:
    folders, files = resolve(library, run, parts, lambda _, place: _list_place(library, place, recursive))
    headers = {"Cache-Control": "private, no-cache", "Vary": "Accept"}
    if "application/json" in request.headers.get("accept", ""):
        entries = [{"name": name, "size": size} for name, size in sorted(files.items())]
        body = json.dumps({"folders": sorted(folders), "files": entries})
        return Response(body, headers=headers, media_type="application/json")
    names = [*(f"{name}/" for name in sorted(folders)), *sorted(files)]
    links = "\n".join(f'<li><a href="{quote(os.fsencode(name))}">{html.escape(name)}</a></li>' for name in names)
    title = html.escape(request.scope["path"])
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><h1>{title}</h1>'
    text = f"{head}<ul>\n{links}\n</ul></html>"
    return Response(text.encode("utf-8", "replace"), headers=headers, media_type="text/html")


def resolve(library: Library, run: Run, parts: tuple[str, ...], use: Callable[[Library, Place], T]) -> T:
    """Return the result of `use` for the place that parts of a URL name. Raises CheckpointNotFoundError if it is
    missing."""
    missing: Exception | None = None
    for candidate in dict.fromkeys([tuple(map(unquote, parts)), parts]):
        try:
            return use(library, _place(library, run, candidate))
        except (FileNotFoundError, NotADirectoryError) as error:
            missing = missing or error
    raise CheckpointNotFoundError(f"the run {run.name!r} has no file {'/'.join(parts)!r}") from missing


def _place(library: Library, run: Run, parts: tuple[str, ...]) -> Place:
    """Return the place that a run's path names. See [Note: visible paths]. Raises FileNotFoundError."""
    if any(part in (".", "..") or _NOT_PLAIN.search(part) or len(os.fsencode(part)) > 255 for part in parts):
        raise FileNotFoundError("/".join(parts))
    if any(part == "" for part in parts[:-1]):
        raise FileNotFoundError("/".join(parts))
    if parts == ("",):
        return Place(folder=run.folder, path="", identity=None, is_run=True)
    loop = parts[0] if LOOPS_FOLDER.fullmatch(parts[0]) and parts[0] not in library.checkpoints(run).all() else ""
    inner = parts[1:] if loop else parts
    folder = run.folder.child(loop) if loop else run.folder
    if loop and inner in ((), ("",)):
        if not any(path.startswith(f"{loop}/") for path in library.checkpoints(run).all()):
            raise FileNotFoundError(loop)
        return Place(folder=folder, path="", identity=None, is_run=True)
    head, rest = inner[0], inner[1:]
    if not rest and is_run_file(head):
        return Place(folder=folder, path=head, identity=None)
    checkpoints = library.checkpoints(run)
    info = checkpoints.all().get(f"{loop}/{head}" if loop else head)
    if info is None and head == LATEST_FILE and not loop and (newest := checkpoints.newest()) is not None:
        info = newest[1]
    if info is None:
        raise FileNotFoundError("/".join(parts))
    return Place(folder=info.folder, path="/".join(rest), identity=info.record.id)


def is_run_file(name: str) -> bool:
    """Return whether a run's file of that name is visible."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _RUN_FILES)


def open_place(library: Library, place: Place) -> Representation:
    """Return the file at a place. Raises FileNotFoundError, and IsFolderError for a folder."""
    if place.is_run or (place.identity is not None and not place.path):
        raise IsFolderError
    name = place.path.rpartition("/")[2]
    kind = _TYPES[".txt"] if name == LATEST_FILE else _TYPES.get(os.path.splitext(name)[1], "application/octet-stream")
    if place.folder.is_local:
        return _open_local(library, place, kind)
    try:
        size = place.folder.size(place.path)
    except IsADirectoryError as error:
        raise IsFolderError from error
    key = None if place.identity is None else f"{place.folder.location}\0{place.identity}\0{place.path}"
    etag = None if key is None else f'"{hashlib.sha256(key.encode()).hexdigest()[:32]}"'
    blocks = partial(_blocks_of, library, partial(place.folder.read_range, place.path), lambda: None)
    return Representation(size=size, etag=etag, media_type=kind, blocks=blocks)


async def _blocks_of(
    library: Library, read: Callable[[int, int], bytes], close: Callable[[], None], start: int, stop: int
) -> Blocks:
    """Yield the bytes of a file, and close it."""
    try:
        for first_byte in range(start, stop, _BLOCK_BYTES):
            make = partial(read, first_byte, min(first_byte + _BLOCK_BYTES, stop))
            yield await anyio.to_thread.run_sync(make, limiter=library.file_reads)
    finally:
        close()


def _open_local(library: Library, place: Place, media_type: str) -> Representation:
    descriptor = _open_below(place)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsFolderError
        raise FileNotFoundError(place.path)
    etag = f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"'
    close = partial(os.close, descriptor)
    blocks = partial(_blocks_of, library, lambda start, stop: os.pread(descriptor, stop - start, start), close)
    return Representation(size=status.st_size, etag=etag, media_type=media_type, blocks=blocks, close=close)


def _open_below(place: Place) -> int:
    """Return a descriptor of the file or folder at a local place.

    No link is followed and no other path leads out, even if something changes during the call; but the folder of a
    checkpoint may be a link to another one in the same folder. Raises FileNotFoundError if it is missing, or is a link.
    """
    descriptor = -1
    try:
        descriptor = _open_folder(place)
        for part in place.path.rstrip("/").split("/") if place.path else ():
            above = descriptor
            # A pipe would block without O_NONBLOCK.
            descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=above)
            os.close(above)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if error.errno in _ABSENT:
            raise FileNotFoundError(place.path) from error
        raise
    return descriptor


def _open_folder(place: Place) -> int:
    path, flags = place.folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if place.identity is None:  # it is named in the settings, or was created by a training loop
        return os.open(path, flags)
    above = os.open(path.parent, flags)
    try:
        with contextlib.suppress(OSError):  # most are not links
            return os.open(path.name, flags | os.O_NOFOLLOW, dir_fd=above)
        # Wherever a link leads by now, only files in the folder of checkpoints are opened.
        return os.open(os.path.basename(os.path.realpath(path)), flags | os.O_NOFOLLOW, dir_fd=above)
    finally:
        os.close(above)


def _list_place(library: Library, place: Place, recursive: bool) -> tuple[set[str], dict[str, int]]:
    """Return the folders, and the files with their sizes, in a folder; with `recursive` all files below it by path, and
    no folders."""
    if not place.is_run:
        return _list_folder(place, recursive)
    sizes = place.folder.sizes_of(filter(is_run_file, place.folder.entries().files))
    folders, files = set[str](), {name: size for name, size in sizes.items() if size is not None}
    run = Run(name="", folder=place.folder)
    for path, info in library.checkpoints(run).all().items():
        if not recursive:
            folders.add(path.partition("/")[0])
            continue
        inner = _list_folder(Place(folder=info.folder, path="", identity=info.record.id), True)[1]
        files |= {f"{path}/{name}": size for name, size in inner.items()}
    return folders, files


def _list_folder(place: Place, recursive: bool) -> tuple[set[str], dict[str, int]]:
    folders, files, top = set[str](), dict[str, int](), place.path.rstrip("/")
    if not place.folder.is_local:
        start = len(top) + 1 if top else 0
        found = {path[start:]: size for path, size in place.folder.sizes(top).items() if size is not None}
        files = {path: size for path, size in found.items() if recursive or "/" not in path}
        folders = set() if recursive else {path.partition("/")[0] for path in found if "/" in path}
        if not found:
            raise FileNotFoundError(top)
        return folders, files
    descriptor = _open_below(place)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(top)
        for path, names, plain, at in os.fwalk(".", dir_fd=descriptor, follow_symlinks=False):
            inner = "" if path == "." else path.removeprefix("./") + "/"
            for name in plain:
                status = os.stat(name, dir_fd=at, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    files[inner + name] = status.st_size
            if len(files) > _MAX_FILES:
                raise UsageError(f"more than {_MAX_FILES} files: list the folders of the checkpoint one by one")
            if not recursive:
                kinds = {name: os.stat(name, dir_fd=at, follow_symlinks=False).st_mode for name in names}
                return {name for name, mode in kinds.items() if stat.S_ISDIR(mode)}, files
    finally:
        os.close(descriptor)
    return folders, files
