"""The sections `flops_profiler`, `comms_logger` and `timers`."""

from typing import Annotated, Any

from pydantic import BeforeValidator

from zstore.ranks.comms_log import OPERATIONS, operation_named

from .keys import Section, built, no_effect
from .values import Bool, Name, Position, Positive, Real, Words, show


def _operations(value: Any) -> Any:
    """Return the operations that a list names, by our names."""
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"expected a list of names of collectives, got {show(value)}")
    found = [operation_named(name) for name in value]
    unknown = [name for name, known in zip(value, found, strict=True) if known is None]
    if unknown:
        raise ValueError(f"{show(unknown[0])} is no collective; expected some of {', '.join(OPERATIONS)}")
    return tuple(found)


Operations = Annotated[tuple[Name, ...], BeforeValidator(_operations), Words("a list of names of collectives")]


class FlopsProfilerSection(Section):
    """Count the floating-point operations of one step by module, and report them from rank 0. See docs/metrics.md."""

    switch = "enabled"

    enabled: Bool = built(False)
    """Profile one step. Off, since the step that is profiled takes longer."""
    recompute_fwd_factor: Real = built(0.0)
    """Forwards of the model that its backward repeats: 1.0 if all activations are checkpointed. Used for a backward that
    the script starts by `loss.backward()`; in one that `engine.backward` runs, repeated forwards are counted."""
    profile_step: Positive = built(1)
    """Optimizer steps before the one that is profiled, whose first micro-batch counts. 1, so that the first step has warmed
    everything up."""
    module_depth: Position = built(-1)
    """Depth of modules that the report goes down to; 0: the model alone. -1: all of them."""
    top_modules: Positive = no_effect(1, "the report has every module, and no summary by class")
    detailed: Bool = built(True)
    """Report each module below the totals, down to `module_depth`."""
    output_file: Name | None = built(None)
    """File that the report is written to; a relative path is relative to the working folder. Unset: to the log."""


class CommsLoggerSection(Section):
    """Time each collective of the engine, on every rank, and sum up by operation and size. See docs/metrics.md."""

    switch = "enabled"

    enabled: Bool = built(False)
    """Time collectives. Rank 0 logs the table when the engine is closed; `zstore.profiling.comms_summary(engine)` and
    `deepspeed.comm.log_summary()` give it before. Off, since a GPU's times take two events for each collective."""
    verbose: Bool = built(False)
    """Log each collective on rank 0 as it ends. On a GPU the host then waits for it."""
    prof_all: Bool = built(True)
    """Time all kinds; false: those in `prof_ops` alone."""
    debug: Bool = built(False)
    """Name the function that called, in the lines of `verbose` and in the table."""
    prof_ops: Operations = built(())
    """Kinds to time if `prof_all` is false: all_gather, all_to_all, reduce_scatter, broadcast, send, recv, by the names of
    torch or DeepSpeed; or their purpose: all_reduce, which may be made of others, and control, agreement between ranks."""


class ThroughputSection(Section):
    """How many samples a second pass."""

    switch = "enabled"

    enabled: Bool = built(False)
    """Add a line of samples a second over all ranks to those of steps_per_print, the mean since the line before. Off, while
    DeepSpeed has it on: the journal has the times of all steps."""
    synchronized: Bool = no_effect(True, "a line of progress waits for its loss, and so for the device")


class TimersSection(Section):
    """How time is taken."""

    throughput: ThroughputSection = ThroughputSection()
