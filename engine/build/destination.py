"""The tier of the parameters of a model that is being built, by the config that will train it."""

from __future__ import annotations

from zstore.ranks.world import World
from zstore.store import StoreOptions, TensorStore, TierName

from ..config.config import Config
from ..plan.run import budget_of_rank
from .builder import Builder, open_builder
from .store import open_store, store_key

_THRESHOLD_NUMEL = 100_000
"""Smallest parameter that is sharded if the config leaves it open."""
_TIERS: dict[str, TierName] = {"none": "device", "cpu": "host", "nvme": "disk"}


def builder_for(config: Config | None, world: World) -> tuple[Builder | None, bool]:
    """Return the builder for a config, which need not be resolved, and whether it is a new one; None if parameters stay
    whole in memory (all ranks).

    All that is built by one config shares a store.
    """
    if config is None:
        if world.world_size == 1:
            return None, True
        store = TensorStore(StoreOptions(), rank=world.rank)
        return Builder(store, world, key=None, tier="host", threshold_numel=_THRESHOLD_NUMEL), True
    tier = _tier(config, world)
    if tier is None:
        return None, True
    key = store_key(config)
    former = open_builder(key)
    if former is not None:
        return former, False
    threshold = config.zero.stage3_param_persistence_threshold
    if config.stage < 3 or not isinstance(threshold, int):
        threshold = _THRESHOLD_NUMEL
    store = open_store(config, world, budget_of_rank(config, world), pins=world.device.type == "cuda")
    return Builder(store, world, key=key, tier=tier, threshold_numel=threshold), True


def _tier(config: Config, world: World) -> TierName | None:
    """Return the tier of parameters until they are trained: that of their later fp32 values, which need no copy then."""
    state, own = _TIERS[config.offload_optimizer.device], _TIERS[config.offload_param.device]
    if own == state == "device" and (config.stage < 3 or world.world_size == 1):
        return None
    # Rows that stay the parameter's own cross to the device.
    fetched: TierName = "pinned" if own == "host" else own
    is_16bit = config.settings.bf16.enabled is not False or config.settings.fp16.enabled is not False
    order = (state, own) if is_16bit else (fetched, state)
    return next((tier for tier in order if tier != "device"), "host")
