"""The inputs of `placement` from a model and a config, for the engine and for `zstore plan`, and estimates of activations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from zstore.errors import ConfigError
from zstore.format import make_grid, numpy_dtype, round_up, stored_shape
from zstore.io import PAGE_BYTES
from zstore.store import StoreOptions

from ..config.config import DTYPES, Config
from ..params.sharding import D, GradientTypes, Sharding
from .plan import Need, PlacementSettings, Slots
from .schedule import PrefetchLimits


@dataclass(frozen=True, kw_only=True)
class ParameterShape:
    """One parameter of a model, whatever memory it has."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    """None: floating, so that it is cast to the config's precision."""
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
            moments=config.moments,
        )

    trained_in = DTYPES[config.precision]
    return {
        one.name: of(one.shape, one.dtype or trained_in, slots.get(one.name), one.name not in gathered)
        for one in shapes
    }


def _gathered_for_use(shapes: Sequence[ParameterShape], config: Config) -> Iterator[str]:
    """Yield the parameters that do not keep their gathered copy (stage 3): it has as many elements as the threshold says, or
    more than what earlier ones left of the limit for all."""
    room_numel = config.zero.stage3_model_persistence_threshold
    for one in shapes:
        numel = math.prod(one.shape)
        if not one.is_called:
            continue
        if numel >= config.persistence_threshold_numel or (room_numel is not None and numel > room_numel):
            yield one.name
        elif room_numel is not None:
            room_numel -= numel


def prefetch_limits(config: Config) -> PrefetchLimits:
    """Return how much memory the config lets units take ahead of their use."""
    return PrefetchLimits(
        prefetch_numel=config.prefetch_numel,
        live_numel=config.zero.stage3_max_live_parameters,
        reuse_numel=config.zero.stage3_max_reuse_distance or 0,
    )


# -- settings and buffers -----------------------------------------------------------------------------------------------


def placement_settings(config: Config, *, budget_bytes: int | None, device_is_host: bool) -> PlacementSettings:
    """Return the settings of a resolved config; `budget_bytes` is one rank's share of the machine's budget. With a ratio
    "auto" nothing of the optimizer state is on the device: see `fill_device`."""
    zero = config.settings.zero_optimization
    ratio, steps = zero.offload_optimizer.ratio, config.batch.accumulation_steps
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
        holds_gradients=config.step_overlap != "backward" or steps > 1,
        accumulation_steps=1 if config.frozen else steps,
        gathers=1 if config.frozen else 2,
        device_is_host=device_is_host,
    )


def buffer_bytes(config: Config, budget_bytes: int | None) -> int:
    """Return the bytes of one rank's transfer buffers: of the update, of parameters, gradients and activations on their
    way."""
    options = _store_options(config, budget_bytes)
    state, parameters = config.offload_optimizer.device, config.offload_param.device
    pools = [options.pool_bytes]
    if parameters != "none":
        pools.append(parameter_pool_bytes(config, options))
    if budget_bytes is not None and state != "none" and "nvme" in (state, parameters):
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
    return section.buffer_count * min(section.buffer_size * _itemsize(config), options.span_bytes)


def spill_pool_bytes(budget_bytes: int) -> int:
    """Return the bytes of the buffers through which gradients pass, if a host budget may send them to disk."""
    return min(16 * 2**20, budget_bytes // 16)


def activation_pool_bytes(budget_bytes: int | None) -> int:
    """Return the bytes of the buffers through which activations pass to the disk and back."""
    most = 32 * 2**20
    return most if budget_bytes is None else min(most, budget_bytes // 16)


def _itemsize(config: Config) -> int:
    """Return the bytes of an element in the type that a resolved config computes in."""
    return numpy_dtype(DTYPES[config.precision]).itemsize


# -- activations --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Width:
    """The dimensions of a model that its activations follow from."""

    hidden: int
    """Width of the residual stream, in elements."""
    num_layers: int
    vocab_size: int
    longest: int | None = None
    """Tokens of the longest sequence; None: not known."""

    @classmethod
    def of(cls, model: Any) -> Width:
        """Return the dimensions in the model's own config, as transformers has it. Raises ConfigError if they are not there."""
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
    """Return the width that the model's own config names, of several the largest; None if it names none."""
    return _of_config(model, "hidden_size", "d_model", "n_embd", "hidden", "hidden_sizes")


def _of_config(model: Any, *names: str) -> int | None:
    """Return the first of these that the model's config has, or the part of it about text; of several sizes the largest."""
    config = getattr(model, "config", None)
    sections = (config, getattr(config, "text_config", None))
    found = (getattr(section, name, None) for section in sections for name in names)
    sizes = (max(value, default=None) if isinstance(value, list | tuple) else value for value in found)
    return next((size for size in sizes if isinstance(size, int)), None)


def activations_of(config: Config, width: Width, seq_length: int, *, device_is_host: bool = False) -> tuple[int, int]:
    """Return the estimated bytes of activations of a micro-batch of a resolved config: those on the device, and those that go
    to host memory or disk until their backward.

    34 s b h bytes a layer in 16 bits: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models
    (https://arxiv.org/abs/2205.05198), section 4.1, without the term in s^2, which attention kernels that keep no scores
    do not have. With checkpointing of every layer 2 s b h, and one layer in full. The logits are added: once in the
    compute type, in fp32 for the loss, and the gradient of that.
    """
    tokens, itemsize = config.batch.micro_batch_size * seq_length, _itemsize(config)
    checkpointing, stays = config.own.gradient_checkpointing, ("device", "host") if device_is_host else ("device",)
    input_bytes, layer_bytes = (factor * tokens * width.hidden * itemsize // 2 for factor in (2, 34))
    kept_bytes = width.num_layers * (input_bytes if checkpointing else layer_bytes)
    passing_bytes = tokens * width.vocab_size * (itemsize + 2 * 4) + (layer_bytes if checkpointing else 0)
    moved_bytes = 0 if config.activations in stays else kept_bytes
    return kept_bytes - moved_bytes + passing_bytes, moved_bytes
