"""The steps of a run as columns of numbers, in bounded memory. Pure.

[Note: columns]
A row is a step, or after `MOST_ROWS` of them several that follow each other: then the older half of the rows is joined in
pairs. A joined row has the last step and time, the least and greatest loss, tokens by time, and the mean of everything else.
NaN: not known.
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

MOST_ROWS = 2**17
_MOST_COLUMNS = 128
"""A journal may name as many links and metrics as it likes; further ones are left out."""
_LEAST_ROWS = 256

_TIMES = ("step_s", "forward_s", "backward_s", "optimizer_s")
COLUMNS = ("step", "at", "loss", "loss_min", "loss_max", "lr", "grad_norm", "tokens_per_s", *_TIMES, "stall_s")
"""Columns that every table has; others come with the steps."""
_STEPS, _SERIAL = "#steps", "#serial"
_HIDDEN = (_STEPS, _SERIAL)
"""How many steps a row covers, and the number of its last line among all of steps."""
_LAST = {"step", "at", _SERIAL}
_BY_TIME = {"tokens_per_s", "mfu"}
"""Rates of a step: their means are by its time."""


def row_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the row of a journal's line of a step, with the columns of `zstore.journal.steps`; see there."""
    row = {name: number(line.get(name)) for name in ("step", "at", "loss", "lr", "grad_norm", *_TIMES)}
    row["loss_min"] = row["loss_max"] = row["loss"]
    tokens, step_s = number(line.get("tokens")), row["step_s"]
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


class StepTable:
    """Rows of steps, the steps rising. See [Note: columns]. Not for several threads at once."""

    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        self._most_rows = most_rows
        self._places = {name: place for place, name in enumerate((*COLUMNS, *_HIDDEN))}
        self._data: Matrix = np.full((len(self._places), _LEAST_ROWS), np.nan)  # [columns, rows]
        self._size = 0
        self.num_lines = 0
        """Lines of steps that were added, including those that a later process repeated."""

    def __len__(self) -> int:
        return self._size

    @property
    def last(self) -> dict[str, float]:
        """The last row; empty if there is none."""
        if not self._size:
            return {}
        return {name: float(self._data[place, self._size - 1]) for name, place in self._places.items()}

    def add(self, row: Mapping[str, float]) -> None:
        """Add the row of a step. Rows of that step and later ones are dropped: a process that resumed repeats them."""
        self.num_lines += 1
        if math.isnan(row["step"]):
            return
        steps = self._data[0, : self._size]
        if self._size and row["step"] <= steps[-1]:
            self._size = int(np.searchsorted(steps, row["step"]))
        if self._size == self._data.shape[1]:
            self._make_room()
        self._size += 1
        self._data[:, self._size - 1] = np.nan
        self._put({**row, _STEPS: 1.0, _SERIAL: float(self.num_lines)})

    def _put(self, row: Mapping[str, float]) -> None:
        """Put values into the last row."""
        for name, value in row.items():
            if name not in self._places and len(self._places) < _MOST_COLUMNS:
                self._places[name] = len(self._places)
                self._data = np.vstack([self._data, np.full((1, self._data.shape[1]), np.nan)])
            if (place := self._places.get(name)) is not None:
                self._data[place, self._size - 1] = value

    def note(self, step: float, values: Mapping[str, float]) -> None:
        """Add values to those of a step, the last one; of a later one they make a row."""
        last = self._data[0, self._size - 1] if self._size else -math.inf
        if step > last:
            self.add({"step": step, **values})
        elif step == last:
            self.num_lines += 1
            self._put({**values, _SERIAL: float(self.num_lines)})

    def _make_room(self) -> None:
        if self._size < self._most_rows:
            self._data = np.hstack([self._data, np.full_like(self._data, np.nan)])
            return
        half = self._size // 2
        joined = _joined(self._data[:, :half], list(self._places), half // 2)
        rest = self._data[:, half : self._size]
        self._data[:, : joined.shape[1] + rest.shape[1]] = np.hstack([joined, rest])
        self._size = joined.shape[1] + rest.shape[1]

    @property
    def first_step(self) -> float:
        """The first step; infinite if there is none."""
        return float(self._data[0, 0]) if self._size else math.inf

    def columns(self, *, points: int, **ends: float) -> dict[str, list[float | None]]:
        """Return the rows of `part` as at most `points` values a column; see `columns_of`."""
        return columns_of([self.part(**ends)], points)

    def part(
        self, *, after_step: float = -math.inf, until_step: float = math.inf, after_line: float = -math.inf
    ) -> Part:
        """Return the rows after a step, or a line by its number, up to a step."""
        first = int(np.searchsorted(self._data[0, : self._size], after_step, side="right"))
        if after_line > -math.inf:  # rows that were repeated have later numbers: these rise too
            numbers = self._data[self._places[_SERIAL], : self._size]
            first = max(first, int(np.searchsorted(numbers, after_line, side="right")))
        last = int(np.searchsorted(self._data[0, : self._size], until_step, side="right"))
        return list(self._places), self._data[:, first : max(first, last)]


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
        whole = _joined(whole, names, points)
    found: dict[str, list[float | None]] = {}
    for name, row in zip(names, whole, strict=True):
        known = ~np.isnan(row)
        if name in _HIDDEN or (name not in COLUMNS and not known.any()):
            continue
        values = row.tolist()
        found[name] = values if known.all() else [v if k else None for v, k in zip(values, known, strict=True)]
    return found


def _joined(part: Matrix, names: Iterable[str], count: int) -> Matrix:
    """Return `count` columns for those of `part`, about as many of them in each. See [Note: columns]."""
    ends = np.linspace(0, part.shape[1], count + 1).astype(np.int64)
    starts = ends[:-1]
    named = list(names)
    weights = part[named.index(_STEPS)]
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
        elif name == _STEPS:
            found[place] = np.add.reduceat(weights, starts)
        elif name in ("loss_min", "loss_max"):
            pick = np.fmin if name == "loss_min" else np.fmax
            found[place] = pick.reduceat(part[place], starts)
    return found
