"""This rank's part of each parameter of an offloaded optimizer, on any mesh; and state tensors whose values are in the store:
read when the values are used, written when they are copied to.

[Note: the local part]
An element-wise update needs no other rank. So a rank's part of a parameter (all of it, or a DTensor's local part) is treated
as a separate tensor with its own state.

[Note: a stored tensor]
`state_dict()` returns these, so that it takes no memory, and torch.distributed.checkpoint saves and loads them one tensor at
a time.
read    computing with one, copying it or pickling it reads the current values into a new plain tensor.
write   `copy_` and other in-place changes go to the store, also for a part (`narrow`, a slice). Any other view is a copy.
It is valid until the optimizer is closed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_map

from zstore.engine.optim.state import OptimizerState
from zstore.engine.params.record import ParameterRecord
from zstore.errors import UsageError
from zstore.format import ArraySpec, Box, make_grid, model_array, stored_shape
from zstore.io.memory import as_torch, dtype_name

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_aten: Any = torch.ops.aten
_ALIAS_OPS = (_aten.detach.default, _aten.alias.default)


@dataclass(eq=False, kw_only=True)
class LocalRecord(ParameterRecord):
    """This rank's part of a parameter; `full` is that part. See [Note: the local part]."""

    offsets: tuple[int, ...]
    """Offsets of the local part in the parameter."""
    local_shape: torch.Size

    def note_version(self) -> None:
        """Record the local part's version after a write by this optimizer."""
        self.version = local_part(self.parameter)._version

    @property
    def owned_numel(self) -> int:
        return self.full.numel()

    def owned(self) -> torch.Tensor:
        return self.full

    def spec(self, group: str, dtype: torch.dtype) -> ArraySpec:
        return ArraySpec(name=f"{group}/{self.name}", shape=tuple(self.local_shape), dtype=dtype_name(dtype))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter or a gradient, sharing its memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        local: Any = tensor.to_local()
    # The pending result of a collective has another class.
    part: torch.Tensor = local.wait() if hasattr(local, "wait") else local
    return part


def make_local_record(name: str, parameter: torch.Tensor, *, group: int) -> LocalRecord:
    """Return the record of `parameter`. Raises UsageError if it cannot be updated off the device."""
    if parameter.dtype not in DTYPES:
        raise UsageError(
            f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}; an offloaded optimizer updates float32, "
            "bfloat16 and float16: pass it to another optimizer"
        )
    if parameter.is_meta or parameter.layout is not torch.strided:
        raise UsageError(
            f"parameter {name!r} has no dense memory (it is on the meta device, or sparse): create the optimizer once "
            "the model is materialized"
        )
    local = local_part(parameter)
    if not local.is_contiguous():
        raise UsageError(
            f"parameter {name!r} has strides {local.stride()}: make it contiguous before creating the optimizer, by "
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
        full=local.data.view(-1),  # a write to it does not increment the parameter's version
        offsets=_offsets(parameter),
        local_shape=local.shape,
    )


def _offsets(parameter: torch.Tensor) -> tuple[int, ...]:
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.dim()
    _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(offsets)


def gradient_rows(record: LocalRecord, gradient: torch.Tensor | None) -> torch.Tensor:
    """Return this rank's part of a gradient, 1-D in the order of the parameter's memory."""
    if gradient is None or gradient.layout is not torch.strided:
        raise UsageError(f"parameter {record.name!r} has a sparse gradient, which offloaded optimizers do not support")
    parameter: torch.Tensor = record.parameter
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    local = local_part(gradient)
    if local.shape != record.local_shape:
        raise UsageError(
            f"parameter {record.name!r}: this rank's part is {list(record.local_shape)}, its gradient {list(local.shape)}"
        )
    return local.reshape(-1)


class StoredTensor(torch.Tensor):
    """A tensor whose values are in the store. See [Note: a stored tensor]."""

    array: str
    """Name of an fp32 array with one value per element of a parameter's local part."""
    record: LocalRecord
    """The parameter."""
    state: OptimizerState
    box: Box
    """The part of the array."""

    def __new__(cls, array: str, record: LocalRecord, state: OptimizerState, box: Box | None = None) -> Self:
        """Return a tensor without memory for `box` of an array, by default all of it."""
        box = Box.whole(tuple(record.local_shape)) if box is None else box
        make: Any = torch.Tensor._make_wrapper_subclass
        tensor: Self = make(cls, box.sizes, dtype=torch.float32, device="cpu", requires_grad=False)
        tensor.array, tensor.record, tensor.state, tensor.box = array, record, state, box
        return tensor

    def __init__(self, array: str, record: LocalRecord, state: OptimizerState, box: Box | None = None) -> None:
        super().__init__()

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def read(self) -> torch.Tensor:
        """Return the values in a new plain tensor in host memory."""
        box = self.box
        flat = torch.empty(math.prod(box.shape))
        if flat.numel():
            with self.state.open_pass([[self.array]], "read") as tiles:
                for tile in tiles:
                    self.state.transfers.copy_into(flat[tile.first : tile.stop], as_torch(tile.views[0]))
        values = flat.view(box.shape)
        if box.sizes == box.shape:
            return values
        return values[tuple(slice(i, i + size) for i, size in zip(box.offsets, box.sizes, strict=True))].clone()

    def write(self, values: torch.Tensor) -> None:
        """Set the values from a tensor of any floating-point type."""
        if self.array == model_array(self.record.name):  # the parameter may now differ from its master
            self.record.version = -1
        is_whole, flat = self.box.sizes == self.box.shape, values.reshape(-1)
        if not flat.numel():
            return
        with self.state.open_pass([[self.array]], "fill" if is_whole else "update") as tiles:
            for tile in tiles:
                view = as_torch(tile.views[0])
                if is_whole:
                    self.state.transfers.copy_into(view, flat[tile.first : tile.stop])
                    continue
                for offset, box_offset, numel in self.box.overlap(tile.first, tile.stop):
                    target = view[offset - tile.first : offset - tile.first + numel]
                    self.state.transfers.copy_into(target, flat[box_offset : box_offset + numel])

    def _part(self, box: Box) -> StoredTensor:
        return StoredTensor(self.array, self.record, self.state, box)

    def _slice(self, dim: int = 0, start: int | None = None, end: int | None = None) -> StoredTensor:
        first, stop, _ = slice(start, end).indices(self.shape[dim])
        offsets, sizes = list(self.box.offsets), list(self.box.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + first, max(0, stop - first)
        return self._part(Box(self.box.shape, tuple(offsets), tuple(sizes)))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, StoredTensor):
            if func in _ALIAS_OPS or (func is _aten.view.default and tuple(args[1]) == tuple(first.shape)):
                return first._part(first.box)
            if func is _aten.is_pinned.default:
                return False
            if func is _aten.slice.Tensor and (len(args) < 5 or args[4] == 1):
                return first._slice(*args[1:4])
            if func is _aten.copy_.default:
                first.write(_materialized(args[1]).expand(first.shape))
                return first
        return _run_on_copies(func, args, dict(kwargs or {}))

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        record = self.record
        if not self.numel() and record.shape.numel():
            return []  # other ranks have the tensor's elements
        offsets = torch.Size(record.offsets)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, self.shape),
            properties=TensorProperties(dtype=self.dtype),
            size=record.shape,
        )
        return [WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(self.record.offsets), self.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> StoredTensor:
        return self

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values."""
        return self.read().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values."""
        return self.read().tolist()

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a copy of the values, as torch's `to` does."""
        return self.read().to(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.read()
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.read()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredTensor({self.array!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _materialized(value: Any) -> Any:
    return value.read() if isinstance(value, StoredTensor) else value


def _run_on_copies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on copies of the values, and write back those it changed."""
    copies: dict[int, tuple[StoredTensor, torch.Tensor]] = {}

    def copy_of(value: Any) -> Any:
        if not isinstance(value, StoredTensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = (value, value.read())
        return copies[id(value)][1]

    result = func(*tree_map(copy_of, args), **tree_map(copy_of, kwargs))
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = named.get(argument.name)
            for value in written if isinstance(written, list | tuple) else [written]:
                if isinstance(value, StoredTensor):
                    value.write(copies[id(value)][1])
    originals = {id(copy): value for value, copy in copies.values()}
    return tree_map(lambda value: originals.get(id(value), value), result)
