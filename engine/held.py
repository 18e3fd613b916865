"""Bytes of training state that a rank holds, counted from the tensors themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .parameters import Residency

if TYPE_CHECKING:
    from .training import Training


@dataclass(frozen=True)
class HeldBytes:
    """Bytes held by one rank now."""

    parameters: int
    """Parameters in their own type: own rows, and the gathered copies that exist now."""
    gradients: int
    optimizer_state: int
    """fp32 masters and slots, on whichever tier; an fp32 parameter that is its own master counts as a parameter."""


def held_bytes(training: Training) -> HeldBytes:
    """Return what this rank holds."""
    parameters = 0
    for record in training.state.records:
        if record.shard is not None:
            parameters += record.shard.nbytes
        if record.residency is not Residency.RELEASED:
            parameters += record.full.nbytes
    store = training.state.store
    optimizer_state = 0
    for record in training.trained:
        master, *slots = training.state.arrays_of(record)
        names = slots if training.state.is_master(record) else [master, *slots]
        optimizer_state += sum(store.local(name).nbytes for name in names)
    return HeldBytes(parameters, training.gradients.held_bytes(), optimizer_state)
