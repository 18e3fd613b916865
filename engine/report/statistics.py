"""Counters of one rank since its engine was created: the traffic and waits of each link, memory, and model FLOPs utilisation.

[Note: links]
docs/metrics.md lists the names in `EngineStatistics.links`; an unused link is missing. `disk_prefetch`,
`optimizer_read` and `optimizer_write` are parts of `disk_read` and `disk_write`; parameters on disk that are their own masters
count as the optimizer's. With groups of ranks `within_group` and `between_groups` count every collective but `control` a
second time. Busy time is summed over concurrent operations, so it may exceed the time that passed.

[Note: utilisation]
MFU = operations of a step / (seconds of the step x peak of the device), on rank 0, as in Chowdhery et al., PaLM
(https://arxiv.org/abs/2204.02311), appendix B: repeated forwards do not count. One forward, of the first micro-batch, is
counted; a backward takes as much for the gradients of activations, and again for those of parameters, times the trained
share. A compiled model's step is estimated as 6 x parameters x tokens, if the loop gives the tokens of a step.

Matrix products, convolutions and attention count, by the formulas of `torch.utils.flop_counter`, which leaves out attention on
the CPU. `FlopCounterMode` itself would run compiled functions uncompiled, which changes the run.

Peaks are the makers' for dense products in the type of training, of the GPUs in the table below; other devices have no MFU.
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

_OPTIMIZER = ("model", "optimizer")
"""First parts of the names of arrays that are optimizer state."""
_PEAKS = (
    ("B200", {"16": 2250e12, "tf32": 1125e12, "fp32": 75e12}),
    ("H200", {"16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}),
    ("H100 PCIe", {"16": 756e12, "tf32": 378e12, "fp32": 51e12}),
    ("H100 NVL", {"16": 835e12, "tf32": 417e12, "fp32": 60e12}),
    ("H100", {"16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}),
    ("A100", {"16": 312e12, "tf32": 156e12, "fp32": 19.5e12}),
    ("L40S", {"16": 362e12, "tf32": 183e12, "fp32": 91.6e12}),
    ("A10G", {"16": 70e12, "tf32": 35e12, "fp32": 31.2e12}),
)
"""Part of a CUDA device's name -> operations per second in dense products, from the makers' data sheets. The first match
counts."""


@dataclass(kw_only=True)
class PhaseTimes:
    """Seconds spent in each phase: on an asynchronous device the host's, unless `wall_clock_breakdown` is on."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    """Backward, with its reductions."""
    optimizer_s: float = 0.0
    """`step()` at the end of an accumulation: reduction, norm, update, gathering of parameters."""

    def __sub__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(**{name: seconds - getattr(other, name) for name, seconds in vars(self).items()})


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that one rank has in memory and on disk now."""

    parameters: int
    """Parameters in their own type: own rows on the device, and gathered copies."""
    resting: int
    """Rows of offloaded parameters in the store, on any tier, with fp32 masters that are the parameter."""
    gradients: int
    """Gradients that wait for the update."""
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
    """Traffic of each link. See [Note: links]."""
    sent_bytes: Mapping[str, int]
    """Bytes that this rank sent to others, by kind of collective."""
    process_peak_bytes: int
    """Peak of the process's resident memory."""
    cuda_peak_bytes: int
    """Peak of the memory of tensors on the CUDA device; 0 without one."""
    held: MemoryUse
    """Bytes of parameters, gradients and optimizer state now."""
    units: UnitStatistics | None
    """Gathers of sharded or offloaded parameters, ahead or on demand; None without any."""
    overlapped: int
    """Reductions of gradients that overlapped with other work of this rank."""
    store: StoreStatistics
    """Bytes of state by tier and of transfer buffers, and the work of the I/O threads."""
    step_flops: int | None
    """Operations of a step on this rank, repeated forwards left out; None: not known."""
    mfu: float | None
    """Model FLOPs utilisation of the last step, 0 to 1, on rank 0; None: not known."""
    activations: ActivationStatistics | None
    """Activations that leave the device; None without any."""


def engine_statistics(
    training: Training, times: PhaseTimes, saves_s: Mapping[str, float], utilisation: StepUtilisation
) -> EngineStatistics:
    """Return the current counters; `saves_s` are the seconds for which saves delayed training, by kind."""
    world, state, hooks = training.world, training.state, training.hooks
    store = state.store.statistics()
    return EngineStatistics(
        **vars(times),
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
    """Return the peak of the memory of tensors on a CUDA device; 0 for any other."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def link_statistics(
    world: World, tensors: Store, store: StoreStatistics, saves_s: Mapping[str, float]
) -> dict[str, LinkStatistics]:
    """Return the traffic of each link; `store` are the statistics of `tensors`. See [Note: links]."""

    def moved(priorities: Iterable[str], *subjects: str, stall_s: Mapping[str, float] | None = None) -> LinkStatistics:
        """Return the I/O threads' traffic of these subjects, by default of all; stalls of 0 s are left out."""
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
        "pass not begun": store.pin_wait_s,  # for a save to release a shard, or for the file of a new version
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
    """Return the bytes of this rank's parameters, gradients and optimizer state."""
    state, hooks, parameters = training.state, training.hooks, 0
    for record in state.records:
        if record.shard is not None:
            parameters += record.shard.nbytes
        # Not `full.nbytes`: a released parameter has no memory, or memory kept for its next use.
        parameters += 0 if record.is_in_place else min(record.full.untyped_storage().nbytes(), record.full.nbytes)
    arrays = [(tier, kind == "parameters", nbytes) for _, tier, kind, nbytes in placed_arrays(training)]
    resting = sum(nbytes for tier, is_parameter, nbytes in arrays if is_parameter and tier != "device")
    optimizer_state = sum(nbytes for _, is_parameter, nbytes in arrays if not is_parameter)
    second = None if hooks is None else hooks.units.fetcher.replica
    secondary = 0 if second is None else second.held_bytes
    return MemoryUse(parameters, resting, training.gradients.held_bytes(), optimizer_state, secondary)


def placed_arrays(training: Training) -> Iterator[tuple[str, str, str, int]]:
    """Yield (name, tier, kind, bytes) of this rank's arrays of every parameter: values, master and slots."""
    state, store = training.state, training.state.store
    for record in state.records:
        resident = record.full.nbytes if record.residency is Residency.RESIDENT else 0
        resident += 0 if record.shard is None else record.shard.nbytes
        own = record.group is None or state.is_master(record)
        master, *slots = state.array_names[record]
        kinds = {master: "parameters" if own else "master weights"} | dict.fromkeys(slots, "optimizer state")
        if record.stored_array is not None:
            kinds[record.stored_array] = "parameters"
        if own and store.tier(master).name == "device":
            resident -= store.local(master).nbytes  # the array is these rows of it
        yield f"parameter/{record.name}", "device", "parameters", resident
        for name, kind in kinds.items():
            yield name, store.tier(name).name, kind, store.local(name).nbytes


def peak_of(name: str, precision: str) -> float | None:
    """Return the peak of a CUDA device, by its name, for training in `precision`; None if it is not in the table."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    kind = "16" if precision in {"bf16", "fp16"} else "tf32" if tf32 else "fp32"
    return next((peaks[kind] for part, peaks in _PEAKS if part in name), None)


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations in its `with` blocks."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return that compiled functions run compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if torch._guards.TracingContext.try_get() is None:  # tracing by torch.compile computes nothing
            operator = getattr(func, "_overloadpacket", func)
            if operator in flop_registry:
                self.total += int(flop_registry[operator](*args, **kwargs, out_val=out))
            elif operator is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
                # Heads that share a key and a value take as many products; torch 2.9's formula refuses them.
                batch, heads, *_ = args[0].shape
                key, value = ((batch, heads, *tensor.shape[2:]) for tensor in args[1:3])
                self.total += int(sdpa_flop_count(args[0].shape, key, value))  # type: ignore[no-untyped-call]
        return out


class StepUtilisation:
    """The operations of a step, and the model FLOPs utilisation. See [Note: utilisation]."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.counts = False
        """Whether the next forward in training is counted."""
        self._micro_flops: int | None = None
        """Operations of one micro-batch."""
        self._numel = sum(record.numel for record in training.state.records)
        self.tokens: int | None = None
        """Tokens of a step over all ranks, from the current one on; None: not known."""
        device = training.world.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self._peak = peak_of(name, training.config.precision)
        self._ended_s: float | None = None
        self._aside_s: float | None = None
        """Start of the running evaluation."""
        self.step_s: float | None = None
        """Seconds of the last step; None: its start is not known."""
        self.last: float | None = None
        """Utilisation of the last step, 0 to 1; None: not known."""

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the operations of a forward; not of one without gradients or with compiled parts."""
        training = self._training
        if not torch.is_grad_enabled():
            yield
            return
        self.counts = False
        modules = training.model.modules()
        if training.compiled is not None or any(getattr(one, "_compiled_call_impl", None) for one in modules):
            yield
            return
        with OperationCounter() as counter:
            yield
        trained_numel = sum(record.numel for record in training.trained)
        self._micro_flops = 2 * counter.total + counter.total * trained_numel // max(self._numel, 1) or None

    def step_ended(self) -> None:
        """Record the end of a step, which began at the end of the previous one; the first, a warm-up, does not count."""
        now_s, flops = time.perf_counter(), self.step_flops()
        self.step_s = None if self._ended_s is None else now_s - self._ended_s
        self.last = flops / (self.step_s * self._peak) if self.step_s and flops and self._peak else None
        self._ended_s = now_s

    def forward_begins(self, *, trains: bool) -> None:
        """Exclude from the current step the time between a forward of an evaluation and the next forward in training."""
        now_s = time.perf_counter()
        if trains and self._aside_s is not None and self._ended_s is not None:
            self._ended_s += now_s - max(self._aside_s, self._ended_s)
        self._aside_s = None if trains else self._aside_s or now_s

    def reset(self) -> None:
        """Forget the end of the last step: the time since then does not belong to the next."""
        self._ended_s = self.step_s = None

    def step_flops(self) -> int | None:
        """Return the operations of a step on one rank; None: not known."""
        if self._micro_flops is not None:
            return self._micro_flops * self._training.accumulation.batch.accumulation_steps
        return 6 * self._numel * self.tokens // self._training.world.world_size if self.tokens else None
