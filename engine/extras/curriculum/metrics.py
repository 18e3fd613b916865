"""Metrics of samples, from files, and which samples a difficulty allows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from zstore.errors import ConfigError, storage_error

from .indexed import IndexedRows
from .schedule import Difficulty
from .section import MetricSection

Mask = npt.NDArray[np.bool_]
_NEVER = np.inf


class Metric:
    """A metric of every sample of a data set, and the difficulty that limits it."""

    def __init__(self, name: str, section: MetricSection, num_samples: int) -> None:
        self.difficulty = Difficulty(name, section)
        self._parts = section.max_difficulty or 1
        self._by_value = section.difficulty_type == "value"
        self._limits: npt.NDArray[np.float64] | None = None
        """A sample's value, or its place by that; infinite: it is never drawn. None: all are drawn."""
        self._num_known = 0
        if section.clustering_type == "schedule_based":
            self._limits = _limits(name, section, num_samples)
            self._num_known = int(np.isfinite(self._limits).sum())

    def allows(self, level: int) -> Mask | None:
        """Return which samples a difficulty allows, None for all."""
        if self._limits is None:
            return None
        if self._by_value:
            return self._limits <= level
        count = self._num_known if level >= self._parts else self._num_known // self._parts * level
        return self._limits < count


def _limits(name: str, section: MetricSection, num_samples: int) -> npt.NDArray[np.float64]:
    by_value = section.difficulty_type == "value"
    if section.sample_to_metric_path is not None:
        values = _per_sample(section.sample_to_metric_path)
        if values.shape != (num_samples,):
            raise ConfigError(
                f"metric {name!r}: {section.sample_to_metric_path} has shape {list(values.shape)}, but the data set has "
                f"{num_samples} samples: make it of the same data"
            )
        found = values.astype(np.float64)
        if np.isnan(found).any():
            raise ConfigError(f"metric {name!r}: {section.sample_to_metric_path} has values that are not a number")
        return found if by_value else _places(found)
    rows = IndexedRows(section.index_to_sample_path or "")
    levels = IndexedRows(section.index_to_metric_path or "") if by_value else None
    if levels is not None and len(levels) != len(rows):
        raise ConfigError(
            f"metric {name!r}: {section.index_to_metric_path} has {len(levels)} values for the {len(rows)} rows of "
            f"{section.index_to_sample_path}: take both from one analysis"
        )
    limits = np.full(num_samples, _NEVER)
    place = 0
    for row in range(len(rows)):
        samples = rows[row]
        if samples.size and not 0 <= int(samples.min()) <= int(samples.max()) < num_samples:
            raise ConfigError(
                f"metric {name!r}: {section.index_to_sample_path} names sample {int(samples.max())}, but the data set has "
                f"{num_samples}: make it of the same data"
            )
        limits[samples] = np.arange(place, place + samples.size) if levels is None else float(levels[row][0])
        place += samples.size
    return limits


def _per_sample(path: str) -> npt.NDArray[np.generic]:
    """Return the values of a .npy file, or the rows of one value each of an indexed data set."""
    if not path.endswith(".npy"):
        rows = IndexedRows(path)
        return np.array([rows[row][0] for row in range(len(rows))])
    try:
        values: npt.NDArray[np.generic] = np.load(Path(path), mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise storage_error(error, "the metric's file cannot be read", path=path) from error
    except ValueError as error:
        raise ConfigError(f"{path}: expected an array of numbers in a .npy file: {error}") from error
    if values.dtype.kind not in "iuf":
        raise ConfigError(f"{path}: expected an array of numbers, got {values.dtype}")
    return values


def _places(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return each value's place among all, from 0."""
    places = np.empty(values.size)
    places[np.argsort(values, kind="stable")] = np.arange(values.size)
    return places
