"""`deepspeed.comm`: besides torch.distributed's functions, which are its collectives."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch.distributed as torch_dist

from zstore.engine.report.comms import HasWorld, log_comms_summary
from zstore.errors import UsageError

inference_all_reduce = torch_dist.all_reduce
_engines: list[weakref.ref[HasWorld]] = []
"""The engine that was made last."""


def know(engine: HasWorld) -> None:
    """Let `log_summary` be of this engine's collectives."""
    _engines[:] = [weakref.ref(engine)]


def log_summary(show_straggler: bool = False) -> None:
    """Log, on rank 0, a table of the collectives of the engine that was made last, with `"comms_logger"` enabled (all ranks).

    `show_straggler` adds the seconds beyond those of the rank that spent fewest. Collectives that the script itself starts
    are torch's, and not in it. Raises UsageError if nothing is timed.
    """
    engine = _engines[0]() if _engines else None
    if engine is None:
        raise UsageError("deepspeed.comm.log_summary(): there is no engine; call it after deepspeed.initialize()")
    log_comms_summary(engine, show_straggler=show_straggler)


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return torch_dist.group.WORLD


def get_local_rank() -> int:
    """Return this rank's number on its machine, as the launcher says; -1 without one."""
    return int(os.environ.get("LOCAL_RANK", "-1"))


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the ranks of a group, by default of all."""
    return torch_dist.get_process_group_ranks(torch_dist.group.WORLD if group is None else group)
