"""Statistics of arrays in one pass: minimum, maximum, mean, norm, NaN and inf counts, and a histogram. No torch.

[Note: the histogram]
Bins are `[i w, (i + 1) w)` with w a power of two and i a whole number. If values need more bins than `NUM_BINS`,
w is doubled: two bins become one, exactly. So one pass is enough, and neither the order of the parts nor
their number changes the result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checkpoint.lookahead import Span, use_spans
from ..checkpoint.source import ArraySource
from ..format.arrays import numpy_dtype

Array = npt.NDArray[Any]

NUM_BINS = 256
_TILE_NUMEL = 64 * 1024
_BARS = "▁▂▃▄▅▆▇█"
_LEAST_EXPONENT, _MOST_PLACES = -1000, 40


@dataclass
class Histogram:
    """Counts of values in bins of width `2 ** exponent`, the first from `first * width` on. See [Note: the histogram]."""

    exponent: int
    first: int
    counts: Array

    @classmethod
    def of(cls, low: float, high: float) -> Histogram:
        """Return the empty one for values from `low` to `high`."""
        exponent = _exponent_for(low, high)
        first, last = _bin(low, exponent), _bin(high, exponent)
        return cls(exponent, first, np.zeros(last - first + 1, np.int64))

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Count finite values that are within the range; `values` is scratch afterwards."""
        # A value too small to be scaled becomes zero: below zero it belongs to the bin before.
        below = values < 0 if self.exponent > 0 else None
        values *= math.ldexp(1.0, -self.exponent)
        np.floor(values, out=values)
        if below is not None:
            values[below & (values == 0)] = -1
        values -= self.first
        self.counts += np.bincount(values.astype(np.int64), minlength=self.counts.size)

    def merged(self, other: Histogram) -> Histogram:
        """Return both together."""
        exponent = max(self.exponent, other.exponent)
        while True:
            parts = [part.coarsened(exponent) for part in (self, other)]
            first = min(part.first for part in parts)
            size = max(part.first + part.counts.size for part in parts) - first
            if size <= NUM_BINS:
                break
            exponent += 1
        counts = np.zeros(size, np.int64)
        for part in parts:
            counts[part.first - first : part.first - first + part.counts.size] += part.counts
        return Histogram(exponent, first, counts)

    def coarsened(self, exponent: int) -> Histogram:
        """Return it with bins of width `2 ** exponent`, no narrower than its own."""
        shift = min(exponent - self.exponent, 62)
        first = self.first >> shift
        places = ((self.first + np.arange(self.counts.size)) >> shift) - first
        return Histogram(exponent, first, np.bincount(places, weights=self.counts).astype(np.int64))

    def columns(self, most: int) -> tuple[list[float], list[int]]:
        """Return edges and counts of at most `most` columns, each of whole bins."""
        step = -(-self.counts.size // most)
        counts = [int(self.counts[i : i + step].sum()) for i in range(0, self.counts.size, step)]
        return [math.ldexp(self.first + i * step, self.exponent) for i in range(len(counts) + 1)], counts

    def bars(self, most: int = 24) -> str:
        """Return it as a line of text; a column that has a value is never empty."""
        _, counts = self.columns(most)
        highest = max(counts, default=0)
        return "".join(" " if not n else _BARS[max(1, -(-n * len(_BARS) // highest)) - 1] for n in counts)


def _exponent_for(low: float, high: float) -> int:
    spread = (high / 2 - low / 2) * 2 / NUM_BINS if abs(high) < 1e300 > abs(low) else 2.0**1016
    exponent = math.frexp(spread)[1] - 1 if spread > 0 else _LEAST_EXPONENT
    largest = max(abs(low), abs(high))
    exponent = max(exponent, math.frexp(largest)[1] - _MOST_PLACES if largest else exponent, _LEAST_EXPONENT)
    while _bin(high, exponent) - _bin(low, exponent) >= NUM_BINS:
        exponent += 1
    return exponent


def _bin(value: float, exponent: int) -> int:
    return math.floor(math.ldexp(value, -exponent)) or (-1 if value < 0 else 0)


@dataclass
class ArrayStats:
    """Statistics of an array's finite values, and the number of others."""

    finite: int = 0
    nan: int = 0
    inf: int = 0
    low: float = math.inf
    high: float = -math.inf
    sums: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    histogram: Histogram | None = None

    @property
    def mean(self) -> float | None:
        """Mean of the finite values; None if there are none, or their sum overflows float64."""
        return _known(_sum(self.sums) / self.finite) if self.finite else None

    @property
    def norm(self) -> float | None:
        """Root of the sum of squares of the finite values; None if there are none, or the sum overflows float64."""
        return _known(math.sqrt(_sum(self.squares))) if self.finite else None

    def merge(self, other: ArrayStats) -> None:
        """Add the statistics of another part of the same array."""
        self.finite += other.finite
        self.nan += other.nan
        self.inf += other.inf
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.sums += other.sums
        self.squares += other.squares
        if other.histogram is not None:
            self.histogram = other.histogram if self.histogram is None else self.histogram.merged(other.histogram)

    def document(self, most_columns: int = 32) -> dict[str, Any]:
        """Return it as JSON, the histogram in at most so many columns; null if there is no finite value."""
        edges, counts = ([], []) if self.histogram is None else self.histogram.columns(most_columns)
        return {
            "min": self.low if self.finite else None,
            "max": self.high if self.finite else None,
            "mean": self.mean,
            "norm": self.norm,
            "nan": self.nan,
            "inf": self.inf,
            "histogram": {"edges": edges, "counts": counts},
        }


def _sum(parts: Sequence[float]) -> float:
    try:
        return math.fsum(parts)
    except (OverflowError, ValueError):
        return math.inf


def _known(number: float) -> float | None:
    return number if math.isfinite(number) else None


def stats_of(values: Array) -> ArrayStats:
    """Return the statistics of `values`, 1-D; sums are in float64."""
    stats = ArrayStats()
    tiles = [values[first : first + _TILE_NUMEL] for first in range(0, values.size, _TILE_NUMEL)]
    total = squares = 0.0
    for tile in tiles:
        numbers = tile.astype(np.float64)
        low, high = float(numbers.min()), float(numbers.max())
        if not math.isfinite(low) or not math.isfinite(high):
            nan = int(np.isnan(numbers).sum())
            numbers = numbers[np.isfinite(numbers)]
            stats.nan += nan
            stats.inf += tile.size - numbers.size - nan
            if not numbers.size:
                continue
            low, high = float(numbers.min()), float(numbers.max())
        stats.low, stats.high = min(stats.low, low), max(stats.high, high)
        stats.finite += numbers.size
        with np.errstate(over="ignore"):
            total += float(numbers.sum())
            # Not by a matrix library: its threads would compete with ours.
            squares += float(np.square(numbers).sum())
    if stats.finite:
        stats.sums, stats.squares = [total], [squares]
        stats.histogram = Histogram.of(stats.low, stats.high)
        for tile in tiles:
            numbers = tile.astype(np.float64)
            stats.histogram.add(numbers[np.isfinite(numbers)] if stats.nan or stats.inf else numbers)
    return stats


def collect_stats(source: ArraySource, names: Sequence[str], advance: Callable[[int], None]) -> dict[str, ArrayStats]:
    """Return the statistics of these arrays, read once, in parallel, through the source's buffer pool.

    `advance` is told, from several threads, how many bytes were read.
    """
    found = {name: ArrayStats() for name in names}
    ranges = [(name, 0, source.array(name).spec.numel) for name in names if source.array(name).spec.numel]
    lock = threading.Lock()

    def use(span: Span) -> None:
        stats = stats_of(span.data.view(numpy_dtype(source.array(span.name).spec.dtype)))
        with lock:
            found[span.name].merge(stats)
        advance(span.nbytes)

    use_spans(source, ranges, use, "zstore-stats")
    return found
