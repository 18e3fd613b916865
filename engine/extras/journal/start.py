"""The first records of a journal: of the process, and of the places of the run's bytes, planned and measured."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from zstore._version import __version__
from zstore.journal.names import pid_namespace

from ...params.record import Residency

if TYPE_CHECKING:
    from zstore.ranks.world import World

    from ...optim.state import OptimizerState
    from ...plan.plan import Plan

VERSION = 1
"""Of the journal's format."""
_PACKAGES = ("transformers", "accelerate", "lightning", "pytorch_lightning", "peft", "trl", "deepspeed")
"""Packages whose versions are recorded if they are in use."""

_STATE, _MASTERS = "optimizer state", "master weights"
_KINDS = {"parameters": "parameters", "gradients": "gradients", "master": _MASTERS, "buffers": "buffers"}
"""The journal's names of the plan's kinds; all others are slots of the optimizer."""

Placed = tuple[str, str, str, int]
"""Name, tier, kind, bytes."""


def start_record(world: World, state: OptimizerState, run: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the journal's record of this process, and of its `run` as the loop knows it."""
    return {
        "kind": "start",
        "version": VERSION,
        **run,
        "parameters": sum(record.numel for record in state.records),
        "config": config,
        "world_size": world.world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_namespace": pid_namespace(),
        "versions": _versions(),
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type,
    }


def _versions() -> dict[str, str]:
    found = {"zstore": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found


def plan_record(state: OptimizerState, plan: Plan | None, device: torch.device) -> dict[str, Any]:
    """Return the journal's record of the plan, if there was one, beside the bytes that this rank holds."""
    arrays, budget_bytes, device_bytes = list(placed_arrays(state)), state.store.options.host_budget_bytes, None
    planned: Counter[tuple[str, str]] | None = None
    if plan is not None:
        budget_bytes, planned = plan.settings.budget_bytes, Counter()
        device_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        for kind, held in plan.held.items():
            for tier, nbytes in (("device", held.device), ("host", held.host + held.pinned), ("disk", held.disk)):
                planned[tier, _KINDS.get(kind, _STATE)] += nbytes
    return {
        "kind": "plan",
        "at": time.time(),
        "host_budget_bytes": budget_bytes,
        "device_bytes": device_bytes,
        "parts": _parts_of(arrays, state, planned),
        "arrays": arrays,
    }


def _parts_of(
    arrays: Iterable[Placed], state: OptimizerState, planned: Mapping[tuple[str, str], int] | None
) -> list[dict[str, Any]]:
    """Return bytes by tier and kind: those of `arrays` and of buffers, beside the `planned` ones, None: there was no plan."""
    measured: Counter[tuple[str, str]] = Counter()
    for _, tier, kind, nbytes in arrays:
        measured[tier, kind] += nbytes
    measured["host", "buffers"] += state.store.statistics().pool_bytes
    return [
        {
            "tier": tier,
            "kind": kind,
            "planned_bytes": None if planned is None else planned.get((tier, kind), 0),
            # They come and go within a step.
            "measured_bytes": None if kind == "gradients" else measured[tier, kind],
        }
        for tier in ("device", "host", "disk")
        for kind in ("parameters", "gradients", _MASTERS, _STATE, "buffers")
        if measured[tier, kind] or (planned is not None and planned.get((tier, kind)))
    ]


def placed_arrays(state: OptimizerState) -> Iterator[Placed]:
    """Yield this rank's arrays of every parameter between two steps: its values, master and slots."""
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
