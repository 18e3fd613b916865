"""A record for each parameter of an offloaded optimizer: this rank's part of it, whatever mesh it is cut over.

[Note: the local part]
An element-wise update needs no other rank. So what a rank has of a parameter, all of it or a DTensor's local part, is a
tensor of its own here, and its state has that shape. Nothing knows of meshes but what shows the state to others
(`local_state`), which lays it out as the parameter is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zstore.engine.params.record import ParameterRecord
from zstore.errors import UsageError
from zstore.format.arrays import ArraySpec, model_array
from zstore.format.partition import make_grid
from zstore.tensors import dtype_name

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(eq=False, kw_only=True)
class LocalRecord(ParameterRecord):
    """What is known of this rank's part of one parameter; `full` and `spec` are of that part. See [Note: the local part]."""

    local_shape: torch.Size
    strides: tuple[int, ...]
    """Of the local part, which is dense: `full` has its elements in the order of its memory."""
    seen_version: int | None = None
    """Version of the local part when this optimizer wrote it last; None: it may have other values than the master."""

    def __post_init__(self) -> None:
        self.address, self.shape = self.full.data_ptr(), self.parameter.shape

    @property
    def is_contiguous(self) -> bool:
        """Whether the memory's order is that of the elements."""
        return self.strides == _contiguous(self.local_shape)

    def spec(self, group: str, dtype: torch.dtype) -> ArraySpec:
        """See ParameterRecord; of the local part."""
        return ArraySpec(name=f"{group}/{self.name}", shape=tuple(self.local_shape), dtype=dtype_name(dtype))

    def in_shape(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of `flat`, 1-D in the order of the memory, in the shape of the local part."""
        return flat.as_strided(self.local_shape, self.strides) if flat.numel() else flat.view(self.local_shape)

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`, of the local part's shape, 1-D in the order of its memory: over theirs where that may be."""
        if not values.numel():
            return values.reshape(-1)
        if values.stride() != self.strides:
            laid_out = torch.empty_strided(self.local_shape, self.strides, dtype=values.dtype, device=values.device)
            values = laid_out.copy_(values)
        return values.as_strided((values.numel(),), (1,))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a parameter or a gradient, over its memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        local: Any = tensor.to_local()
    return local.wait() if hasattr(local, "wait") else local  # of a collective that nobody waited for yet


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
    shape, strides = local.shape, tuple(local.stride())
    if local.numel() and not _is_dense(shape, strides):
        raise UsageError(
            f"parameter {name!r} is a view of strides {strides} into other memory: make it contiguous before the optimizer"
        )
    stored_shape = ArraySpec(name=model_array(name), shape=tuple(shape), dtype="float32").stored_shape
    grid = make_grid(stored_shape, 1)
    return LocalRecord(
        name=name,
        aliases=(),
        parameter=parameter,  # type: ignore[arg-type]
        grid=grid,
        state_grid=grid,
        state_shard=0,
        world_size=1,
        group=group,
        full=memory_of(local),
        local_shape=shape,
        strides=strides if local.numel() else _contiguous(shape),
        seen_version=local._version,
    )


def memory_of(local: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's memory, 1-D; writing to it does not count as a change of the tensor."""
    return local.data.as_strided((local.numel(),), (1,)) if local.numel() else local.data.reshape(-1)


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _is_dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Return whether the elements fill their memory, each place once, in whatever order of the dims."""
    step = 1
    for stride, extent in sorted((stride, extent) for stride, extent in zip(strides, shape, strict=True) if extent > 1):
        if stride != step:
            return False
        step *= extent
    return True
