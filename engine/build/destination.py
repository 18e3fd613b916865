"""Where the parameters of a model that is being built go, by the config that will train it."""

from __future__ import annotations

from dataclasses import dataclass

from zstore.ranks.world import World
from zstore.store import StoreOptions, TensorStore

from ..config import Config
from ..optim.state import TierName
from ..optim.store import open_store, store_key
from ..plan.run import budget_of_rank
from .parked import Builder, open_builder

_THRESHOLD_NUMEL = 100_000
"""Smallest parameter that is put away where the config leaves it open."""
_TIERS: dict[str, TierName] = {"none": "device", "cpu": "host", "nvme": "disk"}


@dataclass(frozen=True)
class BuildPlan:
    """Where parameters go while a model is built."""

    tier: TierName
    threshold_numel: int
    """Smaller parameters stay in memory."""


def plan_building(config: Config | None, world: World) -> BuildPlan | None:
    """Return where parameters go; None where they stay whole in memory. The config need not be resolved."""
    if config is None:
        return BuildPlan("host", _THRESHOLD_NUMEL) if world.world_size > 1 else None
    zero = config.settings.zero_optimization
    state = _TIERS[config.offload_optimizer.device]
    own = _TIERS[config.offload_param.device]
    if own == state == "device" and (config.stage < 3 or world.world_size == 1):
        return None
    # Where the fp32 values will rest, which need no copy then.
    halves = config.settings.bf16.enabled is not False or config.settings.fp16.enabled is not False
    first, second = (state, own) if halves else (own, state)
    tier = first if first != "device" else second
    threshold = zero.stage3_param_persistence_threshold
    if config.stage < 3 or not isinstance(threshold, int):
        threshold = _THRESHOLD_NUMEL
    return BuildPlan("host" if tier == "device" else tier, threshold)


def open_building(config: Config | None, world: World, plan: BuildPlan) -> tuple[Builder, bool]:
    """Return the builder for a config, and whether it is a new one: all that is built by one config shares a store (all
    ranks)."""
    if config is None:
        return Builder(TensorStore(StoreOptions(), rank=world.rank), world, key=None, tier=plan.tier), True
    former = open_builder(store_key(config))
    if former is not None:
        return former, False
    store = open_store(config, world, budget_of_rank(config, world), pins=world.device.type == "cuda")
    return Builder(store, world, key=store_key(config), tier=plan.tier), True
