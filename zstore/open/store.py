"""The store for programs without the engine: named tensors of any shape that are put, read, changed in passes, and saved.

[Note: the front door]
`Store` is a program's interface to a `TensorStore`: it makes specs and grids, keeps shapes, and runs everything behind the
caller. Operations on one array are carried out in the order of the calls, those on several concurrently, by threads of
this store; the caller gets a ticket, which is awaited or waited for. So there is one set of methods for
programs with and without asyncio, usable from several tasks and threads, and no call of a coroutine blocks its loop.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Self

import numpy as np

from ..checkpoint.format import decode_state, encode_state
from ..checkpoint.request import SaveSummary
from ..errors import UsageError
from ..format.arrays import Array, ArraySpec
from ..io.closing import OF_THE_PARENT, Closing, closing_with, tell_of_fork
from ..io.files import UserPath, user_location, user_path
from ..io.pool import Workers, run_in_thread
from ..io.queue import Ticket, wait_all
from ..store import TensorStore
from ..store.order import ArrayOrder
from ..store.snapshot import Snapshot
from ..store.statistics import StoreStatistics
from ..store.store import TierName
from .arrays import ArraysByName, ArrayWork, StoreArray, Value, flat_target, flatten, local_of, shaped
from .checkpoint import Checkpoint, open_checkpoint
from .lazy import LazyArray
from .ranks import ALONE, Ranks
from .saves import CheckpointOptions, Saves
from .stream import Mode, Values

_NUM_OPERATIONS = 4
"""Operations on arrays under way at a time."""
_CLOSED = "the store is closed: what was put is gone, but for what `checkpoint` kept"


class Store(Closing):
    """Named tensors in tiers: "disk", "host" and "device". Made by `open_store`; use it in a `with` or `async with` block.

    An operation behind the caller gives a `Ticket`: `await ticket` or `ticket.wait()` gives its result or raises its error. A
    change whose ticket is dropped is not lost: `flush` waits for it and raises its error.

    Over 300 lines: it is the public surface, and half of it is docstrings.
    """

    def __init__(self, shards: TensorStore, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        """This process among those that share the arrays."""
        self._shards = shards
        self._work = ArrayWork(shards)
        self._arrays = ArraysByName()
        self._lock = threading.RLock()
        """Guards the table of arrays: held shortly, so that no coroutine waits for it."""
        self._order = ArrayOrder(_NUM_OPERATIONS)
        self._workers = Workers(2, "zstore-passes")
        self._saves = Saves(shards, ranks)
        self._loads: dict[Ticket[Any], list[Ticket[None]]] = {}
        """Loads whose end was not reported, and the changes that they consist of."""
        self._closed = ""
        """Why it cannot be used any more."""
        self._end = closing_with(self, _close, self._saves, self._order, self._workers, self._shards)
        tell_of_fork(self)

    def _forked(self) -> None:
        """Belong to the parent, in a forked child: its threads and its folder are not the child's."""
        self._lock, self._closed = threading.RLock(), f"the store {OF_THE_PARENT}"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a store belongs to the process that opened it and cannot be pickled: open one in the other process"
        )

    # -- arrays -----------------------------------------------------------------------------------------------------

    def put(
        self,
        name: str,
        value: Value,
        *,
        tier: TierName | None = None,
        dims: Sequence[str] = (),
        shape: Sequence[int] | None = None,
    ) -> Ticket[None]:
        """Store `value` under `name`, `group/name` or a name alone, in place of any former value.

        Any shape and any of the format's data types; not to be changed until the ticket is done. The array is kept on its
        present tier, or on disk, or in host memory for a store without a path, unless `tier` says otherwise; under 64 KiB
        always in host memory. `dims` are names of its extents, which checkpoints keep.

        Of several ranks, each puts its part of a DTensor that is placed as `Shard(0)`, or with `shape`, that of the whole
        array, the rows `own_rows(shape[0])` of it; of any other value each has all, and rank 0's is saved. Raises UsageError
        for a value that cannot be stored; the ticket BudgetError or DiskFullError if there is no room.
        """
        array, data = self.ranks.hold_value(name, value, shape=shape, dims=tuple(dims))
        return self._put(array, partial(self._work.write, data, 0), tier)

    def _put(self, array: StoreArray, fill: Callable[[StoreArray], None], tier: TierName | None) -> Ticket[None]:
        name = array.spec.name
        with self._lock:
            self._check_open()
            former = self._arrays.get(name)
            if former is not None and not array.spec.dims and former.spec.shape == array.spec.shape:
                array = replace(array, spec=replace(array.spec, dims=former.spec.dims))
            self._arrays[name] = array
            put = partial(self._work.put, array, fill, tier, self._saves.asked_for())
            return self._replace(name, former, put)

    def _replace(self, name: str, former: StoreArray | None, operation: Callable[[], None]) -> Ticket[None]:
        """Queue a replacement or removal of an array; if it fails, the array is `former` again, unless that is gone."""
        array = self._arrays.get(name)

        def run() -> None:
            try:
                operation()
            except BaseException:
                with self._lock:
                    if self._arrays.get(name) is array:
                        self._arrays.pop(name, None)
                        if former is not None and self._work.has(former):
                            self._arrays[name] = former
                raise

        return self._order.submit(name, run, changes=True)

    def get(
        self,
        name: str,
        *,
        rows: slice | None = None,
        out: Value | None = None,
        device: Any = None,
    ) -> Ticket[Any]:
        """Read an array, or `rows` of its first extent (a slice without a step), in the kind of value that was put.

        Into `out`, if it is given: of the rows' shape and the array's data type, contiguous, in host memory; else into new
        memory, which is the caller's. With `device` it is a tensor there. Of several ranks, each has its own rows of an array
        that they share, as a DTensor if it was put as one; `rows` count in the whole array and come as a tensor. Raises
        KeyError for a name that is not there, UsageError for rows of other ranks.
        """
        with self._lock:
            array = self._array(name)
            first, stop, shape = array.flat_rows(rows)
            target = None if out is None else flat_target(array.spec, out, shape)
            read = partial(self._work.read, array, first, stop, target)
            ticket = self._order.submit(name, read, changes=False)

        def give(data: Array) -> Any:
            if out is not None:
                return out
            value = shaped(data.view(array.dtype), shape, array.is_torch or device is not None, device)
            return self.ranks.distributed(value, array) if rows is None and array.placements else value

        return ticket.then(give)

    def update(self, name: str, value: Value, *, rows: slice | None = None) -> Ticket[None]:
        """Replace an array's values, or those of `rows` of its first extent, by `value`, of their shape and data type.

        Of several ranks, each replaces its own rows of an array that they share. `value` must not be changed until the ticket
        is done. Raises UsageError if it does not fit, KeyError for a name that is not there.
        """
        value = local_of(value)
        with self._lock:
            array = self._array(name)
            first, _, shape = array.flat_rows(rows)
            data = flatten(name, value)
            if tuple(np.shape(value)) != shape or data.dtype.name != array.spec.dtype:
                raise UsageError(
                    f"array {name!r}: expected {array.spec.dtype} of shape {shape}, got {data.dtype.name} of {np.shape(value)}"
                )
            return self._order.submit(name, partial(self._work.write, data, first, array), changes=True)

    def delete(self, name: str) -> Ticket[None]:
        """Remove an array and free its space, once checkpoints that are being written from it are done.

        Raises KeyError for a name that is not there; the ticket UsageError while somebody pins it.
        """
        with self._lock:
            former = self._array(name)
            del self._arrays[name]
            return self._replace(name, former, partial(self._work.remove, name, self._saves.asked_for()))

    def move(self, names: str | Iterable[str], *, tier: TierName) -> Ticket[None]:
        """Move arrays with their values to another tier. The ticket raises BudgetError or DiskFullError if there is no room:
        then the array at hand stays on its tier."""
        with self._lock:
            chosen = [names] if isinstance(names, str) else list(names)
            for name in chosen:
                self._array(name)
            moves = {name: partial(self._work.move, name, tier, self._saves.asked_for()) for name in chosen}
            tickets = [self._order.submit(name, move, changes=True) for name, move in moves.items()]
        return self._all(tickets)

    def stream(self, names: Iterable[str] | None = None, *, prefetch: int = 2, mode: Mode = "update") -> Values:
        """Return (name, value) of arrays one after the other, all of them by default: `for` and `async for` alike.

        `prefetch` arrays are read ahead, within the budget. With "update" a value is changed in place and stored behind the
        loop, that at hand too when the loop is left; with "read" changes are lost. A value is valid until the next one; of
        several ranks, each goes over its own rows. Raises KeyError for a name that is not there, BudgetError if the budget has
        no room for the largest array.
        """
        with self._lock:
            self._check_open()
            arrays = [self._array(name) for name in (self._arrays if names is None else names)]
        if prefetch < 0:
            raise UsageError(f"prefetch={prefetch}: expected a number of arrays")
        return Values(
            arrays,
            lambda name, out: self.get(name, out=out),
            self.update,
            shards=self._shards,
            workers=self._workers,
            prefetch=prefetch,
            mode=mode,
        )

    # -- inventory --------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all arrays, in the order in which they were put."""
        with self._lock:
            return list(self._arrays)

    def spec(self, name: str) -> ArraySpec:
        """Return name, shape and data type of an array, of all ranks' rows. Raises KeyError for a name that is not there."""
        with self._lock:
            return self._array(name).spec

    def own_rows(self, num_rows: int) -> slice:
        """Return this rank's rows of so many, as torch's `Shard(0)` cuts them; alone, all of them."""
        return slice(*self.ranks.rows(num_rows))

    def tier_of(self, name: str) -> Ticket[str]:
        """Return an array's tier once operations under way for it are done: "disk", "host" or "device"."""
        with self._lock:
            self._array(name)
            return self._order.submit(name, partial(self._shards.tier_of, name), changes=False)

    def __getitem__(self, name: str) -> LazyArray:
        """Return the array as one that is read when it is indexed, with numpy's indexing."""
        with self._lock:
            array = self._array(name)

        def read(first: int, stop: int, out: Array) -> None:
            self._check_open()
            base = array.require(first, stop)
            operation = partial(self._work.read, array, first - base, stop - base, out)
            self._order.submit(name, operation, changes=False).wait()

        return LazyArray(array.spec, read)

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._arrays

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return f"<Store of {len(self)} arrays in {self._shards.options.run_path or 'memory'}>"

    def statistics(self) -> StoreStatistics:
        """Return the store's contents, and its work since it was opened."""
        return self._shards.statistics()

    def _array(self, name: str) -> StoreArray:
        self._check_open()
        try:
            return self._arrays[name]
        except KeyError:
            some = f", for example {list(self._arrays)[:3]}" if self._arrays else ""
            raise KeyError(f"the store has no array {name!r}; it has {len(self._arrays)}{some}") from None

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(self._closed)

    # -- versions ---------------------------------------------------------------------------------------------------

    def flush(self) -> Ticket[None]:
        """Wait for all changes so far; the ticket raises, once, the error of one that failed, unless a later one succeeded."""
        with self._lock:
            self._check_open()
            return self._workers.submit(partial(self._flush, self._order.names(), list(self._loads)))

    def _flush(self, names: Sequence[str], loads: Sequence[Ticket[Any]]) -> None:
        self._order.wait(names)
        errors = [(loading, error) for loading in loads if (error := loading.error()) is not None]
        for loading, error in errors:
            if loading in self._loads:
                self._hear_load(loading)
                raise error
        self._order.raise_failed(names)

    def _pin(self, names: Iterable[str] | None) -> Ticket[Snapshot]:
        """Queue a pin of arrays' values with the changes that are under way now."""

        def pin() -> Snapshot:
            self._order.raise_failed(chosen)
            return self._shards.snapshot(chosen)

        with self._lock:
            self._check_open()
            chosen = list(self._arrays) if names is None else list(names)
            for name in chosen:
                self._array(name)
            return self._order.submit_on(chosen, pin)

    def checkpoint(
        self,
        path: UserPath,
        *,
        names: Iterable[str] | None = None,
        extra: Mapping[str, Any] | None = None,
        step: int = 0,
        keep: int | None = None,
        overwrite: bool = False,
    ) -> Ticket[SaveSummary]:
        """Save the present values of arrays as the checkpoint `path`, whose last part is the tag.

        Files on the same drive are linked, not copied; other data is written behind the caller, and a change of an array in
        memory waits until it is written. When the ticket is done all of it is committed, durably: `load`,
        `zstore.open_checkpoint` and zarr read it. `extra` is JSON to keep beside the arrays, with
        numpy's numbers and paths, `step` a number to know it by.
        With `keep` only so many of this store's checkpoints stay in the folder.

        Of several ranks, all call it, in the same order and with the same arrays: each saves its rows, rank 0 commits, and the
        ticket is done, or raises, on all.

        Raises KeyError for a name that is not there, UsageError for `extra` that is not JSON; the ticket UsageError for names
        of which one is a group of another, CheckpointExistsError unless `overwrite`, StorageError, DiskFullError.
        """
        place = user_path(path)
        kept = decode_state(encode_state(extra or {}, "extra"))  # a copy, and an error now if it is not JSON
        with self._lock:
            self._check_open()
            rows = frozenset(name for name, array in self._arrays.items() if array.by_rows)
            pinned: Callable[[], Snapshot]
            try:
                pinned = self._pin(names).wait
            except KeyError as error:
                if self.ranks.world_size == 1:
                    raise
                pinned = partial(_raise, error)  # once the other ranks know of it
            options = CheckpointOptions(place, kept, step, keep, overwrite, rows)
            return self._saves.start(pinned, options)

    def load(
        self,
        path: UserPath,
        tag: str | float | None = None,
        *,
        names: Iterable[str] | None = None,
        tier: TierName | None = None,
    ) -> Ticket[dict[str, Any]]:
        """Put the arrays of a checkpoint, all of them by default, in place of those of the same names; the ticket gives its
        `extra`. See `zstore.open_checkpoint` for the forms of `path` and `tag`, and the errors raised.

        Files on the same drive that are cut as this store has them are linked. Of several ranks, however many saved it, each
        reads its own rows alone: of arrays that are here already as they are here, of others by `own_rows`, except scalars
        and arrays that each rank had all of when it saved them.
        """
        self._check_open()
        puts: list[Ticket[None]] = []
        opened = partial(open_checkpoint, user_location(path), tag)
        loading = self._workers.submit(partial(self._load, opened, names, tier, puts))
        with self._lock:
            left = {one: parts for one, parts in self._loads.items() if not one.done() or one.error() is not None}
            self._loads = {**left, loading: puts}
        return Ticket(loading.future, partial(self._hear_load, loading))

    def _hear_load(self, loading: Ticket[Any]) -> None:
        with self._lock:
            _hear(self._loads.pop(loading, ()))

    def _load(
        self,
        opened: Callable[[], Checkpoint],
        names: Iterable[str] | None,
        tier: TierName | None,
        puts: list[Ticket[None]],
    ) -> dict[str, Any]:
        with opened() as checkpoint:
            chosen = list(checkpoint if names is None else names)
            found = {name: checkpoint[name].spec for name in chosen}
            whole = checkpoint.state.get("whole", ())
            with self._lock:
                arrays = [
                    self.ranks.hold_loaded(spec, self._arrays.get(name), by_rows=name not in whole)
                    for name, spec in found.items()
                ]
            puts += [self._put(array, partial(self._work.load, checkpoint.source), tier) for array in arrays]
            wait_all(puts)
            extra: dict[str, Any] = dict(checkpoint.state.get("extra", {}))
        return extra

    # -- the end ----------------------------------------------------------------------------------------------------

    def _all(self, tickets: Sequence[Ticket[Any]]) -> Ticket[None]:
        """Return a ticket for all of `tickets`: it raises the first error once all ended."""

        def wait() -> None:
            wait_all([*tickets])

        waiting = self._workers.submit(wait)
        return Ticket(waiting.future, partial(_hear, tickets))

    def close(self) -> None:
        """Finish the work under way, checkpoints too, then release memory, files and the folder; a second call does nothing.

        Raises afterwards the error of a change or a checkpoint that was not reported.
        """
        with self._lock:
            if self._closed:
                return
        with contextlib.ExitStack() as last_to_first:
            last_to_first.callback(self._end)
            for save in self._saves.unheard:
                last_to_first.callback(save.wait)
            last_to_first.callback(self._flush, self._order.names(), list(self._loads))
            last_to_first.callback(setattr, self, "_closed", _CLOSED)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await run_in_thread(self.close, "zstore-close")


def _close(saves: Saves, order: ArrayOrder, workers: Workers, shards: TensorStore) -> None:
    saves.close()
    workers.close()
    order.close()
    shards.close()


def _hear(tickets: Sequence[Ticket[Any]]) -> None:
    for ticket in tickets:
        ticket.hear()


def _raise(error: Exception) -> NoReturn:
    raise error
