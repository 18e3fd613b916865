"""A run of a shard file's slots as one transfer: payloads in their own memory, and the bytes between them in a buffer.

[Note: payloads in place]
Direct I/O takes memory in several places, as long as each begins and ends at a multiple of 512 bytes. A chunk's payload most
often does in the memory of its array, and so do the bytes behind it, its crc32c and zeros. Then the drive reads from
and writes to that memory itself: a byte passes the processor once, for its checksum. Any other chunk travels through the
buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import cached_property

import numpy as np

from ..format.arrays import Bytes
from ..format.shardfile import CRC_BYTES, ShardLayout, checksum, checksum_error
from .files import ScatteredMemory

_ALIGN_BYTES = 512
_LEAST_PAYLOAD_BYTES = 16 * 1024
"""Smaller payloads are cheaper to copy than to name."""
MOST_SLOTS = 500
"""Of a run with payloads in place: systems take 1,024 places in a transfer."""

Rest = Callable[[int], Bytes | None]
"""Gives the memory of a chunk's payload, all of it, by the chunk's number; None if it has none."""


class Slots:
    """Slots of chunks `[first, stop)` of a shard file, with `head` bytes of the index before them. See [Note: payloads in
    place]."""

    def __init__(self, layout: ShardLayout, first: int, stop: int, head: int = 0, rest: Rest | None = None) -> None:
        self.layout = layout
        self.first = first
        self.stop = stop
        self.head = head
        self.at_rest = [self._aligned(rest, chunk) for chunk in range(first, stop)]
        """By chunk, its payload in the memory of its array; None: it travels through the buffer."""

    def _aligned(self, rest: Rest | None, chunk: int) -> Bytes | None:
        nbytes = self.layout.payload_bytes
        if rest is None or nbytes < _LEAST_PAYLOAD_BYTES or nbytes % _ALIGN_BYTES:
            return None
        memory = rest(chunk)
        return None if memory is None or memory.ctypes.data % _ALIGN_BYTES else memory

    @property
    def offset(self) -> int:
        """The transfer's offset in the file."""
        return self.layout.slot_offset(self.first) - self.head

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the transfer."""
        return self.head + len(self.at_rest) * self.layout.slot_bytes

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes that `lay_out` needs."""
        return self.nbytes - self.layout.payload_bytes * sum(memory is not None for memory in self.at_rest)

    @property
    def is_in_buffer(self) -> bool:
        """Whether all payloads travel through the buffer."""
        return all(memory is None for memory in self.at_rest)

    def copied(self, first: int = 0) -> Iterator[tuple[int, Bytes]]:
        """Yield number and payload of the chunks, from the run's chunk `first` on, that travel through the buffer."""
        for place in range(first, len(self.at_rest)):
            if self.at_rest[place] is None:
                yield self.first + place, np.frombuffer(self.payloads[place], np.uint8)

    def lay_out(self, buffer: Bytes) -> None:
        """Place the parts without memory of their own in `buffer`, whose address is a multiple of the alignment."""
        at, begun = self.head, 0
        payload_bytes, end_bytes = self.layout.payload_bytes, self.layout.slot_bytes - self.layout.payload_bytes
        whole = buffer.data
        self.payloads: list[memoryview] = []
        """By chunk."""
        self.ends: list[memoryview] = []
        """The bytes behind each payload: its crc32c, and zeros."""
        parts: list[memoryview] = []
        for memory in self.at_rest:
            if memory is None:
                self.payloads.append(whole[at : at + payload_bytes])
                at += payload_bytes
            else:
                self.payloads.append(memory.data)
                parts += [whole[begun:at], memory.data] if at > begun else [memory.data]
                begun = at
            self.ends.append(whole[at : at + end_bytes])
            at += end_bytes
        self.index = buffer[: self.head]
        self.data: Bytes | ScatteredMemory = buffer[:at] if not parts else ScatteredMemory([*parts, whole[begun:at]])
        """The transferred bytes, in the order of the file."""

    @cached_property
    def _zeros(self) -> bytes:
        return bytes(self.layout.slot_bytes - self.layout.chunk_bytes)

    def seal(self) -> list[int]:
        """Write crc32c and zeros behind each payload; return the checksums."""
        crcs = [checksum(payload) for payload in self.payloads]
        for crc, end in zip(crcs, self.ends, strict=True):
            end[:] = struct.pack("<I", crc) + self._zeros
        return crcs

    def verify(self, *, path: str, array: str) -> list[int]:
        """Check each payload against the crc32c that follows it; return the checksums. Raises CorruptionError as
        `verify_slots` does."""
        crcs: list[int] = []
        for number, (payload, end) in enumerate(zip(self.payloads, self.ends, strict=True), start=self.first):
            stored: int = struct.unpack_from("<I", end)[0]
            if checksum(payload) != stored:
                where = self.layout.slot_offset(number)
                raise checksum_error(array, f"chunk {number}", path, where, self.layout.payload_bytes + CRC_BYTES)
            crcs.append(stored)
        return crcs


def runs(layout: ShardLayout, first: int, stop: int, step: int, rest: Rest | None, *, index: bool) -> Iterator[Slots]:
    """Yield chunks `[first, stop)` as runs of at most `step`, each made on demand: there may be millions. With `index`,
    chunk 0 comes with the index before it."""
    step = step if rest is None else min(step, MOST_SLOTS)
    for low in range(first, stop, step):
        yield Slots(layout, low, min(low + step, stop), layout.data_offset if index and low == 0 else 0, rest)
