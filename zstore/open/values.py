"""Programs' values, tensors of torch, arrays of numpy and numbers, as flat elements.

torch is imported only if somebody has a tensor, or wants one.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoint.names import array_path
from ..errors import UsageError
from ..format.arrays import Array, ArraySpec, numpy_dtype
from .ranks import HeldArray, Ranks

if TYPE_CHECKING:
    from torch import Tensor

    from ..store.tiers.base import View

Value = Any
"""A torch tensor, a numpy array, or a number."""


@dataclass(frozen=True)
class KnownArray:
    """The facts of an array that are known at once, whatever is still under way for it."""

    held: HeldArray
    is_torch: bool
    """Whether it was put as a tensor of torch, and is given back as one."""
    placements: tuple[Any, ...] = ()
    """Placements of a DTensor, if it was put as one and is given back as one."""

    @property
    def spec(self) -> ArraySpec:
        """Of the whole array."""
        return self.held.spec


class KnownArrays(MutableMapping[str, KnownArray]):
    """Arrays by name, with names that a checkpoint can have side by side: no array is in another's folder."""

    def __init__(self) -> None:
        self._arrays: dict[str, KnownArray] = {}
        self._names: dict[str, str] = {}
        """By folder in a checkpoint."""
        self._groups: Counter[str] = Counter()
        """How many arrays are in a group's folder, or in one below."""

    def __setitem__(self, name: str, array: KnownArray) -> None:
        """Raises UsageError for a name that no checkpoint can have, or not beside those that are there."""
        if name not in self._arrays:
            path = array_path(name)
            groups = _groups_of(path)
            outer = next(filter(self._names.__contains__, groups), None)
            if outer is not None or path in self._groups:
                inside = (other for folder, other in self._names.items() if folder.startswith(f"{path}/"))
                other = next(inside) if outer is None else self._names[outer]
                raise UsageError(
                    f"array {name!r} cannot be stored beside {other!r}: in a checkpoint one would be in the folder of the "
                    "other; rename one of them"
                )
            self._names[path] = name
            self._groups.update(groups)
        self._arrays[name] = array

    def __delitem__(self, name: str) -> None:
        del self._arrays[name]
        path = array_path(name)
        del self._names[path]
        for group in _groups_of(path):
            self._groups[group] -= 1
            if not self._groups[group]:
                del self._groups[group]

    def __getitem__(self, name: str) -> KnownArray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _groups_of(path: str) -> list[str]:
    return [path[:at] for at, letter in enumerate(path) if letter == "/"]


def entry_of(
    name: str, value: Value, ranks: Ranks, *, shape: Sequence[int] | None, dims: tuple[str, ...]
) -> tuple[KnownArray, Array]:
    """Return the entry of `value` in a store, and the elements that this rank has of it, 1-D.

    `shape` is that of the whole array, if `value` is this rank's rows of it. Raises UsageError if it cannot be stored.
    """
    data, is_torch = flatten(name, value)
    placements = _placements(name, value, ranks)
    whole = tuple(np.shape(value) if shape is None else shape)
    by_rows = shape is not None or any(placement.is_shard() for placement in placements)
    if shape is not None and (placements or not whole):
        raise UsageError(
            f"array {name!r}: shape={whole} is for a plain value that has this rank's rows of such an array"
        )
    held = ranks.hold(_spec(name, whole, data.dtype.name, dims), by_rows=by_rows)
    local = tuple(np.shape(value)) if shape is not None else None
    if (local is not None and local != held.shape) or data.size != held.numel:
        raise UsageError(
            f"array {name!r} of shape {whole}: rank {ranks.rank} of {ranks.world_size} has rows [{held.first}, {held.stop}), "
            f"so expected shape {held.shape}, got {local or data.shape}"
        )
    return KnownArray(held, is_torch, placements), data


def loaded_entry(stored: ArraySpec, former: KnownArray | None, ranks: Ranks, *, by_rows: bool) -> KnownArray:
    """Return the entry of a checkpoint's array in a store that has `former` under its name: as that, if it is alike;
    else by the rows of the ranks, unless it has none, or they fit no chunks."""
    if former is not None and (former.spec.shape, former.spec.dtype) == (stored.shape, stored.dtype):
        return former
    dims = stored.dims if len(stored.dims) == len(stored.shape) else ()
    spec = _spec(stored.name, stored.shape, stored.dtype, dims)
    held = ranks.hold(spec, by_rows=False)
    if by_rows and spec.shape:
        with contextlib.suppress(UsageError):
            held = ranks.hold(spec, by_rows=True)
    is_torch = "torch" in sys.modules
    if not (is_torch and held.by_rows and ranks.mesh is not None):
        return KnownArray(held, is_torch)
    from torch.distributed.tensor import Shard

    return KnownArray(held, is_torch, (Shard(0),))


def _placements(name: str, value: Value, ranks: Ranks) -> tuple[Any, ...]:
    """Return the placements of a DTensor; none for another value. Raises UsageError for one that the ranks cannot hold."""
    if not is_dtensor(value):
        return ()
    from torch.distributed.tensor import Replicate, Shard

    if value.device_mesh != ranks.mesh:
        raise UsageError(
            f"array {name!r} is a DTensor on {value.device_mesh}, the store is on {ranks.mesh}: open it with "
            "open_store(mesh=tensor.device_mesh), or put tensor.to_local()"
        )
    (placement,) = value.placements
    if type(placement) not in (Replicate, Shard) or not (placement.is_replicate() or placement.is_shard(0)):
        raise UsageError(
            f"array {name!r}: expected a DTensor placed as Shard(0) or Replicate(), got {placement}: put "
            "tensor.redistribute(placements=[Shard(0)])"
        )
    return tuple(value.placements)


def is_dtensor(value: Value) -> bool:
    """Return whether `value` is a DTensor of torch."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(value: Value) -> Value:
    """Return a DTensor's local part, once it is there; any other value as it is."""
    if not is_dtensor(value):
        return value
    local = value.detach().to_local()
    return local.wait() if hasattr(local, "wait") else local  # the result of a collective under way


def flatten(name: str, value: Value) -> tuple[Array, bool]:
    """Return a value's elements, 1-D, without a copy if possible, and whether it is a tensor of torch."""
    value = local_of(value)
    if is_tensor(value):
        from ..io.tensors import as_numpy, dtype_name, host_values

        dtype_name(value.dtype, name)
        return as_numpy(host_values(value)).reshape(-1), True
    array = np.asarray(value)
    try:
        dtype = numpy_dtype(array.dtype.name)
    except ValueError as error:
        raise UsageError(f"array {name!r}: {error}") from None
    return np.ascontiguousarray(array, dtype).reshape(-1), False


def is_tensor(value: Value) -> bool:
    """Return whether `value` is a tensor of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def flat_target(spec: ArraySpec, out: Value, shape: tuple[int, ...]) -> Array:
    """Return `out` as 1-D memory to read into."""
    out = local_of(out)
    if is_tensor(out):
        fits = out.device.type == "cpu" and out.is_contiguous() and not out.is_neg()
    else:
        fits = isinstance(out, np.ndarray) and out.flags.c_contiguous and out.flags.writeable
    flat = flatten(spec.name, out)[0] if fits else None
    if flat is None or tuple(out.shape) != shape or flat.dtype.name != spec.dtype:
        raise UsageError(
            f"array {spec.name!r}: expected contiguous, writable {spec.dtype} of shape {shape} in host memory as `out`, got "
            f"{type(out).__name__} of {getattr(out, 'dtype', '?')} and {tuple(np.shape(out))}"
        )
    return flat


def shaped(data: Array, shape: tuple[int, ...], is_torch: bool, device: Any = None) -> Array | Tensor:
    """Return flat elements in their shape: as numpy's, or as a tensor of torch, on `device` if one is given."""
    values = data.reshape(shape)
    if not is_torch:
        return values
    from ..io.tensors import as_torch

    tensor = as_torch(values)
    return tensor if device is None else tensor.to(device)


def distributed(local: Any, entry: KnownArray, ranks: Ranks) -> Any:
    """Return the DTensor that the array was put as, of this rank's part of it."""
    import torch
    from torch.distributed.tensor import DTensor

    shape = torch.Size(entry.spec.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, ranks.mesh, entry.placements, run_check=False, shape=shape, stride=stride)


def _spec(name: str, shape: tuple[int, ...], dtype: str, dims: tuple[str, ...]) -> ArraySpec:
    """Return the spec of an array that keeps its shape. Raises UsageError if there can be none."""
    try:
        return ArraySpec(name=name, shape=shape, dtype=dtype, keeps_shape=len(shape) not in (1, 2), dims=dims)
    except ValueError as error:
        raise UsageError(str(error)) from None


def copy_view(target: View, source: View) -> None:
    """Copy between views of two tiers."""
    if isinstance(target, np.ndarray) and isinstance(source, np.ndarray):
        target[...] = source
        return
    from ..io.tensors import as_torch

    as_torch(target).copy_(as_torch(source))
