"""Counters of one rank since its engine was created: traffic and waits per link, memory, and model FLOPs utilisation.

[Note: links]
docs/metrics.md lists the names in `EngineStatistics.links`; unused links are omitted. `disk_prefetch`, `optimizer_read` and
`optimizer_write` are parts of `disk_read` and `disk_write`; parameters on disk that are their own masters count as optimizer
state. With groups of ranks, `within_group` and `between_groups` count every collective except `control` again. Busy time is
summed over concurrent operations, so it may exceed the elapsed time.

[Note: utilisation]
MFU = FLOPs per step / (seconds per step x the device's peak FLOP/s), on rank 0, as in Chowdhery et al., PaLM
(https://arxiv.org/abs/2204.02311), appendix B: recomputation does not count. The forward of the first micro-batch is
counted; a backward pass takes as much for the gradients of activations, and as much again, times the trained share, for those
of parameters. A compiled model's step is estimated as 6 x parameters x tokens, if the loop reports the tokens per step.

Matrix products, convolutions and attention are counted by the formulas of `torch.utils.flop_counter`, which omits attention
on the CPU. `FlopCounterMode` itself would run compiled functions uncompiled, which changes the run.

Peaks are the vendors' figures for dense products in the training dtype, for the GPUs in the table; other devices have no MFU.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from zstore.io import LinkStatistics, most_resident_bytes, total_of_links
from zstore.store import StoreStatistics

from ..activations.offload import ActivationStatistics
from ..params.record import Residency
from ..zero.unshard import UnitStatistics

if TYPE_CHECKING:
    from zstore.ranks.world import World
    from zstore.store import Store

    from ..training.training import Training

_OPTIMIZER_LABELS = ("model", "optimizer")
"""First components of the names of arrays that are optimizer state."""
_PEAK_FLOPS = (
    ("B200", {"16": 2250e12, "tf32": 1125e12, "fp32": 75e12}),
    ("H200", {"16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}),
    ("H100 PCIe", {"16": 756e12, "tf32": 378e12, "fp32": 51e12}),
    ("H100 NVL", {"16": 835e12, "tf32": 417e12, "fp32": 60e12}),
    ("H100", {"16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}),
    ("A100", {"16": 312e12, "tf32": 156e12, "fp32": 19.5e12}),
    ("L40S", {"16": 362e12, "tf32": 183e12, "fp32": 91.6e12}),
    ("A10G", {"16": 70e12, "tf32": 35e12, "fp32": 31.2e12}),
)
"""Part of a CUDA device's name -> FLOP/s in dense matrix products, from the manufacturers' data sheets. The first match
applies."""


@dataclass(kw_only=True)
class PhaseTimes:
    """Seconds spent in each phase; on an asynchronous device, host time unless `wall_clock_breakdown` is on."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    """Backward, including its reductions."""
    optimizer_s: float = 0.0
    """`step()` at the end of an accumulation: reduction, norm, update, and gathering of parameters."""

    def __sub__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(**{name: seconds - getattr(other, name) for name, seconds in vars(self).items()})


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that one rank currently has in memory and on disk."""

    parameters: int
    """Parameters in their own dtype: this rank's rows on the device, and gathered copies."""
    resting: int
    """Rows of offloaded parameters in the store, on any tier, including parameters that are their own fp32 master."""
    gradients: int
    """Gradients stored until the update."""
    optimizer_state: int
    """fp32 masters and slots, on any tier; an fp32 parameter that is its own master counts as a parameter."""
    secondary: int = 0
    """This rank's part of a second copy of the parameters (`zero_hpz_partition_size`)."""


@dataclass(frozen=True, kw_only=True)
class EngineStatistics:
    """Counters of this rank since the engine was created."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    links: Mapping[str, LinkStatistics]
    """Traffic by link. See [Note: links]."""
    sent_bytes: Mapping[str, int]
    """Bytes that this rank sent to others, by kind of collective."""
    process_peak_bytes: int
    """Peak resident memory of the process."""
    cuda_peak_bytes: int
    """Peak memory of tensors on the CUDA device; 0 without one."""
    held: MemoryUse
    """Current bytes of parameters, gradients and optimizer state."""
    units: UnitStatistics | None
    """Gathers of sharded or offloaded parameters, prefetched or on demand; None if there are no such parameters."""
    overlapped: int
    """Gradient reductions that overlapped with other work of this rank."""
    store: StoreStatistics
    """Bytes of state by tier and of transfer buffers, and the work of the I/O threads."""
    step_flops: int | None
    """FLOPs per step on this rank, excluding recomputation; None if unknown."""
    mfu: float | None
    """Model FLOPs utilisation of the last step, 0 to 1, on rank 0; None if unknown."""
    activations: ActivationStatistics | None
    """Offloaded activations; None if activations are not offloaded."""


def engine_statistics(
    training: Training, times: PhaseTimes, save_stall_s: Mapping[str, float], utilisation: StepUtilisation
) -> EngineStatistics:
    """Return the current counters; `save_stall_s` has the seconds by which saves delayed training, by kind."""
    world, state, hooks = training.world, training.state, training.hooks
    store = state.store.statistics()
    return EngineStatistics(
        **vars(times),
        links=link_statistics(world, state.store, store, save_stall_s),
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
    """Return the peak memory of tensors on a CUDA device; 0 for any other device."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def link_statistics(
    world: World, tensors: Store, store: StoreStatistics, save_stall_s: Mapping[str, float]
) -> dict[str, LinkStatistics]:
    """Return the traffic by link; `store` has the statistics of `tensors`. See [Note: links]."""

    def total(priorities: Iterable[str], *labels: str, stall_s: Mapping[str, float] | None = None) -> LinkStatistics:
        """Return the I/O threads' traffic with these labels, by default all; stalls of 0 s are omitted."""
        keys = {key: key.split(" ", 1) for key in store.queue.by_label}
        chosen = [k for k, (p, label) in keys.items() if p in priorities and label in (labels or (label,))]
        stalls = {cause: seconds for cause, seconds in (stall_s or {}).items() if seconds > 0}
        return replace(total_of_links(store.queue.by_label[key] for key in chosen), stall_s=stalls)

    both = world.links.statistics(), tensors.links.statistics()
    counted = {name: total_of_links(links[name] for links in both if name in links) for name in {**both[0], **both[1]}}
    reads, writes = ("read", "prefetch"), ("write_back",)
    read_stalls = {"not read yet": store.read_wait_s, "no free buffer": store.pool_wait_s}
    write_stalls = {
        "not written yet": store.write_wait_s,
        "pass not begun": store.pin_wait_s,  # waits for a save to release a shard, or for a new version's file
        "queue full": store.queue.blocked_s,
    }
    io_links = {
        "disk_read": total(reads, stall_s=read_stalls),
        "disk_prefetch": total(("prefetch",)),
        "disk_write": total(writes, stall_s=write_stalls),
        "optimizer_read": total(reads, *_OPTIMIZER_LABELS),
        "optimizer_write": total(writes, *_OPTIMIZER_LABELS),
        "activation_read": total(reads, "activation"),
        "activation_write": total(writes, "activation"),
        "checkpoint_write": total(("checkpoint",), stall_s=save_stall_s),
    }
    return counted | {name: link for name, link in io_links.items() if link.operations or link.stall_s}


def memory_use(training: Training) -> MemoryUse:
    """Return the bytes of this rank's parameters, gradients and optimizer state."""
    state, hooks, parameters = training.state, training.hooks, 0
    for record in state.records:
        if record.shard is not None:
            parameters += record.shard.nbytes
        # Not `full.nbytes`, since a released parameter has no storage, or storage reserved for its next use.
        parameters += 0 if record.is_in_place else min(record.full.untyped_storage().nbytes(), record.full.nbytes)
    arrays = [(tier, kind == "parameters", nbytes) for _, tier, kind, nbytes in placed_arrays(training)]
    resting = sum(nbytes for tier, is_parameter, nbytes in arrays if is_parameter and tier != "device")
    optimizer_state = sum(nbytes for _, is_parameter, nbytes in arrays if not is_parameter)
    replica = None if hooks is None else hooks.units.fetcher.replica
    secondary = 0 if replica is None else replica.held_bytes
    return MemoryUse(parameters, resting, training.gradients.held_bytes(), optimizer_state, secondary)


def placed_arrays(training: Training) -> Iterator[tuple[str, str, str, int]]:
    """Yield (name, tier, kind, bytes) for this rank's arrays of every parameter: values, master and slots."""
    state, store = training.state, training.state.store
    for record in state.records:
        resident = record.full.nbytes if record.residency is Residency.RESIDENT else 0
        resident += 0 if record.shard is None else record.shard.nbytes
        is_master = record.group is None or state.is_master(record)
        master, *slots = state.array_names[record]
        kinds = {master: "parameters" if is_master else "master weights"} | dict.fromkeys(slots, "optimizer state")
        if record.stored_array is not None:
            kinds[record.stored_array] = "parameters"
        if is_master and store.tier(master).name == "device":
            resident -= store.local(master).nbytes  # the array shares the parameter's memory
        yield f"parameter/{record.name}", "device", "parameters", resident
        for name, kind in kinds.items():
            yield name, store.tier(name).name, kind, store.local(name).nbytes


def peak_flops(name: str, precision: str) -> float | None:
    """Return a CUDA device's peak FLOP/s in `precision`, by its name; None if it is not in the table."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    dtype = "16" if precision in {"bf16", "fp16"} else "tf32" if tf32 else "fp32"
    return next((peaks[dtype] for device, peaks in _PEAK_FLOPS if device in name), None)


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of operations run in its `with` blocks."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled functions run compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if torch._guards.TracingContext.try_get() is None:  # tracing by torch.compile computes nothing
            operator = getattr(func, "_overloadpacket", func)
            if operator in flop_registry:
                self.total += int(flop_registry[operator](*args, **kwargs, out_val=out))
            elif operator is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
                # Heads that share keys and values need as many FLOPs; torch 2.9's formula rejects them.
                batch, heads, *_ = args[0].shape
                key, value = ((batch, heads, *tensor.shape[2:]) for tensor in args[1:3])
                self.total += int(sdpa_flop_count(args[0].shape, key, value))  # type: ignore[no-untyped-call]
        return out


class StepUtilisation:
    """The FLOPs of a step, and the model FLOPs utilisation. See [Note: utilisation]."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.should_count = False
        """Whether to count the FLOPs of the next training forward."""
        self._micro_flops: int | None = None
        """FLOPs of one micro-batch."""
        self._numel = sum(record.numel for record in training.state.records)
        self.tokens: int | None = None
        """Tokens per step over all ranks, from the current step on; None if unknown."""
        device = training.world.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self._peak = peak_flops(name, training.config.precision)
        self._last_end_s: float | None = None
        self._eval_start_s: float | None = None
        """Start of the running evaluation."""
        self.step_s: float | None = None
        """Seconds of the last step; None if its start is unknown."""
        self.last: float | None = None
        """Utilisation of the last step, 0 to 1; None if unknown."""

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the FLOPs of a forward, unless it runs without gradients or has compiled parts."""
        training = self._training
        if not torch.is_grad_enabled():
            yield
            return
        self.should_count = False
        modules = training.model.modules()
        if training.compiled is not None or any(getattr(module, "_compiled_call_impl", None) for module in modules):
            yield
            return
        with FlopCounter() as counter:
            yield
        trained_numel = sum(record.numel for record in training.trained)
        self._micro_flops = 2 * counter.total + counter.total * trained_numel // max(self._numel, 1) or None

    def end_step(self) -> None:
        """Record the end of a step, which started at the end of the previous one; the first step is a warm-up."""
        now_s, flops = time.perf_counter(), self.step_flops()
        self.step_s = None if self._last_end_s is None else now_s - self._last_end_s
        self.last = flops / (self.step_s * self._peak) if self.step_s and flops and self._peak else None
        self._last_end_s = now_s

    def begin_forward(self, *, trains: bool) -> None:
        """Exclude the time from an evaluation forward to the next training forward from the current step."""
        now_s = time.perf_counter()
        if trains and self._eval_start_s is not None and self._last_end_s is not None:
            self._last_end_s += now_s - max(self._eval_start_s, self._last_end_s)
        self._eval_start_s = None if trains else self._eval_start_s or now_s

    def reset(self) -> None:
        """Discard the end of the last step, so that the time since then does not count towards the next."""
        self._last_end_s = self.step_s = None

    def step_flops(self) -> int | None:
        """Return the FLOPs per step on one rank; None if unknown."""
        if self._micro_flops is not None:
            return self._micro_flops * self._training.accumulation.batch.accumulation_steps
        return 6 * self._numel * self.tokens // self._training.world.world_size if self.tokens else None
