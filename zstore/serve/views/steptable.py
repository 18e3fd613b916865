"""The steps of a run as rows, each also joined with its neighbours, so that any range of them is read as few rows.

[Note: levels]
A row of level 0 is a step; one of level n is `FANOUT` rows of level n - 1 that follow each other and no longer change. Rows are
kept in blocks of `BLOCK_ROWS`; the last block of each level is in memory, the others are in what the table is made with.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .columns import COLUMNS, HIDDEN, SEEN, SERIAL, STEPS, Matrix, Part, columns_of, joined

BLOCK_ROWS = 512
_LEAST_ROWS = 16
FANOUT = 8
_MOST_COLUMNS = 128
"""A journal may name as many links and metrics as it likes; further ones are left out."""


class Blocks(Protocol):
    """Keeps blocks of rows [columns, rows] by level and number."""

    def __getitem__(self, key: tuple[int, int], /) -> Matrix: ...

    def __setitem__(self, key: tuple[int, int], rows: Matrix, /) -> None: ...


@dataclass
class TableState:
    """What a table is made of again, together with its blocks."""

    names: list[str] = field(default_factory=lambda: [*COLUMNS, *HIDDEN])
    sizes: list[int] = field(default_factory=lambda: [0])
    """Rows of each level."""
    num_lines: int = 0


class _Level:
    """The rows of one level."""

    def __init__(self, blocks: Blocks, level: int, size: int, num_columns: int) -> None:
        self._blocks = blocks
        self._level = level
        self._num_columns = num_columns
        self._open(size)

    def _open(self, size: int) -> None:
        self.size = size
        self.first = max(0, size - 1) // BLOCK_ROWS * BLOCK_ROWS
        """The first row that is in memory."""
        self._tail = self._stored(self.first // BLOCK_ROWS)[:, : size - self.first] if size else self._unknown(0)

    def _stored(self, number: int) -> Matrix:
        rows = self._blocks[self._level, number]
        return np.vstack([rows, self._unknown(rows.shape[1])[len(rows) :]])

    def _unknown(self, num_rows: int) -> Matrix:
        return np.full((self._num_columns, num_rows), np.nan)

    def block(self, number: int) -> Matrix:
        """Return the rows of a block."""
        is_last = number == self.first // BLOCK_ROWS
        return self._tail[:, : self.size - self.first] if is_last else self._stored(number)

    def widen(self, num_columns: int) -> None:
        """Have that many columns."""
        self._num_columns = num_columns
        self._tail = np.vstack([self._tail, self._unknown(self._tail.shape[1])[len(self._tail) :]])

    def append(self, row: Matrix) -> None:
        """Append a row [columns]."""
        used = self.size - self.first
        if used == BLOCK_ROWS:
            self.save()
            self.first, self._tail, used = self.size, self._unknown(0), 0
        if used == self._tail.shape[1]:
            self._tail = np.hstack([self._tail, self._unknown(max(_LEAST_ROWS, used))])
        self._tail[:, used] = row
        self.size += 1

    @property
    def last(self) -> Matrix:
        """The last row [columns]."""
        return self._tail[:, self.size - 1 - self.first]

    def cut(self, size: int) -> None:
        """Drop the rows after the first `size`."""
        if size <= self.first:
            self._open(size)
        self.size = size

    def save(self) -> None:
        """Put the rows that are in memory into a block."""
        self._blocks[self._level, self.first // BLOCK_ROWS] = self.block(self.first // BLOCK_ROWS).copy()

    def rows(self, first: int, last: int) -> Matrix:
        """Return the rows from one up to another, which is not among them."""
        if first >= last:
            return self._unknown(0)
        numbers = range(first // BLOCK_ROWS, (last - 1) // BLOCK_ROWS + 1)
        parts = [self.block(n)[:, max(0, first - n * BLOCK_ROWS) : last - n * BLOCK_ROWS] for n in numbers]
        return parts[0] if len(parts) == 1 else np.hstack(parts)


class StepTable:
    """Rows of steps, the steps rising. See [Note: levels]. Not for several threads at once."""

    def __init__(self, blocks: Blocks | None = None, state: TableState | None = None) -> None:
        self._blocks: Blocks = {} if blocks is None else blocks
        state = TableState() if state is None else state
        self._places = {name: place for place, name in enumerate(state.names)}
        self._levels = [_Level(self._blocks, level, size, len(self._places)) for level, size in enumerate(state.sizes)]
        self.num_lines = state.num_lines
        """Lines of steps that were added, including those that a later process repeated."""

    def save(self) -> TableState:
        """Put all rows into blocks, and return what else a table is made of."""
        for level in self._levels:
            level.save()
        sizes = [level.size for level in self._levels]
        return TableState(list(self._places), sizes, self.num_lines)

    def __len__(self) -> int:
        return self._levels[0].size

    @property
    def last(self) -> dict[str, float]:
        """The last row; empty if there is none."""
        return dict(zip(self._places, self._levels[0].last.tolist(), strict=True)) if len(self) else {}

    @property
    def _last_step(self) -> float:
        return float(self._levels[0].last[0]) if len(self) else -math.inf

    @property
    def first_step(self) -> float:
        """The first step; infinite if there is none."""
        return float(self._levels[0].rows(0, 1)[0, 0]) if len(self) else math.inf

    def add(self, row: Mapping[str, float]) -> None:
        """Add the row of a step. Rows of that step and later ones are dropped: a process that resumed repeats them."""
        self.num_lines += 1
        if math.isnan(row["step"]):
            return
        if row["step"] <= self._last_step:
            size = self._find(0, np.nextafter(row["step"], -math.inf))
            for height, level in enumerate(self._levels):
                level.cut(size // FANOUT**height)
        self._join()
        # Of steps without a line, as in a sample of the lines, there were as many tokens.
        passed = max(1.0, row["step"] - self._last_step) if len(self) else 1.0
        counts = (self.tokens_until(math.inf), passed * row.get(SEEN, math.nan))
        known = [count for count in counts if not math.isnan(count)]
        more = {SEEN: sum(known) if known else math.nan, STEPS: 1.0, SERIAL: float(self.num_lines)}
        self._levels[0].append(self._row({**row, **more}))

    def tokens_until(self, step: float) -> float:
        """Return the tokens of all steps up to one; NaN if they are not known."""
        last = self._find(0, step)
        return float(self._levels[0].rows(last - 1, last)[self._places[SEEN], 0]) if last else math.nan

    def note(self, step: float, values: Mapping[str, float]) -> None:
        """Add values to those of a step, the last one; of a later one they make a row."""
        if step > self._last_step:
            self.add({"step": step, **values})
        elif step == self._last_step:
            self.num_lines += 1
            row = self._row({**values, SERIAL: float(self.num_lines)})
            np.copyto(self._levels[0].last, row, where=~np.isnan(row))

    def _row(self, values: Mapping[str, float]) -> Matrix:
        """Return values by the places of their columns, of which there are new ones if there is room."""
        new = [name for name in values if name not in self._places][: _MOST_COLUMNS - len(self._places)]
        if new:
            self._places |= {name: len(self._places) + place for place, name in enumerate(new)}
            for level in self._levels:
                level.widen(len(self._places))
        return np.array([values.get(name, math.nan) for name in self._places])

    def _join(self) -> None:
        """Join rows that no longer change: a row is about to follow them."""
        for height, level in enumerate(self._levels):
            if not level.size or level.size % FANOUT:
                return
            if height + 1 == len(self._levels):
                self._levels.append(_Level(self._blocks, height + 1, 0, len(self._places)))
            if self._levels[height + 1].size == level.size // FANOUT:
                return
            self._levels[height + 1].append(joined(level.rows(level.size - FANOUT, level.size), self._places, 1)[:, 0])

    def _find(self, place: int, value: float) -> int:
        """Return the first row whose value in a rising column is greater."""
        if math.isinf(value):
            return len(self) if value > 0 else 0
        base, number = self._levels[0], self._levels[0].first // BLOCK_ROWS
        if base.block(number)[place, 0] > value:  # mostly the last one is meant
            number = max(0, bisect_right(range(number), value, key=lambda each: base.block(each)[place, 0]) - 1)
        return number * BLOCK_ROWS + int(np.searchsorted(base.block(number)[place], value, "right"))

    def columns(self, *, points: int, **ends: float) -> dict[str, list[float | None]]:
        """Return the rows of `part` as at most `points` values a column; see `columns_of`."""
        return columns_of([self.part(points=points, **ends)], points)

    def part(
        self,
        *,
        points: int,
        after_step: float = -math.inf,
        until_step: float = math.inf,
        after_line: float = -math.inf,
    ) -> Part:
        """Return the rows after a step, or a line by its number, up to a step: those of a level that has `points` of them."""
        if not len(self):
            return list(self._places), self._levels[0].rows(0, 0)
        # Rows that were repeated have later numbers, so these rise as steps do.
        first = max(self._find(0, after_step), self._find(self._places[SERIAL], after_line))
        last = max(first, self._find(0, until_step))
        height = 0
        while height + 1 < len(self._levels) and last - first >= points * FANOUT ** (height + 1):
            height += 1
        width, base, level = FANOUT**height, self._levels[0], self._levels[height]
        start, stop = math.ceil(first / width), min(last // width, level.size)
        names = list(self._places)
        if not height or stop <= start:
            return names, base.rows(first, last)
        ends = [base.rows(first, start * width), base.rows(stop * width, last)]
        head, tail = (joined(rows, names, 1) if rows.shape[1] else rows for rows in ends)
        return names, np.hstack([head, level.rows(start, stop), tail])
