"""Writes what torch.load reads, with values that come in pieces: a pickle of tensors, and a zip archive. No torch.

[Note: the archive]
An archive has `archive/data.pkl`, which names storages by number, `archive/data/<number>` with their bytes, each at a
multiple of 64, and two small entries. All sizes are known beforehand; checksums are not, and are put into the entries'
headers when the data went by. Offsets are counted from where the archive begins: it may be one of many in a file.
Source: torch/serialization.py; PKWARE's APPNOTE, sections 4.3 to 4.5.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError, UsageError
from ..format.arrays import numpy_dtype

Bytes = npt.NDArray[np.uint8]

_STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}
"""Data types of which torch has a class of storages; the others are bytes with the type beside them."""
_ALIGN_BYTES = 64
_MOST_32 = 0xFFFFFFFF
_MOST_16 = 0xFFFF
_DATE = 0x21
"""The first day that a zip archive can name."""


@dataclass(frozen=True)
class Tensor:
    """A tensor in C order that is all of storage number `storage`."""

    storage: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * numpy_dtype(self.dtype).itemsize


# -- the pickle ------------------------------------------------------------------------------------------------------


def pickle_of(value: Any) -> bytes:
    """Return the pickle, protocol 2, of plain data and `Tensor`s. Raises UsageError for anything else."""
    out = bytearray(b"\x80\x02")
    _emit(value, out)
    return bytes(out + b".")


def _emit(value: Any, out: bytearray) -> None:
    kind = type(value)
    if value is None or kind is bool:
        out += {None: b"N", True: b"\x88", False: b"\x89"}[value]
    elif kind is int:
        _emit_int(value, out)
    elif kind is float:
        out += b"G" + struct.pack(">d", value)
    elif kind is str:
        text = value.encode("utf-8", "surrogatepass")
        out += b"X" + struct.pack("<I", len(text)) + text
    elif kind is bytes:
        _emit_call("_codecs", "encode", (value.decode("latin1"), "latin1"), out)
    elif kind is list:
        out += b"]("
        for item in value:
            _emit(item, out)
        out += b"e"
    elif kind is tuple:
        out += b"("
        for item in value:
            _emit(item, out)
        out += b"t"
    elif kind is dict:
        out += b"}("
        for key, item in value.items():
            _emit(key, out)
            _emit(item, out)
        out += b"u"
    elif isinstance(value, Tensor):
        _emit_tensor(value, out)
    else:
        raise UsageError(f"a {kind.__module__}.{kind.__qualname__} cannot be written for torch: expected plain data")


def _emit_int(value: int, out: bytearray) -> None:
    if -(2**31) <= value < 2**31:
        out += b"J" + struct.pack("<i", value)
    else:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(data) > 255:
            raise UsageError("a whole number of over 255 bytes cannot be written for torch")
        out += b"\x8a" + bytes([len(data)]) + data


def _emit_global(module: str, name: str, out: bytearray) -> None:
    out += f"c{module}\n{name}\n".encode()


def _emit_call(module: str, name: str, args: tuple[Any, ...], out: bytearray) -> None:
    _emit_global(module, name, out)
    _emit(args, out)
    out += b"R"


def _emit_tensor(tensor: Tensor, out: bytearray) -> None:
    typed = tensor.dtype in _STORAGES
    _emit_global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3", out)
    out += b"(("
    _emit("storage", out)
    if typed:
        _emit_global("torch", _STORAGES[tensor.dtype], out)
    else:
        _emit_global("torch.storage", "UntypedStorage", out)
    for part in (str(tensor.storage), "cpu", tensor.numel if typed else tensor.nbytes):
        _emit(part, out)
    out += b"tQ"
    strides = tuple(math.prod(tensor.shape[dim + 1 :]) for dim in range(len(tensor.shape)))
    for rest in (0, tensor.shape, strides, False):
        _emit(rest, out)
    _emit_call("collections", "OrderedDict", (), out)
    if not typed:
        _emit_global("torch", tensor.dtype, out)
    out += b"tR"


# -- the archive -----------------------------------------------------------------------------------------------------


class Sink(Protocol):
    """A file that is written from its beginning to its end."""

    offset: int
    """Bytes that were written so far."""

    def write(self, data: bytes | Bytes) -> None:
        """Write at the end."""

    def patch(self, offset: int, data: bytes) -> None:
        """Replace bytes that were written."""


@dataclass
class _Entry:
    name: bytes
    nbytes: int
    header: int
    """Where its header is, from the beginning of the archive."""
    crc: int = 0


class Archive:
    """One archive on its way into `sink`. Calls: `begin` with what torch.load is to return; then for each storage, by
    number, `put` until it is complete; `finish`.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._base = sink.offset
        self._entries: list[_Entry] = []
        self._left = 0
        self._sizes: list[int] = []
        self._next = 0

    def begin(self, value: Any, storages: Sequence[int]) -> None:
        """Write the pickle of `value`, whose tensors have storages of these sizes, in bytes."""
        self._sizes = list(storages)
        self._whole("archive/data.pkl", pickle_of(value))
        self._whole("archive/byteorder", b"little")
        self._open_next()

    def _whole(self, name: str, data: bytes) -> None:
        self._open(name, len(data))
        self._write(np.frombuffer(data, np.uint8))
        self._close()

    def _open_next(self) -> None:
        """Begin the next storage; those without bytes are complete at once."""
        while self._next < len(self._sizes):
            self._open(f"archive/data/{self._next}", self._sizes[self._next])
            self._next += 1
            if self._left:
                return
            self._close()

    def put(self, data: Bytes) -> None:
        """Write more of the storage that is not complete."""
        if data.size > self._left:
            raise CheckpointError(f"a storage was given {data.size - self._left} bytes too many; this is a bug")
        self._write(data)
        if data.size and not self._left:
            self._close()
            self._open_next()

    def finish(self) -> int:
        """Write the archive's directory; return the bytes of the archive."""
        if self._left or self._next < len(self._sizes):
            raise CheckpointError("an archive was ended before all storages were complete; this is a bug")
        self._whole("archive/version", b"3\n")
        start = self._sink.offset - self._base
        for entry in self._entries:
            self._sink.write(_directory_entry(entry))
        self._sink.write(_directory_end(len(self._entries), start, self._sink.offset - self._base - start))
        return self._sink.offset - self._base

    def _open(self, name: str, nbytes: int) -> None:
        entry = _Entry(name.encode(), nbytes, self._sink.offset - self._base)
        self._entries.append(entry)
        self._sink.write(_header(entry))
        self._left = nbytes

    def _write(self, data: Bytes) -> None:
        entry = self._entries[-1]
        entry.crc = zlib.crc32(data.data, entry.crc)
        self._sink.write(data)
        self._left -= data.size

    def _close(self) -> None:
        entry = self._entries[-1]
        self._sink.patch(self._base + entry.header + 14, struct.pack("<I", entry.crc))


def _header(entry: _Entry) -> bytes:
    large = entry.nbytes >= _MOST_32
    extra = struct.pack("<HHQQ", 1, 16, entry.nbytes, entry.nbytes) if large else b""
    # Padding, in a field of its own, so that the data begin at a multiple of 64.
    before = entry.header + 30 + len(entry.name) + len(extra) + 4
    padding = -before % _ALIGN_BYTES
    extra += struct.pack("<HH", 0x4246, padding) + bytes(padding)
    size = _MOST_32 if large else entry.nbytes
    version = 45 if large else 20
    fields = (0x04034B50, version, 0, 0, 0, _DATE, 0, size, size, len(entry.name), len(extra))
    return struct.pack("<IHHHHHIIIHH", *fields) + entry.name + extra


def _directory_entry(entry: _Entry) -> bytes:
    large, far = entry.nbytes >= _MOST_32, entry.header >= _MOST_32
    wide = b"".join(
        struct.pack("<Q", n) for n in ((entry.nbytes, entry.nbytes) if large else ()) + ((entry.header,) if far else ())
    )
    extra = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
    size = _MOST_32 if large else entry.nbytes
    version = 45 if wide else 20
    fields = (0x02014B50, version, version, 0, 0, 0, _DATE, entry.crc, size, size, len(entry.name), len(extra))
    tail = struct.pack("<HHHII", 0, 0, 0, 0, _MOST_32 if far else entry.header)
    return struct.pack("<IHHHHHHIIIHH", *fields) + tail + entry.name + extra


def _directory_end(count: int, start: int, nbytes: int) -> bytes:
    out = b""
    if start >= _MOST_32 or nbytes >= _MOST_32 or count >= _MOST_16:
        wide = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, nbytes, start)
        out += wide + struct.pack("<IIQI", 0x07064B50, 0, start + nbytes, 1)
    few = min(count, _MOST_16)
    return out + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, few, few, min(nbytes, _MOST_32), min(start, _MOST_32), 0)
