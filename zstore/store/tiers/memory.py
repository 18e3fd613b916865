"""The host and device tiers: shards in memory, which passes change in place and pins protect without copying."""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...errors import UsageError
from ...format.arrays import Bytes, Grid, LocalShard, numpy_dtype, round_up
from ...io.memory import HUGE_PAGE_BYTES, Budget, make_slab
from ...io.queue import Priority
from ...io.shards import FillRuns, IoResources, ShardSummary, checksum_shard, write_shard
from .base import ChunkSpan, Mode, Tier, View, busy_error, copy_out, new_version

if TYPE_CHECKING:
    import torch


MEMORY_TILE_NUMEL = 512 * 1024
"""Approximate number of elements in a tile if all arrays are in memory: few enough that an update's data stays in cache."""
DEVICE_TILE_NUMEL = 16 * 1024 * 1024
"""Elements of a tile of device memory: enough that its kernels take longer than their launch."""
_SLAB_BYTES = 32 * HUGE_PAGE_BYTES
"""Bytes of a slab that small shards share."""
_ALIGN_BYTES = 64
_DIRECT_BYTES = 512
"""Alignment of shards in a slab: direct I/O then needs no copy."""


def shared_bytes(nbytes: int) -> int:
    """Return the bytes that a shard in host memory takes in a slab shared with others; 0 if it has separate memory."""
    return round_up(nbytes, _DIRECT_BYTES) if nbytes < HUGE_PAGE_BYTES else 0


class MemoryTier(Tier):
    """Shards held as 1-D arrays of their unpadded elements. A pass that changes a shard waits until its pins are released."""

    tile_numel = MEMORY_TILE_NUMEL
    owns_memory = False
    """Whether it is host memory that only passes access, so that files can be written from it without a copy."""

    def __init__(self) -> None:
        self._shards: dict[str, LocalShard] = {}
        self._memory: dict[str, View] = {}
        self._pins: dict[str, int] = {}
        self._versions: dict[str, int] = {}
        self._changing: set[str] = set()
        self._stopped = False
        self._failing: set[str] = set()
        """Arrays whose pending changes must give up waiting for a pin to be released."""
        self._pin_released = threading.Condition()

    def create(self, local: LocalShard, memory: torch.Tensor | None = None) -> None:
        """Register the shard; see `Tier.create`."""
        name = local.spec.name
        self._memory[name] = self._allocate(local) if memory is None else self._adopt(local, memory)
        self._shards[name] = local
        self._pins[name] = 0
        self._versions[name] = new_version()

    @abstractmethod
    def _allocate(self, local: LocalShard) -> View:
        """Return zeroed memory for the shard's unpadded elements."""

    def _adopt(self, local: LocalShard, memory: torch.Tensor) -> View:
        raise UsageError(f"array {local.spec.name!r}: only the device tier can use the caller's memory")

    def remove(self, name: str) -> None:
        with self._pin_released:
            self._require_idle(name)
            del self._shards[name], self._memory[name], self._pins[name], self._versions[name]

    def rename(self, name: str, local: LocalShard) -> None:
        with self._pin_released:
            self._require_idle(name)
            del self._shards[name], self._pins[name], self._versions[name]
            self._memory[local.spec.name] = self._memory.pop(name)
            self._shards[local.spec.name], self._pins[local.spec.name] = local, 0
            self._versions[local.spec.name] = new_version()

    def _require_idle(self, name: str) -> None:
        if name in self._changing or self._pins[name]:
            raise busy_error(name)

    def is_pinned_in_place(self, name: str) -> bool:
        return self._pins[name] > 0

    def version(self, name: str) -> int:
        """Return the version. Code that has the memory may write to it without changing the version."""
        return self._versions[name]

    def begin(self, name: str, mode: Mode) -> None:
        with self._pin_released:
            if mode is not Mode.READ:
                self._begin_change(name)
            elif name in self._changing and self._pins[name] == 0:
                raise busy_error(name)

    @contextlib.contextmanager
    def changing(self, names: Sequence[str]) -> Iterator[None]:
        """Mark several shards as being changed during a `with` block; if one cannot be, none is."""
        changing: list[str] = []
        try:
            with self._pin_released:
                if self._changing.isdisjoint(names) and not any(map(self._pins.__getitem__, names)):
                    changing.extend(names)
                    self._changing.update(names)
                    self._versions.update(dict.fromkeys(names, new_version()))
                for name in names if not changing else ():
                    self._begin_change(name)
                    changing.append(name)
            yield
        finally:
            with self._pin_released:
                self._changing.difference_update(changing)

    def _begin_change(self, name: str) -> None:
        if name in self._changing:
            raise busy_error(name)
        self._changing.add(name)
        if self._pins[name]:
            self._wait_for_unpinning(name)
        self._versions[name] = new_version()

    def _wait_for_unpinning(self, name: str) -> None:
        try:
            self._pin_released.wait_for(lambda: not self._pins[name] or self._stopped or name in self._failing)
            if self._pins[name]:
                raise UsageError(f"array {name!r}: the store was closed while a change waited for a snapshot of it")
        except BaseException:
            self._changing.discard(name)
            raise
        finally:
            self._failing.discard(name)

    def views(self, name: str, span: ChunkSpan, buffer: Bytes, mode: Mode) -> Iterator[View]:
        local, memory = self._shards[name], self._memory[name]
        return (memory[slice(*local.chunk_range(chunk))] for chunk in span.chunks)

    def view(self, name: str, first: int, stop: int) -> View:
        """Return one view of the local flat elements `[first, stop)`."""
        memory = self._memory[name]
        return memory if first == 0 and stop == self._shards[name].valid_numel else memory[first:stop]

    def end(self, name: str, ok: bool) -> None:
        """End a pass. Memory is changed in place, so the changes of a failed pass remain."""
        with self._pin_released:
            self._changing.discard(name)

    def pin(self, name: str) -> MemoryPin:
        with self._pin_released:
            if name in self._changing and self._pins[name] == 0:
                raise busy_error(name)
            self._pins[name] += 1
            return MemoryPin(self, self._shards[name], self._memory[name], self._versions[name])

    def unpin(self, name: str) -> None:
        """Drop one pin of the shard."""
        with self._pin_released:
            self._pins[name] -= 1
            self._pin_released.notify_all()

    def fail_waiting(self, names: Iterable[str]) -> None:
        """Fail the changes of these shards that are currently waiting for a pin to be released."""
        with self._pin_released:
            self._failing = {name for name in self._changing.intersection(names) if self._pins[name]}
            self._pin_released.notify_all()

    def stop_waiting(self) -> None:
        """Fail all changes that wait for the release of a pin, now or later: its holder may itself be waiting for `close`."""
        with self._pin_released:
            self._stopped = True
            self._pin_released.notify_all()

    def close(self) -> None:
        self._memory.clear()


class HostTier(MemoryTier):
    """Shards in host memory, allocated by `make` and counted against `budget`."""

    name = "host"
    owns_memory = True

    def __init__(self, budget: Budget | None = None, make: Callable[[int], Bytes] = make_slab) -> None:
        super().__init__()
        self._budget = budget or Budget()
        self._allocate_slab = make
        self._slab = make_slab(0)
        self._slab_used = 0
        self._unused_bytes: int | None = None
        """Bytes of slabs that future shards will take; None if unknown."""
        self._lock = threading.Lock()

    def expect_shared_bytes(self, nbytes: int) -> None:
        """Set the total `shared_bytes` of all small shards, existing ones included, so that the last slab is no larger than
        needed."""
        existing_bytes = sum(shared_bytes(local.nbytes) for local in self._shards.values())
        self._unused_bytes = max(0, nbytes - existing_bytes)

    def _allocate(self, local: LocalShard) -> View:
        nbytes, shared = round_up(local.nbytes, _ALIGN_BYTES), shared_bytes(local.nbytes)
        with self._lock:
            advice = ', or keep the data on disk (`tier="disk"`; in a config `offload_optimizer.device: nvme`)'
            self._budget.require(nbytes, f"array {local.spec.name.partition(chr(0))[0]!r}", advice)  # see `relocate`
            self._budget.take(nbytes)
            data = self._share(shared) if shared else None
        if data is None:  # without the lock, so that other threads can allocate concurrently
            data = self._allocate_slab(nbytes)
        return data[: local.nbytes].view(numpy_dtype(local.spec.dtype))

    def _share(self, nbytes: int) -> Bytes:
        if nbytes > self._slab.size - self._slab_used:
            slab_bytes = _SLAB_BYTES if self._unused_bytes is None else self._unused_bytes or HUGE_PAGE_BYTES
            self._slab, self._slab_used = self._allocate_slab(min(max(slab_bytes, nbytes), _SLAB_BYTES)), 0
        start, self._slab_used = self._slab_used, self._slab_used + nbytes
        if self._unused_bytes is not None:
            self._unused_bytes = max(0, self._unused_bytes - nbytes)
        return self._slab[start : self._slab_used]

    def remove(self, name: str) -> None:
        """Remove the shard. The memory of a small shard is freed with its slab."""
        nbytes = self._shards[name].nbytes
        super().remove(name)
        self._budget.release(round_up(nbytes, _ALIGN_BYTES))
        with self._lock:
            if not self._shards:
                self._slab, self._slab_used = make_slab(0), 0

    def close(self) -> None:
        super().close()
        self._slab = make_slab(0)


class DeviceTier(MemoryTier):
    """Shards as 1-D torch tensors on `device`."""

    name = "device"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self._device = device
        if not device.startswith("cpu"):
            self.tile_numel = DEVICE_TILE_NUMEL

    def _allocate(self, local: LocalShard) -> View:
        import torch

        return torch.zeros(local.valid_numel, dtype=getattr(torch, local.spec.dtype), device=self._device)

    def change_memory(self, name: str, memory: torch.Tensor | None) -> None:
        """Move a shard to other memory, which already holds its values, or leave it without memory."""
        with self._pin_released:
            self._require_idle(name)
            self._memory[name] = None if memory is None else self._adopt(self._shards[name], memory)

    def _adopt(self, local: LocalShard, memory: torch.Tensor) -> View:
        import torch

        dtype = getattr(torch, local.spec.dtype)
        if memory.shape != (local.valid_numel,) or memory.dtype != dtype or not memory.is_contiguous():
            raise UsageError(
                f"array {local.spec.name!r}: expected contiguous memory of {local.valid_numel} elements of {dtype}, "
                f"got shape {tuple(memory.shape)} of {memory.dtype}"
            )
        return memory.detach()


class MemoryPin:
    """A pinned shard in memory; changes of the shard wait for `release`."""

    has_file = False

    def __init__(self, tier: MemoryTier, local: LocalShard, memory: View, version: int) -> None:
        self.local = local
        self.version: int | None = version
        self._memory = memory
        self._tier: MemoryTier | None = tier
        self._owner = tier

    @property
    def tier(self) -> str:
        """The tier's name."""
        return self._owner.name

    def fill(self, first: int, stop: int, out: Bytes) -> None:
        """Copy global flat elements `[first, stop)`, all within this shard, into `out`, of any shape."""
        low = first - self.local.base
        copy_out(self._memory[low : low + stop - first], out)

    def copy_into(self, out: Bytes, grid: Grid, shard: int) -> None:
        """Copy the elements of `shard` of `grid`, which must lie within this shard, into `out`."""
        self._require_within(grid, shard)
        first = shard * grid.shard_numel
        self.fill(first, first + grid.shard_valid_numel(shard), out)

    def publish(self, res: IoResources, path: str | Path, grid: Grid, shard: int, priority: Priority) -> ShardSummary:
        """Write the shard file from memory, on any grid whose shard is within this one; see `PinnedShard.publish`."""
        self._require_within(grid, shard)
        return write_shard(res, path, self.local.spec, grid, shard, self._runs(), priority)

    def checksums(self, res: IoResources, grid: Grid, shard: int) -> tuple[int, ...]:
        """Compute the checksums from the memory, so that changes made outside of passes are noticed."""
        self._require_within(grid, shard)
        return checksum_shard(res, self.local.spec, grid, shard, self._runs())

    def _runs(self) -> FillRuns:
        memory = self._memory.view(np.uint8) if self._owner.owns_memory and self._tier is not None else None
        return FillRuns(self.fill, memory, self.local.base)

    def _require_within(self, grid: Grid, shard: int) -> None:
        first = shard * grid.shard_numel
        low, high = self.local.base, self.local.base + self.local.valid_numel
        valid = grid.shard_valid_numel(shard)
        same_rows = (grid.rows, grid.row_numel) == (self.local.grid.rows, self.local.grid.row_numel)
        if not same_rows or (valid > 0 and not low <= first <= first + valid <= high):
            raise UsageError(
                f"array {self.local.spec.name!r}: elements [{first}, {first + valid}) of shard {shard} are not in the "
                f"pinned shard [{low}, {high})"
            )

    def release(self) -> None:
        tier, self._tier = self._tier, None
        if tier is not None:
            tier.unpin(self.local.spec.name)
