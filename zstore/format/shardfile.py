"""Byte layout of a shard file: the index, the inner chunks and their crc32c. Pure; no I/O, no threads, no torch.

[Note: the layout of a shard file]
A shard file is a Zarr v3 shard (`sharding_indexed`, `index_location: start`) with everything at a fixed place:

    index        chunks_per_shard x (offset u64, nbytes u64), little-endian, C order; crc32c of those bytes (u32);
                 zeros up to a multiple of 4096
    slot 0..     one slot for each present chunk: payload, crc32c of the payload (u32), zeros up to a multiple of 4096

The payload is the chunk's elements, little-endian, C order; a chunk that straddles the array's end is stored whole,
with zeros. Chunks past the end are marked missing: offset and nbytes are 2**64 - 1. Since sizes are fixed, the index is
known before any data, and direct I/O can write any run of slots.
Source: Zarr v3 sharding codec specification, https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from ..errors import CorruptionError
from .arrays import Bytes, Grid, numpy_dtype, round_up

BLOCK_BYTES = 4096
_KEEP_INTERPRETER = 0
"""A chunk's checksum takes microseconds: a GIL hand-off takes longer if threads want it."""
CRC_BYTES = 4
MISSING = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """The offsets of one shard file. See [Note: the layout of a shard file]."""

    num_chunks: int
    """Entries of the index."""
    num_present: int
    """Leading chunks that are stored; the others are marked missing."""
    payload_bytes: int
    """Bytes of a chunk, without its crc32c."""

    @cached_property
    def index_bytes(self) -> int:
        """Bytes of the index with its crc32c, without the padding behind it."""
        return 16 * self.num_chunks + CRC_BYTES

    @cached_property
    def data_offset(self) -> int:
        """File offset of slot 0."""
        return round_up(self.index_bytes, BLOCK_BYTES)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a stored chunk: payload and crc32c."""
        return self.payload_bytes + CRC_BYTES

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes from one chunk to the next."""
        return round_up(self.chunk_bytes, BLOCK_BYTES)

    def chunks_in(self, nbytes: int) -> int:
        """Return how many adjacent chunks fit into `nbytes`, at least one."""
        return max(1, nbytes // self.slot_bytes)

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.data_offset + self.num_present * self.slot_bytes

    def slot_offset(self, chunk: int) -> int:
        """Return the file offset of chunk number `chunk`."""
        return self.data_offset + chunk * self.slot_bytes


@lru_cache(maxsize=4096)
def layout_of(grid: Grid, shard: int, dtype: str) -> ShardLayout:
    """Return the layout of shard number `shard` of an array on `grid` with data type `dtype`."""
    return ShardLayout(
        num_chunks=grid.chunks_per_shard,
        num_present=grid.present_chunks(shard),
        payload_bytes=grid.chunk_numel * numpy_dtype(dtype).itemsize,
    )


def encode_index(layout: ShardLayout) -> bytes:
    """Return the first `layout.data_offset` bytes of the file: index, crc32c and zeros."""
    present = np.arange(layout.num_present, dtype=np.uint64)
    return encode_entries(layout, layout.data_offset + present * np.uint64(layout.slot_bytes), layout.chunk_bytes)


@lru_cache(maxsize=256)
def small_index(layout: ShardLayout) -> Bytes:
    """Return `encode_index` of a small file, whose layout many others have."""
    return np.frombuffer(encode_index(layout), np.uint8)


def encode_entries(layout: ShardLayout, offsets: npt.ArrayLike, sizes: npt.ArrayLike) -> bytes:
    """Return an index whose present chunks are at `offsets` and have `sizes` bytes, crc32c included, with zeros behind it."""
    # In place: the index of a million chunks takes 16 MiB.
    whole = bytearray(layout.data_offset)
    body = memoryview(whole)[: 16 * layout.num_chunks]
    entries = np.frombuffer(body, dtype="<u8").reshape(-1, 2)
    entries[:] = MISSING
    entries[: layout.num_present, 0] = offsets
    entries[: layout.num_present, 1] = sizes
    struct.pack_into("<I", whole, len(body), crc32c(body))
    return bytes(whole)


def checksum_error(array: str, what: str, path: str, offset: int, nbytes: int) -> CorruptionError:
    """Return the error of stored bytes whose crc32c is not theirs."""
    return CorruptionError(
        f"array {array!r}: {what} of {path} fails its crc32c (offset {offset}, {nbytes} bytes): the file is damaged; restore "
        "it from another copy"
    )


def check_index(layout: ShardLayout, data: bytes | memoryview | Bytes, *, path: str, array: str) -> None:
    """Check that `data`, the first bytes of a shard file, is the index that `layout` says.

    Raises CorruptionError if the checksum is wrong or the entries are those of another layout.
    """
    found = bytes(data[: layout.index_bytes])
    if encode_index(layout).startswith(found) and len(found) == layout.index_bytes:
        return
    whole = len(found) == layout.index_bytes
    if whole and crc32c(found[:-CRC_BYTES]) == struct.unpack("<I", found[-CRC_BYTES:])[0]:
        raise CorruptionError(
            f"array {array!r}: the index of {path} belongs to another layout (expected {layout.num_present} chunks of "
            f"{layout.chunk_bytes} bytes); the file was replaced or the metadata changed: restore it from another copy"
        )
    raise checksum_error(array, "the index", path, 0, layout.index_bytes)


def slot_views(slots: Bytes, layout: ShardLayout) -> Bytes:
    """Return `slots`, a run of whole slots, as a view of shape [chunks, slot_bytes]."""
    return slots.reshape(-1, layout.slot_bytes)


def stored_crcs(slots: Bytes, layout: ShardLayout) -> npt.NDArray[np.uint32]:
    """Return the crc32c behind the payload of each of `slots`, a run of whole slots, as a view of them."""
    behind = slot_views(slots, layout)[:, layout.payload_bytes : layout.chunk_bytes]
    crcs: npt.NDArray[np.uint32] = behind.view("<u4")[:, 0]
    return crcs


def checksum(payload: Bytes | memoryview) -> int:
    """Return the crc32c of `payload`; the GIL is held meanwhile."""
    return crc32c(payload if isinstance(payload, memoryview) else payload.data, 0, _KEEP_INTERPRETER)


def finish_slots(slots: Bytes, layout: ShardLayout) -> list[int]:
    """Set the bytes behind the crc32c of every slot in `slots` to zero, in place; return the checksums."""
    slot_views(slots, layout)[:, layout.chunk_bytes :] = 0
    crcs: list[int] = stored_crcs(slots, layout).tolist()
    return crcs


def verify_slots(
    slots: Bytes, layout: ShardLayout, first_chunk: int, *, path: str, array: str, base: int | None = None
) -> list[int]:
    """Check the crc32c of every slot in `slots`, chunks from number `first_chunk` on; return the checksums. Errors name offsets
    in a shard file, or in a file where chunk 0 is at `base`.

    Raises CorruptionError that names array, file, chunk and offset of the first one that is wrong.
    """
    crcs: list[int] = []
    for number, slot in enumerate(slot_views(slots, layout), start=first_chunk):
        stored: int = struct.unpack_from("<I", slot, layout.payload_bytes)[0]
        if checksum(slot[: layout.payload_bytes]) != stored:
            offset = number * layout.slot_bytes + (layout.data_offset if base is None else base)
            raise checksum_error(array, f"chunk {number}", path, offset, layout.chunk_bytes)
        crcs.append(stored)
    return crcs
