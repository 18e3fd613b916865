"""A model's computation, its use of the device, its communication and its memory. See docs/metrics.md."""

from zstore.engine.report.comms import comms_summary
from zstore.engine.report.profile.memory_needs import (
    MemoryNeed,
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zstore.engine.report.profile.memory_usage import see_memory_usage
from zstore.engine.report.profile.profiler import FlopsProfiler, get_model_profile

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
