"""Writes files for torch.load, with values that come in pieces: a pickle of tensors, and a zip archive. No torch.

[Note: the archive]
An archive has `archive/data.pkl`, which names storages by number, `archive/data/<number>` with their bytes, each at a
multiple of 64 (so that torch.load can map them), and two small entries. Offsets are counted from the byte at which the archive
begins: it may be one of many in a file.
Source: torch/serialization.py.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from ..errors import CheckpointError, UsageError
from ..format.arrays import Bytes, Shaped
from ..io.files import NewFile
from .pickles import Global, PickledObject
from .torchfile import STORAGES

_CLASSES = {dtype: f"{name}Storage" for name, dtype in STORAGES.items()}
"""Data types of which torch has a class of storages; the others are bytes with the type beside them."""
_CONTAINERS: dict[type, tuple[bytes, bytes]] = {list: (b"](", b"e"), tuple: (b"(", b"t"), dict: (b"}(", b"u")}
"""Opcodes before the items, and behind them."""
_ALIGN_BYTES = 64
_PADDING = 0x4246
"""Kind of an extra field that torch itself pads with."""
_HEADER_BYTES, _ZIP64_FIELD_BYTES = 30, 20


@dataclass(frozen=True)
class Tensor(Shaped):
    """A tensor in C order that is all of storage number `storage`."""

    storage: int
    shape: tuple[int, ...]
    dtype: str


# -- the pickle ------------------------------------------------------------------------------------------------------


def pickle_of(value: Any) -> bytes:
    """Return the pickle, protocol 2, of plain data, `Tensor`s, and classes and objects by name: of an object without a
    state the class is called with its arguments. Raises UsageError for anything else."""
    out = bytearray(b"\x80\x02")
    _emit(value, out)
    return bytes(out + b".")


def _emit(value: Any, out: bytearray) -> None:
    kind = type(value)
    if value is None or kind is bool:
        out += {None: b"N", True: b"\x88", False: b"\x89"}[value]
    elif kind is int:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(data) > 255:
            raise UsageError("an integer of over 255 bytes cannot be written for torch")
        out += b"\x8a" + bytes([len(data)]) + data
    elif kind is float:
        out += b"G" + struct.pack(">d", value)
    elif kind is str:
        text = value.encode("utf-8", "surrogatepass")
        out += b"X" + struct.pack("<I", len(text)) + text
    elif kind is bytes:
        _emit_call("_codecs.encode", (value.decode("latin1"), "latin1"), out)
    elif kind in _CONTAINERS:
        opening, closing = _CONTAINERS[kind]
        out += opening
        for item in chain.from_iterable(value.items()) if kind is dict else value:
            _emit(item, out)
        out += closing
    elif isinstance(value, Tensor):
        _emit_tensor(value, out)
    elif isinstance(value, Global):
        _emit_global(value.name, out)
    elif isinstance(value, PickledObject):
        _emit_object(value, out)
    else:
        raise UsageError(f"a {kind.__module__}.{kind.__qualname__} cannot be written for torch: expected plain data")


def _emit_global(name: str, out: bytearray) -> None:
    module, _, rest = name.rpartition(".")
    out += f"c{module}\n{rest}\n".encode()


def _emit_call(name: str, args: tuple[Any, ...], out: bytearray) -> None:
    _emit_global(name, out)
    _emit(args, out)
    out += b"R"


def _emit_object(value: PickledObject, out: bytearray) -> None:
    if value.state is None:
        _emit_call(value.name, value.args, out)
        return
    _emit_global(value.name, out)
    _emit(value.args, out)
    out += b"\x81"
    _emit(value.state, out)
    out += b"b"


def _emit_tensor(tensor: Tensor, out: bytearray) -> None:
    typed = tensor.dtype in _CLASSES
    _emit_global(f"torch._utils._rebuild_tensor_v{2 if typed else 3}", out)
    out += b"(("
    _emit("storage", out)
    _emit_global(f"torch.{_CLASSES[tensor.dtype]}" if typed else "torch.storage.UntypedStorage", out)
    for part in (str(tensor.storage), "cpu", tensor.numel if typed else tensor.nbytes):
        _emit(part, out)
    out += b"tQ"
    strides = tuple(math.prod(tensor.shape[dim + 1 :]) for dim in range(len(tensor.shape)))
    for rest in (0, tensor.shape, strides, False):
        _emit(rest, out)
    _emit_call("collections.OrderedDict", (), out)
    if not typed:
        _emit_global(f"torch.{tensor.dtype}", out)
    out += b"tR"


# -- the archive -----------------------------------------------------------------------------------------------------


class _ArchiveFile(io.RawIOBase):
    """A sink from its present end on, as a separate file."""

    def __init__(self, sink: NewFile) -> None:
        self._sink = sink
        self._base = self._at = sink.offset

    def write(self, data: Any) -> int:
        part = np.frombuffer(data, np.uint8)
        if self._at == self._sink.offset:
            self._sink.write(part)
        else:
            self._sink.patch(self._at, part.tobytes())
        self._at += part.size
        return part.size

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = self._base + offset
        return offset

    def tell(self) -> int:
        return self._at - self._base


def write_archive(sink: NewFile, value: Any, storages: Iterable[tuple[int, Iterable[Bytes]]] = ()) -> int:
    """Write, at the end of `sink`, an archive from which torch.load returns `value`; return its bytes.

    `storages` are those that the tensors in `value` name, in the order of their numbers: how many bytes each has, and
    its content in parts, which are asked for as they are written.
    """
    file = _ArchiveFile(sink)
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in (("data.pkl", pickle_of(value)), ("byteorder", b"little")):
            _add(archive, file.tell(), name, len(data), [np.frombuffer(data, np.uint8)])
        for number, (nbytes, parts) in enumerate(storages):
            _add(archive, file.tell(), f"data/{number}", nbytes, parts)
        _add(archive, file.tell(), "version", 2, [np.frombuffer(b"3\n", np.uint8)])
    return file.tell()


def _add(archive: zipfile.ZipFile, start: int, name: str, nbytes: int, parts: Iterable[Bytes]) -> None:
    """Write an entry of `nbytes` at offset `start` of the archive."""
    info = zipfile.ZipInfo(f"archive/{name}")
    wide = nbytes >= zipfile.ZIP64_LIMIT // 2  # said, since zipfile would guess
    # Padding, in an extra field of its own, so that the data begin at a multiple of 64.
    header_bytes = _HEADER_BYTES + len(info.filename) + (_ZIP64_FIELD_BYTES if wide else 0) + 4
    padding = -(start + header_bytes) % _ALIGN_BYTES
    info.extra = struct.pack("<HH", _PADDING, padding) + bytes(padding)
    with archive.open(info, "w", force_zip64=wide) as out:
        done = sum(out.write(part.data) for part in parts)
    if done != nbytes:
        raise CheckpointError(f"{name} of an archive was given {done} bytes, expected {nbytes}; this is a bug")
