"""A plan: the needs of parameters, the places of their state, and the bytes that a step moves, with its report. Its
inputs from a model and a config, for the engine and for `zstore plan`, with estimates of activations. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, Literal

from zstore.errors import ConfigError, format_bytes
from zstore.format import Grid, make_grid, numpy_dtype, round_up, stored_shape
from zstore.io import PAGE_BYTES
from zstore.store import StoreOptions
from zstore.weights.from_checkpoint import DTYPES

from ..config.config import Config
from ..config.optimizers import Moments
from ..config.sections import OffloadOptimizerSection
from ..params.sharding import D, GradientTypes, Sharding


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes by place, without padding, as the store counts them. Each byte is in exactly one of the three."""

    device: int = 0
    host: int = 0
    """Host memory, pinned or not."""
    disk: int = 0

    @property
    def total(self) -> int:
        """Bytes on all tiers."""
        return self.device + self.host + self.disk


TierName = Literal["device", "host", "disk"]
OffloadTier = Literal["none", "cpu", "nvme"]
Field = Literal["parameter", "gradient", "state"]

FP32 = "float32"
ADAM_SLOTS = ("exp_avg", "exp_avg_sq")
"""Slots of Adam and AdamW, without amsgrad."""


@dataclass(frozen=True)
class TensorSlot:
    """An fp32 array of the optimizer for a parameter that is updated as a whole tensor."""

    name: str
    shape: tuple[int, ...] | None = None
    """None: the parameter's."""


Slots = tuple[str | TensorSlot, ...]
"""The fp32 arrays of an optimizer for a parameter, without its master."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Need:
    """A parameter, as input of its placement. Parameters that differ only in name share one, so that the time of a plan
    depends on the number of different ones."""

    grid: Grid
    """Partition of the arrays of its state (`ParameterRecord.state_grid`)."""
    shard: int
    """Number of this rank's shard on `grid`."""
    dtype: str
    """Type of the parameter, as "bfloat16"."""
    gradient_dtype: str
    """Type in which its gradient waits for the update."""
    slots: Slots | None
    """None: the parameter is not trained."""
    stays_gathered: bool
    """Every rank always has all values on its device: stages 0 to 2, and below the persistence threshold."""
    whole_gradient: bool = False
    """The whole gradient accumulates on the device, and is reduced once a step (stages 0 and 1 of several ranks)."""
    state_ranks: int = 1
    """Number of ranks that `grid` is for."""
    secondary_numel: int = 0
    """Elements of this rank's part of a second copy of the parameter (`zero_hpz_partition_size`), on the device."""
    moments: Moments = "fp32"
    """Type of the moments among the slots; other slots are in fp32."""

    @property
    def update_bytes(self) -> int:
        """Memory of the update of a whole tensor: master, slots and gradient, four times if ranks exchange them; 0 for an
        update in tiles."""
        whole = [slot.shape for slot in self.slots or () if isinstance(slot, TensorSlot)]
        numel = 2 * self.numel + sum(self.numel if shape is None else math.prod(shape) for shape in whole)
        return 4 * numel * (4 if self.grid.num_shards > 1 else 1) if whole else 0

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return self.grid.rows * self.grid.row_numel

    @cached_property
    def rows_numel(self) -> int:
        """Elements of this rank's rows, without padding."""
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
    """Maximum elements of parameters in host memory with "nvme". None: as many as fit with a budget, else none."""
    budget_bytes: int | None = None
    """Host memory for buffers and arrays in host memory. None: no limit, and "nvme" means on disk."""
    buffer_bytes: int = 0
    """Transfer buffers: all pools together."""
    buffers_of: Callable[[int], int] | None = field(default=None, compare=False)
    """Returns `buffer_bytes` for another budget; None: the same."""
    update_buffer_bytes: int | None = None
    """Part of `buffer_bytes` for the update; None: all."""
    holds_gradients: bool | None = True
    """Gradients are stored until the update, for a global norm, or because they accumulate. False: each is used as it
    arrives. None: that, but for those of host memory if the budget has room for all state with them."""
    accumulation_steps: int = 1
    """Forwards of one step on this rank: each reads parameters on disk again."""
    gathers: int = 2
    """Gathers of a parameter in a micro-batch, about: for forward and for backward. A parameter that is still gathered is
    not gathered again, and one in two units may be gathered for each."""
    device_is_host: bool = True
    """The device is the CPU: arrays on the device are in host memory too, outside the budget."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """The places of one parameter's state. See [Note: placement] for the master of an fp32 parameter."""

    state: TierName
    """Optimizer slots, and the master if it is separate."""
    parameter: TierName
    """This rank's rows between uses; all values, if it stays gathered."""
    gradient: TierName
    """This rank's rows while they wait for the update. "device": in the memory that the backward writes."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The places of one rank's training state, and the bytes that a step moves."""

    settings: PlacementSettings
    placements: Mapping[str, Places]
    """The places by parameter, in order."""
    stay_gathered: frozenset[str]
    """Parameters that every rank always has whole on its device."""
    held: Mapping[str, Bytes]
    """By kind: "parameters" (with fp32 masters that are the parameter), "secondary parameters" (of
    `zero_hpz_partition_size`), "gradients" (none if they are used as they arrive), "master", each slot, "buffers"."""
    read_bytes: int
    """From disk in a step, with checksums and padding; at stage 3 a little less, since gathered rows are not read."""
    written_bytes: int
    """To disk in a step, likewise."""
    files: tuple[tuple[Field, int], ...]
    """Field of each file, and its bytes on disk, with index, checksums and padding; in the order of creation."""
    budget_used_bytes: int
    """Bytes of host memory that count against the budget, buffers included."""
    budget_full_bytes: int
    """Budget with which nothing would be on disk (except parameters beyond `max_in_cpu_numel`)."""
    gathered_bytes: int
    """Peak of the bytes of gathered parameters: a unit in use and the next one. Outside the budget."""
    packs_small: bool = False
    """Whether small shards on disk share files (`Store.share_files`)."""
    shared_bytes: int = 0
    """Bytes in host memory of small parameters, for `Store.expect_shared_bytes`."""
    update_bytes: int = 0
    """Peak of the bytes of an update of a whole tensor. Outside the budget."""

    @property
    def file_bytes(self) -> int:
        """Bytes of all files; twice as many are needed while a checkpoint links the previous version."""
        return sum(nbytes for _, nbytes in self.files)

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, including the device's if it is the CPU. Buffers count only if there are files: otherwise
        hardly any are used."""
        kinds = [held for kind, held in self.held.items() if kind != "buffers" or self.files]
        on_device = sum(held.device for held in kinds) if self.settings.device_is_host else 0
        return on_device + sum(held.host for held in kinds)

    @property
    def held_total(self) -> Bytes:
        """Bytes of all kinds."""
        return Bytes(**{place: sum(vars(one)[place] for one in self.held.values()) for place in vars(Bytes())})


def describe(plan: Plan, *, world_size: int = 1, local_ranks: int = 1) -> str:
    """Return the text for the log at the start: bytes of each place, the host budget, bytes that a step moves. `plan` is
    rank 0's; `local_ranks` ranks share the machine's drive."""
    settings = plan.settings
    lines = [f"where the state is kept, on rank 0 of {world_size}:"]
    for place, total in vars(plan.held_total).items():
        sizes = {kind: getattr(held, place) for kind, held in plan.held.items()}
        parts = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in sizes.items() if nbytes)
        lines += [f"  {place}: {format_bytes(total)}: {parts}"] if parts else []
    if settings.budget_bytes is not None:
        used, full = format_bytes(plan.budget_used_bytes), format_bytes(plan.budget_full_bytes)
        lines.append(
            f"  host budget: {used} of {format_bytes(settings.budget_bytes)} used; {full} would be enough for everything"
        )
    if plan.files:
        moved = (plan.read_bytes, plan.written_bytes, plan.file_bytes)
        read, written, files = (format_bytes(nbytes * local_ranks) for nbytes in moved)
        times = "step" if settings.gathers > 1 else "forward"  # frozen: there is no backward
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
    transient = (gathered if plan.gathered_bytes else "") + (whole if plan.update_bytes else "")
    lines.append(f"  not counted: {transient}gradients in transit and activations")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class ParameterShape:
    """One parameter of a model, with or without memory."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    """None: floating, and cast to the config's precision."""
    is_called: bool = True
    """Some unit gathers it; a parameter that no module reads cannot be sharded (stage 3)."""


def gradient_types(config: Config, world_size: int, types: Mapping[str, D]) -> GradientTypes[D]:
    """Return the gradient types of a resolved config, by the data type of each precision."""
    accumulation, reduction = config.settings.data_types.grad_accum_dtype, config.settings.communication_data_type
    return GradientTypes(
        summed=types["fp32"],
        accumulation=None if accumulation is None else types[accumulation],
        reduction=None if reduction is None or world_size == 1 else types[reduction],
        accumulates=config.batch.accumulation_steps > 1,
    )


def find_needs(
    shapes: Sequence[ParameterShape], slots: Mapping[str, Slots], config: Config, *, world_size: int, rank: int
) -> dict[str, Need]:
    """Return the needs of the parameters on `rank`, by name; `slots` has the slots of trained parameters, by name."""
    sharding = Sharding.of_stage(config.stage, world_size)
    types = gradient_types(config, world_size, DTYPES)
    apart = sharding.parameters or config.offload_param.device != "none"
    gathered = frozenset(_gathered_for_use(shapes, config)) if apart else frozenset[str]()

    @cache
    def of(shape: tuple[int, ...], dtype: str, kept: Slots | None, stays: bool) -> Need:
        on_disk = stored_shape(shape)
        secondary_numel = 0
        if config.secondary_size is not None and not stays:
            near = make_grid(on_disk, world_size).joined(world_size // config.secondary_size)
            secondary_numel = near.shard_valid_numel(rank % config.secondary_size)
        return Need(
            grid=sharding.state_grid(on_disk),
            shard=sharding.state_shard(rank),
            dtype=dtype,
            gradient_dtype=types.planned(dtype),
            slots=kept,
            stays_gathered=stays,
            secondary_numel=secondary_numel,
            whole_gradient=world_size > 1 and not sharding.gradients,
            state_ranks=world_size if sharding.optimizer_state else 1,
            moments=config.moment_type,
        )

    trained_in = DTYPES[config.precision]
    return {
        one.name: of(one.shape, one.dtype or trained_in, slots.get(one.name), one.name not in gathered)
        for one in shapes
    }


def _gathered_for_use(shapes: Sequence[ParameterShape], config: Config) -> Iterator[str]:
    """Yield the parameters that do not stay gathered (stage 3): with as many elements as the threshold, or more than
    earlier ones left of the limit for all."""
    room_numel = config.zero.stage3_model_persistence_threshold
    for one in shapes:
        numel = math.prod(one.shape)
        if not one.is_called:
            continue
        if numel >= int(config.zero.stage3_param_persistence_threshold) or (
            room_numel is not None and numel > room_numel
        ):
            yield one.name
        elif room_numel is not None:
            room_numel -= numel


def placement_settings(config: Config, *, budget_bytes: int | None, device_is_host: bool) -> PlacementSettings:
    """Return the settings of a resolved config; `budget_bytes` is one rank's share of the machine's budget. With the
    ratio "auto" no optimizer state is on the device: see `fill_device`."""
    zero = config.settings.zero_optimization
    ratio, steps = zero.offload_optimizer.ratio, config.batch.accumulation_steps
    keeps_rows = config.world_size > 1 and config.offload_optimizer.device == "none"
    return PlacementSettings(
        optimizer=config.offload_optimizer.device,
        ratio=1.0 if ratio == "auto" else ratio,
        parameters=config.offload_param.device,
        max_in_cpu_numel=zero.offload_param.max_in_cpu,
        budget_bytes=budget_bytes,
        buffer_bytes=buffer_bytes(config, budget_bytes),
        buffers_of=partial(buffer_bytes, config),
        update_buffer_bytes=store_options(config, budget_bytes).pool_bytes,
        holds_gradients=True if config.step_overlap != "backward" or steps > 1 or keeps_rows else None,
        accumulation_steps=1 if config.frozen else steps,
        gathers=1 if config.frozen else 2,
        device_is_host=device_is_host,
    )


def buffer_bytes(config: Config, budget_bytes: int | None) -> int:
    """Return the bytes of one rank's transfer buffers: for the update, parameters, gradients and activations."""
    options = store_options(config, budget_bytes)
    state, parameters = config.offload_optimizer.device, config.offload_param.device
    pools = [options.pool_bytes]
    if parameters != "none":
        pools.append(parameter_pool_bytes(config, options))
    if budget_bytes is not None and state != "none" and "nvme" in (state, parameters):
        pools.append(spill_pool_bytes(budget_bytes))
    if config.activations == "disk":
        pools.append(activation_pool_bytes(budget_bytes))
    return sum(round_up(nbytes, PAGE_BYTES) for nbytes in pools)


def store_options(config: Config, budget_bytes: int | None) -> StoreOptions:
    """Return the options of a config's store, without its device; `budget_bytes` is one rank's share of the host budget."""
    section, aio = config.zero.offload_optimizer, config.settings.aio
    section = OffloadOptimizerSection(device="none") if section.is_off else section
    buffer_bytes = round_up(4 * section.buffer_size, PAGE_BYTES)
    groups = {"parameter": config.offload_param.nvme_paths, "activation": config.activations_paths}
    usual = next(filter(None, (config.offload_optimizer.nvme_paths, *groups.values())), ())
    return StoreOptions(
        run_path=usual[0] if usual else None,
        other_paths=usual[1:],
        shares_folders=True,
        group_paths={group: paths for group, paths in groups.items() if paths},
        host_budget_bytes=budget_bytes,
        num_threads=aio.thread_count,
        queue_depth=aio.queue_depth,
        block_bytes=min(aio.block_size, buffer_bytes),
        max_pool_bytes=section.buffer_count * buffer_bytes,
        verify=config.zstore.verify_reads,
        pin_state=config.pin_memory,
    )


def parameter_pool_bytes(config: Config, options: StoreOptions) -> int:
    """Return the bytes of the buffers for parameters, none larger than a request to the disk."""
    section = config.zero.offload_param
    return section.buffer_count * min(section.buffer_size * itemsize_of(config), options.span_bytes)


def spill_pool_bytes(budget_bytes: int) -> int:
    """Return the bytes of the buffers for gradients, if a host budget may move them to disk."""
    return min(16 * 2**20, budget_bytes // 16)


def activation_pool_bytes(budget_bytes: int | None) -> int:
    """Return the bytes of the buffers for activations on disk."""
    limit = 32 * 2**20
    return limit if budget_bytes is None else min(limit, budget_bytes // 16)


def itemsize_of(config: Config) -> int:
    """Return the bytes of an element in the precision of a resolved config."""
    return numpy_dtype(DTYPES[config.precision]).itemsize


@dataclass(frozen=True, kw_only=True)
class Width:
    """The dimensions of a model that determine its activations."""

    hidden: int
    """Width of the residual stream, in elements."""
    num_layers: int
    vocab_size: int
    longest: int | None = None
    """Tokens of the longest sequence; None: not known."""

    @classmethod
    def of(cls, model: Any) -> Width:
        """Return the dimensions in the model's own config, as in transformers. Raises ConfigError if they are missing."""
        found: dict[str, Any] = {
            "hidden": hidden_size(model),
            "num_layers": _of_config(model, "num_hidden_layers", "num_layers", "n_layer"),
            "vocab_size": _of_config(model, "vocab_size"),
        }
        if None in found.values():
            raise ConfigError(
                f"{type(model).__name__}: expected a config with hidden_size, num_hidden_layers and vocab_size, from which the "
                "memory of activations follows, got one without; write a number for offload_optimizer.ratio, and plan by "
                "--params, --hidden and --layers"
            )
        return cls(**found, longest=_of_config(model, "max_position_embeddings", "n_positions", "max_positions"))


def hidden_size(model: Any) -> int | None:
    """Return the largest width in the model's own config; None if it has none."""
    return _of_config(model, "hidden_size", "d_model", "n_embd", "hidden", "hidden_sizes")


def _of_config(model: Any, *names: str) -> int | None:
    """Return the first of these in the model's config, or in its part about text; of several sizes the largest."""
    config = getattr(model, "config", None)
    sections = (config, getattr(config, "text_config", None))
    found = (getattr(section, name, None) for section in sections for name in names)
    sizes = (max(value, default=None) if isinstance(value, list | tuple) else value for value in found)
    return next((size for size in sizes if isinstance(size, int)), None)


def activations_of(config: Config, width: Width, seq_length: int, *, device_is_host: bool = False) -> tuple[int, int]:
    """Return the estimated bytes of activations of a micro-batch: on the device, and moved to host memory or disk until their
    backward.

    34 s b h bytes a layer in 16 bits: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models
    (https://arxiv.org/abs/2205.05198), section 4.1, without the term in s^2, since attention kernels keep no scores. With
    checkpointing 2 s b h a layer, and one layer in full. The logits are added: in the compute type, in fp32 for the loss, and
    their gradient in fp32.
    """
    tokens, itemsize = config.batch.micro_batch_size * seq_length, itemsize_of(config)
    checkpointing, stays = config.zstore.gradient_checkpointing, ("device", "host") if device_is_host else ("device",)
    input_bytes, layer_bytes = (factor * tokens * width.hidden * itemsize // 2 for factor in (2, 34))
    kept_bytes = width.num_layers * (input_bytes if checkpointing else layer_bytes)
    passing_bytes = tokens * width.vocab_size * (itemsize + 2 * 4) + (layer_bytes if checkpointing else 0)
    moved_bytes = 0 if config.activations in stays else kept_bytes
    return kept_bytes - moved_bytes + passing_bytes, moved_bytes
