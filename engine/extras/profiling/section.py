"""The section `flops_profiler`."""

from ...config.keys import Section, built
from ...config.values import Bool, Name, Position, Positive, Real


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
    detailed: Bool = built(True)
    """Report each module below the totals, down to `module_depth`."""
    output_file: Name | None = built(None)
    """File that the report is written to; a relative path is relative to the working folder. Unset: to the log."""
