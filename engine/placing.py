"""The plan of a run: where this rank's training state will rest, checked against what the machine has."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from zstore.dist import World
from zstore.errors import DiskFullError, UsageError
from zstore.sizes import format_bytes

from .config import Config
from .needs import find_needs, placement_settings, shapes_of_model, units_of_model
from .placement import Plan, make_plan
from .placement_report import check_fits, describe

_AUTO_PERCENT = 60

_log = logging.getLogger("zstore")


def budget_of_rank(config: Config, world: World) -> int | None:
    """Return this rank's share of the machine's host budget in bytes; None: no limit was set."""
    budget = config.host_budget_bytes
    if budget == "auto":
        budget = _available_bytes() * _AUTO_PERCENT // 100
    return None if budget is None else budget // world.local_world_size


def plan_run(
    model: nn.Module,
    config: Config,
    world: World,
    slots: Mapping[str, tuple[str, ...]],
    budget_bytes: int | None,
    *,
    device_is_host: bool,
) -> Plan:
    """Return where everything will rest (all ranks). Nothing is changed.

    `slots` has what the optimizer keeps of each parameter that it updates. Raises BudgetError, on every rank, where it
    cannot fit into the host budget or the device.
    """
    shapes = shapes_of_model(model, config.precision)
    plan: Plan | None = None
    error: Exception | None = None
    try:
        plan = make_plan(
            find_needs(shapes, slots, config, world_size=world.world_size, rank=world.rank),
            placement_settings(config, budget_bytes=budget_bytes, device_is_host=device_is_host),
            units_of_model(model, config.live_numel),
        )
        check_fits(
            plan,
            device_bytes=torch.cuda.mem_get_info(world.device)[1] if world.device.type == "cuda" else None,
            local_ranks=world.local_world_size,
        )
    except Exception as raised:
        error = raised
    world.raise_together(error)
    if plan is None:
        raise UsageError("no plan was made")
    if world.rank == 0 and plan.held_total.device < plan.held_total.total - plan.held["buffers"].total:
        _log.info("%s", describe(plan, world_size=world.world_size, local_ranks=world.local_world_size))
    return plan


def check_drives(plan: Plan, config: Config, world: World, present_bytes: int) -> None:
    """Raise DiskFullError, on every rank, where the drives have no room for the plan's files (all ranks).

    `present_bytes` of this rank's files are there already.
    """
    folders = dict.fromkeys((*config.offload_optimizer.nvme_paths, *config.offload_param.nvme_paths))
    error: Exception | None = None
    if plan.file_bytes:
        free = sum({folder.stat().st_dev: shutil.disk_usage(folder).free for folder in folders}.values())
        needed = (plan.file_bytes - present_bytes) * world.local_world_size
        if needed > free:
            error = DiskFullError(
                f"the plan's files take {format_bytes(needed)} in {', '.join(map(str, folders))}, where "
                f"{format_bytes(free)} are free: give another `nvme_path`, or raise `host_budget_bytes`"
            )
    world.raise_together(error)


def _available_bytes() -> int:
    """Return the bytes of host memory that are available on this machine."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise UsageError(
        'host_budget_bytes "auto": this system does not tell its available memory; write a number of bytes'
    )
