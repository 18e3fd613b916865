"""Bytes of memory and disk that a rank uses, and its peaks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from zstore.format import numpy_dtype
from zstore.io import most_resident_bytes, read_host_memory, resident_bytes
from zstore.sizes import format_bytes

from ..config.config import DTYPES
from ..plan.activations import Activations, Width
from ..plan.ladder import advice

if TYPE_CHECKING:
    from zstore.store import StoreStatistics, TensorStore

    from ..training.training import Training


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
    itemsize = numpy_dtype(DTYPES[config.precision]).itemsize
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
