"""Steps of a journal as columns, for curves and tables.

[Note: repeated steps]
A run that resumes from an earlier checkpoint repeats steps, and its journal has them twice. The later ones count: a line of
step n takes away what was there of step n and those after it, for that is what the run did in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_NUMBERS = (
    "step", "at", "loss", "lr", "grad_norm", "samples", "tokens", "step_s", "forward_s", "backward_s", "optimizer_s",
)  # fmt: skip

Column = list[float | None]


def last_steps(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records of steps that count, in order of steps. See [Note: repeated steps]."""
    kept: list[Mapping[str, Any]] = []
    for record in records:
        if record.get("kind") != "step" or not isinstance(record.get("step"), int):
            continue
        while kept and kept[-1]["step"] >= record["step"]:
            kept.pop()
        kept.append(record)
    return kept


def steps(records: Iterable[Mapping[str, Any]]) -> dict[str, Column]:
    """Return the steps as columns of one length; None where a step has no number for a column.

    `step`, `at`, `loss`, `lr`, `grad_norm`, `samples`, `tokens`, `step_s`, `forward_s`, `backward_s`, `optimizer_s` are the
    journal's, and `tokens_per_s` is of the step. Where the journal has links and memory, there are `memory/<tier>` in bytes,
    `rate/<link>` in bytes per second, `stall/<cause>` and `stall_s`, their sum, in seconds of a step: rates and stalls are
    means over the steps since it had them before.
    """
    rows = last_steps(records)
    columns: dict[str, Column] = {name: [_number(row.get(name)) for row in rows] for name in _NUMBERS}
    columns["tokens_per_s"] = [
        tokens / step_s if tokens is not None and step_s else None
        for tokens, step_s in zip(columns["tokens"], columns["step_s"], strict=True)
    ]
    columns["stall_s"] = [None] * len(rows)
    for number, row in enumerate(rows):
        if "links" not in row and "memory" not in row:
            continue
        for name, value in _measured(row).items():
            if name not in columns:
                columns[name] = [None] * len(rows)
            columns[name][number] = value
    return columns


def _measured(row: Mapping[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    memory, links = row.get("memory"), row.get("links")
    if isinstance(memory, dict):
        found |= {f"memory/{tier}": _number(nbytes) for tier, nbytes in memory.items()}
    if not isinstance(links, dict):
        return found
    passed_s = _number(row.get("links_s")) or _number(row.get("step_s"))
    count = _number(row.get("links_steps")) or 1.0
    stalls: dict[str, float] = {}
    for name, link in links.items():
        nbytes = _number(link.get("bytes"))
        if passed_s and nbytes is not None:
            found[f"rate/{name}"] = nbytes / passed_s
        for cause, seconds in link.get("stall_s", {}).items():
            stalls[cause] = stalls.get(cause, 0.0) + (_number(seconds) or 0.0) / count
    found |= {f"stall/{cause}": seconds for cause, seconds in stalls.items()}
    found["stall_s"] = sum(stalls.values())
    return found


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
