"""Compressed shard files: written once from a source, and read and verified, in bounded memory."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from ..errors import CorruptionError
from ..format.arrays import ArraySpec, Bytes, Grid, round_up
from ..format.codecs import Codec, CodecError, decode_packed_index, encode_packed_index, packed_file_bytes
from ..format.shardfile import BLOCK_BYTES, CRC_BYTES, checksum_error, layout_of
from .files import NewFile
from .memory import Buffer
from .queue import Priority, Ticket, in_order, wait_all
from .shards import Fill, IoResources, ShardRange, ShardReader, ShardSummary, fill_chunk

_MAX_IN_FLIGHT = 8


def write_packed(
    res: IoResources, path: str | Path, codec: Codec, spec: ArraySpec, grid: Grid, shard: int, fill: Fill
) -> ShardSummary:
    """Create a compressed shard file from `fill`, and return its summary; the data is durable when this returns.

    `fill` is called in this thread, one chunk at a time, in order. Otherwise like `write_shard`.
    """
    layout = layout_of(grid, shard, spec.dtype)
    in_flight = max(1, min(_MAX_IN_FLIGHT, res.pool.nbytes // (2 * layout.payload_bytes)))

    def encode(buffer: Buffer) -> tuple[bytes, int]:
        with buffer:
            stored = codec.encode(buffer.bytes)
        return stored, crc32c(stored)

    def chunks() -> Iterator[Ticket[tuple[bytes, int]]]:
        for chunk in range(layout.num_present):
            buffer = res.pool.acquire(layout.payload_bytes)
            try:
                fill_chunk(buffer.bytes, fill, spec, grid, shard, chunk)
            except BaseException:
                buffer.release()
                raise
            yield res.queue.submit(partial(encode, buffer), Priority.CHECKPOINT, buffer.bytes.size)

    sizes: list[int] = []
    crcs: list[int] = []
    with contextlib.ExitStack() as opened:
        out = NewFile(res.files, path, opened)
        out.write(bytes(layout.data_offset))  # room for the index, which is written last
        for stored, crc in opened.enter_context(contextlib.closing(in_order(chunks(), in_flight))):
            out.write(stored + struct.pack("<I", crc))
            sizes.append(len(stored) + CRC_BYTES)
            crcs.append(crc)
        out.write(bytes(-out.offset % BLOCK_BYTES))
        out.patch(0, encode_packed_index(layout, sizes))
        out.finish()
    return ShardSummary(spec.name, shard, out.offset, tuple(crcs))


class PackedReader(ShardReader):
    """Reads one compressed shard file. Like `ShardReader`; also checks that chunks decode."""

    def __init__(self, res: IoResources, path: str | Path, array: tuple[ArraySpec, Grid, Codec], shard: int) -> None:
        spec, grid, self._codec = array
        self._offsets: npt.NDArray[np.int64] | None = None
        super().__init__(res, path, spec, grid, shard, check=False)

    def check_file(self) -> None:
        self.check_size()

    def check_size(self) -> None:
        """Check the index, and the size, which follows from the index."""
        actual_bytes = self._file_bytes()
        if actual_bytes < self.layout.data_offset:
            raise self._size_error(actual_bytes, self.layout.data_offset)
        self.check_index()
        expected = packed_file_bytes(int(self._chunk_offsets()[-1]))
        if actual_bytes != expected:
            raise self._size_error(actual_bytes, expected)

    def check_index(self) -> None:
        self._offsets = decode_packed_index(self.layout, self._read_index(), path=self.path, array=self.spec.name)

    def _chunk_offsets(self) -> npt.NDArray[np.int64]:
        """Return the offset of each chunk, followed by the end of the last one."""
        if self._offsets is None:
            self.check_index()
        return np.zeros(1, np.int64) if self._offsets is None else self._offsets

    def chunk_location(self, chunk: int) -> tuple[int, int]:
        first, stop = self._chunk_offsets()[chunk : chunk + 2].tolist()
        return first, stop - first

    def _scan_chunks(
        self, first_chunk: int, stop_chunk: int, target: ShardRange | None, priority: Priority
    ) -> list[int]:
        def read_span(first: int, stop: int, low: int, high: int, buffer: Buffer) -> list[int]:
            with buffer:
                stored, decoded = buffer.bytes[: high - low], buffer.bytes[high - low :][: self.layout.payload_bytes]
                with self._res.files.opened(self.path) as file:
                    self._res.files.read_into(file, stored, low)
                return [self._decode(chunk, stored, low, decoded, target) for chunk in range(first, stop)]

        offsets = self._chunk_offsets()
        tickets: list[Ticket[list[int]]] = []
        first = first_chunk
        while first < stop_chunk:
            last = int(np.searchsorted(offsets, offsets[first] + self._res.request_bytes, side="right")) - 1
            stop = min(max(first + 1, last), stop_chunk)
            low = int(offsets[first]) // BLOCK_BYTES * BLOCK_BYTES
            high = round_up(int(offsets[stop]), BLOCK_BYTES)
            buffer = self._res.pool.acquire(high - low + self.layout.payload_bytes)
            self.read_bytes += high - low
            tickets.append(
                self._res.queue.submit(partial(read_span, first, stop, low, high, buffer), priority, high - low)
            )
            first = stop
        return [crc for part in wait_all(tickets) for crc in part]

    def _decode(self, chunk: int, stored: Bytes, base: int, decoded: Bytes, target: ShardRange | None) -> int:
        """Decode chunk number `chunk` from `stored`, the file's bytes from offset `base` on; return its crc32c."""
        offset, nbytes = self.chunk_location(chunk)
        data = stored[offset - base : offset - base + nbytes - CRC_BYTES]
        crc: int = struct.unpack_from("<I", stored.data, offset - base + data.size)[0]
        if crc32c(data.data) != crc:
            raise checksum_error(self.spec.name, f"chunk {chunk}", self.path, offset, nbytes)
        try:
            self._codec.decode(data, decoded)
        except CodecError as error:
            raise CorruptionError(
                f"array {self.spec.name!r}: chunk {chunk} of {self.path} (offset {offset}, {nbytes} bytes): {error}: the file "
                "is damaged; restore it from another copy"
            ) from error
        if target is not None:
            target.take(chunk, decoded[np.newaxis])
        return crc
