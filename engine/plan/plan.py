"""A plan: the needs of parameters, the places of their state, and the bytes that a step moves. Pure data, and its report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from zstore.format import Grid
from zstore.sizes import format_bytes

from ..config.optimizers import Moments


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes by place, without padding, as the store counts them. Each byte is in one of the three."""

    device: int = 0
    host: int = 0
    """Host memory, pinned or not."""
    disk: int = 0

    @property
    def total(self) -> int:
        """Bytes on all tiers."""
        return self.device + self.host + self.disk


Rest = Literal["device", "host", "disk"]
OffloadTier = Literal["none", "cpu", "nvme"]
Field = Literal["parameter", "gradient", "state"]

FP32 = "float32"
ADAM_SLOTS = ("exp_avg", "exp_avg_sq")
"""Slots of Adam and AdamW, without amsgrad."""


@dataclass(frozen=True)
class TensorSlot:
    """An fp32 array that is kept of a parameter which is updated whole."""

    name: str
    shape: tuple[int, ...] | None = None
    """None: the parameter's."""


Slots = tuple[str | TensorSlot, ...]
"""The fp32 arrays that an optimizer keeps of a parameter beside its master."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Need:
    """A parameter, as the input of its placement. Those that are alike but in name may share one, as a model's blocks do, so
    that a plan takes the time of a few."""

    grid: Grid
    """How the arrays of its state are cut (`ParameterRecord.state_grid`)."""
    shard: int
    """Number of this rank's shard on `grid`."""
    dtype: str
    """Type of the parameter, as "bfloat16"."""
    gradient_dtype: str
    """Type in which its gradient waits for the update."""
    slots: Slots | None
    """None: the parameter is not trained."""
    stays_gathered: bool
    """All values are on every rank's device always: stages 0 to 2, and below the persistence threshold."""
    whole_gradient: bool = False
    """The gradient accumulates in whole on the device, and is reduced once a step (stages 0 and 1 of several ranks)."""
    state_ranks: int = 1
    """Ranks that `grid` cuts for."""
    secondary_numel: int = 0
    """Elements of this rank's part of a second copy of the parameter (`zero_hpz_partition_size`), on the device."""
    moments: Moments = "fp32"
    """Type of the moments among the slots; all other slots are in fp32."""

    @property
    def update_bytes(self) -> int:
        """Memory of an update of the whole tensor: master, slots and gradient, four times if ranks exchange them; 0 if it
        is updated in tiles."""
        whole = [slot.shape for slot in self.slots or () if isinstance(slot, TensorSlot)]
        numel = 2 * self.numel + sum(self.numel if shape is None else math.prod(shape) for shape in whole)
        return 4 * numel * (4 if self.grid.num_shards > 1 else 1) if whole else 0

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return self.grid.rows * self.grid.row_numel

    @cached_property
    def rows_numel(self) -> int:
        """Elements of this rank's rows, padding left out."""
        return self.grid.shard_valid_numel(self.shard)


@dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """The requested placement. Bytes and elements are this rank's."""

    optimizer: OffloadTier = "none"
    ratio: float = 1.0
    """Share of the optimizer state's elements that is updated off the device, 0 to 1."""
    parameters: OffloadTier = "none"
    """Tier of the parameters that do not stay gathered (stage 3)."""
    max_in_cpu_numel: int | None = None
    """Most elements of parameters in host memory with "nvme". None: with a budget as many as fit, else none."""
    budget_bytes: int | None = None
    """Host memory for buffers and arrays in host memory. None: no limit, and "nvme" means on disk."""
    buffer_bytes: int = 0
    """Transfer buffers: all pools together."""
    buffers_of: Callable[[int], int] | None = field(default=None, compare=False)
    """Returns `buffer_bytes` for another budget; None: the same."""
    update_buffer_bytes: int | None = None
    """Of `buffer_bytes`, those that an update goes through; None: all."""
    holds_gradients: bool = True
    """The gradients of a step are held until the update: a global norm is awaited, or they accumulate. False: each is
    used as it arrives."""
    accumulation_steps: int = 1
    """Forwards of one step on this rank: parameters on disk are read again in each."""
    gathers: int = 2
    """Times that a micro-batch brings a parameter that does not stay gathered: for forward and for backward, about. One that is
    still there is not brought again, and one of two units may be brought for each."""
    device_is_host: bool = True
    """The device is the CPU: arrays on the device are in host memory too, beside the budget."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """The places of one parameter's state. See [Note: placement] for the master of an fp32 parameter."""

    state: Rest
    """Optimizer slots, and the master if it is separate."""
    parameter: Rest
    """This rank's rows between uses; of one that stays gathered, all values."""
    gradient: Rest
    """This rank's rows while they wait for the update. "device": they stay in the memory that the backward writes."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The places of one rank's training state, and the bytes that a step moves."""

    settings: PlacementSettings
    placements: Mapping[str, Places]
    """By parameter, in order."""
    stay_gathered: frozenset[str]
    """Parameters of which every rank has all values on its device always."""
    held: Mapping[str, Held]
    """By kind: "parameters" (with fp32 masters that are the parameter), "secondary parameters" (of
    `zero_hpz_partition_size`), "gradients" (none if they are used as they arrive), "master", each slot, "buffers"."""
    read_bytes: int
    """From disk in a step, checksums and padding included; at stage 3 about that: rows still gathered are not read."""
    written_bytes: int
    """To disk in a step, likewise."""
    files: tuple[tuple[Field, int], ...]
    """Each file's field, and its bytes on disk, with index, checksums and padding; in the order in which they are made."""
    budget_used_bytes: int
    """Bytes of host memory that count against the budget, buffers included."""
    budget_full_bytes: int
    """Budget with which nothing would be on disk (but parameters beyond `max_in_cpu_numel`)."""
    gathered_bytes: int
    """Most bytes of parameters gathered at a time: a unit in use and the next one. Beside the budget."""
    packs_small: bool = False
    """Whether small shards on disk share files (`TensorStore.share_files`)."""
    shared_bytes: int = 0
    """Bytes in host memory of small parameters, as `TensorStore.expect` takes them."""
    update_bytes: int = 0
    """Most bytes of tensors that are brought together for an update of the whole. Beside the budget."""

    @property
    def file_bytes(self) -> int:
        """Bytes of all files. As much again is needed while a checkpoint holds the version before."""
        return sum(nbytes for _, nbytes in self.files)

    @property
    def host_bytes(self) -> int:
        """Bytes in the host's memory, which is the device's too if the CPU computes. Buffers count if files pass through
        them; else next to nothing of them is used."""
        kinds = [held for kind, held in self.held.items() if kind != "buffers" or self.files]
        on_device = sum(held.device for held in kinds) if self.settings.device_is_host else 0
        return on_device + sum(held.host for held in kinds)

    @property
    def held_total(self) -> Held:
        """Bytes of all kinds."""
        return Held(**{place: sum(vars(one)[place] for one in self.held.values()) for place in vars(Held())})


# -- the report ---------------------------------------------------------------------------------------------------------


def describe(plan: Plan, *, world_size: int = 1, local_ranks: int = 1) -> str:
    """Return the text that is printed once at the start: the bytes of each place, the host budget, the bytes of a step.
    `plan` is rank 0's; `local_ranks` ranks share the machine's drive."""
    settings = plan.settings
    lines = [f"where the state is kept, on rank 0 of {world_size}:"]
    for place, total in vars(plan.held_total).items():
        sizes = {kind: getattr(held, place) for kind, held in plan.held.items()}
        parts = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in sizes.items() if nbytes)
        lines += [f"  {place}: {format_bytes(total)}: {parts}"] if parts else []
    if settings.budget_bytes is not None:
        used, full = format_bytes(plan.budget_used_bytes), format_bytes(plan.budget_full_bytes)
        lines.append(
            f"  host budget: {used} of {format_bytes(settings.budget_bytes)} used; {full} would hold everything"
        )
    if plan.files:
        moved = (plan.read_bytes, plan.written_bytes, plan.file_bytes)
        read, written, files = (format_bytes(nbytes * local_ranks) for nbytes in moved)
        times = "step" if settings.gathers > 1 else "forward"  # frozen: no backward brings them again
        writes = f" and writes {written}" if plan.written_bytes else ""
        lines.append(f"  each {times} of the machine's ranks ({local_ranks}) reads about {read} from disk{writes}")
        lines.append(f"  their files take {files}, and a checkpoint that links them as much again")
    if not settings.device_is_host and settings.optimizer != "none" and settings.ratio != 1:
        lines.append(
            f'  bits depend on "ratio": {settings.ratio:g}: the device updates the other {1 - settings.ratio:.1%} of the '
            "optimizer state, and rounds in another way"
        )
    gathered = f"up to {format_bytes(plan.gathered_bytes)} of gathered parameters on the device, "
    whole = f"{format_bytes(plan.update_bytes)} for updates of whole tensors, "
    beside = (gathered if plan.gathered_bytes else "") + (whole if plan.update_bytes else "")
    lines.append(f"  not counted: {beside}gradients in transit and activations")
    return "\n".join(lines)
