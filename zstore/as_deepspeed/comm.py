"""`deepspeed.comm`: torch.distributed, which these collectives are."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as torch_dist
from torch.distributed import *  # noqa: F403 - `names` lists what is given on
from torch.distributed import get_backend, get_global_rank, monitored_barrier

from zstore.engine import init_distributed

__all__ = [
    "get_all_ranks_from_group",
    "get_backend",
    "get_global_rank",
    "get_local_rank",
    "get_world_group",
    "init_distributed",
    "monitored_barrier",
]


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return torch_dist.group.WORLD


def get_local_rank() -> int:
    """Return this rank's number on its machine, as the launcher says; -1 without one."""
    return int(os.environ.get("LOCAL_RANK", "-1"))


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the ranks of a group, by default of all."""
    return torch_dist.get_process_group_ranks(torch_dist.group.WORLD if group is None else group)
