"""The section `scheduler` of a config: one section of arguments for each schedule, with DeepSpeed's keys and defaults."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .keys import Section, built, by_type
from .values import Auto, BelowOne, Bool, Count, OneOf, Position, Positive, Real, Words, expected

ScheduleName = Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"]

_PER_GROUP = ", or a list with one for each parameter group"
Rates = Annotated[Real | Annotated[tuple[Real, ...], Field(min_length=1)], Words(f"{expected(Real)}{_PER_GROUP}")]
Momenta = Annotated[
    BelowOne | Annotated[tuple[BelowOne, ...], Field(min_length=1)], Words(f"{expected(BelowOne)}{_PER_GROUP}")
]
WarmupType = Annotated[Literal["log", "linear"], OneOf()]


class SchedulerParams(Section):
    """Arguments of every schedule."""

    last_batch_iteration: Position = built(-1)
    """Step to start from; -1: the beginning. A loaded checkpoint has its own."""


class WarmupParams(SchedulerParams):
    """Arguments of a schedule that begins with a warm-up."""

    warmup_num_steps: Count | Auto = built(1000)
    """Steps of the warm-up; 1 counts as 2, as in DeepSpeed, and so does 0, which DeepSpeed refuses since 0.19. "auto": the
    caller's answer, else 1000; in `zstore train` a tenth of the steps, at most that."""
    warmup_type: WarmupType = built("log")
    """Shape of the rise, by default DeepSpeed's."""


class WarmupLRParams(WarmupParams):
    """The rate rises from the minimum to the maximum and stays there."""

    warmup_min_lr: Rates | Auto = built(0.0)
    """Learning rate at the first step. "auto": the caller's answer, else 0."""
    warmup_max_lr: Rates | Auto | None = built(None)
    """Learning rate after the warm-up. "auto": the optimizer's lr. Unset: each parameter group's own."""


class WarmupDecayLRParams(WarmupLRParams):
    """The rate rises from the minimum to the maximum, then falls back linearly."""

    total_num_steps: Positive | Auto
    """Step at which the rate is back at its minimum, for good. "auto": the caller's answer, which `zstore train` gives;
    there is no default."""
    warmup_max_lr: Rates | Auto | None = built(0.001)
    """Learning rate after the warm-up. "auto": the optimizer's lr."""


class WarmupCosineLRParams(WarmupParams):
    """The rate rises to each group's own lr, then falls along half a cosine wave. It is 0 at the very first step."""

    total_num_steps: Positive | Auto
    """Step at which the rate reaches its minimum. "auto": the caller's answer, which `zstore train` gives; there
    is no default."""
    warmup_min_ratio: Real = built(0.0)
    """Fraction of the group's lr at the second step, at which the warm-up begins."""
    cos_min_ratio: Real = built(0.0001)
    """Fraction of the group's lr at the end, and from there on."""


class OneCycleParams(SchedulerParams):
    """The rate rises from the minimum to the maximum and falls back, once; then it decays. Momentum goes the other way."""

    cycle_min_lr: Rates
    """Learning rate at the beginning and at the end of the cycle."""
    cycle_max_lr: Rates
    """Learning rate in its middle."""
    decay_lr_rate: Real = built(0.0)
    """After the cycle the rate is cycle_min_lr / (1 + decay_lr_rate x intervals of decay_step_size)."""
    cycle_first_step_size: Positive = built(2000)
    """Steps of the rise."""
    cycle_second_step_size: Count | None = built(None)
    """Steps of the fall. Unset: as many as the rise has."""
    cycle_first_stair_count: Position = built(0)
    """Steps of the staircase of the rise; 0: linear."""
    cycle_second_stair_count: Position | None = built(None)
    """Steps of the staircase of the fall; 0: linear. Unset: as many as the rise has."""
    decay_step_size: Count = built(0)
    """Steps of an interval of decay after the cycle; 0: no decay."""
    cycle_momentum: Bool = built(True)
    """Cycle the optimizer's first beta, or its momentum if it has no betas. The second beta becomes 0.99, as in
    DeepSpeed."""
    cycle_min_mom: Momenta = built(0.8)
    """Momentum in the middle of the cycle, and at the first step."""
    cycle_max_mom: Momenta = built(0.9)
    """Momentum at the end of the cycle."""
    decay_mom_rate: Real = built(0.0)
    """After the cycle momentum is cycle_max_mom x (1 + decay_mom_rate x intervals of decay_step_size)."""


class LRRangeTestParams(SchedulerParams):
    """The rate grows without limit, to find the largest that trains."""

    lr_range_test_min_lr: Rates = built(0.001)
    """Learning rate at the first step."""
    lr_range_test_step_size: Positive = built(2000)
    """Steps of an interval."""
    lr_range_test_step_rate: Real = built(1.0)
    """The rate is lr_range_test_min_lr x (1 + lr_range_test_step_rate x intervals)."""
    lr_range_test_staircase: Bool = built(False)
    """Count whole intervals only."""


SCHEDULES: Mapping[str, type[SchedulerParams]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
}
_OTHERS = "; or pass any other scheduler to initialize(lr_scheduler=...) and leave this section out"


class SchedulerSection(Section):
    """The learning rate's schedule, stepped by `engine.step()`."""

    variants: ClassVar[Mapping[str, Mapping[str, type[Section]]]] = {"params": SCHEDULES}

    type: Annotated[ScheduleName, OneOf(lambda _: _OTHERS)]
    """Name of the schedule."""
    params: Annotated[SchedulerParams, by_type(SCHEDULES, SchedulerParams)]
