"""The store: named tensors that are put, read, changed in passes, and saved, in tiers of memory and disk.

[Note: two ways to an array]
User code works with whole values: `put`, `get` and so on run in the background and return a ticket to await or wait
for, so
one set of methods serves programs with and without asyncio, tasks and threads, and no call blocks an event loop. The
engine works on this rank's shards, in passes on its own threads: `Shards`, the base. Operations on one array run in the
order of the
calls, on several concurrently; a pass waits for its arrays' operations.

[Note: who waits for whom]
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
from ..io.closing import OF_THE_PARENT, Completions, closing_with, notify_of_fork, run_to_the_end
from ..io.files import Files, UserPath, user_location, user_path
from ..io.machine import AsyncClosing, Workers
from ..io.queue import Ticket, promise, wait_all
from .arrays import StoreArray, Value, copy_view, flat_target, flatten, is_tensor, shaped, spec_of
from .options import StoreOptions
from .shards import Shards
from .tiers import MemoryTier, Snapshot, Tier, TierName
from .tiers.base import copy_into
from .values import Mode, Unreported, Values

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
        self._loads, self._saves = Unreported(), Unreported()
        self._run = uuid.uuid4().hex
        self._known: Mapping[str, KnownFile] = {}
        """Shard files of earlier checkpoints, by array."""
        self._end = closing_with(self, _end, self._homes, self._parts)
        notify_of_fork(self)

    def _forked(self) -> None:
        """Disable the store in a forked child: threads and folder belong to the parent."""
        self._lock, self._closed = threading.RLock(), f"the store {OF_THE_PARENT}"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a store belongs to the process that opened it and cannot be pickled: open one in the other process"
        )

    @cached_property
    def _workers(self) -> Workers:
        """For tasks that wait for operations on arrays; created when first needed: an engine has none."""
        self._check_open()
        return self._parts.enter_context(Workers(2, "zstore-passes"))

    def put(self, name: str, value: Value, *, tier: TierName | None = None, dims: Sequence[str] = ()) -> Ticket[None]:
        """Store `value` under `name`, `group/name` or a plain name, replacing any previous value.

        It may have any shape and data type of the format, and must not be changed until the ticket is done. The array
        is kept on its
        current tier, or on disk, or in host memory for a store without a path, unless `tier` says otherwise; under 64 KiB
        always in host memory. `dims` are names of its dimensions, which checkpoints keep.

        Raises UsageError for a value that cannot be stored; the ticket BudgetError or DiskFullError if there is no room.
        """
        data = flatten(name, value)
        spec = spec_of(name, np.shape(value), data.dtype.name, tuple(dims))
        return self._put(StoreArray.whole(spec, is_tensor(value)), lambda _: self._write(name, data, 0), tier)

    def _put(self, array: StoreArray, fill: Callable[[StoreArray], None], tier: TierName | None) -> Ticket[None]:
        """Queue an operation in which `fill` sets all values of an array."""
        with self._lock:
            self._check_open()
            former = self._arrays.get(array.spec.name)
            if former is not None and not array.spec.dims and former.spec.shape == array.spec.shape:
                array = replace(array, spec=replace(array.spec, dims=former.spec.dims))
            return self._replace(array.spec.name, array, partial(self._make, array, fill, tier, self._saves.all()))

    def _replace(self, name: str, array: StoreArray | None, operation: Callable[[], None]) -> Ticket[None]:
        """Queue a replacement of an array, or with None its removal; if it fails, the previous one is restored, if
        there was one."""
        former = self._arrays.get(name)
        self._arrays.set(name, array)

        def run() -> None:
            try:
                operation()
            except BaseException:
                with self._lock:
                    if self._arrays.get(name) is array:
                        self._arrays.set(name, former if self._has(former) else None)
                raise

        return self.order.submit(name, run, changes=True)

    def _make(
        self, array: StoreArray, fill: Callable[[StoreArray], None], tier: TierName | None, saves: Sequence[Ticket[Any]]
    ) -> None:
        """Let `fill` set all values of an array, creating it unless an identical one exists. On failure no new array
        remains."""
        name = array.spec.name
        former = self._tiers[name].name if name in self._tiers else None
        is_new = not self._has(array) or tier not in (None, former)
        if is_new:
            chosen = tier or former or ("disk" if self.options.all_paths else "host")
            self._choose(array, chosen)  # a tier that the store lacks leaves the former array
            self._remove(name, saves)
            self._add(array, chosen)
        try:
            fill(array)
        except BaseException:
            if is_new:
                self._remove(name, ())
            raise

    def _remove(self, name: str, saves: Sequence[Ticket[Any]]) -> None:
        if name in self._shards:
            _unpinned(partial(self._drop, name), saves)

    def get(self, name: str, *, rows: slice | None = None, out: Value | None = None) -> Ticket[Any]:
        """Read an array, or `rows` of its first dimension (a slice without a step), as the kind of value that was put.

        Into `out`, if given: of the rows' shape and the array's data type, contiguous, in host memory; else into new
        memory,
        owned by the caller. Raises KeyError for an unknown name, UsageError for anything but a row slice.
        """
        with self._lock:
            array = self._whole(name)
            first, stop, shape = array.flat_rows(rows)
            target = None if out is None else flat_target(array.spec, out, shape)

            def read() -> Any:
                data = self._read(name, first, stop, target)
                return shaped(data, shape, array.is_torch) if out is None else out

            return self._queue(array, read, changes=False)

    def update(self, name: str, value: Value, *, rows: slice | None = None) -> Ticket[None]:
        """Replace an array's values, or those of `rows` of its first dimension, with `value`, of their shape and data
        type.

        `value` must not be changed until the ticket is done. Raises UsageError if it does not fit, KeyError for an
        unknown
        name.
        """
        with self._lock:
            array = self._whole(name)
            first, _, shape = array.flat_rows(rows)
            data = flatten(name, value)
            if tuple(np.shape(value)) != shape or data.dtype.name != array.spec.dtype:
                raise UsageError(
                    f"array {name!r}: expected {array.spec.dtype} of shape {shape}, got {data.dtype.name} of {np.shape(value)}"
                )
            return self.write(name, data, first)

    def _whole(self, name: str) -> StoreArray:
        array = self._array(name)
        if array.grid.num_shards > 1:
            raise UsageError(f"array {name!r} is sharded {array.grid.num_shards} ways: use `read`, `write` and `tiles`")
        return array

    def delete(self, name: str) -> Ticket[None]:
        """Remove an array and free its space, once checkpoints of it that are being written are done.

        Raises KeyError for an unknown name.
        """
        with self._lock:
            self._array(name)
            return self._replace(name, None, partial(self._remove, name, self._saves.all()))

    def move(self, name: str, *, tier: TierName) -> Ticket[None]:
        """Move an array with its values to another tier. The ticket raises BudgetError or DiskFullError if there is no
        room:
        then the array stays on its tier."""
        with self._lock:
            array, saves = self._array(name), self._saves.all()
        move = partial(_unpinned, partial(self.relocate, name, tier, copy_view), saves)
        return self._queue(array, move, changes=True)

    def stream(self, names: Iterable[str] | None = None, *, prefetch: int = 2, mode: Mode = "update") -> Values:
        """Iterate over (name, value) pairs, all of them by default: `for` and `async for` alike.

        `prefetch` arrays are read ahead, within the budget. With "update" a value is changed in place and stored in the
        background, also when the loop is left; with "read" changes are lost. A value is valid until the next one.
        Raises KeyError for an unknown name, BudgetError if the budget has no room for the largest array.
        """
        with self._lock:
            self._check_open()
            arrays = [self._whole(name) for name in (self._arrays if names is None else names)]
        if prefetch < 0:
            raise UsageError(f"prefetch={prefetch}: expected a number of arrays")
        return Values(arrays, self.get, self.update, self, self._in_background, prefetch, mode)

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
        """Wait for all changes so far; the ticket raises, once, the error of a failed change, if no later one
        succeeded."""
        with self._lock:
            self._check_open()
            settle = partial(self._settle, self.order.names(), self._loads.all())
        return self._in_background(settle)

    def _in_background(self, task: Callable[[], T]) -> Ticket[T]:
        """Queue a task that waits for operations on arrays. Raises UsageError once the store is closed."""
        with self._lock:
            workers = self._workers
        try:
            return workers.submit(task)  # without the lock: if there are no threads, the task runs in this call
        except RuntimeError:
            raise UsageError(self._closed or _CLOSED) from None

    def _settle(self, names: Sequence[str], loads: Sequence[Ticket[Any]]) -> None:
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
        """Save the current values of arrays as the checkpoint `path`, whose last part is the tag.

        Files on the same drive are linked, not copied; other data is written in the background, and a change of an
        array in
        memory waits until it is written. When the ticket is done all of it is committed, durably: `load`,
        `zstore.open_checkpoint` and zarr read it. `extra` is JSON to store with the arrays (numpy scalars and paths are
        allowed); `step` is a number that identifies it.
        With `keep`, only that many of this store's checkpoints are retained in the folder.

        Raises KeyError for an unknown name, UsageError for `extra` that is not JSON; the ticket raises
        CheckpointExistsError (unless `overwrite`), StorageError, DiskFullError.
        """
        place = user_path(path)
        kept = decode_state(encode_state(extra or {}, "extra"))  # a copy, and an error now if it is not JSON
        request = partial(
            SaveRequest,
            resources=self.resources,
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
            specs = {name: self._whole(name).spec for name in (self._arrays if names is None else names)}
            pinning = self.order.submit_on([*specs], partial(self.snapshot, [*specs]))
            save = partial(self._save, pinning, partial(request, specs=specs), [*specs], self._saves.all())
            return self._saves.add(_begin_save(f"the save of {place}", save, pinning))

    def _save(
        self,
        pinning: Ticket[Snapshot],
        request: Callable[..., SaveRequest],
        names: Sequence[str],
        earlier: Sequence[Ticket[Any]],
    ) -> SaveSummary:
        """Save the snapshot that `pinning` takes of arrays; release it in any case.

        Once the store is being closed and `earlier` saves ended, a change before the snapshot can only be waiting for a
        pin held by the caller, which may never be released: the change fails.
        """
        while not pinning.wait_for_end(_PIN_CHECK_S):
            if (self._closed or _completions.end_waits()) and all(save.done() for save in earlier):
                for tier in _memory_tiers(self._homes):
                    tier.fail_waiting(names)
        snapshot = pinning.wait()
        try:
            made = request(
                save_id=new_save_id(),
                grids={name: pin.local.grid for name, pin in snapshot.pins.items()},
                pins=snapshot.pins,
                known=self._known,
                disk_folders=self.disk_folders(),
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
        """Put the arrays of a checkpoint, all of them by default, in place of arrays of the same names; the ticket
        returns
        its `extra`. See `zstore.open_checkpoint` for the forms of `path` and `tag`, and the errors raised.

        Files on the same drive with the same layout as in this store are linked, regardless of how many ranks saved them.
        """
        self._check_open()
        opened = partial(self._open_source, user_location(path), tag)
        return self._loads.add(self._in_background(partial(self._load, opened, names, tier)))

    def _load(
        self, opened: Callable[[], ArraySource], names: Iterable[str] | None, tier: TierName | None
    ) -> dict[str, Any]:
        with opened() as source:
            specs = [source.known(name).spec for name in (source.names() if names is None else names)]
            fill = partial(self._fill_from, source)
            puts = [self._put(self._loaded_as(spec), fill, tier) for spec in specs]
            try:
                wait_all([*puts])
            finally:
                for put in puts:
                    put.mark_observed()  # its error is the load's
            return dict(source.record.state.get("extra", {}))

    def _loaded_as(self, stored: ArraySpec) -> StoreArray:
        """Return the array to load a checkpoint's array into: the existing one of that name if shape and dtype match."""
        former = self._arrays.get(stored.name)
        alike = former is not None and (former.spec.shape, former.spec.dtype) == (stored.shape, stored.dtype)
        if former is not None and alike and former.grid.num_shards == 1:
            return former
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
        """Finish pending work, checkpoints too, then release memory, files and the folder; a second call does nothing.

        Afterwards raises the unreported error of a change or a checkpoint.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = _CLOSED
        with contextlib.ExitStack() as last_to_first:
            last_to_first.callback(self._settle, self.order.names(), self._loads.all())
            last_to_first.callback(self._end)
            for save in self._saves.all():
                last_to_first.callback(save.wait)


def _begin_save(title: str, save: Callable[[], SaveSummary], pinning: Ticket[Snapshot]) -> Ticket[SaveSummary]:
    """Begin a save in a thread that the end of the program waits for; if no thread starts, its snapshot is released."""

    def reported() -> SaveSummary:
        try:
            summary = save()
        except BaseException as error:
            _completions.end(key, error)
            raise
        _completions.end(key, None)
        return summary

    def release() -> None:
        if pinning.error() is None:
            pinning.wait().release()

    ticket, carry_out = promise(reported)
    key = _completions.begin(title, ticket.wait_for_end)
    try:
        run_to_the_end(carry_out, "zstore-checkpoint")
    except BaseException:
        if ticket.future.cancel():
            _completions.end(key, None)
            pinning.when_done(release)
        raise
    return Ticket(ticket.future, partial(_completions.mark_observed, key))


def _unpinned(operation: Callable[[], None], saves: Sequence[Ticket[Any]]) -> None:
    """Remove an array, waiting for earlier checkpoints until none of them pins it."""
    for save in saves:
        if not save.done():
            try:
                return operation()
            except UsageError:  # it is pinned
                save.wait_for_end()
    return operation()


def _end(tiers: Mapping[TierName, Tier], parts: contextlib.ExitStack) -> None:
    """Release everything; changes that wait for a pin fail first, as it may never be released."""
    for tier in _memory_tiers(tiers):
        tier.stop_waiting()
    parts.close()


def _memory_tiers(tiers: Mapping[TierName, Tier]) -> list[MemoryTier]:
    return [each for each in tiers.values() if isinstance(each, MemoryTier)]
