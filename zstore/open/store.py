"""The store for programs without the engine: named tensors of any shape that are put, read, changed in passes, and saved.

[Note: the front door]
`Store` is what a program needs of a `TensorStore`: it makes specs and grids, keeps shapes, and lets everything run behind
the caller. Operations on one array are carried out in the order in which they were asked for, those on others beside them,
by threads of this store; whoever asks gets a ticket, which is awaited or waited for. So there is one set of methods for
programs with and without asyncio, usable from several tasks and threads, and no call of a coroutine blocks its loop.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..checkpoint.request import SaveSummary
from ..checkpoint.retention import Keep
from ..closing import Closing, closing_with
from ..errors import BudgetError, UsageError
from ..format.arrays import Array, ArraySpec, numpy_dtype
from ..io.files import Files
from ..io.pool import Workers, run_in_thread
from ..io.queue import Ticket
from ..store import StoreOptions, TensorStore
from ..store.order import ArrayOrder
from ..store.snapshot import Snapshot
from ..store.statistics import StoreStatistics
from ..store.store import TierName
from .arrays import WholeArrays
from .checkpoint import open_checkpoint
from .lazy import LazyArray
from .saves import Saves
from .stream import Mode, Values
from .values import Value, flat_rows, flat_target, flatten, shaped, spec_of

_NUM_OPERATIONS = 8
"""Operations on arrays under way at a time."""


def open_store(  # noqa: PLR0913 - options of one thing, all but the first by name
    path: str | os.PathLike[str] | None = None,
    *,
    host_budget_bytes: float | None = None,
    buffer_count: int | None = None,
    buffer_size: int | None = None,
    pin_memory: bool = False,
    num_threads: int = 8,
    verify: bool = True,
    device: str = "cpu",
) -> Store:
    """Open a store whose arrays rest in a folder of its own below `path`, on a fast drive, or without a path in memory.

    What is put lives as long as the store is open; `Store.checkpoint` keeps it, and `Store.load` brings it back, both by links
    where drive and layout allow. All memory that the store takes is counted against `host_budget_bytes`: transfer buffers,
    arrays in host memory, what is read ahead; None: buffers of 64 MiB, and no bound for the rest. `buffer_count` buffers of
    `buffer_size` bytes are what transfers go through, in place of that. `pin_memory` registers them with CUDA. `num_threads`
    read and write; `verify` checks the crc32c of all that is read from the drive; `device` is where tier "device" is.

    Raises UsageError for what makes no sense, StorageError for a folder that cannot be written, BudgetError where the budget
    has no room for the buffers.
    """
    numbers = {"host_budget_bytes": host_budget_bytes, "buffer_count": buffer_count, "buffer_size": buffer_size}
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise UsageError(f"open_store({name}={number!r}): expected a number of at least 1")
    run_path = None if path is None else Path(os.path.abspath(path))
    if run_path is not None:
        Files().make_folder(run_path)
    options = StoreOptions(
        run_path=run_path,
        host_budget_bytes=None if host_budget_bytes is None else int(host_budget_bytes),
        buffer_count=buffer_count,
        buffer_size=buffer_size,
        shares_folders=True,
        num_threads=num_threads,
        verify=verify,
        device=device,
        pin_buffers=pin_memory,
    )
    if options.host_budget_bytes is not None and options.pool_bytes > options.host_budget_bytes:
        raise BudgetError(
            f"open_store(): buffers of {options.pool_bytes} bytes do not fit into "
            f"host_budget_bytes={options.host_budget_bytes}: raise it, or take fewer or smaller buffers"
        )
    return Store(TensorStore(options))


@dataclass(frozen=True)
class _Entry:
    """What is known of an array at once, whatever is still under way for it."""

    spec: ArraySpec
    is_torch: bool
    """Whether it was put as a tensor of torch, and is given back as one."""


class Store(Closing):
    """Named tensors in tiers: "disk", "host" and "device". Made by `open_store`; use it in a `with` or `async with` block.

    What runs behind the caller gives a `Ticket`: `await ticket` or `ticket.wait()` gives its result or raises its error. A
    change whose ticket is dropped is not lost: `flush` waits for it and raises its error.
    """

    def __init__(self, shards: TensorStore) -> None:
        self._shards = shards
        self._arrays = WholeArrays(shards)
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.RLock()
        """Of what is known of arrays: held shortly, so that no coroutine waits for it."""
        self._order = ArrayOrder(_NUM_OPERATIONS)
        self._workers = Workers(2, "zstore-passes")
        self._saves = Saves(shards)
        self._ahead: dict[str, _Ahead] = {}
        self._closed = False
        self._end = closing_with(self, _close, self._order, self._workers, self._shards)

    # -- arrays -----------------------------------------------------------------------------------------------------

    def put(self, name: str, value: Value, *, tier: TierName | None = None, dims: Sequence[str] = ()) -> Ticket[None]:
        """Store `value` under `name`, `group/name` or a name alone, in place of what is there.

        Any shape and any of the format's data types; not to be changed until the ticket is done. The array rests on disk, or
        in host memory for a store without a path, or where it rests already, unless `tier` says otherwise; under 64 KiB it
        rests in host memory in any case. `dims` are names of its extents, which checkpoints keep. Raises UsageError for a
        value that cannot be stored; the ticket BudgetError or DiskFullError where there is no room.
        """
        data, is_torch = flatten(name, value)
        spec = spec_of(name, tuple(np.shape(value)), data.dtype.name, tuple(dims))
        with self._lock:
            self._check_open()
            self._forget_ahead(name)
            former = self._entries.get(name)
            if former is not None and not dims and former.spec.shape == spec.shape:
                spec = replace(spec, dims=former.spec.dims)
            self._entries[name] = _Entry(spec, is_torch)
            return self._replace(name, former, partial(self._arrays.put, spec, data, tier, self._saves.asked_for()))

    def _replace(self, name: str, former: _Entry | None, operation: Callable[[], None]) -> Ticket[None]:
        """Queue what replaces or removes an array; where that fails, the array is `former` again, if that is still there."""
        entry = self._entries.get(name)

        def run() -> None:
            try:
                operation()
            except BaseException:
                with self._lock:
                    if self._entries.get(name) is entry:
                        self._entries.pop(name, None)
                        if former is not None and self._arrays.has(former.spec):
                            self._entries[name] = former
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
        """Read an array, or `rows` of its first extent (a slice without a step), as what it was put as.

        Into `out`, if it is given: of the rows' shape and the array's data type, contiguous, in host memory; else into new
        memory, which is the caller's. With `device` it is a tensor there. Raises KeyError for a name that is not there.
        """
        with self._lock:
            entry = self._entry(name)
            first, stop, shape = flat_rows(entry.spec, rows)
            ahead = self._ahead.pop(name, None) if rows is None and out is None else None
            is_torch = entry.is_torch or device is not None or (out is not None and not isinstance(out, np.ndarray))
            if ahead is not None:
                ticket = ahead.ticket.then(lambda data: data.view(numpy_dtype(entry.spec.dtype)))
                ticket.when_done(ahead.release)
            else:
                target = None if out is None else flat_target(entry.spec, out, shape)
                read = partial(self._arrays.read, entry.spec, first, stop, target)
                ticket = self._order.submit(name, read, changes=False)
        return ticket.then(lambda data: shaped(data, shape, is_torch, device) if out is None else out)

    def update(self, name: str, value: Value, *, rows: slice | None = None) -> Ticket[None]:
        """Replace an array's values, or those of `rows` of its first extent, by `value`, of their shape and data type.

        `value` must not be changed until the ticket is done. Raises UsageError where it does not fit, KeyError for a name that
        is not there.
        """
        with self._lock:
            entry = self._entry(name)
            first, _, shape = flat_rows(entry.spec, rows)
            data, _ = flatten(name, value)
            if tuple(np.shape(value)) != shape or data.dtype.name != entry.spec.dtype:
                raise UsageError(
                    f"array {name!r}: expected {entry.spec.dtype} of shape {shape}, got {data.dtype.name} of {np.shape(value)}"
                )
            self._forget_ahead(name)
            return self._order.submit(name, partial(self._arrays.write, entry.spec, first, data), changes=True)

    def delete(self, name: str) -> Ticket[None]:
        """Forget an array and free its room, once checkpoints that are being written from it are done.

        Raises KeyError for a name that is not there; the ticket UsageError while somebody pins it.
        """
        with self._lock:
            former = self._entry(name)
            del self._entries[name]
            self._forget_ahead(name)
            return self._replace(name, former, partial(self._arrays.remove, name, self._saves.asked_for()))

    def move(self, names: str | Iterable[str], *, tier: TierName) -> Ticket[None]:
        """Let arrays rest on another tier, with their values. The ticket raises BudgetError or DiskFullError where there is no
        room: then the array at hand is where it was."""
        with self._lock:
            chosen = [names] if isinstance(names, str) else list(names)
            for name in chosen:
                self._entry(name)
            moves = {name: partial(self._arrays.move, name, tier, self._saves.asked_for()) for name in chosen}
            tickets = [self._order.submit(name, move, changes=True) for name, move in moves.items()]
        return self._all(tickets)

    def prefetch(self, names: str | Iterable[str]) -> Ticket[None]:
        """Begin to read whole arrays into host memory, within the budget, for the next `get` of each, which takes them.

        Raises BudgetError where there is no room for all of them: then none is read ahead.
        """
        with self._lock:
            chosen = [names] if isinstance(names, str) else list(names)
            wanted = [self._entry(name).spec for name in chosen if name not in self._ahead]
            budget = self._shards.budget
            budget.require(sum(spec.nbytes for spec in wanted), "what is read ahead")
            for spec in wanted:
                budget.take(spec.nbytes)
                read = partial(self._arrays.read, spec, 0, spec.numel, None)
                ticket = self._order.submit(spec.name, read, changes=False)
                self._ahead[spec.name] = _Ahead(ticket, partial(budget.release, spec.nbytes))
            return self._all([self._ahead[name].ticket for name in chosen])

    def _forget_ahead(self, name: str) -> None:
        ahead = self._ahead.pop(name, None)
        if ahead is not None:
            ahead.ticket.when_done(ahead.release)

    def stream(self, names: Iterable[str] | None = None, *, prefetch: int = 2, mode: Mode = "update") -> Values:
        """Return (name, value) of arrays one after the other, all of them by default: `for` and `async for` alike.

        `prefetch` arrays are read ahead, within the budget. With "update" a value is changed in place and stored behind the
        loop, that at hand too when the loop is left; with "read" changes are lost. A value is valid until the next one. Raises
        KeyError for a name that is not there, BudgetError where the budget has no room for the largest array.
        """
        with self._lock:
            specs = [self._entry(name).spec for name in (self._entries if names is None else names)]
        if prefetch < 0:
            raise UsageError(f"prefetch={prefetch}: expected a number of arrays")
        return Values(self, self._shards, specs, prefetch, mode)

    # -- what there is ----------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all arrays, in the order in which they were put."""
        with self._lock:
            return list(self._entries)

    def spec(self, name: str) -> ArraySpec:
        """Return name, shape and data type of an array. Raises KeyError for a name that is not there."""
        with self._lock:
            return self._entry(name).spec

    def tier_of(self, name: str) -> Ticket[str]:
        """Return where an array rests once what is under way for it is done: "disk", "host" or "device"."""
        with self._lock:
            self._entry(name)
            return self._order.submit(name, partial(self._shards.tier_of, name), changes=False)

    def __getitem__(self, name: str) -> LazyArray:
        """Return the array as one that is read when it is indexed, as numpy's are."""
        spec = self.spec(name)

        def read(first: int, stop: int, out: Array) -> None:
            self._order.submit(name, partial(self._arrays.read, spec, first, stop, out), changes=False).wait()

        return LazyArray(name, spec, spec.dtype, read)

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<Store of {len(self)} arrays in {self._shards.options.run_path or 'memory'}>"

    def statistics(self) -> StoreStatistics:
        """Return what the store holds and did since it was opened."""
        return self._shards.statistics()

    def _entry(self, name: str) -> _Entry:
        self._check_open()
        try:
            return self._entries[name]
        except KeyError:
            some = f", for example {list(self._entries)[:3]}" if self._entries else ""
            raise KeyError(f"the store has no array {name!r}; it has {len(self._entries)}{some}") from None

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the store is closed: what was put is gone, but for what `checkpoint` kept")

    # -- versions ---------------------------------------------------------------------------------------------------

    def flush(self) -> Ticket[None]:
        """Wait for all changes so far; the ticket raises, once, the error of one that failed and was not made good since."""
        with self._lock:
            self._check_open()
        return self._workers.submit(partial(self._flush, self._order.names()))

    def _flush(self, names: Sequence[str]) -> None:
        self._order.settle(names)
        self._order.raise_failed(names)

    def pin(self, names: Iterable[str] | None = None) -> Snapshot:
        """Pin what arrays hold now, all of them by default, for `checkpoint(of=...)`. Release it, or use it in a `with` block.

        Until then changes on disk go elsewhere, and a change in memory copies the array first. Waits for changes under way,
        and raises as `flush` does.
        """
        return self._pin(names).wait().copied_when_changed()

    def _pin(self, names: Iterable[str] | None) -> Ticket[Snapshot]:
        """Queue a pin of what arrays hold with the changes that are under way now."""

        def pin() -> Snapshot:
            self._order.raise_failed(chosen)
            return self._shards.snapshot(chosen)

        with self._lock:
            self._check_open()
            chosen = list(self._entries) if names is None else list(names)
            for name in chosen:
                self._entry(name)
            return self._order.submit_on(chosen, pin)

    def checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        names: Iterable[str] | None = None,
        of: Snapshot | None = None,
        extra: Mapping[str, Any] | None = None,
        step: int = 0,
        keep: int | None = None,
        overwrite: bool = False,
    ) -> Ticket[SaveSummary]:
        """Save what the arrays hold now, or what `of` pinned, as the checkpoint `path`, whose last part is its tag.

        Files on the same drive are linked, not copied; the rest is written behind the caller, and a change of an array in
        memory waits until it is written. When the ticket is done all of it is committed, durably: `load`,
        `zstore.open_checkpoint` and zarr read it. `extra` is JSON to keep beside the arrays, `step` a number to know it by.
        With `keep` only so many of this store's checkpoints stay in the folder. `of` belongs to the save, which releases it.

        Raises CheckpointExistsError unless `overwrite`, StorageError, DiskFullError; in a coroutine the ticket does.
        """
        place = Path(os.path.abspath(path))
        fields = {
            "record": {"extra": dict(extra or {})},
            "step": step,
            "keep": None if keep is None else Keep(last=keep),
        }
        with self._lock:
            pinned = self._pin(names).wait if of is None else lambda: of
            over = self._saves.expect()
        begin = partial(self._saves.begin, place, pinned, overwrite=overwrite, fields=fields)
        # A loop must not wait for changes under way; without one, what makes no sense is said here and now.
        return self._saves.start(over, begin, behind=_in_event_loop())

    def load(
        self,
        path: str | os.PathLike[str],
        tag: str | float | None = None,
        *,
        names: Iterable[str] | None = None,
        tier: TierName | None = None,
    ) -> Ticket[dict[str, Any]]:
        """Put the arrays of a checkpoint, all of them by default, in place of those of the same names; the ticket gives its
        `extra`. See `zstore.open_checkpoint` for what `path` and `tag` may be, and what is raised."""
        self._check_open()
        return self._workers.submit(partial(self._load, path, tag, names, tier))

    def _load(
        self, path: str | os.PathLike[str], tag: str | float | None, names: Iterable[str] | None, tier: TierName | None
    ) -> dict[str, Any]:
        is_torch = "torch" in sys.modules
        with open_checkpoint(path, tag) as checkpoint:
            for name in checkpoint if names is None else names:
                values = checkpoint[name]
                self.put(name, values.torch() if is_torch else values.numpy(), tier=tier).wait()
            extra: dict[str, Any] = dict(checkpoint.state.get("extra", {}))
        return extra

    # -- the end ----------------------------------------------------------------------------------------------------

    def _all(self, tickets: Sequence[Ticket[Any]]) -> Ticket[None]:
        """Return a ticket for all of `tickets`: it raises the first error once all ended."""

        def wait() -> None:
            errors = [error for ticket in tickets if (error := ticket.error()) is not None]
            if errors:
                raise errors[0]

        return self._workers.submit(wait)

    def close(self) -> None:
        """Finish what is under way, checkpoints too, then give memory, files and the folder back; a second call does nothing.

        Raises, once all is given back, the error of a change or a checkpoint that nobody heard of.
        """
        with self._lock:
            if self._closed:
                return
        with contextlib.ExitStack() as last_to_first:
            last_to_first.callback(self._end)
            for save in self._saves.unheard:
                last_to_first.callback(save.wait)
            last_to_first.callback(self._flush, self._order.names())
            last_to_first.callback(setattr, self, "_closed", True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await run_in_thread(self.close, "zstore-close")


def _close(order: ArrayOrder, workers: Workers, shards: TensorStore) -> None:
    workers.close()
    order.close()
    shards.close()


@dataclass(frozen=True)
class _Ahead:
    """An array that is read ahead."""

    ticket: Ticket[Array]
    _free: Any

    def release(self) -> None:
        """Count its memory as free, or as the caller's."""
        self._free()


def _in_event_loop() -> bool:
    """Return whether this thread runs a loop of asyncio."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None
