"""DeepSpeed's indexed data set of rows of numbers, which its analyzer of metrics writes: `<path>.idx` and `<path>.bin`.

The index (little endian): 9 bytes of magic, version 1 as uint64, a code of the data type as uint8, the number of rows and
that of documents as uint64; for each row its elements as int32 and its place in the other file in bytes as int64; documents,
which say nothing here. Source: `deepspeed/runtime/data_pipeline/data_sampling/indexed_dataset.py`, `MMapIndexedDataset`.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zstore.errors import ConfigError, storage_error

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {
    1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f8", 8: "<u2", 9: "<u4", 10: "<u8",
}  # fmt: skip


class IndexedRows:
    """The rows of an indexed data set, mapped: nothing is read until it is asked for."""

    def __init__(self, path: str) -> None:
        index, data = Path(f"{path}.idx"), Path(f"{path}.bin")
        try:
            raw = np.memmap(index, np.uint8, "r") if index.stat().st_size else np.zeros(0, np.uint8)
            total = data.stat().st_size
            if raw.size < _HEAD.size:
                raise _not_read(path, "its index is too short")
            magic, version, code, rows, _ = _HEAD.unpack(raw[: _HEAD.size].tobytes())
            if magic != _MAGIC or version != 1 or code not in _DTYPES:
                raise _not_read(path, "its index is of another kind or version")
            if raw.size < _HEAD.size + 12 * rows:
                raise _not_read(path, "its index is cut short")
            self._dtype: np.dtype[Any] = np.dtype(_DTYPES[code])
            sizes = raw[_HEAD.size : _HEAD.size + 4 * rows].view("<i4")
            starts = raw[_HEAD.size + 4 * rows : _HEAD.size + 12 * rows].view("<i8")
            ends = starts + sizes.astype(np.int64) * self._dtype.itemsize
            if rows and (sizes.min() < 0 or starts.min() < 0 or int(ends.max()) > total):
                raise _not_read(path, f"its rows do not lie within the {total} bytes of {data}")
            self.sizes: npt.NDArray[np.int32] = sizes
            """Elements of each row."""
            self._starts = starts
            self._data = np.memmap(data, np.uint8, "r") if total else np.zeros(0, np.uint8)
        except OSError as error:
            message = "the metric's files cannot be read; give their path without .idx and .bin"
            raise storage_error(error, message, path=path) from error

    def __len__(self) -> int:
        return int(self.sizes.size)

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        start = int(self._starts[row])
        return self._data[start : start + int(self.sizes[row]) * self._dtype.itemsize].view(self._dtype)


def _not_read(path: str, why: str) -> ConfigError:
    return ConfigError(f"{path}: expected an indexed data set of DeepSpeed's analyzer (version 1), but {why}")
