"""The tiers: the contract that all keep, and what each adds to it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch

from zstore.errors import BudgetError, UsageError
from zstore.format.arrays import ArraySpec
from zstore.format.partition import make_grid
from zstore.io.buffers import Budget
from zstore.io.queue import Priority
from zstore.io.shards import IoResources
from zstore.store.tiers import DeviceTier, DiskTier, Drives, HostTier, LocalShard, Mode, Tier
from zstore.store.tiers.views import copy_out
from zstore.testing.contract import TierBench, TierContract
from zstore.testing.oracle import read_with_tensorstore, read_with_zarr, same_bits, shard_name, write_zarr_json


def in_thread(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


class MemoryContract(TierContract):
    """What host and device share."""

    pins_in_place = True

    def test_an_updater_waits_until_every_pin_is_released(self, bench: TierBench) -> None:
        local = bench.create()
        name = local.spec.name
        bench.fill(local, bench.values(local, 1))
        pins = [bench.tier.pin(name), bench.tier.pin(name)]
        waiting, done = threading.Event(), threading.Event()

        def update() -> None:
            waiting.set()
            bench.update(local, bench.values(local, 2))
            done.set()

        updater = in_thread(update)
        assert waiting.wait(200)
        bench.publish(pins[0], "one")
        pins[0].release()
        assert same_bits(bench.read(local), bench.values(local, 1))
        bench.publish(pins[1], "two")
        assert not done.is_set()
        pins[1].release()
        assert done.wait(200)
        updater.join(200)
        for name in ("one", "two"):
            assert same_bits(bench.read_published(local, name), bench.values(local, 1))
        assert same_bits(bench.read(local), bench.values(local, 2))

    @pytest.mark.timeout(60)
    def test_an_updater_that_waits_for_a_pin_holds_no_buffer_that_its_release_needs(
        self, bench: TierBench, tmp_path: Path
    ) -> None:
        """A pass over a group of both kinds of tier, in a pool that it could fill alone."""
        memory = bench.create()
        (tmp_path / "disk").mkdir()
        disk = DiskTier(Drives((tmp_path / "disk",)), bench.res)
        on_disk = LocalShard(ArraySpec(name="model/disk", shape=(700, 256), dtype="float32"), memory.grid, 0)
        disk.create(on_disk)
        pin = bench.tier.pin(memory.spec.name)
        from zstore.store.stream import Pass, Stream, StreamCounters  # the pass itself, for two tiers at once

        stream = Stream(
            Pass(groups=[[on_disk.spec.name, memory.spec.name]], mode=Mode.UPDATE, pool=bench.res.pool),
            tiers={on_disk.spec.name: disk, memory.spec.name: bench.tier},
            shards={on_disk.spec.name: on_disk, memory.spec.name: memory},
            counters=StreamCounters(),
        )
        updater = in_thread(lambda: [None for _ in stream.tiles()] and None)
        with bench.res.pool.acquire(bench.res.pool.nbytes):
            pass  # the whole pool can be had although the updater waits
        bench.publish(pin)
        pin.release()
        updater.join(200)
        assert not updater.is_alive()
        disk.close()

    def test_a_pin_is_published_on_any_grid_whose_shard_lies_inside(self, bench: TierBench) -> None:
        local = bench.create((1000, 130))
        bench.fill(local, bench.values(local))
        pin = bench.tier.pin(local.spec.name)
        for world_size in (2, 3, 7):
            grid = make_grid(local.spec.stored_shape, world_size)
            folder = bench.folder / str(world_size)
            write_zarr_json(folder, local.spec, grid)
            for shard in range(grid.num_shards):
                pin.publish(bench.res, folder / shard_name(local.spec, shard), grid, shard, Priority.CHECKPOINT)
            expected = bench.values(local).reshape(local.spec.shape)
            assert same_bits(read_with_zarr(folder), expected)
            assert same_bits(read_with_tensorstore(folder), expected)
        pin.release()

    def test_a_shard_that_is_not_in_the_pinned_one_is_refused(self, bench: TierBench) -> None:
        local = bench.create((1000, 130), world_size=2, shard=1)
        pin = bench.tier.pin(local.spec.name)
        quarter = make_grid(local.spec.stored_shape, 4)
        for grid, shard in ((quarter, 1), (make_grid(local.spec.stored_shape, 1), 0), (make_grid((1000, 129), 2), 1)):
            with pytest.raises(UsageError, match="are not in the pinned shard"):
                pin.publish(bench.res, bench.folder / "x", grid, shard, Priority.CHECKPOINT)
        pin.publish(bench.res, bench.folder / "x", quarter, 3, Priority.CHECKPOINT)

    def test_no_bytes_go_to_disk(self, bench: TierBench) -> None:
        local = bench.create()
        bench.fill(local, bench.values(local))
        bench.update(local, bench.values(local, 2))
        assert bench.files.paths == []


class TestHostTier(MemoryContract):
    def make_tier(self, res: IoResources, folder: Path) -> Tier:
        return HostTier()

    def test_memory_of_the_callers_is_not_adopted(self, bench: TierBench) -> None:
        spec = ArraySpec(name="model/x", shape=(4,), dtype="float32")
        with pytest.raises(UsageError, match="only the device tier"):
            bench.tier.create(LocalShard(spec, make_grid((4,), 1), 0), torch.zeros(4))


def test_the_host_tier_keeps_to_its_budget() -> None:
    budget = Budget(10_000)
    tier = HostTier(budget)

    def add(name: str, numel: int) -> None:
        spec = ArraySpec(name=f"model/{name}", shape=(numel,), dtype="float32")
        tier.create(LocalShard(spec, make_grid((numel,), 1), 0))

    add("a", 2000)
    assert budget.used_bytes == 8000
    with pytest.raises(BudgetError, match=r"'model/b' needs 4032 bytes of host memory, but 8000 of the 10000 bytes"):
        add("b", 1000)
    assert budget.used_bytes == 8000
    add("c", 496)
    assert budget.used_bytes == 8000 + 1984


class TestDeviceTier(MemoryContract):
    def make_tier(self, res: IoResources, folder: Path) -> Tier:
        return DeviceTier("cpu")

    def test_adopted_memory_stays_the_caller_s(self, bench: TierBench) -> None:
        memory = torch.arange(40.0, requires_grad=True)
        spec = ArraySpec(name="model/x", shape=(10, 4), dtype="float32")
        local = LocalShard(spec, make_grid((10, 4), 1), 0)
        bench.tier.create(local, memory)
        bench.shards[spec.name] = local
        assert same_bits(bench.read(local), np.arange(40, dtype=np.float32))
        bench.fill(local, np.full(40, 7, np.float32))
        assert (memory == 7).all()
        with torch.no_grad():
            memory[3] = 1
        bench.publish(bench.tier.pin(spec.name))
        assert bench.read_published(local)[3] == 1

    @pytest.mark.parametrize(
        "memory",
        [torch.zeros(39), torch.zeros(40, dtype=torch.float64), torch.zeros(10, 4), torch.zeros(80)[::2]],
        ids=["size", "dtype", "shape", "strides"],
    )
    def test_memory_that_does_not_fit_is_refused(self, bench: TierBench, memory: torch.Tensor) -> None:
        spec = ArraySpec(name="model/x", shape=(10, 4), dtype="float32")
        with pytest.raises(UsageError, match=r"expected contiguous memory of 40 elements of torch\.float32"):
            bench.tier.create(LocalShard(spec, make_grid((10, 4), 1), 0), memory)


class Elsewhere(torch.Tensor):
    """Values on a device of their own: copies alone bring them to the host, and those that take memory are counted."""

    num_made = 0

    def __new__(cls, values: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device="meta")  # type: ignore[attr-defined]
        made.values_there = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = [arg.values_there if isinstance(arg, Elsewhere) else arg for arg in args]
        if func is torch.ops.aten._to_copy.default:
            cls.num_made += 1
            return inside[0].clone()
        result = func(*inside)
        return args[0] if func is torch.ops.aten.copy_.default else cls(result)


def test_what_is_on_a_device_is_copied_straight_to_where_it_is_wanted() -> None:
    out = np.zeros(30, np.float32)
    copy_out(Elsewhere(torch.arange(100.0))[20:50], out.view(np.uint8))
    assert out.tolist() == list(range(20, 50))
    assert Elsewhere.num_made == 0


if torch.cuda.is_available():

    @pytest.mark.cuda
    class TestDeviceTierOnCuda(TierContract):
        pins_in_place = True

        def make_tier(self, res: IoResources, folder: Path) -> Tier:
            return DeviceTier("cuda")
