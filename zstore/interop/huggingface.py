"""Safetensors folders in the Hugging Face layout, read by ranges of elements, or as a checkpoint's arrays under `model/`.
Neither torch nor pickle is used.

A file has 8 bytes with the length of its header, the header in JSON, and the tensors, little-endian, in row-major order.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointNotFoundError, CorruptionError, UsageError
from ..format.arrays import (
    MAX_NAME,
    SAFETENSORS_DTYPES,
    STEM,
    STEM_KEY,
    STEMS,
    SUFFIX,
    ArraySpec,
    Bytes,
    Shaped,
    model_array,
    numpy_dtype,
)
from ..io.files import Files
from ..io.shards import IoResources
from .source import ForeignSource, opened_file, record_of

_MAX_HEADER_BYTES = 100 * 1000 * 1000
_MAX_VALUES = 2**21
"""Maximum number of JSON values in a header or index, since they take more memory than their text."""
_MAX_DIMS = 64
_DTYPES = {dtype: zarr_name for zarr_name, dtype in SAFETENSORS_DTYPES.items()}
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, kw_only=True)
class StoredWeight(Shaped):
    """A tensor in a file."""

    name: str
    dtype: str
    """Data type by its Zarr name."""
    shape: tuple[int, ...]
    path: Path
    offset: int
    """Byte offset of its first element in the file."""


class WeightsReader:
    """Reads the tensors of the safetensors files in `folder`: `model.safetensors`, the files named by its index, or the only
    file.

    Raises CheckpointNotFoundError if there are no weights, CorruptionError for damaged files, UsageError for
    pickled weights and for data types that cannot be trained.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = Files(direct=False)
        self._identities: dict[Path, tuple[int, ...]] = {}
        """Device, inode, size and time of each file, to detect that it was replaced."""
        self.read_files: list[str] = []
        """Names of the files with the weights, the index first."""
        self.metadata: dict[str, str] = {}
        """Metadata in the files."""
        self.read_bytes = 0
        """Total bytes of tensors read."""
        self.weights = self._find_weights()

    def _find_weights(self) -> dict[str, StoredWeight]:
        if not self.folder.is_dir():
            raise CheckpointNotFoundError(f"expected a folder with safetensors files, found none at {self.folder}")
        main_file = self._main_file()
        if main_file.name.endswith(SUFFIX):
            return self._header(main_file)
        file_by_name = self._weight_map(main_file)
        weights: dict[str, StoredWeight] = {}
        for name in dict.fromkeys(file_by_name.values()):
            if Path(name).name != name or "\0" in name:
                raise CorruptionError(f"{main_file} names {name!r:.200}, which is not a file of that folder")
            weights |= self._header(self.folder / name)
        missing = [name for name in file_by_name if name not in weights]
        if missing:
            raise CorruptionError(f"{main_file} lists {missing[0]!r}, but {file_by_name[missing[0]]} does not have it")
        return weights

    def _main_file(self) -> Path:
        """Return the index of numbered files, or the only file: that of a model, of diffusers, or of the only variant."""
        indices, files = (sorted(self.folder.glob(f"*{SUFFIX}{end}")) for end in (".index*.json", ""))
        for candidates, end in ((indices, ".index.json"), (files, "")):
            known = [path for stem in STEMS if (path := self.folder / f"{stem}{SUFFIX}{end}") in candidates]
            if known or (len(candidates) == 1 and len(indices) < 2):
                return (known or candidates)[0]
        if candidates := indices or files:
            raise UsageError(
                f"{self.folder} has {', '.join(path.name for path in candidates):.200}, and it is unclear which belong "
                "together: keep one model's files in a copy of it, or save it again with save_pretrained()"
            )
        pickled = [path.name for pattern in _PICKLE_PATTERNS for path in sorted(self.folder.glob(pattern))]
        if pickled:
            raise UsageError(
                f"{self.folder} has its weights in {pickled[0]}, a pickle, which could run any code and is not read: if you "
                "trust the file, convert it once with transformers, by "
                "`AutoModel.from_pretrained(folder).save_pretrained(other)`"
            )
        raise CheckpointNotFoundError(f"{self.folder} has no safetensors files: expected model.safetensors or an index")

    def _header(self, path: Path) -> dict[str, StoredWeight]:
        """Return the tensors of a file, according to its header."""
        with opened_file(path, "safetensors file") as (file, size):
            self._identities[path] = _identity(os.fstat(file.fileno()))
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= min(size - 8, _MAX_HEADER_BYTES) else b""
            if not text or len(text) != length:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            entries = _json(text)
            self.metadata |= {key: str(text) for key, text in (entries.pop("__metadata__", None) or {}).items()}
            self.read_files.append(path.name)
            return {name: _weight(name, entry, path, 8 + length, size) for name, entry in entries.items()}

    def _weight_map(self, path: Path) -> dict[str, str]:
        """Return the file of each tensor, according to an index."""
        with opened_file(path, "index of safetensors files") as (file, size):
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"it has {size} bytes")
            file_by_name = _json(file.read())["weight_map"]
            if not all(isinstance(name, str) for name in file_by_name.values()):
                raise TypeError("its file names are not text")
            self.read_files.append(path.name)
            return dict(file_by_name)

    def read_into(self, weight: StoredWeight, first: int, out: npt.NDArray[Any]) -> None:
        """Fill `out` (1-D, contiguous, of the weight's data type) with its flat elements starting at `first`.

        Raises StorageError if the file cannot be read, CorruptionError if it has changed since its header was read.
        """
        data = out.view(np.uint8)
        # The file is opened for each read, since a model may have more files than a process may have open.
        with self._files.opened(weight.path, direct=False) as file:
            if _identity(os.fstat(file.fd)) != self._identities[weight.path]:
                raise CorruptionError(f"{weight.path} changed while it was read: read it again")
            self._files.read_into(file, data, weight.offset + first * out.itemsize)
        self.read_bytes += data.size


class HuggingFaceSource(ForeignSource):
    """The weights in `folder`; raises the errors of `WeightsReader`.

    Tied tensors are stored once, under their name in the files.
    """

    kind = "Hugging Face safetensors"

    def __init__(self, folder: Path, resources: IoResources | None = None) -> None:
        self._weights = WeightsReader(folder)
        try:
            specs = [
                ArraySpec(name=model_array(weight.name), shape=weight.shape, dtype=weight.dtype)
                for weight in self._weights.weights.values()
            ]
            stem = re.split(r"\.|-\d+-of-\d+", self._weights.read_files[-1])[0]  # without number and variant
            record = record_of(folder, state={STEM_KEY: stem} if stem in STEMS and stem != STEM else {})
            super().__init__(folder, record, specs, resources, Files(direct=False))
        except ValueError as error:
            raise CorruptionError(f"{folder}: {error}") from error
        self.weight_files = frozenset(self._weights.read_files)
        if extra_keys := sorted(self._weights.metadata.keys() - {"format"}):
            self.notes = (f"the files' own metadata: {', '.join(extra_keys):.200}",)

    def _fill(self, name: str, first: int, stop: int, out: Bytes) -> None:
        target = out.view(numpy_dtype(self.array(name).spec.dtype))
        self._weights.read_into(self._weights.weights[name.partition("/")[2]], first, target)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _json(text: bytes) -> Any:
    if text.count(b",") + text.count(b"[") + text.count(b"{") > _MAX_VALUES:
        raise ValueError(f"more than {_MAX_VALUES} values")
    return json.loads(text)


def _weight(name: str, entry: dict[str, Any], path: Path, data_offset: int, size: int) -> StoredWeight:
    dtype, shape, (begin, end) = entry["dtype"], tuple(int(n) for n in entry["shape"]), entry["data_offsets"]
    if type(begin) is not int or type(end) is not int or len(shape) > _MAX_DIMS or len(name) > MAX_NAME:
        raise ValueError(f"{name[:100]!r} has an invalid offset, shape or name")
    if dtype not in _DTYPES:
        raise UsageError(
            f"{name!r} in {path} is of type {dtype}, which cannot be trained: expected one of {', '.join(_DTYPES)}"
        )
    weight = StoredWeight(name=name, dtype=_DTYPES[dtype], shape=shape, path=path, offset=data_offset + begin)
    nbytes = weight.nbytes
    if min(shape, default=0) < 0 or not 0 <= begin <= end <= size - data_offset or end - begin != nbytes:
        raise ValueError(f"{name!r} of shape {shape} in {dtype} at bytes {begin} to {end} of {size - data_offset}")
    return weight
