"""The tiers: the contract that all of them satisfy, and what each adds to it."""

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from crc32c import crc32c

from zstore.errors import CorruptionError, UsageError
from zstore.format import ArraySpec, layout_of, make_grid
from zstore.io import IoResources, Priority
from zstore.store import LocalShard
from zstore.store.tiers import DeviceTier, DiskTier, Drives, HostTier, Mode, Tier
from zstore.testing.contract import TierContract, TierHarness
from zstore.testing.faults import Fault
from zstore.testing.oracle import read_with_tensorstore, read_with_zarr, same_bits, shard_name, write_zarr_json


class MemoryContract(TierContract):
    pins_in_place = True

    def test_an_updater_waits_until_every_pin_is_released(self, bench: TierHarness) -> None:
        local = bench.create()
        name = local.spec.name
        bench.fill(local, bench.values(local, 1))
        pins = [bench.tier.pin(name), bench.tier.pin(name)]
        waiting, done = threading.Event(), threading.Event()

        def update() -> None:
            waiting.set()
            bench.update(local, bench.values(local, 2))
            done.set()

        updater = threading.Thread(target=update, daemon=True)
        updater.start()
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

    def test_a_pin_can_be_published_on_any_grid_whose_shards_lie_within_it(self, bench: TierHarness) -> None:
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

    def test_a_shard_that_is_not_in_the_pinned_one_is_refused(self, bench: TierHarness) -> None:
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


class TestDeviceTier(MemoryContract):
    def make_tier(self, res: IoResources, folder: Path) -> Tier:
        return DeviceTier("cpu")

    def test_adopted_memory_still_belongs_to_the_caller(self, bench: TierHarness) -> None:
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
    def test_memory_that_does_not_fit_is_refused(self, bench: TierHarness, memory: torch.Tensor) -> None:
        spec = ArraySpec(name="model/x", shape=(10, 4), dtype="float32")
        with pytest.raises(UsageError, match=r"expected contiguous memory of 40 elements of torch\.float32"):
            bench.tier.create(LocalShard(spec, make_grid((10, 4), 1), 0), memory)


if torch.cuda.is_available():

    @pytest.mark.cuda
    class TestDeviceTierOnCuda(TierContract):
        pins_in_place = True

        def make_tier(self, res: IoResources, folder: Path) -> Tier:
            return DeviceTier("cuda")


class TestDiskTier(TierContract):
    pins_in_place = False

    def make_tier(self, res: IoResources, folder: Path) -> Tier:
        return DiskTier(Drives((folder,)), res)

    @staticmethod
    def shard_files(bench: TierHarness) -> list[str]:
        return sorted(p.name for p in (bench.folder.parent / "tier").iterdir())

    def written(self, bench: TierHarness) -> list[Path]:
        paths = [Path(path) for kind, path in bench.files.paths if kind == "write"]
        bench.files.paths.clear()
        return paths

    def filled(self, bench: TierHarness, seed: int = 1) -> LocalShard:
        local = bench.create((3000, 256))
        bench.fill(local, bench.values(local, seed))
        return local

    def test_publishing_creates_a_link_and_writes_no_bytes(self, bench: TierHarness) -> None:
        local = self.filled(bench)
        pin = bench.tier.pin(local.spec.name)
        self.written(bench)
        summary = bench.publish(pin)
        assert summary.linked
        kinds = [kind for kind, _ in bench.files.paths]
        assert kinds.index("fsync") < kinds.index("link")
        assert self.written(bench) == []
        source = bench.folder.parent / "tier" / self.shard_files(bench)[0]
        published = bench.folder / "published"
        assert published.stat().st_ino == source.stat().st_ino
        assert published.stat().st_nlink == 2

    def test_an_unpinned_shard_is_changed_in_place(self, bench: TierHarness) -> None:
        local = self.filled(bench)
        (before,) = self.shard_files(bench)
        self.written(bench)
        bench.update(local, bench.values(local, 2))
        assert {path.name for path in self.written(bench)} == {before}
        assert self.shard_files(bench) == [before]

    def test_a_superseded_published_file_is_unlinked_from_the_tier(self, bench: TierHarness) -> None:
        local = self.filled(bench)
        (before,) = self.shard_files(bench)
        pin = bench.tier.pin(local.spec.name)
        bench.publish(pin)
        pin.release()
        bench.update(local, bench.values(local, 2))
        assert len(self.shard_files(bench)) == 1
        assert before not in self.shard_files(bench)
        assert (bench.folder / "published").stat().st_nlink == 1

    def test_a_superseded_unpublished_file_is_reused_for_the_next_version(self, bench: TierHarness) -> None:
        local = self.filled(bench)
        pin = bench.tier.pin(local.spec.name)
        bench.update(local, bench.values(local, 2))
        pin.release()
        assert len(self.shard_files(bench)) == 2
        bench.files.paths.clear()
        pin = bench.tier.pin(local.spec.name)
        bench.update(local, bench.values(local, 3))
        pin.release()
        assert [kind for kind, _ in bench.files.paths if kind in ("allocate", "rename")] == ["rename"]
        assert len(self.shard_files(bench)) == 2
        assert same_bits(bench.read(local), bench.values(local, 3))

    @pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
    def test_where_links_are_unavailable_the_pinned_version_is_copied(self, bench: TierHarness, number: int) -> None:
        local = self.filled(bench)
        bench.files.inject(Fault(kind="link", times=None, error_number=number))
        pin = bench.tier.pin(local.spec.name)
        bench.update(local, bench.values(local, 2))
        summary = bench.publish(pin)
        pin.release()
        assert not summary.linked
        assert (bench.folder / "published").stat().st_nlink == 1
        assert same_bits(bench.read_published(local), bench.values(local, 1))
        layout = layout_of(local.grid, local.shard, local.spec.dtype)
        assert len(summary.crcs) == layout.num_present

    def test_a_published_file_may_be_read_only_and_published_again(self, bench: TierHarness) -> None:
        local = self.filled(bench)
        pin = bench.tier.pin(local.spec.name)
        bench.publish(pin, "one")
        (bench.folder / "one").chmod(0o444)
        # root can write anywhere, so simulate the error that an ordinary user would get.
        original = bench.files._open

        def denied(path: str, flags: int) -> int:
            if flags & (os.O_RDWR | os.O_WRONLY):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            return original(path, flags)

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(bench.files, "_open", denied)
            assert bench.publish(pin, "two").linked
        pin.release()
        assert (bench.folder / "one").stat().st_nlink == 3

    def test_another_layout_is_refused(self, bench: TierHarness) -> None:
        local = self.filled(bench)
        pin = bench.tier.pin(local.spec.name)
        for grid, shard in ((make_grid(local.spec.stored_shape, 2), 0), (local.grid, 1)):
            with pytest.raises(UsageError, match="can only be published with its own layout"):
                pin.publish(bench.res, bench.folder / "x", grid, shard, Priority.CHECKPOINT)
        pin.release()

    def test_a_damaged_pinned_file_is_detected_when_copied(self, bench: TierHarness) -> None:
        local = self.filled(bench)
        bench.files.inject(Fault(kind="link", times=None, error_number=errno.EXDEV))
        pin = bench.tier.pin(local.spec.name)
        self.flip(bench, local)
        with pytest.raises(CorruptionError, match="fails its crc32c"):
            bench.publish(pin)
        pin.release()
        bench.expect_all_buffers_back()

    def flip(self, bench: TierHarness, local: LocalShard, chunk: int = 1) -> None:
        (name,) = self.shard_files(bench)
        path = bench.folder.parent / "tier" / name
        layout = layout_of(local.grid, local.shard, local.spec.dtype)
        with path.open("r+b") as file:
            file.seek(layout.slot_offset(chunk) + 11)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 8]))

    def test_a_chunk_is_checked_when_it_is_asked_for_and_sealed_when_the_next_is(self, bench: TierHarness) -> None:
        local = self.filled(bench)
        values = bench.values(local, 1)
        self.flip(bench, local, chunk=2)
        tiles = bench.tiles([local.spec.name], Mode.UPDATE)
        first = next(tiles)
        assert same_bits(first.views[0], values[: first.stop])
        payload = first.views[0]
        stored_crc = np.lib.stride_tricks.as_strided(payload[-1:], (2,), (4,))[1:].view(np.uint32)
        payload[:] = 5
        assert stored_crc[0] != crc32c(payload.tobytes())
        second = next(tiles)
        assert stored_crc[0] == crc32c(payload.tobytes())
        assert same_bits(second.views[0], values[second.first : second.stop])
        with pytest.raises(CorruptionError, match="chunk 2 of"):
            next(tiles)
        bench.expect_all_buffers_back()

    def test_a_lost_write_is_detected(self, bench: TierHarness) -> None:
        local = self.filled(bench)
        bench.files.inject(Fault(kind="write", first=1, lost=True))
        bench.update(local, bench.values(local, 2))
        with pytest.raises(CorruptionError, match="the drive lost a write"):
            bench.read(local)

    @pytest.mark.parametrize("name", ["model/a b/ü.x", "model/" + "long." * 100 + "x", "model/..", "model/a%2Fb"])
    def test_any_array_name_maps_to_a_file(self, bench: TierHarness, name: str) -> None:
        spec = ArraySpec(name=name, shape=(50,), dtype="int8")
        local = LocalShard(spec, make_grid((50,), 1), 0)
        bench.tier.create(local)
        bench.shards[name] = local
        bench.fill(local, bench.values(local))
        assert same_bits(bench.read(local), bench.values(local))
        assert len(self.shard_files(bench)) == 1

    @pytest.mark.timeout(60)
    def test_a_pinned_shard_can_be_changed_while_every_other_buffer_is_taken(self, bench: TierHarness) -> None:
        """The next version's file is created without a buffer from the pool."""
        local = self.filled(bench)
        layout = layout_of(local.grid, local.shard, local.spec.dtype)
        pin = bench.tier.pin(local.spec.name)
        span = bench.res.span_chunks(layout) * layout.slot_bytes
        with bench.res.pool.acquire(bench.res.pool.nbytes - span):
            bench.update(local, bench.values(local, 2))
        pin.release()
        assert same_bits(bench.read(local), bench.values(local, 2))

    def test_reads_of_a_pinned_shard_during_a_change_see_the_previous_version(self, bench: TierHarness) -> None:
        local = self.filled(bench)
        pin = bench.tier.pin(local.spec.name)
        for part, view in bench.visit(local.spec.name, Mode.UPDATE):
            view[:] = bench.values(local, 2)[part]
            if part.stop == local.valid_numel:
                assert same_bits(bench.read(local), bench.values(local, 1))
        pin.release()
        assert same_bits(bench.read(local), bench.values(local, 2))
