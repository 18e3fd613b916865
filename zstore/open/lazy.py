"""An array that is read when it is indexed, and only the chunks that the index needs. No torch unless a tensor is asked for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..format.arrays import Array, ArraySpec, empty_array, numpy_dtype
from ..format.selection import GROUP_NUMEL, Group, Key, select
from ..io.pool import Workers

if TYPE_CHECKING:
    from torch import Tensor


Read = Callable[[int, int, Array], None]
"""`read(first, stop, out)` puts flat elements `[first, stop)` into `out`, contiguous and of the array's data type."""

_ITER_BYTES = 8 * 1024 * 1024
_MOST_TASKS = 1024
"""Groups of runs that are handed to threads at a time."""


class LazyArray:
    """A named tensor of a checkpoint, which is not read yet.

    `array[key]` reads the selected elements and returns them as a numpy array, with numpy's basic indexing: whole numbers,
    slices with any step, `...` and None. `numpy()`, `np.asarray(array)` and `torch()` read all of it. bfloat16 is
    `ml_dtypes.bfloat16` in numpy. Nothing is cached: keep a result that is used again. Usable from several threads.
    """

    def __init__(self, spec: ArraySpec, read: Read, *, chunk_numel: int = 1, num_readers: int = 1) -> None:
        self.name = spec.name
        self.spec = spec
        """The array's spec in its checkpoint."""
        self.shape = spec.shape
        self.dtype: np.dtype[Any] = numpy_dtype(spec.dtype)
        """numpy's data type."""
        self.aliases = spec.aliases
        """Other names of the same tensor, if parameters are tied."""
        self._chunk_numel = max(1, chunk_numel)
        self._num_readers = num_readers
        self._read = read

    @property
    def ndim(self) -> int:
        """Number of extents."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"array {self.name!r} has no dimensions, so it has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<LazyArray {self.name!r} {list(self.shape)} {self.dtype.name}>"

    def __getitem__(self, key: Key) -> Any:
        selection = select(key, self.shape)
        out = empty_array(self.name, selection.counts, self.dtype)
        num_runs, numel = selection.runs.count, selection.runs.numel
        rows = out.reshape(num_runs, numel) if out.size else out.reshape(0, 1)
        if numel >= GROUP_NUMEL or num_runs == 1:
            for run, start in enumerate(selection.runs.starts(0, rows.shape[0]).tolist()):
                self._read(start, start + numel, rows[run])
        elif out.size:
            self._read_groups(selection.groups(self._chunk_numel), rows)
        if selection.reversed_axes:
            out = np.ascontiguousarray(np.flip(out, selection.reversed_axes))
        return out.reshape(selection.shape)[() if selection.is_scalar else ...]

    def _read_groups(self, groups: Iterator[Group], rows: Array) -> None:
        """Read the runs of `groups` into `rows` of the same numbers, several groups at a time."""

        def read(group: Group) -> None:
            block = np.empty(group.stop - group.first, self.dtype)
            self._read(group.first, group.stop, block)
            windows = np.lib.stride_tricks.sliding_window_view(block, rows.shape[1])
            rows[group.low_run : group.high_run] = windows[group.offsets]

        while some := list(itertools.islice(groups, _MOST_TASKS)):
            if len(some) == 1:
                read(some[0])
                continue
            with Workers(min(self._num_readers, len(some)), "zstore-lazy") as workers:
                workers.run([partial(read, group) for group in some])

    def __iter__(self) -> Iterator[Any]:
        row_bytes = max(1, self.nbytes // max(1, len(self)))
        step = max(1, _ITER_BYTES // row_bytes)
        for first in range(0, len(self), step):
            yield from self[first : first + step]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(f"array {self.name!r} is on disk: it cannot be read without a copy")
        values = self.numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def numpy(self) -> Array:
        """Return all of it, in its true shape."""
        out = empty_array(self.name, self.shape, self.dtype)
        if out.size:
            self._read(0, out.size, out.reshape(-1))
        return out

    def torch(self, key: Key = ...) -> Tensor:
        """Return the elements that `key` selects (all by default) as a tensor in host memory, of the stored data type."""
        from ..io.tensors import as_torch

        return as_torch(self.numpy() if key is Ellipsis else np.asarray(self[key]))
