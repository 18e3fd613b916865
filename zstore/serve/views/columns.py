"""The steps of a run as columns of numbers. Pure.

[Note: columns]
A row is a step, or several that follow each other: such a joined row has the last step, time and sum of tokens, the least and
greatest loss, tokens by time, and the mean of everything else. NaN: not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...journal.columns import measured, number

Matrix = npt.NDArray[np.float64]
Part = tuple[list[str], Matrix]
"""Names of columns, and their rows [columns, rows]."""

_TIMES = ("step_s", "forward_s", "backward_s", "optimizer_s")
SEEN = "tokens_seen"
"""Tokens of all steps up to this one; of a row that is about to be added, those of its step."""
COLUMNS = ("step", "at", SEEN, "loss", "loss_min", "loss_max", "lr", "grad_norm", "tokens_per_s", *_TIMES, "stall_s")
"""Columns that every table has; others come with the steps."""
STEPS, SERIAL = "#steps", "#serial"
HIDDEN = (STEPS, SERIAL)
"""How many steps a row covers, and the number of its last line among all of steps."""
_LAST = {"step", "at", SEEN, SERIAL}
_BY_TIME = {"tokens_per_s", "mfu"}
"""Rates of a step: their means are by its time."""


def row_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the row of a journal's line of a step, with the columns of `zstore.journal.steps`; see there."""
    row = {name: number(line.get(name)) for name in ("step", "at", "loss", "lr", "grad_norm", *_TIMES)}
    row["loss_min"] = row["loss_max"] = row["loss"]
    row[SEEN], step_s = (tokens := number(line.get("tokens"))), row["step_s"]
    row["tokens_per_s"] = number(tokens / step_s) if step_s > 0 else math.nan
    return row | {"stall_s": math.nan} | measured(line) | _not_finite(line)


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of an evaluation, or of a loop's own, by the names of their columns."""
    values = line.get("values")
    if line.get("kind") == "eval":
        values = {"eval_loss": line.get("loss"), "perplexity": line.get("perplexity")}
    found = {f"metric/{name}": number(value) for name, value in values.items()} if isinstance(values, dict) else {}
    return found | _not_finite(line)


def _not_finite(line: Mapping[str, Any]) -> dict[str, float]:
    """Return how many numbers of a line were NaN or infinite, if any."""
    other = line.get("not_finite")
    return {"not_finite": float(len(other))} if isinstance(other, dict) and other else {}


def columns_of(parts: Sequence[Part], points: int) -> dict[str, list[float | None]]:
    """Return parts that follow each other as at most `points` values a column.

    Columns that come with the steps are there if they have a value.
    """
    names = list(dict.fromkeys(name for own, _ in parts for name in own))
    whole = np.full((len(names), sum(rows.shape[1] for _, rows in parts)), np.nan)
    first = 0
    for own, rows in parts:
        whole[[names.index(name) for name in own], first : first + rows.shape[1]] = rows
        first += rows.shape[1]
    if whole.shape[1] > points:
        whole = joined(whole, names, points)
    found: dict[str, list[float | None]] = {}
    for name, row in zip(names, whole, strict=True):
        known = ~np.isnan(row)
        if name in HIDDEN or (name not in COLUMNS and not known.any()):
            continue
        values = row.tolist()
        found[name] = values if known.all() else [v if k else None for v, k in zip(values, known, strict=True)]
    return found


def joined(part: Matrix, names: Iterable[str], count: int) -> Matrix:
    """Return `count` columns for those of `part`, about as many of them in each. See [Note: columns]."""
    ends = np.linspace(0, part.shape[1], count + 1).astype(np.int64)
    starts = ends[:-1]
    named = list(names)
    weights = part[named.index(STEPS)]
    known = ~np.isnan(part)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.repeat(weights[None], len(named), axis=0)
        for name in _BY_TIME & set(named):
            shares[named.index(name)] *= np.nan_to_num(part[named.index("step_s")])
        sums = np.add.reduceat(np.where(known, part * shares, 0), starts, axis=1)
        found: Matrix = sums / np.add.reduceat(known * shares, starts, axis=1)
    for place, name in enumerate(named):
        if name in _LAST:
            found[place] = part[place, ends[1:] - 1]
        elif name == STEPS:
            found[place] = np.add.reduceat(weights, starts)
        elif name in ("loss_min", "loss_max"):
            pick = np.fmin if name == "loss_min" else np.fmax
            found[place] = pick.reduceat(part[place], starts)
    return found
