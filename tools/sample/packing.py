"""Rows of text packed into samples: tokens one after another, none padded, none left out.

[Note: lanes]
The rows are dealt to lanes, as many as a step of the first start had samples. A lane goes through its rows one after
another and packs their tokens, with the end-of-text token between them, into samples; in each epoch the rows come in
another order and in other lanes. Sample n of the run is the next of lane n mod lanes. So a rank reads and tokenises the
rows of its own samples alone, the memory is that of a row a lane, and the run's samples are the same at any world size. A
lane's position is (epoch, row, tokens of the row that were used); a checkpoint has those of all lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zstore.errors import ConfigError

from .corpus import Text
from .order import Permutation
from .rows import Rows

LanePosition = tuple[int, int, int]
"""Epoch, row of the lane in that epoch, tokens of it that were used."""


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Makes tokens of text."""

    encode: Callable[[str], list[int]]
    end: int | None
    """The token that ends a text; None: there is none."""


BYTES = Encoder(encode=lambda text: list(text.encode()), end=0)
"""Bytes as tokens; a zero ends a text."""


@dataclass
class _Lane:
    position: LanePosition = (0, 0, 0)
    taken: int = 0
    """Samples that were made of it."""
    tokens: list[int] | None = None
    """Of the row that the position is in; None: not read."""


class PackedRows(Text):
    """Samples of packed tokens. See [Note: lanes]. `chosen` are the numbers of the rows."""

    def __init__(self, rows: Rows, chosen: Sequence[int], text_key: str, encoder: Encoder) -> None:
        self._rows = rows
        self._chosen = chosen
        self._text_key = text_key
        self._encoder = encoder
        self._lanes: dict[int, _Lane] = {}
        self.num_lanes = 1
        self._seed: int | None = None
        self._orders: dict[int, Permutation] = {}

    def begin(self, num_lanes: int, samples: int = 0, positions: Sequence[Sequence[int]] = ()) -> None:
        """Deal the rows to lanes; go on after so many `samples` of the run, where the lanes are at `positions`."""
        self.num_lanes = len(positions) or max(1, min(num_lanes, len(self._chosen)))
        self._lanes = {
            lane: _Lane((int(where[0]), int(where[1]), int(where[2])), self._taken(lane, samples))
            for lane, where in enumerate(positions)
        }

    def _taken(self, lane: int, samples: int) -> int:
        return (samples - lane + self.num_lanes - 1) // self.num_lanes

    def positions(self) -> list[list[Any]]:
        """Return of each lane that was used here [its number, the samples made of it, its position]. JSON data."""
        return [[number, lane.taken, list(lane.position)] for number, lane in self._lanes.items()]

    def all_positions(self, everyone: Iterable[list[list[Any]]]) -> list[LanePosition]:
        """Return the positions of all lanes from what `positions` returned on every rank."""
        found: list[tuple[int, LanePosition]] = [(0, (0, 0, 0))] * self.num_lanes
        for number, taken, (epoch, row, used) in (lane for told in everyone for lane in told):
            found[number] = max(found[number], (taken, (epoch, row, used)))
        return [position for _, position in found]

    def require(self, seq_len: int) -> None:
        """Raise `ConfigError` where no sample can be made."""
        super().require(seq_len)
        if not len(self._chosen):
            raise ConfigError(
                f"{self._rows.name} holds no rows to take: give more data or a smaller --validation-split"
            )
        self.read(0)

    def sample(self, number: int, seq_len: int, seed: int) -> tuple[Tensor, Tensor]:
        """Sample `number` as `(input_ids, labels)`, int64 [seq_len] and equal. They are asked for in rising order."""
        if seed != self._seed:
            self._seed, self._orders = seed, {}
        lane = self._lanes.setdefault(number % self.num_lanes, _Lane())
        wanted = number // self.num_lanes
        if wanted < lane.taken:
            raise ValueError(f"sample {number} of {self._rows.name} was taken already")
        ids: list[int] = []
        while lane.taken <= wanted:
            ids = self._next(number % self.num_lanes, lane, seq_len)
            lane.taken += 1
        found = torch.tensor(ids, dtype=torch.int64)
        return found, found.clone()

    def _next(self, number: int, lane: _Lane, seq_len: int) -> list[int]:
        """Return the next tokens of a lane."""
        ids: list[int] = []
        empty_epochs, (epoch, index, used) = 0, lane.position
        while len(ids) < seq_len:
            place = number + index * self.num_lanes
            if place >= len(self._chosen):
                epoch, index, used = epoch + 1, 0, 0
                empty_epochs += 1
                if empty_epochs > 1 and not ids:
                    raise ConfigError(f"{self._rows.name}: no tokens are made of its text: give other data")
                continue
            if lane.tokens is None:
                lane.tokens = self.read(self._chosen[self._order(epoch)[place]])
            piece = lane.tokens[used : used + seq_len - len(ids)]
            ids += piece
            used += len(piece)
            if used >= len(lane.tokens):
                index, used, lane.tokens = index + 1, 0, None
        lane.position = (epoch, index, used)
        return ids

    def _order(self, epoch: int) -> Permutation:
        if epoch not in self._orders:
            self._orders[epoch] = Permutation(len(self._chosen), "rows", self._seed, epoch)
        return self._orders[epoch]

    def read(self, number: int) -> list[int]:
        """Return the tokens of a row, the one that ends it included."""
        content = self._rows.content(number, self._text_key)
        if isinstance(content, list):
            return content
        tokens = self._encoder.encode(content)
        return tokens if self._encoder.end is None or not tokens else [*tokens, self._encoder.end]


class Chosen(Sequence[int]):
    """A part of the numbers [0, size) in a fixed mixed order."""

    def __init__(self, size: int, start: int, stop: int) -> None:
        self._order = Permutation(size, "split")
        self._start, self._stop = start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return self._order[self._start + index]
