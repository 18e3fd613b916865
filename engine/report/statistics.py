"""Counters of one rank since its engine was made: the traffic and waits of each link, and memory.

[Note: links]
`EngineStatistics.links` has by name what docs/metrics.md lists. Times of collectives on CUDA are the host's, which seldom
waits there. `within_group` and `between_groups` count every collective but `control` a second time, if ranks are in groups.
`disk_prefetch`, `optimizer_read` and `optimizer_write` are parts of `disk_read` and `disk_write`; with parameters on disk
that are their masters these count as the optimizer's, whatever they are read for. Links that are counted with `World.links`
or `TensorStore.links` under other names are there too. A link that was never used is missing. Busy time is summed over
operations under way at once, so it may exceed the time that passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from zstore.io import LinkStatistics, most_resident_bytes, total_of_links
from zstore.store import StoreStatistics

from ..activations.offload import ActivationStatistics
from ..zero.unshard import UnitStatistics

if TYPE_CHECKING:
    from zstore.ranks.world import World
    from zstore.store import TensorStore

    from ..training.training import Training
    from .utilisation import PhaseTimes, StepUtilisation

_OPTIMIZER = ("model", "optimizer")
"""First parts of the names of arrays that are optimizer state."""


@dataclass(frozen=True)
class MemoryUse:
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


@dataclass(frozen=True, kw_only=True)
class EngineStatistics:
    """Counters of this rank since the engine was made."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    links: Mapping[str, LinkStatistics]
    """Traffic of each link. See [Note: links]."""
    sent_bytes: Mapping[str, int]
    """Bytes that this rank sent to others, by kind of collective."""
    process_peak_bytes: int
    """Most memory that the process had resident, everything included."""
    cuda_peak_bytes: int
    """Most memory that tensors had on the CUDA device; 0 if there is none."""
    held: MemoryUse
    """Bytes of parameters, gradients and optimizer state that this rank holds now."""
    units: UnitStatistics | None
    """Gathers of sharded or offloaded parameters, ahead or on demand; None if there are none."""
    overlapped: int
    """Reductions of gradients that ran beside other work of this rank."""
    store: StoreStatistics
    """Bytes of state by tier and of transfer buffers, and the work of the I/O threads."""
    step_flops: int | None
    """Operations of a step on this rank, forwards that are repeated left out; None: not known."""
    mfu: float | None
    """Model FLOPs utilisation of the last step, 0 to 1, on rank 0; None: not known."""
    activations: ActivationStatistics | None
    """Of activations that leave the device; None if none does."""


def engine_statistics(
    training: Training, times: PhaseTimes, saves_s: Mapping[str, float], utilisation: StepUtilisation
) -> EngineStatistics:
    """Return the counters now; `saves_s` has the seconds for which saves delayed training, by their kind."""
    world, state, hooks = training.world, training.state, training.hooks
    store = state.store.statistics()
    return EngineStatistics(
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        optimizer_s=times.optimizer_s,
        links=link_statistics(world, state.store, store, saves_s),
        sent_bytes=dict(world.sent_bytes),
        process_peak_bytes=most_resident_bytes(),
        cuda_peak_bytes=cuda_peak_bytes(world.device),
        held=memory_use(training),
        units=None if hooks is None else hooks.units.statistics(),
        overlapped=training.gradients.overlapped,
        store=store,
        step_flops=utilisation.step_flops(),
        mfu=utilisation.last,
        activations=None if training.activations is None else training.activations.statistics(),
    )


def cuda_peak_bytes(device: torch.device) -> int:
    """Return the most memory that tensors had on a CUDA device; 0 for any other."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def link_statistics(
    world: World, tensors: TensorStore, store: StoreStatistics, saves_s: Mapping[str, float]
) -> dict[str, LinkStatistics]:
    """Return the traffic of each link; `store` are the present statistics of `tensors`. See [Note: links]."""

    def moved(priorities: Iterable[str], *subjects: str, stall_s: Mapping[str, float] | None = None) -> LinkStatistics:
        """Return the I/O threads' traffic of these subjects (none: of all); stalls of 0 s are left out."""
        keys = {key: key.split(" ", 1) for key in store.queue.subjects}
        chosen = [k for k, (priority, of) in keys.items() if priority in priorities and of in (subjects or (of,))]
        stalls = {cause: seconds for cause, seconds in (stall_s or {}).items() if seconds > 0}
        return replace(total_of_links(store.queue.subjects[key] for key in chosen), stall_s=stalls)

    both = world.links.statistics(), tensors.links.statistics()
    counted = {name: total_of_links(links[name] for links in both if name in links) for name in {**both[0], **both[1]}}
    reads, writes = ("read", "prefetch"), ("write_back",)
    reading = {"not read yet": store.read_wait_s, "no free buffer": store.pool_wait_s}
    writing = {
        "not written yet": store.write_wait_s,
        "pass not begun": store.pin_wait_s,  # for a save to let go of a shard, or for the file of a new version
        "queue full": store.queue.blocked_s,
    }
    stored = {
        "disk_read": moved(reads, stall_s=reading),
        "disk_prefetch": moved(("prefetch",)),
        "disk_write": moved(writes, stall_s=writing),
        "optimizer_read": moved(reads, *_OPTIMIZER),
        "optimizer_write": moved(writes, *_OPTIMIZER),
        "activation_read": moved(reads, "activation"),
        "activation_write": moved(writes, "activation"),
        "checkpoint_write": moved(("checkpoint",), stall_s=saves_s),
    }
    return counted | {name: link for name, link in stored.items() if link.operations or link.stall_s}


def memory_use(training: Training) -> MemoryUse:
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
    return MemoryUse(parameters, resting, training.gradients.held_bytes(), optimizer_state, secondary)
