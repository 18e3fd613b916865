"""Gradients of a step that has begun, in a checkpoint.

[Note: a step that has begun]
A checkpoint between two micro-batches has the state of the last step, and under `gradient/` the sums of the micro-batches
since then, in the type in which they are held. Of one rank, and at stages 2 and 3, an array has the parameter's shape and
is cut as its state; at stages 0 and 1 of several ranks, which average once a step, it has a row for each rank: its own sum.
So the step that a resume ends has the bits that it would have had. Another number of ranks has no such rows, nor the same
micro-batches left: it is refused before anything is loaded. Gradients are saved in place, without a copy, and a backward
adds to them there, so that such a save is complete before training goes on. A save without gradients leaves the step out:
it has the state of the last step, from which a load does the step anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zstore.checkpoint import ArraySource
from zstore.errors import CheckpointMismatchError, CorruptionError, UsageError
from zstore.format import ArraySpec, Grid, make_grid, numpy_dtype
from zstore.io.tensors import as_torch, dtype_name

from ..params.record import ParameterRecord

if TYPE_CHECKING:
    from ..training.training import Training

GROUP = "gradient"


def require_between_micro_batches(training: Training) -> None:
    """Raise UsageError between a backward and its step()."""
    under_way, steps = training.accumulation, training.accumulation.batch.accumulation_steps
    if under_way.backwards:
        raise UsageError(
            f"save_checkpoint between backward and step() ({under_way.stepped} of {steps} micro-batches are stepped, "
            f"{under_way.backwards} backward without step): call engine.step() first, which ends the micro-batch"
        )


def require_last_step(training: Training) -> None:
    """Raise UsageError when a save that leaves out the step that has begun would not have the state of the last one."""
    if training.pending.is_in_backward:
        raise UsageError(
            'save_checkpoint between backward and step(): with "step_overlap": "backward" the state is being '
            'changed then; call step() first, or set "step_overlap" to "forward" or "none"'
        )
    if training.loader is not None and not training.accumulation.is_new:
        raise UsageError(
            "save_checkpoint(gradients=False) within a step: the loader of initialize() is past the micro-batches of it, "
            "which a resume would miss; save between two steps, or with gradients=True between two micro-batches"
        )


def described(training: Training) -> dict[str, Any] | None:
    """Return the record's part about a step that has begun; None between two steps."""
    under_way = training.accumulation
    if not under_way.stepped:
        return None
    return {"stepped": under_way.stepped, "backwards": training.gradients.backwards, "own": training.gradients.is_own}


def enter_gradients(training: Training) -> dict[str, Grid]:
    """Add the gradients of a step that has begun to the store as arrays, in place; return these and how the ranks divide
    them (all ranks)."""
    if not training.accumulation.stepped:
        return {}
    store, grids = training.state.store, {}
    for record, rows in training.gradients.begun().items():
        if rows is None:
            grids[training.state.spilled[record]] = record.state_grid
            continue
        spec, grid, shard = _layout(training, record, rows.dtype)
        store.create(spec, grid=grid, shard=shard, tier="device", memory=rows)
        grids[spec.name] = grid
    return grids


def leave_gradients(training: Training, names: Collection[str]) -> None:
    """Undo `enter_gradients`."""
    own = set(training.state.spilled.values())
    for name in names:
        if name not in own:
            training.state.store.remove(name)


def _layout(training: Training, record: ParameterRecord, dtype: torch.dtype) -> tuple[ArraySpec, Grid, int]:
    """Return the array of a gradient, how the ranks divide it, and which shard is this one's."""
    spec = record.spec(GROUP, dtype)
    if not training.gradients.is_own:
        return spec, record.state_grid, record.state_shard
    shape = (training.world.world_size, record.numel)
    own = ArraySpec(name=spec.name, shape=shape, dtype=dtype_name(dtype))
    return own, make_grid(shape, training.world.world_size, 1), training.world.rank


def check_begun(training: Training, begun: Mapping[str, Any], record: Mapping[str, Any], saved_world_size: int) -> None:
    """Raise CheckpointMismatchError if a step that has begun in a checkpoint cannot go on here."""
    for name, least in (("stepped", 1), ("backwards", 0)):  # no backward: its gradients were forgotten
        if type(begun[name]) is not int or not least <= begun[name] < 2**53:
            raise CorruptionError(f"the checkpoint's step that has begun has {name} {begun[name]!r}: it is not a count")
    batch = training.accumulation.batch
    there = (saved_world_size, record["batch"]["accumulation_steps"], record["precision"], bool(begun["own"]))
    here = (training.world.world_size, batch.accumulation_steps, training.config.precision, training.gradients.is_own)
    if there != here:
        said = "world size {}, {} micro-batches to a step, {}, gradients {} each rank".format
        texts = [said(*one[:3], "summed by" if one[3] else "divided among") for one in (there, here)]
        raise CheckpointMismatchError(
            f"the checkpoint was saved after {begun['stepped']} of {there[1]} micro-batches of a step, and their gradients "
            f"can go on only as they were: {texts[0]}; here: {texts[1]}. Load it as it was and save it after the step, or pass "
            "load_optimizer_states=False, and the step begins anew"
        )


def take_up(training: Training, reader: ArraySource, begun: Mapping[str, Any]) -> None:
    """Go on in the middle of the step that the checkpoint was saved in."""
    training.gradients.take_up(_stored(training, reader), begun["backwards"])
    training.accumulation.stepped = begun["stepped"]


def _stored(training: Training, reader: ArraySource) -> Iterator[tuple[ParameterRecord, torch.Tensor]]:
    """Yield this rank's gradients in the checkpoint. Raises CheckpointMismatchError for one of another shape."""
    for record in training.trained:
        # A gradient that turned out wider on disk has an array of its own there.
        found = [name for name in reader.arrays if name.startswith(GROUP) and name.partition("/")[2] == record.name]
        for name in found:
            spec = reader.array(name).spec
            wanted, grid, shard = _layout(training, record, getattr(torch, spec.dtype))
            if spec.shape != wanted.shape:
                raise CheckpointMismatchError(f"{name}: shape {spec.shape} in the checkpoint, {wanted.shape} here")
            values = np.empty(grid.shard_valid_numel(shard), numpy_dtype(spec.dtype))
            if values.size:
                first = shard * grid.shard_numel
                reader.read(name, first, first + values.size, values)
            yield record, as_torch(values)
