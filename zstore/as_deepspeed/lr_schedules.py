"""`deepspeed.runtime.lr_schedules`: the schedules that a config can name, made in a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zstore.engine.config.scheduler import SCHEDULES, SchedulerSection
from zstore.engine.lr_schedules import NamedSchedule, named_schedule
from zstore.errors import ConfigError

VALID_LR_SCHEDULES = list(SCHEDULES)


def _maker(name: str) -> Callable[..., NamedSchedule]:
    """Return the function that makes the schedule of that name."""

    def make(optimizer: torch.optim.Optimizer, **params: Any) -> NamedSchedule:
        try:
            section = SchedulerSection.model_validate({"type": name, "params": params})
        except ValueError as error:
            raise ConfigError(f"{name}(...): {error}") from None
        return named_schedule(section, optimizer)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = (
        f"Return the schedule {name} over an optimizer; arguments are those of the config's `scheduler.params`."
    )
    return make


LRRangeTest = _maker("LRRangeTest")
OneCycle = _maker("OneCycle")
WarmupCosineLR = _maker("WarmupCosineLR")
WarmupDecayLR = _maker("WarmupDecayLR")
WarmupLR = _maker("WarmupLR")
