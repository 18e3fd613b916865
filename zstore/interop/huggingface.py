"""Safetensors folders in the Hugging Face layout, read by ranges of elements, or as a checkpoint's arrays under `model/`. No
torch, and no pickle is run.

A file is 8 bytes with the length of its header, the header in JSON, and the tensors, little-endian, in row-major order.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointNotFoundError, CorruptionError, UsageError, storage_error
from ..format.arrays import MAX_NAME, SAFETENSORS_DTYPES, ArraySpec, Bytes, Shaped, model_array, numpy_dtype
from ..io.closing import Closing
from ..io.files import Files, OpenFile
from ..io.shards import IoResources
from .source import ForeignSource, record_of

_MAX_HEADER_BYTES = 100 * 1000 * 1000
_MAX_VALUES = 2**21
"""Values of JSON in a header or an index: they take more memory than their text."""
_MAX_DIMS = 64
_DTYPES = {theirs: ours for ours, theirs in SAFETENSORS_DTYPES.items()}
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, kw_only=True)
class StoredWeight(Shaped):
    """A tensor in a file."""

    name: str
    dtype: str
    """Data type by its Zarr name."""
    shape: tuple[int, ...]
    path: Path
    offset: int
    """Offset of its first byte in the file."""


class WeightsReader(Closing):
    """The tensors of the safetensors files in `folder`: `model.safetensors`, or those that its index names, or the only
    one there is. Close it, or use it in a `with` block.

    Raises CheckpointNotFoundError if there are none, CorruptionError for files that are damaged, UsageError for
    pickled weights and for data types that cannot be trained.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = Files(direct=False)
        self._opened: dict[Path, OpenFile] = {}
        self._ends = contextlib.ExitStack()
        self.read_bytes = 0
        """Bytes of tensors read so far."""
        try:
            self.weights = self._find()
        except BaseException:
            self.close()
            raise

    def _find(self) -> dict[str, StoredWeight]:
        if not self.folder.is_dir():
            raise CheckpointNotFoundError(f"expected a folder with safetensors files, found none at {self.folder}")
        index = self.folder / "model.safetensors.index.json"
        if not index.is_file():
            return self._header(self._only_file())
        placed = _weight_map(index)
        found: dict[str, StoredWeight] = {}
        for name in dict.fromkeys(placed.values()):
            if Path(name).name != name or "\0" in name:
                raise CorruptionError(f"{index} names {name!r:.200}, which is not a file beside it")
            found |= self._header(self.folder / name)
        lost = [name for name in placed if name not in found]
        if lost:
            raise CorruptionError(f"{index} lists {lost[0]!r}, but {placed[lost[0]]} does not have it")
        return found

    def _only_file(self) -> Path:
        usual = self.folder / "model.safetensors"
        found = sorted(self.folder.glob("*.safetensors"))
        if usual in found or len(found) == 1:
            return usual if usual in found else found[0]
        if found:
            raise UsageError(
                f"{self.folder} has {len(found)} safetensors files and no model.safetensors.index.json that says which "
                "belong together: save the model again with transformers' save_pretrained()"
            )
        pickled = [path.name for pattern in _PICKLED for path in sorted(self.folder.glob(pattern))]
        if pickled:
            raise UsageError(
                f"{self.folder} has its weights in {pickled[0]}, a pickle, which could run anything and is not read: "
                "convert it once, with transformers `AutoModel.from_pretrained(folder).save_pretrained(other)` where you "
                "trust the file"
            )
        raise CheckpointNotFoundError(f"{self.folder} has no safetensors files: expected model.safetensors or an index")

    def _header(self, path: Path) -> dict[str, StoredWeight]:
        """Read the header of a file, which stays open."""
        try:
            file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would keep us waiting
            self._ends.callback(os.close, file)
            size = os.fstat(file).st_size
            length = int.from_bytes(os.pread(file, 8, 0), "little")
            text = os.pread(file, length, 8) if length <= min(size - 8, _MAX_HEADER_BYTES) else b""
        except OSError as error:
            raise storage_error(error, "the weights cannot be read", path=str(path)) from error
        self._opened[path] = OpenFile(file, str(path), direct=False)
        try:
            if not text or len(text) != length:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            entries = _json(text)
            entries.pop("__metadata__", None)
            return {name: _weight(name, entry, path, 8 + length, size) for name, entry in entries.items()}
        except UsageError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise CorruptionError(f"{path} is not a valid safetensors file: {error!s:.200}") from error

    def read_into(self, weight: StoredWeight, first: int, out: npt.NDArray[Any]) -> None:
        """Fill `out` (1-D, contiguous, of the weight's data type) with its flat elements from `first` on.

        Raises StorageError if the file cannot be read, or has become shorter.
        """
        data = out.view(np.uint8)
        self._files.read_into(self._opened[weight.path], data, weight.offset + first * out.itemsize)
        self.read_bytes += data.size

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._ends.close()


class HuggingFaceSource(ForeignSource):
    """The weights in `folder`; raises the errors of `WeightsReader`.

    Tensors that the model ties are there once, under the name that the files give them.
    """

    kind = "Hugging Face safetensors"

    def __init__(self, folder: Path, resources: IoResources | None = None) -> None:
        self._weights = WeightsReader(folder)
        try:
            specs = [
                ArraySpec(name=model_array(weight.name), shape=weight.shape, dtype=weight.dtype)
                for weight in self._weights.weights.values()
            ]
            super().__init__(folder, record_of(folder), specs, resources, Files(direct=False))
        except BaseException as error:
            self._weights.close()
            if isinstance(error, ValueError):
                raise CorruptionError(f"{folder}: {error}") from error
            raise
        self._cleanup.callback(self._weights.close)

    def _fill(self, name: str, first: int, stop: int, out: Bytes) -> None:
        target = out.view(numpy_dtype(self.array(name).spec.dtype))
        self._weights.read_into(self._weights.weights[name.partition("/")[2]], first, target)


def _json(text: bytes) -> Any:
    if text.count(b",") + text.count(b"[") + text.count(b"{") > _MAX_VALUES:
        raise ValueError(f"more than {_MAX_VALUES} values")
    return json.loads(text)


def _weight_map(index: Path) -> dict[str, str]:
    """Return which file each tensor is in, by an index."""
    try:
        size = index.stat().st_size
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"it has {size} bytes")
        placed = _json(index.read_bytes())["weight_map"]
        if not all(isinstance(name, str) for name in placed.values()):
            raise TypeError("its file names are not text")
    except OSError as error:
        raise storage_error(error, "the index cannot be read", path=str(index)) from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CorruptionError(f"{index} is not a valid index of safetensors files: {error!r:.200}") from error
    return dict(placed)


def _weight(name: str, entry: dict[str, Any], path: Path, data_offset: int, size: int) -> StoredWeight:
    theirs, shape, (begin, end) = entry["dtype"], tuple(int(n) for n in entry["shape"]), entry["data_offsets"]
    if type(begin) is not int or type(end) is not int or len(shape) > _MAX_DIMS or len(name) > MAX_NAME:
        raise ValueError(f"{name[:100]!r} has an invalid offset, shape or name")
    if theirs not in _DTYPES:
        raise UsageError(
            f"{name!r} in {path} is of type {theirs}, which cannot be trained: expected one of {', '.join(_DTYPES)}"
        )
    weight = StoredWeight(name=name, dtype=_DTYPES[theirs], shape=shape, path=path, offset=data_offset + begin)
    nbytes = weight.nbytes
    if min(shape, default=0) < 0 or not 0 <= begin <= end <= size - data_offset or end - begin != nbytes:
        raise ValueError(f"{name!r} of shape {shape} in {theirs} at bytes {begin} to {end} of {size - data_offset}")
    return weight
