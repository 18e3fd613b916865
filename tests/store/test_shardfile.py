"""The byte layout of a shard file, held against zarr-python and tensorstore."""

import struct
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import assume, given
from hypothesis import strategies as st

from zstore.errors import CorruptionError
from zstore.format.arrays import ArraySpec, Bytes
from zstore.format.partition import Grid, make_grid, round_up
from zstore.format.shardfile import (
    BLOCK_BYTES,
    MISSING,
    ShardLayout,
    check_index,
    checksum,
    encode_index,
    finish_slots,
    layout_of,
    slot_views,
    stored_crcs,
    verify_slots,
)
from zstore.testing.oracle import (
    random_values,
    read_with_tensorstore,
    read_with_zarr,
    same_bits,
    shard_name,
    write_zarr_json,
)

DTYPES = ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
DTYPES += ["float16", "bfloat16", "float32", "float64"]


def seal_slots(slots: Bytes, layout: ShardLayout) -> list[int]:
    """Write crc32c and zeros behind the payload of every slot, as whoever writes a file does; return the checksums."""
    payloads = slot_views(slots, layout)[:, : layout.payload_bytes]
    stored_crcs(slots, layout)[:] = [checksum(payload) for payload in payloads]
    return finish_slots(slots, layout)


def encode(values: np.ndarray, spec: ArraySpec, grid: Grid, shard: int) -> bytes:
    """The shard file of the array `values`, put together from the pure functions."""
    layout = layout_of(grid, shard, spec.dtype)
    first, stop = grid.shard_range(shard)
    padded = np.zeros(grid.shard_numel, values.dtype)
    padded[: (stop - first) * grid.row_numel] = values.reshape(grid.rows, -1)[first:stop].reshape(-1)
    slots = np.full(layout.num_present * layout.slot_bytes, 0xEE, np.uint8)
    for chunk, slot in enumerate(slot_views(slots, layout)):
        part = padded[chunk * grid.chunk_numel : (chunk + 1) * grid.chunk_numel]
        slot[: layout.payload_bytes] = part.view(np.uint8)
    seal_slots(slots, layout)
    return encode_index(layout) + slots.tobytes()


def write_array(folder: Path, values: np.ndarray, spec: ArraySpec, grid: Grid) -> None:
    write_zarr_json(folder, spec, grid)
    for shard in range(grid.num_shards):
        (folder / shard_name(spec, shard)).write_bytes(encode(values, spec, grid, shard))


layouts = st.builds(
    lambda present, missing, payload: ShardLayout(
        num_chunks=present + missing, num_present=present, payload_bytes=payload
    ),
    st.integers(0, 300),
    st.integers(0, 300),
    st.one_of(st.integers(1, 9000), st.sampled_from([4088, 4092, 4093, 4096, 65532, 65536])),
)


@given(layout=layouts)
def test_everything_lies_in_blocks_and_nothing_overlaps(layout: ShardLayout) -> None:
    assert layout.data_offset % BLOCK_BYTES == layout.slot_bytes % BLOCK_BYTES == layout.file_bytes % BLOCK_BYTES == 0
    assert layout.data_offset - BLOCK_BYTES < layout.index_bytes <= layout.data_offset
    assert layout.slot_bytes - BLOCK_BYTES < layout.payload_bytes + 4 == layout.chunk_bytes <= layout.slot_bytes
    assert layout.slot_offset(0) == layout.data_offset
    assert layout.slot_offset(layout.num_present) == layout.file_bytes


@given(layout=layouts)
def test_the_index_is_what_the_specification_says(layout: ShardLayout) -> None:
    index = encode_index(layout)
    assert len(index) == layout.data_offset
    entries = [struct.unpack_from("<QQ", index, 16 * i) for i in range(layout.num_chunks)]
    for chunk, (offset, nbytes) in enumerate(entries):
        if chunk < layout.num_present:
            assert (offset, nbytes) == (layout.slot_offset(chunk), layout.chunk_bytes)
        else:
            assert (offset, nbytes) == (MISSING, MISSING)
    body = index[: 16 * layout.num_chunks]
    assert struct.unpack_from("<I", index, len(body))[0] == crc32c(body)
    assert not any(index[layout.index_bytes :])
    check_index(layout, index, path="p", array="a/b")


@given(layout=layouts, data=st.data())
def test_a_flipped_bit_of_the_index_is_found(layout: ShardLayout, data: st.DataObject) -> None:
    index = bytearray(encode_index(layout))
    bit = data.draw(st.integers(0, 8 * layout.index_bytes - 1))
    index[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptionError, match=r"array 'a/b': the index of /some/file fails its crc32c \(offset 0, "):
        check_index(layout, bytes(index), path="/some/file", array="a/b")


@given(layout=layouts, other=layouts)
def test_the_index_of_another_layout_is_told_apart_from_damage(layout: ShardLayout, other: ShardLayout) -> None:
    index, found = encode_index(layout), encode_index(other)
    assume(index[: layout.index_bytes] != found[: layout.index_bytes])
    words = "belongs to another layout" if other.num_chunks == layout.num_chunks else "belongs to|fails its crc32c"
    with pytest.raises(CorruptionError, match=words):
        check_index(layout, found, path="p", array="a/b")
    with pytest.raises(CorruptionError, match="fails its crc32c"):
        check_index(layout, index[: layout.index_bytes - 1], path="p", array="a/b")


small_payloads = st.one_of(st.integers(1, 200), st.sampled_from([4091, 4092, 4093, 8188]))


@given(count=st.integers(1, 5), payload=small_payloads, first=st.integers(0, 10), data=st.data())
def test_sealed_slots_verify_and_a_flipped_bit_is_found(
    count: int, payload: int, first: int, data: st.DataObject
) -> None:
    layout = ShardLayout(num_chunks=20, num_present=20, payload_bytes=payload)
    slots = np.random.default_rng(payload).integers(0, 256, count * layout.slot_bytes, dtype=np.uint8)
    before = slot_views(slots, layout)[:, :payload].copy()
    crcs = seal_slots(slots, layout)
    views = slot_views(slots, layout)
    assert (views[:, :payload] == before).all()
    assert not views[:, layout.chunk_bytes :].any()
    assert crcs == [crc32c(part.tobytes()) for part in before]
    assert verify_slots(slots, layout, first, path="p", array="a/b") == crcs

    chunk = data.draw(st.integers(0, count - 1))
    bit = data.draw(st.integers(0, 8 * layout.chunk_bytes - 1))
    views[chunk, bit // 8] ^= 1 << bit % 8
    offset = layout.slot_offset(first + chunk)
    words = rf"array 'a/b': chunk {first + chunk} of /some/file fails its crc32c \(offset {offset}, "
    with pytest.raises(CorruptionError, match=words):
        verify_slots(slots, layout, first, path="/some/file", array="a/b")


def test_no_slots_is_no_error() -> None:
    layout = ShardLayout(num_chunks=3, num_present=0, payload_bytes=64)
    empty = np.empty(0, np.uint8)
    assert seal_slots(empty, layout) == verify_slots(empty, layout, 0, path="p", array="a/b") == []


def test_round_up() -> None:
    assert [round_up(n, 4096) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


# -- other readers --------------------------------------------------------------------------------------------------

SHAPES = {
    "scalar": (),
    "one-element": (1,),
    "vector": (100_003,),
    "matrix": (1000, 48),
    "short-last-shard": (1001, 37),
    "fewer-rows-than-ranks": (2, 64),
    "tall": (70_001, 3),
    "collapsed": (6, 50, 64),
}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zarr_and_tensorstore_read_what_we_encode(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, world_size: int
) -> None:
    spec = ArraySpec(name="model/w", shape=shape, dtype=dtype)
    grid = make_grid(spec.stored_shape, world_size)
    values = random_values(dtype, spec.numel).reshape(spec.stored_shape)
    write_array(tmp_path / "a", values, spec, grid)
    assert same_bits(read_with_zarr(tmp_path / "a"), values)
    assert same_bits(read_with_tensorstore(tmp_path / "a"), values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_data_type_is_read_by_others(tmp_path: Path, dtype: str) -> None:
    spec = ArraySpec(name="model/w", shape=(515, 67), dtype=dtype)
    grid = make_grid(spec.stored_shape, 2)
    values = random_values(dtype, spec.numel, seed=1).reshape(spec.shape)
    write_array(tmp_path / "a", values, spec, grid)
    assert same_bits(read_with_zarr(tmp_path / "a"), values)
    assert same_bits(read_with_tensorstore(tmp_path / "a"), values)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_an_empty_array_has_metadata_and_no_files(tmp_path: Path, shape: tuple[int, ...]) -> None:
    spec = ArraySpec(name="model/w", shape=shape, dtype="float32")
    grid = make_grid(shape, 4)
    assert grid.num_shards == 0
    write_array(tmp_path / "a", np.empty(shape, np.float32), spec, grid)
    assert read_with_zarr(tmp_path / "a").shape == shape
    assert read_with_tensorstore(tmp_path / "a").shape == shape


def test_rows_in_fractions_are_read_by_others(tmp_path: Path) -> None:
    spec = ArraySpec(name="model/w", shape=(3, 400_000), dtype="int8")
    grid = make_grid(spec.stored_shape, 2)
    assert grid.chunks_per_row > 1
    values = random_values("int8", spec.numel).reshape(spec.shape)
    write_array(tmp_path / "a", values, spec, grid)
    assert same_bits(read_with_zarr(tmp_path / "a"), values)
    assert same_bits(read_with_tensorstore(tmp_path / "a"), values)


def test_a_missing_shard_reads_as_nan_never_as_zero(tmp_path: Path) -> None:
    spec = ArraySpec(name="model/w", shape=(1000, 48), dtype="float32")
    grid = make_grid(spec.stored_shape, 2)
    write_array(tmp_path / "a", np.ones(spec.shape, np.float32), spec, grid)
    (tmp_path / "a" / "c.1.0").unlink()
    for found in (read_with_zarr(tmp_path / "a"), read_with_tensorstore(tmp_path / "a")):
        assert (found[:500] == 1).all()
        assert np.isnan(found[500:]).all()


@pytest.mark.parametrize("where", ["payload", "crc", "index", "index crc"])
def test_a_flipped_bit_is_refused_by_other_readers_too(tmp_path: Path, where: str) -> None:
    spec = ArraySpec(name="model/w", shape=(1000, 48), dtype="float32")
    grid = make_grid(spec.stored_shape, 1)
    layout = layout_of(grid, 0, spec.dtype)
    assert layout.num_present > 1
    write_array(tmp_path / "a", random_values("float32", spec.numel).reshape(spec.shape), spec, grid)
    offset = {
        "payload": layout.slot_offset(1) + 17,
        "crc": layout.slot_offset(1) + layout.payload_bytes + 2,
        "index": 3,
        "index crc": layout.index_bytes - 1,
    }[where]
    file = tmp_path / "a" / "c.0.0"
    data = bytearray(file.read_bytes())
    data[offset] ^= 4
    file.write_bytes(data)
    with pytest.raises(Exception, match=r"(?i)checksum|digest mismatch"):
        read_with_zarr(tmp_path / "a")
    with pytest.raises(Exception, match=r"(?i)checksum|digest mismatch"):
        read_with_tensorstore(tmp_path / "a")
