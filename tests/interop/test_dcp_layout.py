"""How pieces of tensors become shards: ranks are threads here, and every cut of a mesh of two is tried."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstore.checkpoint.metadata import array_document, parse_array
from zstore.dcp.work import PIECES_FOLDER, RankWork, RankWriter, Wrote, assemble
from zstore.errors import CheckpointError
from zstore.format import ArrayLayout, lay_out
from zstore.format.arrays import ArraySpec
from zstore.format.boxes import Box
from zstore.io.shards import ShardReader, open_resources

Array = npt.NDArray[np.float32]


def cut(shape: tuple[int, ...], counts: Sequence[int]) -> list[Box]:
    """The blocks of a tensor that is cut into so many along each dim, as torch.chunk cuts."""
    ranges = []
    for extent, count in zip(shape, counts, strict=True):
        each = -(-extent // count)
        ranges.append([(min(i * each, extent), min((i + 1) * each, extent)) for i in range(count)])
    return [Box(shape, tuple(a for a, _ in ends), tuple(b - a for a, b in ends)) for ends in product(*ranges)]


def write(folder: Path, values: Array, boxes: list[Box], world_size: int) -> tuple[ArrayLayout, list[Wrote]]:
    """Write the array from as many ranks as there are boxes."""
    spec = ArraySpec(name="model/w", shape=values.shape, dtype="float32")
    layout = lay_out(spec, boxes, world_size)
    folder.mkdir()

    def one(rank: int) -> list[Wrote]:
        share = RankWork(
            save_id="0" * 32,
            folder=str(folder),
            rank=rank,
            world_size=world_size,
            arrays={"w": layout},
            names={},
            timeout_s=30,
        )
        wrote: list[Wrote] = []
        with open_resources(num_threads=1, pool_bytes=2**21) as resources:
            writer = RankWriter(share, resources)
            if rank < len(boxes) and boxes[rank].numel:
                box = boxes[rank]
                block = values[tuple(slice(at, at + n) for at, n in zip(box.offsets, box.sizes, strict=True))]
                data = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
                if layout.passes_through_files:
                    writer.write_piece(layout, box, data)
                else:
                    wrote += writer.write_box(spec, layout.grid, box, data)
            for owned in writer.owned():
                wrote += writer.assemble_shard(owned)
        return wrote

    with ThreadPoolExecutor(world_size) as pool:
        return layout, [part for parts in pool.map(one, range(world_size)) for part in parts]


def check(folder: Path, values: Array, layout: ArrayLayout, wrote: list[Wrote]) -> None:
    """Every shard is whole, by the reader that loads checkpoints, and the grid is one that a checkpoint may have."""
    spec, grid = layout.spec, layout.grid
    assert parse_array(array_document(spec, grid), "here")[:2] == (spec, grid)
    parts = []
    with open_resources(num_threads=1, pool_bytes=2**21) as resources:
        for shard in range(grid.num_shards):
            crcs = assemble(grid, shard, spec.name, [each for each in wrote if each.shard == shard])
            path = folder / "model/w" / (f"c.{shard}" + ".0" * (len(spec.stored_shape) - 1))
            reader = ShardReader(resources, path, spec, grid, shard)
            assert tuple(reader.verify()) == crcs
            out = np.empty(grid.shard_valid_numel(shard), np.float32)
            base = shard * grid.shard_numel
            reader.read(base, base + out.size, out.view(np.uint8))
            parts.append(out)
    assert np.array_equal(np.concatenate(parts or [np.empty(0, np.float32)]).reshape(values.shape), values)


SHAPES = [(1000, 64), (10, 3), (7, 2000), (64, 96), (5,), (100_003,), (6, 40, 50), (3, 5, 7, 2), (2, 300_000)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_cut_along_one_and_two_dims(shape: tuple[int, ...], tmp_path: Path) -> None:
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    dims = len(shape)
    cuts = [tuple(4 if d == dim else 1 for d in range(dims)) for dim in range(dims)]
    cuts += [tuple(2 if d in pair else 1 for d in range(dims)) for pair in product(range(dims), repeat=2)]
    for number, counts in enumerate(dict.fromkeys(cuts)):
        folder = tmp_path / str(number)
        layout, wrote = write(folder, values, cut(shape, counts), 4)
        check(folder, values, layout, wrote)


def test_rows_that_fsdp_cuts_are_written_by_those_that_hold_them() -> None:
    for rows, world_size in ((4096, 8), (50257, 4), (1003, 4), (10, 4)):
        spec = ArraySpec(name="model/w", shape=(rows, 1024), dtype="float32")
        layout = lay_out(spec, cut((rows, 1024), (world_size, 1)), world_size)
        assert not layout.passes_through_files, rows
        assert layout.grid.shard_rows == -(-rows // world_size), "each rank's rows are its shard"
        assert layout.grid.chunk_numel * 4 <= 4 * 2**20


def test_columns_pass_through_files_and_experts_do_not() -> None:
    spec = ArraySpec(name="model/w", shape=(4096, 1024), dtype="float32")
    assert lay_out(spec, cut(spec.shape, (2, 2)), 4).passes_through_files
    experts = ArraySpec(name="model/w", shape=(8, 512, 256), dtype="float32")
    assert not lay_out(experts, cut(experts.shape, (2, 2, 1)), 4).passes_through_files


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    counts=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    world_size=st.integers(1, 27),
)
def test_where_no_files_are_passed_all_pieces_are_whole_chunks(
    shape: tuple[int, ...], counts: list[int], world_size: int
) -> None:
    boxes = cut(shape, counts[: len(shape)])
    spec = ArraySpec(name="model/w", shape=shape, dtype="float32")
    world_size = min(world_size, len(boxes))  # a rank may hold several
    layout = lay_out(spec, boxes, world_size)
    assert layout.grid.num_shards <= world_size
    if layout.passes_through_files:
        return
    for box in boxes:
        for run in box.overlap(0, spec.numel):
            assert run.at % layout.grid.chunk_numel == 0
            assert (run.at + run.numel) % layout.grid.chunk_numel == 0 or run.at + run.numel == spec.numel


def test_a_rank_that_waits_hears_of_one_that_failed(tmp_path: Path) -> None:
    spec = ArraySpec(name="model/w", shape=(64, 96), dtype="float32")
    layout = lay_out(spec, cut((64, 96), (1, 2)), 2)
    assert layout.passes_through_files
    shares = [
        RankWork(
            save_id="0" * 32, folder=str(tmp_path), rank=r, world_size=2, arrays={"w": layout}, names={}, timeout_s=60
        )
        for r in range(2)
    ]
    errors: list[BaseException] = []

    def wait() -> None:
        with open_resources(num_threads=1, pool_bytes=4096) as resources:
            try:
                RankWriter(shares[0], resources).assemble_shard(layout)
            except CheckpointError as error:
                errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with open_resources(num_threads=1, pool_bytes=4096) as resources:
        RankWriter(shares[1], resources).give_up(OSError("the disk is gone"))
    waiting.join(200)
    assert "rank 1: OSError: the disk is gone" in str(errors[0])
    assert [path.name for path in (tmp_path / PIECES_FOLDER).iterdir()] == ["failed-1.json"]


def test_pieces_that_are_not_the_whole_are_never_put_together(tmp_path: Path) -> None:
    spec = ArraySpec(name="model/w", shape=(64, 96), dtype="float32")
    left, right = cut(spec.shape, (1, 2))
    layout = ArrayLayout(spec=spec, grid=lay_out(spec, [left, right], 1).grid, boxes=(left,))
    share = RankWork(
        save_id="0" * 32, folder=str(tmp_path), rank=0, world_size=1, arrays={"w": layout}, names={}, timeout_s=1
    )
    with open_resources(num_threads=1, pool_bytes=2**21) as resources:
        writer = RankWriter(share, resources)
        writer.write_piece(layout, left, np.zeros(left.numel * 4, np.uint8))
        with pytest.raises(CheckpointError, match="'model/w': the pieces of all ranks have 3072 elements"):
            writer.assemble_shard(layout)


def test_a_rank_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    share = RankWork(
        save_id="0" * 32, folder=str(tmp_path / "gone"), rank=3, world_size=4, arrays={}, names={}, timeout_s=1
    )
    with (
        open_resources(num_threads=1, pool_bytes=4096) as resources,
        pytest.raises(CheckpointError, match="rank 3 does not see"),
    ):
        RankWriter(share, resources).check_folder()


def test_a_missing_or_double_chunk_is_noticed() -> None:
    spec = ArraySpec(name="model/w", shape=(1000, 64), dtype="float32")
    grid = lay_out(spec, cut((1000, 64), (2, 1)), 2).grid
    whole = Wrote(array="model/w", shard=0, first_chunk=0, crcs=(1,) * grid.present_chunks(0))
    assert assemble(grid, 0, "model/w", [whole]) == whole.crcs
    for parts in ([], [whole, whole]):
        with pytest.raises(CheckpointError, match="'model/w'"):
            assemble(grid, 0, "model/w", parts)
