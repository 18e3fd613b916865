"""The content of DeepSpeed's pickles, each entry checked as it is used; and the trained parameters in them.

[Note: flat tensors]
At stages 1 and 2 a parameter group is one long vector, cut into one part per rank: a tensor is a range of
it, and may be in several parts. At stage 3 each tensor is cut separately, its last part padded, and each rank's parts of a
group of tensors follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...checkpoint.layout import MAX_NUMEL
from ...errors import CorruptionError
from ...format.arrays import Bytes, client_array
from ...io.files import Files
from ..torchfile import Inert, TorchTensor, brief, load_torch_file

_MAX_DEPTH = 60
_MAX_DIMS = 64
_MAX_STEPS, _MAX_TEXT = 1_000_000, 16 * 1024 * 1024
_MAX_NAMED = 100
"""Names of entries that are left out; there may be a million."""
_MAX_BITS = 1000
"""Bits of a whole number that fits a float."""


class Fields:
    """A dict from a pickle."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise CorruptionError(f"{where}: expected a dict, got a {type(value).__name__}")
        self.where = where
        self.entries: dict[Any, Any] = value

    @staticmethod
    def load(path: Path) -> Fields:
        """Return the dict that a file of torch.save holds."""
        return Fields(load_torch_file(path), str(path))

    def get(self, key: Any) -> Any:
        """Return an entry, if it exists."""
        return self.entries.get(key)

    def fields(self, key: Any) -> Fields:
        """Return an entry that is a dict."""
        return Fields(self.get(key), f"{self.where}: {key!r}")

    def items(self, key: Any) -> list[Any]:
        """Return an entry that is a list."""
        value = self.get(key)
        if not isinstance(value, list | tuple):
            raise CorruptionError(f"{self.where}: expected a list {key!r}, got {brief(value)}")
        return list(value)

    def item(self, key: Any, number: int) -> Any:
        """Return item `number` of an entry that is a list."""
        items = self.items(key)
        if number >= len(items):
            raise CorruptionError(f"{self.where}: expected at least {number + 1} parameter groups, got {len(items)}")
        return items[number]

    def count(self, key: Any) -> int:
        """Return an entry that is a whole number, not negative."""
        value = self.get(key)
        if type(value) is not int or not 0 <= value < 2**53:
            raise CorruptionError(f"{self.where}: expected a number {key!r}, got {brief(value)}")
        return value


def table_of(value: Any) -> Mapping[Any, Any]:
    """Return `value` if it is a dict, otherwise an empty one."""
    return value if isinstance(value, dict) else {}


def tensor_of(value: Any, where: str) -> TorchTensor:
    """Return `value`, which must be a tensor."""
    if not isinstance(value, TorchTensor):
        raise CorruptionError(f"{where}: expected a tensor, got {brief(value)}")
    return value


def flat_of(value: Any, where: str) -> TorchTensor:
    """Return `value`, which must be a tensor whose elements are contiguous."""
    tensor = tensor_of(value, where)
    if not tensor.is_contiguous:
        raise CorruptionError(f"{where}: expected a flat tensor, got strides {tensor.stride}")
    return tensor


def shapes_of(value: Any, where: str) -> dict[str, tuple[int, ...]]:
    """Return names and shapes, in the order of the file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in Fields(value, where).entries.items():
        good = isinstance(name, str) and name and isinstance(shape, tuple) and len(shape) <= _MAX_DIMS
        good = good and all(type(n) is int and 0 <= n <= MAX_NUMEL for n in shape)
        if not good or math.prod(shape) > MAX_NUMEL:
            raise CorruptionError(f"{where}: parameter {brief(name)} has no valid shape")
        shapes[name] = tuple(shape)
    return shapes


def number_of(value: Any, files: Files) -> float | None:
    """Return a number, or the value of a tensor of one element; None for anything else."""
    if isinstance(value, TorchTensor) and value.numel == 1 and value.dtype in ("float32", "float64", "int64", "int32"):
        return float(value.whole(files).reshape(-1)[0])
    if isinstance(value, Inert):
        value = numpy_value(value)
    if isinstance(value, bool) or (isinstance(value, int) and value.bit_length() > _MAX_BITS):
        return None
    return float(value) if isinstance(value, int | float) else None


def scalars_of(state: Mapping[Any, Any], group: Mapping[Any, Any], files: Files) -> dict[str, float]:
    """Return the numbers in an optimizer's state; some optimizers keep the step count in the parameter group."""
    found = {key: number_of(value, files) for key, value in state.items() if isinstance(key, str)}
    if found.get("step") is None:
        found["step"] = number_of(group.get("step"), files)
    return {key: value for key, value in found.items() if value is not None}


def indices_of(group: Mapping[Any, Any]) -> list[int]:
    """Return the numbers of the parameters in a parameter group."""
    params = group.get("params")
    return [key for key in params if type(key) is int] if isinstance(params, list) else []


def buffer_names(model: Fields) -> set[str]:
    """Return which entries of the module's state are buffers."""
    names = model.get("buffer_names")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def numpy_value(found: Inert) -> npt.NDArray[Any] | float | None:
    """Return the array or number that an object of numpy's represents; None if it is of no plain type, or damaged."""
    try:
        match found.name.rpartition(".")[2]:
            case "scalar":
                dtype, data = found.args
                number: float = _array(data, dtype, ()).item()
                return number
            case "_reconstruct":
                _, shape, dtype, fortran, data = found.state
                return _array(data, dtype, shape, "F" if fortran else "C")
            case "_frombuffer":
                data, dtype, shape, order = found.args
                return _array(data, dtype, shape, order)
    except (TypeError, ValueError):
        pass
    return None


def _array(data: bytes, dtype: Inert, shape: tuple[int, ...], order: Any = "C") -> npt.NDArray[Any]:
    plain = np.dtype(dtype.args[0] if len(str(dtype.args[0])) <= 3 else "O")
    if plain.kind not in "biuf":
        raise ValueError("no plain type")
    if isinstance(dtype.state, tuple) and dtype.state[1] == ">":
        plain = plain.newbyteorder(">")
    array = np.frombuffer(data, plain).reshape(shape, order=order)
    return array.astype(plain.newbyteorder("<"), order="C", copy=False)


class Plain:
    """Turns the content of a pickle into JSON data. Tensors are put aside, other values without such a form left out."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._steps_left, self._text_left = _MAX_STEPS, _MAX_TEXT
        self.tensors: dict[str, Any] = {}
        """Tensors and numpy arrays by place, where `{"$tensor": "client/<where>"}` replaces them."""
        self.left_out: list[str] = []

    def of(self, value: Any, where: str, depth: int = 0) -> Any:
        """Return the JSON form of `value`; None in place of values that are left out."""
        self._steps_left -= 1
        if self._steps_left < 0:  # one object may be contained a million times
            raise CorruptionError(f"{self._where}: the pickle has too many parts for a checkpoint")
        if isinstance(value, str):
            self._text_left -= len(value)
            return value if self._text_left >= 0 else self._leave(where, "more text than a record has room for")
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Inert):
            return self._object(value, where, depth)
        if isinstance(value, TorchTensor):
            return self._aside(value, where)
        if depth > _MAX_DEPTH:
            return self._leave(where, "nested too deeply")
        if isinstance(value, dict):
            return {
                str(key): self.of(item, f"{where}.{key}", depth + 1)
                for key, item in value.items()
                if isinstance(key, str | int | float | None)
            }
        if isinstance(value, list | tuple | set):
            return [self.of(item, f"{where}.{i}", depth + 1) for i, item in enumerate(value)]
        return self._leave(where, type(value).__name__)

    def _object(self, value: Inert, where: str, depth: int) -> Any:
        if value.name in ("argparse.Namespace", "types.SimpleNamespace") and isinstance(value.state, dict):
            return self.of(value.state, where, depth + 1)
        found = numpy_value(value)
        if found is None:
            return self._leave(where, value.name)
        return found if isinstance(found, int | float) else self._aside(found, where)

    def _aside(self, value: Any, where: str) -> Any:
        name = client_array(where)
        if name in self.tensors:
            return self._leave(where, "a duplicate name")
        self.tensors[name] = value
        return {"$tensor": name}

    def _leave(self, where: str, what: str) -> None:
        if len(self.left_out) <= _MAX_NAMED:
            self.left_out.append(f"{where} ({what})" if len(self.left_out) < _MAX_NAMED else "and more")


@dataclass(frozen=True)
class MemoryPart:
    """Elements in memory."""

    values: npt.NDArray[Any]
    dtype: str

    @property
    def numel(self) -> int:
        """Elements."""
        return self.values.size

    def read(self, files: Files, first: int, stop: int, out: Bytes) -> None:
        """Read elements `[first, stop)` into `out`, as `TorchTensor.read` does."""
        out[:] = self.values.reshape(-1)[first:stop].view(np.uint8)


Part = TorchTensor | MemoryPart
"""A flat tensor that has a part of other tensors."""


@dataclass(frozen=True)
class Elements:
    """The elements of one global tensor in `parts`, all of one type. See [Note: flat tensors]."""

    parts: Sequence[Part]
    start: int = 0
    """First element of a range of the concatenation of all parts, or, for a tensor that is cut, of each part."""
    cut: int | None = None
    """Elements of a separately cut tensor in each part, padding included."""

    @property
    def dtype(self) -> str:
        """Type of the elements, as Zarr names it."""
        return self.parts[0].dtype

    def pieces(self, first: int, stop: int) -> Iterator[tuple[Part, int, int]]:
        """Yield the part, and the range in it, of each piece of flat elements `[first, stop)`, in order."""
        begin, inside = (-self.start, 0) if self.cut is None else (0, self.start)
        for part in self.parts:
            end = begin + (part.numel if self.cut is None else self.cut)
            low, high = max(first, begin), min(stop, end)
            if low < high:
                yield part, inside + low - begin, inside + high - begin
            begin = end


MASTER = "fp32"
"""The master among a parameter's states; the others are the optimizer's slots, by their names."""

Shapes = dict[str, tuple[int, ...]]


@dataclass
class TrainedParameter:
    """One parameter that the optimizer updates."""

    shape: tuple[int, ...]
    states: dict[str, Elements]
    """The master and each slot."""
    scalars: dict[str, float]


@dataclass
class States:
    """The content of the optimizer's files."""

    stage: int
    world_size: int
    parameters: dict[str, TrainedParameter] = field(default_factory=dict)
    groups: list[Mapping[Any, Any]] = field(default_factory=list)
    """The optimizer's parameter groups: their settings."""
    scaler: Any = None
    """The loss scaler, an object or a dict."""
    num_offloaded: int = 0
    """Flat tensors that were on NVMe."""
    notes: list[str] = field(default_factory=list)
