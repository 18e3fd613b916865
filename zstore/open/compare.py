"""How the arrays of two checkpoints differ: by the checksums of their chunks, and by their values. No torch."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..checkpoint.lookahead import Range, ReadAhead, Span, use_spans
from ..checkpoint.names import natural_key
from ..checkpoint.source import ArraySource, StoredArray
from ..format.arrays import numpy_dtype

Array = npt.NDArray[Any]
Status = Literal["same", "values", "added", "removed", "shape", "dtype", "unknown"]
"""unknown: checksums cannot tell, as the two are cut differently or compressed; compare by values."""

_TILE_NUMEL = 64 * 1024
_PIECE_BYTES = 8 * 1024 * 1024
"""Bytes that one rank of several reads at a time, about."""


@dataclass
class Comparison:
    """How one array differs. None: not compared."""

    name: str
    status: Status
    before: str | None = None
    """Type and shape in the first checkpoint."""
    after: str | None = None
    chunks: int | None = None
    """Chunks whose checksums were compared."""
    chunks_changed: int | None = None
    numel: int | None = None
    """Elements of the array, if values were compared."""
    changed: int | None = None
    """Elements that differ: in their bits, or, if the types differ, in their value."""
    max_abs: float | None = None
    """Largest difference between finite elements."""
    rms: float | None = None
    """Root of the mean square of the differences, over all elements."""
    nonfinite: int | None = None
    """Elements that differ, one of them not finite."""

    @property
    def differs(self) -> bool:
        """Whether the two arrays differ."""
        return self.status != "same"

    def document(self) -> dict[str, Any]:
        """Return it as JSON, without fields that were not compared."""
        found = {key: value for key, value in vars(self).items() if value is not None}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}

    def add_values(self, parts: Sequence[ValueDifference], numel: int) -> None:
        """Add the differences of the parts that were read of the array's `numel` elements."""
        self.numel = numel
        whole = _sum_of(parts)
        self.changed, self.nonfinite, self.max_abs = whole.changed, whole.nonfinite, whole.max_abs
        self.rms = math.sqrt(whole.squares / numel)
        if self.status == "same" and self.changed:
            self.status = "values"


@dataclass(frozen=True)
class ValueDifference:
    """How elements of two arrays differ."""

    changed: int
    nonfinite: int
    max_abs: float
    squares: float


@dataclass
class ComparisonPlan:
    """The result of checksums and metadata, and the elements that must be read to know the others."""

    comparisons: dict[str, Comparison]
    ranges: list[Range]

    def read_bytes(self, *sources: ArraySource) -> int:
        """Return the bytes of the elements to read, of all sources."""
        return sum((stop - low) * source.array(n).spec.itemsize for n, low, stop in self.ranges for source in sources)


def plan_comparison(
    before: ArraySource, after: ArraySource, *, values: bool, names: Collection[str] | None = None
) -> ComparisonPlan:
    """Compare names, shapes, types and checksums; plan to read if these cannot tell, and with `values` if they differ.

    Checksums tell only if both checkpoints have them and are cut alike. `names` are the arrays to compare, which one of
    the two has; None: all.
    """
    plan = ComparisonPlan({}, [])
    for name in sorted({*before.arrays, *after.arrays} if names is None else names, key=natural_key):
        old, new = before.arrays.get(name), after.arrays.get(name)
        if old is None or new is None:
            status: Status = "added" if old is None else "removed"
            plan.comparisons[name] = Comparison(name, status, before=_describe(old), after=_describe(new))
            continue
        comparison = Comparison(name, "same", before=_describe(old), after=_describe(new))
        plan.comparisons[name] = comparison
        whole = [(0, old.spec.numel)] if old.spec.numel else []
        if old.spec.shape != new.spec.shape:
            comparison.status = "shape"
            continue
        if old.spec.dtype != new.spec.dtype:
            comparison.status = "dtype"
            pieces = whole if values else []
        elif (found := _compare_chunks(before, after, old, new)) is not None:
            comparison.chunks, comparison.chunks_changed, differing = found
            pieces = differing if values else []
            comparison.status = "values" if comparison.chunks_changed else "same"
        else:
            pieces = whole
        plan.ranges += [(name, first, stop) for first, stop in pieces]
    return plan


def _describe(array: StoredArray | None) -> str | None:
    return None if array is None else f"{array.spec.dtype} {list(array.spec.shape)}"


def _compare_chunks(
    before: ArraySource, after: ArraySource, old: StoredArray, new: StoredArray
) -> tuple[int, int, list[tuple[int, int]]] | None:
    """Return how many chunks there are, how many have other checksums, and their elements, neighbours merged.

    None if checksums cannot be compared: those of compressed bytes say nothing about values that are the same.
    """
    grid = old.grid
    if grid != new.grid or old.codec is not None or new.codec is not None:
        return None
    total = changed = 0
    pieces: list[tuple[int, int]] = []
    for shard in range(grid.num_shards):
        ours, theirs = before.shard_crcs(old.spec.name, shard), after.shard_crcs(new.spec.name, shard)
        if ours is None or theirs is None or len(ours) != len(theirs):
            return None
        total += len(ours)
        base, valid = shard * grid.shard_numel, grid.shard_valid_numel(shard)
        for chunk in (number for number, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b):
            changed += 1
            first, stop = base + chunk * grid.chunk_numel, base + min((chunk + 1) * grid.chunk_numel, valid)
            if pieces and pieces[-1][1] == first:
                first = pieces.pop()[0]
            pieces.append((first, stop))
    return total, changed, pieces


def compare_values(
    before: ArraySource,
    after: ArraySource,
    plan: ComparisonPlan,
    advance: Callable[[int], None],
) -> None:
    """Read the planned elements, from both at once, and complete the comparisons; memory is that of the sources' pools.

    `advance` is told, from several threads, how many bytes were read.
    """
    lock = threading.Lock()
    found: dict[str, list[ValueDifference]] = defaultdict(list)
    with ReadAhead(after, plan.ranges) as other:

        def use(span: Span) -> None:
            old = span.data.view(numpy_dtype(before.array(span.name).spec.dtype))
            dtype = numpy_dtype(after.array(span.name).spec.dtype)
            parts: list[ValueDifference] = []
            for low in range(0, old.size, _TILE_NUMEL):
                tile = old[low : low + _TILE_NUMEL]
                new = np.empty(tile.size, dtype)
                other.read(span.name, span.first + low, span.first + low + tile.size, new)
                parts.append(difference_of(tile, new))
                advance(tile.nbytes + new.nbytes)
            with lock:
                found[span.name] += parts

        use_spans(before, plan.ranges, use, "zstore-diff")
    for name, parts in found.items():
        plan.comparisons[name].add_values(parts, before.array(name).spec.numel)


def _sum_of(parts: Sequence[ValueDifference]) -> ValueDifference:
    return ValueDifference(
        sum(part.changed for part in parts),
        sum(part.nonfinite for part in parts),
        max(part.max_abs for part in parts),
        sum(part.squares for part in parts),
    )


def difference_of(old: Array, new: Array) -> ValueDifference:
    """Return how two 1-D arrays of one size differ."""
    if old.dtype == new.dtype:
        kind = np.dtype(f"u{old.dtype.itemsize}")
        places = np.flatnonzero(old.view(kind) != new.view(kind))
    else:
        places = np.arange(old.size)
    if not places.size:
        return ValueDifference(0, 0, 0.0, 0.0)
    a, b = old[places].astype(np.float64), new[places].astype(np.float64)
    if old.dtype != new.dtype:
        unequal = ~((a == b) | (np.isnan(a) & np.isnan(b)))
        a, b = a[unequal], b[unequal]
    finite = np.isfinite(a) & np.isfinite(b)
    with np.errstate(over="ignore"):
        gap = np.abs(a[finite] - b[finite])
        squares = float(np.square(gap).sum())
    largest = float(gap.max()) if gap.size else 0.0
    return ValueDifference(int(a.size), int(a.size - finite.sum()), largest, squares)
