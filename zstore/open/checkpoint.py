"""A checkpoint as Python sees it: named arrays that are read when they are indexed, only the rows that the index needs, and
weights in any precision.

No engine, no process group, no pickle; torch is imported only when a tensor is requested.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from ..checkpoint.layout import natural_key, tag_text
from ..checkpoint.reader import ArraySource, CheckpointReader
from ..checkpoint.verify import VerifyFault, verify_checkpoint
from ..errors import CheckpointError, CheckpointMismatchError, UsageError
from ..format.arrays import Array, ArraySpec, empty_array, numpy_dtype
from ..io.files import UserPath, user_location
from ..io.machine import AsyncClosing
from ..weights.cast import Overflow
from ..weights.files import lost_text
from ..weights.from_checkpoint import DTYPES, choose, list_weights, read_weights
from .sources import open_source, open_source_async

if TYPE_CHECKING:
    from torch import Tensor
    from zarr import Group


Read = Callable[[int, int, Array], None]
"""`read(first, stop, out)` puts flat elements `[first, stop)` into `out`, contiguous and of the array's data type."""
Index = SupportsIndex | slice | EllipsisType | None
Key = Index | tuple[Index, ...]

_BLOCK_BYTES = 8 * 1024 * 1024
"""Approximate bytes of rows that are read at once, to select from them."""


class LazyArray:
    """A named tensor of a checkpoint, read when it is indexed.

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
        """Number of dimensions."""
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
        # An array without memory gives the shape of the result, and numpy's errors.
        probe = np.broadcast_to(np.zeros((), self.dtype), self.shape)[items]
        given = (item if isinstance(item, slice) else operator.index(item) for item in items if item is not None)
        index = [item if isinstance(item, slice) else slice(item, item + 1 or None) for item in given]
        counts = [len(range(*item.indices(extent))) for item, extent in zip(index, self.shape, strict=True)]
        out = empty_array(self.name, tuple(counts), self.dtype)
        if out.size:
            self._fill(0, self.shape, index, out)
        is_scalar = not probe.shape and not ((isinstance(key, tuple) and Ellipsis in key) or key is Ellipsis)
        return out.reshape(probe.shape)[() if is_scalar else ...]

    def _fill(self, base: int, shape: tuple[int, ...], index: Sequence[slice], out: Array) -> None:
        """Read the selection `index` of the block of `shape` that begins at flat element `base` into `out`."""
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
        """Return the whole array, in its true shape."""
        out = empty_array(self.name, self.shape, self.dtype)
        if out.size:
            self._read(0, out.size, out.reshape(-1))
        return out

    def torch(self, key: Key = ...) -> Tensor:
        """Return the elements that `key` selects (all by default) as a tensor in host memory, of the stored data type."""
        from ..io.memory import as_torch

        return as_torch(self.numpy() if key is Ellipsis else np.asarray(self[key]))


def _expanded(key: Key, ndim: int) -> tuple[Any, ...]:
    """Return the key with a slice for each extent that `...` replaces or that is omitted. Raises IndexError unless it has
    only whole numbers, slices, `...` and None."""
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


Dtype = Any
"""A data type for weights: "fp16", "bf16", "fp32" or their long names, numpy's or torch's; None: as stored."""


def open_checkpoint(
    location: UserPath, tag: str | float | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Open the checkpoint `tag` at `location`: a folder or URL of checkpoints (the newest committed one by default), or a
    tag's own folder; `FOLDER@TAG` means both, as `http://host:8700/run@prod`. Other software's checkpoints are opened
    without conversion.

    `storage_options` are for the file system of a URL. Raises CheckpointNotFoundError, CorruptionError if it is damaged,
    CheckpointMismatchError if it is of a kind or version that is not read.
    """
    return Checkpoint(open_source(location, tag, storage_options=storage_options), storage_options or {})


async def open_checkpoint_async(
    location: UserPath, tag: str | float | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Open a checkpoint as `open_checkpoint` does, without blocking the event loop: `async with await
    zstore.open_checkpoint_async(path) as checkpoint`. Reading an array blocks: use `asyncio.to_thread` for that."""
    text, options = None if tag is None else tag_text(tag), storage_options or {}
    return await open_source_async(user_location(location), text, options, partial(Checkpoint, storage_options=options))


def load_state_dict(
    location: UserPath,
    *,
    tag: str | float | None = None,
    dtype: Dtype = None,
    names: str | Sequence[str] | None = None,
    overflow: Overflow = "error",
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Return a checkpoint's parameters and buffers as a state dict, for `model.load_state_dict`; see `open_checkpoint`.

    `dtype` is that of the floating weights returned (None: their best stored precision), `names` a name or a pattern with `*`,
    `?`, `[...]`, or several. Tied parameters have each of their names, as one tensor. Raises
    CheckpointMismatchError for a pattern that matches nothing, CheckpointError if a value does not fit the type (unless
    `overflow` is "inf" or "clamp").
    """
    with open_checkpoint(location, tag, storage_options=storage_options) as checkpoint:
        return checkpoint.load_state_dict(names, dtype=dtype, overflow=overflow)


class Checkpoint(Mapping[str, LazyArray], AsyncClosing):
    """An open checkpoint: its arrays by name, as `model/...`, `optimizer/<slot>/...`, `buffer/...`, `client/...`.

    `checkpoint[name]` is a `LazyArray`; nothing is read until it is indexed. Close it, or use it in a `with` block.
    Usable from several threads.
    """

    def __init__(self, source: ArraySource, storage_options: Mapping[str, Any]) -> None:
        self._source = source
        self._storage_options = dict(storage_options)
        self._names = source.names()
        self._closed = False

    @property
    def source(self) -> ArraySource:
        """The source of the arrays; a forked child opens its own. See [Note: forks]."""
        if self._source.is_forked:
            self._source = _open_again(self._source.location, self._storage_options, self._source.record.id)
        return self._source

    def __reduce__(self) -> tuple[Any, ...]:
        self.check_open()
        return _unpickled, (self.location, self._storage_options, self._source.record.id)

    @property
    def location(self) -> str:
        """Path or URL of the tag's folder."""
        return self.source.location

    @property
    def tag(self) -> str:
        """The checkpoint's name."""
        return self.source.tag

    @property
    def step(self) -> int:
        """Number of training steps."""
        return self.source.record.step

    @property
    def world_size(self) -> int:
        """Number of ranks of its layout."""
        return self.source.record.world_size

    @property
    def state(self) -> Mapping[str, Any]:
        """JSON stored with the arrays: counters, scheduler, loss scale, position in the data, the user's own."""
        return self.source.record.state

    def __getitem__(self, name: str) -> LazyArray:
        return LazyArray(self.source.known(name).spec, partial(self._read, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self.source.arrays

    def __repr__(self) -> str:
        return f"<Checkpoint {self.tag!r} of {self.location}: step {self.step}, {len(self)} arrays>"

    def _read(self, name: str, first: int, stop: int, out: Array) -> None:
        self.check_open()
        self.source.read(name, first, stop, out)

    def check_open(self) -> None:
        """Raise UsageError if the checkpoint was closed."""
        if self._closed:
            raise UsageError(f"the checkpoint {self.location} was closed: read its arrays before, or open it again")

    def load_state_dict(
        self,
        names: str | Sequence[str] | None = None,
        *,
        exclude: Sequence[str] = (),
        dtype: Dtype = None,
        overflow: Overflow = "error",
    ) -> dict[str, Tensor]:
        """Return the parameters, as tensors of `dtype`, and the buffers, except those that match `exclude`, by their names in
        the state dict; see `zstore.load_state_dict`."""
        from ..io.memory import as_torch

        self.check_open()
        source, target = self.source, _zarr_name(dtype)
        weights = {weight.name: weight for weight in list_weights(source, target)}
        for weight in [*weights.values()]:
            weights |= dict.fromkeys(source.arrays[weight.array].spec.aliases, weight)
        patterns = [] if names is None else [names] if isinstance(names, str) else list(names)
        chosen = choose(sorted(weights, key=natural_key), patterns, exclude) if names is None or patterns else []
        found, lost = read_weights(
            source, list({weights[name].name: weights[name] for name in chosen}.values()), overflow
        )
        if lost and overflow == "error":
            raise CheckpointError(lost_text(lost, target or "", 'Choose "bf16", or overflow="clamp" (or "inf")'))
        tensors = {name: as_torch(values) for name, values in found.items()}
        return {name: tensors[weights[name].name] for name in chosen}

    def verify(self) -> list[VerifyFault]:
        """Check every byte, and return the faults; an empty list means an intact checkpoint."""
        self.check_open()
        if not isinstance(self.source, CheckpointReader):
            raise CheckpointMismatchError(
                f"{self.location} is {self.source.kind}, which has no checksums to compare with: convert it first"
            )
        return verify_checkpoint(self.source)

    def zarr(self) -> Group:
        """Return the checkpoint as a group of zarr-python, read-only; bfloat16 is `ml_dtypes.bfloat16`.

        Arrays have their stored shape: more than two dimensions become two, the product of all but the last, and the last.
        """
        if not self.source.record.id:
            raise CheckpointMismatchError(f"{self.location} is {self.source.kind}, which is not Zarr: convert it first")
        import zarr

        from ..format import zarr_dtypes  # noqa: F401 - registers bfloat16

        if "://" in self.location:
            url, options = self._for_fsspec()
            return zarr.open_group(url, mode="r", storage_options=options)
        return zarr.open_group(zarr.storage.LocalStore(self.location, read_only=True), mode="r")

    def _for_fsspec(self) -> tuple[str, dict[str, Any]]:
        """Return URL and storage options with which fsspec opens the tag's folder."""
        if self.location.startswith("http") and isinstance(self.source, CheckpointReader):
            from ..remote.service import ServiceFolder

            if isinstance(self.source.folder, ServiceFolder):
                return self.source.folder.for_fsspec()
        return self.location, self._storage_options

    def close(self) -> None:
        """Release threads, buffers and files, after which arrays cannot be read; a second call does nothing."""
        self._closed = True
        if not self._source.is_forked:
            self._source.close()


def _open_again(location: str, storage_options: Mapping[str, Any], save_id: str) -> ArraySource:
    """Open the checkpoint of that save in another process; raises CheckpointError if another save replaced it."""
    source = open_source(location, storage_options=storage_options)
    if source.record.id != save_id:
        source.close()
        raise CheckpointError(f"{location} was replaced by another save since it was opened: open it again")
    return source


def _unpickled(*opened: Any) -> Checkpoint:
    return Checkpoint(_open_again(*opened), opened[1])


def _zarr_name(dtype: Dtype) -> str | None:
    """Return the name of a floating data type; raises UsageError for anything else."""
    if dtype is None:
        return None
    text = str(dtype).removeprefix("torch.")
    name = DTYPES.get(text, text)
    if name not in DTYPES.values() and isinstance(dtype, type | np.dtype):
        name = np.dtype(dtype).name
    if name not in DTYPES.values():
        raise UsageError(f"dtype={dtype!r}: expected one of {', '.join(DTYPES)}, or None for what is stored")
    return name
