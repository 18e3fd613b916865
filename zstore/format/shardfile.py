"""Byte layout of a shard file: the index, the inner chunks and their crc32c, and runs of them as transfers. Pure; no I/O, no
threads, no torch.

[Note: the layout of a shard file]
A shard file is a Zarr v3 shard (`sharding_indexed`, `index_location: start`) with everything at a fixed place:

    index        chunks_per_shard x (offset u64, nbytes u64), little-endian, C order; crc32c of those bytes (u32);
                 zeros up to a multiple of 4096
    slot 0..     one slot for each present chunk: payload, crc32c of the payload (u32), zeros up to a multiple of 4096

The payload is the chunk's elements, little-endian, C order; a chunk that straddles the array's end is stored whole,
padded with zeros. Chunks past the end are marked missing: offset and nbytes are 2**64 - 1. Since sizes are fixed, the index
is known before any data, and direct I/O can write any run of slots.
Source: Zarr v3 sharding codec specification, https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/

[Note: payloads in place]
Vectored direct I/O accepts several memory segments, as long as each begins and ends at a multiple of 512 bytes. A chunk's
payload usually does in the memory of its array, as do the crc32c and zeros after it. Then the drive reads from and writes to
that memory itself: each byte passes through the CPU only once, for the checksum. Any other chunk travels through a buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from ..errors import CorruptionError
from .arrays import Bytes, Grid, numpy_dtype, round_up

BLOCK_BYTES = 4096
_HOLD_GIL = 0
"""A chunk's checksum takes microseconds: a GIL hand-off takes longer if threads want it."""
CRC_BYTES = 4
MISSING = 2**64 - 1
_ALIGN_BYTES = 512
_MIN_DIRECT_BYTES = 16 * 1024
"""Smaller payloads are cheaper to copy than to transfer as separate segments."""
MAX_SLOTS = 500
"""Maximum number of slots in a run with payloads in place; systems accept at most 1,024 segments per transfer (IOV_MAX)."""

PayloadMemory = Callable[[int], Bytes | None]
"""Returns the memory of a chunk's whole payload, by the chunk's number; None if it has none."""


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """The offsets of one shard file. See [Note: the layout of a shard file]."""

    num_chunks: int
    """Entries of the index."""
    num_present: int
    """Number of leading chunks that are stored; the others are marked missing."""
    payload_bytes: int
    """Bytes of a chunk, without its crc32c."""

    @cached_property
    def index_bytes(self) -> int:
        """Bytes of the index with its crc32c, without the padding after it."""
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
    """Return `encode_index` of a small file, whose layout many files share."""
    return np.frombuffer(encode_index(layout), np.uint8)


def encode_entries(layout: ShardLayout, offsets: npt.ArrayLike, sizes: npt.ArrayLike) -> bytes:
    """Return an index whose present chunks are at `offsets` and have `sizes` bytes, crc32c included, with zeros after it."""
    # In place: the index of a million chunks takes 16 MiB.
    data = bytearray(layout.data_offset)
    body = memoryview(data)[: 16 * layout.num_chunks]
    entries = np.frombuffer(body, dtype="<u8").reshape(-1, 2)
    entries[:] = MISSING
    entries[: layout.num_present, 0] = offsets
    entries[: layout.num_present, 1] = sizes
    struct.pack_into("<I", data, len(body), crc32c(body))
    return bytes(data)


def checksum_error(array: str, what: str, path: str, offset: int, nbytes: int) -> CorruptionError:
    """Return the error for stored bytes that do not match their crc32c."""
    return CorruptionError(
        f"array {array!r}: {what} of {path} fails its crc32c check (offset {offset}, {nbytes} bytes): the file is damaged; "
        "restore it from another copy"
    )


def check_index(layout: ShardLayout, data: bytes | memoryview | Bytes, *, path: str, array: str) -> None:
    """Check that `data`, the first bytes of a shard file, is the index of `layout`.

    Raises CorruptionError if the checksum is wrong or the entries belong to another layout.
    """
    index = bytes(data[: layout.index_bytes])
    if encode_index(layout).startswith(index) and len(index) == layout.index_bytes:
        return
    is_complete = len(index) == layout.index_bytes
    if is_complete and crc32c(index[:-CRC_BYTES]) == struct.unpack("<I", index[-CRC_BYTES:])[0]:
        raise CorruptionError(
            f"array {array!r}: the index of {path} belongs to another layout (expected {layout.num_present} chunks of "
            f"{layout.chunk_bytes} bytes); the file was replaced or the metadata changed: restore it from another copy"
        )
    raise checksum_error(array, "the index", path, 0, layout.index_bytes)


def slot_views(slots: Bytes, layout: ShardLayout) -> Bytes:
    """Return `slots`, a run of whole slots, as a view of shape [chunks, slot_bytes]."""
    return slots.reshape(-1, layout.slot_bytes)


def stored_crcs(slots: Bytes, layout: ShardLayout) -> npt.NDArray[np.uint32]:
    """Return the crc32c after the payload of each of `slots`, a run of whole slots, as a view of them."""
    tails = slot_views(slots, layout)[:, layout.payload_bytes : layout.chunk_bytes]
    crcs: npt.NDArray[np.uint32] = tails.view("<u4")[:, 0]
    return crcs


def checksum(payload: Bytes | memoryview) -> int:
    """Return the crc32c of `payload`, computed while holding the GIL."""
    return crc32c(payload if isinstance(payload, memoryview) else payload.data, 0, _HOLD_GIL)


def finish_slots(slots: Bytes, layout: ShardLayout) -> list[int]:
    """Set the bytes after the crc32c of every slot in `slots` to zero, in place; return the checksums."""
    slot_views(slots, layout)[:, layout.chunk_bytes :] = 0
    crcs: list[int] = stored_crcs(slots, layout).tolist()
    return crcs


def verify_slots(
    slots: Bytes, layout: ShardLayout, first_chunk: int, *, path: str, array: str, base: int | None = None
) -> list[int]:
    """Check the crc32c of every slot in `slots`, starting with chunk number `first_chunk`; return the checksums. Errors name
    offsets in a shard file, or in a file where chunk 0 is at `base`.

    Raises CorruptionError naming array, file, chunk and offset of the first wrong chunk.
    """
    crcs: list[int] = []
    for number, slot in enumerate(slot_views(slots, layout), start=first_chunk):
        stored: int = struct.unpack_from("<I", slot, layout.payload_bytes)[0]
        if checksum(slot[: layout.payload_bytes]) != stored:
            offset = number * layout.slot_bytes + (layout.data_offset if base is None else base)
            raise checksum_error(array, f"chunk {number}", path, offset, layout.chunk_bytes)
        crcs.append(stored)
    return crcs


class ScatteredMemory:
    """Several memory segments for one transfer, as if it were one array of `size` bytes."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.views = views
        """Byte arrays, each contiguous, in the order of the file."""
        self.size = sum(view.nbytes for view in views)

    def __getitem__(self, part: slice) -> ScatteredMemory:
        """Return a view of a part of it, sharing its memory."""
        start, stop, _ = part.indices(self.size)
        pieces: list[memoryview] = []
        offset = 0
        for view in self.views:
            if piece := view[max(0, start - offset) : max(0, stop - offset)]:
                pieces.append(piece)
            offset += view.nbytes
        return ScatteredMemory(pieces)

    def fill(self, data: bytes | Bytes) -> None:
        """Copy `data`, of the same size, into the segments."""
        source, offset = np.frombuffer(data, np.uint8).data, 0
        for view in self.views:
            view[:] = source[offset : offset + view.nbytes]
            offset += view.nbytes

    def copy_into(self, out: Bytes) -> None:
        """Copy the segments' bytes into `out`, of the same size."""
        target, offset = out.data, 0
        for view in self.views:
            target[offset : offset + view.nbytes] = view
            offset += view.nbytes


class Slots:
    """Slots of chunks `[first, stop)`, after `head` bytes of the index. See [Note: payloads in place]."""

    def __init__(
        self, layout: ShardLayout, first: int, stop: int, head: int = 0, memory_of: PayloadMemory | None = None
    ) -> None:
        self.layout = layout
        self.first = first
        self.stop = stop
        self.head = head
        self.in_place = [self._aligned(memory_of, chunk) for chunk in range(first, stop)]
        """The payloads by chunk, in the memory of the array; None: it travels through the buffer."""

    def _aligned(self, memory_of: PayloadMemory | None, chunk: int) -> Bytes | None:
        nbytes = self.layout.payload_bytes
        if memory_of is None or nbytes < _MIN_DIRECT_BYTES or nbytes % _ALIGN_BYTES:
            return None
        memory = memory_of(chunk)
        return None if memory is None or memory.ctypes.data % _ALIGN_BYTES else memory

    @property
    def offset(self) -> int:
        """The transfer's offset in the file."""
        return self.layout.slot_offset(self.first) - self.head

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the transfer."""
        return self.head + len(self.in_place) * self.layout.slot_bytes

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes that `lay_out` needs."""
        return self.nbytes - self.layout.payload_bytes * sum(memory is not None for memory in self.in_place)

    @property
    def is_in_buffer(self) -> bool:
        """Whether all payloads travel through the buffer."""
        return all(memory is None for memory in self.in_place)

    def buffered(self, first: int = 0) -> Iterator[tuple[int, Bytes]]:
        """Yield the number and payload of each chunk that travels through the buffer, starting with the run's chunk `first`."""
        for number in range(first, len(self.in_place)):
            if self.in_place[number] is None:
                yield self.first + number, np.frombuffer(self.payloads[number], np.uint8)

    def lay_out(self, buffer: Bytes) -> None:
        """Place the parts that travel through the buffer in `buffer`, whose address is a multiple of the alignment."""
        offset, part_start = self.head, 0
        payload_bytes, trailer_bytes = self.layout.payload_bytes, self.layout.slot_bytes - self.layout.payload_bytes
        memory = buffer.data
        self.payloads: list[memoryview] = []
        """The payloads by chunk."""
        self.trailers: list[memoryview] = []
        """The bytes after each payload: its crc32c, and zeros."""
        parts: list[memoryview] = []
        for payload in self.in_place:
            if payload is None:
                self.payloads.append(memory[offset : offset + payload_bytes])
                offset += payload_bytes
            else:
                self.payloads.append(payload.data)
                parts += [memory[part_start:offset], payload.data] if offset > part_start else [payload.data]
                part_start = offset
            self.trailers.append(memory[offset : offset + trailer_bytes])
            offset += trailer_bytes
        self.index = buffer[: self.head]
        last = memory[part_start:offset]
        self.data: Bytes | ScatteredMemory = ScatteredMemory([*parts, last]) if parts else buffer[:offset]
        """The transferred bytes, in the order of the file."""

    @cached_property
    def _zeros(self) -> bytes:
        return bytes(self.layout.slot_bytes - self.layout.chunk_bytes)

    def seal(self) -> list[int]:
        """Write crc32c and zeros after each payload; return the checksums."""
        crcs = [checksum(payload) for payload in self.payloads]
        for crc, end in zip(crcs, self.trailers, strict=True):
            end[:] = struct.pack("<I", crc) + self._zeros
        return crcs

    def verify(self, *, path: str, array: str) -> list[int]:
        """Check each payload against its stored crc32c; return the checksums. Raises as `verify_slots` does."""
        crcs: list[int] = []
        for number, (payload, end) in enumerate(zip(self.payloads, self.trailers, strict=True), start=self.first):
            stored: int = struct.unpack_from("<I", end)[0]
            if checksum(payload) != stored:
                offset = self.layout.slot_offset(number)
                raise checksum_error(array, f"chunk {number}", path, offset, self.layout.payload_bytes + CRC_BYTES)
            crcs.append(stored)
        return crcs


def runs(
    layout: ShardLayout, first: int, stop: int, step: int, memory_of: PayloadMemory | None, *, index: bool
) -> Iterator[Slots]:
    """Yield chunks `[first, stop)` as runs of at most `step`, each made on demand: there may be millions. With `index`, chunk
    0 is preceded by the index."""
    step = step if memory_of is None else min(step, MAX_SLOTS)
    for low in range(first, stop, step):
        yield Slots(layout, low, min(low + step, stop), layout.data_offset if index and low == 0 else 0, memory_of)
