"""Which checkpoints stay: the rules, and what they say of a folder's records. Pure.

[Note: what stays]
A checkpoint stays for any of these reasons; the others go.
last     it is one of the newest, by the time of its commit
every    its step is a multiple of a number
best     its value of a metric is the least, or the greatest, of all; of equal ones the newest
tag      its tag is one of the names, or matches one of the patterns (`*`, `?`, `[...]`)
A metric is a finite number under `metrics` in the record's state, or else in the client's state, by keys joined with `.`.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from .catalog import TagInfo

_MODES = {"min": 1.0, "max": -1.0}


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Rules of what stays. See [Note: what stays]. Raises UsageError for rules that make no sense."""

    last: int = 1
    """How many of the newest; at least one."""
    every: int | None = None
    """Steps of which multiples stay; None: for no step."""
    best: str | None = None
    """`METRIC:min` or `METRIC:max`; None: for no value."""
    tags: tuple[str, ...] = ()
    """Names, or patterns of names."""

    def __post_init__(self) -> None:
        for name, count in vars(self).items():
            if name in ("last", "every") and count is not None and (type(count) is not int or count < 1):
                raise UsageError(f"keep: {name} is {count!r}; expected a whole number of at least 1")
        if self.best is not None:
            _parse_metric(self.best)
        tags: Any = self.tags
        if not isinstance(tags, tuple) or not all(isinstance(tag, str) and tag for tag in tags):
            raise UsageError(f"keep: tags are {tags!r}; expected a list of names or patterns")

    @property
    def metric(self) -> str | None:
        """Name of the metric of `best`."""
        return None if self.best is None else _parse_metric(self.best)[0]

    def reasons(self, infos: Sequence[TagInfo]) -> list[list[str]]:
        """Return why each checkpoint of `infos`, the oldest first, stays; nothing for one that goes."""
        best = self._best(infos)
        found: list[list[str]] = []
        for number, info in enumerate(infos):
            reasons = []
            if number >= len(infos) - self.last:
                reasons.append("last")
            if self.every is not None and info.record.step % self.every == 0:
                reasons.append("every")
            if number == best:
                reasons.append("best")
            if any(fnmatch.fnmatchcase(info.tag, pattern) for pattern in self.tags):
                reasons.append("tag")
            found.append(reasons)
        return found

    def _best(self, infos: Sequence[TagInfo]) -> int | None:
        if self.best is None:
            return None
        name, mode = _parse_metric(self.best)
        values = [(number, metric_of(info.record.state, name)) for number, info in enumerate(infos)]
        ranked = [(_MODES[mode] * value, -number) for number, value in values if value is not None]
        return -min(ranked)[1] if ranked else None


def metric_of(state: Mapping[str, Any], name: str) -> float | None:
    """Return a metric out of a record's state, None where it has none of that name that is a finite number."""
    metrics = state.get("metrics")
    candidates = [metrics.get(name) if isinstance(metrics, Mapping) else None, state.get("client_state")]
    for key in name.split("."):
        candidates[1] = candidates[1].get(key) if isinstance(candidates[1], Mapping) else None
    for value in candidates:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def _parse_metric(text: Any) -> tuple[str, str]:
    name, _, mode = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not name or mode not in _MODES:
        raise UsageError(
            f"keep: best is {text!r}; expected the name of a metric and how, as 'loss:min' or 'accuracy:max'"
        )
    return name, mode
