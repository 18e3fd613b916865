"""The arrays of a store: a rank's part of each, programs' values as flat elements, and the work on shards.

Values are tensors of torch, arrays of numpy and numbers; torch is imported only if somebody has a tensor, or wants one.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoint.names import array_path, groups_of
from ..checkpoint.source import ArraySource
from ..errors import UsageError
from ..format.arrays import Array, ArraySpec, numpy_dtype
from ..format.partition import WHOLE_BYTES, Grid, make_grid
from ..store import TensorStore
from ..store.store import TierName
from ..store.tiers import LocalShard
from ..store.tiers.views import copy_into

if TYPE_CHECKING:
    from torch import Tensor

    from ..store.tiers.base import View

Value = Any
"""A torch tensor, a numpy array, or a number."""


@dataclass(frozen=True)
class StoreArray:
    """A rank's part of an array, all of it or its rows, and the kind of value that it is given back as: the facts that are
    known at once, whatever is still under way for it."""

    spec: ArraySpec
    """Of the whole array."""
    grid: Grid
    shard: int
    first: int
    """Its first row, along the array's first extent."""
    stop: int
    by_rows: bool
    """Whether others have other rows."""
    is_torch: bool = False
    """Whether it was put as a tensor of torch."""
    placements: tuple[Any, ...] = ()
    """Placements of a DTensor, if it was put as one."""

    @property
    def local(self) -> LocalShard:
        """The shard."""
        return LocalShard(self.spec, self.grid, self.shard)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rank's part."""
        return (self.stop - self.first, *self.spec.shape[1:]) if self.spec.shape else ()

    @property
    def numel(self) -> int:
        """Elements of the rank's part."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the rank's part."""
        return self.numel * self.spec.itemsize

    @property
    def dtype(self) -> np.dtype[Any]:
        """numpy's data type."""
        return numpy_dtype(self.spec.dtype)

    @property
    def grid_in_checkpoint(self) -> Grid:
        """How the array is cut in a checkpoint of all ranks."""
        is_small = self.by_rows and self.spec.nbytes < WHOLE_BYTES
        return make_grid(self.spec.stored_shape, 1, 1) if is_small else self.grid

    def flat_rows(self, rows: slice | None) -> tuple[int, int, tuple[int, ...]]:
        """Return (first, stop, shape) of the flat elements of `rows`, counted in the whole array, among those that the rank
        holds; of all these by default. Raises UsageError unless they are consecutive rows of this rank."""
        if rows is None:
            return 0, self.numel, self.shape
        spec = self.spec
        is_slice = isinstance(rows, slice)  # untyped callers may pass anything
        if not spec.shape or not is_slice or rows.step not in (None, 1):
            raise UsageError(
                f"array {spec.name!r} of shape {spec.shape}: expected rows of its first extent as a slice without a step, got "
                f"{rows!r}; `store[{spec.name!r}]` takes any of numpy's basic indices"
            )
        low, high, _ = rows.indices(spec.shape[0])
        row_numel = math.prod(spec.shape[1:])
        shape = (max(high - low, 0), *spec.shape[1:])
        if low >= high:
            return 0, 0, shape
        self.require(low * row_numel, high * row_numel)
        return (low - self.first) * row_numel, (high - self.first) * row_numel, shape

    def require(self, first: int, stop: int) -> int:
        """Return the rank's first element, counted in the whole array. Raises UsageError unless it holds `[first, stop)`."""
        row_numel = math.prod(self.spec.shape[1:])
        if first < stop and not self.first * row_numel <= first < stop <= self.stop * row_numel and self.by_rows:
            raise UsageError(
                f"array {self.spec.name!r}: this rank has rows [{self.first}, {self.stop}) of {self.spec.shape[0]}, others "
                "have the rest: `zstore.open_checkpoint` reads any rows of a checkpoint"
            )
        return self.first * row_numel


# -- values ---------------------------------------------------------------------------------------------------------


class ArraysByName(MutableMapping[str, StoreArray]):
    """Arrays whose names a checkpoint can have side by side: none is in another's folder."""

    def __init__(self) -> None:
        self._arrays: dict[str, StoreArray] = {}
        self._names: dict[str, str] = {}
        """By folder in a checkpoint."""
        self._groups: Counter[str] = Counter()
        """How many arrays are in a group's folder, or in one below it."""

    def __setitem__(self, name: str, array: StoreArray) -> None:
        """Add or replace an array. Raises UsageError for a name that no checkpoint can have beside those that are there."""
        if name not in self._arrays:
            path = array_path(name)
            outer = next((self._names[group] for group in groups_of(path) if group in self._names), None)
            if outer is not None or path in self._groups:
                inside = (other for folder, other in self._names.items() if folder.startswith(f"{path}/"))
                raise UsageError(
                    f"array {name!r} cannot be stored beside {outer or next(inside)!r}: in a checkpoint one would be in the "
                    "folder of the other; rename one of them"
                )
            self._names[path] = name
            self._groups.update(groups_of(path))
        self._arrays[name] = array

    def __delitem__(self, name: str) -> None:
        del self._arrays[name]
        path = array_path(name)
        del self._names[path]
        for group in groups_of(path):
            self._groups[group] -= 1
            if not self._groups[group]:
                del self._groups[group]

    def __getitem__(self, name: str) -> StoreArray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def is_dtensor(value: Value) -> bool:
    """Return whether `value` is a DTensor of torch."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_tensor(value: Value) -> bool:
    """Return whether `value` is a tensor of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def local_of(value: Value) -> Value:
    """Return a DTensor's local part, once it is there; any other value as it is."""
    if not is_dtensor(value):
        return value
    local = value.detach().to_local()
    return local.wait() if hasattr(local, "wait") else local  # the result of a collective under way


def flatten(name: str, value: Value) -> Array:
    """Return a value's elements, 1-D, without a copy if possible."""
    value = local_of(value)
    if is_tensor(value):
        from ..io.tensors import as_numpy, dtype_name, host_values

        dtype_name(value.dtype, name)
        return as_numpy(host_values(value)).reshape(-1)
    array = np.asarray(value)
    try:
        dtype = numpy_dtype(array.dtype.name)
    except ValueError as error:
        raise UsageError(f"array {name!r}: {error}") from None
    return np.ascontiguousarray(array, dtype).reshape(-1)


def flat_target(spec: ArraySpec, out: Value, shape: tuple[int, ...]) -> Array:
    """Return `out` as 1-D memory to read into."""
    out = local_of(out)
    if is_tensor(out):
        fits = out.device.type == "cpu" and out.is_contiguous() and not out.is_neg()
    else:
        fits = isinstance(out, np.ndarray) and out.flags.c_contiguous and out.flags.writeable
    flat = flatten(spec.name, out) if fits else None
    if flat is None or tuple(out.shape) != shape or flat.dtype.name != spec.dtype:
        raise UsageError(
            f"array {spec.name!r}: expected contiguous, writable {spec.dtype} of shape {shape} in host memory as `out`, got "
            f"{type(out).__name__} of {getattr(out, 'dtype', '?')} and {tuple(np.shape(out))}"
        )
    return flat


def shaped(data: Array, shape: tuple[int, ...], is_torch: bool, device: Any = None) -> Array | Tensor:
    """Return flat elements in their shape: as numpy's, or as a tensor of torch, on `device` if one is given."""
    values = data.reshape(shape)
    if not is_torch:
        return values
    from ..io.tensors import as_torch

    tensor = as_torch(values)
    return tensor if device is None else tensor.to(device)


# -- work on shards -------------------------------------------------------------------------------------------------


class ArrayWork:
    """Makes, moves and removes the arrays of `shards`, and copies their elements, flat, in the calling thread.

    Nobody else makes or removes arrays; two threads never use one array at once. `wait` waits for pins that will be released
    without the caller.
    """

    def __init__(self, shards: TensorStore) -> None:
        self._shards = shards

    def put(
        self, array: StoreArray, fill: Callable[[StoreArray], None], tier: TierName | None, wait: Callable[[], None]
    ) -> None:
        """Let `fill` set all values of an array, made unless an equal one exists. A failure leaves no new one."""
        shards, name = self._shards, array.spec.name
        former: Any = shards.tier_of(name) if name in shards else None
        is_new = not self.has(array) or tier not in (None, former)
        if is_new:
            self.remove(name, wait)
            usual: Any = "disk" if shards.options.all_paths else "host"
            shards.create(array.spec, grid=array.grid, shard=array.shard, tier=tier or former or usual)
        try:
            fill(array)
        except BaseException:
            if is_new:
                self.remove(name, wait)
            raise

    def has(self, array: StoreArray) -> bool:
        """Return whether such an array exists."""
        return array.spec.name in self._shards and self._shards.local(array.spec.name) == array.local

    def _require(self, array: StoreArray) -> None:
        if not self.has(array):
            raise UsageError(f"array {array.spec.name!r} is not what was put last, for that failed: put it again")

    def read(self, array: StoreArray, first: int, stop: int, target: Array | None) -> Array:
        """Read elements `[first, stop)` of the rank's part into `target`, or new memory."""
        self._require(array)
        if first == stop:
            return np.empty(0, array.dtype) if target is None else target
        return self._shards.reading(array.spec.name, first, stop, target)()

    def write(self, data: Array, first: int, array: StoreArray) -> None:
        """Replace the elements from `first` on."""
        self._require(array)
        if data.size:
            self._shards.writing(array.spec.name, data, first)()

    def load(self, source: ArraySource, array: StoreArray) -> None:
        """Replace all values by those of a checkpoint: link its file, if the array on disk is laid out alike, else read."""
        self._require(array)
        name, stored, shards = array.spec.name, source.array(array.spec.name), self._shards
        if not array.numel:
            return
        if shards.tier_of(name) == "disk" and (stored.grid, stored.spec.dtype) == (array.grid, array.spec.dtype):
            path, crcs = source.file_of(name, array.shard), source.shard_crcs(name, array.shard)
            if path is not None and crcs is not None and shards.adopt(name, path, crcs):
                return
        base = array.require(0, 0)
        with contextlib.closing(shards.stream([[name]], "fill")) as tiles:
            for tile in tiles:
                values = np.empty(tile.stop - tile.first, array.dtype)
                source.read(name, base + tile.first, base + tile.stop, values)
                copy_into(tile.views[0], values)

    def remove(self, name: str, wait: Callable[[], None]) -> None:
        """Forget an array, if it is there."""
        if name in self._shards:
            _unpinned(partial(self._shards.remove, name), wait)

    def move(self, name: str, tier: TierName, wait: Callable[[], None]) -> None:
        """Move an array to another tier."""
        _unpinned(partial(self._shards.move, name, tier, _copy_view), wait)


def _unpinned(operation: Callable[[], None], wait: Callable[[], None]) -> None:
    try:
        operation()
    except UsageError:  # it is pinned
        wait()
        operation()


def _copy_view(target: View, source: View) -> None:
    """Copy between views of two tiers."""
    if isinstance(target, np.ndarray) and isinstance(source, np.ndarray):
        target[...] = source
        return
    from ..io.tensors import as_torch

    as_torch(target).copy_(as_torch(source))
