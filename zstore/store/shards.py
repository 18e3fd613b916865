"""This rank's shards of named global tensors, on the device, in host memory or on disk: the base of `Store`.

Methods run in the caller's thread, once the pending operations on their arrays are done.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..errors import UsageError
from ..format.arrays import Array, ArraySpec, Grid, LocalShard, numpy_dtype
from ..io.files import Files
from ..io.memory import Budget, PinnedSlabs, Pool, Rooms, make_slab
from ..io.queue import IoQueue, LinkCounters, Priority, Ticket
from ..io.shards import IoResources
from .arrays import ArrayOrder, ArraysByName, StoreArray, flatten
from .options import RunFolders, StoreOptions, StoreStatistics
from .stream import Pass, Stream, StreamCounters
from .tiers import DeviceTier, DiskTier, Drives, HostTier, MemoryTier, Mode, Tier, Tile
from .tiers.base import Batch, Snapshot, TierName, View, copy_into, copy_out

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

ModeName = Literal["read", "update", "fill"]
SMALL_SHARD_BYTES = 64 * 1024
"""Smaller shards are kept in host memory even if the disk was requested: a request to the disk would cost more."""


class Shards:
    """A rank's shards in their tiers, and passes over them. Several threads may work on different arrays; at most one pass
    at a time may change an array."""

    def __init__(self, options: StoreOptions, *, rank: int = 0, files: Files | None = None, cuda: Any = None) -> None:
        self.options, self.rank, files = options, rank, files or Files()
        self._closed = ""
        """Why the store cannot be used any more; empty while it is open."""
        self._lock = threading.RLock()
        """Guards the table of arrays: locked only briefly, so that no coroutine waits for it."""
        self._arrays = ArraysByName()
        """The array last put or created under each name; its `put` may still be pending."""
        self._shards: dict[str, LocalShard] = {}
        self._tiers: dict[str, Tier] = {}
        """Tiers by array. Like `_shards`, it does not include pending operations."""
        self.layout_generation = 0
        """Increases whenever an array is created, renamed, moved or removed: what `memory` returned before may be stale."""
        self._plan_cache: dict[Any, Sequence[Batch]] = {}
        """Plans of earlier passes over whole arrays; cleared when arrays are created, removed or moved."""
        self._counters = StreamCounters()
        self.links = LinkCounters()
        """Transfers by callers that move the store's contents themselves, for example to a device."""
        with contextlib.ExitStack() as cleanup:
            self._folders = RunFolders(options.all_paths, rank, files, shares=options.shares_folders)
            cleanup.callback(self._folders.close)
            self._slabs = PinnedSlabs(cuda) if options.pin_buffers or options.pin_state else None
            if self._slabs is not None:
                cleanup.callback(self._slabs.close)
            self._make_buffers = self._slabs.make if self._slabs is not None and options.pin_buffers else make_slab
            self.budget = Budget(options.host_budget_bytes)
            """This rank's host memory for buffers and host-tier state."""
            self.rooms = Rooms(self._make_buffers)
            """Memory of the same kind as transfer buffers, not counted against the budget, for the callers of `links`."""
            self._pools = [Pool(options.pool_bytes, budget=self.budget, make=self._make_buffers)]
            queue = IoQueue(options.num_threads, options.queue_depth)
            self.resources = IoResources(
                files=files, queue=queue, pool=self._pools[0], block_bytes=options.span_bytes, verify=options.verify
            )
            self._tiers_by_name = self._make_tiers()
            """Tiers by the name that a caller requests; only stores with a folder have a disk tier."""
            for tier in set(self._tiers_by_name.values()):
                cleanup.callback(tier.close)
            cleanup.callback(queue.close)
            self.order = ArrayOrder()
            """Runs the background operations on arrays."""
            cleanup.callback(self.order.close)
            self._cleanup = cleanup.pop_all()
            """Resources that are closed with the store, in reverse order."""

    def _make_tiers(self) -> dict[TierName, Tier]:
        options = self.options
        host = pinned = HostTier(self.budget)
        if self._slabs is not None and options.pin_state:
            pinned = HostTier(self.budget, self._slabs.make)
        self.expect_shared_bytes = pinned.expect_shared_bytes
        tiers: dict[TierName, Tier] = {"device": DeviceTier(options.device), "host": host, "pinned": pinned}
        if options.all_paths:
            groups = {group: self._folders.paths(paths) for group, paths in options.group_paths.items()}
            default_paths = [path for path in (options.run_path, *options.other_paths) if path is not None]
            drives = Drives(self._folders.paths(default_paths or options.all_paths), groups)
            tiers["disk"] = DiskTier(drives, self.resources, reserves=options.reserves)
        return tiers

    def create(
        self, spec: ArraySpec, *, grid: Grid, shard: int, tier: TierName, memory: torch.Tensor | None = None
    ) -> None:
        """Register this rank's shard number `shard` of `grid`, all zeros. A shard under 64 KiB requested on disk is kept in
        host memory. `memory` (device tier only) is the caller's memory to keep the shard in, with its current values: 1-D,
        contiguous, the unpadded elements; every change is made there."""
        array = StoreArray(spec, grid, shard)
        self._register(array)
        try:
            self._create(array, tier, memory)
        except BaseException:
            with self._lock:
                del self._arrays[spec.name]
            raise

    def _register(self, array: StoreArray) -> None:
        self._check_open()
        with self._lock:
            if array.spec.name in self._arrays:
                raise UsageError(f"array {array.spec.name!r} already exists")
            self._arrays[array.spec.name] = array

    def _create(self, local: LocalShard, tier: TierName, memory: torch.Tensor | None = None) -> None:
        self._invalidate_plans()
        chosen = self._choose_tier(local, tier)
        chosen.create(local, memory)
        self._tiers[local.spec.name], self._shards[local.spec.name] = chosen, local

    def rename(self, name: str, spec: ArraySpec, *, tier: TierName) -> bool:
        """Rename an array to `spec`, keeping its values; return False if its shape or data type differs, or if `create`
        would choose another tier. Raises UsageError while it is pinned, or a pass changes it."""
        current = self.local(name)
        array = StoreArray(spec, current.grid, current.shard)
        same_layout, renamed = (current.spec.shape, current.spec.dtype) == (spec.shape, spec.dtype), False
        self._register(array)
        try:
            if same_layout and self._choose_tier(array, tier) is self._tiers[name]:
                self._idle_tier(name).rename(name, array)
                self._tiers[spec.name], self._shards[spec.name] = self._tiers.pop(name), array
                del self._shards[name]
                renamed = True
        finally:
            with self._lock:
                del self._arrays[name if renamed else spec.name]
        return renamed

    def relocate(self, name: str, tier: TierName, copy: Callable[[View, View], None]) -> None:
        """Move an array with its values to another tier, as `create` would choose it; its version changes.

        `copy(target, source)` copies between views of the two tiers; see `Tile`. Raises UsageError as `rename` does, and
        BudgetError or DiskFullError if there is no room: then the array stays on its tier.
        """
        source_tier, local = self._idle_tier(name), self.local(name)
        target_tier = self._choose_tier(local, tier)
        if target_tier is source_tier:
            return
        moved = replace(local, spec=replace(local.spec, name=f"{name}\0moving"))  # callers' names cannot have this form
        self._create(moved, tier)
        try:
            with contextlib.closing(self.tiles([[name, moved.spec.name]], "fill", modes={name: "read"})) as tiles:
                for tile in tiles:
                    copy(tile.views[1], tile.views[0])
            source_tier.remove(name)
        except BaseException:
            self._drop(moved.spec.name)
            raise
        target_tier.rename(moved.spec.name, local)
        self._tiers[name] = target_tier
        del self._shards[moved.spec.name], self._tiers[moved.spec.name]

    def change_memory(self, name: str, memory: torch.Tensor | None) -> None:
        """Keep an array of the device tier in other memory of the caller, which already has its values (see `create`).
        None: the array has no memory, and is unusable until it is given some. Raises UsageError as `rename` does."""
        tier = self._idle_tier(name)
        if not isinstance(tier, DeviceTier):
            raise UsageError(f"array {name!r} is on tier {tier.name!r}, which allocates its own memory")
        tier.change_memory(name, memory)

    def remove(self, name: str) -> None:
        """Remove an array and free its space; do nothing if the store is closed. Raises UsageError as `rename` does."""
        if not self._closed:
            self._drop(name)
            with self._lock:
                del self._arrays[name]

    def _drop(self, name: str) -> None:
        self._idle_tier(name).remove(name)
        del self._shards[name], self._tiers[name]

    def _idle_tier(self, name: str) -> Tier:
        """Return the tier of an array, once no operation on it is pending, for a call that moves or changes it."""
        self.local(name)
        self._invalidate_plans()
        self.order.wait([name])
        self.order.forget(name)
        return self._tiers[name]

    def _invalidate_plans(self) -> None:
        self._plan_cache.clear()
        self.layout_generation += 1

    def _choose_tier(self, local: LocalShard, tier: TierName) -> Tier:
        names = ("device", "host", "pinned", "disk")
        if tier not in names:
            raise UsageError(f"array {local.spec.name!r}: expected one of {', '.join(names)} as tier, got {tier!r}")
        if tier not in self._tiers_by_name:
            raise UsageError(f"array {local.spec.name!r}: the store has no disk tier; open it with a path")
        return self._tiers_by_name["pinned" if tier == "disk" and local.nbytes < SMALL_SHARD_BYTES else tier]

    def _array(self, name: str) -> StoreArray:
        self._check_open()
        if name not in self._arrays:
            raise _unknown_array_error(name, self._arrays)
        return self._arrays[name]

    def local(self, name: str) -> LocalShard:
        """Return the shard that this rank has of array `name`. Raises KeyError for an unknown name."""
        if name not in self._shards:
            raise _unknown_array_error(name, self._shards)
        return self._shards[name]

    def tier(self, name: str) -> Tier:
        """Return the shard's current tier."""
        self.local(name)
        return self._tiers[name]

    def share_files(self) -> None:
        """From now on, let new disk shards under 256 KiB share files: a pass transfers many of them in one request, and a
        checkpoint copies them instead of linking their files."""
        if isinstance(disk := self._tiers_by_name.get("disk"), DiskTier):
            disk.packs_small = True

    def adopt(self, name: str, path: Path, crcs: Sequence[int]) -> bool:
        """Link a checkpoint's shard file, of the same layout as this array's, as the array's contents, without reading it.

        Returns False, and changes nothing, if the array is not on disk, or `path` cannot be linked there. `crcs` are
        the checksums of its chunks: each chunk is verified when it is read. The file must never be written again.
        """
        tier = self._idle_tier(name)
        return isinstance(tier, DiskTier) and tier.adopt(name, path, crcs)

    def disk_folders(self) -> dict[str, Path]:
        """Return the folder of each array's files, for arrays on disk."""
        disk = self._tiers_by_name.get("disk")
        return disk.folders() if isinstance(disk, DiskTier) else {}

    def tiles(
        self,
        groups: Sequence[Sequence[str]],
        mode: ModeName = "update",
        *,
        modes: Mapping[str, ModeName] | None = None,
        pool: Pool | None = None,
        ahead: bool = False,
        admit: Callable[[int, bool], bool] | None = None,
        on_end: Callable[[int], None] | None = None,
    ) -> Generator[Tile, None, None]:
        """Yield tiles of whole chunks over each group of arrays, in order; see `zstore.store.stream`.

        The arrays of a group have the same layout, or one bit for each element of the first array, or one value for each
        block of its elements. Modes: "update" writes the views back, which the caller changes in place,
        when the next tile is requested; "fill" reads nothing, and the caller sets every element; "read" discards changes.
        `modes` overrides the mode of single arrays. `pool` (from `make_pool`) is the source of the buffers for a pass that
        must not wait for other passes; `ahead` marks reads that nothing waits for yet. `admit(group, wait)` is called
        before a group is begun; if it returns false after waiting, the group is skipped. New versions become current when
        the pass is done, or, with `on_end`, each group's just before `on_end(group)`. Exhaust the pass or close it.
        """
        pass_ = self._pass(groups, mode, modes)
        pass_ = replace(pass_, pool=pool or pass_.pool, admit=admit, on_end=on_end)
        return self._stream(replace(pass_, priority=Priority.PREFETCH) if ahead else pass_).tiles()

    def read_ahead(
        self, groups: Sequence[Sequence[str]], mode: ModeName = "update", *, modes: Mapping[str, ModeName] | None = None
    ) -> Stream:
        """Return a pass like `tiles`, and start reading its first spans; then call `Stream.resume` or `Stream.drop`. Until
        then it changes nothing, but holds buffers, up to three quarters of the pool."""
        stream = self._stream(self._pass(groups, mode, modes))
        stream.read_ahead()
        return stream

    def _pass(self, groups: Sequence[Sequence[str]], mode: ModeName, modes: Mapping[str, ModeName] | None) -> Pass:
        self._check_open()
        by_name = {name: Mode(name_mode) for name, name_mode in (modes or {}).items()}
        pass_ = Pass(groups=groups, mode=Mode(mode), pool=self.resources.pool, modes=by_name)
        self.order.wait(pass_.names)
        return pass_

    def _stream(self, pass_: Pass) -> Stream:
        for name in pass_.names:
            self.local(name)
        key = tuple(tuple(group) for group in pass_.groups), pass_.chunks, pass_.pool.nbytes
        batches = self._plan_cache.get(key)
        stream = Stream(pass_, tiers=self._tiers, shards=self._shards, counters=self._counters, batches=batches)
        if pass_.chunks is None and len(pass_.groups) > 1:
            self._plan_cache[key] = stream.batches
        return stream

    def memory(self, name: str) -> Any:
        """Return the memory of a shard on the host or the device tier, 1-D, without padding. It is valid until the shard is
        moved or removed. Write to it only within `changing`, unless no other code uses it."""
        return self._memory_tier(name).view(name, 0, self.local(name).valid_numel)

    def _memory_tier(self, name: str) -> MemoryTier:
        tier = self.tier(name)
        if not isinstance(tier, MemoryTier):
            raise UsageError(f"array {name!r} is on tier {tier.name!r}, not in memory: use `tiles` or `write`")
        return tier

    @contextlib.contextmanager
    def changing(self, names: Sequence[str]) -> Iterator[None]:
        """Let only the caller change the `memory` of shards during a `with` block, in any number of threads. Waits until
        they are not pinned. If the block fails, its changes remain."""
        self._check_open()
        self.order.wait(names)
        with contextlib.ExitStack() as cleanup:
            by_tier: dict[Any, list[str]] = {}
            for name in names:
                by_tier.setdefault(self._tiers.get(name), []).append(name)
            for tier_names in by_tier.values():
                cleanup.enter_context(self._memory_tier(tier_names[0]).changing(tier_names))
            yield

    def write(self, name: str, data: Array | torch.Tensor, first: int = 0) -> Ticket[None]:
        """Replace elements `[first, first + len(data))` of this rank's shard by `data`: 1-D, of the array's data type. The
        caller must not touch `data` until the ticket is done."""
        with self._lock:
            array = self._array(name)
            source = flatten(name, data)
            shape = tuple(data.shape)
            if len(shape) != 1 or source.dtype.name != array.spec.dtype:
                raise UsageError(f"array {name!r}: expected 1-D {array.spec.dtype}, got {shape} of {source.dtype}")
            _require_in_shard(array, first, first + source.size)
            return self._queue(array, partial(self._write, name, source, first), changes=True)

    def read(self, name: str, first: int = 0, stop: int | None = None, out: Array | None = None) -> Ticket[Array]:
        """Read elements `[first, stop)` of this rank's shard, by default all, into `out`: 1-D, contiguous, of the array's
        data type; by default a new array. The ticket returns `out`."""
        with self._lock:
            array = self._array(name)
            last = array.valid_numel if stop is None else stop
            _require_in_shard(array, first, last)
            fits = out is None or (out.shape == (last - first,) and out.dtype == numpy_dtype(array.spec.dtype))
            if out is not None and not (fits and out.flags.c_contiguous and out.flags.writeable):
                raise UsageError(
                    f"array {name!r}: expected {last - first} contiguous, writable elements of {array.spec.dtype} to read "
                    f"into, got {out.shape} of {out.dtype}"
                )
            return self._queue(array, partial(self._read, name, first, last, out), changes=False)

    def _is_stored(self, array: StoreArray | None) -> bool:
        """Return whether the store has this array under its name, pending operations aside."""
        if array is None or (stored := self._shards.get(array.spec.name)) is None:
            return False
        return (stored.spec, stored.grid, stored.shard) == (array.spec, array.grid, array.shard)

    def _queue(self, array: StoreArray, operation: Callable[[], T], *, changes: bool) -> Ticket[T]:
        """Queue an operation on an array; it raises UsageError if the last `put` of the array failed."""

        def run() -> T:
            if not self._is_stored(array):
                raise UsageError(f"array {array.spec.name!r} has no value, because its last `put` failed: put it again")
            return operation()

        return self.order.submit(array.spec.name, run, changes=changes)

    def _write(self, name: str, source: Array, first: int) -> None:
        """Replace elements from `first` on, as part of an operation on the array."""
        if not source.size:
            return
        mode = Mode.FILL if self.local(name).valid_numel == source.size else Mode.UPDATE
        if mode is Mode.FILL and (disk := self._disk_of(name)):
            disk.replace(name, source)
            return
        for view, part in self._views(name, mode, None, slice(first, first + source.size)):
            copy_into(view, source[part])

    def _read(self, name: str, first: int, stop: int, out: Array | None) -> Array:
        """Return elements `[first, stop)`, in `out` if given, as part of an operation on the array."""
        local = self.local(name)
        dtype, numel = numpy_dtype(local.spec.dtype), local.grid.chunk_numel
        target = make_slab((stop - first) * dtype.itemsize, zeroed=False).view(dtype) if out is None else out
        if not (first < stop and (disk := self._disk_of(name)) and disk.read(name, first, stop, target)):
            chunks = first // numel, -(-stop // numel)
            for view, part in self._views(name, Mode.READ, chunks, slice(first, stop)):
                copy_out(view, target[part])
        return target

    def _disk_of(self, name: str) -> DiskTier | None:
        """Return the disk tier, if the shard has a separate file on it."""
        tier = self._tiers[name]
        return tier if isinstance(tier, DiskTier) and not tier.is_packed(name) else None

    def _views(
        self, name: str, mode: Mode, chunks: tuple[int, int] | None, elements: slice
    ) -> Iterator[tuple[View, slice]]:
        """Yield views of the given elements of an array, and the slice of those elements that each view covers."""
        pass_ = Pass(groups=[[name]], mode=mode, pool=self.resources.pool, chunks=chunks)
        for tile in self._stream(pass_).tiles():
            low, high = max(tile.first, elements.start), min(tile.stop, elements.stop)
            if low < high:
                part = slice(low - elements.start, high - elements.start)
                yield tile.views[0][low - tile.first : high - tile.first], part

    def make_pool(self, nbytes: int) -> Pool:
        """Return a separate pool of buffers, for passes that must not wait for other passes. It is counted against the host
        budget; raises BudgetError if that has no room."""
        self.budget.require(nbytes, "a pool of buffers")
        pool = Pool(nbytes, budget=self.budget, make=self._make_buffers)
        self._pools.append(pool)
        return pool

    def drop_pool(self, pool: Pool) -> None:
        """Return the memory of a pool from `make_pool`, of which no buffer is in use, to the budget."""
        self._pools.remove(pool)
        self.budget.release(pool.nbytes)

    def _check_open(self) -> None:
        """Raise UsageError if the store is closed, except in operations that were queued before."""
        if self._closed and not self.order.in_operation:
            raise UsageError(self._closed)

    def snapshot(self, names: Sequence[str] | None = None) -> Snapshot:
        """Pin the current version of `names` (all arrays by default), without copying, once all pending operations on them
        are done. Raises, once, the error of a failed write, unless a later write of the array succeeded."""
        self._check_open()
        chosen = list(self._shards) if names is None else list(names)
        self.order.wait(chosen)
        self.order.raise_failed(chosen)
        snapshot = Snapshot({})
        try:
            for name in chosen:
                snapshot.pins[name] = self.tier(name).pin(name)
        except BaseException:
            snapshot.release()
            raise
        return snapshot

    def require_room(self, names: Sequence[str], *, num_stores: int = 1) -> int:
        """Return the bytes that the next change of `names` needs on the first drive after a snapshot of them.

        Pinned files are not changed in place, so a change creates new files. `num_stores` stores of about this size share
        the drive. Raises DiskFullError if a drive has less room.
        """
        disk = self._tiers_by_name.get("disk")
        if not isinstance(disk, DiskTier):
            return 0
        on_disk = disk.next_bytes(name for name in names if self._tiers[name] is disk)
        return self._folders.require_room(on_disk, num_stores)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Messages about requested features that are not available, so that a slower method is used."""
        return (*self.resources.files.fallbacks, *([] if self._slabs is None else self._slabs.messages))

    def statistics(self) -> StoreStatistics:
        """Return the store's contents, and its transfers and waits since it was opened."""
        queue = self.resources.queue.statistics()
        tier_bytes = dict.fromkeys(("device", "host", "disk"), 0)
        for name, tier in self._tiers.copy().items():
            tier_bytes[tier.name] += local.nbytes if (local := self._shards.get(name)) else 0
        return StoreStatistics(
            disk_read_bytes=queue.of(Priority.READ, Priority.PREFETCH).bytes,
            disk_write_bytes=queue.of(Priority.WRITE_BACK).bytes,
            device_bytes=tier_bytes["device"],
            host_bytes=tier_bytes["host"],
            disk_bytes=tier_bytes["disk"],
            pool_bytes=sum(pool.nbytes for pool in self._pools),
            pool_peak_bytes=sum(pool.peak_bytes for pool in self._pools),
            **asdict(self._counters),
            queue=queue,
            pinned_bytes=0 if self._slabs is None else self._slabs.pinned_bytes,
            fallbacks=self.fallbacks,
        )


def _unknown_array_error(name: str, present: Mapping[str, object]) -> KeyError:
    examples = f", for example {list(present)[:3]}" if present else ""
    return KeyError(f"the store has no array {name!r}; it has {len(present)}{examples}")


def _require_in_shard(array: StoreArray, first: int, stop: int) -> None:
    if not 0 <= first <= stop <= array.valid_numel:
        raise UsageError(
            f"array {array.spec.name!r}: elements [{first}, {stop}) are not in a shard of {array.valid_numel}"
        )
