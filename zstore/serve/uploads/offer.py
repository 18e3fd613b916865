"""An upload by its offer: the messages under `/api/uploads`, and the files to expect. Nothing that a client says is trusted.

See [Note: an upload] in `upload`.

[Note: known contents]
The record has its own digest and the digests of the metadata and of each manifest; the metadata says which shard files
there are and how large they are, the manifests the checksums of their chunks. The metadata files of the groups and
arrays are copies out of the root's, which the service writes. A program's file at the top, such as `config.json`, is
known by the SHA-256 in the offer. So nothing is stored under a name or with a size that the client made up.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt
from crc32c import crc32c
from pydantic import BaseModel, ConfigDict

from ...checkpoint.format import Record
from ...checkpoint.layout import (
    ABORT_FILE,
    LATEST_FILE,
    MANIFEST_FOLDER,
    METADATA_FILE,
    RECORD_FILE,
    dump_metadata,
    manifest_file,
)
from ...checkpoint.reader import StoredArray, checked_manifest, checked_metadata
from ...checkpoint.retention import Keep
from ...errors import CorruptionError, UsageError
from ...format.arrays import round_up
from ...format.codecs import decode_packed_index, max_stored_bytes, packed_file_bytes
from ...format.shardfile import BLOCK_BYTES, CRC_BYTES, check_index, checksum_error, layout_of

OFFER_FILE = "upload.json"
ALIVE_S = 15 * 60.0
"""An upload counts as active for this long after its client's last request."""
MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
"""Limit on the metadata, and on a manifest: one is parsed at a time."""
MAX_DOCUMENT_VALUES = 2**22
MAX_EXTRA_FILES = 1000
MAX_EXTRA_BYTES = 2**40
_PLAIN_NAME = re.compile(r"[^/\\\x00-\x1f\x7f-\x9f]{1,200}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RESERVED = frozenset({RECORD_FILE, METADATA_FILE, LATEST_FILE, MANIFEST_FOLDER, ABORT_FILE})


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ExtraFile(_Message):
    """A program's file at the top of a checkpoint, such as `config.json`."""

    bytes: int
    sha256: str


class UploadOffer(_Message):
    """Body of `POST /api/uploads`."""

    run: str
    """Name that the run has, or gets, in the service."""
    record: str
    """The checkpoint's `zstore.json`."""
    documents: dict[str, int]
    """Bytes of the root's `zarr.json`, and of each rank's manifest by its path."""
    extras: dict[str, ExtraFile] = {}
    overwrite: bool = False
    """Replace a committed checkpoint of the same tag, of any run."""
    replaces_own: bool = False
    """Replace a checkpoint of the same run."""
    keep: Keep | None = None
    """Which checkpoints of the run stay after the commit."""


class UploadFile(_Message):
    """A file of an upload."""

    path: str
    bytes: int
    received: int
    """Equal to `bytes`: the file is complete and was checked."""
    candidate: bool = False
    """A committed checkpoint has a file with the same checksums: show its SHA-256 before sending it."""


class UploadState(_Message):
    """Answer to `POST /api/uploads`, `GET /api/uploads/{id}?rank=` and `POST /api/uploads/{id}/plan`."""

    id: str
    run: str
    tag: str
    run_id: str
    state: Literal["begun", "planned", "committed"]
    """begun: the client must send metadata and manifests, then ask for a plan."""
    files: list[UploadFile]
    """Begun: metadata and manifests. Planned: the incomplete files, of the requested rank, else of all."""


class UploadList(_Message):
    """`GET /api/uploads?run=`: the uncommitted uploads, of one run or all; `files` is empty."""

    uploads: list[UploadState]


class Claims(_Message):
    """Body of `POST /api/uploads/{id}/claims`: the SHA-256 of candidates, by path."""

    files: dict[str, str]


class Linked(_Message):
    """Answer to it: the files that need not be sent."""

    linked: list[str]


class Committed(_Message):
    """Answer to `POST /api/uploads/{id}/commit`."""

    tag: str
    committed_ns: int
    linked_bytes: int
    """Bytes of files that are links to another checkpoint's."""
    messages: list[str]
    """Messages for the user: checkpoints that could not be removed."""


class JournalSize(_Message):
    """Answer to `GET` and `POST /api/runs/{run}/journals/{run_id}`."""

    bytes: int
    """Bytes of the complete lines received."""


@dataclass(frozen=True, kw_only=True)
class KnownContent:
    """A file whose SHA-256 is known before it arrives."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ShardContent:
    """A shard file."""

    num_bytes: int
    array: StoredArray
    shard: int
    crcs: npt.NDArray[np.uint32]
    """Checksums by present chunk."""


Content = KnownContent | ShardContent


@dataclass(frozen=True, kw_only=True)
class UploadPlan:
    """All files of a checkpoint except the record, by path inside it."""

    shards: Mapping[str, ShardContent]
    of_rank: Mapping[int, tuple[str, ...]]
    """The shard files that each rank wrote."""
    copies: Mapping[str, dict[str, Any]] = field(repr=False)
    """The metadata of groups and arrays, by folder, which the service writes."""

    @property
    def copies_bytes(self) -> int:
        """Bytes on a drive of the files that the service writes, and of their folders."""
        return sum(
            2 * BLOCK_BYTES + round_up(len(dump_metadata(document)), BLOCK_BYTES) for document in self.copies.values()
        )


def documents_of(record: Record, sizes: Mapping[str, int]) -> dict[str, KnownContent]:
    """Return the known contents of the metadata and of the manifests, whose sizes the client states.

    Raises UsageError if it names other files, or larger ones than are taken.
    """
    digests = record.digests
    if sizes.keys() != digests.keys():
        odd = sorted(sizes.keys() ^ digests.keys())[:3]
        raise UsageError(f"expected the sizes of {METADATA_FILE} and of each rank's manifest, got others: {odd!r:.200}")
    for file, num_bytes in sizes.items():
        if not 0 < num_bytes <= MAX_DOCUMENT_BYTES:
            raise UsageError(f"{file} has {num_bytes} bytes: this service takes up to {MAX_DOCUMENT_BYTES}")
        if not _SHA256.fullmatch(digests[file]):
            raise CorruptionError(f"{RECORD_FILE}: the digest of {file} is no SHA-256")
    return {file: KnownContent(num_bytes=sizes[file], sha256=digest) for file, digest in digests.items()}


def check_extras(extras: Mapping[str, KnownContent]) -> None:
    """Raise UsageError for files at the top of the folder that no checkpoint may have."""
    if len(extras) > MAX_EXTRA_FILES:
        raise UsageError(f"{len(extras)} other files than arrays: this service takes up to {MAX_EXTRA_FILES}")
    for name, content in extras.items():
        if not _PLAIN_NAME.fullmatch(name) or name.startswith(".") or name.casefold() in _RESERVED:
            raise UsageError(
                f"{name!r:.100} cannot lie at the top of a checkpoint: expected a file's name without `/`, control characters "
                "or a leading dot, that the format does not use itself"
            )
        if not 0 <= content.num_bytes <= MAX_EXTRA_BYTES or not _SHA256.fullmatch(content.sha256):
            raise UsageError(f"{name!r:.100}: expected a size up to {MAX_EXTRA_BYTES} and a SHA-256 of 64 hex digits")


def make_plan(record: Record, folder: Path, extras: Mapping[str, KnownContent]) -> UploadPlan:
    """Return the files of the upload, by the metadata and the manifests in `folder`, whose digests were checked.

    Raises CorruptionError, or CheckpointMismatchError, for documents that no reader would take.
    """
    path = folder / METADATA_FILE
    document, arrays = checked_metadata(path.read_bytes(), record, METADATA_FILE, MAX_DOCUMENT_VALUES)
    documents: dict[str, dict[str, Any]] = document["consolidated_metadata"]["metadata"]
    groups = {entry.partition("/")[0] for entry in documents}
    for name in extras:
        if name in groups:
            raise UsageError(f"{name!r:.100} is a group of arrays and a file as well: rename the file")
    shards: dict[str, ShardContent] = {}
    of_rank: dict[int, tuple[str, ...]] = {}
    for rank in range(record.world_size):
        own = _read_shards(record, rank, folder / manifest_file(rank), arrays)
        of_rank[rank] = tuple(own)
        shards |= own
    for array in arrays.values():
        for shard in range(array.grid.num_shards):
            if array.shard_file(shard) not in shards:
                raise CorruptionError(
                    f"{manifest_file(shard)} does not name shard {shard} of array {array.spec.name!r:.200}: the checkpoint is "
                    "not whole"
                )
    return UploadPlan(shards=shards, of_rank=of_rank, copies=documents)


def _read_shards(record: Record, rank: int, path: Path, arrays: Mapping[str, StoredArray]) -> dict[str, ShardContent]:
    file = manifest_file(rank)
    manifest = checked_manifest(path.read_bytes(), record, rank, file, MAX_DOCUMENT_VALUES)
    shards: dict[str, ShardContent] = {}
    for entry in manifest.shards:
        array = arrays.get(entry.array)
        if array is None or entry.shard != rank or entry.shard >= array.grid.num_shards:
            raise CorruptionError(f"{file} names shard {entry.shard} of {entry.array!r:.200}, which no array here has")
        layout = layout_of(array.grid, rank, array.spec.dtype)
        if len(entry.crcs) != layout.num_present:
            raise CorruptionError(
                f"{file} has {len(entry.crcs)} checksums for the {layout.num_present} chunks of {entry.array!r:.200}"
            )
        smallest = largest = layout.file_bytes
        if array.codec is not None:
            each = max_stored_bytes(layout.payload_bytes) + CRC_BYTES
            smallest, largest = layout.data_offset, packed_file_bytes(layout.data_offset + layout.num_present * each)
        if not smallest <= entry.file_bytes <= largest:
            raise CorruptionError(
                f"{file}: shard {rank} of {entry.array!r:.200} has {entry.file_bytes} bytes, but by its metadata {largest}"
            )
        content = ShardContent(
            num_bytes=entry.file_bytes, array=array, shard=rank, crcs=np.array(entry.crcs, dtype=np.uint32)
        )
        if shards.setdefault(array.shard_file(rank), content) is not content:
            raise CorruptionError(f"{file} names {entry.array!r:.200} twice")
    return shards


_PIECE_BYTES = 1024 * 1024


def verify_shard(path: Path, array: StoredArray, shard: int, crcs: Sequence[int] | npt.NDArray[np.uint32]) -> None:
    """Raise CorruptionError unless the file is the shard with the checksums `crcs`, by chunk, with zeros in between.

    A file of a chunk is read in pieces, however large the chunk is; the index is held whole (16 MiB at most).
    """
    name = array.spec.name
    layout = layout_of(array.grid, shard, array.spec.dtype)
    with path.open("rb") as file:
        head = np.frombuffer(_read(file, layout.data_offset, path, name), np.uint8)
        if head[layout.index_bytes :].any():
            raise _not_zeros(path, name, layout.index_bytes)
        if array.codec is None:
            check_index(layout, head, path=str(path), array=name)
            places = layout.data_offset + np.arange(layout.num_present, dtype=np.int64) * layout.slot_bytes
            ends, file_bytes = places + layout.chunk_bytes, layout.file_bytes
        else:
            offsets = decode_packed_index(layout, head, path=str(path), array=name)
            places, ends, file_bytes = offsets[:-1], offsets[1:], packed_file_bytes(int(offsets[-1]))
        if (found := os.fstat(file.fileno()).st_size) != file_bytes:
            raise CorruptionError(f"array {name!r}: {path} has {found} bytes, expected {file_bytes}")
        follows = [*places[1:].tolist(), file_bytes]
        for chunk, (first, end, after) in enumerate(zip(places.tolist(), ends.tolist(), follows, strict=True)):
            crc = _crc_of(file, end - first - CRC_BYTES, path, name)
            stored: int = struct.unpack("<I", _read(file, CRC_BYTES, path, name))[0]
            if crc != stored:
                raise checksum_error(name, f"chunk {chunk}", str(path), first, end - first)
            if crc != int(crcs[chunk]):
                raise CorruptionError(
                    f"array {name!r}: chunk {chunk} of {path} is whole, but not the one that the manifest names"
                )
            if any(_read(file, after - end, path, name)):
                raise _not_zeros(path, name, end)


def _crc_of(file: BinaryIO, nbytes: int, path: Path, name: str) -> int:
    crc = 0
    while nbytes:
        data = _read(file, min(nbytes, _PIECE_BYTES), path, name)
        crc = crc32c(data, crc)
        nbytes -= len(data)
    return crc


def _read(file: BinaryIO, nbytes: int, path: Path, name: str) -> bytes:
    data = file.read(nbytes)
    if len(data) < nbytes:
        raise CorruptionError(f"array {name!r}: {path} ends early, at byte {file.tell()}")
    return data


def _not_zeros(path: Path, name: str, offset: int) -> CorruptionError:
    return CorruptionError(f"array {name!r}: {path} has other bytes than zeros between its chunks (offset {offset})")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, hex. Raises any error from opening or reading it; a symbolic link is not followed."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
