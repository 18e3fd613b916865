"""Sequences that grow with the steps (`curriculum_learning`): a model's arguments are cut to the present length.

[Note: the cut]
The full length is that of `input_ids`, or else of the first tensor of at least two dimensions: its second. Of every tensor
[batch, length, ...] the second dimension is cut; of integers and masks of three dimensions and of all of four also the
last, as in [batch, 1, length, length]; of one dimension that one, if it is not the batch. Dimensions of other lengths stay.
The results are views: the caller's tensors are whole.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...config.extra import SEQLEN, Extra
from ...training.training import Training
from .schedule import Difficulty
from .section import CurriculumSection

_ARGUMENT = "curriculum_seqlen"
"""The argument by which DeepSpeed passes the length to models that cut by themselves."""


class SequenceCurriculum(Extra):
    """Cuts the arguments of an engine's model to the length of the step."""

    def __init__(self, engine: Any, section: CurriculumSection) -> None:
        self._training: Training = engine.training_state
        self._difficulty = Difficulty(SEQLEN, section)

    @property
    def difficulties(self) -> Mapping[str, Difficulty]:
        return {SEQLEN: self._difficulty}

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        training = self._training
        return cut(training.model, args, kwargs, self._difficulty.at(training.counters.global_steps + 1))


def cut(model: nn.Module, args: Any, kwargs: Any, length: int) -> tuple[Any, Any]:
    """Return the arguments of `model` with sequences of at most `length`. See [Note: the cut]."""
    if _ARGUMENT in inspect.signature(model.forward).parameters:
        return args, kwargs | {_ARGUMENT: length}
    first = _leading(args, kwargs)
    if first is None or length >= first.shape[1]:
        return args, kwargs
    full, batch = first.shape[1], first.shape[0]
    return _cut(args, full, length, batch), _cut(kwargs, full, length, batch)


def _leading(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the tensor that says how long sequences are."""
    found = [(name, tensor) for name, tensor in _tensors((args, kwargs)) if tensor.dim() > 1]
    named = (tensor for name, tensor in found if name == "input_ids")
    return next(named, found[0][1] if found else None)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _cut(value: Any, full: int, length: int, batch: int) -> Any:
    """Return `value` with its tensors cut. See [Note: the cut]."""
    if isinstance(value, torch.Tensor):
        for dim in _dimensions(value, full, batch):
            value = value.narrow(dim, 0, length)
        return value
    if isinstance(value, dict):
        return {key: _cut(item, full, length, batch) for key, item in value.items()}
    if isinstance(value, Mapping):  # as transformers' BatchEncoding
        changed: Any = copy.copy(value)
        for key, item in value.items():
            changed[key] = _cut(item, full, length, batch)
        return changed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(item, full, length, batch) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_cut(item, full, length, batch) for item in value)
    return value


def _dimensions(tensor: torch.Tensor, full: int, batch: int) -> list[int]:
    dims = tensor.dim()
    if dims == 1:
        return [0] if tensor.shape[0] == full != batch else []
    chosen = {1}
    if dims == 4 or (dims == 3 and not tensor.is_floating_point()):
        chosen |= {dims - 2, dims - 1} - {0}
    return [dim for dim in sorted(chosen) if tensor.shape[dim] == full]
