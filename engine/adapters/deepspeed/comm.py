"""`deepspeed.comm`: besides torch.distributed's functions, which are its collectives."""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any

import torch.distributed as torch_dist

from zstore.sizes import format_bytes

_log = logging.getLogger("zstore")
inference_all_reduce = torch_dist.all_reduce
_engines: list[weakref.ref[Any]] = []
"""The engine that was made last."""


def know(engine: Any) -> None:
    """Let `log_summary` be of this engine's collectives."""
    _engines[:] = [weakref.ref(engine)]


def log_summary(show_straggler: bool = False) -> None:
    """Log, on rank 0, the bytes and the time of each kind of collective of the engine that was made last."""
    engine = _engines[0]() if _engines else None
    if engine is not None and engine.global_rank == 0:
        for name, link in engine.statistics().links.items():
            _log.info("%s: %s in %.3f s", name, format_bytes(link.bytes), link.busy_s)


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return torch_dist.group.WORLD


def get_local_rank() -> int:
    """Return this rank's number on its machine, as the launcher says; -1 without one."""
    return int(os.environ.get("LOCAL_RANK", "-1"))


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the ranks of a group, by default of all."""
    return torch_dist.get_process_group_ranks(torch_dist.group.WORLD if group is None else group)
