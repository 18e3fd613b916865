"""`deepspeed.runtime.lr_schedules`: the schedules that a config can name, made in a script."""

from __future__ import annotations

from typing import Any

import torch

from zstore.engine.config.config import load_config
from zstore.engine.config.scheduler import SCHEDULES
from zstore.engine.optim.lr_schedules import NamedSchedule, named_schedule
from zstore.errors import UsageError

from .names import by_place

VALID_LR_SCHEDULES = list(SCHEDULES)


class _Schedule(type):
    """A class whose call makes the engine's schedule of that name, which is then an instance of it. Arguments are those of the
    config's `scheduler.params`, by name or in the `order` of DeepSpeed's."""

    order: str

    def __call__(cls, optimizer: torch.optim.Optimizer, *values: Any, **params: Any) -> NamedSchedule:
        named = by_place(cls.__name__, cls.order, values, params)
        config = {"scheduler": {"type": cls.__name__, "params": named}}
        section = load_config(config, name=f"{cls.__name__}(...)").settings.scheduler
        if section is None:
            raise UsageError(f"{cls.__name__}: there is no such schedule")
        before = [dict(group) for group in optimizer.param_groups]
        schedule = named_schedule(section, optimizer)
        if section.params.last_batch_iteration >= 0:  # the optimizer's own settings serve until the first step
            for group, former in zip(optimizer.param_groups, before, strict=True):
                group.update(former)
        return schedule

    def __instancecheck__(cls, instance: object) -> bool:
        return cls.__name__ in [kind.__name__ for kind in type(instance).__mro__]


def _made(name: str, order: str) -> type:
    return _Schedule(name, (), {"order": f"{order} last_batch_iteration", "__doc__": f"The schedule {name}."})


_WARMUP = "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type"
LRRangeTest = _made(
    "LRRangeTest",
    "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase",
)
OneCycle = _made(
    "OneCycle",
    "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
    "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate",
)
WarmupLR = _made("WarmupLR", _WARMUP)
WarmupDecayLR = _made("WarmupDecayLR", f"total_num_steps {_WARMUP}")
WarmupCosineLR = _made("WarmupCosineLR", "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type")
