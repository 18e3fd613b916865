"""The places of a run's bytes, planned and measured, as its journal has them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..params.record import Residency

if TYPE_CHECKING:
    from ..optim.state import OptimizerState
    from ..training.training import Training

_STATE, _MASTERS = "optimizer state", "master weights"
_KINDS = {"parameters": "parameters", "gradients": "gradients", "master": _MASTERS, "buffers": "buffers"}
"""The journal's names of the plan's kinds; all others are slots of the optimizer."""


def plan_record(training: Training) -> dict[str, Any]:
    """Return the journal's record of the plan beside the bytes that this rank holds, by tier and kind and by array."""
    plan, device, state = training.plan, training.world.device, training.state
    arrays, planned, measured = list(placed_arrays(state)), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for kind, held in plan.held.items():
        for tier, nbytes in (("device", held.device), ("host", held.host), ("disk", held.disk)):
            planned[tier, _KINDS.get(kind, _STATE)] += nbytes
    for _, tier, kind, nbytes in arrays:
        measured[tier, kind] += nbytes
    measured["host", "buffers"] += state.store.statistics().pool_bytes
    is_cuda = device.type == "cuda"
    parts = [
        {
            "tier": tier,
            "kind": kind,
            "planned_bytes": planned[tier, kind],
            # Gradients come and go within a step.
            "measured_bytes": None if kind == "gradients" else measured[tier, kind],
        }
        for tier in ("device", "host", "disk")
        for kind in ("parameters", "gradients", _MASTERS, _STATE, "buffers")
        if measured[tier, kind] or planned[tier, kind]
    ]
    return {
        "kind": "plan",
        "at": time.time(),
        "host_budget_bytes": plan.settings.budget_bytes,
        "device_bytes": torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
        "parts": parts,
        "arrays": arrays,
    }


def placed_arrays(state: OptimizerState) -> Iterator[tuple[str, str, str, int]]:
    """Yield name, tier, kind and bytes of this rank's arrays of every parameter between two steps: its values, master and
    slots."""
    store = state.store
    for record in state.records:
        resident = record.full.nbytes if record.residency is Residency.RESIDENT else 0
        resident += 0 if record.shard is None else record.shard.nbytes
        own = record.group is None or state.is_master(record)
        master, *others = state.arrays_of(record)
        kinds = {master: "parameters" if own else _MASTERS} | dict.fromkeys(others, _STATE)
        if record.rest is not None:
            kinds[record.rest] = "parameters"
        if own and store.tier_of(master) == "device":
            resident -= store.local(master).nbytes  # the array is these rows of it
        if resident > 0:
            yield f"parameter/{record.name}", "device", "parameters", resident
        for name, kind in kinds.items():
            if nbytes := store.local(name).nbytes:
                yield name, store.tier_of(name), kind, nbytes
