"""The content of DeepSpeed's pickles, taken out with care: each entry is checked as it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoint.format import MAX_RECORD_BYTES
from ...checkpoint.metadata import MAX_NUMEL
from ...errors import CorruptionError
from ...format.arrays import client_array
from ...io.files import Files
from ..pickled_numpy import NUMPY, numpy_value
from ..pickles import Global, PickledObject, Table, Walk, brief, inert
from ..torchfile import MAX_DIMS, TorchTensor, load_torch_file

_MAX_DEPTH = 60
_MOST_COPIED_BYTES = 64 * 1024 * 1024
_MOST_NAMED = 100
"""Of entries that are left out; there may be a million."""
_MOST_BITS = 1000
"""Of a whole number that a float can hold."""

CLASSES: Table = {
    **inert(
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.checkpoint.constants.SubparamShape",
        "argparse.Namespace",
        "types.SimpleNamespace",
    ),
    **NUMPY,
}
"""Classes in files of DeepSpeed, and of programs around it, beside tensors and plain containers. None of them is imported."""


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
        return Fields(load_torch_file(path, CLASSES), str(path))

    def get(self, key: Any) -> Any:
        """Return an entry; None if there is none."""
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

    def count(self, key: Any) -> int:
        """Return an entry that is a whole number, not negative."""
        value = self.get(key)
        if type(value) is not int or not 0 <= value < 2**53:
            raise CorruptionError(f"{self.where}: expected a number {key!r}, got {brief(value)}")
        return value


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
        good = isinstance(name, str) and name and type(shape) is tuple and len(shape) <= MAX_DIMS
        good = good and all(type(n) is int and 0 <= n <= MAX_NUMEL for n in shape)
        if not good or math.prod(shape) > MAX_NUMEL:
            raise CorruptionError(f"{where}: parameter {brief(name)} has no valid shape")
        shapes[name] = shape
    return shapes


def number_of(value: Any, files: Files) -> float | None:
    """Return a number, or the value of a tensor of one element; None for anything else."""
    if isinstance(value, TorchTensor) and value.numel == 1 and value.dtype in ("float32", "float64", "int64", "int32"):
        return float(value.whole(files).reshape(-1)[0])
    if isinstance(value, PickledObject):
        value = numpy_value(value)
    elif isinstance(value, bool):
        return None
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
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


def enum_value(value: Any) -> Any:
    """Return the value of an enum's member."""
    return value.args[0] if isinstance(value, PickledObject) and len(value.args) == 1 else value


class Plain:
    """Turns the content of a pickle into JSON data. Tensors are put aside, other values without such a form left out."""

    def __init__(self, where: str) -> None:
        self._walk = Walk(where)
        self._room_bytes = MAX_RECORD_BYTES
        self._copied_bytes = 0
        self.tensors: dict[str, Any] = {}
        """Tensors and numpy arrays by place; their places hold `{"$tensor": "client/<where>"}`."""
        self.left_out: list[str] = []

    def of(self, value: Any, where: str, depth: int = 0) -> Any:
        """Return the JSON form of `value`; None in place of values that are left out."""
        self._walk.step()
        if isinstance(value, str):  # one text may be there a million times
            self._room_bytes -= len(value)
            return value if self._room_bytes >= 0 else self._leave(where, "more text than a record has room for")
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Global):
            return value.name
        if isinstance(value, PickledObject):
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

    def _object(self, value: PickledObject, where: str, depth: int) -> Any:
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
        if not isinstance(value, TorchTensor) and value.base is None:  # not over the pickle's own bytes
            self._copied_bytes += value.nbytes
            if self._copied_bytes > _MOST_COPIED_BYTES:
                return self._leave(where, "arrays in Fortran order or big endian, too large to convert")
        self.tensors[name] = value
        return {"$tensor": name}

    def _leave(self, where: str, what: str) -> None:
        if len(self.left_out) <= _MOST_NAMED:
            self.left_out.append(f"{where} ({what})" if len(self.left_out) < _MOST_NAMED else "and more")


def table_of(value: Any) -> Mapping[Any, Any]:
    """Return `value` if it is a dict, otherwise an empty one."""
    return value if isinstance(value, dict) else {}
