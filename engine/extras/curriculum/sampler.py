"""The samples that a step trains on, if metrics limit them (`data_efficiency.data_sampling.curriculum_learning`).

[Note: passes]
A step draws its `train_batch_size` samples from those that the difficulties of the step allow, without replacement: each is
drawn once in a pass, and when all allowed ones have been, the next pass begins. When a difficulty rises within a pass, the
new samples join those that the pass has not drawn yet. The order is a permutation by (seed, pass, part of the pass between
two rises) alone, so that neither the world size nor a resume changes it: the state is the step, the pass, and for each part
of the pass its difficulties and how many samples it drew.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sized
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zstore.errors import CorruptionError, UsageError

from ...config.extra import Extra, Sampling
from .metrics import Mask, Metric
from .schedule import Difficulty
from .section import DataEfficiencySection


@dataclass
class DrawState:
    """The progress of a curriculum. JSON data."""

    step: int = 0
    """Batches drawn."""
    passes: int = 0
    """Passes completed."""
    parts: list[tuple[dict[str, int], int]] = field(default_factory=list)
    """Of the pass under way: difficulties, and the samples drawn at them."""


class CurriculumSampler:
    """Draws the samples of one step after another. See [Note: passes]."""

    def __init__(self, metrics: Mapping[str, Metric], num_samples: int, seed: int) -> None:
        self._metrics = metrics
        self._num_samples = num_samples
        self._seed = seed
        self.restore(asdict(DrawState()))

    @property
    def state(self) -> dict[str, Any]:
        """The state for `restore`; a copy."""
        return copy.deepcopy(asdict(self._state))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Raises CorruptionError for a malformed state."""
        try:
            parts = [
                ({str(name): int(level) for name, level in levels.items()}, int(n)) for levels, n in state["parts"]
            ]
            self._state = DrawState(step=int(state["step"]), passes=int(state["passes"]), parts=[])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptionError(
                f"the checkpoint's state of the data sampling is not understood: {error!r}"
            ) from error
        self._drawn: Mask = np.zeros(self._num_samples, np.bool_)
        self._order: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        for levels, count in parts:
            self._begin_part(levels)
            if count > self._order.size:
                raise CorruptionError(
                    f"the checkpoint drew {count} samples at {levels}, where {self._order.size} can be: its metrics were others"
                )
            self._take(count)

    def difficulties(self) -> dict[str, Difficulty]:
        """Return the difficulty of each metric."""
        return {name: metric.difficulty for name, metric in self._metrics.items()}

    def draw(self, count: int) -> list[int]:
        """Return the numbers of the next step's `count` samples. Raises UsageError if its difficulties allow none."""
        levels = {name: difficulty.at(self._state.step + 1) for name, difficulty in self.difficulties().items()}
        if not self._state.parts or self._state.parts[-1][0] != levels:
            self._begin_part(levels)
        found: list[int] = []
        while len(found) < count:
            if not self._order.size:
                self._state.passes += 1
                self._state.parts = []
                self._drawn[:] = False
                self._begin_part(levels)
            if not self._order.size:
                raise UsageError(
                    f"data_efficiency: no sample is within the difficulties of step {self._state.step + 1}, {levels}: raise "
                    "min_difficulty"
                )
            found += self._take(min(count - len(found), self._order.size))
        self._state.step += 1
        return found

    def _begin_part(self, levels: dict[str, int]) -> None:
        """Order the samples that are allowed from here on and were not drawn in this pass."""
        allowed = ~self._drawn
        for name, level in levels.items():
            mask = self._metrics[name].allows(level) if name in self._metrics else None
            if mask is not None:
                allowed &= mask
        samples = np.flatnonzero(allowed)
        key = f"zstore samples {self._seed} {self._state.passes} {len(self._state.parts)}"
        number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
        order = torch.randperm(samples.size, generator=torch.Generator().manual_seed(number))
        self._order = samples[order.numpy()]
        self._state.parts.append((levels, 0))

    def _take(self, count: int) -> list[int]:
        taken, self._order = self._order[:count], self._order[count:]
        self._drawn[taken] = True
        levels, before = self._state.parts[-1]
        self._state.parts[-1] = (levels, before + count)
        return [int(sample) for sample in taken]


class DrawnSamples(Extra):
    """Lets `data_efficiency` say how the training data is drawn."""

    acts_frozen = True

    @classmethod
    def sampling(cls, section: DataEfficiencySection, data: Any) -> Sampling | None:
        """As the base says; without metrics, or of data without a length, in the order of a permutation. Raises ConfigError and
        StorageError for metrics that cannot be used."""
        asked, sampler = section.sampling, None
        if asked is None:
            return None
        if section.metrics and isinstance(data, Sized):
            metrics = {name: Metric(name, metric, len(data)) for name, metric in section.metrics.items()}
            sampler = CurriculumSampler(metrics, len(data), section.seed)
        return Sampling(
            sampler=sampler,
            num_epochs=asked.num_epochs,
            num_workers=asked.num_workers,
            pin_memory=asked.pin_memory,
        )
