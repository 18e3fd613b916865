"""Shapes of a transformer of a trillion parameters, and what its checkpoint is made of. Pure arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from zstore.format.arrays import ArraySpec
from zstore.format.partition import ChunkRange, Grid, grid_in_checkpoint, make_grid, plan_reads
from zstore.format.shardfile import layout_of

GROUPS = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Trillion:
    """A GPT: 12 x hidden^2 parameters a layer."""

    layers: int = 128
    hidden: int = 25600
    vocab: int = 50304

    def specs(self) -> dict[str, ArraySpec]:
        """Return the arrays of its training state: an fp32 master and Adam's two moments of each parameter."""
        specs: dict[str, ArraySpec] = {}
        for group in GROUPS:
            for name, shape in self._shapes().items():
                full = f"{group}/{name}"
                specs[full] = ArraySpec(name=full, shape=shape, dtype="float32")
        return specs

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(shape) for shape in self._shapes().values())

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        h = self.hidden
        layer = {
            "ln_1.weight": (h,),
            "ln_1.bias": (h,),
            "attn.c_attn.weight": (3 * h, h),
            "attn.c_attn.bias": (3 * h,),
            "attn.c_proj.weight": (h, h),
            "attn.c_proj.bias": (h,),
            "ln_2.weight": (h,),
            "ln_2.bias": (h,),
            "mlp.c_fc.weight": (4 * h, h),
            "mlp.c_fc.bias": (4 * h,),
            "mlp.c_proj.weight": (h, 4 * h),
            "mlp.c_proj.bias": (h,),
        }
        ends = {
            "transformer.wte.weight": (self.vocab, h),
            "transformer.ln_f.weight": (h,),
            "transformer.ln_f.bias": (h,),
        }
        layers = {f"transformer.h.{i}.{name}": shape for i in range(self.layers) for name, shape in layer.items()}
        return {**ends, **layers}


def owned_grids(specs: Mapping[str, ArraySpec], num_ranks: int) -> dict[str, Grid]:
    """Return how so many ranks own the rows of each array."""
    return {name: make_grid(spec.stored_shape, num_ranks) for name, spec in specs.items()}


def stored_grids(specs: Mapping[str, ArraySpec], num_ranks: int) -> dict[str, Grid]:
    """Return how each array is cut in their checkpoint."""
    owned = owned_grids(specs, num_ranks)
    return {name: grid_in_checkpoint(spec.stored_shape, spec.itemsize, owned[name]) for name, spec in specs.items()}


def checkpoint_bytes(specs: Mapping[str, ArraySpec], num_ranks: int) -> dict[str, float]:
    """Return the shard files of a checkpoint, their bytes over those of the state, and what rank 0, which has most, owns
    over the mean."""
    files = file_bytes = 0
    for name, grid in stored_grids(specs, num_ranks).items():
        last = grid.num_shards - 1
        sizes = [layout_of(grid, shard, specs[name].dtype).file_bytes for shard in (0, last)]
        files += grid.num_shards
        file_bytes += last * sizes[0] + sizes[1]
    owned = owned_grids(specs, num_ranks)
    largest = sum(grid.shard_valid_numel(0) * specs[name].itemsize for name, grid in owned.items())
    state = sum(spec.nbytes for spec in specs.values())
    over = {"over_size": file_bytes / state, "largest_share": largest * num_ranks / state}
    return {"files": files, "file_bytes": file_bytes, **over}


def needed_of(stored: Grid, owned: Grid, rank: int) -> Iterator[ChunkRange]:
    """Yield what a load reads of an array, cut as `stored`, for the rows that `rank` owns."""
    first = rank * owned.shard_numel
    return plan_reads(stored, first, first + owned.shard_valid_numel(rank))


def over_read(specs: Mapping[str, ArraySpec], saved_by: int, loaded_by: int, ranks: Iterable[int] = ()) -> float:
    """Return what ranks (all by default) read of a checkpoint of other ranks, over what they need; no checksums counted."""
    needed = read = 0
    stored, owned = stored_grids(specs, saved_by), owned_grids(specs, loaded_by)
    for (old, new), count in Counter((stored[name], owned[name]) for name in specs).items():
        for rank in ranks or range(new.num_shards):
            chunks = sum(each.stop_chunk - each.first_chunk for each in needed_of(old, new, rank))
            needed += count * new.shard_valid_numel(rank)
            read += count * chunks * old.chunk_numel
    return read / needed
