"""A plan: what each parameter needs, where its state is placed, and the bytes that a step moves, with its report. Also its
inputs from a model and a config, for the engine and `zstore plan`, with estimates of activations. Pure functions."""

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
    """Bytes by tier, without padding, as the store counts them. Each byte is on exactly one of the three."""

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
    """None: the shape of the parameter."""


Slots = tuple[str | TensorSlot, ...]
"""The fp32 arrays of an optimizer for a parameter, excluding its master."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Need:
    """What placement needs to know about a parameter. Parameters that differ only in name share an instance, so that the
    time to plan depends on the number of distinct ones."""

    grid: Grid
    """Partition of the arrays of its state (`ParameterRecord.state_grid`)."""
    shard: int
    """Index of this rank's shard on `grid`."""
    dtype: str
    """Dtype of the parameter, such as "bfloat16"."""
    gradient_dtype: str
    """Dtype in which its gradient is stored until the update."""
    slots: Slots | None
    """None: the parameter is not trained."""
    stays_gathered: bool
    """Every rank always has all values on its device: at stages 0 to 2, and below the persistence threshold."""
    whole_gradient: bool = False
    """The full gradient accumulates on the device and is reduced once per step (stages 0 and 1 with several ranks)."""
    state_ranks: int = 1
    """Number of ranks that `grid` is divided among."""
    secondary_numel: int = 0
    """Elements of this rank's part of a second copy of the parameter (`zero_hpz_partition_size`), on the device."""
    moments: Moments = "fp32"
    """Dtype of the moments among the slots; other slots are in fp32."""

    @property
    def update_bytes(self) -> int:
        """Memory for updating a whole tensor: master, slots and gradient, or four times that if ranks exchange them; 0 for an
        update in tiles."""
        shapes = [slot.shape for slot in self.slots or () if isinstance(slot, TensorSlot)]
        numel = 2 * self.numel + sum(self.numel if shape is None else math.prod(shape) for shape in shapes)
        return 4 * numel * (4 if self.grid.num_shards > 1 else 1) if shapes else 0

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
    """Maximum elements of parameters in host memory with "nvme". None: as many as fit in the budget; without one, none."""
    budget_bytes: int | None = None
    """Host memory for buffers and arrays. None: no limit, and "nvme" means on disk."""
    buffer_bytes: int = 0
    """Transfer buffers of all pools together."""
    buffer_bytes_for: Callable[[int], int] | None = field(default=None, compare=False)
    """Returns `buffer_bytes` for a given budget; None if it does not depend on the budget."""
    update_buffer_bytes: int | None = None
    """Part of `buffer_bytes` for the update; None: all of it."""
    stores_gradients: bool | None = True
    """Gradients are stored until the update, for a global norm or because they accumulate. False: each is used as it
    arrives. None: like False, but gradients are stored in host memory if the budget has room for them and all state."""
    accumulation_steps: int = 1
    """Forward passes per step on this rank; each reads parameters on disk again."""
    gathers: int = 2
    """Approximate number of gathers of a parameter per micro-batch: for forward and for backward. A parameter that is
    still gathered is not gathered again; one that two units share may be gathered for both."""
    device_is_host: bool = True
    """The device is the CPU, so arrays on the device are in host memory too, outside the budget."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """The tiers of one parameter's state. See [Note: placement] for the master of an fp32 parameter."""

    state: TierName
    """Optimizer slots, and the master if it is separate."""
    parameter: TierName
    """This rank's rows between uses; all values if it stays gathered."""
    gradient: TierName
    """This rank's rows while they wait for the update. "device": in the buffer that the backward pass writes."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The tiers of one rank's training state, and the bytes that a step moves."""

    settings: PlacementSettings
    placements: Mapping[str, Places]
    """The tiers by parameter, in order."""
    stay_gathered: frozenset[str]
    """Parameters of which every rank always has all values on its device."""
    held: Mapping[str, Bytes]
    """By kind: "parameters" (including parameters that are their own fp32 master), "secondary parameters" (of
    `zero_hpz_partition_size`), "gradients" (none if they are used as they arrive), "master", each slot, "buffers"."""
    read_bytes: int
    """Read from disk per step, with checksums and padding; stage 3 reads a little less, as gathered rows are not read."""
    written_bytes: int
    """Written to disk per step, with checksums and padding."""
    files: tuple[tuple[Field, int], ...]
    """Field and bytes on disk of each file, including index, checksums and padding, in order of creation."""
    budget_used_bytes: int
    """Bytes of host memory that count against the budget, buffers included."""
    budget_full_bytes: int
    """Smallest budget that keeps everything in memory (except parameters beyond `max_in_cpu_numel`)."""
    gathered_bytes: int
    """Peak bytes of gathered parameters: a unit in use and the next one. Outside the budget."""
    packs_small: bool = False
    """Whether small shards on disk share files (`Store.share_files`)."""
    shared_bytes: int = 0
    """Bytes in host memory of small parameters, for `Store.expect_shared_bytes`."""
    update_bytes: int = 0
    """Peak bytes for updating a whole tensor. Outside the budget."""

    @property
    def file_bytes(self) -> int:
        """Bytes of all files; twice as much is needed while a checkpoint links the previous version."""
        return sum(nbytes for _, nbytes in self.files)

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, including the device's if it is the CPU. Buffers count only if there are files, since
        otherwise almost none are used."""
        kinds = [held for kind, held in self.held.items() if kind != "buffers" or self.files]
        on_device = sum(held.device for held in kinds) if self.settings.device_is_host else 0
        return on_device + sum(held.host for held in kinds)

    @property
    def held_total(self) -> Bytes:
        """Bytes of all kinds."""
        return Bytes(**{place: sum(vars(held)[place] for held in self.held.values()) for place in vars(Bytes())})


def describe(plan: Plan, *, world_size: int = 1, local_ranks: int = 1) -> str:
    """Return the text logged at startup: bytes per tier, the host budget, and bytes moved per step. `plan` is rank 0's;
    `local_ranks` ranks share the machine's drive."""
    settings = plan.settings
    lines = [f"placement of the state on rank 0 of {world_size}:"]
    for place, total in vars(plan.held_total).items():
        sizes = {kind: getattr(held, place) for kind, held in plan.held.items()}
        parts = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in sizes.items() if nbytes)
        lines += [f"  {place}: {format_bytes(total)}: {parts}"] if parts else []
    if settings.budget_bytes is not None:
        used, full = format_bytes(plan.budget_used_bytes), format_bytes(plan.budget_full_bytes)
        lines.append(
            f"  host budget: {used} of {format_bytes(settings.budget_bytes)} used; {full} would suffice for everything"
        )
    if plan.files:
        moved = (plan.read_bytes, plan.written_bytes, plan.file_bytes)
        read, written, files = (format_bytes(nbytes * local_ranks) for nbytes in moved)
        unit = "step" if settings.gathers > 1 else "forward"  # frozen: there is no backward
        writes = f" and writes {written}" if plan.written_bytes else ""
        lines.append(f"  each {unit} of this machine's ranks ({local_ranks}) reads about {read} from disk{writes}")
        lines.append(f"  their files take {files}, and a checkpoint that links them takes the same again")
    if not settings.device_is_host and settings.optimizer != "none" and settings.ratio != 1:
        lines.append(
            f'  results depend on "ratio": {settings.ratio:g}: the device updates the other {1 - settings.ratio:.1%} of the '
            "optimizer state, and rounds differently"
        )
    gathered = f"up to {format_bytes(plan.gathered_bytes)} of gathered parameters on the device, "
    updates = f"{format_bytes(plan.update_bytes)} for updates of whole tensors, "
    transient = (gathered if plan.gathered_bytes else "") + (updates if plan.update_bytes else "")
    lines.append(f"  not counted: {transient}gradients in transit and activations")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class ParameterShape:
    """One parameter of a model, which may be on the meta device."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    """None: floating-point, and cast to the config's precision."""
    is_called: bool = True
    """A unit gathers it; a parameter that no module reads cannot be sharded (stage 3)."""


def gradient_types(config: Config, world_size: int, types: Mapping[str, D]) -> GradientTypes[D]:
    """Return the gradient dtypes of a resolved config, given the dtype of each precision."""
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
    is_partitioned = sharding.parameters or config.offload_param.device != "none"
    gathered = frozenset(_sharded_parameters(shapes, config)) if is_partitioned else frozenset[str]()

    @cache
    def need_of(shape: tuple[int, ...], dtype: str, slot_names: Slots | None, stays: bool) -> Need:
        disk_shape = stored_shape(shape)
        secondary_numel = 0
        if config.secondary_size is not None and not stays:
            group_grid = make_grid(disk_shape, world_size).joined(world_size // config.secondary_size)
            secondary_numel = group_grid.shard_valid_numel(rank % config.secondary_size)
        return Need(
            grid=sharding.state_grid(disk_shape),
            shard=sharding.state_shard(rank),
            dtype=dtype,
            gradient_dtype=types.planned(dtype),
            slots=slot_names,
            stays_gathered=stays,
            secondary_numel=secondary_numel,
            whole_gradient=world_size > 1 and not sharding.gradients,
            state_ranks=world_size if sharding.optimizer_state else 1,
            moments=config.moment_type,
        )

    default_dtype = DTYPES[config.precision]
    return {
        p.name: need_of(p.shape, p.dtype or default_dtype, slots.get(p.name), p.name not in gathered) for p in shapes
    }


def _sharded_parameters(shapes: Sequence[ParameterShape], config: Config) -> Iterator[str]:
    """Yield the parameters that do not stay gathered (stage 3): those with at least as many elements as the threshold,
    or more than earlier ones leave of the model's limit."""
    room_numel = config.zero.stage3_model_persistence_threshold
    for parameter in shapes:
        numel = math.prod(parameter.shape)
        if not parameter.is_called:
            continue
        if numel >= int(config.zero.stage3_param_persistence_threshold) or (
            room_numel is not None and numel > room_numel
        ):
            yield parameter.name
        elif room_numel is not None:
            room_numel -= numel


def placement_settings(config: Config, *, budget_bytes: int | None, device_is_host: bool) -> PlacementSettings:
    """Return the settings of a resolved config; `budget_bytes` is one rank's share of the machine's budget. With ratio
    "auto", no optimizer state is on the device yet: see `fill_device`."""
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
        buffer_bytes_for=partial(buffer_bytes, config),
        update_buffer_bytes=store_options(config, budget_bytes).pool_bytes,
        stores_gradients=True if config.step_overlap != "backward" or steps > 1 or keeps_rows else None,
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
    default_paths = next(filter(None, (config.offload_optimizer.nvme_paths, *groups.values())), ())
    return StoreOptions(
        run_path=default_paths[0] if default_paths else None,
        other_paths=default_paths[1:],
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
    """Return the bytes of the buffers for parameters, none larger than a disk request."""
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
class Dims:
    """The dimensions of a model that determine its activations."""

    hidden: int
    """Width of the residual stream, in elements."""
    num_layers: int
    vocab_size: int
    max_seq_length: int | None = None
    """Tokens of the longest sequence; None if unknown."""

    @classmethod
    def of(cls, model: Any) -> Dims:
        """Return the dimensions in the model's own config, as in transformers. Raises ConfigError if they are missing."""
        dims: dict[str, Any] = {
            "hidden": hidden_size(model),
            "num_layers": _config_int(model, "num_hidden_layers", "num_layers", "n_layer"),
            "vocab_size": _config_int(model, "vocab_size"),
        }
        if None in dims.values():
            raise ConfigError(
                f"{type(model).__name__}: its config lacks hidden_size, num_hidden_layers or vocab_size, which determine the "
                "memory of activations; set a number for offload_optimizer.ratio, and plan with --params, --hidden and "
                "--layers"
            )
        return cls(**dims, max_seq_length=_config_int(model, "max_position_embeddings", "n_positions", "max_positions"))


def hidden_size(model: Any) -> int | None:
    """Return the largest width in the model's own config; None if it has none."""
    return _config_int(model, "hidden_size", "d_model", "n_embd", "hidden", "hidden_sizes")


def _config_int(model: Any, *names: str) -> int | None:
    """Return the first of these in the model's config or its text_config; the largest if it is a list of sizes."""
    config = getattr(model, "config", None)
    sections = (config, getattr(config, "text_config", None))
    values = (getattr(section, name, None) for section in sections for name in names)
    sizes = (max(value, default=None) if isinstance(value, list | tuple) else value for value in values)
    return next((size for size in sizes if isinstance(size, int)), None)


def activations_of(config: Config, dims: Dims, seq_length: int, *, device_is_host: bool = False) -> tuple[int, int]:
    """Return the estimated bytes of a micro-batch's activations: those on the device, and those moved to host memory or disk
    until the backward.

    34 s b h bytes per layer in 16-bit precision: Korthikanti et al., Reducing Activation Recomputation in Large Transformer
    Models (https://arxiv.org/abs/2205.05198), section 4.1, without the term in s^2, since attention kernels store no scores.
    With checkpointing, 2 s b h per layer, and one layer in full. The logits are added: in the compute dtype, in fp32 for the
    loss, and their gradient in fp32.
    """
    tokens, itemsize = config.batch.micro_batch_size * seq_length, itemsize_of(config)
    checkpointing, local = config.zstore.gradient_checkpointing, ("device", "host") if device_is_host else ("device",)
    input_bytes, layer_bytes = (factor * tokens * dims.hidden * itemsize // 2 for factor in (2, 34))
    kept_bytes = dims.num_layers * (input_bytes if checkpointing else layer_bytes)
    transient_bytes = tokens * dims.vocab_size * (itemsize + 2 * 4) + (layer_bytes if checkpointing else 0)
    moved_bytes = 0 if config.activations in local else kept_bytes
    return kept_bytes - moved_bytes + transient_bytes, moved_bytes
