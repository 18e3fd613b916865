"""Lightning's own dict in a checkpoint: plain values as JSON, large ones as tensors, others as opaque bytes.

[Note: Lightning's dict]
Loops, callbacks, schedules, hyperparameters and hooks add to a dict that Lightning would pickle. Text, numbers,
lists and dicts with text as keys are in the record as they are; other plain values as an object with one key:
`{"$tuple": [...]}`, `{"$dict": [[key, value], ...]}` (any other keys), `{"$Counter": ...}`, `{"$OrderedDict": ...}`,
`{"$set": [...]}`, `{"$bytes": BASE64}`, `{"$path": TEXT}`, `{"$values": [TYPE, SHAPE, BASE64]}`, `{"$numpy": ...}`, and
`{"$array": NUMBER}` for a tensor that is stored as an array. Anything else is pickled into bytes, `{"$object": NUMBER}`,
with the nearest entry of a dict that it is in. Reading a checkpoint unpickles these only on request.
"""

from __future__ import annotations

import base64
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from zstore.errors import CheckpointError, UsageError
from zstore.io.tensors import as_numpy, as_torch, dtype_name

_MOST_INLINE_BYTES = 4096
"""Limit of a tensor that is in the record itself."""
_PLAIN = (str, int, float, bool, type(None))
_DICTS: Mapping[str, Callable[[Iterable[Any]], Any]] = {
    "$dict": dict,
    "$OrderedDict": OrderedDict,
    "$Counter": lambda pairs: Counter(dict(pairs)),
}


class _NotPlainError(Exception):
    """A value has to be pickled."""


class _Encoder:
    def __init__(self) -> None:
        self.arrays: dict[str, torch.Tensor] = {}
        self.objects: list[str] = []

    def items(self, value: Mapping[Any, Any], where: str) -> list[list[Any]]:
        """Return the pairs of a dict; a value that is not plain is pickled whole."""
        return [[self.encode(key, where), self.entry(item, f"{where}.{key}")] for key, item in value.items()]

    def entry(self, value: Any, where: str) -> Any:
        known = len(self.arrays), len(self.objects)
        try:
            return self.encode(value, where)
        except _NotPlainError:
            for name in list(self.arrays)[known[0] :]:
                del self.arrays[name]
            del self.objects[known[1] :]
        try:
            data = bytearray(pickle.dumps(value))
        except Exception as error:
            raise UsageError(
                f"the checkpoint's entry {where.lstrip('.')!r} is a {type(value).__name__} that can be stored neither as "
                f"plain values nor pickled ({error}): leave it out in on_save_checkpoint(), or convert it"
            ) from error
        self.objects.append(where.lstrip("."))
        return {"$object": self._array(torch.frombuffer(data, dtype=torch.uint8))}

    def encode(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is list:
            return [self.encode(item, f"{where}[{number}]") for number, item in enumerate(value)]
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.entry(item, f"{where}.{key}") for key, item in value.items()}
        if kind in (dict, OrderedDict, Counter):
            return {"$dict" if kind is dict else f"${kind.__name__}": self.items(value, where)}
        if kind in (tuple, set):
            return {f"${kind.__name__}": [self.encode(item, f"{where}[...]") for item in value]}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, PurePath):
            return {"$path": str(value)}
        if kind in (torch.Tensor, torch.nn.Parameter):
            return self._tensor(value.detach())
        if kind is np.ndarray and value.dtype.kind in "biufc":
            return {"$numpy": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return value.item()
        raise _NotPlainError

    def _tensor(self, tensor: torch.Tensor) -> Any:
        try:
            name = dtype_name(tensor.dtype)
            whole = tensor.to("cpu", copy=True).contiguous()
            data = as_numpy(whole.reshape(-1)).tobytes()
        except (UsageError, NotImplementedError, RuntimeError, TypeError) as error:
            raise _NotPlainError from error
        if len(data) <= _MOST_INLINE_BYTES:
            return {"$values": [name, list(tensor.shape), base64.b64encode(data).decode()]}
        return {"$array": self._array(whole)}

    def _array(self, tensor: torch.Tensor) -> str:
        name = f"{len(self.arrays):04d}"
        self.arrays[name] = tensor
        return name


def encode(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return client state that keeps `content`. See [Note: Lightning's dict].

    Raises UsageError that names an entry that is neither plain nor can be pickled.
    """
    encoder = _Encoder()
    plain = encoder.encode(dict(content), "")
    return {"content": plain, "arrays": encoder.arrays, "objects": encoder.objects}


class Content(dict[str, Any]):
    """Lightning's dict as it was loaded, without the pickled entries, unless these were requested."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(
            f"{key!r}: not in this checkpoint, or pickled there and left out; see ZstoreStrategy(load_objects=)"
        )


def decode(state: Mapping[str, Any], *, load_objects: bool) -> tuple[Content, list[str]]:
    """Return Lightning's dict, and the names of entries that are left out since they would have to be unpickled.

    With `load_objects` those are unpickled, which runs code of the checkpoint's author. Raises CheckpointError if one
    cannot be, or if `state` is no such dict.
    """
    try:
        arrays = state["arrays"]
        content = _decode(state["content"], arrays, load_objects)
        left_out = [] if load_objects else [str(name) for name in state["objects"]]
        return Content(content), left_out
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"what the checkpoint keeps of Lightning cannot be read: {error!r}") from error


_LEFT_OUT = object()


def _decode(value: Any, arrays: Mapping[str, Any], load_objects: bool) -> Any:
    def inner(item: Any) -> Any:
        return _decode(item, arrays, load_objects)

    if isinstance(value, list):
        return [inner(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) != 1 or not tag.startswith("$"):
        return {key: found for key, item in value.items() if (found := inner(item)) is not _LEFT_OUT}
    given = value[tag]
    if tag in _DICTS:
        pairs = [(inner(key), inner(item)) for key, item in given]
        return _DICTS[tag]((key, item) for key, item in pairs if item is not _LEFT_OUT)
    return _decode_leaf(tag, given, arrays, load_objects, inner)


def _decode_leaf(
    tag: str, given: Any, arrays: Mapping[str, Any], load_objects: bool, inner: Callable[[Any], Any]
) -> Any:
    if tag == "$object":
        return _unpickled(arrays[given]) if load_objects else _LEFT_OUT
    if tag in ("$tuple", "$set"):
        return (tuple if tag == "$tuple" else set)(inner(item) for item in given)
    if tag == "$bytes":
        return base64.b64decode(given)
    if tag == "$path":
        return Path(given)
    if tag == "$array":
        return arrays[given]
    if tag not in ("$values", "$numpy"):
        raise ValueError(f"unknown kind of value {tag!r}")
    kind, shape, data = given
    if tag == "$numpy":
        return np.frombuffer(base64.b64decode(data), np.dtype(kind)).reshape(shape).copy()
    from zstore.format import numpy_dtype

    return as_torch(np.frombuffer(base64.b64decode(data), numpy_dtype(kind)).copy()).reshape(shape)


def _unpickled(data: torch.Tensor) -> Any:
    try:
        return pickle.loads(as_numpy(data).tobytes())  # noqa: S301 - asked for with load_objects
    except Exception as error:
        raise CheckpointError(f"an object in the checkpoint cannot be unpickled: {error!r}") from error
