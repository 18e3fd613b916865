"""The bytes of arrays, shards and chunks. Pure: no I/O, no threads, no torch.

The names below are public, for code built on the store; only the store's own packages import modules of this folder.
"""

from .arrays import (
    ALIGN_NUMEL,
    FLOAT8,
    FLOATING,
    STEM,
    SUFFIX,
    Array,
    ArraySpec,
    Bytes,
    Grid,
    buffer_array,
    client_array,
    grid_in_checkpoint,
    grid_of_rows,
    make_grid,
    model_array,
    numpy_dtype,
    optimizer_array,
    plan_reads,
    round_up,
    stored_shape,
)
from .boxes import Box, flat_ranges, gather, tiles
from .shardfile import ShardLayout, layout_of

__all__ = [
    "ALIGN_NUMEL", "FLOAT8", "FLOATING", "STEM", "SUFFIX", "Array", "ArraySpec", "Box", "Bytes", "Grid",
    "ShardLayout", "buffer_array", "client_array", "flat_ranges", "gather", "grid_in_checkpoint",
    "grid_of_rows", "layout_of", "make_grid", "model_array", "numpy_dtype", "optimizer_array",
    "plan_reads", "round_up", "stored_shape", "tiles",
]  # fmt: skip
