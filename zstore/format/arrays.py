"""Named global tensors: an array's name, its shape and its data type, and how its rows are cut into shards and chunks at
world size N. Pure arithmetic: no ranks, threads, torch or I/O.

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
- Among chunk sizes near that target, the one that pads the shard least, then wastes least in 4-KiB blocks.
- The grid depends only on shape and world size, so all state of a parameter shares it, whatever its data type. An array of
  one bit per element is bytes in a row; a chunk has the bytes of the elements' chunk.
- An array that keeps more than two dimensions has rows of several. A row that is cut is cut along one of them, into equal
  parts of it with all later dimensions, so chunks keep the elements' order.
- In a checkpoint an array under 64 KiB is one shard, whatever the number of ranks (`grid_in_checkpoint`): a shard file takes
  8 KiB at least, so 512 bytes cut over 64 ranks would take half a megabyte in 32 files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..errors import BudgetError, UsageError

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

FLOAT8 = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""Data types that Zarr has no name for, and safetensors' names. Arrays of them are "uint8", with the type in the attributes."""

SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    **FLOAT8,
}
"""Zarr's and numpy's name of each data type that is stored -> safetensors'."""

SUFFIX = ".safetensors"
STEM = "model"
"""First part of the names of a model's files, as `from_pretrained` looks for them."""
ADAPTER_STEM = "adapter_model"
STEMS_OF_ONE_FILE = (ADAPTER_STEM, "pytorch_lora_weights")
STEMS = (STEM, "diffusion_pytorch_model", *STEMS_OF_ONE_FILE)
"""The file names that transformers, diffusers and PEFT look for, in this order."""
STEM_KEY = "weights_stem"
"""Key of a record's state: the one of `STEMS` that the weights' files had."""

MAX_NAME = 4096
"""Maximum number of characters in an array's name."""
FLOATING = ("float16", "bfloat16", "float32", "float64")

ALIGN_NUMEL = 16
MIN_CHUNK_NUMEL = 64 * 1024 // 4
MAX_CHUNK_NUMEL = 1024 * 1024 // 4
MAX_CUT_CHUNK_NUMEL = 4 * MAX_CHUNK_NUMEL
"""Most elements of a chunk of rows that another library cut."""
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


@lru_cache(maxsize=64)
def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return the little-endian numpy data type called `name` ("bfloat16" is ml_dtypes').

    Raises ValueError for a name that the format does not store.
    """
    if name not in SAFETENSORS_DTYPES:
        raise ValueError(f"data type {name!r} cannot be stored; expected one of {', '.join(SAFETENSORS_DTYPES)}")
    return np.dtype(getattr(ml_dtypes, name, name)).newbyteorder("<")


class Shaped:
    """Anything with a shape and a data type, by its Zarr name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @cached_property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return numpy_dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, without padding."""
        return self.numel * self.itemsize


@dataclass(frozen=True, kw_only=True)
class ArraySpec(Shaped):
    """One named global tensor."""

    name: str
    """Group and fully qualified name, as `model/transformer.h.0.mlp.c_fc.weight`."""
    shape: tuple[int, ...]
    """True shape of the tensor; `()` for a scalar."""
    dtype: str
    """Data type by its Zarr name, as `float32` or `bfloat16`."""
    aliases: tuple[str, ...] = ()
    """Other fully qualified names of the same tensor (tied parameters), without the group."""
    keeps_shape: bool = False
    """Whether it is stored in its own shape, even if that has no dimensions or more than two."""
    dims: tuple[str, ...] = ()
    """Names of the dimensions; empty if they have none."""

    def __post_init__(self) -> None:
        numpy_dtype(self.dtype)
        group, slash, fqn = self.name.partition("/")
        if not group or (slash and not fqn):
            raise ValueError(f"array name {self.name!r:.200}: expected `group/name` or a name alone")
        if len(self.name) > MAX_NAME:
            raise ValueError(f"array name {self.name[:100]!r}... has {len(self.name)} characters, at most {MAX_NAME}")
        if any(n < 0 for n in self.shape):
            raise ValueError(f"array {self.name!r}: shape {self.shape} has a negative extent")
        if self.dims and len(self.dims) != len(self.stored_shape):
            raise ValueError(f"array {self.name!r}: {len(self.dims)} names for the dimensions {self.stored_shape}")

    @cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape on disk: its own with `keeps_shape`, else `stored_shape`'s."""
        return self.shape if self.keeps_shape else stored_shape(self.shape)

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row; the first dimension of the stored shape counts the rows."""
        return self.stored_shape[1:]

    @property
    def rows(self) -> int:
        """Number of rows of the stored shape; 1 for a scalar."""
        return self.stored_shape[0] if self.stored_shape else 1

    @property
    def row_numel(self) -> int:
        """Elements in a row: 1 for 1-D arrays; 0 if another extent is 0."""
        return math.prod(self.row_shape)


def empty_array(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return memory for values of the array `name`; raises BudgetError if there is too little."""
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:
        nbytes = math.prod(shape) * dtype.itemsize
        raise BudgetError(
            f"array {name!r}: no memory for {nbytes} bytes, {dtype} {list(shape)}; read a part of it"
        ) from error


def stored_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape on disk of an array: 0-d is `[1]`, 1-D and 2-D are as they are, more dims `[prod(d0..dn-2), d_last]`."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 2 else shape or (1,)


def model_array(name: str) -> str:
    """Return the array of a parameter's weights in their best precision: the fp32 master if there is one."""
    return f"model/{name}"


def optimizer_array(slot: str, name: str) -> str:
    """Return the array of the optimizer's state of a parameter, such as slot "exp_avg"."""
    return f"optimizer/{slot}/{name}"


def buffer_array(name: str) -> str:
    """Return the array of a module's buffer."""
    return f"buffer/{name}"


def client_array(name: str) -> str:
    """Return the array of a tensor in the client's state."""
    return f"client/{name}"


@dataclass(frozen=True)
class Grid:
    """How an array of `rows x row_numel` elements is cut. See [Note: the grid]."""

    rows: int
    row_numel: int
    shard_rows: int
    chunk_rows: int
    chunk_cols: int

    @cached_property
    def shard_numel(self) -> int:
        """Elements of a shard, padding included."""
        return self.shard_rows * self.row_numel

    @cached_property
    def chunk_numel(self) -> int:
        """Elements of an inner chunk, padding included."""
        return self.chunk_rows * self.chunk_cols

    @cached_property
    def chunks_per_row(self) -> int:
        """Inner chunks side by side in a row; more than 1 only if rows are long."""
        return self.row_numel // self.chunk_cols if self.chunk_cols else 1

    @cached_property
    def chunks_per_shard(self) -> int:
        """Inner chunks of a shard, in row-major order."""
        return self.shard_rows // self.chunk_rows * self.chunks_per_row

    @cached_property
    def num_shards(self) -> int:
        """Shards with at least one row; at most the world size."""
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
        """Return how many leading chunks of the shard have at least one element; the others are marked missing."""
        first, stop = self.shard_range(shard)
        return -(-(stop - first) // self.chunk_rows) * self.chunks_per_row

    def joined(self, count: int) -> Grid:
        """Return the grid of the same chunks whose shards are `count` of this one's, but no more than the array has: one
        rank has the shards of `count` ranks."""
        return replace(self, shard_rows=min(count, max(1, self.num_shards)) * self.shard_rows)


@dataclass(frozen=True)
class ChunkRange:
    """Global flat elements `[first, stop)`, all of shard `shard`, and its chunks `[first_chunk, stop_chunk)` with them."""

    shard: int
    first: int
    stop: int
    first_chunk: int
    stop_chunk: int


@dataclass(frozen=True)
class LocalShard:
    """The shard of an array that this rank has."""

    spec: ArraySpec
    grid: Grid
    shard: int

    def __post_init__(self) -> None:
        spec, grid = self.spec, self.grid
        if (grid.rows, grid.row_numel) != (spec.rows, spec.row_numel) or self.shard < 0:
            raise UsageError(
                f"array {spec.name!r} has {spec.rows} rows of {spec.row_numel} elements, got shard {self.shard} of a grid "
                f"of {grid.rows} rows of {grid.row_numel}"
            )

    @property
    def base(self) -> int:
        """Global flat element where the shard begins."""
        return self.shard * self.grid.shard_numel

    @cached_property
    def valid_numel(self) -> int:
        """Elements that are not padding."""
        return self.grid.shard_valid_numel(self.shard)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements that are not padding."""
        return self.valid_numel * self.spec.itemsize

    def chunk_range(self, chunk: int, num_chunks: int = 1) -> tuple[int, int]:
        """Return the local flat elements `[first, stop)` of `num_chunks` from chunk number `chunk` on, padding left out."""
        first, numel = chunk * self.grid.chunk_numel, num_chunks * self.grid.chunk_numel
        return min(first, self.valid_numel), min(first + numel, self.valid_numel)


@lru_cache(maxsize=8192)
def make_grid(stored_shape: tuple[int, ...], world_size: int) -> Grid:
    """Return the grid of an array of `stored_shape` over `world_size` ranks. See [Note: the grid]."""
    if world_size < 1:
        raise ValueError(f"world size must be at least 1, got {world_size}")
    if not stored_shape:
        return Grid(1, 1, 1, 1, 1)
    rows, *row_shape = stored_shape
    row_numel = math.prod(row_shape)
    if rows == 0 or row_numel == 0:
        return Grid(rows, row_numel, 1, 1, max(row_numel, 1))
    cols = _chunk_cols(row_numel) if len(row_shape) < 2 else _chunk_cols_within(tuple(row_shape))
    if cols < row_numel:
        return Grid(rows, row_numel, -(-rows // world_size), 1, cols)
    align = ALIGN_NUMEL // math.gcd(ALIGN_NUMEL, cols)
    min_rows = round_up(-(-rows // world_size), align)
    shard_rows, chunk_rows = _chunk_rows(min_rows, row_numel, align, rows * row_numel)
    return Grid(rows, row_numel, shard_rows, chunk_rows, cols)


def grid_of_rows(stored_shape: tuple[int, ...], shard_rows: int) -> Grid | None:
    """Return the grid of an array whose ranks have `shard_rows` rows each and the last one the remainder, as FSDP2 cuts it.

    A store that cuts the state of such a parameter alike has files that a checkpoint can use unchanged. Chunks are of a
    useful size and end at aligned addresses; None if that is impossible.
    """
    rows, row_numel = stored_shape[0], math.prod(stored_shape[1:])
    root = math.isqrt(shard_rows)
    small_divisors = [d for d in range(1, root + 1) if shard_rows % d == 0]
    candidates = [
        d
        for d in (*small_divisors, *(shard_rows // d for d in small_divisors))
        if (d * row_numel % ALIGN_NUMEL == 0 and MIN_CHUNK_NUMEL <= d * row_numel <= MAX_CUT_CHUNK_NUMEL)
        or (d == shard_rows and d * row_numel <= MAX_CHUNK_NUMEL)
    ]
    if not candidates:
        return None
    target = min(max(shard_rows * row_numel // CHUNKS_PER_SHARD, MIN_CHUNK_NUMEL), MAX_CHUNK_NUMEL)
    chunk_rows = min(candidates, key=lambda d: abs(math.log(d * row_numel / target)))
    return Grid(rows, row_numel, shard_rows, chunk_rows, row_numel)


def grid_in_checkpoint(stored_shape: tuple[int, ...], itemsize: int, grid: Grid) -> Grid:
    """Return how an array is cut in a checkpoint whose ranks have it on `grid`: small arrays are one shard, rank 0's."""
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


def _chunk_cols_within(row_shape: tuple[int, ...]) -> int:
    """Return `_chunk_cols` of a row of several dimensions: whole parts of one of them, with all later ones."""
    if math.prod(row_shape) <= MAX_CHUNK_NUMEL:
        return math.prod(row_shape)
    candidates = [math.prod(row_shape)]
    for i, size in enumerate(row_shape):
        inner = math.prod(row_shape[i + 1 :])
        small_divisors = range(1, math.isqrt(size) + 1)
        candidates += [part * inner for d in small_divisors if size % d == 0 for part in (d, size // d)]
    valid = [cols for cols in candidates if MIN_CHUNK_NUMEL <= cols <= MAX_CHUNK_NUMEL]
    aligned = [cols for cols in valid if cols % ALIGN_NUMEL == 0]
    return max(aligned or valid) if valid else min(cols for cols in candidates if cols >= MIN_CHUNK_NUMEL)


def shape_of_cols(row_shape: tuple[int, ...], cols: int) -> tuple[int, ...]:
    """Return the shape of `cols` consecutive elements of a row of shape `row_shape`."""
    shape: list[int] = []
    for size in reversed(row_shape):
        part = min(cols, max(size, 1))
        shape.append(part)
        cols //= part
    return tuple(reversed(shape))


def _chunk_rows(min_rows: int, row_numel: int, align: int, numel: int) -> tuple[int, int]:
    """Return (shard rows, chunk rows): of the chunks near the target size, the one that pads least."""
    shard_numel = min_rows * row_numel
    target = min(max(shard_numel // CHUNKS_PER_SHARD, MIN_CHUNK_NUMEL), MAX_CHUNK_NUMEL)
    target = min(target, max(numel // CHUNKS_PER_ARRAY, FINE_CHUNK_NUMEL))
    if shard_numel <= target:
        return min_rows, min_rows
    limit = max(MAX_CHUNK_NUMEL // row_numel // align * align, align)
    min_chunk_rows = min(round_up(-(-max(MIN_CHUNK_NUMEL, target * 2 // 3) // row_numel), align), limit)

    def cost(chunk_rows: int) -> tuple[int, int]:
        count = -(-min_rows // chunk_rows)
        padding = (count * chunk_rows - min_rows) * row_numel * _FP32_BYTES
        used = chunk_rows * row_numel * _FP32_BYTES + _CRC_BYTES
        unused = count * (round_up(used, _BLOCK_BYTES) - used)
        return 10 * padding + unused, abs(chunk_rows * row_numel - target)

    def best(largest: int) -> int:
        max_chunk_rows = min(max(largest // row_numel // align * align, min_chunk_rows), limit)
        step = round_up(-(-(max_chunk_rows - min_chunk_rows + 1) // _CANDIDATES), align)
        return min((min(rows, min_rows) for rows in range(min_chunk_rows, max_chunk_rows + 1, step)), key=cost)

    chunk_rows = best(target * 5 // 4)
    # A shard of few chunks has few divisors: look further then.
    if shard_numel <= 4 * target or round_up(min_rows, chunk_rows) - min_rows > max(min_rows // 5, align):
        chunk_rows = best(2 * target)
    return round_up(min_rows, chunk_rows), chunk_rows


def plan_reads(grid: Grid, first: int, stop: int) -> Iterator[ChunkRange]:
    """Yield which chunks have the global flat elements `[first, stop)` of an array: one range a shard, in order."""
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
