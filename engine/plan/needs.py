"""Makes the inputs of `placement` from a model and a config, for the engine and for `zstore plan`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from zstore.format import make_grid, numpy_dtype, round_up, stored_shape
from zstore.io import PAGE_BYTES
from zstore.store import StoreOptions

from ..config.config import DTYPES, Config
from ..params.sharding import D, GradientTypes, Sharding
from .plan import Need, PlacementSettings, Slots, slots_at
from .schedule import PrefetchLimits


@dataclass(frozen=True, kw_only=True)
class ParameterShape:
    """One parameter of a model, whatever memory it has."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As it is trained: floating types are cast to the config's precision."""
    is_called: bool = True
    """Some unit gathers it; one that no module reads cannot be sharded (stage 3)."""


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
    shapes: Sequence[ParameterShape],
    slots: Mapping[str, Slots],
    config: Config,
    *,
    world_size: int,
    rank: int,
) -> dict[str, Need]:
    """Return the needs of the parameters on `rank`, by name; `slots` are those of the trained ones, by name."""
    sharding = Sharding.of_stage(config.stage, world_size)
    rests_apart = sharding.parameters or config.offload_param.device != "none"
    types = gradient_types(config, world_size, DTYPES)
    apart = _gathered_for_use(shapes, config) if rests_apart else frozenset()

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
            slots=None if kept is None else slots_at(kept, world_size),
            stays_gathered=stays,
            secondary_numel=secondary_numel,
            whole_gradient=world_size > 1 and not sharding.gradients,
            state_ranks=world_size if sharding.optimizer_state else 1,
            moments=config.moments,
        )

    return {one.name: of(one.shape, one.dtype, slots.get(one.name), one.name not in apart) for one in shapes}


def _gathered_for_use(shapes: Sequence[ParameterShape], config: Config) -> frozenset[str]:
    """Return the parameters that do not keep their gathered copy (stage 3): it has as many elements as the threshold
    says, or more than what earlier ones left of the limit for all."""
    found: list[str] = []
    limit_numel, kept_numel = config.zero.stage3_model_persistence_threshold, 0
    for one in shapes:
        numel = math.prod(one.shape)
        fits = limit_numel is None or kept_numel + numel <= limit_numel
        if one.is_called and not (fits and numel < config.persistence_threshold_numel):
            found.append(one.name)
        elif one.is_called:
            kept_numel += numel
    return frozenset(found)


def prefetch_limits(config: Config) -> PrefetchLimits:
    """Return how much memory the config lets units take ahead of their use."""
    return PrefetchLimits(
        prefetch_numel=config.prefetch_numel,
        live_numel=config.zero.stage3_max_live_parameters,
        reuse_numel=config.zero.stage3_max_reuse_distance or 0,
    )


def placement_settings(config: Config, *, budget_bytes: int | None, device_is_host: bool) -> PlacementSettings:
    """Return the settings of a resolved config; `budget_bytes` is one rank's share of the machine's budget. With a ratio
    "auto" nothing of the optimizer state is on the device: see `fill_device`."""
    zero = config.settings.zero_optimization
    ratio = zero.offload_optimizer.ratio
    return PlacementSettings(
        optimizer=config.offload_optimizer.device,
        ratio=1.0 if ratio == "auto" else ratio,
        parameters=config.offload_param.device,
        max_in_cpu_numel=zero.offload_param.max_in_cpu,
        budget_bytes=budget_bytes,
        buffer_bytes=buffer_bytes(config, budget_bytes),
        buffers_of=partial(buffer_bytes, config),
        update_buffer_bytes=_store_options(config, budget_bytes).pool_bytes,
        # Within the backward each gradient is used as it arrives.
        holds_gradients=config.step_overlap != "backward" or config.batch.accumulation_steps > 1,
        accumulation_steps=1 if config.frozen else config.batch.accumulation_steps,
        gathers=1 if config.frozen else 2,
        device_is_host=device_is_host,
    )


def buffer_bytes(config: Config, budget_bytes: int | None) -> int:
    """Return the bytes of one rank's transfer buffers: of the update, of parameters, gradients and activations on their
    way."""
    options = _store_options(config, budget_bytes)
    pools = [options.pool_bytes]
    if config.offload_param.device != "none":
        pools.append(parameter_pool_bytes(config, options))
    tiers = (config.offload_optimizer.device, config.offload_param.device)
    if budget_bytes is not None and tiers[0] != "none" and "nvme" in tiers:
        pools.append(spill_pool_bytes(budget_bytes))
    if config.activations == "disk":
        pools.append(activation_pool_bytes(budget_bytes))
    return sum(round_up(nbytes, PAGE_BYTES) for nbytes in pools)


def _store_options(config: Config, budget_bytes: int | None) -> StoreOptions:
    io = config.io
    return StoreOptions(host_budget_bytes=budget_bytes, block_bytes=io.block_bytes, most_pool_bytes=io.pool_bytes)


def parameter_pool_bytes(config: Config, options: StoreOptions) -> int:
    """Return the bytes of the buffers through which parameters pass: none is larger than one request to the disk."""
    section = config.zero.offload_param
    return section.buffer_count * min(
        section.buffer_size * numpy_dtype(DTYPES[config.precision]).itemsize, options.span_bytes
    )


SPILL_POOL_BYTES = 16 * 1024 * 1024


def spill_pool_bytes(budget_bytes: int) -> int:
    """Return the bytes of the buffers through which gradients pass, if a host budget may send them to disk."""
    return min(SPILL_POOL_BYTES, budget_bytes // 16)


ACTIVATION_POOL_BYTES = 32 * 1024 * 1024


def activation_pool_bytes(budget_bytes: int | None) -> int:
    """Return the bytes of the buffers through which activations pass to the disk and back."""
    return ACTIVATION_POOL_BYTES if budget_bytes is None else min(ACTIVATION_POOL_BYTES, budget_bytes // 16)
