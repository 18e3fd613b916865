"""How two checkpoints of a run differ: by their checksums, and one array by its values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from ...errors import CheckpointNotFoundError, CorruptionError
from ...open.compare import ComparisonPlan, compare_values, plan_comparison
from ..models import Difference
from ..runs import Run
from .library import Library


def compare(
    service: Library,
    run: Run,
    before: str,
    after: str,
    array: str | None = None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> Difference:
    """Return how two checkpoints differ; with `array` that one by its values, which are read and verified.

    `advance` is called with bytes as they are read; its errors end the reading. Raises CheckpointNotFoundError for an array
    that neither has, CorruptionError for damaged data.
    """
    found = [service.timeline(run).find(checkpoint) for checkpoint in (before, after)]
    infos, places = [one.info for one in found], [one.entry.checkpoint for one in found]
    key = (*(f"{place} {info.record.id}" for place, info in zip(places, infos, strict=True)), array)
    if (kept := service.differences.get(key)) is not None:
        return kept
    first, second = (service.readers.open(info) for info in infos)
    if array is not None and array not in first.arrays and array not in second.arrays:
        raise CheckpointNotFoundError(f"neither of {before!r} and {after!r} has an array {array!r}")
    try:
        names = None if array is None else [array]
        plan = plan_comparison(first, second, values=array is not None, names=names)
        if array is not None:
            compare_values(first, second, plan, advance)
    except CorruptionError:
        for info in infos:
            service.readers.forget(info)
        raise
    return service.differences.put(key, _describe(plan, places, array))


def _describe(plan: ComparisonPlan, places: list[str], array: str | None) -> Difference:
    unknown = set() if array is not None else {name for name, _, _ in plan.ranges}
    found = [
        replace(one, status="unknown") if one.name in unknown and one.status == "same" else one
        for one in plan.comparisons.values()
    ]
    return Difference(
        before=places[0],
        after=places[1],
        counts=dict(Counter(one.status for one in found)),
        arrays=found if array is not None else [one for one in found if one.status != "same"],
    )
