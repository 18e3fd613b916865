"""`/xarray/<run>/<path>`: the files of `/zarr`, with names of dimensions in each `zarr.json`, and arrays in their own shape.

See [Note: names of dimensions] and [Note: unfolded arrays].
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from urllib.parse import unquote

import anyio.to_thread
import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ...checkpoint.format import dump_metadata, parse_json
from ...checkpoint.names import METADATA_FILE
from ...errors import UsageError
from ...format.arrays import numpy_dtype
from ..cache import Cache
from ..files.dimensions import below, chunk_range, is_bare_group, named
from ..files.listing import list_place
from ..files.opened import IsFolderError, Opened
from ..files.ranges import choose
from ..files.visible import Place
from ..service import Service, service_of
from .files import FileResponse, answer_file, first, open_place, parts_of, run_without_slash, with_slash

_MOST_BYTES = 64 * 1024 * 1024
_MOST_VALUES = 2**22
_MOST_CACHED = 16
_MOST_CACHED_BYTES = 4 * 1024 * 1024
"""A larger document is made for each request."""

_Documents = Cache[tuple[str, ...], bytes]


def routes() -> list[BaseRoute]:
    """Return the routes of files for xarray."""
    documents: _Documents = Cache(_MOST_CACHED)

    async def answer(request: Request) -> Response:
        parts = parts_of(request)
        if parts[-1] == "":
            # Sizes are left out: those of documents are others than on disk.
            listing = await run_in_threadpool(first, request, parts, lambda place: list_place(place, recursive=False))
            page = listing.as_html(request.scope["path"], sizes=False).encode("utf-8", "replace")
            return Response(page, headers={"Cache-Control": "private, no-cache"}, media_type="text/html")
        service, is_document = service_of(request), parts[-1] == METADATA_FILE
        if not is_document and not parts[-1].startswith("c"):
            return await answer_file(request)
        make: Callable[[Place], tuple[Opened, bytes] | None] = partial(_chunk, service)
        if is_document:
            make = partial(_document, service, documents)
        try:
            made = await anyio.to_thread.run_sync(lambda: first(request, parts, make), limiter=service.heavy)
            if made is None:
                return await answer_file(request)
            opened, data = made
        except IsFolderError:
            return with_slash(request)
        part = choose(request.method, request.headers, opened.etag, opened.size)
        return FileResponse(opened, part, service.downloads, data[part.start : part.stop])

    return [Route("/xarray/{run}", run_without_slash), Route("/xarray/{run}/{path:path}", answer)]


def _chunk(service: Service, place: Place) -> tuple[Opened, bytes] | None:
    """Return a chunk of an array that is shown in its own shape; None if the place is something else."""
    folder, _, key = place.path.rpartition("/")
    if place.info is None or not folder:
        return None
    reader = service.readers.open(place.info)
    stored = reader.arrays.get(unquote(folder))
    if stored is None or stored.folder != folder:  # as the one of a very long name is
        stored = next((each for each in reader.arrays.values() if each.folder == folder), None)
    if stored is None or stored.spec.shape == stored.spec.stored_shape:
        return None
    spec = stored.spec
    chunk = chunk_range(spec.shape, spec.itemsize, key)
    if chunk is None:
        return None
    begin, end, numel = chunk
    values = np.zeros(numel, numpy_dtype(spec.dtype))
    reader.read(spec.name, begin, end, values[: end - begin])
    etag = f'"{hashlib.sha256(f"{place.info.record.id} {place.path}".encode()).hexdigest()[:32]}"'
    return Opened(folder=place.folder, path=place.path, size=values.nbytes, etag=etag, file=None), values.tobytes()


def _document(service: Service, documents: _Documents, place: Place) -> tuple[Opened, bytes]:
    """Return a `zarr.json` with names of dimensions: its properties as a file, and its bytes."""
    source, text = _read(service, place)
    info = place.info
    if info is None:  # beside checkpoints there is none
        raise FileNotFoundError(place.path)
    key = (info.record.id, place.path, source.etag or "")
    data = documents.get(key)
    if data is None:
        document = parse_json(text, f"{place.folder}/{place.path}", _MOST_VALUES)
        folder = place.path.rpartition("/")[0]
        if folder and is_bare_group(document):
            root = replace(place, path=METADATA_FILE)
            everything = parse_json(_read(service, root)[1], f"{place.folder}/{root.path}", _MOST_VALUES)
            document["consolidated_metadata"] = below(everything, folder)
        data = dump_metadata(named(document))
        if len(data) <= _MOST_CACHED_BYTES:
            documents.put(key, data)
    etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    return replace(source, size=len(data), etag=etag, file=None), data


def _read(service: Service, place: Place) -> tuple[Opened, bytes]:
    """Return a `zarr.json` as it is, closed, and its bytes."""
    with contextlib.closing(open_place(service, place)) as opened:
        if opened.size > _MOST_BYTES:
            raise UsageError(f"{place.path} has {opened.size} bytes: names are added to up to {_MOST_BYTES}")
        if opened.file is None:
            return opened, opened.read(0, opened.size)
        return opened, opened.file.read(opened.size)
