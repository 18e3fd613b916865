"""The store for programs without the engine: named tensors of any shape that are put, read, changed in passes, and saved.

[Note: the front door]
`Store` is a program's interface to a `TensorStore`: it makes specs and grids, keeps shapes, and runs everything behind the
caller. Operations on one array are carried out in the order of the calls, those on several concurrently, by threads of
this store; the caller gets a ticket, which is awaited or waited for. So there is one set of methods for
programs with and without asyncio, usable from several tasks and threads, and no call of a coroutine blocks its loop.

[Note: who waits for whom]
A checkpoint has the arrays' values when it was asked for: its pins are queued among the operations on each array. An
operation that takes away an array that is pinned waits for checkpoints that were asked for before it, until it is not, and
for no later one, whose pins wait for it in their turn.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import numpy as np

from ..checkpoint.catalog import check_tag_is_free
from ..checkpoint.format import decode_state, encode_state
from ..checkpoint.names import new_save_id
from ..checkpoint.plan import KnownFile, SaveRequest, SaveSummary
from ..checkpoint.retention import Keep
from ..checkpoint.save import save_checkpoint
from ..errors import UsageError
from ..format.arrays import Array, ArraySpec
from ..io.closing import OF_THE_PARENT, closing_with, tell_of_fork
from ..io.files import Files, UserPath, user_location, user_path
from ..io.pool import AsyncClosing, Workers, run_in_thread
from ..io.queue import Ticket, wait_all
from ..store import Snapshot, StoreOptions, StoreStatistics, TensorStore, TierName
from .arrays import (
    ArraysByName,
    StoreArray,
    Value,
    copy_view,
    flat_target,
    flatten,
    is_tensor,
    load_array,
    shaped,
    spec_of,
)
from .checkpoint import Checkpoint, open_checkpoint
from .stream import Mode, Unreported, Values

T = TypeVar("T")

_CLOSED = "the store is closed: what was put is gone, but for what `checkpoint` kept"


def open_store(
    path: UserPath | None = None,
    *,
    host_budget_bytes: float | None = None,
    pin_memory: bool = False,
    num_threads: int = 8,
    verify: bool = True,
    device: str = "cpu",
) -> Store:
    """Open a store that keeps its arrays in a folder of its own below `path`, on a fast drive, or without a path in memory.

    Arrays live as long as the store is open; `Store.checkpoint` saves them, and `Store.load` brings them back, both by links
    if drive and layout allow. All memory that the store takes is counted against `host_budget_bytes`: transfer buffers,
    arrays in host memory, data read ahead; None: buffers of 128 MiB, else no bound. `pin_memory` registers the buffers with
    CUDA. `num_threads` read and write; `verify` checks the crc32c of all that is read from the drive; tier "device" is on
    `device`.

    Raises UsageError for arguments that make no sense, StorageError for a folder that cannot be written.
    """
    if host_budget_bytes is not None and host_budget_bytes < 1:
        raise UsageError(f"open_store(host_budget_bytes={host_budget_bytes!r}): expected a number of at least 1")
    run_path = None if path is None else user_path(path)
    if run_path is not None:
        Files().make_folder(run_path)
    options = StoreOptions(
        run_path=run_path,
        host_budget_bytes=None if host_budget_bytes is None else int(host_budget_bytes),
        shares_folders=True,
        reserves=False,
        num_threads=num_threads,
        verify=verify,
        device=device,
        pin_buffers=pin_memory,
    )
    return Store(TensorStore(options))


class Store(AsyncClosing):
    """Named tensors in tiers: "disk", "host" and "device". Made by `open_store`; use it in a `with` or `async with` block.

    An operation behind the caller gives a `Ticket`: `await ticket` or `ticket.wait()` gives its result or raises its error. A
    change whose ticket is dropped is not lost: `flush` waits for it and raises its error.

    Over 300 lines: it is the public surface, and half of it is docstrings.
    """

    def __init__(self, shards: TensorStore) -> None:
        self._shards = shards
        self._arrays = ArraysByName()
        self._lock = threading.RLock()
        """Guards the table of arrays: held shortly, so that no coroutine waits for it."""
        self._workers = Workers(2, "zstore-passes")
        self._loads, self._saves = Unreported(), Unreported()
        self._run = uuid.uuid4().hex
        self._known: Mapping[str, KnownFile] = {}
        """Shard files of earlier checkpoints, by array."""
        self._closed = ""
        """Why it cannot be used any more."""
        self._end = closing_with(self, _close, self._workers, self._shards)
        tell_of_fork(self)

    def _forked(self) -> None:
        """Belong to the parent, in a forked child: its threads and its folder are not the child's."""
        self._lock, self._closed = threading.RLock(), f"the store {OF_THE_PARENT}"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a store belongs to the process that opened it and cannot be pickled: open one in the other process"
        )

    # -- arrays -----------------------------------------------------------------------------------------------------

    def put(self, name: str, value: Value, *, tier: TierName | None = None, dims: Sequence[str] = ()) -> Ticket[None]:
        """Store `value` under `name`, `group/name` or a name alone, in place of any former value.

        Any shape and any of the format's data types; not to be changed until the ticket is done. The array is kept on its
        present tier, or on disk, or in host memory for a store without a path, unless `tier` says otherwise; under 64 KiB
        always in host memory. `dims` are names of its extents, which checkpoints keep.

        Raises UsageError for a value that cannot be stored; the ticket BudgetError or DiskFullError if there is no room.
        """
        data = flatten(name, value)
        spec = spec_of(name, np.shape(value), data.dtype.name, tuple(dims))
        return self._put(StoreArray(spec, is_tensor(value)), partial(self._write, data, 0), tier)

    def _put(self, array: StoreArray, fill: Callable[[StoreArray], None], tier: TierName | None) -> Ticket[None]:
        """Queue to let `fill` set all values of an array."""
        with self._lock:
            self._check_open()
            former = self._arrays.get(array.spec.name)
            if former is not None and not array.spec.dims and former.spec.shape == array.spec.shape:
                array = replace(array, spec=replace(array.spec, dims=former.spec.dims))
            return self._replace(array.spec.name, array, partial(self._make, array, fill, tier, self._saves.all()))

    def _replace(self, name: str, array: StoreArray | None, operation: Callable[[], None]) -> Ticket[None]:
        """Queue a replacement of an array, or with None its removal; if it fails, the former is back, unless that is gone."""
        former = self._arrays.get(name)
        self._set(name, array)

        def run() -> None:
            try:
                operation()
            except BaseException:
                with self._lock:
                    if self._arrays.get(name) is array:
                        self._set(name, former if self._has(former) else None)
                raise

        return self._shards.order.submit(name, run, changes=True)

    def _set(self, name: str, array: StoreArray | None) -> None:
        if array is not None:
            self._arrays[name] = array
        elif name in self._arrays:
            del self._arrays[name]

    def _make(
        self, array: StoreArray, fill: Callable[[StoreArray], None], tier: TierName | None, saves: Sequence[Ticket[Any]]
    ) -> None:
        """Let `fill` set all values of an array, made unless an equal one exists. A failure leaves no new one."""
        shards, name = self._shards, array.spec.name
        former = shards.tier_of(name) if name in shards else None
        is_new = not self._has(array) or tier not in (None, former)
        if is_new:
            self._remove(name, saves)
            usual: TierName = "disk" if shards.options.all_paths else "host"
            shards.create(array.spec, grid=array.grid, shard=0, tier=tier or former or usual)
        try:
            fill(array)
        except BaseException:
            if is_new:
                self._remove(name, ())
            raise

    def _has(self, array: StoreArray | None) -> bool:
        return (
            array is not None and array.spec.name in self._shards and self._shards.spec(array.spec.name) == array.spec
        )

    def _remove(self, name: str, saves: Sequence[Ticket[Any]]) -> None:
        if name in self._shards:
            _unpinned(partial(self._shards.remove, name), saves)

    def _queue(self, array: StoreArray, operation: Callable[[], T], *, changes: bool) -> Ticket[T]:
        """Queue an operation on an array, which raises UsageError unless it is what was put last."""

        def run() -> T:
            if not self._has(array):
                raise UsageError(f"array {array.spec.name!r} is not what was put last, for that failed: put it again")
            return operation()

        return self._shards.order.submit(array.spec.name, run, changes=changes)

    def get(self, name: str, *, rows: slice | None = None, out: Value | None = None) -> Ticket[Any]:
        """Read an array, or `rows` of its first extent (a slice without a step), in the kind of value that was put.

        Into `out`, if it is given: of the rows' shape and the array's data type, contiguous, in host memory; else into new
        memory, which is the caller's. Raises KeyError for a name that is not there, UsageError for anything but rows.
        """
        with self._lock:
            array = self._array(name)
            first, stop, shape = array.flat_rows(rows)
            target = None if out is None else flat_target(array.spec, out, shape)

            def read() -> Any:
                data = self._shards.reading(name, first, stop, target)()
                return shaped(data, shape, array.is_torch) if out is None else out

            return self._queue(array, read, changes=False)

    def update(self, name: str, value: Value, *, rows: slice | None = None) -> Ticket[None]:
        """Replace an array's values, or those of `rows` of its first extent, by `value`, of their shape and data type.

        `value` must not be changed until the ticket is done. Raises UsageError if it does not fit, KeyError for a name that
        is not there.
        """
        with self._lock:
            array = self._array(name)
            first, _, shape = array.flat_rows(rows)
            data = flatten(name, value)
            if tuple(np.shape(value)) != shape or data.dtype.name != array.spec.dtype:
                raise UsageError(
                    f"array {name!r}: expected {array.spec.dtype} of shape {shape}, got {data.dtype.name} of {np.shape(value)}"
                )
            return self._queue(array, partial(self._write, data, first, array), changes=True)

    def _write(self, data: Array, first: int, array: StoreArray) -> None:
        if data.size:
            self._shards.writing(array.spec.name, data, first)()

    def delete(self, name: str) -> Ticket[None]:
        """Remove an array and free its space, once checkpoints of it that are being written are done.

        Raises KeyError for a name that is not there.
        """
        with self._lock:
            self._array(name)
            return self._replace(name, None, partial(self._remove, name, self._saves.all()))

    def move(self, name: str, *, tier: TierName) -> Ticket[None]:
        """Move an array with its values to another tier. The ticket raises BudgetError or DiskFullError if there is no room:
        then the array stays on its tier."""
        with self._lock:
            array, saves = self._array(name), self._saves.all()
        move = partial(_unpinned, partial(self._shards.move, name, tier, copy_view), saves)
        return self._queue(array, move, changes=True)

    def stream(self, names: Iterable[str] | None = None, *, prefetch: int = 2, mode: Mode = "update") -> Values:
        """Return (name, value) of arrays one after the other, all of them by default: `for` and `async for` alike.

        `prefetch` arrays are read ahead, within the budget. With "update" a value is changed in place and stored behind the
        loop, that at hand too when the loop is left; with "read" changes are lost. A value is valid until the next one.
        Raises KeyError for a name that is not there, BudgetError if the budget has no room for the largest array.
        """
        with self._lock:
            self._check_open()
            arrays = [self._array(name) for name in (self._arrays if names is None else names)]
        if prefetch < 0:
            raise UsageError(f"prefetch={prefetch}: expected a number of arrays")
        return Values(arrays, self.get, self.update, self._shards, self._workers, prefetch, mode)

    # -- inventory --------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all arrays, in the order in which they were put."""
        with self._lock:
            return list(self._arrays)

    def spec(self, name: str) -> ArraySpec:
        """Return name, shape and data type of an array. Raises KeyError for a name that is not there."""
        with self._lock:
            return self._array(name).spec

    def tier_of(self, name: str) -> Ticket[TierName]:
        """Return an array's tier once operations under way for it are done: "disk", "host" or "device"."""
        with self._lock:
            self._array(name)
            return self._shards.order.submit(name, partial(self._shards.tier_of, name), changes=False)

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
            return self._workers.submit(partial(self._flush, self._shards.order.names(), self._loads.all()))

    def _flush(self, names: Sequence[str], loads: Sequence[Ticket[Any]]) -> None:
        self._shards.order.wait(names)
        for load in loads:
            load.wait()
        self._shards.order.raise_failed(names)

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

        Raises KeyError for a name that is not there, UsageError for `extra` that is not JSON; the ticket
        CheckpointExistsError unless `overwrite`, StorageError, DiskFullError.
        """
        place = user_path(path)
        kept = decode_state(encode_state(extra or {}, "extra"))  # a copy, and an error now if it is not JSON
        request = partial(
            SaveRequest,
            resources=self._shards.resources,
            folder=place.parent,
            tag=place.name,
            rank=0,
            world_size=1,
            run_id=self._run,
            record={"extra": kept},
            step=step,
            keep=None if keep is None else Keep(last=keep),
            overwrite=overwrite,
        )
        with self._lock:
            self._check_open()
            specs = {name: self._array(name).spec for name in (self._arrays if names is None else names)}
            pinning = self._shards.order.submit_on([*specs], partial(self._shards.snapshot, [*specs]))
            save = partial(self._save, pinning, partial(request, specs=specs))
            return self._saves.add(run_in_thread(save, "zstore-checkpoint"))

    def _save(self, pinning: Ticket[Snapshot], request: Callable[..., SaveRequest]) -> SaveSummary:
        """Save the snapshot that was asked for; release it in any case."""
        snapshot = pinning.wait()
        try:
            made = request(
                save_id=new_save_id(),
                grids={name: pin.local.grid for name, pin in snapshot.pins.items()},
                pins=snapshot.pins,
                known=self._known,
                disk_folders=self._shards.disk_folders(),
            )
            check_tag_is_free(made.folder, made.tag, overwrite=made.overwrite)
        except BaseException:
            snapshot.release()
            raise
        summary = save_checkpoint(made).ticket.wait()
        with self._lock:
            self._known = {**self._known, **summary.known}
        return summary

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

        Files on the same drive that are cut as this store has them are linked, whatever number of ranks saved them.
        """
        self._check_open()
        opened = partial(open_checkpoint, user_location(path), tag)
        return self._loads.add(self._workers.submit(partial(self._load, opened, names, tier)))

    def _load(
        self, opened: Callable[[], Checkpoint], names: Iterable[str] | None, tier: TierName | None
    ) -> dict[str, Any]:
        with opened() as checkpoint:
            specs = [checkpoint[name].spec for name in (checkpoint if names is None else names)]
            fill = partial(load_array, self._shards, checkpoint.source)
            puts = [self._put(self._loaded_as(spec), fill, tier) for spec in specs]
            try:
                wait_all([*puts])
            finally:
                for put in puts:
                    put.hear()  # its error is the load's
            return dict(checkpoint.state.get("extra", {}))

    def _loaded_as(self, stored: ArraySpec) -> StoreArray:
        """Return the array that a checkpoint's is loaded as: the one of its name, if that is alike."""
        with self._lock:
            former = self._arrays.get(stored.name)
        if former is not None and (former.spec.shape, former.spec.dtype) == (stored.shape, stored.dtype):
            return former
        dims = stored.dims if len(stored.dims) == len(stored.shape) else ()
        return StoreArray(spec_of(stored.name, stored.shape, stored.dtype, dims), "torch" in sys.modules)

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish the work under way, checkpoints too, then release memory, files and the folder; a second call does nothing.

        Raises afterwards the error of a change or a checkpoint that was not reported.
        """
        with self._lock:
            if self._closed:
                return
        with contextlib.ExitStack() as last_to_first:
            last_to_first.callback(self._end)
            for save in self._saves.all():
                last_to_first.callback(save.wait)
            last_to_first.callback(self._flush, self._shards.order.names(), self._loads.all())
            last_to_first.callback(setattr, self, "_closed", _CLOSED)


def _unpinned(operation: Callable[[], None], saves: Sequence[Ticket[Any]]) -> None:
    """Take an array away, after as many of the checkpoints that were asked for before as it takes until none pins it."""
    for save in saves:
        if not save.done():
            try:
                return operation()
            except UsageError:  # it is pinned
                save.wait_for_end()
    return operation()


def _close(workers: Workers, shards: TensorStore) -> None:
    workers.close()
    shards.order.close()  # first: what waits for a pin is carried out once that is released
    shards.close()
