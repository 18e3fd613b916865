"""A model's computation, its use of the device, its communication and its memory. See docs/metrics.md."""

from zstore.engine.extras.profiling.memory_needs import (
    MemoryNeed,
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zstore.engine.extras.profiling.memory_usage import see_memory_usage
from zstore.engine.extras.profiling.profiler import FlopsProfiler, get_model_profile
from zstore.engine.report.comms import comms_summary

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
