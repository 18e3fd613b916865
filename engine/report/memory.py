"""Bytes of memory and disk that a rank uses, its peaks, and the training state among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from zstore.io import most_resident_bytes, read_host_memory, resident_bytes
from zstore.sizes import format_bytes

from ..params.record import PRECISIONS
from ..plan.activations import Activations, Width
from ..plan.rungs import advice

if TYPE_CHECKING:
    from zstore.store import StoreStatistics, TensorStore

    from ..optim.state import OptimizerState
    from ..training import Training
    from ..zero.gradients import Gradients
    from ..zero.unshard import ShardedUnits


@dataclass(frozen=True, kw_only=True)
class MemoryStatistics:
    """The memory and disk of one rank."""

    device_bytes: int
    """Arrays of the store on the device, parameters that are their own masters included."""
    host_bytes: int
    """Arrays of the store in host memory."""
    disk_bytes: int
    """Arrays of the store on disk."""
    buffer_bytes: int
    """The store's transfer buffers, in host memory."""
    buffer_peak_bytes: int
    """Most of them that were in use at once."""
    process_peak_bytes: int
    """Most memory that the process had resident, everything included."""
    cuda_peak_bytes: int
    """Most memory that tensors had on the CUDA device; 0 if there is none."""

    def line(self) -> str:
        """Return all of it for a person to read."""
        size = {name: format_bytes(nbytes) for name, nbytes in asdict(self).items()}
        cuda = f", of CUDA {size['cuda_peak_bytes']}" if self.cuda_peak_bytes else ""
        return (
            f"state on device {size['device_bytes']}, host {size['host_bytes']}, disk {size['disk_bytes']}; "
            f"buffers {size['buffer_bytes']}, at most {size['buffer_peak_bytes']} in use; "
            f"peak of the process {size['process_peak_bytes']}{cuda}"
        )


def memory_statistics(tensors: TensorStore, device: torch.device) -> MemoryStatistics:
    """Return this rank's usage now, and its peaks so far."""
    store = tensors.statistics()
    return MemoryStatistics(
        device_bytes=store.device_bytes,
        host_bytes=store.host_bytes,
        disk_bytes=store.disk_bytes,
        buffer_bytes=store.pool_bytes,
        buffer_peak_bytes=store.pool_peak_bytes,
        process_peak_bytes=most_resident_bytes(),
        cuda_peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
    )


def memory_now(store: StoreStatistics, device: torch.device) -> dict[str, int]:
    """Return bytes in use by owner: state on the tiers `device`, `host` and `disk`, `buffers`, the whole `process`
    now, and on `cuda` the most that tensors had so far."""
    return {
        "device": store.device_bytes,
        "host": store.host_bytes,
        "disk": store.disk_bytes,
        "buffers": store.pool_bytes,
        "process": resident_bytes(),
        "cuda": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
    }


def lack_of_memory(training: Training, inputs: Iterable[Any]) -> str | None:
    """Return a warning if a forward of `inputs` and its backward are about to take more host memory than is available; None
    if they are not, or if the model's config does not say how large it is.

    The kernel would end the process in the middle of it. Gradients count with the activations: the plan's other bytes are
    taken already.
    """
    width, config, world = Width.of(training.model), training.config, training.world
    ids = next((x for x in inputs if isinstance(x, torch.Tensor) and x.dim() == 2 and not x.is_floating_point()), None)
    memory = read_host_memory()
    if width is None or ids is None or memory.available_bytes is None:
        return None
    own = any(getattr(module, "gradient_checkpointing", False) for module in training.model.modules())
    checkpointing = config.own.gradient_checkpointing or own
    itemsize = PRECISIONS[config.precision].itemsize
    kept = Activations(width=width, tokens=ids.numel(), itemsize=itemsize, checkpointing=checkpointing)
    gradients = training.plan.held["gradients"]
    needed = gradients.host + gradients.pinned
    if world.device.type == "cpu":
        needed += kept.total_bytes + gradients.device - (kept.kept_bytes if config.activations == "disk" else 0)
    elif config.activations == "host":
        needed += kept.kept_bytes
    available = (memory.available_bytes + memory.swap_bytes) // world.local_world_size
    if needed <= available:
        return None
    return (
        f"a forward of {ids.numel():,} tokens and its backward take about {format_bytes(needed)} of host memory for "
        f"activations and gradients, and {format_bytes(available)} are left for this rank: the kernel may end it. To take "
        f"less, {advice(config, world)}; `zstore plan` shows what fits"
    )


@dataclass(frozen=True)
class HeldBytes:
    """Bytes held by one rank now."""

    parameters: int
    """Parameters in their own type: own rows in memory of the parameter, and the gathered copies that exist now."""
    resting: int
    """Rows of offloaded parameters in the store, on whichever tier, with fp32 masters that are the parameter."""
    gradients: int
    """With their quantization errors, if these are kept (`zeropp_loco_param`)."""
    optimizer_state: int
    """fp32 masters and slots, on whichever tier; an fp32 parameter that is its own master counts as a parameter, and of
    a split master the bf16 part does."""
    secondary: int = 0
    """This rank's part of a second copy of the parameters (`zero_hpz_partition_size`)."""


def held_bytes(state: OptimizerState, gradients: Gradients, units: ShardedUnits | None = None) -> HeldBytes:
    """Return the bytes that this rank holds; `units` if parameters are sharded."""
    parameters = 0
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
        names = others if state.is_master(record) or state.is_split(record) else [master, *others]
        optimizer_state += sum(store.local(name).nbytes for name in names)
    second = None if units is None else units.fetcher.second_copy
    secondary = 0 if second is None else second.held_bytes
    return HeldBytes(parameters, resting, gradients.held_bytes(), optimizer_state, secondary)
