"""The steps of a run as columns of numbers, in bounded memory. Pure.

[Note: columns]
A row is a step, or after `MOST_ROWS` of them several that follow each other: then the older half of the rows is joined in
pairs. A joined row has the last step and time, the least and greatest loss, and the mean of everything else. NaN: not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...journal.columns import measured, number

Matrix = npt.NDArray[np.float64]

MOST_ROWS = 2**17
_MOST_COLUMNS = 64
"""A journal may name as many links as it likes; further ones are left out."""
_LEAST_ROWS = 256

_TIMES = ("step_s", "forward_s", "backward_s", "optimizer_s")
COLUMNS = ("step", "at", "loss", "loss_min", "loss_max", "lr", "grad_norm", "tokens_per_s", *_TIMES, "stall_s")
"""Columns that every table has; others come with the steps."""
_STEPS, _SERIAL = "#steps", "#serial"
_HIDDEN = (_STEPS, _SERIAL)
"""How many steps a row covers, and the number of its last line among all of steps."""
_LAST = {"step", "at", _SERIAL}


def row_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the row of a journal's line of a step, with the columns of `zstore.journal.steps`; see there."""
    row = {name: number(line.get(name)) for name in ("step", "at", "loss", "lr", "grad_norm", *_TIMES)}
    row["loss_min"] = row["loss_max"] = row["loss"]
    tokens, step_s = number(line.get("tokens")), row["step_s"]
    row["tokens_per_s"] = number(tokens / step_s) if step_s > 0 else math.nan
    return row | {"stall_s": math.nan} | measured(line)


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
        for name in row:
            if name not in self._places and len(self._places) < _MOST_COLUMNS:
                self._places[name] = len(self._places)
                self._data = np.vstack([self._data, np.full((1, self._data.shape[1]), np.nan)])
        column = self._data[:, self._size]
        column[:] = np.nan
        for name, value in row.items():
            if (place := self._places.get(name)) is not None:
                column[place] = value
        column[self._places[_STEPS]], column[self._places[_SERIAL]] = 1, self.num_lines
        self._size += 1

    def _make_room(self) -> None:
        if self._size < self._most_rows:
            self._data = np.hstack([self._data, np.full_like(self._data, np.nan)])
            return
        half = self._size // 2
        joined = _joined(self._data[:, :half], list(self._places), half // 2)
        rest = self._data[:, half : self._size]
        self._data[:, : joined.shape[1] + rest.shape[1]] = np.hstack([joined, rest])
        self._size = joined.shape[1] + rest.shape[1]

    def columns(
        self, *, points: int, after_step: float = -math.inf, until_step: float = math.inf, after_line: float = -math.inf
    ) -> dict[str, list[float | None]]:
        """Return the rows after a step, or a line by its number, up to a step, as at most `points` values a column.

        Columns that come with the steps are there if they have a value.
        """
        first = int(np.searchsorted(self._data[0, : self._size], after_step, side="right"))
        if after_line > -math.inf:  # rows that were repeated have later numbers: these rise too
            numbers = self._data[self._places[_SERIAL], : self._size]
            first = max(first, int(np.searchsorted(numbers, after_line, side="right")))
        last = int(np.searchsorted(self._data[0, : self._size], until_step, side="right"))
        part = self._data[:, first : max(first, last)]
        if part.shape[1] > points:
            part = _joined(part, list(self._places), points)
        found: dict[str, list[float | None]] = {}
        for name, place in self._places.items():
            known = ~np.isnan(part[place])
            if name in _HIDDEN or (name not in COLUMNS and not known.any()):
                continue
            values = part[place].tolist()
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
        sums = np.add.reduceat(np.where(known, part * weights, 0), starts, axis=1)
        found: Matrix = sums / np.add.reduceat(known * weights, starts, axis=1)
    for place, name in enumerate(named):
        if name in _LAST:
            found[place] = part[place, ends[1:] - 1]
        elif name == _STEPS:
            found[place] = np.add.reduceat(weights, starts)
        elif name in ("loss_min", "loss_max"):
            pick = np.fmin if name == "loss_min" else np.fmax
            found[place] = pick.reduceat(part[place], starts)
    return found
