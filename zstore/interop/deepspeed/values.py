"""The content of DeepSpeed's pickles, with each entry validated when it is used; and the trained parameters in them.

[Note: flat tensors]
At stages 1 and 2 a parameter group is one long vector, split into one part per rank: a tensor is a range of
it, and may span several parts. At stage 3 each tensor is split separately, its last part is padded, and each rank's parts of
a group of tensors are concatenated.
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
_MAX_VALUES, _MAX_TEXT = 1_000_000, 16 * 1024 * 1024
_MAX_LISTED = 100
"""Maximum number of omitted entries that are listed; there may be a million."""
_MAX_BITS = 1000
"""Bits of an integer that fits a float."""


class Fields:
    """A dict from a pickle."""

    def __init__(self, value: Any, label: str) -> None:
        if not isinstance(value, dict):
            raise CorruptionError(f"{label}: expected a dict, got a {type(value).__name__}")
        self.label = label
        self.entries: dict[Any, Any] = value

    @staticmethod
    def load(path: Path) -> Fields:
        """Return the dict in a file of torch.save."""
        return Fields(load_torch_file(path), str(path))

    def get(self, key: Any) -> Any:
        """Return an entry, or None if it does not exist."""
        return self.entries.get(key)

    def fields(self, key: Any) -> Fields:
        """Return an entry that must be a dict."""
        return Fields(self.get(key), f"{self.label}: {key!r}")

    def items(self, key: Any) -> list[Any]:
        """Return an entry that must be a list."""
        value = self.get(key)
        if not isinstance(value, list | tuple):
            raise CorruptionError(f"{self.label}: expected a list {key!r}, got {brief(value)}")
        return list(value)

    def item(self, key: Any, number: int) -> Any:
        """Return item `number` of an entry that must be a list."""
        items = self.items(key)
        if number >= len(items):
            raise CorruptionError(f"{self.label}: expected at least {number + 1} parameter groups, got {len(items)}")
        return items[number]

    def count(self, key: Any) -> int:
        """Return an entry that must be a non-negative integer."""
        value = self.get(key)
        if type(value) is not int or not 0 <= value < 2**53:
            raise CorruptionError(f"{self.label}: expected a number {key!r}, got {brief(value)}")
        return value


def table_of(value: Any) -> Mapping[Any, Any]:
    """Return `value` if it is a dict, otherwise an empty dict."""
    return value if isinstance(value, dict) else {}


def tensor_of(value: Any, label: str) -> TorchTensor:
    """Return `value`, which must be a tensor."""
    if not isinstance(value, TorchTensor):
        raise CorruptionError(f"{label}: expected a tensor, got {brief(value)}")
    return value


def flat_of(value: Any, label: str) -> TorchTensor:
    """Return `value`, which must be a tensor whose elements are contiguous."""
    tensor = tensor_of(value, label)
    if not tensor.is_contiguous:
        raise CorruptionError(f"{label}: expected a flat tensor, got strides {tensor.stride}")
    return tensor


def shapes_of(value: Any, label: str) -> dict[str, tuple[int, ...]]:
    """Return names and shapes, in file order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in Fields(value, label).entries.items():
        is_valid = isinstance(name, str) and name and isinstance(shape, tuple) and len(shape) <= _MAX_DIMS
        is_valid = is_valid and all(type(n) is int and 0 <= n <= MAX_NUMEL for n in shape)
        if not is_valid or math.prod(shape) > MAX_NUMEL:
            raise CorruptionError(f"{label}: parameter {brief(name)} has an invalid name or shape")
        shapes[name] = tuple(shape)
    return shapes


def number_of(value: Any, files: Files) -> float | None:
    """Return a number, or the value of a one-element tensor; None for anything else."""
    if isinstance(value, TorchTensor) and value.numel == 1 and value.dtype in ("float32", "float64", "int64", "int32"):
        return float(value.read_all(files).reshape(-1)[0])
    if isinstance(value, Inert):
        value = numpy_value(value)
    if isinstance(value, bool) or (isinstance(value, int) and value.bit_length() > _MAX_BITS):
        return None
    return float(value) if isinstance(value, int | float) else None


def scalars_of(state: Mapping[Any, Any], group: Mapping[Any, Any], files: Files) -> dict[str, float]:
    """Return the numbers in an optimizer's state; some optimizers store the step count in the parameter group."""
    scalars = {key: number_of(value, files) for key, value in state.items() if isinstance(key, str)}
    if scalars.get("step") is None:
        scalars["step"] = number_of(group.get("step"), files)
    return {key: value for key, value in scalars.items() if value is not None}


def indices_of(group: Mapping[Any, Any]) -> list[int]:
    """Return the indices of the parameters in a parameter group."""
    params = group.get("params")
    return [key for key in params if type(key) is int] if isinstance(params, list) else []


def buffer_names(model: Fields) -> set[str]:
    """Return the names of buffers in the module's state."""
    names = model.get("buffer_names")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def numpy_value(value: Inert) -> npt.NDArray[Any] | float | None:
    """Return the array or number that a numpy object represents; None if it has no plain type, or is damaged."""
    try:
        match value.name.rpartition(".")[2]:
            case "scalar":
                dtype, data = value.args
                number: float = _array(data, dtype, ()).item()
                return number
            case "_reconstruct":
                _, shape, dtype, fortran, data = value.state
                return _array(data, dtype, shape, "F" if fortran else "C")
            case "_frombuffer":
                data, dtype, shape, order = value.args
                return _array(data, dtype, shape, order)
    except (TypeError, ValueError):
        pass
    return None


def _array(data: bytes, dtype: Inert, shape: tuple[int, ...], order: Any = "C") -> npt.NDArray[Any]:
    base = np.dtype(dtype.args[0] if len(str(dtype.args[0])) <= 3 else "O")
    if base.kind not in "biuf":
        raise ValueError("not a plain type")
    if isinstance(dtype.state, tuple) and dtype.state[1] == ">":
        base = base.newbyteorder(">")
    array = np.frombuffer(data, base).reshape(shape, order=order)
    return array.astype(base.newbyteorder("<"), order="C", copy=False)


class JsonConverter:
    """Converts the content of a pickle to JSON data. Tensors are stored separately; values without a JSON form are omitted."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._remaining_values, self._remaining_text = _MAX_VALUES, _MAX_TEXT
        self.tensors: dict[str, Any] = {}
        """Tensors and numpy arrays by name; `{"$tensor": <name>}` replaces them in the JSON."""
        self.omitted: list[str] = []

    def of(self, value: Any, label: str, depth: int = 0) -> Any:
        """Return the JSON form of `value`, with None in place of omitted values."""
        self._remaining_values -= 1
        if self._remaining_values < 0:  # the same object may be contained a million times
            raise CorruptionError(f"{self._label}: the pickle has too many parts for a checkpoint")
        if isinstance(value, str):
            self._remaining_text -= len(value)
            return value if self._remaining_text >= 0 else self._omit(label, "more text than a record has room for")
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Inert):
            return self._object(value, label, depth)
        if isinstance(value, TorchTensor):
            return self._set_aside(value, label)
        if depth > _MAX_DEPTH:
            return self._omit(label, "nested too deeply")
        if isinstance(value, dict):
            return {
                str(key): self.of(item, f"{label}.{key}", depth + 1)
                for key, item in value.items()
                if isinstance(key, str | int | float | None)
            }
        if isinstance(value, list | tuple | set):
            return [self.of(item, f"{label}.{i}", depth + 1) for i, item in enumerate(value)]
        return self._omit(label, type(value).__name__)

    def _object(self, value: Inert, label: str, depth: int) -> Any:
        if value.name in ("argparse.Namespace", "types.SimpleNamespace") and isinstance(value.state, dict):
            return self.of(value.state, label, depth + 1)
        result = numpy_value(value)
        if result is None:
            return self._omit(label, value.name)
        return result if isinstance(result, int | float) else self._set_aside(result, label)

    def _set_aside(self, value: Any, label: str) -> Any:
        name = client_array(label)
        if name in self.tensors:
            return self._omit(label, "a duplicate name")
        self.tensors[name] = value
        return {"$tensor": name}

    def _omit(self, label: str, reason: str) -> None:
        if len(self.omitted) <= _MAX_LISTED:
            self.omitted.append(f"{label} ({reason})" if len(self.omitted) < _MAX_LISTED else "and more")


@dataclass(frozen=True)
class MemoryPart:
    """A flat tensor in memory."""

    values: npt.NDArray[Any]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.values.size

    def read(self, files: Files, first: int, stop: int, out: Bytes) -> None:
        """Read elements `[first, stop)` into `out`, as `TorchTensor.read` does."""
        out[:] = self.values.reshape(-1)[first:stop].view(np.uint8)


Part = TorchTensor | MemoryPart
"""A flat tensor that contains parts of other tensors."""


@dataclass(frozen=True)
class Elements:
    """The elements of a tensor in `parts`, all of the same type. See [Note: flat tensors]."""

    parts: Sequence[Part]
    start: int = 0
    """First element of its range in the concatenation of all parts, or, for a tensor that is split separately, in each."""
    part_numel: int | None = None
    """Elements of a separately split tensor in each part, padding included; None for other tensors."""

    @property
    def dtype(self) -> str:
        """Zarr's name of the element type."""
        return self.parts[0].dtype

    def pieces(self, first: int, stop: int) -> Iterator[tuple[Part, int, int]]:
        """Yield the part and the range within it for each piece of flat elements `[first, stop)`, in order."""
        begin, inside = (-self.start, 0) if self.part_numel is None else (0, self.start)
        for part in self.parts:
            end = begin + (part.numel if self.part_numel is None else self.part_numel)
            low, high = max(first, begin), min(stop, end)
            if low < high:
                yield part, inside + low - begin, inside + high - begin
            begin = end


MASTER = "fp32"
"""Key of the master among a parameter's states; the others are the optimizer's slots, by name."""

Shapes = dict[str, tuple[int, ...]]


@dataclass
class TrainedParameter:
    """A parameter that the optimizer updates."""

    shape: tuple[int, ...]
    states: dict[str, Elements]
    """The master and each slot."""
    scalars: dict[str, float]


@dataclass
class States:
    """The content of the optimizer state files."""

    stage: int
    world_size: int
    parameters: dict[str, TrainedParameter] = field(default_factory=dict)
    groups: list[Mapping[Any, Any]] = field(default_factory=list)
    """Settings of the optimizer's parameter groups."""
    scaler: Any = None
    """The loss scaler, an object or a dict."""
    num_offloaded: int = 0
    """Number of flat tensors that were on NVMe."""
    notes: list[str] = field(default_factory=list)
