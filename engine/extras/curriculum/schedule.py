"""How a difficulty rises with the steps. The formulas are DeepSpeed's, and functions of the step alone."""

from __future__ import annotations

import math

from zstore.errors import UsageError

from ...config.extra import Rise
from .section import ScheduleSection


class Difficulty:
    """A difficulty by a section of the config."""

    def __init__(self, name: str, section: ScheduleSection) -> None:
        self.name = name
        self._section = section
        self._custom: Rise | None = None

    @property
    def is_custom(self) -> bool:
        """Whether a function says how it rises."""
        return self._section.schedule_type == "custom"

    def use(self, custom: Rise) -> None:
        """Let a function say how the difficulty rises. Raises UsageError if the config says it."""
        if not self.is_custom:
            raise UsageError(
                f"set_custom_curriculum_learning_schedule: the schedule_type of {self.name!r} is "
                f'"{self._section.schedule_type}"; write "custom"'
            )
        self._custom = custom

    def at(self, step: int) -> int:
        """Return the difficulty at a step. Raises UsageError if a custom schedule has no function, or its function returns
        less than 1."""
        section, config = self._section, self._section.schedule_config
        if self.is_custom:
            return self._by_function(step)
        first, last = section.min_difficulty or 1, section.max_difficulty or 1
        if section.schedule_type == "fixed_discrete":
            levels, ends = config.difficulty or (last,), config.max_step or ()
            return next((level for level, end in zip(levels, ends, strict=False) if step <= end), levels[-1])
        degree = (config.root_degree or 1) if section.schedule_type == "fixed_root" else 1
        part: float = (float(step) / (config.total_curriculum_step or 1)) ** (1.0 / degree)
        level: int = math.floor(part * (last - first) + first)
        return min(level - level % (config.difficulty_step or 1), last)

    def _by_function(self, step: int) -> int:
        if self._custom is None:
            raise UsageError(
                f'the schedule_type of {self.name!r} is "custom": call '
                "engine.set_custom_curriculum_learning_schedule(function of the step) before training"
            )
        found: object = self._custom(step)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise UsageError(
                f"the custom schedule of {self.name!r} must return a whole number of at least 1, got {found!r} for step {step}"
            )
        return found
