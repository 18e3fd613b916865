"""A record for each parameter of an offloaded optimizer: this rank's part of it, whatever mesh it is cut over.

[Note: the local part]
An element-wise update needs no other rank. So a rank's part of a parameter, all of it or a DTensor's local part, is a
tensor of its own here, and so is its state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from zstore.engine.params.record import ParameterRecord
from zstore.errors import UsageError
from zstore.format import ArraySpec, make_grid, stored_shape
from zstore.io.tensors import dtype_name

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(eq=False, kw_only=True)
class LocalRecord(ParameterRecord):
    """This rank's part of one parameter; `full` is that part. See [Note: the local part]."""

    offsets: tuple[int, ...]
    """Offsets of the local part in the parameter."""
    local_shape: torch.Size

    def note_version(self) -> None:
        """Note the local part's present version: its values are those that this optimizer wrote."""
        self.version = local_part(self.parameter)._version

    @property
    def owned_numel(self) -> int:
        return self.full.numel()

    def owned(self) -> torch.Tensor:
        return self.full

    def spec(self, group: str, dtype: torch.dtype) -> ArraySpec:
        return ArraySpec(name=f"{group}/{self.name}", shape=tuple(self.local_shape), dtype=dtype_name(dtype))


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
    if not local.is_contiguous():
        raise UsageError(
            f"parameter {name!r} has the strides {local.stride()}: make it contiguous before the optimizer, "
            "parameter.data = parameter.data.contiguous()"
        )
    grid = make_grid(stored_shape(tuple(local.shape)), 1)
    return LocalRecord(
        name=name,
        aliases=(),
        parameter=parameter,  # type: ignore[arg-type]
        grid=grid,
        state_grid=grid,
        state_shard=0,
        world_size=1,
        group=group,
        full=local.data.view(-1),  # writing to it does not count as a change of the parameter
        offsets=_offsets(parameter),
        local_shape=local.shape,
    )


def _offsets(parameter: torch.Tensor) -> tuple[int, ...]:
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.dim()
    _, found = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(found)


def rows_of(record: LocalRecord, gradient: torch.Tensor | None) -> torch.Tensor:
    """Return this rank's part of a gradient, 1-D in the order of the parameter's memory."""
    if gradient is None or gradient.layout is not torch.strided:
        raise UsageError(f"parameter {record.name!r} has a sparse gradient, which offloaded optimizers do not take")
    parameter: torch.Tensor = record.parameter
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    local = local_part(gradient)
    if local.shape != record.local_shape:
        raise UsageError(
            f"parameter {record.name!r}: the rank has {list(record.local_shape)} of it, but {list(local.shape)} of the gradient"
        )
    return local.reshape(-1)
