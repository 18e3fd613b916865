"""How a loader draws and reads samples, as the config says, and the functions that say how difficulties rise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from zstore.errors import UsageError

from ..config.data import DataEfficiencySection
from .curriculum import SEQLEN, SequenceCurriculum
from .metrics import Metric
from .sampler import CurriculumSampler
from .schedule import Difficulty, Rise

_CALL = "set_custom_curriculum_learning_schedule"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How samples are drawn and read, as `data_efficiency.data_sampling` says."""

    num_epochs: int | None = None
    """After which there are no more; None: there is no end."""
    num_workers: int = 0
    pin_memory: bool = False
    curriculum: CurriculumSampler | None = None


def sampling_of(section: DataEfficiencySection, data: Any) -> Sampling:
    """Return how `data` is sampled. Raises ConfigError and StorageError for metrics that cannot be used."""
    chosen = section.sampling
    if chosen is None:
        return Sampling()
    curriculum = None
    if section.metrics and isinstance(data, Sized):
        metrics = {name: Metric(name, metric, len(data)) for name, metric in section.metrics.items()}
        curriculum = CurriculumSampler(metrics, len(data), section.seed)
    return Sampling(
        num_epochs=chosen.num_epochs,
        num_workers=chosen.num_workers,
        pin_memory=chosen.pin_memory,
        curriculum=curriculum,
    )


def use_schedules(
    schedule: Rise | Mapping[str, Rise], sequences: SequenceCurriculum | None, sampler: CurriculumSampler | None
) -> None:
    """Let functions say how custom difficulties rise: one for the length of sequences, or some by the names of metrics.
    Raises UsageError for an unknown name, or one whose schedule is not custom."""
    known: dict[str, list[Difficulty]] = {}
    for name, metric in ({} if sampler is None else sampler.metrics).items():
        known.setdefault(name, []).append(metric.difficulty)
    if sequences is not None:
        known.setdefault(SEQLEN, []).append(sequences.difficulty)
    given: Mapping[str, Callable[[int], int]] = schedule if isinstance(schedule, Mapping) else {SEQLEN: schedule}
    for name, function in given.items():
        if name not in known:
            raise UsageError(
                f"{_CALL}: there is no curriculum {name!r}; the config has {', '.join(sorted(known)) or 'none'}"
            )
        if not callable(function):
            raise UsageError(f"{_CALL}: expected a function of the step for {name!r}, got {type(function).__name__}")
        custom = [one for one in known[name] if one.is_custom] or known[name]
        for one in custom:
            one.use(function)
