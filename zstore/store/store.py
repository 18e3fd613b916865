"""TensorStore: this rank's shards of named global tensors, on the device, in host memory or on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import UsageError
from ..format.arrays import Array, ArraySpec, Grid, numpy_dtype
from ..io.buffers import Budget, Pool, Rooms, make_slab
from ..io.closing import OF_THE_PARENT, Closing, tell_of_fork
from ..io.files import Files
from ..io.pinning import PinnedSlabs
from ..io.queue import IoQueue, LinkCounters, Priority, Ticket
from ..io.shards import IoResources
from .options import StoreOptions, StoreStatistics
from .order import ArrayOrder
from .runfolder import RunFolders
from .spans import Batch
from .stream import Pass, Stream, StreamCounters
from .tiers import DeviceTier, DiskTier, Drives, HostTier, LocalShard, MemoryTier, Mode, Tier, Tile
from .tiers.base import Snapshot, TierName, View, as_numpy, copy_into, copy_out

if TYPE_CHECKING:
    import torch

ModeName = Literal["read", "update", "fill"]
SMALL_SHARD_BYTES = 64 * 1024
"""Smaller shards are kept in host memory even if the disk was asked for: a request to the disk would cost more."""


class TensorStore(Closing):
    """This rank's shards of named arrays. Close it, or use it in a `with` block.

    `write` and `read` return tickets and run behind the caller, in order for each array; `stream` is a pass in the caller's
    thread. Several threads may work on different arrays; no two passes may change one at once.

    Over 300 lines: it has all operations on a rank's shards, each a few lines over tiers and streams.
    """

    def __init__(self, options: StoreOptions, *, rank: int = 0, files: Files | None = None, cuda: Any = None) -> None:
        self.options, self.rank, files = options, rank, files or Files()
        self._slabs = PinnedSlabs(cuda) if options.pin_buffers or options.pin_state else None
        self._make_buffers = self._slabs.make if self._slabs is not None and options.pin_buffers else make_slab
        self.budget = Budget(options.host_budget_bytes)
        """This rank's host memory for buffers and host-tier state."""
        pool = Pool(options.pool_bytes, budget=self.budget, make=self._make_buffers)
        queue = IoQueue(options.num_threads, options.queue_depth)
        try:
            self._folders = RunFolders(options.all_paths, rank, files, shares=options.shares_folders)
        except BaseException:
            queue.close()
            raise
        self.resources = IoResources(
            files=files, queue=queue, pool=pool, block_bytes=options.span_bytes, verify=options.verify
        )
        self._host = HostTier(self.budget)
        self._pinned = HostTier(self.budget, self._slabs.make) if self._slabs and options.pin_state else self._host
        self.expect = self._pinned.expect
        self._device = DeviceTier(options.device)
        groups = {group: self._folders.paths(paths) for group, paths in options.group_paths.items()}
        usual = [path for path in (options.run_path, *options.other_paths) if path is not None]
        drives = Drives(self._folders.paths(usual or options.all_paths), groups)
        self._disk = DiskTier(drives, self.resources, reserves=options.reserves) if options.all_paths else None
        self._shards: dict[str, LocalShard] = {}
        self._tiers: dict[str, Tier] = {}
        self.arrangement = 0
        """Grows whenever an array is created, renamed, moved or removed: memory that `memory` gave may be another's then."""
        self._planned: dict[Any, Sequence[Batch]] = {}
        """Plans of former passes over whole arrays; cleared when arrays are created, removed or moved."""
        self.order = ArrayOrder()
        """Of operations on arrays, for callers that queue their own, too."""
        self._pools, self._counters = [pool], StreamCounters()
        self.links, self.rooms = LinkCounters(), Rooms(self._make_buffers)
        """For callers that move the store's contents over a link of their own, as to a device; `rooms` has memory like that of
        transfer buffers, which is not counted against the budget."""
        self._closed = ""
        tell_of_fork(self)

    # -- arrays -----------------------------------------------------------------------------------------------------

    def create(
        self, spec: ArraySpec, *, grid: Grid, shard: int, tier: TierName, memory: torch.Tensor | None = None
    ) -> None:
        """Register this rank's shard number `shard` of `grid`, all zeros. `memory` (device tier only) holds the shard instead:
        1-D, contiguous, the unpadded elements; it stays the caller's, who sees every change. A shard under 64 KiB asked for on
        disk is kept in host memory."""
        self._check_new(spec)
        local = LocalShard(spec, grid, shard)
        chosen = self._choose(local, tier)
        chosen.create(local, memory)
        self._tiers[spec.name] = chosen
        self._shards[spec.name] = local

    def rename(self, name: str, spec: ArraySpec, *, tier: TierName) -> bool:
        """Let an array become that of `spec` and keep its values; false if its shape or data type differs, or `create`
        would put it elsewhere. Raises UsageError while it is pinned, or a pass changes it."""
        self._check_new(spec)
        former = self.local(name)
        local = LocalShard(spec, former.grid, former.shard)
        alike = (former.spec.shape, former.spec.dtype) == (spec.shape, spec.dtype)
        if not alike or self._choose(local, tier) is not self._tiers[name]:
            return False
        self._at_rest(name).rename(name, local)
        self._tiers[spec.name], self._shards[spec.name] = self._tiers.pop(name), local
        del self._shards[name]
        return True

    def move(self, name: str, tier: TierName, copy: Callable[[View, View], None]) -> None:
        """Move an array with its values to another tier, as `create` would choose it; its version changes.

        `copy(target, source)` copies between views of the two tiers; see `Tile`. Raises UsageError as `rename` does, and
        BudgetError or DiskFullError if there is no room: then the array is where it was.
        """
        former, local = self._at_rest(name), self.local(name)
        chosen = self._choose(local, tier)
        if chosen is former:
            return
        moving = replace(local.spec, name=f"{name}.moving")
        self.create(moving, grid=local.grid, shard=local.shard, tier=tier)
        try:
            with contextlib.closing(self.stream([[name, moving.name]], "fill", modes={name: "read"})) as tiles:
                for tile in tiles:
                    copy(tile.views[1], tile.views[0])
            former.remove(name)
        except BaseException:
            self.remove(moving.name)
            raise
        chosen.rename(moving.name, local)
        self._tiers[name] = chosen
        del self._shards[moving.name], self._tiers[moving.name]

    def change_memory(self, name: str, memory: torch.Tensor | None) -> None:
        """Keep an array on the device tier in other memory of the caller's, as `create` takes it, which holds its values;
        None: in none, and nobody may use it until it has memory again. Raises UsageError as `rename` does."""
        tier = self._at_rest(name)
        if not isinstance(tier, DeviceTier):
            raise UsageError(f"array {name!r} is on tier {tier.name!r}, which makes its own memory")
        tier.change_memory(name, memory)

    def remove(self, name: str) -> None:
        """Forget an array and free its space; nothing if the store is closed. Raises UsageError as `rename` does."""
        if not self._closed:
            self._at_rest(name).remove(name)
            del self._shards[name], self._tiers[name]

    def _at_rest(self, name: str) -> Tier:
        """Return the tier of an array once nothing is under way for it, for a call that moves or changes it."""
        self.local(name)
        self._rearrange()
        self.order.wait([name])
        self.order.forget(name)
        return self._tiers[name]

    def _rearrange(self) -> None:
        self._planned.clear()
        self.arrangement += 1

    def _check_new(self, spec: ArraySpec) -> None:
        self._check_open()
        self._rearrange()
        if spec.name in self._shards:
            raise UsageError(f"array {spec.name!r} exists already")

    def _choose(self, local: LocalShard, tier: TierName) -> Tier:
        tiers = dict[str, Tier | None](device=self._device, host=self._host, pinned=self._pinned, disk=self._disk)
        if tier not in tiers:
            raise UsageError(f"array {local.spec.name!r}: expected one of {', '.join(tiers)} as tier, got {tier!r}")
        if (chosen := tiers[tier]) is None:
            raise UsageError(f"array {local.spec.name!r}: the store has no disk tier; open it with a `run_path`")
        return self._pinned if tier == "disk" and local.nbytes < SMALL_SHARD_BYTES else chosen

    def __contains__(self, name: object) -> bool:
        return name in self._shards

    def names(self) -> list[str]:
        """Return the names of all arrays, in the order they were created."""
        return list(self._shards)

    def local(self, name: str) -> LocalShard:
        """Return which shard of which array this rank holds under `name`."""
        if name not in self._shards:
            raise UsageError(f"there is no array {name!r} in this store")
        return self._shards[name]

    def spec(self, name: str) -> ArraySpec:
        """Return name, shape and data type of the array."""
        return self.local(name).spec

    def tier_of(self, name: str) -> TierName:
        """Return the shard's tier: device, host or disk."""
        self.local(name)
        return self._tiers[name].name

    def share_files(self) -> None:
        """Let shards on disk of less than 256 KiB that are created from now on share files: a pass brings many in one request,
        and a checkpoint copies them instead of linking their files."""
        if self._disk is not None:
            self._disk.packs_small = True

    def shares_file(self, name: str) -> bool:
        """Return whether the shard is on disk and small, so that it shares a file with others."""
        return self._tiers[name].is_packed(name)

    def _disk_of(self, name: str) -> DiskTier | None:
        """Return the disk tier, if the shard has a file of its own there."""
        tier = self._tiers[name]
        return tier if isinstance(tier, DiskTier) and not tier.is_packed(name) else None

    def version(self, name: str) -> int:
        """Return the number of the shard's version: while it is the same, no pass changed the shard."""
        self.local(name)
        return self._tiers[name].version(name)

    def adopt(self, name: str, path: Path, crcs: Sequence[int]) -> bool:
        """Take a shard file of a checkpoint, laid out as this array's, as the array's contents, without reading it.

        False, and nothing changed, if the array is not on disk, or `path` cannot be linked there. `crcs` are
        its chunks' checksums: each chunk is verified when it is read. Nobody may ever write the file again.
        """
        tier = self._at_rest(name)
        return isinstance(tier, DiskTier) and tier.adopt(name, path, crcs)

    def disk_folders(self) -> dict[str, Path]:
        """Return by array the folder of its files, for those on disk."""
        return {} if self._disk is None else self._disk.folders()

    # -- transfers --------------------------------------------------------------------------------------------------

    def write(self, name: str, data: Array | torch.Tensor, first: int = 0) -> Ticket[None]:
        """Replace local flat elements `[first, first + len(data))` by `data`: 1-D, contiguous, in host memory, of the array's
        data type, and not to be touched by the caller until it is done."""
        return self.order.submit(name, self.writing(name, data, first), changes=True)

    def writing(self, name: str, data: Array | torch.Tensor, first: int) -> Callable[[], None]:
        """Return the operation that `write` queues, for a caller that orders an array's operations itself."""
        self._check_open()
        source = as_numpy(data, self.spec(name))
        stop = first + source.size
        mode = Mode.FILL if self._require_in_shard(name, first, stop).valid_numel == source.size else Mode.UPDATE

        def run() -> None:
            if mode is Mode.FILL and source.size and (disk := self._disk_of(name)):
                disk.replace(name, source)
                return
            for view, part in self._views(self._pass_over(name, mode), first, stop):
                copy_into(view, source[part])

        return run

    def read(self, name: str, first: int = 0, stop: int | None = None, out: Array | None = None) -> Ticket[Array]:
        """Read local flat elements `[first, stop)`, all by default, into `out`, which the ticket gives: 1-D, contiguous, of the
        array's data type, and the caller's; None: a new array."""
        return self.order.submit(name, self.reading(name, first, stop, out), changes=False)

    def reading(self, name: str, first: int, stop: int | None, out: Array | None) -> Callable[[], Array]:
        """Return the operation that `read` queues; see `writing`."""
        self._check_open()
        last = self.local(name).valid_numel if stop is None else stop
        local = self._require_in_shard(name, first, last)
        dtype, numel = numpy_dtype(local.spec.dtype), local.grid.chunk_numel
        target = make_slab((last - first) * dtype.itemsize, zeroed=False).view(dtype) if out is None else out
        usable = target.flags.c_contiguous and target.flags.writeable
        if target.shape != (last - first,) or target.dtype != dtype or not usable:
            raise UsageError(
                f"array {name!r}: expected {last - first} contiguous, writable elements of {dtype} to read into, "
                f"got {target.shape} of {target.dtype}"
            )

        def run() -> Array:
            if first < last and (disk := self._disk_of(name)) and disk.read(name, first, last, target):
                return target
            what = self._pass_over(name, Mode.READ, (first // numel, -(-last // numel)))
            for view, part in self._views(what, first, last):
                copy_out(view, target[part])
            return target

        return run

    def _require_in_shard(self, name: str, first: int, stop: int) -> LocalShard:
        local = self.local(name)
        if not 0 <= first <= stop <= local.valid_numel:
            raise UsageError(f"array {name!r}: elements [{first}, {stop}) are not in a shard of {local.valid_numel}")
        return local

    def _views(self, what: Pass, first: int, stop: int) -> Iterator[tuple[View, slice]]:
        """Yield views of an array's elements `[first, stop)`, and the place of each among them."""
        for tile in self._stream(what).tiles():
            low, high = max(tile.first, first), min(tile.stop, stop)
            if low < high:
                yield tile.views[0][low - tile.first : high - tile.first], slice(low - first, high - first)

    def stream(
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

        The arrays of a group share one layout, or have a bit for each element of the first, or a value for each block of
        them (`Grid.packed`). "update": change the views in place, they go back when the next tile is asked for. "fill": set
        every element; nothing is read. "read": changes are lost. `modes` has other modes for single arrays. Buffers come from
        `pool` (of `make_pool`), for a pass that must not wait for others'; `ahead` marks reads that nothing waits for yet.
        `admit(group, wait)` is asked before a group is begun; if it says no after waiting, the group is left out. New versions
        become the present ones when the pass is done, or, with `on_end`, each group's before that is called. Exhaust the pass
        or close it.
        """
        what = self._pass(groups, mode, modes)
        what = replace(what, pool=pool or what.pool, admit=admit, on_end=on_end)
        return self._stream(replace(what, priority=Priority.PREFETCH) if ahead else what).tiles()

    def read_ahead(
        self, groups: Sequence[Sequence[str]], mode: ModeName = "update", *, modes: Mapping[str, ModeName] | None = None
    ) -> Stream:
        """Return a pass as `stream` has, and begin to read its first spans: then call `Stream.go_on`, or `Stream.drop`. Until
        then nothing is changed, and buffers are held, up to three quarters of the pool."""
        begun = self._stream(self._pass(groups, mode, modes))
        begun.read_ahead()
        return begun

    def _pass(self, groups: Sequence[Sequence[str]], mode: ModeName, modes: Mapping[str, ModeName] | None) -> Pass:
        self._check_open()
        chosen = {name: Mode(other) for name, other in (modes or {}).items()}
        what = Pass(groups=groups, mode=Mode(mode), pool=self.resources.pool, modes=chosen)
        self.order.wait(what.names)
        return what

    def memory(self, name: str) -> Any:
        """Return the memory of a shard on the host or the device tier, 1-D, without padding, until it is moved or removed.
        Whoever writes to it does so within `changing`, or ensures that nobody else has it."""
        return self._memory_tier(name).view(name, 0, self.local(name).valid_numel)

    def _memory_tier(self, name: str) -> MemoryTier:
        tier = self._tiers[self.local(name).spec.name]
        if not isinstance(tier, MemoryTier):
            raise UsageError(f"array {name!r} is on tier {tier.name!r}, not in memory: use `stream` or `write`")
        return tier

    @contextlib.contextmanager
    def changing(self, names: Sequence[str]) -> Iterator[None]:
        """Let the caller alone change the `memory` of shards for the length of a `with` block, in as many threads as it likes.
        What is pinned is copied first, or waited for. After a failure, elements that were set stay so."""
        self._check_open()
        self.order.wait(names)
        with contextlib.ExitStack() as last_to_first:
            by_tier: dict[Any, list[str]] = {}
            for name in names:
                by_tier.setdefault(self._tiers.get(name), []).append(name)
            for some in by_tier.values():  # a tier's names have one answer
                last_to_first.enter_context(self._memory_tier(some[0]).changing(some))
            yield

    def _pass_over(self, name: str, mode: Mode, chunks: tuple[int, int] | None = None) -> Pass:
        return Pass(groups=[[name]], mode=mode, pool=self.resources.pool, chunks=chunks)

    def _stream(self, what: Pass) -> Stream:
        for name in what.names:
            self.local(name)
        key = tuple(tuple(group) for group in what.groups), what.chunks, what.pool.nbytes
        planned = self._planned.get(key)
        stream = Stream(what, tiers=self._tiers, shards=self._shards, counters=self._counters, batches=planned)
        if what.chunks is None and len(what.groups) > 1:
            self._planned[key] = stream.batches
        return stream

    def make_pool(self, nbytes: int) -> Pool:
        """Return separate buffers for passes that must not wait for others; counted against the host budget. Raises BudgetError
        if that has no room for them."""
        self.budget.require(nbytes, "a pool of buffers")
        pool = Pool(nbytes, budget=self.budget, make=self._make_buffers)
        self._pools.append(pool)
        return pool

    def drop_pool(self, pool: Pool) -> None:
        """Count the memory of a pool of `make_pool`, of which nothing is lent out, as free."""
        self._pools.remove(pool)
        self.budget.release(pool.nbytes)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(self._closed)

    # -- versions ---------------------------------------------------------------------------------------------------

    def commit(self, names: Sequence[str] | None = None) -> None:
        """Wait for everything under way for `names`, all arrays by default. Raises, once, the error of a write that failed and
        that no later write of its array made good."""
        self._check_open()
        chosen = list(self._shards) if names is None else names
        self.order.wait(chosen)
        self.order.raise_failed(chosen)

    def require_room(self, names: Sequence[str], *, num_stores: int = 1) -> int:
        """Return the bytes that the next change of `names` needs on the first drive after a snapshot of them.

        Pinned files stay as they are, and a change makes new ones beside them. `num_stores` share the drive, each of
        about this size. Raises DiskFullError if there is less.
        """
        if self._disk is None:
            return 0
        on_disk = self._disk.next_bytes(name for name in names if self._tiers[name] is self._disk)
        return self._folders.require_room(on_disk, num_stores)

    def snapshot(self, names: Sequence[str] | None = None) -> Snapshot:
        """Pin the present version of `names` (all arrays by default) without moving a byte; raises as `commit` does."""
        chosen = list(self._shards) if names is None else list(names)
        self.commit(chosen)
        snapshot = Snapshot({})
        try:
            for name in chosen:
                self.local(name)
                snapshot.pins[name] = self._tiers[name].pin(name)
        except BaseException:
            snapshot.release()
            raise
        return snapshot

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Requested features that were not available, so that something slower is used."""
        return (*self.resources.files.fallbacks, *([] if self._slabs is None else self._slabs.messages))

    def statistics(self) -> StoreStatistics:
        """Return counters since the store was opened."""
        queue = self.resources.queue.statistics()
        held = dict.fromkeys(("device", "host", "disk"), 0)
        for name, tier in self._tiers.copy().items():
            held[tier.name] += local.nbytes if (local := self._shards.get(name)) else 0
        return StoreStatistics(
            disk_read_bytes=queue.bytes["read"] + queue.bytes["prefetch"],
            disk_write_bytes=queue.bytes["write_back"],
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

    def _forked(self) -> None:
        """Belong to the parent, in a forked child: files and threads are its."""
        self._closed = f"the store {OF_THE_PARENT}"

    def close(self) -> None:
        """Finish the work under way, then give memory, files and the run folder back; a second call does nothing. A write that
        waits for a snapshot to be released fails instead."""
        if self._closed:
            return
        for waiting in (self._host, self._pinned, self._device):
            waiting.stop_waiting()
        self.order.wait(list(self._shards))
        self._closed = "the store is closed"
        with contextlib.ExitStack() as last_to_first:
            last_to_first.callback(self._folders.close)
            if self._slabs is not None:
                last_to_first.callback(self._slabs.close)
            for tier in (self._device, self._host, self._pinned, self._disk):
                if tier is not None:
                    last_to_first.callback(tier.close)
            last_to_first.callback(self.resources.queue.close)
            last_to_first.callback(self.order.close)
