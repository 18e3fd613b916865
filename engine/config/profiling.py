"""The sections `flops_profiler` and `comms_logger`."""

from .keys import Section, not_built
from .values import Bool, Name, Position, Positive, Real, Unread

_FLOPS = "no operations are counted; use torch.utils.flop_counter.FlopCounterMode around a step"
_COUNTED = "collectives are not logged; engine.statistics() counts the bytes and the waits of every link"


class FlopsProfilerSection(Section):
    """Count floating-point operations."""

    switch = "enabled"

    enabled: Bool = not_built(False, _FLOPS)
    """Profile."""
    recompute_fwd_factor: Real = not_built(0.0, _FLOPS)
    """Forward passes that are recomputed."""
    profile_step: Positive = not_built(1, _FLOPS)
    """Step that is profiled."""
    module_depth: Position = not_built(-1, _FLOPS)
    """Depth of the report."""
    top_modules: Positive = not_built(1, _FLOPS)
    """Modules in the report."""
    detailed: Bool = not_built(True, _FLOPS)
    """Report every module."""
    output_file: Name | None = not_built(None, _FLOPS)
    """File of the report."""


class CommsLoggerSection(Section):
    """Log collectives."""

    switch = "enabled"

    enabled: Bool = not_built(False, _COUNTED)
    """Log."""
    verbose: Bool = not_built(False, _COUNTED)
    """Print each collective."""
    prof_all: Bool = not_built(True, _COUNTED)
    """Log all kinds."""
    debug: Bool = not_built(False, _COUNTED)
    """Name the caller."""
    prof_ops: Unread = not_built(None, _COUNTED)
    """Kinds to log."""
