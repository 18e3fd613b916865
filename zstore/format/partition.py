"""Rows -> shards -> chunks at world size N. Pure arithmetic over shapes; no threads, no torch, no I/O.

[Note: the grid]
An array has `rows` rows of `row_numel` elements. It is cut into shards of `shard_rows` rows, the same for every rank;
a shard is cut into `chunks_per_shard` inner chunks of `chunk_rows x chunk_cols`. Rules:

- `shard_rows >= ceil(rows / N)`, and a chunk holds a multiple of 16 elements: the vectorised Adam kernel rounds
  differently in the tail of a call, so cuts may only be at places without a tail. (An array whose rows are all in one
  chunk still has its own tail at its true end, as the unpadded tensor has.)
- A chunk is about 1/16 of the shard, at least 64 KiB and at most 1 MiB in fp32, never more than the shard. Rows over
  1 MiB are cut into equal whole fractions. If 16-element alignment is impossible within 1 MiB (long rows of odd
  length), a chunk is the smallest aligned number of rows.
- A chunk on the border between two ranks is read by both, so loading on N' ranks reads about (N'-1) chunks of an array
  too many. Few ranks have large shards: then a chunk is 1/144 of the array instead, but not under 200 KiB, since
  smaller ones make every step slower (110 M parameters on 2 cores: 4 % at 200 KiB, 10 % at 96).
- Among chunk sizes near that target, the one that pads the shard least, and then leaves least unused in 4-KiB blocks.
- The grid depends on shape and world size alone, so all state of a parameter shares it, whatever its data type. An
  array of one bit an element is bytes in a row, of which a chunk has those of the elements' chunk (`Grid.packed`).
- An array that keeps more than two extents has rows of several. A row that is cut is cut along one of them, into equal parts
  of it with all extents behind it: so the order of chunks is still that of the elements.
- In a checkpoint an array under 64 KiB is one shard, whatever the number of ranks (`grid_in_checkpoint`): a shard file takes
  8 KiB at least, so 512 bytes cut over 64 ranks would take half a megabyte in 32 files.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

ALIGN_NUMEL = 16
MIN_CHUNK_NUMEL = 64 * 1024 // 4
MAX_CHUNK_NUMEL = 1024 * 1024 // 4
MOST_CHUNK_NUMEL = 4 * MAX_CHUNK_NUMEL
"""Most elements of a chunk that ends with rows that somebody else cut."""
CHUNKS_PER_SHARD = 16
CHUNKS_PER_ARRAY = 144
MAX_CHUNKS_PER_SHARD = 2**20
"""Larger numbers are refused before anything is allocated."""
FINE_CHUNK_NUMEL = 200 * 1024 // 4
WHOLE_BYTES = 64 * 1024
"""Arrays below this are stored as one shard."""
_CANDIDATES = 256
_FP32_BYTES = 4
_CRC_BYTES = 4
_BLOCK_BYTES = 4096


@dataclass(frozen=True)
class Grid:
    """How an array of `rows x row_numel` elements is cut. See [Note: the grid]."""

    rows: int
    row_numel: int
    shard_rows: int
    chunk_rows: int
    chunk_cols: int

    @functools.cached_property
    def shard_numel(self) -> int:
        """Elements of a shard, padding included."""
        return self.shard_rows * self.row_numel

    @functools.cached_property
    def chunk_numel(self) -> int:
        """Elements of an inner chunk, padding included."""
        return self.chunk_rows * self.chunk_cols

    @functools.cached_property
    def chunks_per_row(self) -> int:
        """Inner chunks side by side in a row; more than 1 only if rows are long."""
        return self.row_numel // self.chunk_cols if self.chunk_cols else 1

    @functools.cached_property
    def chunks_per_shard(self) -> int:
        """Inner chunks of a shard, in row-major order."""
        return self.shard_rows // self.chunk_rows * self.chunks_per_row

    @functools.cached_property
    def num_shards(self) -> int:
        """Shards that hold at least one row; at most the world size."""
        return 0 if self.row_numel == 0 else -(-self.rows // self.shard_rows)

    def shard_range(self, shard: int) -> tuple[int, int]:
        """Return the global rows `[first, stop)` that shard number `shard` owns; empty past the array's end."""
        first = min(self.rows, shard * self.shard_rows)
        return first, min(self.rows, first + self.shard_rows)

    def shard_valid_numel(self, shard: int) -> int:
        """Return the elements of shard number `shard` that are not padding."""
        first, stop = self.shard_range(shard)
        return (stop - first) * self.row_numel

    def present_chunks(self, shard: int) -> int:
        """Return how many leading chunks of the shard hold at least one element; the others are marked missing."""
        first, stop = self.shard_range(shard)
        return -(-(stop - first) // self.chunk_rows) * self.chunks_per_row

    def joined(self, count: int) -> Grid:
        """Return the grid of the same chunks whose shards are `count` of this one's, but no more than hold the array: one
        rank holds the shards of `count` ranks."""
        return replace(self, shard_rows=min(count, max(1, self.num_shards)) * self.shard_rows)


@dataclass(frozen=True)
class ChunkRange:
    """Global flat elements `[first, stop)`, all of shard `shard`, and its chunks `[first_chunk, stop_chunk)` that hold them."""

    shard: int
    first: int
    stop: int
    first_chunk: int
    stop_chunk: int


@functools.lru_cache(maxsize=8192)
def make_grid(stored_shape: tuple[int, ...], world_size: int) -> Grid:
    """Return the grid of an array of `stored_shape` over `world_size` ranks. See [Note: the grid]."""
    if world_size < 1:
        raise ValueError(f"world size must be at least 1, got {world_size}")
    if not stored_shape:
        return Grid(1, 1, 1, 1, 1)
    rows, *extents = stored_shape
    row_numel = math.prod(extents)
    if rows == 0 or row_numel == 0:
        return Grid(rows, row_numel, 1, 1, max(row_numel, 1))
    cols = _chunk_cols(row_numel) if len(extents) < 2 else _chunk_cols_within(tuple(extents))
    if cols < row_numel:
        return Grid(rows, row_numel, -(-rows // world_size), 1, cols)
    align = ALIGN_NUMEL // math.gcd(ALIGN_NUMEL, cols)
    min_rows = round_up(-(-rows // world_size), align)
    shard_rows, chunk_rows = _chunk_rows(min_rows, row_numel, align, rows * row_numel)
    return Grid(rows, row_numel, shard_rows, chunk_rows, cols)


def grid_of_rows(stored_shape: tuple[int, ...], shard_rows: int) -> Grid | None:
    """Return the grid of an array whose ranks have `shard_rows` rows each and the last one the remainder, as FSDP2 cuts it.

    A store that cuts the state of such a parameter alike has files that a checkpoint takes as they are. Chunks are of a
    useful size and end at aligned addresses; None if that is impossible.
    """
    rows, row_numel = stored_shape[0], math.prod(stored_shape[1:])
    root = math.isqrt(shard_rows)
    small = [d for d in range(1, root + 1) if shard_rows % d == 0]
    fitting = [
        d
        for d in (*small, *(shard_rows // d for d in small))
        if (d * row_numel % ALIGN_NUMEL == 0 and MIN_CHUNK_NUMEL <= d * row_numel <= MOST_CHUNK_NUMEL)
        or (d == shard_rows and d * row_numel <= MAX_CHUNK_NUMEL)
    ]
    if not fitting:
        return None
    target = min(max(shard_rows * row_numel // CHUNKS_PER_SHARD, MIN_CHUNK_NUMEL), MAX_CHUNK_NUMEL)
    chunk_rows = min(fitting, key=lambda d: abs(math.log(d * row_numel / target)))
    return Grid(rows, row_numel, shard_rows, chunk_rows, row_numel)


def grid_in_checkpoint(stored_shape: tuple[int, ...], itemsize: int, grid: Grid) -> Grid:
    """Return how an array is cut in a checkpoint whose ranks hold it on `grid`: small arrays are one shard, rank 0's."""
    is_small = grid.num_shards > 1 and math.prod(stored_shape) * itemsize < WHOLE_BYTES
    return make_grid(stored_shape, 1) if is_small else grid


def _chunk_cols(row_numel: int) -> int:
    """Return the row's length, or for rows over 1 MiB its largest aligned whole fraction of 64 KiB to 1 MiB."""
    if row_numel <= MAX_CHUNK_NUMEL:
        return row_numel
    for parts in range(-(-row_numel // MAX_CHUNK_NUMEL), row_numel // MIN_CHUNK_NUMEL + 1):
        if row_numel % parts == 0 and (row_numel // parts) % ALIGN_NUMEL == 0:
            return row_numel // parts
    return row_numel


def _chunk_cols_within(extents: tuple[int, ...]) -> int:
    """Return `_chunk_cols` of a row of several extents: whole parts of one of them, with all extents behind it."""
    if math.prod(extents) <= MAX_CHUNK_NUMEL:
        return math.prod(extents)
    found = [math.prod(extents)]
    for i, extent in enumerate(extents):
        behind = math.prod(extents[i + 1 :])
        least = range(1, math.isqrt(extent) + 1)
        found += [part * behind for d in least if extent % d == 0 for part in (d, extent // d)]
    served = [cols for cols in found if MIN_CHUNK_NUMEL <= cols <= MAX_CHUNK_NUMEL]
    aligned = [cols for cols in served if cols % ALIGN_NUMEL == 0]
    return max(aligned or served) if served else min(cols for cols in found if cols >= MIN_CHUNK_NUMEL)


def extents_of_cols(extents: tuple[int, ...], cols: int) -> tuple[int, ...]:
    """Return the extents of `cols` consecutive elements of a row of `extents`."""
    found: list[int] = []
    for extent in reversed(extents):
        part = min(cols, max(extent, 1))
        found.append(part)
        cols //= part
    return tuple(reversed(found))


def _chunk_rows(min_rows: int, row_numel: int, align: int, numel: int) -> tuple[int, int]:
    """Return (shard rows, chunk rows): of the chunks near the target size, the one that pads least."""
    shard_numel = min_rows * row_numel
    target = min(max(shard_numel // CHUNKS_PER_SHARD, MIN_CHUNK_NUMEL), MAX_CHUNK_NUMEL)
    target = min(target, max(numel // CHUNKS_PER_ARRAY, FINE_CHUNK_NUMEL))
    if shard_numel <= target:
        return min_rows, min_rows
    limit = max(MAX_CHUNK_NUMEL // row_numel // align * align, align)
    least = min(round_up(-(-max(MIN_CHUNK_NUMEL, target * 2 // 3) // row_numel), align), limit)

    def cost(chunk_rows: int) -> tuple[int, int]:
        count = -(-min_rows // chunk_rows)
        padding = (count * chunk_rows - min_rows) * row_numel * _FP32_BYTES
        used = chunk_rows * row_numel * _FP32_BYTES + _CRC_BYTES
        unused = count * (round_up(used, _BLOCK_BYTES) - used)
        return 10 * padding + unused, abs(chunk_rows * row_numel - target)

    def best(largest: int) -> int:
        most = min(max(largest // row_numel // align * align, least), limit)
        step = round_up(-(-(most - least + 1) // _CANDIDATES), align)
        return min((min(rows, min_rows) for rows in range(least, most + 1, step)), key=cost)

    chunk_rows = best(target * 5 // 4)
    # A shard of few chunks has few divisors: look further then.
    if shard_numel <= 4 * target or round_up(min_rows, chunk_rows) - min_rows > max(min_rows // 5, align):
        chunk_rows = best(2 * target)
    return round_up(min_rows, chunk_rows), chunk_rows


def plan_reads(grid: Grid, first: int, stop: int) -> Iterator[ChunkRange]:
    """Yield which chunks hold the global flat elements `[first, stop)` of an array: one range a shard, in order."""
    shard_numel, chunk_numel = grid.shard_numel, grid.chunk_numel
    while first < stop:
        shard = first // shard_numel
        base = shard * shard_numel
        end = min(stop, base + shard_numel)
        yield ChunkRange(shard, first, end, (first - base) // chunk_numel, -(-(end - base) // chunk_numel))
        first = end


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple
