"""The promises of every tier, as a pytest class: subclass it in a test module, give it the tier, and add further tests.

class TestHost(TierContract):
    pins_in_place = True

    def make_tier(self, res, folder):
        return HostTier()
"""

# ruff: noqa: S101 - tests, whose names say it

from __future__ import annotations

import errno
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..errors import StorageError, UsageError
from ..format.arrays import Array, ArraySpec, LocalShard, make_grid, numpy_dtype
from ..format.shardfile import layout_of, slot_views
from ..io.memory import as_numpy
from ..io.queue import Priority
from ..io.shards import IoResources, ShardReader, ShardSummary, open_resources
from ..store import PinnedShard
from ..store.stream import Pass, Stream, StreamCounters
from ..store.tiers import Mode, Snapshot, Tier, Tile
from .faults import Fault, FaultyFiles
from .oracle import random_values, read_with_zarr, same_bits, shard_name, write_zarr_json

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
SHAPES: dict[str, tuple[tuple[int, ...], int, int]] = {
    # name: shape, world size, shard
    "many-chunks": ((700, 256), 1, 0),
    "one-chunk": ((10, 10), 1, 0),
    "scalar": ((), 1, 0),
    "first-of-three": ((1000, 130), 3, 0),
    "short-last-of-three": ((1000, 130), 3, 2),
    "one-row": ((2, 4096), 4, 1),
    "row-fractions": ((3, 400_000), 2, 1),
}
FILE_NAME = "published"


class BoomError(Exception):
    """The error of a pass's consumer in these tests."""


def as_array(view: Any) -> Array:
    """Return a view of any tier as a numpy array; of memory on the CPU, sharing it."""
    return view if isinstance(view, np.ndarray) else as_numpy(view.cpu())


@dataclass(kw_only=True)
class TierHarness:
    """A tier with its resources, driven by real passes."""

    tier: Tier
    res: IoResources
    files: FaultyFiles
    folder: Path
    """Folder of published files; the tier has another one."""
    shards: dict[str, LocalShard] = field(default_factory=dict)

    def create(
        self, shape: tuple[int, ...] = (700, 256), dtype: str = "float32", *, world_size: int = 1, shard: int = 0
    ) -> LocalShard:
        """Register a new array; its name counts up: `model/a0`, `model/a1`, ..."""
        spec = ArraySpec(name=f"model/a{len(self.shards)}", shape=shape, dtype=dtype)
        local = LocalShard(spec, make_grid(spec.stored_shape, world_size), shard)
        self.tier.create(local)
        self.shards[spec.name] = local
        return local

    def tiles(self, names: Sequence[str], mode: Mode) -> Iterator[Tile]:
        """Return a pass over a group of arrays."""
        tiers = dict.fromkeys(self.shards, self.tier)
        what = Pass(groups=[names], mode=mode, pool=self.res.pool)
        stream = Stream(what, tiers=tiers, shards=self.shards, counters=StreamCounters())
        return stream.tiles()

    def visit(self, name: str, mode: Mode) -> Iterator[tuple[slice, Array]]:
        """Yield (local elements, view) of each tile, and put changes back if memory is not shared."""
        for tile in self.tiles([name], mode):
            view = tile.views[0]
            array = as_array(view)
            yield slice(tile.first, tile.stop), array
            if mode is not Mode.READ and not isinstance(view, np.ndarray) and view.device.type != "cpu":
                import torch

                view.view(torch.uint8).copy_(torch.from_numpy(array.view(np.uint8)))

    def fill(self, local: LocalShard, values: Array) -> None:
        """Set all elements."""
        for part, view in self.visit(local.spec.name, Mode.FILL):
            view[:] = values[part]

    def update(self, local: LocalShard, values: Array) -> Array:
        """Set all elements in an updating pass; return their former values."""
        before = np.zeros_like(values)
        for part, view in self.visit(local.spec.name, Mode.UPDATE):
            before[part] = view
            view[:] = values[part]
        return before

    def read(self, local: LocalShard) -> Array:
        """Return all elements."""
        out = np.zeros(local.valid_numel, numpy_dtype(local.spec.dtype))
        covered = 0
        for part, view in self.visit(local.spec.name, Mode.READ):
            out[part] = view
            covered += view.size
        if covered != local.valid_numel:
            raise AssertionError(f"a pass covered {covered} of {local.valid_numel} elements")
        return out

    def values(self, local: LocalShard, seed: int = 1) -> Array:
        """Return random values for the whole shard."""
        return random_values(local.spec.dtype, local.valid_numel, seed)

    def expect_all_buffers_back(self) -> None:
        """Wait until every buffer is released, which an I/O thread may do just after it reported its end."""
        with self.res.pool.acquire(self.res.pool.nbytes):
            pass

    def publish(self, pin: PinnedShard, name: str = FILE_NAME) -> ShardSummary:
        """Publish the pinned shard with its own layout."""
        local = pin.local
        return pin.publish(self.res, self.folder / name, local.grid, local.shard, Priority.CHECKPOINT)

    def read_published(self, local: LocalShard, name: str = FILE_NAME) -> Array:
        """Return the values of a published file, every chunk verified."""
        reader = ShardReader(self.res, self.folder / name, local.spec, local.grid, local.shard)
        reader.verify()
        out = np.zeros(local.valid_numel, numpy_dtype(local.spec.dtype))
        reader.read(local.base, local.base + local.valid_numel, out.view(np.uint8))
        return out


class TierContract:
    """Tests of the contract; see the head of this file."""

    pins_in_place: bool
    """Whether a change waits for a pin (memory), or goes to another place (disk)."""

    @abstractmethod
    def make_tier(self, res: IoResources, folder: Path) -> Tier:
        """Return a new tier; `folder` is empty and its own."""

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[TierHarness]:
        """The tier under test, in a pool of a few chunks only."""
        files = FaultyFiles()
        for name in ("tier", "published"):
            (tmp_path / name).mkdir()
        with open_resources(pool_bytes=2 << 20, num_threads=2, block_bytes=256 * 1024, files=files) as res:
            tier = self.make_tier(res, tmp_path / "tier")
            bench = TierHarness(tier=tier, res=res, files=files, folder=tmp_path / "published")
            yield bench
            files.heal()
            tier.close()

    @pytest.mark.parametrize(("shape", "world_size", "shard"), SHAPES.values(), ids=SHAPES)
    def test_a_new_shard_is_all_zeros_and_keeps_what_passes_write(
        self, bench: TierHarness, shape: tuple[int, ...], world_size: int, shard: int
    ) -> None:
        local = bench.create(shape, world_size=world_size, shard=shard)
        assert local.valid_numel > 0
        assert not bench.read(local).any()
        first, second = bench.values(local, 1), bench.values(local, 2)
        bench.fill(local, first)
        assert same_bits(bench.read(local), first)
        assert same_bits(bench.update(local, second), first)
        assert same_bits(bench.read(local), second)
        bench.expect_all_buffers_back()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_data_type(self, bench: TierHarness, dtype: str) -> None:
        local = bench.create((515, 67), dtype, world_size=2, shard=1)
        assert not bench.read(local).any()
        bench.fill(local, bench.values(local))
        assert same_bits(bench.read(local), bench.values(local))
        bench.publish(bench.tier.pin(local.spec.name))
        assert same_bits(bench.read_published(local), bench.values(local))

    def test_views_leave_padding_out(self, bench: TierHarness) -> None:
        local = bench.create((1000, 130), world_size=3, shard=2)
        assert local.valid_numel < local.grid.shard_numel
        stop = 0
        for tile in bench.tiles([local.spec.name], Mode.READ):
            assert tile.first == stop
            assert as_array(tile.views[0]).shape == (tile.stop - tile.first,)
            stop = tile.stop
        assert stop == local.valid_numel

    def test_a_group_is_visited_together(self, bench: TierHarness) -> None:
        shards = [bench.create(dtype=dtype) for dtype in ("float32", "bfloat16", "int8")]
        for local in shards:
            bench.fill(local, bench.values(local, 3))
        seen = 0
        for tile in bench.tiles([local.spec.name for local in shards], Mode.READ):
            for local, view in zip(shards, tile.views, strict=True):
                found = as_array(view)
                assert same_bits(found, bench.values(local, 3)[tile.first : tile.stop])
            seen += tile.stop - tile.first
        assert seen == shards[0].valid_numel

    def test_a_rank_without_rows_has_nothing_to_visit(self, bench: TierHarness) -> None:
        local = bench.create((5, 8), world_size=4, shard=3)
        assert local.valid_numel == 0
        assert list(bench.tiles([local.spec.name], Mode.UPDATE)) == []
        assert bench.read(local).size == 0
        with_pin = bench.tier.pin(local.spec.name)
        assert bench.publish(with_pin).crcs == ()
        assert bench.read_published(local).size == 0
        with_pin.release()

    def test_a_pin_publishes_what_the_shard_held(self, bench: TierHarness) -> None:
        local = bench.create((1000, 130), "bfloat16", world_size=1)
        bench.fill(local, bench.values(local))
        pin = bench.tier.pin(local.spec.name)
        assert (pin.local, pin.tier) == (local, bench.tier.name)
        assert bench.tier.is_pinned_in_place(local.spec.name) is self.pins_in_place
        write_zarr_json(bench.folder / "a", local.spec, local.grid)
        summary = bench.publish(pin, f"a/{shard_name(local.spec, 0)}")
        expected = bench.values(local).reshape(local.spec.shape)
        assert same_bits(read_with_zarr(bench.folder / "a"), expected)
        reader = ShardReader(bench.res, bench.folder / "a" / "c.0.0", local.spec, local.grid, 0)
        assert list(summary.crcs) == reader.verify()
        assert summary.file_bytes == (bench.folder / "a" / "c.0.0").stat().st_size
        assert (summary.array, summary.shard) == (local.spec.name, 0)
        pin.release()
        assert not bench.tier.is_pinned_in_place(local.spec.name)
        bench.expect_all_buffers_back()

    def test_a_shard_that_was_never_written_is_zeros(self, bench: TierHarness) -> None:
        local = bench.create()
        with closing(Snapshot({local.spec.name: bench.tier.pin(local.spec.name)})) as snapshot:
            bench.publish(snapshot.pins[local.spec.name])
        assert not bench.read_published(local).any()
        assert not bench.update(local, bench.values(local)).any()
        assert same_bits(bench.read(local), bench.values(local))

    def test_padding_is_zeros_in_the_file(self, bench: TierHarness) -> None:
        local = bench.create((1000, 130), "int8", world_size=3, shard=2)
        bench.fill(local, np.full(local.valid_numel, -1, np.int8))
        bench.publish(bench.tier.pin(local.spec.name))
        layout = layout_of(local.grid, local.shard, "int8")
        data = np.fromfile(bench.folder / FILE_NAME, np.uint8)[layout.data_offset :]
        payload = slot_views(data, layout)[:, : layout.payload_bytes].reshape(-1)
        assert (payload[: local.valid_numel] == 255).all()
        assert not payload[local.valid_numel :].any()

    def test_what_was_published_never_changes(self, bench: TierHarness) -> None:
        local = bench.create()
        bench.fill(local, bench.values(local, 1))
        for seed in (1, 2, 3):
            pin = bench.tier.pin(local.spec.name)
            bench.publish(pin, f"version-{seed}")
            pin.release()
            assert same_bits(bench.update(local, bench.values(local, seed + 1)), bench.values(local, seed))
        for seed in (1, 2, 3):
            assert same_bits(bench.read_published(local, f"version-{seed}"), bench.values(local, seed))
        assert same_bits(bench.read(local), bench.values(local, 4))

    def test_a_pin_is_released_once_however_often(self, bench: TierHarness) -> None:
        local = bench.create()
        bench.fill(local, bench.values(local))
        one, two = bench.tier.pin(local.spec.name), bench.tier.pin(local.spec.name)
        one.release()
        one.release()
        assert bench.tier.is_pinned_in_place(local.spec.name) is self.pins_in_place
        assert same_bits(bench.read(local), bench.values(local))
        bench.publish(two)
        two.release()
        two.release()
        bench.update(local, bench.values(local, 2))
        assert same_bits(bench.read_published(local), bench.values(local))

    def test_a_file_that_exists_is_not_written_over(self, bench: TierHarness) -> None:
        local = bench.create()
        bench.fill(local, bench.values(local))
        (bench.folder / FILE_NAME).write_bytes(b"precious")
        pin = bench.tier.pin(local.spec.name)
        with pytest.raises(StorageError, match="EEXIST"):
            bench.publish(pin)
        assert (bench.folder / FILE_NAME).read_bytes() == b"precious"
        bench.publish(pin, "other")
        pin.release()
        assert same_bits(bench.read_published(local, "other"), bench.values(local))

    def test_a_publish_that_fails_can_be_repeated(self, bench: TierHarness) -> None:
        local = bench.create()
        bench.fill(local, bench.values(local))
        pin = bench.tier.pin(local.spec.name)
        for kind in ("open", "fsync"):
            bench.files.inject(Fault(kind=kind, times=None, error_number=errno.EIO))
            with pytest.raises(StorageError, match="EIO"):
                bench.publish(pin, kind)
            bench.files.heal()
        bench.publish(pin)
        pin.release()
        assert same_bits(bench.read_published(local), bench.values(local))
        assert same_bits(bench.update(local, bench.values(local, 2)), bench.values(local))
        assert same_bits(bench.read_published(local), bench.values(local))
        bench.expect_all_buffers_back()

    def test_nobody_sees_a_shard_half_changed_in_place(self, bench: TierHarness) -> None:
        local = bench.create()
        name = local.spec.name
        bench.fill(local, bench.values(local))
        with closing(bench.tiles([name], Mode.UPDATE)) as tiles:  # type: ignore[type-var]
            next(tiles)
            with pytest.raises(UsageError, match="is being changed by a pass"):
                bench.tier.pin(name)
            for mode in Mode:
                with pytest.raises(UsageError, match="is being changed by a pass"):
                    next(bench.tiles([name], mode))
            for _ in tiles:
                pass
        assert same_bits(bench.read(local), bench.values(local))
        bench.tier.pin(name).release()

    def test_a_reading_pass_ends_without_ending_another(self, bench: TierHarness) -> None:
        one, two = bench.create(), bench.create()
        bench.fill(one, bench.values(one, 1))
        for part, view in bench.visit(one.spec.name, Mode.UPDATE):
            view[:] = bench.values(one, 2)[part]
            if part.start == 0:
                assert not bench.read(two).any()
        assert same_bits(bench.read(one), bench.values(one, 2))

    def test_a_pass_that_was_never_begun_leaves_nothing(self, bench: TierHarness) -> None:
        local = bench.create()
        bench.tiles([local.spec.name], Mode.UPDATE)
        bench.fill(local, bench.values(local))
        assert same_bits(bench.read(local), bench.values(local))

    def test_after_a_pass_that_failed_all_can_be_set_anew(self, bench: TierHarness) -> None:
        local = bench.create()
        bench.fill(local, bench.values(local))
        with pytest.raises(BoomError):
            self._fail_half_way(bench, local)
        bench.fill(local, bench.values(local, 3))
        assert same_bits(bench.read(local), bench.values(local, 3))
        bench.expect_all_buffers_back()

    def _fail_half_way(self, bench: TierHarness, local: LocalShard) -> None:
        with closing(bench.visit(local.spec.name, Mode.UPDATE)) as parts:  # type: ignore[type-var]
            for part, view in parts:
                view[:] = bench.values(local, 2)[part]
                if part.stop > local.valid_numel // 2:
                    raise BoomError
