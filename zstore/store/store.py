"""The store: named tensors, kept in tiers of memory and disk, with methods to put, read, update in passes and save them.

[Note: two interfaces]
User code works with whole values: `put`, `get` and the other methods of `Store` run in the background and return a
ticket to await or wait for. So one set of methods serves programs with and without asyncio, tasks and threads, and no
call blocks an event loop. The engine works on this rank's shards, in passes on its own threads, through the base class
`Shards`. Operations on one array run in the order of the calls; operations on different arrays run concurrently. A pass
waits for the pending operations on its arrays.

[Note: checkpoints and removals]
A checkpoint captures the values at the time of the call: its pins are queued among the operations on each array. An
operation that removes a pinned array waits for earlier checkpoints to unpin it, but not for later ones, whose pins in
turn wait for it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NoReturn, TypeVar

import numpy as np

from ..checkpoint.catalog import check_tag_is_free
from ..checkpoint.format import decode_state, encode_state
from ..checkpoint.layout import new_save_id
from ..checkpoint.part import KnownFile, SaveRequest, SaveSummary
from ..checkpoint.reader import ArraySource, open_checkpoint
from ..checkpoint.retention import Keep
from ..checkpoint.save import save_checkpoint
from ..errors import UsageError
from ..format.arrays import ArraySpec, numpy_dtype
from ..io.closing import FORKED_ERROR_TEXT, Completions, make_finalizer, register_forkable, run_non_daemon
from ..io.files import Files, UserPath, user_location, user_path
from ..io.machine import AsyncClosing, Workers
from ..io.queue import Ticket, promise, wait_all
from .arrays import StoreArray, Value, copy_view, flat_output, flatten, is_tensor, shaped, spec_of
from .options import StoreOptions
from .shards import Shards
from .tiers import MemoryTier, Snapshot, Tier, TierName
from .tiers.base import copy_into
from .values import ArrayIterator, Mode, PendingTickets

T = TypeVar("T")
_PIN_CHECK_S = 1.0
_completions = Completions()
_CLOSED = "the store is closed; only data saved with `checkpoint` survives"


class Store(Shards, AsyncClosing):
    """Named tensors in tiers: "disk", "host" and "device". Use it in a `with` or `async with` block; see `open_store`.

    A background operation returns a `Ticket`: `await ticket` or `ticket.wait()` gives its result or raises its error. A
    change whose ticket is dropped is not lost: `flush` waits for it and raises its error.
    """

    def __init__(
        self,
        options: StoreOptions,
        *,
        rank: int = 0,
        files: Files | None = None,
        cuda: Any = None,
        open_source: Callable[[str, str | float | None], ArraySource] = open_checkpoint,
    ) -> None:
        super().__init__(options, rank=rank, files=files, cuda=cuda)
        self._open_source = open_source
        """Opens what `load` names: this package can open only local zstore checkpoints."""
        self._loads, self._saves = PendingTickets(), PendingTickets()
        self._run_id = uuid.uuid4().hex
        self._known_files: Mapping[str, KnownFile] = {}
        """Shard files of earlier checkpoints, by array."""
        self._finalizer = make_finalizer(self, _release_all, self._tiers_by_name, self._cleanup)
        register_forkable(self)

    def _forked(self) -> None:
        """Disable the store in a forked child: threads and folder belong to the parent."""
        self._lock, self._closed = threading.RLock(), f"the store {FORKED_ERROR_TEXT}"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a store belongs to the process that opened it and cannot be pickled: open one in the other process"
        )

    @cached_property
    def _workers(self) -> Workers:
        """For tasks that wait for operations on arrays; created on first use, so an engine has none."""
        self._check_open()
        return self._cleanup.enter_context(Workers(2, "zstore-passes"))

    def put(self, name: str, value: Value, *, tier: TierName | None = None, dims: Sequence[str] = ()) -> Ticket[None]:
        """Store `value` under `name` (`group/name` or a plain name), replacing any previous value.

        It may have any shape and data type of the format, and must not be changed until the ticket is done. The array
        is kept on its current tier, or on disk, or in host memory for a store without a path, unless `tier` says
        otherwise; under 64 KiB always in host memory. `dims` are names of its dimensions, which checkpoints keep.

        Raises UsageError for a value that cannot be stored; the ticket raises BudgetError or DiskFullError if there is
        no room.
        """
        data = flatten(name, value)
        spec = spec_of(name, np.shape(value), data.dtype.name, tuple(dims))
        return self._queue_put(StoreArray.whole(spec, is_tensor(value)), lambda _: self._write(name, data, 0), tier)

    def _queue_put(self, array: StoreArray, fill: Callable[[StoreArray], None], tier: TierName | None) -> Ticket[None]:
        """Queue an operation in which `fill` sets all values of an array."""
        with self._lock:
            self._check_open()
            previous = self._arrays.get(array.spec.name)
            if previous is not None and not array.spec.dims and previous.spec.shape == array.spec.shape:
                array = replace(array, spec=replace(array.spec, dims=previous.spec.dims))
            return self._replace(
                array.spec.name, array, partial(self._store_array, array, fill, tier, self._saves.all())
            )

    def _replace(self, name: str, array: StoreArray | None, operation: Callable[[], None]) -> Ticket[None]:
        """Queue a replacement of an array, or with None its removal; on failure, restore the previous one, if any."""
        previous = self._arrays.get(name)
        self._arrays.set(name, array)

        def run() -> None:
            try:
                operation()
            except BaseException:
                with self._lock:
                    if self._arrays.get(name) is array:
                        self._arrays.set(name, previous if self._is_stored(previous) else None)
                raise

        return self.order.submit(name, run, changes=True)

    def _store_array(
        self, array: StoreArray, fill: Callable[[StoreArray], None], tier: TierName | None, saves: Sequence[Ticket[Any]]
    ) -> None:
        """Create an array unless an identical one exists, and `fill` its values; on failure, remove a new array."""
        name = array.spec.name
        current_tier = self._tiers[name].name if name in self._tiers else None
        is_new = not self._is_stored(array) or tier not in (None, current_tier)
        if is_new:
            chosen = tier or current_tier or ("disk" if self.options.all_paths else "host")
            self._choose_tier(array, chosen)  # raises before the previous array is removed
            self._remove(name, saves)
            self._create(array, chosen)
        try:
            fill(array)
        except BaseException:
            if is_new:
                self._remove(name, ())
            raise

    def _remove(self, name: str, saves: Sequence[Ticket[Any]]) -> None:
        if name in self._shards:
            _when_unpinned(partial(self._drop, name), saves)

    def get(self, name: str, *, rows: slice | None = None, out: Value | None = None) -> Ticket[Any]:
        """Read an array, or `rows` of its first dimension (a slice without a step), as the type of array that was put.

        `out` is memory to read into: host memory, contiguous, with the shape of the rows and the array's data type. By
        default the result is in new memory, owned by the caller. Raises KeyError for an unknown name, UsageError if
        `rows` is not such a slice.
        """
        with self._lock:
            array = self._unsharded(name)
            first, stop, shape = array.flat_rows(rows)
            target = None if out is None else flat_output(array.spec, out, shape)

            def read() -> Any:
                data = self._read(name, first, stop, target)
                return shaped(data, shape, array.is_torch) if out is None else out

            return self._queue(array, read, changes=False)

    def update(self, name: str, value: Value, *, rows: slice | None = None) -> Ticket[None]:
        """Replace an array's values, or `rows` of its first dimension, with `value`, which has the same shape and data
        type.

        `value` must not be changed until the ticket is done. Raises UsageError if it does not fit, KeyError for an
        unknown name.
        """
        with self._lock:
            array = self._unsharded(name)
            first, _, shape = array.flat_rows(rows)
            data, value_shape = flatten(name, value), tuple(np.shape(value))
            if value_shape != shape or data.dtype.name != array.spec.dtype:
                raise UsageError(
                    f"array {name!r}: expected {array.spec.dtype} of shape {shape}, got {data.dtype.name} of {value_shape}"
                )
            return self.write(name, data, first)

    def _unsharded(self, name: str) -> StoreArray:
        array = self._array(name)
        if array.grid.num_shards > 1:
            raise UsageError(f"array {name!r} is sharded {array.grid.num_shards} ways: use `read`, `write` and `tiles`")
        return array

    def delete(self, name: str) -> Ticket[None]:
        """Remove an array and free its space, once pending checkpoints no longer need it.

        Raises KeyError for an unknown name.
        """
        with self._lock:
            self._array(name)
            return self._replace(name, None, partial(self._remove, name, self._saves.all()))

    def move(self, name: str, *, tier: TierName) -> Ticket[None]:
        """Move an array to a different tier. The ticket raises BudgetError or DiskFullError if there is no room; the
        array then stays on its tier."""
        with self._lock:
            array, saves = self._array(name), self._saves.all()
        move = partial(_when_unpinned, partial(self.relocate, name, tier, copy_view), saves)
        return self._queue(array, move, changes=True)

    def stream(self, names: Iterable[str] | None = None, *, prefetch: int = 2, mode: Mode = "update") -> ArrayIterator:
        """Iterate over (name, value) pairs, of all arrays by default, with `for` or `async for`.

        `prefetch` arrays are read ahead, within the budget. With "update" a value is changed in place and stored in the
        background, also when the loop is left; with "read" changes are lost. A value is valid until the next one.
        Raises KeyError for an unknown name, BudgetError if the budget has no room for the largest array.
        """
        with self._lock:
            self._check_open()
            arrays = [self._unsharded(name) for name in (self._arrays if names is None else names)]
        if prefetch < 0:
            raise UsageError(f"prefetch={prefetch}: expected a number of arrays")
        if mode not in ("update", "read"):
            raise UsageError(f"mode={mode!r}: expected 'update' or 'read'")
        return ArrayIterator(arrays, self.get, self.update, self, self._in_background, prefetch, mode)

    def names(self) -> list[str]:
        """Return the names of all arrays, in the order in which they were put."""
        with self._lock:
            return list(self._arrays)

    def spec(self, name: str) -> ArraySpec:
        """Return name, shape and data type of an array. Raises KeyError for an unknown name."""
        with self._lock:
            return self._array(name).spec

    def tier_of(self, name: str) -> Ticket[TierName]:
        """Return an array's tier once pending operations on it are done: "disk", "host" or "device"."""
        with self._lock:
            self._array(name)
            return self.order.submit(name, lambda: self.tier(name).name, changes=False)

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return f"<Store of {len(self)} arrays in {self.options.run_path or 'memory'}>"

    def flush(self) -> Ticket[None]:
        """Wait for all pending changes. If one failed, the ticket raises its error (once), unless a later change of the
        array succeeded."""
        with self._lock:
            self._check_open()
            wait = partial(self._wait_for_changes, self.order.names(), self._loads.all())
        return self._in_background(wait)

    def _in_background(self, task: Callable[[], T]) -> Ticket[T]:
        """Queue a task that waits for operations on arrays. Raises UsageError once the store is closed."""
        with self._lock:
            workers = self._workers
        try:
            return workers.submit(task)  # without the lock: if there are no threads, the task runs in this call
        except RuntimeError:
            raise UsageError(self._closed or _CLOSED) from None

    def _wait_for_changes(self, names: Sequence[str], loads: Sequence[Ticket[Any]]) -> None:
        self.order.wait(names)
        for load in loads:
            load.wait()
        self.order.raise_failed(names)

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
        """Save the current values of arrays as the checkpoint `path`, whose last component is the tag.

        Files on the same drive are linked, not copied; other data is written in the background, and a change of an
        array in memory waits until it is written. When the ticket is done all of it is committed, durably: `load`,
        `zstore.open_checkpoint` and zarr read it. `extra` is JSON to store with the arrays (numpy scalars and paths are
        allowed); `step` is a number that identifies it. With `keep`, only this many of the store's newest checkpoints
        are retained in the folder.

        Raises KeyError for an unknown name, UsageError for `extra` that is not JSON; the ticket raises
        CheckpointExistsError (unless `overwrite`), StorageError, DiskFullError.
        """
        target = user_path(path)
        extra_copy = decode_state(encode_state(extra or {}, "extra"))  # a copy, and an error now if it is not JSON
        request = partial(
            SaveRequest,
            resources=self.resources,
            folder=target.parent,
            tag=target.name,
            rank=0,
            world_size=1,
            run_id=self._run_id,
            record={"extra": extra_copy},
            step=step,
            keep=None if keep is None else Keep(last=keep),
            overwrite=overwrite,
        )
        with self._lock:
            self._check_open()
            specs = {name: self._unsharded(name).spec for name in (self._arrays if names is None else names)}
            snapshot_ticket = self.order.submit_on([*specs], partial(self.snapshot, [*specs]))
            save = partial(self._save, snapshot_ticket, partial(request, specs=specs), [*specs], self._saves.all())
            return self._saves.add(_start_save(f"the save of {target}", save, snapshot_ticket))

    def _save(
        self,
        snapshot_ticket: Ticket[Snapshot],
        make_request: Callable[..., SaveRequest],
        names: Sequence[str],
        earlier: Sequence[Ticket[Any]],
    ) -> SaveSummary:
        """Save the snapshot that `snapshot_ticket` returns, and release it.

        Once the store is being closed and the `earlier` saves have ended, a change queued before the snapshot can only
        be waiting for a pin held by the caller, which may never be released: such a change fails.
        """
        while not snapshot_ticket.wait_for_end(_PIN_CHECK_S):
            if (self._closed or _completions.exit_is_waiting()) and all(save.done() for save in earlier):
                for tier in _memory_tiers(self._tiers_by_name):
                    tier.fail_waiting(names)
        snapshot = snapshot_ticket.wait()
        try:
            save_request = make_request(
                save_id=new_save_id(),
                grids={name: pin.local.grid for name, pin in snapshot.pins.items()},
                pins=snapshot.pins,
                known=self._known_files,
                disk_folders=self.disk_folders(),
            )
            check_tag_is_free(save_request.folder, save_request.tag, overwrite=save_request.overwrite)
        except BaseException:
            snapshot.release()
            raise
        summary = save_checkpoint(save_request).ticket.wait()
        with self._lock:
            self._known_files = {**self._known_files, **summary.known}
        return summary

    def load(
        self,
        path: UserPath,
        tag: str | float | None = None,
        *,
        names: Iterable[str] | None = None,
        tier: TierName | None = None,
    ) -> Ticket[dict[str, Any]]:
        """Load the arrays of a checkpoint, all of them by default, replacing arrays of the same names; the ticket
        returns its `extra`. See `zstore.open_checkpoint` for the forms of `path` and `tag`, and the errors raised.

        Files on the same drive with the same layout as in this store are linked, regardless of how many ranks saved them.
        """
        self._check_open()
        open_source = partial(self._open_source, user_location(path), tag)
        return self._loads.add(self._in_background(partial(self._load, open_source, names, tier)))

    def _load(
        self, open_source: Callable[[], ArraySource], names: Iterable[str] | None, tier: TierName | None
    ) -> dict[str, Any]:
        with open_source() as source:
            specs = [source.known(name).spec for name in (source.names() if names is None else names)]
            fill = partial(self._fill_from, source)
            puts = [self._queue_put(self._loaded_as(spec), fill, tier) for spec in specs]
            try:
                wait_all([*puts])
            finally:
                for put in puts:
                    put.mark_observed()  # the load reports its error
            return dict(source.record.state.get("extra", {}))

    def _loaded_as(self, stored: ArraySpec) -> StoreArray:
        """Return the array to load into: the existing one of that name if shape and dtype match, else a new one."""
        existing = self._arrays.get(stored.name)
        matches = existing is not None and (existing.spec.shape, existing.spec.dtype) == (stored.shape, stored.dtype)
        if existing is not None and matches and existing.grid.num_shards == 1:
            return existing
        dims = stored.dims if len(stored.dims) == len(stored.shape) else ()
        return StoreArray.whole(spec_of(stored.name, stored.shape, stored.dtype, dims), "torch" in sys.modules)

    def _fill_from(self, source: ArraySource, array: StoreArray) -> None:
        """Replace all values with a checkpoint's: link its file, if the array on disk has the same layout, else read."""
        name, stored = array.spec.name, source.array(array.spec.name)
        if self.tier(name).name == "disk" and (stored.grid, stored.spec.dtype) == (array.grid, array.spec.dtype):
            path, crcs = source.file_of(name, 0), source.shard_crcs(name, 0)
            if path is not None and crcs is not None and self.adopt(name, path, crcs):
                return
        with contextlib.closing(self.tiles([[name]], "fill")) as tiles:
            for tile in tiles:
                values = np.empty(tile.stop - tile.first, numpy_dtype(stored.spec.dtype))
                source.read(name, tile.first, tile.stop, values)
                copy_into(tile.views[0], values)

    def close(self) -> None:
        """Finish pending work, including checkpoints, then release memory, files and the folder; a second call does nothing.

        Afterwards raises the error of a change or a checkpoint that has not been reported.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = _CLOSED
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._wait_for_changes, self.order.names(), self._loads.all())
            cleanup.callback(self._finalizer)
            for save in self._saves.all():
                cleanup.callback(save.wait)


def _start_save(title: str, save: Callable[[], SaveSummary], snapshot_ticket: Ticket[Snapshot]) -> Ticket[SaveSummary]:
    """Start a save in a thread that the program's exit waits for; if no thread can be started, release its snapshot."""

    def run_and_report() -> SaveSummary:
        try:
            summary = save()
        except BaseException as error:
            _completions.end(key, error)
            raise
        _completions.end(key, None)
        return summary

    def release() -> None:
        if snapshot_ticket.error() is None:
            snapshot_ticket.wait().release()

    ticket, run = promise(run_and_report)
    key = _completions.begin(title, ticket.wait_for_end)
    try:
        run_non_daemon(run, "zstore-checkpoint")
    except BaseException:
        if ticket.future.cancel():
            _completions.end(key, None)
            snapshot_ticket.when_done(release)
        raise
    return Ticket(ticket.future, partial(_completions.mark_observed, key))


def _when_unpinned(operation: Callable[[], None], saves: Sequence[Ticket[Any]]) -> None:
    """Run `operation`, which fails while its array is pinned, once none of the earlier `saves` pins the array."""
    for save in saves:
        if not save.done():
            try:
                return operation()
            except UsageError:  # it is pinned
                save.wait_for_end()
    return operation()


def _release_all(tiers: Mapping[TierName, Tier], resources: contextlib.ExitStack) -> None:
    """Release all resources. Changes that wait for a pin fail first, because it may never be released."""
    for tier in _memory_tiers(tiers):
        tier.stop_waiting()
    resources.close()


def _memory_tiers(tiers: Mapping[TierName, Tier]) -> list[MemoryTier]:
    return [tier for tier in tiers.values() if isinstance(tier, MemoryTier)]
