"""Learning rate schedules that a config can name, with DeepSpeed's arguments and values.

Source of the values: deepspeed/runtime/lr_schedules.py (0.19). The first step of training uses a schedule's initial
values; step s + 2 uses its values for iteration s, with s being `last_batch_iteration`.

An engine advances its own schedule. A `step()` in the training loop, as in plain torch loops, then changes nothing and logs
one warning that names the call to remove. A schedule without an engine is advanced by the training loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zstore.errors import ConfigError, UsageError

from ..config.optimizers import (
    LRRangeTestParams,
    OneCycleParams,
    SchedulerParams,
    SchedulerSection,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
    WarmupParams,
)
from ..runtime.process import warn_once

_BETA2 = 0.99
"""OneCycle's second beta."""


class NamedSchedule(LRScheduler):
    """Base class of the schedules: the position, and the groups' resulting settings. A subclass sets up its formula before it
    calls this `__init__`, which applies the first step's settings to the groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.engine_advances = False
        """Whether an engine advances it."""
        self._warned = False
        without_initial = [group for group in optimizer.param_groups if "initial_lr" not in group]
        super().__init__(optimizer)
        for group in without_initial:
            # torch adds it for its own formulas; it is not a setting to be saved in a checkpoint.
            del group["initial_lr"]

    def _initial_step(self) -> None:
        self.advance()

    @property
    def last_batch_iteration(self) -> int:
        """The position: -1 at the first step."""
        return self.last_epoch - 1

    def apply(self) -> None:
        """Apply the settings of this position to the groups."""
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], torch.Tensor):  # a compiled step or the script may reference it
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def advance(self) -> None:
        """Advance by one step (called by the engine)."""
        self.last_epoch += 1
        self.apply()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one step, or to the given iteration; do nothing if `engine.step()` advances the schedule."""
        if not self.engine_advances:
            self.last_epoch = (self.last_epoch if last_batch_iteration is None else last_batch_iteration) + 1
            self.apply()
        elif not self._warned:
            self._warned = True
            warn_once("engine.step() advances the learning rate schedule; remove scheduler.step() from the loop")

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.last_epoch = int(state["last_batch_iteration"]) + 1
        self.apply()


def _per_group(optimizer: torch.optim.Optimizer, params: SchedulerParams, name: str) -> list[float]:
    """Return the value for each parameter group. Raises ConfigError if the number of values is not the number of groups."""
    num_groups, value = len(optimizer.param_groups), getattr(params, name)
    if not isinstance(value, Sequence):
        return [value] * num_groups
    if len(value) != num_groups:
        raise ConfigError(
            f"scheduler.params.{name}: expected one number, or a list of {num_groups}, one for each parameter group of "
            f"the optimizer; got {len(value)}"
        )
    return list(value)


def _interpolate(start: Sequence[float], stop: Sequence[float], fraction: float) -> list[float]:
    return [low + (high - low) * fraction for low, high in zip(start, stop, strict=True)]


class _Warmup(NamedSchedule):
    """A schedule that begins with a warm-up, in which a fraction rises from `_min_fraction` to 1, as log(s + 1) / log(n) or
    s / n at iteration s < n. At the first step the fraction is 0."""

    _min_fraction = 0.0

    def __init__(self, optimizer: torch.optim.Optimizer, params: WarmupParams) -> None:
        self._warmup_steps = self._total_steps = max(2, int(params.warmup_num_steps))
        self._warmup_type = params.warmup_type
        if isinstance(params, WarmupDecayLRParams | WarmupCosineLRParams):
            self._total_steps = int(params.total_num_steps)
        if self._total_steps < self._warmup_steps:
            warn_once(
                "scheduler.params: total_num_steps %d is less than warmup_num_steps %d, so the warm-up does not end before it",
                self._total_steps,
                self._warmup_steps,
            )
        super().__init__(optimizer)

    def _fraction(self) -> float:
        step, steps = self.last_batch_iteration, self._warmup_steps
        if step < 0:
            return 0.0
        if step >= steps:
            return self._fraction_after_warmup(step)
        progress = 1.0 / math.log(steps) * math.log(step + 1) if self._warmup_type == "log" else step / steps
        return self._min_fraction + progress * (1.0 - self._min_fraction)

    def _fraction_after_warmup(self, step: int) -> float:
        """Return the fraction after the warm-up."""
        return 1.0


class WarmupLR(_Warmup):
    """The learning rate rises from `warmup_min_lr` to `warmup_max_lr` within `warmup_num_steps`, and stays there.

    If `warmup_max_lr` is None, it is each parameter group's own learning rate.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: WarmupLRParams) -> None:
        self._min_lr = _per_group(optimizer, params, "warmup_min_lr")
        if params.warmup_max_lr is None:
            self._max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        else:
            self._max_lr = _per_group(optimizer, params, "warmup_max_lr")
        super().__init__(optimizer, params)

    def get_lr(self) -> list[Any]:
        return _interpolate(self._min_lr, self._max_lr, self._fraction())


class WarmupDecayLR(WarmupLR):
    """Like WarmupLR; after the warm-up the distance to `warmup_min_lr` falls linearly to 0 at `total_num_steps`."""

    def _fraction_after_warmup(self, step: int) -> float:
        return max(0.0, float(self._total_steps - step) / max(1.0, self._total_steps - self._warmup_steps))


class WarmupCosineLR(_Warmup):
    """Each group's own learning rate times a ratio, which rises from `warmup_min_ratio` to 1, then falls along half a
    cosine wave to `cos_min_ratio` at `total_num_steps`, and stays there. At the first step it is 0."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: WarmupCosineLRParams) -> None:
        self._base_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self._min_fraction, self._final_ratio = params.warmup_min_ratio, params.cos_min_ratio
        super().__init__(optimizer, params)

    def get_lr(self) -> list[Any]:
        ratio = self._fraction()
        return [lr * ratio for lr in self._base_lr]

    def _fraction_after_warmup(self, step: int) -> float:
        progress = min(1.0, (step - self._warmup_steps + 1) / max(1, self._total_steps - self._warmup_steps))
        return max(0.0, self._final_ratio + (1.0 - self._final_ratio) * ((1 + math.cos(math.pi * progress)) / 2))


class OneCycle(NamedSchedule):
    """One cycle: the learning rate rises and falls between its bounds, and momentum does the opposite; then both decay.

    Momentum is the first beta, while the second is always 0.99; or `momentum` of an optimizer without betas.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: OneCycleParams) -> None:
        second, stairs = params.cycle_second_step_size, params.cycle_second_stair_count
        self._first = float(params.cycle_first_step_size)
        self._second = self._first if second is None else float(second)
        self._total_steps = self._first + self._second
        self._first_stairs = params.cycle_first_stair_count
        self._second_stairs = self._first_stairs if stairs is None else stairs
        self._min_lr = _per_group(optimizer, params, "cycle_min_lr")
        self._max_lr = _per_group(optimizer, params, "cycle_max_lr")
        self._min_momentum = _per_group(optimizer, params, "cycle_min_mom")
        self._max_momentum = _per_group(optimizer, params, "cycle_max_mom")
        self._lr_decay, self._momentum_decay = params.decay_lr_rate, params.decay_mom_rate
        self._decay_steps = params.decay_step_size
        self._momentum = self._momentum_setting(optimizer.param_groups) if params.cycle_momentum else None
        super().__init__(optimizer)

    def _momentum_setting(self, groups: Sequence[Mapping[str, Any]]) -> Literal["betas", "momentum"] | None:
        """Return the name of the groups' setting that is cycled. Raises ConfigError for a momentum of 0, which keeps no
        buffer."""
        if all("betas" in group for group in groups):
            return "betas"
        if all(group.get("momentum", 0) > 0 for group in groups):
            if min(self._min_momentum) <= 0:
                raise ConfigError(
                    "scheduler.params.cycle_min_mom: expected more than 0 for an optimizer with momentum, which keeps no "
                    "state of it at 0"
                )
            return "momentum"
        warn_once(
            "scheduler.params.cycle_momentum: the optimizer has neither betas nor momentum, so only the learning rate "
            "is cycled"
        )
        return None

    def get_lr(self) -> list[Any]:
        step = self.last_batch_iteration
        if step < 0:
            return list(self._min_lr)
        if step < self._total_steps:
            return _interpolate(self._min_lr, self._max_lr, self._height(step + 1))
        decay = self._decay(self._lr_decay)
        return [low / decay for low in self._min_lr]

    def _height(self, steps: int) -> float:
        """Return the height of the cycle after this many steps, from 0 to 1: it rises and falls, each linearly or, if their
        number is positive, in stairs."""
        peak = self._first / self._total_steps
        phase = 1.0 + steps / self._total_steps - math.floor(1 + steps / self._total_steps)
        stairs = self._first_stairs if phase <= peak else self._second_stairs
        if stairs <= 0:
            return phase / peak if phase <= peak else (phase - 1) / (peak - 1)
        # Counted in steps, since the computed phase may be a rounding error below a stair.
        offset = steps % self._total_steps
        climbs = offset <= self._first
        stair = offset * stairs / self._first if climbs else (self._total_steps - offset) * stairs / self._second
        return math.floor(stair) / stairs

    def get_last_momentum(self) -> list[float]:
        """Return the momentum of each parameter group, whether or not it is applied."""
        step = self.last_batch_iteration
        if step < 0:
            return list(self._min_momentum)
        if step < self._total_steps:
            return _interpolate(self._max_momentum, self._min_momentum, self._height(step + 1))
        decay = self._decay(self._momentum_decay)
        return [high * decay for high in self._max_momentum]

    def _decay(self, rate: float) -> float:
        """Return the decay factor after the cycle; 1 without decay."""
        if not self._decay_steps:
            return 1.0
        return 1 + rate * ((self.last_batch_iteration - self._total_steps + 1) / self._decay_steps)

    def apply(self) -> None:
        super().apply()
        for group, momentum in zip(self.optimizer.param_groups, self.get_last_momentum(), strict=True):
            if self._momentum == "betas":
                group["betas"] = (momentum, _BETA2)
            elif self._momentum == "momentum":
                group["momentum"] = momentum


class LRRangeTest(NamedSchedule):
    """The learning rate grows from `lr_range_test_min_lr` by `lr_range_test_step_rate` times that in every interval of
    `lr_range_test_step_size` steps, indefinitely: to find the largest learning rate that still trains."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: LRRangeTestParams) -> None:
        self._min_lr = _per_group(optimizer, params, "lr_range_test_min_lr")
        self._interval_steps, self._rate = params.lr_range_test_step_size, params.lr_range_test_step_rate
        self._staircase = params.lr_range_test_staircase
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        intervals = float(self.last_batch_iteration + 1) / self._interval_steps
        growth = 1 + self._rate * (math.floor(intervals) if self._staircase else intervals)
        return [low * growth for low in self._min_lr]


_BY_NAME: Mapping[str, Callable[[torch.optim.Optimizer, Any], NamedSchedule]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def named_schedule(section: SchedulerSection, optimizer: torch.optim.Optimizer) -> NamedSchedule:
    """Return the schedule that a config names; the optimizer's groups have the first step's settings.

    Raises ConfigError for lists that do not match the groups.
    """
    schedule = _BY_NAME[section.type](optimizer, section.params)
    position = section.params.last_batch_iteration
    if position >= 0:
        schedule.load_state_dict({"last_batch_iteration": position})
    return schedule


class LRSchedule:
    """Advances the engine's scheduler, one of ours or torch's, and saves and loads its state."""

    def __init__(self, scheduler: Any) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UsageError(
                "lr_scheduler: ReduceLROnPlateau needs a metric at each step, which engine.step() does not have; leave it "
                "out of initialize() and step it in the training loop (it may be created from the returned optimizer)"
            )
        self.scheduler = scheduler
        if isinstance(scheduler, NamedSchedule):
            scheduler.engine_advances = True
        self._last_position: object = self._position()
        self._warned = False

    def _position(self) -> object:
        """Return a value that changes when any code steps the scheduler."""
        return getattr(self.scheduler, "last_epoch", None)

    def advance(self) -> None:
        """Advance by one step, after the optimizer's step."""
        if isinstance(self.scheduler, NamedSchedule):
            self.scheduler.advance()
            return
        if self._position() != self._last_position and not self._warned:
            self._warned = True
            warn_once(
                "the scheduler given to initialize() was also stepped elsewhere, so it runs too fast: engine.step() steps "
                "it; remove scheduler.step() from the loop"
            )
        self.scheduler.step()
        self._last_position = self._position()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.scheduler.load_state_dict(state)
        self._last_position = self._position()
