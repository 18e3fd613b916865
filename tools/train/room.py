"""Whether the drive has room for a run, before its model is built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zstore.engine.config.config import Config
from zstore.engine.config.resolve import ResolveContext
from zstore.engine.plan.rates import find_rates
from zstore.engine.plan.run import budget_of_rank, check_drives, plan_run
from zstore.ranks.world import World
from zstore.store import left_bytes

from ..plan.model import slots_of_module
from ..sample.models import build_model


def require_room(model: str, seq_len: int, config: Config, answers: Mapping[str, Any]) -> None:
    """Raise DiskFullError, on every rank, if a drive has no room for the files of a run of `model`, and BudgetError
    if its plan cannot be met (all ranks). Nothing is built: building a large model takes minutes."""
    paths = {*config.offload_optimizer.nvme_paths, *config.offload_param.nvme_paths}
    if not paths:
        return
    world = World.current()
    rates = find_rates(config, world)
    resolved = config.answered(answers).resolve(
        ResolveContext(world_size=world.world_size, native=() if rates is None else rates.native, answers=answers)
    )
    with torch.device("meta"):
        module = build_model(model, seq_len)
    plan = plan_run(
        module,
        resolved,
        world,
        slots_of_module(module, resolved.optimizer),
        budget_of_rank(resolved, world),
        device_is_host=world.device.type == "cpu",
    )
    there = [path for path in paths if Path(path).is_dir()]
    if len(there) == len(paths):
        check_drives(plan, resolved, world, {path: left_bytes(path, world.rank) for path in there})
