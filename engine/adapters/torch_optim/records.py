"""A record for each parameter of an offloaded optimizer: this rank's part of it, whatever mesh it is cut over.

[Note: the local part]
An element-wise update needs no other rank. So a rank's part of a parameter, all of it or a DTensor's local part, is a
tensor of its own here, and so is its state. If the part is rows that are cut alike over the ranks, as FSDP2 cuts them,
the arrays of the state are the whole parameter's, of which this rank has its shard: then a shard file is one of a checkpoint
too. Otherwise (columns, meshes of two dims) they are of the part alone, and so is state in blocks, which are counted from
the part's first element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from zstore.engine.params.record import ParameterRecord
from zstore.errors import UsageError
from zstore.format import ArraySpec, Grid, grid_of_rows, make_grid, stored_shape
from zstore.io.tensors import dtype_name

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(eq=False, kw_only=True)
class LocalRecord(ParameterRecord):
    """This rank's part of one parameter; `full` is that part. See [Note: the local part]."""

    array_shape: tuple[int, ...]
    """Shape of the state's arrays: the whole parameter's, or the local part's."""
    is_of_whole: bool
    """Whether the arrays are the whole parameter's, in its order."""
    offsets: tuple[int, ...]
    """Offsets of the local part in the parameter."""
    local_shape: torch.Size
    strides: tuple[int, ...]
    """Strides of the local part, which is dense: `full` has its elements in the order of its memory."""

    def note_version(self) -> None:
        """Note the local part's present version: its values are those that this optimizer wrote."""
        self.version = local_part(self.parameter)._version

    @property
    def is_contiguous(self) -> bool:
        """Whether the memory's order is that of the elements."""
        return self.strides == _contiguous(self.local_shape)

    @property
    def owned_numel(self) -> int:
        return self.full.numel()

    def owned(self) -> torch.Tensor:
        return self.full

    def spec(self, group: str, dtype: torch.dtype) -> ArraySpec:
        return ArraySpec(name=f"{group}/{self.name}", shape=self.array_shape, dtype=dtype_name(dtype))

    def in_shape(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of `flat`, 1-D in the order of the memory, in the shape of the local part."""
        return flat.as_strided(self.local_shape, self.strides) if flat.numel() else flat.view(self.local_shape)

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`, of the local part's shape, 1-D in the order of its memory: a view of them if possible."""
        if not values.numel():
            return values.reshape(-1)
        if values.stride() != self.strides:
            laid_out = torch.empty_strided(self.local_shape, self.strides, dtype=values.dtype, device=values.device)
            values = laid_out.copy_(values)
        return values.as_strided((values.numel(),), (1,))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter or a gradient, over its memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        local: Any = tensor.to_local()
    # The result of a collective that nobody waited for yet is of another class.
    found: torch.Tensor = local.wait() if hasattr(local, "wait") else local
    return found


def make_local_record(name: str, parameter: torch.Tensor, *, group: int) -> LocalRecord:
    """Return the record of `parameter`. Raises UsageError for one that cannot be updated off the device."""
    if parameter.dtype not in DTYPES:
        raise UsageError(
            f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}; an offloaded optimizer updates float32, "
            "bfloat16 and float16: give it to another optimizer"
        )
    if parameter.is_meta or parameter.layout is not torch.strided:
        raise UsageError(
            f"parameter {name!r} has no dense memory (it is on the meta device, or sparse): make the optimizer once the "
            "model has its values"
        )
    local = local_part(parameter)
    shape, strides = local.shape, tuple(local.stride()) if local.numel() else _contiguous(local.shape)
    # torch keeps strides whose elements fill their memory, each place once, in whatever order of the dims.
    if local.numel() and torch.empty_like(local, device="meta").stride() != strides:
        raise UsageError(
            f"parameter {name!r} is a view of strides {strides} into other memory: make it contiguous before the optimizer"
        )
    rows = _rows_of_ranks(parameter, local) if strides == _contiguous(shape) else None
    array_shape: tuple[int, ...]
    if rows is not None:
        array_shape, (grid, shard) = tuple(parameter.shape), rows
    else:
        array_shape, grid, shard = tuple(shape), make_grid(stored_shape(tuple(shape)), 1), 0
    return LocalRecord(
        name=name,
        aliases=(),
        parameter=parameter,  # type: ignore[arg-type]
        grid=grid,
        state_grid=grid,
        state_shard=shard,
        world_size=1,
        group=group,
        full=memory_of(local),
        array_shape=array_shape,
        is_of_whole=rows is not None,
        offsets=_offsets(parameter),
        local_shape=shape,
        strides=strides,
    )


def _offsets(parameter: torch.Tensor) -> tuple[int, ...]:
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.dim()
    _, found = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(found)


def _rows_of_ranks(parameter: torch.Tensor, local: torch.Tensor) -> tuple[Grid, int] | None:
    """Return a grid of the whole parameter of which the local part is a shard, and its number; None if there is none."""
    stored = stored_shape(tuple(parameter.shape))
    if not isinstance(parameter, DTensor):
        return make_grid(stored, 1), 0
    cut = [number for number, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate)]
    if not cut:
        return make_grid(stored, 1), 0
    placement = parameter.placements[cut[0]]
    coordinate = parameter.device_mesh.get_coordinate()
    if (
        len(cut) > 1
        or type(placement) is not Shard
        or placement.dim != 0
        or coordinate is None
        or not parameter.numel()
    ):
        return None
    extent, shard = parameter.shape[0], coordinate[cut[0]]
    each = -(-extent // parameter.device_mesh.size(cut[0]))
    if local.shape[0] != max(0, min(extent, (shard + 1) * each) - shard * each):
        return None
    grid = grid_of_rows(stored, each * (stored[0] // extent))
    return None if grid is None else (grid, shard)


def memory_of(local: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's memory, 1-D; writing to it does not count as a change of the tensor."""
    return local.data.as_strided((local.numel(),), (1,)) if local.numel() else local.data.reshape(-1)


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
