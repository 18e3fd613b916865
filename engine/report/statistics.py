"""Counters of one rank since its engine was made: the traffic and waits of each link, and memory.

[Note: links]
`EngineStatistics.links` has, by name:
- `all_reduce`, `reduce_scatter`, `all_gather`, `broadcast`, `transfer`, `control`: collectives, in bytes sent to other ranks.
  On CUDA the times are the host's, which seldom waits there;
- `within_group`, `between_groups`: how many of these bytes, `control` left out, went to ranks of this rank's group and of
  others, if the config puts ranks in groups (`zero_hpz_partition_size`, quantized gradients of several
  machines); they count every collective a second time;
- `device_to_host`, `host_to_device`: copies between the memory of a device and that of the host; if the model computes on
  the CPU these are one memory and nothing is counted;
- `disk_read`, `disk_write`: swap files, with checksums and padding; and parts of these: `disk_prefetch`, reads ahead by
  `prefetch`, and `optimizer_read`, `optimizer_write`, masters and slots, with parameters on disk that are their masters,
  or a part of them, whatever they are read for. A pass that is not begun waits for a save to let go of a shard, or for
  the file of a new version;
- `activation_read`, `activation_write`: likewise, activations on their way from and to the disk;
- `parameter_read`: this rank's rows of parameters in host memory or on disk, on their way to be gathered; a rank alone on
  a CPU uses those in host memory in place;
- `checkpoint_write`: bytes copied for checkpoints; files that could be linked are not among them.
Links that are counted with `World.links` or `TensorStore.links` under other names are there too. A link that was never used
is missing. Busy time is summed over operations under way at once, so it may exceed the time that passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from zstore.io import LinkStatistics, total_of_links
from zstore.store import StoreStatistics

from ..activations.offload import ActivationStatistics
from ..training.held import HeldBytes, held_bytes
from ..zero.unshard import UnitStatistics
from .memory import MemoryStatistics, memory_statistics

if TYPE_CHECKING:
    from zstore.ranks.world import World
    from zstore.store import TensorStore

    from ..training.training import Training
    from .utilisation import PhaseTimes, Utilisation

_OPTIMIZER = ("model", "optimizer")
"""First parts of the names of arrays that are optimizer state."""


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
    memory: MemoryStatistics
    held: HeldBytes
    """Bytes of parameters, gradients and optimizer state that this rank holds now."""
    units: UnitStatistics | None
    """Gathers of sharded or offloaded parameters, ahead or on demand; None if there are none."""
    overlapped: int
    """Reductions of gradients that ran beside other work of this rank."""
    store: StoreStatistics
    utilisation: Utilisation | None
    """Model FLOPs utilisation, on rank 0; None if no operations are known."""
    activations: ActivationStatistics | None
    """Of activations that leave the device, and of blocks that are timed; None if there are neither."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON data."""
        return asdict(self)

    def links_since(self, before: EngineStatistics) -> dict[str, dict[str, Any]]:
        """Return the traffic of the links since `before`, as JSON data; unused ones are left out."""
        none = LinkStatistics()
        moved = {name: link.since(before.links.get(name, none)) for name, link in self.links.items()}
        return {name: asdict(link) for name, link in moved.items() if link.operations or any(link.stall_s.values())}


def engine_statistics(
    training: Training, times: PhaseTimes, saves_s: Mapping[str, float], utilisation: Utilisation | None
) -> EngineStatistics:
    """Return the counters now; `saves_s` has the seconds for which saves delayed training, by their kind."""
    world, state, gradients, hooks = training.world, training.state, training.gradients, training.hooks
    store = state.store.statistics()
    return EngineStatistics(
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        optimizer_s=times.optimizer_s,
        links=link_statistics(world, state.store, store, saves_s),
        sent_bytes=dict(world.sent_bytes),
        memory=memory_statistics(state.store, world.device),
        held=held_bytes(training),
        units=None if hooks is None else hooks.units.statistics(),
        overlapped=gradients.overlapped,
        store=store,
        utilisation=utilisation,
        activations=None if training.activations is None else training.activations.statistics(),
    )


def link_statistics(
    world: World, tensors: TensorStore, store: StoreStatistics, saves_s: Mapping[str, float]
) -> dict[str, LinkStatistics]:
    """Return the traffic of each link; `store` are the present statistics of `tensors`. See [Note: links]."""
    both = world.links.statistics(), tensors.links.statistics()
    counted = {name: total_of_links(links[name] for links in both if name in links) for name in {**both[0], **both[1]}}
    return counted | _store_links(store, saves_s)


def _store_links(store: StoreStatistics, saves_s: Mapping[str, float]) -> dict[str, LinkStatistics]:
    def moved(
        priorities: Iterable[str], *, of: Iterable[str] | None = None, stall_s: Mapping[str, float] | None = None
    ) -> LinkStatistics:
        """Return the I/O threads' traffic of the subjects `of` (None: all); stalls of 0 s are left out."""
        chosen = []
        for key, link in store.queue.subjects.items():
            priority, subject = key.split(" ", 1)
            if priority in priorities and (of is None or subject in of):
                chosen.append(link)
        return replace(total_of_links(chosen), stall_s={cause: s for cause, s in (stall_s or {}).items() if s > 0})

    reads, writes = ("read", "prefetch"), ("write_back",)
    links = {
        "disk_read": moved(reads, stall_s={"not read yet": store.read_wait_s, "no free buffer": store.pool_wait_s}),
        "disk_prefetch": moved(("prefetch",)),
        "disk_write": moved(
            writes,
            stall_s={
                "not written yet": store.write_wait_s,
                "pass not begun": store.pin_wait_s,
                "queue full": store.queue.blocked_s,
            },
        ),
        "optimizer_read": moved(reads, of=_OPTIMIZER),
        "optimizer_write": moved(writes, of=_OPTIMIZER),
        "activation_read": moved(reads, of=("activation",)),
        "activation_write": moved(writes, of=("activation",)),
        "checkpoint_write": moved(("checkpoint",), stall_s=saves_s),
    }
    return {name: link for name, link in links.items() if link.operations or link.stall_s}
