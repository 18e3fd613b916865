"""A plain program that makes and loads a checkpoint's files: the same bytes, files, checksums and flushes, and nothing else.
What this machine can do at most, for `bench.checkpoint`.

It has no queue, priorities, budget, pins or checks of what it is given, reports no errors, and commits nothing: threads take
spans of a list. Payloads go straight between the files and the memory of the state, as in `zstore.format.shardfile`.
"""

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from crc32c import crc32c

from bench.limits import in_threads
from zstore.checkpoint.reader import CheckpointReader
from zstore.format.arrays import Bytes
from zstore.format.shardfile import ShardLayout, encode_index, layout_of

_SPAN_BYTES = 4 * 1024 * 1024
_ALIGN_BYTES = 512
_DIRECT: int = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class Shard:
    """A shard file, and the memory of its elements, without padding, aligned as direct I/O wants it."""

    file: str
    layout: ShardLayout
    memory: Bytes


@dataclass(frozen=True)
class Files:
    """All files of a checkpoint of one rank."""

    shards: Sequence[Shard]
    others: Mapping[str, bytes]


def files_of(reader: CheckpointReader, memories: Mapping[str, Bytes]) -> Files:
    """Return what a checkpoint consists of; `memories` has the elements of its arrays."""
    shards = [
        Shard(array.shard_file(0), layout_of(array.grid, 0, array.spec.dtype), memories[name])
        for name, array in reader.arrays.items()
        if memories[name].size
    ]
    known = {shard.file for shard in shards}
    found = {path.relative_to(reader.path).as_posix(): path for path in reader.path.rglob("*") if path.is_file()}
    return Files(shards, {name: path.read_bytes() for name, path in found.items() if name not in known})


class _Span:
    """Chunks `[first, stop)` of a shard, with the index before chunk 0."""

    def __init__(self, shard: Shard, first: int, stop: int) -> None:
        self.shard, self.first, self.stop = shard, first, stop
        self.head = shard.layout.data_offset if first == 0 else 0
        self.is_whole = first == 0 and stop == shard.layout.num_present

    @property
    def offset(self) -> int:
        return self.shard.layout.slot_offset(self.first) - self.head

    def lay_out(self, buffer: Bytes) -> tuple[list[memoryview], list[memoryview], list[memoryview]]:
        """Return each payload, what follows each, and all that travels, in the order of the file."""
        memory, layout, at = self.shard.memory.data, self.shard.layout, self.head
        size, end_bytes = layout.payload_bytes, layout.slot_bytes - layout.payload_bytes
        payloads: list[memoryview] = []
        ends: list[memoryview] = []
        parts = [buffer[: self.head].data] if self.head else []
        for chunk in range(self.first, self.stop):
            payload = memory[chunk * size : (chunk + 1) * size]
            if payload.nbytes < size or size % _ALIGN_BYTES:
                payload = buffer[at : at + size].data
                at += size
            payloads.append(payload)
            ends.append(buffer[at : at + end_bytes].data)
            at += end_bytes
            parts += [payloads[-1], ends[-1]]
        return payloads, ends, parts

    def copied(self, payloads: Sequence[memoryview]) -> Iterable[tuple[memoryview, memoryview]]:
        """Yield the payloads that are not where the elements are, and where these are."""
        size, memory = self.shard.layout.payload_bytes, self.shard.memory.data
        for chunk, payload in enumerate(payloads, start=self.first):
            elements = memory[chunk * size : (chunk + 1) * size]
            if elements.nbytes < size or size % _ALIGN_BYTES:
                yield payload, elements


def _spans(files: Files) -> list[_Span]:
    spans: list[_Span] = []
    for shard in files.shards:
        count = shard.layout.num_present
        step = min(shard.layout.chunks_in(_SPAN_BYTES), 500)  # systems take 1,024 places in a transfer
        spans += [_Span(shard, first, min(first + step, count)) for first in range(0, count, step)]
    return spans


def save(files: Files, folder: Path, num_threads: int = 8) -> None:
    """Write all files below `folder`, and return when they are durable."""
    names = [*files.others, *(shard.file for shard in files.shards)]
    folders = sorted({os.path.dirname(name) for name in names})
    for name in folders:
        (folder / name).mkdir(parents=True, exist_ok=True)
    opened: dict[str, int] = {}

    def create(shard: Shard) -> int:
        fd = os.open(folder / shard.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _DIRECT, 0o444)
        opened[shard.file] = fd
        return fd

    def write(span: _Span, buffer: Bytes) -> None:
        layout = span.shard.layout
        payloads, ends, parts = span.lay_out(buffer)
        if span.head:
            buffer[: span.head] = np.frombuffer(encode_index(layout), np.uint8)
        for payload, elements in span.copied(payloads):
            payload[:] = bytes(elements).ljust(layout.payload_bytes, b"\0")
        for payload, end in zip(payloads, ends, strict=True):
            end[:] = struct.pack("<I", crc32c(payload, 0, 0)).ljust(end.nbytes, b"\0")
        fd = create(span.shard) if span.is_whole else opened[span.shard.file]
        if os.pwritev(fd, parts, span.offset) != sum(part.nbytes for part in parts):
            raise OSError(f"{span.shard.file}: a short write")

    def write_other(file: str, _: Bytes) -> None:
        opened[file] = os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
        os.write(opened[file], files.others[file])

    def flush(fd: int, _: Bytes) -> None:
        os.fdatasync(fd)
        os.close(fd)

    spans = _spans(files)
    for span in spans:
        if span.first == 0 and not span.is_whole:
            os.posix_fallocate(create(span.shard), 0, span.shard.layout.file_bytes)
    in_threads(num_threads, spans, write, 2 * _SPAN_BYTES)
    in_threads(num_threads, files.others, write_other)
    in_threads(num_threads, [*opened.values(), *(os.open(folder / name, os.O_RDONLY) for name in folders)], flush)


def load(files: Files, folder: Path, num_threads: int = 8) -> None:
    """Read all shard files below `folder` into the memory of their elements, and check them."""
    opened = {shard.file: os.open(folder / shard.file, os.O_RDONLY | _DIRECT) for shard in files.shards}

    def read(span: _Span, buffer: Bytes) -> None:
        payloads, ends, parts = span.lay_out(buffer)
        if os.preadv(opened[span.shard.file], parts, span.offset) != sum(part.nbytes for part in parts):
            raise OSError(f"{span.shard.file}: a short read")
        if span.head and bytes(buffer[: span.head]) != encode_index(span.shard.layout):
            raise ValueError(f"{span.shard.file}: a damaged index")
        for payload, end in zip(payloads, ends, strict=True):
            if crc32c(payload, 0, 0) != struct.unpack_from("<I", end)[0]:
                raise ValueError(f"{span.shard.file}: a damaged chunk")
        for payload, elements in span.copied(payloads):
            elements[:] = payload[: elements.nbytes]

    in_threads(num_threads, _spans(files), read, 2 * _SPAN_BYTES)
    for fd in opened.values():
        os.close(fd)
