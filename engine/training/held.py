"""Bytes of the training state that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from .training import Training


@dataclass(frozen=True)
class HeldBytes:
    """Bytes held by one rank now."""

    parameters: int
    """Parameters in their own type: own rows in memory of the parameter, and the gathered copies that exist now."""
    resting: int
    """Rows of offloaded parameters in the store, on whichever tier, with fp32 masters that are the parameter."""
    gradients: int
    """Those that wait for the update."""
    optimizer_state: int
    """fp32 masters and slots, on whichever tier; an fp32 parameter that is its own master counts as a parameter."""
    secondary: int = 0
    """This rank's part of a second copy of the parameters (`zero_hpz_partition_size`)."""


def held_bytes(training: Training) -> HeldBytes:
    """Return the bytes that this rank holds."""
    state, hooks, parameters = training.state, training.hooks, 0
    for record in state.records:
        if record.shard is not None:
            parameters += record.shard.nbytes
        # Not `full.nbytes`: a released parameter has no memory, or one that was kept for its next use.
        parameters += 0 if record.is_in_place else min(record.full.untyped_storage().nbytes(), record.full.nbytes)
    store = state.store
    resting = sum(store.local(record.rest).nbytes for record in state.records if record.rest is not None)
    optimizer_state = 0
    for record in state.scalars:
        master, *others = state.arrays_of(record)
        names = others if state.is_master(record) else [master, *others]
        optimizer_state += sum(store.local(name).nbytes for name in names)
    second = None if hooks is None else hooks.units.fetcher.second_copy
    secondary = 0 if second is None else second.held_bytes
    return HeldBytes(parameters, resting, training.gradients.held_bytes(), optimizer_state, secondary)
