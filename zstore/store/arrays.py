"""A store's arrays by name, conversion of values to flat elements, and the order of background operations on arrays.

Values are torch tensors, numpy arrays and numbers; torch is imported only if a tensor is passed or requested.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..checkpoint.layout import array_path, groups_of
from ..errors import UsageError
from ..format.arrays import MAX_CHUNK_NUMEL, Array, ArraySpec, LocalShard, make_grid, numpy_dtype
from ..io.machine import Workers
from ..io.queue import Ticket
from .tiers.base import View, copy_into, copy_out

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

Value = Any
"""A torch tensor, a numpy array, or a number."""


@dataclass(frozen=True)
class StoreArray(LocalShard):
    """An array of a store: the properties that are known even while operations on it are pending."""

    is_torch: bool = False
    """Whether it was put as a torch tensor."""

    @classmethod
    def whole(cls, spec: ArraySpec, is_torch: bool) -> StoreArray:
        """Return an array as one shard."""
        grid = make_grid(spec.stored_shape, 1)
        if 0 < grid.rows < grid.chunk_rows and grid.chunk_numel > MAX_CHUNK_NUMEL:
            # A single chunk needs no padding, which can be 15 times the size of the data.
            grid = replace(grid, shard_rows=grid.rows, chunk_rows=grid.rows)
        return cls(spec, grid, 0, is_torch)

    def flat_rows(self, rows: slice | None) -> tuple[int, int, tuple[int, ...]]:
        """Return (first, stop, shape) of the flat elements of `rows`, of all by default."""
        spec = self.spec
        if rows is None:
            return 0, spec.numel, spec.shape
        is_slice = isinstance(rows, slice)  # untyped callers may pass anything
        if not spec.shape or not is_slice or rows.step not in (None, 1):
            raise UsageError(
                f"array {spec.name!r} of shape {spec.shape}: expected rows of its first dimension as a slice without a step, "
                f"got {rows!r}"
            )
        low, high, _ = rows.indices(spec.shape[0])
        high, row_numel = max(low, high), math.prod(spec.shape[1:])
        return low * row_numel, high * row_numel, (high - low, *spec.shape[1:])


class ArraysByName(dict[str, StoreArray]):
    """Arrays by name, with names that do not conflict in a checkpoint: no array is inside another array's folder."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[str, str] = {}
        """Array names by folder in a checkpoint."""
        self._groups: set[str] = set()
        """Folders that are or were groups of arrays."""

    def set(self, name: str, array: StoreArray | None) -> None:
        """Add, replace or, with None, remove an array."""
        if array is not None:
            self[name] = array
        elif name in self:
            del self[name]

    def __setitem__(self, name: str, array: StoreArray) -> None:
        """Add or replace an array. Raises UsageError for a name that conflicts with others in a checkpoint."""
        if name not in self:
            path = array_path(name)
            conflicts = [self._names[group] for group in groups_of(path) if group in self._names]
            if path in self._groups:
                conflicts += [owner for folder, owner in self._names.items() if folder.startswith(f"{path}/")]
            if conflicts:
                raise UsageError(
                    f"array {name!r} cannot be stored together with {conflicts[0]!r}: in a checkpoint one would be in "
                    "the folder of the other; rename one of them"
                )
            self._names[path] = name
            self._groups.update(groups_of(path))
        super().__setitem__(name, array)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self._names[array_path(name)]


def spec_of(name: str, shape: tuple[int, ...], dtype: str, dims: tuple[str, ...]) -> ArraySpec:
    """Return the spec of an array that keeps its shape. Raises UsageError if the format cannot store it."""
    try:
        return ArraySpec(name=name, shape=tuple(shape), dtype=dtype, keeps_shape=len(shape) not in (1, 2), dims=dims)
    except ValueError as error:
        raise UsageError(str(error)) from None


def is_tensor(value: Value) -> bool:
    """Return whether `value` is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def flatten(name: str, value: Value) -> Array:
    """Return a value's elements, 1-D, without a copy if possible."""
    if is_tensor(value):
        from ..io.memory import as_numpy, dtype_name, host_values

        if hasattr(value, "to_local"):
            raise UsageError(
                f"array {name!r}: expected all values of a tensor, got a DTensor: `zstore.dcp.Writer` saves those of all "
                "ranks, and `tensor.to_local()` is this rank's part"
            )
        if value.is_meta or str(value.layout) != "torch.strided":
            raise UsageError(f"array {name!r}: expected dense values, got {value.layout} on {value.device}")
        dtype_name(value.dtype, name)
        return as_numpy(host_values(value)).reshape(-1)
    array = np.asarray(value)
    try:
        dtype = numpy_dtype(array.dtype.name)
    except ValueError as error:
        raise UsageError(f"array {name!r}: {error}") from None
    return np.ascontiguousarray(array, dtype).reshape(-1)


def flat_output(spec: ArraySpec, out: Value, shape: tuple[int, ...]) -> Array:
    """Return `out` as 1-D memory to read into."""
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


def shaped(data: Array, shape: tuple[int, ...], is_torch: bool) -> Array | Tensor:
    """Return flat elements reshaped, as a numpy array or a torch tensor."""
    values = data.reshape(shape)
    if not is_torch:
        return values
    from ..io.memory import as_torch

    return as_torch(values)


def copy_view(target: View, source: View) -> None:
    """Copy between views of two tiers."""
    if isinstance(source, np.ndarray):
        copy_into(target, source)
    else:
        copy_out(source, target)


_NUM_OPERATIONS = 4
"""Operations that run concurrently."""


class ArrayOrder:
    """Runs operations on arrays in separate threads; operations on the same array run one after another, in order."""

    def __init__(self) -> None:
        self._workers = Workers(_NUM_OPERATIONS, "zstore-store")
        self._current = threading.local()
        """`names`: the arrays of the operation that this thread is running; it does not wait for operations on them."""
        self._pending: dict[str, tuple[object, Ticket[Any]]] = {}
        """The last unfinished operation on each array, with a key; a finished ticket would keep its result alive."""
        self._failed: dict[str, BaseException] = {}
        """The error of the last change of an array: its ticket may have been dropped."""
        self._lock = threading.RLock()
        """Reentrant: at interpreter shutdown, without threads, an operation runs while it is being queued."""

    def submit(self, name: str, operation: Callable[[], T], *, changes: bool) -> Ticket[T]:
        """Queue an operation on array `name`; return its ticket. If the ticket reports the error of a change,
        `raise_failed` does not raise it again."""

        def run() -> T:
            try:
                result = operation()
            except BaseException as error:
                if changes:
                    self._failed[name] = error
                raise
            if changes:
                self._failed.pop(name, None)
            return result

        def mark_observed() -> None:
            with self._lock:
                if self._failed.get(name) is ticket.error():
                    self._failed.pop(name, None)

        ticket = self.submit_on([name], run)
        return Ticket(ticket.future, mark_observed) if changes else ticket

    def submit_on(self, names: Sequence[str], operation: Callable[[], T]) -> Ticket[T]:
        """Queue a read-only operation on several arrays; return its ticket."""
        with self._lock:
            predecessors = [pending[1] for name in names if (pending := self._pending.get(name)) is not None]

            def run() -> T:
                for ticket in predecessors:
                    ticket.error()
                predecessors.clear()
                self._current.names = names
                try:
                    return operation()
                finally:
                    self._current.names = None

            key, ticket = object(), self._workers.submit(run)
            self._pending.update(dict.fromkeys(names, (key, ticket)))
        # The callback has the key, not the ticket: they would keep each other alive.
        ticket.when_done(partial(self._end, names, key))
        return ticket

    def _end(self, names: Sequence[str], key: object) -> None:
        with self._lock:
            for name in names:
                if name in self._pending and self._pending[name][0] is key:
                    del self._pending[name]

    @property
    def in_operation(self) -> bool:
        """Whether this thread is running an operation."""
        return getattr(self._current, "names", None) is not None

    def names(self) -> list[str]:
        """Return the arrays with a pending operation, or with a failed operation that has not been reported."""
        with self._lock:
            return list({*self._pending, *self._failed})

    def wait(self, names: Iterable[str]) -> None:
        """Wait for all operations on `names`, except on the arrays of the operation that this thread is running. Errors
        stay with their tickets."""
        own = getattr(self._current, "names", None) or ()
        with self._lock:
            waited_for = [name for name in names if name not in own]
            # The entries stay, so that operations queued in the meantime wait for them too.
            pending = [entry for name in waited_for if (entry := self._pending.get(name)) is not None]
        for _, ticket in pending:
            ticket.error()

    def raise_failed(self, names: Iterable[str]) -> None:
        """Raise, once, the error of a failed change of `names`, unless a later change of the array succeeded."""
        for error in [self._failed.pop(name) for name in names if name in self._failed]:
            raise error

    def forget(self, name: str) -> None:
        """Discard the error of an array that is removed."""
        self._failed.pop(name, None)

    def close(self) -> None:
        """Stop the threads once all operations have ended."""
        self._workers.close()
