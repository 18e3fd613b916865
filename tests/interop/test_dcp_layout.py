"""Names and pieces of torch.distributed.checkpoint and ours, there and back; every cut of a mesh of two is tried."""

import json
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

from zstore.checkpoint.layout import array_document, parse_array
from zstore.dcp.save import PIECES_FOLDER, ArrayLayout, RankWork, RankWriter
from zstore.errors import CheckpointError, CheckpointMismatchError, CorruptionError
from zstore.format.arrays import ArraySpec, make_grid
from zstore.format.boxes import Box
from zstore.interop.dcp_state import DcpState, NotPlainError, decode_value, encode_value, key_of, name_arrays
from zstore.interop.dcp_state import Path as KeyPath
from zstore.io.shards import ShardReader, ShardSummary, open_resources

Array = npt.NDArray[np.float32]


def cut(shape: tuple[int, ...], counts: Sequence[int]) -> list[Box]:
    """The blocks of a tensor that is cut into so many along each dim, as torch.chunk cuts."""
    ranges = []
    for extent, count in zip(shape, counts, strict=True):
        each = -(-extent // count)
        ranges.append([(min(i * each, extent), min((i + 1) * each, extent)) for i in range(count)])
    return [Box(shape, tuple(a for a, _ in ends), tuple(b - a for a, b in ends)) for ends in product(*ranges)]


def spec_of(*shape: int) -> ArraySpec:
    return ArraySpec(name="model/w", shape=shape, dtype="float32")


def work(folder: Path, rank: int, *layouts: ArrayLayout) -> RankWork:
    return RankWork(folder=str(folder), rank=rank, arrays={layout.spec.name: layout for layout in layouts}, names={})


def write(folder: Path, values: Array, boxes: list[Box], world_size: int) -> tuple[ArrayLayout, list[ShardSummary]]:
    spec = spec_of(*values.shape)
    layout = ArrayLayout.of(spec, boxes, world_size)
    folder.mkdir()

    def one(rank: int) -> list[ShardSummary]:
        wrote = []
        with open_resources(num_threads=1, pool_bytes=2**21) as resources:
            writer = RankWriter(work(folder, rank, layout), resources)
            if rank < len(boxes) and boxes[rank].numel:
                box = boxes[rank]
                block = values[tuple(slice(at, at + n) for at, n in zip(box.offsets, box.sizes, strict=True))]
                data = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
                if layout.boxes:
                    writer.write_piece(layout, box, data)
                else:
                    wrote.append(writer.write_box(spec, layout.grid, box, data))
            if layout.is_owned_by(rank):
                wrote.append(writer.assemble_shard(layout))
        return wrote

    with ThreadPoolExecutor(world_size) as pool:
        return layout, [each for parts in pool.map(one, range(world_size)) for each in parts]


def check(folder: Path, values: Array, layout: ArrayLayout, wrote: list[ShardSummary]) -> None:
    """Every shard is whole, by the reader that loads checkpoints, and the grid is one that a checkpoint may have."""
    spec, grid = layout.spec, layout.grid
    assert parse_array(array_document(spec, grid), "here")[:2] == (spec, grid)
    assert sorted(each.shard for each in wrote) == list(range(grid.num_shards))
    parts = []
    with open_resources(num_threads=1, pool_bytes=2**21) as resources:
        for summary in sorted(wrote, key=lambda each: each.shard):
            shard = summary.shard
            path = folder / "model/w" / (f"c.{shard}" + ".0" * (len(spec.stored_shape) - 1))
            reader = ShardReader(resources, path, spec, grid, shard)
            assert tuple(reader.verify()) == summary.crcs
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
        layout = ArrayLayout.of(spec_of(rows, 1024), cut((rows, 1024), (world_size, 1)), world_size)
        assert not layout.boxes, rows
        assert layout.grid.shard_rows == -(-rows // world_size), "each rank's rows are its shard"
        assert layout.grid.chunk_numel * 4 <= 4 * 2**20
    assert ArrayLayout.of(spec_of(4096, 1024), cut((4096, 1024), (2, 2)), 4).boxes
    assert ArrayLayout.of(spec_of(8, 6), cut((8, 6), (8, 1)), 4).boxes, "more pieces than ranks"


def test_a_rank_that_waits_hears_of_one_that_failed(tmp_path: Path) -> None:
    layout = ArrayLayout.of(spec_of(64, 96), cut((64, 96), (1, 2)), 2)
    errors: list[BaseException] = []

    def wait() -> None:
        with open_resources(num_threads=1, pool_bytes=4096) as resources:
            try:
                RankWriter(work(tmp_path, 0, layout), resources).assemble_shard(layout)
            except CheckpointError as error:
                errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with open_resources(num_threads=1, pool_bytes=4096) as resources:
        RankWriter(work(tmp_path, 1, layout), resources).give_up(OSError("the disk is gone"))
    waiting.join(200)
    assert "rank 1: OSError: the disk is gone" in str(errors[0])
    assert [path.name for path in (tmp_path / PIECES_FOLDER).iterdir()] == ["failed-1.json"]


def test_pieces_that_are_not_the_whole_are_never_put_together(tmp_path: Path) -> None:
    left, _ = cut((64, 96), (1, 2))
    layout = ArrayLayout(spec=spec_of(64, 96), grid=make_grid((64, 96), 1), boxes=(left,))
    with open_resources(num_threads=1, pool_bytes=2**21) as resources:
        writer = RankWriter(work(tmp_path, 0, layout), resources)
        writer.write_piece(layout, left, np.zeros(left.numel * 4, np.uint8))
        with pytest.raises(CheckpointError, match="'model/w': the pieces of all ranks have 3072 elements"):
            writer.assemble_shard(layout)


def test_a_rank_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    with (
        open_resources(num_threads=1, pool_bytes=4096) as resources,
        pytest.raises(CheckpointError, match="rank 3 does not see"),
    ):
        RankWriter(work(tmp_path / "gone", 3), resources).check()


def there_and_back(paths: list[KeyPath]) -> dict[str, str]:
    """The arrays by key, once it is sure that the paths come back."""
    names = name_arrays({key_of(path): path for path in paths})
    state = DcpState(paths={names[key_of(path)]: path for path in paths})
    document = json.loads(json.dumps(state.document()))
    assert DcpState.of({"dcp": document}, names.values()) == state
    return names


@pytest.mark.parametrize(
    "arrays",
    [
        {
            ("app", "model", "h.0.weight"): "model/h.0.weight",
            ("app", "optim", "state", "h.0.weight", "exp_avg"): "optimizer/exp_avg/h.0.weight",
            ("app", "optim", "state", "h.0.weight", "step"): "optimizer/step/h.0.weight",
        },
        {
            ("model", "h.0.weight"): "model/h.0.weight",
            ("optimizer", "state.h.0.weight.exp_avg"): "optimizer/exp_avg/h.0.weight",
        },
        {  # weights at the top, as torchtitan has them
            ("layers.0.wq.weight",): "model/layers.0.wq.weight",
            ("optimizer", "state.layers.0.wq.weight.exp_avg"): "optimizer/exp_avg/layers.0.wq.weight",
            ("train_state", "step"): "client/train_state.step",
        },
        {("model", "model.embed_tokens.weight"): "model/model.embed_tokens.weight"},
        {("model.embed_tokens.weight",): "model/model.embed_tokens.weight"},
        {  # several models keep apart
            ("gen", "model", "w"): "model/gen.model.w",
            ("disc", "model", "w"): "model/disc.model.w",
            ("gen", "optim", "state", "w", "exp_avg"): "optimizer/exp_avg/w",
        },
    ],
)
def test_names_of_models_and_optimizers(arrays: dict[KeyPath, str]) -> None:
    assert list(there_and_back(list(arrays)).values()) == list(arrays.values())


@given(
    st.sets(
        st.lists(
            st.one_of(
                st.sampled_from(["model", "optim", "optimizer", "state", "w", "state.w.m", "a/b"]), st.integers(0, 2)
            ),
            min_size=1,
            max_size=4,
        ).map(tuple),
        max_size=8,
    )
)
def test_every_path_comes_back(paths: set[KeyPath]) -> None:
    by_key = {key_of(path): path for path in paths if type(path[0]) is str}
    arrays = there_and_back(list(by_key.values()))
    assert len(set(arrays.values())) == len(arrays)


PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.just("$x")), inner),
    ),
    max_leaves=8,
)


def same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@given(PLAIN)
def test_plain_data_comes_back_with_its_types(value: object) -> None:
    assert same(decode_value(encode_value(value)), value)


def test_what_is_not_plain_is_said() -> None:
    class Odd(dict):  # type: ignore[type-arg]
        pass

    for value in (object(), {1, 2}, Odd(), [1j]):
        with pytest.raises(NotPlainError):
            encode_value(value)
    assert math.isnan(decode_value(encode_value(math.nan)))


def test_what_takes_megabytes_is_no_plain_data() -> None:
    doubled: list[object] = ["x"]
    for _ in range(24):
        doubled = [doubled] * 10
    for value in (doubled, ["x" * 1000] * 2**20, [bytes(2**20)] * 100, 2**1_000_000):
        with pytest.raises(NotPlainError, match="too large"):
            encode_value(value)


def test_a_damaged_record_is_refused() -> None:
    good = DcpState(paths={"model/w": ("w",)}, values=[(("lr",), 0.1)]).document()
    assert DcpState.of({"dcp": good}, ["model/w"]).values == [(("lr",), 0.1)]
    for broken in (
        [],
        good | {"values": [[1]]},
        good | {"values": [["lr", 1]]},
        good | {"paths": {"model/w": [None]}},
        good | {"paths": ["model/w"]},
        good | {"opaque": {"client/x": "exec"}},
    ):
        with pytest.raises(CorruptionError):
            DcpState.of({"dcp": broken}, ["model/w"])
    former = {"version": 1, "model": ["app", "model"], "optimizer": None, "optimizer_form": "nested", "paths": {}}
    for other in (former, {"paths": {}}, good | {"version": 3}):
        with pytest.raises(CheckpointMismatchError, match="convert it again"):
            DcpState.of({"dcp": other}, ["model/w"])
    with pytest.raises(CorruptionError, match="unknown type"):
        decode_value({"$exec": "x"})
