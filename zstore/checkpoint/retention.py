"""Retention: the rules for keeping checkpoints, their outcome for a folder, and the removal of the others.

[Note: what stays]
A checkpoint is kept for any of these reasons; the others are removed.
last     it is one of the newest, by the time of its commit
every    its step is a multiple of a number
best     its value of a metric is the minimum, or the maximum, of all; the newest of equal ones
tag      its tag is one of the names, or matches one of the patterns (`*`, `?`, `[...]`)
latest   the file `latest` names it instead of the newest; this applies without a rule
A metric is a finite number under `metrics` in the record's state, else in the client's state, by keys joined with `.`.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointNotFoundError, UsageError, format_bytes
from .catalog import Catalog, TagInfo, default_tag, reporting_to, scan
from .folder import FolderLike, folder_at, stored_files

_MODES = {"min": 1.0, "max": -1.0}


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Rules of retention. See [Note: what stays]. Raises UsageError for invalid rules."""

    last: int = 1
    """How many of the newest are kept; at least one."""
    every: int | None = None
    """Checkpoints whose step is a multiple of this are kept; None: no such rule."""
    best: str | None = None
    """`METRIC:min` or `METRIC:max`; None: no such rule."""
    tags: tuple[str, ...] = ()
    """Tags, or patterns of tags, that are kept."""

    def __post_init__(self) -> None:
        for name, count in vars(self).items():
            if name in ("last", "every") and count is not None and (type(count) is not int or count < 1):
                raise UsageError(f"keep: {name} is {count!r}; expected a whole number of at least 1")
        if self.best is not None:
            _parse_metric(self.best)
        tags: Any = self.tags
        if not isinstance(tags, tuple) or not all(isinstance(tag, str) and tag for tag in tags):
            raise UsageError(f"keep: tags are {tags!r}; expected a list of names or patterns")

    def reasons(self, infos: Sequence[TagInfo]) -> list[list[str]]:
        """Return the reasons to keep each checkpoint of `infos`, oldest first; one without reasons is removed."""
        best = self._best(infos)
        reasons: list[list[str]] = []
        for number, info in enumerate(infos):
            rules = {
                "last": number >= len(infos) - self.last,
                "every": self.every is not None and info.record.step % self.every == 0,
                "best": number == best,
                "tag": any(fnmatch.fnmatchcase(info.tag, pattern) for pattern in self.tags),
            }
            reasons.append([reason for reason, applies in rules.items() if applies])
        return reasons

    def _best(self, infos: Sequence[TagInfo]) -> int | None:
        if self.best is None:
            return None
        name, mode = _parse_metric(self.best)
        values = [(number, metric_of(info.record.state, name)) for number, info in enumerate(infos)]
        ranked = [(_MODES[mode] * value, -number) for number, value in values if value is not None]
        return -min(ranked)[1] if ranked else None


def metric_of(state: Mapping[str, Any], name: str) -> float | None:
    """Return a metric of a record's state; None if it has no finite number of that name."""
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


@dataclass(frozen=True, kw_only=True)
class Fate:
    """Whether one checkpoint is kept or removed."""

    info: TagInfo
    reasons: tuple[str, ...]
    """Why it is kept; empty if it is removed."""
    size_bytes: int
    """Its size on disk, shared files included. See [Note: sizes] in `folder`."""


def weigh(folder: FolderLike, keep: Keep) -> list[Fate]:
    """Apply the rules to each checkpoint in `folder`, local or at a URL, oldest first. Raises
    CheckpointNotFoundError if the folder has none, or if none has the metric of the rules."""
    catalog = scan(folder)
    if not catalog.tags:
        raise CheckpointNotFoundError(f"{folder} has no committed checkpoint")
    metric = None if keep.best is None else _parse_metric(keep.best)[0]
    if metric is not None and all(metric_of(info.record.state, metric) is None for info in catalog.tags):
        raise CheckpointNotFoundError(
            f"no checkpoint in {folder} has the metric {metric!r}: give the name under which it was passed to "
            "save_checkpoint(metrics=...), or of a number in its client_state"
        )
    return [
        Fate(info=info, reasons=tuple(reasons), size_bytes=stored_files(info.folder).size_bytes)
        for info, reasons in _reasons(folder, keep, catalog.tags, catalog)
    ]


def _reasons(
    folder: FolderLike, keep: Keep, infos: Sequence[TagInfo], catalog: Catalog
) -> list[tuple[TagInfo, list[str]]]:
    """Return the reasons to keep each checkpoint of `infos`, oldest first, by the rules and the `latest` file."""
    selected, note = default_tag(folder_at(folder), catalog) if catalog.tags else (None, "")
    selected_folders = {selected.folder.name} if selected is not None and note else set()
    return [
        (info, rules + ["latest"] * (info.folder.name in selected_folders))
        for info, rules in zip(infos, keep.reasons(infos), strict=True)
    ]


def plan_lines(fates: Sequence[Fate], freed_bytes: int, *, dry_run: bool) -> list[str]:
    """Return lines with the number of removals, the bytes that they free, and each checkpoint, oldest first."""
    width = max(len(fate.info.tag) for fate in fates)
    removed = [fate for fate in fates if not fate.reasons]
    total = format_bytes(sum(fate.size_bytes for fate in removed))
    summary = f"plan: {'would remove' if dry_run else 'remove'} {len(removed)} of {len(fates)} checkpoints"
    if removed:
        freed = format_bytes(freed_bytes)
        summary += f" ({total} on disk), which frees {freed}: files that other checkpoints or a run share remain"
    lines = [summary]
    for fate in fates:
        action = f"keep ({', '.join(fate.reasons)})" if fate.reasons else "remove"
        size = format_bytes(fate.size_bytes)
        lines.append(f"{fate.info.tag:{width}}  step {fate.info.record.step:>8}  {size:>10} on disk  {action}")
    return lines


def remove_each(infos: Sequence[TagInfo], remove: Callable[[TagInfo], None]) -> list[str]:
    """Call `remove` for each checkpoint, in order; return a message for each that could not be removed."""
    messages: list[str] = []
    for info in infos:
        with reporting_to(messages, f"checkpoint {info.tag!r} could not be removed"):
            remove(info)
    return messages


def retire(place: FolderLike, *, keep: Keep, run: str, remove: Callable[[TagInfo], None]) -> list[str]:
    """Call `remove` for the checkpoints of run `run` in the folder that the rules do not keep; return a message for each that
    could not be removed."""
    messages: list[str] = []
    with reporting_to(messages, "the folder could not be scanned for checkpoints to remove"):
        catalog = scan(place)
        own = [info for info in catalog.tags if info.record.run == run]
        removed = [info for info, reasons in _reasons(place, keep, own, catalog) if not reasons]
        messages += remove_each(removed, remove)
    return messages
