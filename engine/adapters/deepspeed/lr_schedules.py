"""`deepspeed.runtime.lr_schedules`: the schedules that a config can name, made in a script."""

from __future__ import annotations

from typing import Any

import torch

from zstore.engine import lr_schedules as engine_schedules
from zstore.engine.config.config import load_config
from zstore.engine.config.scheduler import SCHEDULES
from zstore.engine.lr_schedules import NamedSchedule, named_schedule
from zstore.errors import UsageError

VALID_LR_SCHEDULES = list(SCHEDULES)


class _Schedule(type):
    """A class whose call makes the engine's schedule of that name, and whose instances these are. Arguments are those of the
    config's `scheduler.params`, by name or in the order of `arguments`."""

    arguments: tuple[str, ...]

    def __call__(cls, optimizer: torch.optim.Optimizer, *values: Any, **params: Any) -> NamedSchedule:
        named = dict(zip(cls.arguments, values, strict=False))
        if len(values) > len(cls.arguments) or named.keys() & params.keys():
            raise UsageError(
                f"{cls.__name__}(optimizer, ...): expected each of {', '.join(cls.arguments)} at most once"
            )
        config = {"scheduler": {"type": cls.__name__, "params": named | params}}
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
        return isinstance(instance, getattr(engine_schedules, cls.__name__))


class LRRangeTest(metaclass=_Schedule):
    """A rate that grows without limit."""

    arguments = (
        "lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase",
        "last_batch_iteration",
    )  # fmt: skip


class OneCycle(metaclass=_Schedule):
    """One cycle, then a decay."""

    arguments = (
        "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size",
        "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom",
        "cycle_max_mom", "decay_mom_rate", "last_batch_iteration",
    )  # fmt: skip


class WarmupLR(metaclass=_Schedule):
    """A warm-up."""

    arguments = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")


class WarmupDecayLR(metaclass=_Schedule):
    """A warm-up, then a line down."""

    arguments = ("total_num_steps", *WarmupLR.arguments)


class WarmupCosineLR(metaclass=_Schedule):
    """A warm-up, then half a cosine wave down."""

    arguments = (
        "total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type", "last_batch_iteration",
    )  # fmt: skip
