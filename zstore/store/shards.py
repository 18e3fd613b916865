"""This rank's shards of named global tensors, on the device, in host memory or on disk: the base of `Store`.

All methods act in the caller's thread, once the pending operations on their arrays are done.
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
    """A rank's shards in their tiers, and passes over them. Several threads may work on different arrays; no two passes may
    change one at once."""

    def __init__(self, options: StoreOptions, *, rank: int = 0, files: Files | None = None, cuda: Any = None) -> None:
        self.options, self.rank, files = options, rank, files or Files()
        self._closed = ""
        """Why the store cannot be used any more."""
        self._lock = threading.RLock()
        """Guards the table of arrays: locked only briefly, so that no coroutine waits for it."""
        self._arrays = ArraysByName()
        """What was put or created last under each name: a `put` may be pending."""
        self._shards: dict[str, LocalShard] = {}
        self._tiers: dict[str, Tier] = {}
        """Tiers by array; like `_shards` without pending operations."""
        self.arrangement = 0
        """Grows whenever an array is created, renamed, moved or removed: memory that `memory` gave may be another's then."""
        self._planned: dict[Any, Sequence[Batch]] = {}
        """Plans of former passes over whole arrays; cleared when arrays are created, removed or moved."""
        self._counters = StreamCounters()
        self.links = LinkCounters()
        """For callers that move the store's contents over their own link, as to a device."""
        with contextlib.ExitStack() as parts:
            self._folders = RunFolders(options.all_paths, rank, files, shares=options.shares_folders)
            parts.callback(self._folders.close)
            self._slabs = PinnedSlabs(cuda) if options.pin_buffers or options.pin_state else None
            if self._slabs is not None:
                parts.callback(self._slabs.close)
            self._make_buffers = self._slabs.make if self._slabs is not None and options.pin_buffers else make_slab
            self.budget = Budget(options.host_budget_bytes)
            """This rank's host memory for buffers and host-tier state."""
            self.rooms = Rooms(self._make_buffers)
            """Memory like that of transfer buffers, which is not counted against the budget, for callers with links."""
            self._pools = [Pool(options.pool_bytes, budget=self.budget, make=self._make_buffers)]
            queue = IoQueue(options.num_threads, options.queue_depth)
            self.resources = IoResources(
                files=files, queue=queue, pool=self._pools[0], block_bytes=options.span_bytes, verify=options.verify
            )
            self._homes = self._make_tiers()
            """Tiers by the name that an array is requested on; only stores with a folder have a disk tier."""
            for tier in set(self._homes.values()):
                parts.callback(tier.close)
            parts.callback(queue.close)
            self.order = ArrayOrder()
            """Counters of operations on arrays."""
            parts.callback(self.order.close)
            self._parts = parts.pop_all()
            """Resources closed with the store, the last one first."""

    def _make_tiers(self) -> dict[TierName, Tier]:
        options = self.options
        host = pinned = HostTier(self.budget)
        if self._slabs is not None and options.pin_state:
            pinned = HostTier(self.budget, self._slabs.make)
        self.expect = pinned.expect
        tiers: dict[TierName, Tier] = {"device": DeviceTier(options.device), "host": host, "pinned": pinned}
        if options.all_paths:
            groups = {group: self._folders.paths(paths) for group, paths in options.group_paths.items()}
            usual = [path for path in (options.run_path, *options.other_paths) if path is not None]
            drives = Drives(self._folders.paths(usual or options.all_paths), groups)
            tiers["disk"] = DiskTier(drives, self.resources, reserves=options.reserves)
        return tiers

    def create(
        self, spec: ArraySpec, *, grid: Grid, shard: int, tier: TierName, memory: torch.Tensor | None = None
    ) -> None:
        """Register this rank's shard number `shard` of `grid`, all zeros. `memory` (device tier only) has the shard instead:
        1-D, contiguous, the unpadded elements; it stays the caller's and shows every change. A shard under 64 KiB requested
        on disk is kept in host memory."""
        array = StoreArray(spec, grid, shard)
        self._register(array)
        try:
            self._add(array, tier, memory)
        except BaseException:
            with self._lock:
                del self._arrays[spec.name]
            raise

    def _register(self, array: StoreArray) -> None:
        self._check_open()
        with self._lock:
            if array.spec.name in self._arrays:
                raise UsageError(f"array {array.spec.name!r} exists already")
            self._arrays[array.spec.name] = array

    def _add(self, local: LocalShard, tier: TierName, memory: torch.Tensor | None = None) -> None:
        self._rearrange()
        chosen = self._choose(local, tier)
        chosen.create(local, memory)
        self._tiers[local.spec.name], self._shards[local.spec.name] = chosen, local

    def rename(self, name: str, spec: ArraySpec, *, tier: TierName) -> bool:
        """Rename an array to `spec`, keeping its values; false if its shape or data type differs, or `create`
        would put it elsewhere. Raises UsageError while it is pinned, or a pass changes it."""
        former = self.local(name)
        array = StoreArray(spec, former.grid, former.shard)
        alike, renamed = (former.spec.shape, former.spec.dtype) == (spec.shape, spec.dtype), False
        self._register(array)
        try:
            if alike and self._choose(array, tier) is self._tiers[name]:
                self._at_rest(name).rename(name, array)
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
        BudgetError or DiskFullError if there is no room: then the array is where it was.
        """
        former, local = self._at_rest(name), self.local(name)
        chosen = self._choose(local, tier)
        if chosen is former:
            return
        moving = replace(local, spec=replace(local.spec, name=f"{name}\0moving"))  # no name of an array of the caller's
        self._add(moving, tier)
        try:
            with contextlib.closing(self.tiles([[name, moving.spec.name]], "fill", modes={name: "read"})) as tiles:
                for tile in tiles:
                    copy(tile.views[1], tile.views[0])
            former.remove(name)
        except BaseException:
            self._drop(moving.spec.name)
            raise
        chosen.rename(moving.spec.name, local)
        self._tiers[name] = chosen
        del self._shards[moving.spec.name], self._tiers[moving.spec.name]

    def change_memory(self, name: str, memory: torch.Tensor | None) -> None:
        """Keep an array on the device tier in other memory of the caller's, as for `create`, which holds its values; None:
        without memory, and unusable until it has memory again. Raises UsageError as `rename` does."""
        tier = self._at_rest(name)
        if not isinstance(tier, DeviceTier):
            raise UsageError(f"array {name!r} is on tier {tier.name!r}, which makes its own memory")
        tier.change_memory(name, memory)

    def remove(self, name: str) -> None:
        """Forget an array and free its space; nothing if the store is closed. Raises UsageError as `rename` does."""
        if not self._closed:
            self._drop(name)
            with self._lock:
                del self._arrays[name]

    def _drop(self, name: str) -> None:
        self._at_rest(name).remove(name)
        del self._shards[name], self._tiers[name]

    def _at_rest(self, name: str) -> Tier:
        """Return the tier of an array once no operation on it is pending, for a call that moves or changes it."""
        self.local(name)
        self._rearrange()
        self.order.wait([name])
        self.order.forget(name)
        return self._tiers[name]

    def _rearrange(self) -> None:
        self._planned.clear()
        self.arrangement += 1

    def _choose(self, local: LocalShard, tier: TierName) -> Tier:
        names = ("device", "host", "pinned", "disk")
        if tier not in names:
            raise UsageError(f"array {local.spec.name!r}: expected one of {', '.join(names)} as tier, got {tier!r}")
        if tier not in self._homes:
            raise UsageError(f"array {local.spec.name!r}: the store has no disk tier; open it with a `run_path`")
        return self._homes["pinned" if tier == "disk" and local.nbytes < SMALL_SHARD_BYTES else tier]

    def _array(self, name: str) -> StoreArray:
        self._check_open()
        if name not in self._arrays:
            raise _unknown(name, self._arrays)
        return self._arrays[name]

    def local(self, name: str) -> LocalShard:
        """Return which shard of which array this rank has under `name`. Raises KeyError for an unknown one."""
        if name not in self._shards:
            raise _unknown(name, self._shards)
        return self._shards[name]

    def tier(self, name: str) -> Tier:
        """Return the shard's present tier."""
        self.local(name)
        return self._tiers[name]

    def share_files(self) -> None:
        """Let shards on disk of less than 256 KiB that are created from now on share files: a pass brings many in one request,
        and a checkpoint copies them instead of linking their files."""
        if isinstance(disk := self._homes.get("disk"), DiskTier):
            disk.packs_small = True

    def adopt(self, name: str, path: Path, crcs: Sequence[int]) -> bool:
        """Take a shard file of a checkpoint, laid out as this array's, as the array's contents, without reading it.

        False, and nothing changed, if the array is not on disk, or `path` cannot be linked there. `crcs` are
        its chunks' checksums: each chunk is verified when it is read. The file may never be written again.
        """
        tier = self._at_rest(name)
        return isinstance(tier, DiskTier) and tier.adopt(name, path, crcs)

    def disk_folders(self) -> dict[str, Path]:
        """Return the folder of each array's files, for arrays on disk."""
        disk = self._homes.get("disk")
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

        The arrays of a group share one layout, or have a bit for each element of the first, or a value for each block of them
        (`Grid.packed`). "update": change the views in place, they are written back when the next tile is requested. "fill":
        set every element; nothing is read. "read": changes are lost. `modes` has other modes for single arrays. Buffers come
        from `pool` (of `make_pool`), for a pass that must not wait for others'; `ahead` marks reads that nothing waits for
        yet. `admit(group, wait)` is called before a group is begun; if it is false after waiting, the group is skipped. New
        versions become current when the pass is done, or, with `on_end`, each group's before that is called. Exhaust the pass
        or close it.
        """
        what = self._pass(groups, mode, modes)
        what = replace(what, pool=pool or what.pool, admit=admit, on_end=on_end)
        return self._stream(replace(what, priority=Priority.PREFETCH) if ahead else what).tiles()

    def read_ahead(
        self, groups: Sequence[Sequence[str]], mode: ModeName = "update", *, modes: Mapping[str, ModeName] | None = None
    ) -> Stream:
        """Return a pass like `tiles`, and start reading its first spans: then call `Stream.go_on`, or `Stream.drop`.
        Until then nothing is changed, and buffers are taken, up to three quarters of the pool."""
        begun = self._stream(self._pass(groups, mode, modes))
        begun.read_ahead()
        return begun

    def _pass(self, groups: Sequence[Sequence[str]], mode: ModeName, modes: Mapping[str, ModeName] | None) -> Pass:
        self._check_open()
        chosen = {name: Mode(other) for name, other in (modes or {}).items()}
        what = Pass(groups=groups, mode=Mode(mode), pool=self.resources.pool, modes=chosen)
        self.order.wait(what.names)
        return what

    def _stream(self, what: Pass) -> Stream:
        for name in what.names:
            self.local(name)
        key = tuple(tuple(group) for group in what.groups), what.chunks, what.pool.nbytes
        planned = self._planned.get(key)
        stream = Stream(what, tiers=self._tiers, shards=self._shards, counters=self._counters, batches=planned)
        if what.chunks is None and len(what.groups) > 1:
            self._planned[key] = stream.batches
        return stream

    def memory(self, name: str) -> Any:
        """Return the memory of a shard on the host or the device tier, 1-D, without padding, until it is moved or removed.
        Write to it only within `changing`, unless no other code uses it."""
        return self._memory_tier(name).view(name, 0, self.local(name).valid_numel)

    def _memory_tier(self, name: str) -> MemoryTier:
        tier = self.tier(name)
        if not isinstance(tier, MemoryTier):
            raise UsageError(f"array {name!r} is on tier {tier.name!r}, not in memory: use `tiles` or `write`")
        return tier

    @contextlib.contextmanager
    def changing(self, names: Sequence[str]) -> Iterator[None]:
        """Let only the caller change the `memory` of shards during a `with` block, in any number of threads.
        What is pinned is copied first, or waited for. After a failure, elements that were set stay so."""
        self._check_open()
        self.order.wait(names)
        with contextlib.ExitStack() as last_to_first:
            by_tier: dict[Any, list[str]] = {}
            for name in names:
                by_tier.setdefault(self._tiers.get(name), []).append(name)
            for some in by_tier.values():  # all names of a tier have the same answer
                last_to_first.enter_context(self._memory_tier(some[0]).changing(some))
            yield

    def write(self, name: str, data: Array | torch.Tensor, first: int = 0) -> Ticket[None]:
        """Replace elements `[first, first + len(data))` of this rank's shard by `data`: 1-D, of the array's data type, and not
        to be touched by the caller until it is done."""
        with self._lock:
            array = self._array(name)
            source = flatten(name, data)
            shape = tuple(data.shape)
            if len(shape) != 1 or source.dtype.name != array.spec.dtype:
                raise UsageError(f"array {name!r}: expected 1-D {array.spec.dtype}, got {shape} of {source.dtype}")
            _require_in_shard(array, first, first + source.size)
            return self._queue(array, partial(self._write, name, source, first), changes=True)

    def read(self, name: str, first: int = 0, stop: int | None = None, out: Array | None = None) -> Ticket[Array]:
        """Read elements `[first, stop)` of this rank's shard, all by default, into `out`, which the ticket gives: 1-D,
        contiguous, of the array's data type, and the caller's; None: a new array."""
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

    def _has(self, array: StoreArray | None) -> bool:
        """Return whether the array under that name, of all operations that were carried out, is this one."""
        if array is None or (present := self._shards.get(array.spec.name)) is None:
            return False
        return (present.spec, present.grid, present.shard) == (array.spec, array.grid, array.shard)

    def _queue(self, array: StoreArray, operation: Callable[[], T], *, changes: bool) -> Ticket[T]:
        """Queue an operation on an array, which raises UsageError unless it is what was put last."""

        def run() -> T:
            if not self._has(array):
                raise UsageError(f"array {array.spec.name!r} lacks the value put last, which failed: put it again")
            return operation()

        return self.order.submit(array.spec.name, run, changes=changes)

    def _write(self, name: str, source: Array, first: int) -> None:
        """Replace elements from `first` on, for an operation on the array."""
        if not source.size:
            return
        mode = Mode.FILL if self.local(name).valid_numel == source.size else Mode.UPDATE
        if mode is Mode.FILL and (disk := self._disk_of(name)):
            disk.replace(name, source)
            return
        for view, part in self._views(name, mode, None, slice(first, first + source.size)):
            copy_into(view, source[part])

    def _read(self, name: str, first: int, stop: int, out: Array | None) -> Array:
        """Return elements `[first, stop)`, in `out` if given, for an operation on the array."""
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
        self, name: str, mode: Mode, chunks: tuple[int, int] | None, wanted: slice
    ) -> Iterator[tuple[View, slice]]:
        """Yield views of the `wanted` elements of an array, and the place of each among them."""
        what = Pass(groups=[[name]], mode=mode, pool=self.resources.pool, chunks=chunks)
        for tile in self._stream(what).tiles():
            low, high = max(tile.first, wanted.start), min(tile.stop, wanted.stop)
            if low < high:
                part = slice(low - wanted.start, high - wanted.start)
                yield tile.views[0][low - tile.first : high - tile.first], part

    def make_pool(self, nbytes: int) -> Pool:
        """Return separate buffers for passes that must not wait for others; counted against the host budget. Raises BudgetError
        if that has no room for them."""
        self.budget.require(nbytes, "a pool of buffers")
        pool = Pool(nbytes, budget=self.budget, make=self._make_buffers)
        self._pools.append(pool)
        return pool

    def drop_pool(self, pool: Pool) -> None:
        """Count the memory of a pool of `make_pool`, with no buffer in use, as free."""
        self._pools.remove(pool)
        self.budget.release(pool.nbytes)

    def _check_open(self) -> None:
        """Raise UsageError if the store is closed, but to operations that were queued before."""
        if self._closed and not self.order.in_operation:
            raise UsageError(self._closed)

    def snapshot(self, names: Sequence[str] | None = None) -> Snapshot:
        """Pin the current version of `names` (all arrays by default) without copying, once all pending operations on them are
        done. Raises, once, the error of a failed write that no later write of its array replaced."""
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

        Pinned files stay as they are, and a change makes new ones. `num_stores` share the drive, each of
        about this size. Raises DiskFullError if there is less.
        """
        disk = self._homes.get("disk")
        if not isinstance(disk, DiskTier):
            return 0
        on_disk = disk.next_bytes(name for name in names if self._tiers[name] is disk)
        return self._folders.require_room(on_disk, num_stores)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Requested features that were not available, so that a slower way is used."""
        return (*self.resources.files.fallbacks, *([] if self._slabs is None else self._slabs.messages))

    def statistics(self) -> StoreStatistics:
        """Return the store's contents, and its work since it was opened."""
        queue = self.resources.queue.statistics()
        held = dict.fromkeys(("device", "host", "disk"), 0)
        for name, tier in self._tiers.copy().items():
            held[tier.name] += local.nbytes if (local := self._shards.get(name)) else 0
        return StoreStatistics(
            disk_read_bytes=queue.of(Priority.READ, Priority.PREFETCH).bytes,
            disk_write_bytes=queue.of(Priority.WRITE_BACK).bytes,
            device_bytes=held["device"],
            host_bytes=held["host"],
            disk_bytes=held["disk"],
            pool_bytes=sum(pool.nbytes for pool in self._pools),
            pool_peak_bytes=sum(pool.peak_bytes for pool in self._pools),
            **asdict(self._counters),
            queue=queue,
            pinned_bytes=0 if self._slabs is None else self._slabs.pinned_bytes,
            fallbacks=self.fallbacks,
        )


def _unknown(name: str, present: Mapping[str, object]) -> KeyError:
    some = f", for example {list(present)[:3]}" if present else ""
    return KeyError(f"the store has no array {name!r}; it has {len(present)}{some}")


def _require_in_shard(array: StoreArray, first: int, stop: int) -> None:
    if not 0 <= first <= stop <= array.valid_numel:
        raise UsageError(
            f"array {array.spec.name!r}: elements [{first}, {stop}) are not in a shard of {array.valid_numel}"
        )
