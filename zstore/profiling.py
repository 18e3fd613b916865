"""What a model computes, how well it uses the device, what it sends, and what memory it takes. See docs/metrics.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zstore.engine.profile.memory_needs import (
    MemoryNeed,
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zstore.engine.profile.memory_usage import see_memory_usage
from zstore.engine.profile.profiler import FlopsProfiler, get_model_profile
from zstore.engine.report import comms

if TYPE_CHECKING:
    from zstore.engine import Engine

__all__ = [
    "FlopsProfiler",
    "MemoryNeed",
    "comms_summary",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "get_model_profile",
    "see_memory_usage",
]


def comms_summary(engine: Engine, *, show_straggler: bool = False) -> str:
    """Return a table of this rank's collectives so far, a row for each operation and size, with `"comms_logger"` enabled.

    `show_straggler` adds the seconds beyond those of the rank that spent fewest; then all ranks call this. Raises UsageError
    where collectives are not timed.
    """
    return comms.comms_summary(engine.world, show_straggler=show_straggler)
