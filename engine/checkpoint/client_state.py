"""The client's state in a checkpoint: JSON in the record, its tensors as arrays under `client/`.

[Note: what comes back]
A tensor's place holds `{"$tensor": "client/<where>"}`, and it comes back as a tensor on the CPU. A numpy array is stored as a
tensor, and comes back as one; a numpy number as the plain number, an `argparse.Namespace` as the dict of its values, a path
as text, a tuple as a list.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from zstore.checkpoint import encode_state, plain_value
from zstore.errors import CorruptionError, UsageError, ZstoreError
from zstore.format import ArraySpec, client_array
from zstore.io.tensors import as_numpy, as_torch, dtype_name, host_values

from ..optim.stepper import STATE_KEY

ClientValues = Mapping[str, Any] | Namespace
ClientState = ClientValues | Callable[[], ClientValues]
"""A script's own state in a save."""

_MARK = "$tensor"


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Raise CorruptionError if the block, or function, meets JSON that no engine saves; `what` names it."""
    try:
        yield
    except ZstoreError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CorruptionError(
            f"the checkpoint's {what} is not what an engine saves ({type(error).__name__}: {error!s:.200}): the record was "
            "changed; load another checkpoint, or pass load_module_only=True"
        ) from error


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return (state with marks in place of tensors, the tensors by array name, copied to host memory).

    See [Note: what comes back]. Raises UsageError that names the key of a tensor that cannot be stored; other values that
    are not JSON are named by the save.
    """
    tensors: dict[str, torch.Tensor] = {}
    marked = _split(state, "", tensors)
    return marked, tensors


def present(state: ClientState) -> ClientValues:
    """Return the client's state as it is now."""
    return state() if callable(state) else state


def as_mapping(state: ClientValues) -> Mapping[str, Any]:
    """Return the client's state as a mapping. Raises UsageError for anything else, and for a reserved key."""
    values = vars(state) if isinstance(state, Namespace) else state
    if not isinstance(values, Mapping):
        raise UsageError(f"client_state: expected a dict, got {type(values).__name__}")
    if STATE_KEY in values:
        raise UsageError(f"client_state: {STATE_KEY!r} is a reserved key; rename it")
    return values


def check(state: ClientValues) -> None:
    """Raise UsageError that names the key of a value that a save could not store."""
    encode_state(split(as_mapping(state))[0], "client_state")


def _split(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    value = plain_value(value)
    if isinstance(value, np.ndarray):
        value = _tensor_of(value, where)
    if isinstance(value, torch.Tensor):
        name = client_array(where)
        if name in tensors:
            raise UsageError(
                f"client_state: two tensors would be stored as {where!r}: a key contains a `.`; rename one"
            )
        try:
            dtype_name(value.dtype)
            tensors[name] = host_values(value.to("cpu", copy=True))
        except (UsageError, NotImplementedError, RuntimeError) as error:
            raise UsageError(f"client_state: the tensor at {where!r} cannot be stored: {error}") from error
        return {_MARK: name}
    if isinstance(value, Mapping):
        if _MARK in value:
            raise UsageError(f"client_state: {_MARK!r} at {where!r} is a reserved key; rename it")
        return {key: _split(item, f"{where}.{key}" if where else str(key), tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_split(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
    return value


def _tensor_of(array: np.ndarray[Any, Any], where: str) -> torch.Tensor:
    try:
        # In this machine's byte order, and without negative strides, which a tensor cannot have.
        return as_torch(np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape))
    except (TypeError, ValueError) as error:
        raise UsageError(f"client_state: the array at {where!r} cannot be stored: {error}") from error


@understood("client state")
def join(state: Any, read: Callable[[str], Any]) -> Any:
    """Return the client's state with tensors in their places; `read` gives an array by name."""
    if isinstance(state, dict):
        if list(state) == [_MARK]:
            return as_torch(read(state[_MARK]))
        return {key: join(item, read) for key, item in state.items()}
    return [join(item, read) for item in state] if isinstance(state, list) else state


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as plain numbers; tensors of one element are taken. Raises UsageError for other values."""
    if not isinstance(metrics, Mapping):
        raise UsageError(f"metrics: expected a dict of numbers by name, got {type(metrics).__name__}")
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"metrics: expected a number for {name!r}, got {type(value).__name__}") from error
    return found


def small_arrays(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, ArraySpec], dict[str, Any]]:
    """Return specs and numpy arrays of tensors that one rank stores whole."""
    specs = {
        name: ArraySpec(name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))
        for name, tensor in tensors.items()
    }
    return specs, {name: as_numpy(tensor) for name, tensor in tensors.items()}
