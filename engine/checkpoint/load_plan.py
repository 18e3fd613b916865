"""The plan of a load: the choices of a call, and their meaning for this model and that checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from torch import nn

from zstore.checkpoint import ArraySource, Range
from zstore.errors import CheckpointMismatchError, UsageError, shortened
from zstore.format import buffer_array, model_array

from ..build.model import stored_buffers, stored_whole
from ..optim.rules import STATE_KEY, Stepper
from ..optim.state import OptimizerState
from ..params.record import ParameterRecord

_MOST_LISTED = 10
"""Differences of one kind that an error names."""
_PIECE_NUMEL = 1 << 18
"""Elements of two arrays that are compared at a time."""
_MISSING, _UNEXPECTED = "missing: ", "not in the model or its optimizer: "


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """DeepSpeed's choices of `load_checkpoint`. State that is not loaded stays as it is in the engine."""

    load_module_strict: bool = True
    """Refuse a checkpoint with other parameters or buffers; else those that both have are loaded, and the others named in a
    warning. Shapes must agree in any case."""
    load_optimizer_states: bool = True
    """Load the optimizer's slots and step counts, and of an fp16 run the loss scale."""
    load_lr_scheduler_states: bool = True
    """Load the schedule and the learning rates."""
    load_module_only: bool = False
    """Load parameters and buffers alone: no optimizer state, schedule, counters, position in the data or generators."""

    @staticmethod
    def of(options: Mapping[str, Any]) -> LoadOptions:
        """Return the choices of a call. Raises UsageError for one that is not known, or is not true or false."""
        known = [field.name for field in fields(LoadOptions)]
        for name, value in options.items():
            if name not in known:
                raise UsageError(f"load_checkpoint() has no option {name!r}; it has {', '.join(known)}")
            if not isinstance(value, bool):
                raise UsageError(f"load_checkpoint({name}={value!r}): expected True or False")
        return LoadOptions(**options)

    @property
    def optimizer(self) -> bool:
        """Whether slots, step counts and the loss scale are loaded."""
        return self.load_optimizer_states and not self.load_module_only

    @property
    def schedule(self) -> bool:
        """Whether schedule and learning rates are loaded."""
        return self.load_lr_scheduler_states and not self.load_module_only

    @property
    def progress(self) -> bool:
        """Whether counters, batch sizes, position in the data and random number generators are loaded."""
        return not self.load_module_only

    @property
    def everything(self) -> bool:
        """Whether everything is loaded."""
        return self.optimizer and self.schedule


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """The parts to load of a checkpoint that was compared with the model."""

    options: LoadOptions
    arrays: list[Range]
    """This rank's elements of the arrays to read, in this order."""
    whole: Mapping[str, str]
    """Arrays that are not cut over the ranks, each with its name in the checkpoint: buffers, and parameters that were added
    after `initialize`."""
    resized: set[str]
    """Buffers among them of another shape than here, which the model's own `load_state_dict` takes over."""
    updated: list[ParameterRecord]
    """Parameters whose optimizer state is loaded."""
    missing: list[str]
    """Arrays of the model and its optimizer that the checkpoint does not have."""
    unexpected: list[str]
    """Arrays of the checkpoint, by its own names, that the model and its optimizer do not have."""

    @property
    def is_whole(self) -> bool:
        """Whether all of the former state is replaced."""
        return self.options.everything and not (self.missing or self.unexpected)

    @property
    def left_out(self) -> list[str]:
        """Differences that were accepted, for a warning."""
        return [*_short(_MISSING, self.missing), *_short(_UNEXPECTED, self.unexpected)]


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """The result of a load on this rank."""

    path: str
    """The checkpoint's folder or URL."""
    missing: tuple[str, ...]
    """Arrays that the engine has and the checkpoint lacks: they stayed as they were."""
    unexpected: tuple[str, ...]
    """Arrays that the checkpoint has and the engine lacks; those that the options leave out are not among
    them."""
    read_bytes: int
    """Bytes that were read from the checkpoint's shard files."""
    linked_bytes: int
    """Bytes of its shard files that were linked into the run folder: they are read, and verified, when training first
    needs them."""


def plan_load(model: nn.Module, state: OptimizerState, reader: ArraySource, options: LoadOptions) -> LoadPlan:
    """Return the plan of a load.

    Raises CheckpointMismatchError, with all differences, if the checkpoint is of another model or optimizer.
    """
    names = {r: state.arrays_of(r)[: None if options.optimizer else 1] for r in state.records}
    whole = {name: tuple(tensor.shape) for name, tensor in stored_whole(model, (r.parameter for r in state.records))}
    stored_as = _names_here(model, reader)
    shapes = {name: reader.arrays[stored].spec.shape for name, stored in stored_as.items()}
    resized = {
        name: shapes[name]
        for name, shape in whole.items()
        if name in shapes and shapes[name] != shape and _takes_shapes(model, name)
    }
    wanted = whole | resized
    for arrays in names.values():
        wanted |= {name: tuple(state.store.spec(name).shape) for name in arrays}
    missing, unexpected = _differences(state, reader, options, wanted, shapes)
    found = {name for name in wanted if name in shapes}
    return LoadPlan(
        options=options,
        arrays=[
            (name, *state.owned_range(record, name))
            for record, arrays in names.items()
            for name in arrays
            if name in found
        ],
        whole={name: stored_as[name] for name in whole if name in found},
        resized=set(resized),
        updated=[r for r in state.scalars if options.optimizer and found.issuperset(names[r])],
        missing=missing,
        unexpected=unexpected,
    )


def _names_here(model: nn.Module, reader: ArraySource) -> dict[str, str]:
    """Return the name in the checkpoint of each of its arrays, by the name here: other software's state dicts do not say which
    of their tensors are buffers."""
    buffers = {model_array(name): buffer_array(name) for name, _ in stored_buffers(model)}
    names: dict[str, str] = {}
    for stored in reader.arrays:
        name = buffers.get(stored, stored)
        names[stored if name in reader.arrays else name] = stored
    return names


def _takes_shapes(model: nn.Module, array: str) -> bool:
    """Return whether the model loads the buffer of an array in a way of its own, which may change its shape."""
    name = array.partition("/")[2]
    if array != buffer_array(name):
        return False
    owner = model.get_submodule(name.rpartition(".")[0])
    plain = nn.Module
    return (type(model).load_state_dict, type(owner)._load_from_state_dict) != (
        plain.load_state_dict,
        plain._load_from_state_dict,
    )


def check_saved_state(step: Stepper, reader: ArraySource) -> None:
    """Raise CheckpointMismatchError if an optimizer that steps whole tensors would not find its state."""
    state = reader.record.state.get("client_state")
    kept = state.get(STATE_KEY) if isinstance(state, dict) else None
    if not isinstance(kept, dict):
        raise CheckpointMismatchError(
            f"checkpoint {reader.location} has no state of an optimizer that steps whole tensors, as {step.name} does: use the "
            "optimizer that it was trained with, or pass load_optimizer_states=False"
        )
    unexpected = sorted(kept.keys() - {record.name for record in step.records})
    if unexpected:
        listed = ", ".join(map(repr, unexpected[:_MOST_LISTED]))
        raise CheckpointMismatchError(
            f"checkpoint {reader.location} has state of {step.name} for {listed}, which it does not update here: give the "
            "optimizer the same parameters, under the same names"
        )


def converted_moments(state: OptimizerState, reader: ArraySource, plan: LoadPlan) -> str:
    """Return the types of moments in the checkpoint and here, if they differ; else nothing."""
    pairs = {
        (reader.array(name).spec.dtype, state.store.spec(name).dtype)
        for name, _, _ in plan.arrays
        if name.startswith("optimizer/")
    }
    return "; ".join(f"{there} in the checkpoint, {here} here" for there, here in sorted(pairs) if there != here)


def _differences(
    state: OptimizerState,
    reader: ArraySource,
    options: LoadOptions,
    wanted: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[list[str], list[str]]:
    """Return the missing and the unexpected arrays, if `options` accept them; `shapes` are the checkpoint's. Raises
    CheckpointMismatchError if not."""
    frozen = {record.name for record in state.records if record.group is None}

    def counts(name: str) -> bool:
        if name.startswith(("client/", "gradient")):
            return False
        # Slots of a parameter that is frozen now are left alone.
        return not name.startswith("optimizer/") or (options.optimizer and name.split("/", 2)[2] not in frozen)

    stored = {name: shape for name, shape in shapes.items() if counts(name)}
    # A tied parameter once more, under another of its names, as torch's state dicts have it. Its values in this rank's rows are
    # those under the first name: a checkpoint in which the two differ is of another model.
    for record in state.records:
        for alias in map(model_array, record.aliases):
            if _same_values(reader, model_array(record.name), alias, record.owned_range):
                del stored[alias]
    missing = [name for name in wanted if name not in stored]
    # Parameters that the save was asked to leave out keep the model's values, and the report names them.
    unsaved = {model_array(name) for name in reader.record.absent_parameters}
    unexpected = [name for name in stored if name not in wanted]
    unequal = [
        f"{name}: shape {stored[name]} in the checkpoint, {shape} here"
        for name, shape in wanted.items()
        if name in stored and stored[name] != shape
    ]
    absent = [name for name in missing if name not in unsaved]
    refused = [*_short(_MISSING, absent), *_short(_UNEXPECTED, unexpected)] if options.load_module_strict else []
    refused += _short("", unequal)
    if refused:
        raise CheckpointMismatchError(
            f"checkpoint {reader.location} is of another model or optimizer:"
            + "".join(f"\n  {line}" for line in refused)
        )
    return missing, unexpected


def _same_values(reader: ArraySource, one: str, other: str, rows: tuple[int, int]) -> bool:
    """Return whether both arrays are there, in one type and shape, with the same bytes in the elements `rows`."""
    if one not in reader.arrays or other not in reader.arrays:
        return False
    spec, twin = reader.arrays[one].spec, reader.arrays[other].spec
    if (spec.shape, spec.dtype) != (twin.shape, twin.dtype):
        return False
    first, stop = rows
    for start in range(first, stop, _PIECE_NUMEL):
        end = min(start + _PIECE_NUMEL, stop)
        pieces = np.empty((2, (end - start) * spec.itemsize), np.uint8)
        reader.read(one, start, end, pieces[0])
        reader.read(other, start, end, pieces[1])
        if not np.array_equal(pieces[0], pieces[1]):
            return False
    return True


def _short(prefix: str, names: list[str]) -> list[str]:
    return shortened([prefix + name for name in names], _MOST_LISTED) if names else []
