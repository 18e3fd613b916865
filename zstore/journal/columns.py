"""Steps of a journal as columns, for curves and tables.

[Note: repeated steps]
A run that resumes from an earlier checkpoint repeats steps, and its journal has them twice. The later ones count: a line of
step n replaces earlier lines of step n and of those after it, since the run went that way in the end.
"""

from __future__ import annotations

import math
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
    """Return the steps as columns of one length; None if a step has no number for a column.

    `step`, `at`, `loss`, `lr`, `grad_norm`, `samples`, `tokens`, `step_s`, `forward_s`, `backward_s`, `optimizer_s` are the
    journal's, and `tokens_per_s` is of the step; `mfu` is there if some step has it. If the journal has links and
    memory, there are `memory/<tier>` in bytes, `rate/<link>` in bytes per second, `stall/<cause>` and `stall_s`, their sum,
    in seconds of a step: rates and stalls are means over the steps since it had them before. Evaluations and numbers of
    the loop's own are `metric/<name>`, in the row of their step, or in one that has nothing else.
    """
    rows = [{name: _number(row.get(name)) for name in _NUMBERS} | _derived(row) for row in _with_metrics(records)]
    names = list(dict.fromkeys((*_NUMBERS, "tokens_per_s", "stall_s", *(name for row in rows for name in row))))
    return {name: [row.get(name) for row in rows] for name in names}


def _with_metrics(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what is known of each step. See [Note: repeated steps]."""
    kept: list[dict[str, Any]] = []
    for record in records:
        step, kind = record.get("step"), record.get("kind")
        if not isinstance(step, int) or kind not in ("step", "eval", "metrics"):
            continue
        if kind == "step":
            while kept and kept[-1]["step"] >= step:
                kept.pop()
            kept.append(dict(record))
        elif not kept or kept[-1]["step"] <= step:
            if not kept or kept[-1]["step"] < step:
                kept.append({"step": step, "at": record.get("at")})
            kept[-1]["metrics"] = kept[-1].get("metrics", {}) | _metrics(record)
    return kept


def _metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    if record["kind"] == "eval":
        return {"eval_loss": record.get("loss"), "perplexity": record.get("perplexity")}
    return dict(_mapping(record.get("values")))


def _derived(row: Mapping[str, Any]) -> dict[str, float | None]:
    found = {name: None if math.isnan(value) else value for name, value in measured(row).items()}
    tokens, step_s = _number(row.get("tokens")), _number(row.get("step_s"))
    if tokens is not None and step_s:
        found["tokens_per_s"] = tokens / step_s
    metrics = ((name, number(value)) for name, value in _mapping(row.get("metrics")).items())
    return found | {f"metric/{name}": value for name, value in metrics if not math.isnan(value)}


def number(value: Any) -> float:
    """Return a number of a journal; NaN for anything else, or if it is not finite."""
    if type(value) is float:
        return value if math.isfinite(value) else math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def measured(record: Mapping[str, Any]) -> dict[str, float]:
    """Return utilisation, memory, rates and stalls of a step's record, by the names of their columns: NaN if a value is no
    number.

    Rates that are not known are left out, and so is anything that the record lacks.
    """
    found = {f"memory/{tier}": number(nbytes) for tier, nbytes in _mapping(record.get("memory")).items()}
    if not math.isnan(mfu := number(record.get("mfu"))):
        found["mfu"] = mfu
    if not isinstance(record.get("links"), dict):
        return found
    passed_s, count = number(record.get("links_s")), number(record.get("links_steps"))
    passed_s, count = passed_s if passed_s > 0 else number(record.get("step_s")), count if count > 0 else 1.0
    stalls: dict[str, float] = {}
    for name, link in record["links"].items():
        used = _mapping(link)
        rate = number(number(used.get("bytes")) / passed_s) if passed_s > 0 else math.nan
        if not math.isnan(rate):
            found[f"rate/{name}"] = rate
        for cause, seconds in _mapping(used.get("stall_s")).items():
            known_s = number(seconds)
            stalls[cause] = stalls.get(cause, 0.0) + (0.0 if math.isnan(known_s) else known_s / count)
    found |= {f"stall/{cause}": stall_s for cause, stall_s in stalls.items()}
    found["stall_s"] = sum(stalls.values())
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
