"""Whole shard files: what is written is read by anybody, in bounded memory, and damage is always found."""

import errno
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zstore.errors import CorruptionError, DiskFullError, StorageError, UsageError
from zstore.format import ArraySpec, Bytes, Grid, layout_of, make_grid, plan_reads
from zstore.format.shardfile import (
    BLOCK_BYTES,
    MISSING,
    ScatteredMemory,
    ShardLayout,
    check_index,
    checksum,
    encode_index,
    finish_slots,
    slot_views,
    stored_crcs,
    verify_slots,
)
from zstore.io import (
    Fill,
    FillRuns,
    IoResources,
    ShardReader,
    ShardSummary,
    make_shard_file,
    make_slab,
    open_resources,
    write_shard,
)
from zstore.io.files import Files, Kind, OpenFile
from zstore.testing.faults import Fault, FaultyFiles
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


@pytest.fixture
def res() -> Iterator[IoResources]:
    with open_resources(pool_bytes=8 << 20, num_threads=2) as res:
        yield res


def filler(values: np.ndarray) -> Fill:
    flat = values.reshape(-1)

    def fill(first: int, stop: int, out: Bytes) -> None:
        out[:] = flat[first:stop].view(np.uint8)

    return fill


def write_all(res: IoResources, folder: Path, values: np.ndarray, spec: ArraySpec, grid: Grid) -> list[ShardSummary]:
    write_zarr_json(folder, spec, grid)
    return [
        write_shard(res, folder / shard_name(spec, shard), spec, grid, shard, filler(values))
        for shard in range(grid.num_shards)
    ]


def read_all(res: IoResources, folder: Path, spec: ArraySpec, grid: Grid) -> np.ndarray:
    out = np.zeros(spec.numel, random_values(spec.dtype, 0).dtype)
    for shard in range(grid.num_shards):
        reader = ShardReader(res, folder / shard_name(spec, shard), spec, grid, shard)
        first = shard * grid.shard_numel
        stop = first + grid.shard_valid_numel(shard)
        reader.read(first, stop, out[first:stop].view(np.uint8))
    return out.reshape(spec.stored_shape)


SHAPES = {
    "scalar": (),
    "one-row": (1, 100_000),
    "vector": (1_000_003,),
    "short-last-shard": (5001, 129),
    "fewer-rows-than-ranks": (2, 64),
    "row-fractions": (3, 400_000),
    "long-odd-rows": (20, 300_001),
    "collapsed": (6, 50, 64),
}


@pytest.mark.parametrize(
    ("shape", "dtype", "world_size"),
    [
        *((shape, "bfloat16", world_size) for shape in SHAPES.values() for world_size in (1, 3)),
        *(((515, 67), dtype, 2) for dtype in DTYPES),
    ],
)
def test_zarr_tensorstore_and_we_read_files(
    res: IoResources, tmp_path: Path, shape: tuple[int, ...], dtype: str, world_size: int
) -> None:
    spec = ArraySpec(name="model/w", shape=shape, dtype=dtype)
    grid = make_grid(spec.stored_shape, world_size)
    values = random_values(spec.dtype, spec.numel).reshape(spec.stored_shape)
    summaries = write_all(res, tmp_path / "a", values, spec, grid)
    assert same_bits(read_with_zarr(tmp_path / "a"), values)
    assert same_bits(read_with_tensorstore(tmp_path / "a"), values)
    assert same_bits(read_all(res, tmp_path / "a", spec, grid), values)
    for shard, summary in enumerate(summaries):
        path = tmp_path / "a" / shard_name(spec, shard)
        assert summary.file_bytes == path.stat().st_size
        assert list(summary.crcs) == ShardReader(res, path, spec, grid, shard).verify()
        assert (summary.array, summary.shard, summary.linked) == (spec.name, shard, False)
    assert res.pool.used_bytes == 0


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ArraySpec, np.ndarray]:
    folder = tmp_path_factory.mktemp("sample") / "a"
    spec = ArraySpec(name="model/w", shape=(3001, 97), dtype="float32")
    values = random_values("float32", spec.numel).reshape(spec.shape)
    with open_resources(pool_bytes=8 << 20) as res:
        write_all(res, folder, values, spec, make_grid(spec.stored_shape, 3))
    return folder, spec, values


@settings(max_examples=30)
@given(data=st.data())
def test_any_elements_are_read_by_their_plan(sample: tuple[Path, ArraySpec, np.ndarray], data: st.DataObject) -> None:
    folder, spec, values = sample
    grid = make_grid(spec.stored_shape, 3)
    first = data.draw(st.integers(0, spec.numel))
    stop = data.draw(st.integers(first, spec.numel))
    out = np.zeros(stop - first, np.float32)
    read_bytes = planned = 0
    with open_resources(pool_bytes=1 << 20, num_threads=2) as res:
        for part in plan_reads(grid, first, stop):
            reader = ShardReader(res, folder / shard_name(spec, part.shard), spec, grid, part.shard)
            reader.read(part.first, part.stop, out[part.first - first : part.stop - first].view(np.uint8))
            read_bytes += reader.read_bytes
            planned += (part.stop_chunk - part.first_chunk) * reader.layout.slot_bytes
    assert same_bits(out, values.reshape(-1)[first:stop])
    assert read_bytes == planned


@pytest.mark.parametrize("pool_bytes", [4096, 200_000, 1 << 20])
def test_a_shard_larger_than_the_pool(tmp_path: Path, pool_bytes: int) -> None:
    spec = ArraySpec(name="model/w", shape=(1_500_000,), dtype="float32")
    grid = make_grid(spec.stored_shape, 1)
    slot_bytes = layout_of(grid, 0, spec.dtype).slot_bytes
    values = random_values(spec.dtype, spec.numel)
    with open_resources(pool_bytes=pool_bytes, num_threads=2) as res:
        write_all(res, tmp_path / "a", values, spec, grid)
        assert same_bits(read_all(res, tmp_path / "a", spec, grid), values)
        assert res.pool.peak_bytes <= max(pool_bytes, slot_bytes)
        assert res.pool.used_bytes == 0


def test_a_missing_shard_reads_as_nan_never_as_zero(res: IoResources, tmp_path: Path) -> None:
    spec = ArraySpec(name="model/w", shape=(1000, 48), dtype="float32")
    write_all(res, tmp_path / "a", np.ones(spec.shape, np.float32), spec, make_grid(spec.stored_shape, 2))
    (tmp_path / "a" / "c.1.0").unlink()
    for found in (read_with_zarr(tmp_path / "a"), read_with_tensorstore(tmp_path / "a")):
        assert (found[:500] == 1).all()
        assert np.isnan(found[500:]).all()


def damaged(sample: tuple[Path, ArraySpec, np.ndarray], target: Path) -> Path:
    path = target / "s"
    path.write_bytes((sample[0] / "c.1.0").read_bytes())
    return path


def test_reads_may_leave_out_verification(sample: tuple[Path, ArraySpec, np.ndarray], tmp_path: Path) -> None:
    _, spec, values = sample
    grid = make_grid(spec.stored_shape, 3)
    path = damaged(sample, tmp_path)
    data = bytearray(path.read_bytes())
    data[layout_of(grid, 1, spec.dtype).slot_offset(0)] ^= 1
    path.write_bytes(data)
    with open_resources(pool_bytes=1 << 20, verify=False) as res:
        reader = ShardReader(res, path, spec, grid, 1)
        out = np.empty(40, np.uint8)
        reader.read(grid.shard_numel, grid.shard_numel + 10, out)
        assert not same_bits(out.view(np.float32), values.reshape(-1)[grid.shard_numel :][:10])
        with pytest.raises(CorruptionError):
            reader.verify()


def test_reads_outside_the_shard_are_refused(res: IoResources, sample: tuple[Path, ArraySpec, np.ndarray]) -> None:
    folder, spec, _ = sample
    grid = make_grid(spec.stored_shape, 3)
    reader = ShardReader(res, folder / "c.1.0", spec, grid, 1)
    base = grid.shard_numel
    for first, stop in ((base - 1, base + 1), (base, 2 * base + 1), (base + 2, base + 1)):
        with pytest.raises(UsageError, match="are not in shard 1"):
            reader.read(first, stop, np.empty(max(0, stop - first) * 4, np.uint8))
    with pytest.raises(UsageError, match="expected 8 bytes to read into, got 7"):
        reader.read(base, base + 2, np.empty(7, np.uint8))


@pytest.mark.timeout(60)
def test_indexes_need_no_buffers(res: IoResources, sample: tuple[Path, ArraySpec, np.ndarray], tmp_path: Path) -> None:
    folder, spec, _ = sample
    grid = make_grid(spec.stored_shape, 3)
    with res.pool.acquire(res.pool.nbytes):
        make_shard_file(res, tmp_path / "s", layout_of(grid, 1, spec.dtype))
        ShardReader(res, folder / "c.1.0", spec, grid, 1)
        ShardReader(res, tmp_path / "s", spec, grid, 1)


SPEC = ArraySpec(name="model/w", shape=(2000, 128), dtype="float32")
GRID = make_grid(SPEC.stored_shape, 1)


@pytest.mark.parametrize("kind", ["open", "allocate", "write", "fsync"])
def test_every_fault_of_a_write_is_raised_and_no_buffer_is_lost(tmp_path: Path, kind: str) -> None:
    files = FaultyFiles(faults=(Fault(kind=kind, first=0 if kind == "allocate" else 1, error_number=errno.EIO),))
    values = random_values("float32", SPEC.numel)
    if kind == "fsync":
        files.heal()
        files.inject(Fault(kind="fsync", error_number=errno.EIO))
    with open_resources(pool_bytes=1 << 20, files=files) as res:
        with pytest.raises(StorageError, match="EIO") as info:
            write_shard(res, tmp_path / "s", SPEC, GRID, 0, filler(values))
        assert info.value.path == str(tmp_path / "s")
        assert res.pool.used_bytes == 0
        files.heal()
        summary = write_shard(res, tmp_path / "t", SPEC, GRID, 0, filler(values))
        assert len(summary.crcs) == GRID.chunks_per_shard


def test_a_full_disk_shows_when_the_file_is_made(tmp_path: Path) -> None:
    files = FaultyFiles(faults=(Fault(kind="allocate", error_number=errno.ENOSPC),))
    with open_resources(files=files, pool_bytes=1 << 20) as res:
        with pytest.raises(DiskFullError):
            write_shard(res, tmp_path / "s", SPEC, GRID, 0, filler(random_values("float32", SPEC.numel)))
        assert files.operations == ["allocate", "unlink"]
        # Nothing is left that takes space or stands in the way of another try.
        assert list(tmp_path.iterdir()) == []
        layout = layout_of(GRID, 0, SPEC.dtype)
        make_shard_file(res, tmp_path / "s", layout)
        assert (tmp_path / "s").stat().st_size == layout.file_bytes


def test_a_failing_source_fails_the_write(res: IoResources, tmp_path: Path) -> None:
    def fill(first: int, stop: int, out: Bytes) -> None:
        if first > 0:
            raise ValueError("no such values")

    with pytest.raises(ValueError, match="no such values"):
        write_shard(res, tmp_path / "s", SPEC, GRID, 0, fill)
    assert res.pool.used_bytes == 0


def resting(res: IoResources, path: Path, values: np.ndarray, *, offset: int = 0) -> tuple[ShardReader, Bytes]:
    """Write `values`, which lie `offset` bytes behind a page's beginning, as one shard; return its reader and the memory."""
    room = make_slab(values.nbytes + offset)[offset:]
    room[:] = values.reshape(-1).view(np.uint8)
    spec = ArraySpec(name="model/w", shape=values.shape, dtype="float32")
    grid = make_grid(spec.stored_shape, 1)

    def fill(first: int, stop: int, out: Bytes) -> None:
        out[...] = room[4 * first : 4 * stop].reshape(out.shape)

    write_shard(res, path, spec, grid, 0, FillRuns(fill, room))
    return ShardReader(res, path, spec, grid, 0), room


# Chunks of 256 KiB, the last of which the array has in part; of 300 * 4 * n bytes, which are no multiple of 512.
KINDS: tuple[Kind, ...] = ("read", "write")
SHORT = tuple(Fault(kind=kind, times=None, most_bytes=7 * 4096) for kind in KINDS)


@pytest.mark.parametrize("shape", [(1000, 256), (5000, 300)])
@pytest.mark.parametrize("offset", [0, 512, 64])
@pytest.mark.parametrize("direct", [True, False])
def test_payloads_at_rest_make_the_same_file(tmp_path: Path, shape: tuple[int, int], offset: int, direct: bool) -> None:
    values = random_values("float32", math.prod(shape), seed=3).reshape(shape)
    with open_resources(files=FaultyFiles(faults=SHORT, direct=direct)) as res:
        reader, _ = resting(res, tmp_path / "rest", values, offset=offset)
        write_shard(res, tmp_path / "copied", reader.spec, reader.grid, 0, filler(values))
        assert (tmp_path / "rest").read_bytes() == (tmp_path / "copied").read_bytes()
        numel = values.size
        for first, stop in [(0, numel), (1, numel), (128 * 256, numel - 77), (70_000, 70_001)]:
            out = make_slab(4 * (stop - first) + offset)[offset:]
            reader.read(first, stop, out)
            assert out.tobytes() == values.reshape(-1)[first:stop].tobytes()
        assert res.pool.used_bytes == 0


class _Strict(Files):
    def __init__(self) -> None:
        super().__init__()
        self.moved: list[int] = []

    def _strict(self, data: Bytes | ScatteredMemory) -> None:
        self.moved.append(data.size)
        if isinstance(data, ScatteredMemory) and any(view.nbytes % 4096 for view in data.views):
            raise OSError(errno.EINVAL, "Invalid argument")

    def _preadv(self, file: OpenFile, out: Bytes | ScatteredMemory, offset: int) -> int:
        self._strict(out)
        return super()._preadv(file, out, offset)

    def _pwritev(self, file: OpenFile, data: Bytes | ScatteredMemory, offset: int) -> int:
        self._strict(data)
        return super()._pwritev(file, data, offset)


def test_a_drive_that_wants_whole_pages_gets_them(tmp_path: Path) -> None:
    values = random_values("float32", math.prod((1000, 384)), seed=3).reshape((1000, 384))
    files = _Strict()
    with open_resources(files=files) as res:
        reader, room = resting(res, tmp_path / "rest", values)
        assert not files.supports_scattered
        write_shard(res, tmp_path / "copied", reader.spec, reader.grid, 0, filler(values))
        assert (tmp_path / "rest").read_bytes() == (tmp_path / "copied").read_bytes()
        files.supports_scattered, room[:] = True, 0
        reader.read(0, values.size, room)
    assert room.tobytes() == values.tobytes()


def test_memory_at_rest_takes_no_room_of_the_pool_and_one_transfer(tmp_path: Path) -> None:
    values = random_values("float32", math.prod((2048, 512)), seed=3).reshape((2048, 512))  # 4 MiB
    files = FaultyFiles(only=frozenset({"read", "write"}))
    with open_resources(files=files, block_bytes=8 * 2**20) as res:
        reader, room = resting(res, tmp_path / "rest", values)
        assert res.pool.peak_bytes < 512 * 1024
        reader.read(0, values.size, room)
        assert files.operations == ["write", "read", "read"]  # the first of the index alone
        assert res.pool.peak_bytes < 512 * 1024
    assert room.tobytes() == values.tobytes()


def seal_slots(slots: Bytes, layout: ShardLayout) -> list[int]:
    """Write crc32c and zeros behind the payload of every slot, as whoever writes a file does; return the checksums."""
    payloads = slot_views(slots, layout)[:, : layout.payload_bytes]
    stored_crcs(slots, layout)[:] = [checksum(payload) for payload in payloads]
    return finish_slots(slots, layout)


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
    with pytest.raises(CorruptionError, match=r"'a/b': the index of /some/file fails its crc32c check \(offset 0, "):
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
def test_sealed_slots_verify_or_have_a_flipped_bit(count: int, payload: int, first: int, data: st.DataObject) -> None:
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
    words = rf"array 'a/b': chunk {first + chunk} of /some/file fails its crc32c check \(offset {offset}, "
    with pytest.raises(CorruptionError, match=words):
        verify_slots(slots, layout, first, path="/some/file", array="a/b")
