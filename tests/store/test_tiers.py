"""The tiers: the contract that all keep, and what each adds to it."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from zstore.errors import BudgetError, UsageError
from zstore.format.arrays import ArraySpec
from zstore.format.partition import make_grid
from zstore.io.buffers import Budget
from zstore.io.queue import Priority
from zstore.io.shards import IoResources
from zstore.store.tiers import DeviceTier, HostTier, LocalShard, Tier
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


class TestHostTier(MemoryContract):
    def make_tier(self, res: IoResources, folder: Path) -> Tier:
        return HostTier()


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


if torch.cuda.is_available():

    @pytest.mark.cuda
    class TestDeviceTierOnCuda(TierContract):
        pins_in_place = True

        def make_tier(self, res: IoResources, folder: Path) -> Tier:
            return DeviceTier("cuda")
