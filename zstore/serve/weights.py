"""`/weights/<run>/<checkpoint>/...`: a model's safetensors files, made while they are downloaded, and their companions.

[Note: bytes that are made on the way]
Length, tag and every byte of a file follow from the record of the checkpoint and from the query of the URL, so ranges and
resumed downloads are of one and the same file. It is the file that `zstore consolidate` writes. A value that cannot be read,
fails its checksum or does not fit its type ends the connection before all bytes were sent: a client sees that the download is
incomplete, and never a wrong byte. `latest` may be another checkpoint at the next request: there a range is sent only with
the tag of the file that the client has started to download (`If-Range`), otherwise the whole file.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import anyio
from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, field_validator
from starlette.responses import JSONResponse, Response

from ..checkpoint.catalog import TagInfo
from ..checkpoint.folder import Folder
from ..checkpoint.reader import CheckpointReader
from ..errors import CheckpointMismatchError, CheckpointNotFoundError, ZstoreError, parse_bytes
from ..format.arrays import SUFFIX
from ..weights.files import MAX_FILE_BYTES, FileLayout, index_document, index_file, plan_model
from ..weights.from_checkpoint import DTYPES, companions, is_companion, list_weights, read_file
from .api import Library, NamedRun, Shared
from .files import Blocks, Place, Representation, answer, open_place
from .models import WeightsFile, WeightsFolder
from .runs import Run

_log = logging.getLogger(__name__)
_VERSION = 1
"""Raised when the same checkpoint would give other bytes."""
_BLOCK_BYTES = 4 * 1024 * 1024
router = APIRouter(tags=["weights"])


class WeightsQuery(BaseModel):
    """The options for weights in a URL's query; as in `zstore consolidate`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["bf16", "fp16", "fp32"] = "fp16"
    max_shard_size: str = str(MAX_FILE_BYTES)
    overflow: Literal["error", "inf", "clamp"] = "error"

    @field_validator("max_shard_size")
    @classmethod
    def _is_a_size(cls, text: str) -> str:
        parse_bytes(text)
        return text


@dataclass(frozen=True, kw_only=True)
class _File:
    """A file generated from a checkpoint."""

    name: str
    size: int
    etag: str
    data: bytes = b""
    """Its bytes, if they are few."""
    layout: FileLayout | None = None


@dataclass(frozen=True)
class _Source:
    """A checkpoint that weights are generated from."""

    library: Library
    run: Run
    path: str
    info: TagInfo
    reader: CheckpointReader
    query: WeightsQuery

    @classmethod
    def find(cls, library: Library, run: Run, checkpoint: str, query: WeightsQuery) -> _Source:
        path, info = library.checkpoints(run).find(checkpoint or "latest")
        return cls(library, run, path, info, library.reader(info), query)

    @property
    def key(self) -> tuple[str, str, str]:
        """The values that are written as one type."""
        return self.info.location, self.info.record.id, self.query.dtype

    def files(self) -> Iterator[_File]:
        """Yield the safetensors files, the index last if there are several."""
        dtype, max_bytes = self.query.dtype, parse_bytes(self.query.max_shard_size)
        layouts: list[FileLayout] = self.library.layouts.get(
            (*self.key, max_bytes),
            lambda: plan_model(list_weights(self.reader, DTYPES[dtype]), max_bytes, self.info.record.state),
        )
        for layout in layouts:
            etag = self._etag(layout.header)
            yield _File(name=layout.name, size=layout.file_bytes, etag=etag, layout=layout)
        if len(layouts) > 1:
            data = json.dumps(index_document(layouts), indent=2).encode()
            yield _File(name=index_file(layouts), size=len(data), etag=self._etag(data), data=data)

    def _etag(self, data: bytes) -> str:
        text = f"{_VERSION} {self.reader.record.id} {self.query.dtype} {self.query.overflow} "
        return f'"{hashlib.sha256(text.encode() + data).hexdigest()[:32]}"'

    def companions(self) -> dict[str, Folder]:
        """Return config and tokenizer files by name, with the folder: the checkpoint's or its parent."""
        layout = next(self.files()).layout
        conflicting = () if layout is None else layout.conflicting_files
        folders = (self.info.folder.parent, self.info.folder)
        return {name: folder for folder in folders for name in companions(folder) if name not in conflicting}

    def companion(self, name: str) -> Representation:
        """Return a config or tokenizer file, opened. Raises CheckpointNotFoundError if it does not exist."""
        folder = self.companions().get(name)
        if folder is None:
            some = ", ".join(file.name for file in self.files())
            raise CheckpointNotFoundError(
                f"{self.info.location} gives no {name!r:.200}; with this query it gives {some[:200]}"
            )
        return open_place(self.library, Place(folder=folder, path=name, identity=None))


@router.get("/weights/{run}/{path:path}", response_model=WeightsFolder, responses={206: {}, 304: {}, 416: {}, 422: {}})
@router.head("/weights/{run}/{path:path}", include_in_schema=False)
async def _weights(
    run: NamedRun, path: str, request: Request, library: Shared, query: Annotated[WeightsQuery, Query()]
) -> Response:
    """The files of a checkpoint's weights, or with a file's name at the end that file."""
    folder, _, name = path.rpartition("/")
    if not (name.endswith((SUFFIX, f"{SUFFIX}.index.json")) or is_companion(name)):
        folder, name = path.rstrip("/"), ""
    source = await run_in_threadpool(_Source.find, library, run, folder, query)
    if not name:
        listed = await run_in_threadpool(_folder, source)
        return JSONResponse(listed.model_dump(), headers={"Cache-Control": "no-store"})
    headers = dict(request.headers)
    if folder != source.path and not {"if-range", "if-match"} & headers.keys():
        headers.pop("range", None)  # the file that the client started may be another's
    file = await run_in_threadpool(lambda: next((file for file in source.files() if file.name == name), None))
    if file is None:
        return await answer(request, headers, await run_in_threadpool(source.companion, name))
    if query.overflow == "error" and (reason := library.overflow_errors.find(source.key)) is not None:
        raise CheckpointMismatchError(reason)
    kind = "application/json" if name.endswith(".json") else "application/octet-stream"
    found = Representation(size=file.size, etag=file.etag, media_type=kind, blocks=partial(_file_blocks, source, file))
    return await answer(request, headers, found)


def _folder(source: _Source) -> WeightsFolder:
    files = [WeightsFile(name=file.name, size=file.size, etag=file.etag) for file in source.files()]
    for name, folder in source.companions().items():
        with (
            suppress(FileNotFoundError),  # a link
            closing(open_place(source.library, Place(folder=folder, path=name, identity=None))) as opened,
        ):
            files.append(WeightsFile(name=name, size=opened.size, etag=opened.etag))
    return WeightsFolder(checkpoint=source.path, files=files)


async def _file_blocks(source: _Source, file: _File, start: int, stop: int) -> Blocks:
    """Yield bytes of a file generated from a checkpoint. See [Note: bytes that are made on the way]."""
    if file.layout is None:
        yield file.data[start:stop]
        return
    try:
        overflow = source.query.overflow
        blocks = read_file(source.reader, file.layout, start, stop, overflow, block_bytes=_BLOCK_BYTES)
        while block := await anyio.to_thread.run_sync(next, blocks, None, limiter=source.library.casts):
            yield block
    except (ZstoreError, OSError) as error:
        _log.warning("a download of %s from %s ended: %s", file.name, source.info.location, error)
        if isinstance(error, CheckpointMismatchError):
            reason = str(error)
            source.library.overflow_errors.get(source.key, lambda: reason)
        raise
