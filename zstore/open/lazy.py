"""An array that is read when it is indexed, and only the rows that the index needs. No torch unless a tensor is asked for."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from ..format.arrays import Array, ArraySpec, empty_array, numpy_dtype

if TYPE_CHECKING:
    from torch import Tensor


Read = Callable[[int, int, Array], None]
"""`read(first, stop, out)` puts flat elements `[first, stop)` into `out`, contiguous and of the array's data type."""
Index = SupportsIndex | slice | EllipsisType | None
Key = Index | tuple[Index, ...]

_BLOCK_BYTES = 8 * 1024 * 1024
"""About the bytes of rows that are read at a time, to select from them."""


class LazyArray:
    """A named tensor of a checkpoint, which is not read yet.

    `array[key]` reads the rows that the key needs and returns the elements as a numpy array, with numpy's basic indexing:
    whole numbers, slices with any step, `...` and None. `numpy()`, `np.asarray(array)` and `torch()` read all of it. bfloat16
    is `ml_dtypes.bfloat16` in numpy. Nothing is cached: keep a result that is used again. Usable from several threads.
    """

    def __init__(self, spec: ArraySpec, read: Read) -> None:
        self.name = spec.name
        self.spec = spec
        """The array's spec in its checkpoint."""
        self.shape = spec.shape
        self.dtype: np.dtype[Any] = numpy_dtype(spec.dtype)
        """numpy's data type."""
        self.aliases = spec.aliases
        """Other names of the same tensor, if parameters are tied."""
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
        items = _expanded(key, self.ndim)
        # numpy says what comes of an array that takes no memory, and which error a key has.
        wanted = np.broadcast_to(np.zeros((), self.dtype), self.shape)[items]
        given = (item if isinstance(item, slice) else operator.index(item) for item in items if item is not None)
        index = [item if isinstance(item, slice) else slice(item, item + 1 or None) for item in given]
        counts = [len(range(*item.indices(extent))) for item, extent in zip(index, self.shape, strict=True)]
        out = empty_array(self.name, tuple(counts), self.dtype)
        if out.size:
            self._fill(0, self.shape, index, out)
        is_scalar = not wanted.shape and not ((isinstance(key, tuple) and Ellipsis in key) or key is Ellipsis)
        return out.reshape(wanted.shape)[() if is_scalar else ...]

    def _fill(self, base: int, shape: tuple[int, ...], index: Sequence[slice], out: Array) -> None:
        """Read into `out` what `index` selects of the block of `shape` that begins at flat element `base`."""
        if not shape:
            self._read(base, base + 1, out.reshape(1))
            return
        row, rows = math.prod(shape[1:]), range(*index[0].indices(shape[0]))
        step_bytes = abs(rows.step) * row * out.itemsize
        if rows.step == 1 and out.shape[1:] == shape[1:] and all(one.step in (None, 1) for one in index[1:]):
            self._read(base + rows[0] * row, base + (rows[-1] + 1) * row, out.reshape(-1))
        elif len(rows) == 1 or step_bytes > _BLOCK_BYTES // 8:
            for place, number in zip(out.reshape(len(rows), -1), rows, strict=True):
                self._fill(base + number * row, shape[1:], index[1:], place.reshape(out.shape[1:]))
        else:
            many = _BLOCK_BYTES // step_bytes
            for at in range(0, len(rows), many):
                some = np.asarray(rows[at : at + many])
                low, high = int(some.min()), int(some.max()) + 1
                block = np.empty((high - low, *shape[1:]), out.dtype)
                self._read(base + low * row, base + high * row, block.reshape(-1))
                out[at : at + many] = block[some - low][(slice(None), *index[1:])]

    def __iter__(self) -> Iterator[Any]:
        row_bytes = max(1, self.nbytes // max(1, len(self)))
        step = max(1, _BLOCK_BYTES // row_bytes)
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


def _expanded(key: Key, ndim: int) -> tuple[Any, ...]:
    """Return the key with a slice for each extent that `...` stands for, or that has none.

    Raises IndexError unless it is of whole numbers, slices, `...` and None.
    """
    items = list(key) if isinstance(key, tuple) else [key]
    given = [item for item in items if item is not None and item is not Ellipsis]
    for item in given:
        is_number = (
            hasattr(item, "__index__") and not isinstance(item, bool | np.bool_) and not getattr(item, "ndim", 0)
        )
        if not is_number and not isinstance(item, slice):
            raise IndexError(
                f"expected whole numbers, slices, `...` or None as index, got a {type(item).__name__}: read what is around "
                "it, as `array[first:stop]`, and index the result"
            )
    places = [number for number, item in enumerate(items) if item is Ellipsis]
    if len(places) < 2 and len(given) <= ndim:
        place = places[0] if places else len(items)
        items[place : place + len(places)] = [slice(None)] * (ndim - len(given))
    return tuple(items)
