"""Files of `torch.save`: their objects, with tensors that are read in ranges from the file. No torch.

[Note: the files]
Since torch 1.6 a file is a zip archive: `<name>/data.pkl`, a pickle, and beside it one entry, not compressed, for each
storage, `<name>/data/<key>`; the pickle refers to them by key. Before that, and if a caller of `torch.save` asks for
it, a file is five pickles (a magic number, a protocol, facts about the machine, the object, the storages' keys in order)
and then each storage: its number of elements, 8 bytes, and the elements.
The pickles are read by `zstore.interop.pickles`; a name from a pickle is looked up, and never used as a path.
Source: torch/serialization.py and torch/_utils.py of torch 2.
"""

from __future__ import annotations

import io
import math
import os
import stat
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointMismatchError, CorruptionError, storage_error
from ..format.arrays import Bytes, Shaped, numpy_dtype
from ..io.files import Files
from .pickles import MAX_PICKLE_BYTES, Global, Table, inert, load_pickle

_MAX_READ_BYTES = 32 * 1024 * 1024
_MAX_END_BYTES = 1024 * 1024
"""More bytes than an archive has behind its directory."""
_MAX_NUMEL = 2**48
MAX_DIMS = 64
"""Most dimensions of a tensor."""
_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_LOCAL_HEADER_BYTES = 30

STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}
_ITEMSIZES = {"complex128": 16, "complex64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1}
_DTYPES = (*STORAGES.values(), "uint16", "uint32", "uint64", *_ITEMSIZES)
_ALIASES = {"float": "float32", "double": "float64", "half": "float16", "long": "int64", "int": "int32"}


def _itemsize(dtype: str) -> int:
    return _ITEMSIZES[dtype] if dtype in _ITEMSIZES else numpy_dtype(dtype).itemsize


@dataclass(eq=False)
class Storage:
    """Bytes `[offset, offset + nbytes)` of a file; the offset is 0 until it is known."""

    path: Path
    nbytes: int
    offset: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class TorchTensor(Shaped):
    """A tensor in a file. Its view of the storage is inside it: that was checked."""

    storage: Storage
    dtype: str
    """As Zarr names it; types that the format does not store have torch's name."""
    first: int
    """Elements of the storage before the first one."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the tensor itself."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _itemsize(self.dtype)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are contiguous, in C order."""
        expected = 1
        for extent, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if extent != 1 and step != expected and self.numel:
                return False
            expected *= extent
        return True

    @property
    def identity(self) -> tuple[Storage, int, tuple[int, ...], tuple[int, ...], str]:
        """A value that is equal for two names of one tensor."""
        return self.storage, self.first, self.shape, self.stride, self.dtype

    def read(self, files: Files, first: int, stop: int, out: Bytes) -> None:
        """Read flat elements `[first, stop)`, in C order, into `out`; raises StorageError if the file is shorter now."""
        if first == stop:
            return
        if self.is_contiguous:
            start = self.storage.offset + (self.first + first) * self.itemsize
            with files.opened(self.storage.path) as file:
                files.read_into(file, out, start)
            return
        self._read_strided(first, stop, out)

    def _read_strided(self, first: int, stop: int, out: Bytes) -> None:
        dtype = numpy_dtype(self.dtype)
        try:
            whole = np.memmap(self.storage.path, np.uint8, "r", self.storage.offset, (self.storage.nbytes,))
        except OSError as error:
            path, offset = str(self.storage.path), self.storage.offset
            message = "the tensor cannot be mapped into memory"
            raise storage_error(error, message, path=path, offset=offset, nbytes=self.storage.nbytes) from error
        elements: npt.NDArray[Any] = whole[: self.storage.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
        strides = [step * dtype.itemsize for step in self.stride]
        view = np.lib.stride_tricks.as_strided(elements[self.first :], self.shape, strides, writeable=False)
        out.view(dtype)[:] = view.flat[first:stop]

    def whole(self, files: Files) -> npt.NDArray[Any]:
        """Return all elements, in the true shape; for small tensors."""
        out = np.empty(self.shape, numpy_dtype(self.dtype))
        self.read(files, 0, self.numel, out.reshape(-1).view(np.uint8))
        return out


def load_torch_file(
    path: Path, table: Table | None = None, *, part: tuple[int, int] | None = None, most_bytes: int = MAX_PICKLE_BYTES
) -> Any:
    """Return the object that was saved into the file, with a `TorchTensor` for each tensor; only the pickle is read.

    Globals beyond tensors and plain containers are those of `table`. Of a file of many archives, `part` is offset and
    bytes of one. The pickle has at most `most_bytes`. Raises CorruptionError if the file is missing, damaged or no file
    of `torch.save`; CheckpointMismatchError for objects that are not read; StorageError if it cannot be read.
    """
    with opened_file(path) as (file, size):
        if part is not None:
            return _archive(path, file, size, part).load(table or {}, most_bytes)
        start = file.read(4)
        file.seek(0)
        if start == b"PK\x03\x04":
            return _Zip(path, file, 0, size).load(table or {})
        if start[:1] == b"\x80":
            return _load_legacy(path, file, size, table or {})
    raise CorruptionError(
        f"{path} is not a file of torch.save (it begins with {start.hex() or 'nothing'}): it is damaged, incomplete, or "
        "was written by other software"
    )


def find_pickle(path: Path, part: tuple[int, int]) -> tuple[int, int]:
    """Return offset and bytes, in the file, of the pickle of the archive at `part`. Raises as `load_torch_file` does."""
    with opened_file(path) as (file, size):
        return _archive(path, file, size, part).find("data.pkl")


def _archive(path: Path, file: BinaryIO, size: int, part: tuple[int, int]) -> _Zip:
    offset, nbytes = part
    if offset + nbytes > size:
        raise CorruptionError(
            f"{path} has {size} bytes, expected an archive of {nbytes} at {offset}: it is truncated; copy it again"
        )
    return _Zip(path, file, offset, nbytes)


@contextmanager
def opened_file(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file and say how many bytes it has. Raises CorruptionError if it is missing or no file, StorageError."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise CorruptionError(f"{path} is not a regular file")
        file = path.open("rb")
    except FileNotFoundError as error:
        raise CorruptionError(f"{path} is missing: copy it again") from error
    except OSError as error:
        raise storage_error(error, "the file cannot be read", path=str(path)) from error
    with file:
        yield file, about.st_size


# -- tensors out of pickles -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TypedStorage:
    storage: Storage
    dtype: str | None
    """None: bytes, whose type the tensor gives."""


def _rebuild(storage: Any, first: Any, shape: Any, stride: Any, dtype: str) -> TorchTensor:
    if not isinstance(storage, _TypedStorage):
        raise ValueError("a tensor has no storage")
    for each in (shape, stride):
        if type(each) is not tuple or len(each) > MAX_DIMS:
            raise ValueError("a tensor's shape or stride is not a tuple of integers")
    numbers = (first, *shape, *stride)
    if len(shape) != len(stride) or any(type(n) is not int or not 0 <= n <= _MAX_NUMEL for n in numbers):
        raise ValueError("a tensor's offset, shape or stride is invalid")
    last = first + sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))
    available = storage.storage.nbytes // _itemsize(dtype)
    numel = math.prod(shape)
    if numel and (last >= available or numel > available):
        raise ValueError(
            f"a tensor of shape {shape}, stride {stride} at {first} is not in its storage of {available} elements"
        )
    return TorchTensor(storage=storage.storage, dtype=dtype, first=first, shape=shape, stride=stride)


def _rebuild_tensor(storage: Any, first: Any, shape: Any, stride: Any, *_: Any) -> TorchTensor:
    if not isinstance(storage, _TypedStorage) or storage.dtype is None:
        raise ValueError("a tensor has no typed storage")
    return _rebuild(storage, first, shape, stride, storage.dtype)


def _rebuild_tensor_v3(storage: Any, first: Any, shape: Any, stride: Any, *rest: Any) -> TorchTensor:
    return _rebuild(storage, first, shape, stride, _dtype_of(rest[2]))


def _rebuild_parameter(data: Any, *_: Any) -> TorchTensor:
    if not isinstance(data, TorchTensor):
        raise ValueError("a parameter is not made from a tensor")
    return data


def _rebuild_from_type(function: Any, _kind: Any, args: Any, state: Any) -> TorchTensor:
    """A tensor with attributes of its own."""
    if not isinstance(function, Global) or function.make is None or type(args) is not tuple:
        raise ValueError("a tensor is rebuilt by an unknown function")
    made = _rebuild_parameter(function.make(*args))
    kept = state[0] if isinstance(state, tuple) and state else state
    return replace(made, attributes=dict(kept) if isinstance(kept, dict) else {})


def _dtype_of(value: Any) -> str:
    name = value.name.removeprefix("torch.") if isinstance(value, Global) else ""
    name = _ALIASES.get(name, name)
    if name not in _DTYPES:
        raise ValueError(f"a tensor's type is {name[:50]!r}")
    return name


TORCH: Table = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.Size": lambda shape=(): tuple(shape),
    **{f"torch.{name}Storage": None for name in STORAGES},
    **dict.fromkeys(["torch.UntypedStorage", "torch.storage.UntypedStorage"]),
    **dict.fromkeys(["torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.Parameter"]),
    **{f"torch.{name}": None for name in (*_DTYPES, *_ALIASES)},
    **inert("torch.device"),
}
"""Globals of tensors, and of their parts: a type is a `Global`, a size a tuple."""


def _typed(kind: Any) -> tuple[str | None, int]:
    """Return type and bytes of the elements of a storage of that class."""
    name = kind.name.rpartition(".")[2].removesuffix("Storage") if isinstance(kind, Global) else ""
    if name == "Untyped":
        return None, 1
    dtype = STORAGES[name]
    return dtype, _itemsize(dtype)


# -- zip archives ---------------------------------------------------------------------------------------------------


class _Window(io.RawIOBase):
    """Bytes `[offset, offset + nbytes)` of a file, as a file.

    No read asks for more memory than a file of tensors needs for its directory.
    """

    def __init__(self, file: BinaryIO, path: Path, offset: int, nbytes: int) -> None:
        self._file = file
        self._path = path
        self._offset = offset
        self._nbytes = nbytes
        self._at = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        if self._at < 0:
            raise ValueError("a position before the archive")
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        if size > _MAX_READ_BYTES:
            raise CorruptionError(f"{self._path}: the archive's directory is too large for a checkpoint")
        left = max(0, self._nbytes - self._at)
        self._file.seek(self._offset + self._at)
        data = self._file.read(min(_MAX_END_BYTES if size < 0 else size, left))
        self._at += len(data)
        return data


class _Zip:
    """An archive of torch.save, of `nbytes` at `base` of an open file, while it is loaded."""

    def __init__(self, path: Path, file: BinaryIO, base: int, nbytes: int) -> None:
        self._path = path
        self._file = file
        self._base = base
        self._nbytes = nbytes
        self._storages: dict[str, Storage] = {}
        try:
            with zipfile.ZipFile(_Window(file, path, base, nbytes)) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, struct.error, ValueError, OverflowError, NotImplementedError) as error:
            if isinstance(error, CorruptionError):
                raise
            raise CorruptionError(
                f"{path} is truncated or damaged: its archive has no valid directory ({error}); copy it again"
            ) from error
        self._entries = {info.filename: info for info in infos}
        if len(self._entries) != len(infos):
            raise CorruptionError(f"{path}: the archive has two entries of one name")
        roots = [name.removesuffix("data.pkl") for name in self._entries if name.endswith("/data.pkl")]
        if len(roots) != 1 or f"{roots[0]}constants.pkl" in self._entries:
            raise CorruptionError(f"{path} is a zip archive, but not one of torch.save: expected one data.pkl")
        self._root = roots[0]

    def find(self, name: str) -> tuple[int, int]:
        """Return offset, in the file, and bytes of an entry's data."""
        info = self._entries.get(f"{self._root}{name}")
        if info is None:
            raise CorruptionError(f"{self._path}: the archive lacks {name[:100]!r}: it is damaged; copy it again")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise CheckpointMismatchError(f"{self._path}: {name!r} is compressed or encrypted; torch.save does neither")
        self._file.seek(self._base + min(max(info.header_offset, 0), self._nbytes))
        header = self._file.read(_LOCAL_HEADER_BYTES)
        if len(header) != _LOCAL_HEADER_BYTES or header[:4] != b"PK\x03\x04":
            raise CorruptionError(
                f"{self._path}: {name!r} is at another place than the archive's directory says: it is damaged"
            )
        offset = info.header_offset + _LOCAL_HEADER_BYTES + sum(struct.unpack_from("<HH", header, 26))
        if offset + info.file_size > self._nbytes:
            raise CorruptionError(
                f"{self._path}: {name!r} extends past the end of the file: it is truncated; copy it again"
            )
        return self._base + offset, info.file_size

    def load(self, table: Table, most_bytes: int = MAX_PICKLE_BYTES) -> Any:
        """Return the saved object; raises CorruptionError if its pickle has more than `most_bytes`."""
        if f"{self._root}byteorder" in self._entries:
            offset, size = self.find("byteorder")
            self._file.seek(offset)
            order = self._file.read(min(size, 16))
            if order != b"little":
                raise CheckpointMismatchError(
                    f"{self._path} was written with byte order {order!r}; only little-endian is supported"
                )
        offset, size = self.find("data.pkl")
        if size > most_bytes:
            raise CorruptionError(f"{self._path}: a pickle of {size} bytes is too large for a checkpoint")
        self._file.seek(offset)
        stream = io.BytesIO(self._file.read(size))
        return load_pickle(stream, f"{self._path}: data.pkl", {**TORCH, **table}, self._persistent, size=size)

    def _persistent(self, found: Any) -> _TypedStorage:
        tag, kind, key, _, numel = found
        if tag != "storage" or not isinstance(key, str) or type(numel) is not int:
            raise ValueError("a storage reference is not in torch's form")
        dtype, itemsize = _typed(kind)
        if key not in self._storages:
            offset, nbytes = self.find(f"data/{key}")
            self._storages[key] = Storage(self._path, nbytes, offset)
        storage = self._storages[key]
        if numel < 0 or numel * itemsize > storage.nbytes:
            raise CorruptionError(
                f"{self._path}: storage {key[:50]!r} has {storage.nbytes} bytes, expected {numel} elements of {itemsize}: the "
                "file is damaged"
            )
        return _TypedStorage(storage, dtype)


# -- files before zip -----------------------------------------------------------------------------------------------


def _load_legacy(path: Path, file: BinaryIO, size: int, table: Table) -> Any:
    """Return the object in a file that is not an archive. See [Note: the files]."""
    where = f"{path} (not a zip archive)"
    storages: dict[str, tuple[Storage, int]] = {}

    def persistent(found: Any) -> _TypedStorage:
        tag, kind, key, _, numel, view = found
        if tag != "storage" or not isinstance(key, str) or type(numel) is not int or numel < 0 or view is not None:
            raise ValueError("a storage reference is not in torch's form")
        dtype, itemsize = _typed(kind)
        if key not in storages:
            storages[key] = Storage(path, min(numel * itemsize, size)), itemsize
        return _TypedStorage(storages[key][0], dtype)

    def load(extra: Table, outside: Any = None) -> Any:
        return load_pickle(file, where, extra, outside, size=size - file.tell())

    if load({}) != _MAGIC or load({}) != _LEGACY_PROTOCOL:
        raise CorruptionError(f"{path} is a pickle, but not a file of torch.save")
    machine = load({})
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise CheckpointMismatchError(f"{path} was not written in little-endian byte order, the only one supported")
    value = load({**TORCH, **table}, persistent)
    keys = load({})
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(storages):
        raise CorruptionError(f"{path}: the storages listed in the file do not match those of its tensors")
    for key in keys:
        storage, itemsize = storages[key]
        header = file.read(8)
        numel = int.from_bytes(header, "little")
        storage.offset = file.tell()
        if len(header) != 8 or numel * itemsize != storage.nbytes or storage.offset + storage.nbytes > size:
            raise CorruptionError(f"{path}: storage {key!r} is truncated, or not of the size that its tensors need")
        file.seek(storage.offset + storage.nbytes)
    return value
