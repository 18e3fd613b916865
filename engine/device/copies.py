"""Copies between tensors that may rest in different memories, counted where they do.

torch casts on the host's side of a copy that it waits for, so what travels has the type of the device's side. A copy
that nobody waits for at once is cast before it begins, or after it ended.
"""

from __future__ import annotations

import time
from collections import deque

import torch

from zstore.io.links import LinkCounters

from .streams import Lane, Mark, Within

_MOST_UP = 2
"""Tiles on their way to the device: one is copied while the next is computed."""


class Copy:
    """A copy under way. See [Note: the hand-over]."""

    def __init__(self, lane: Lane, mark: Mark, values: torch.Tensor, source: torch.Tensor) -> None:
        self._lane = lane
        self._mark = mark
        self._source: torch.Tensor | None = source
        """Nobody may have its memory before the end."""
        self.values = values
        """The target; not to be touched before the end."""

    def wait(self) -> torch.Tensor:
        """Return the values when they are there."""
        if self._source is not None:
            self._lane.wait(self._mark)
            self._source = None
        return self.values

    def done(self) -> bool:
        """Return whether `wait` would not wait."""
        return self._source is None or self._lane.is_reached(self._mark)


class Transfers:
    """All copies of one rank's state, gradients and rows over its lane."""

    def __init__(self, lane: Lane, links: LinkCounters) -> None:
        self.lane = lane
        self._links = links

    def within(self) -> Within:
        """Return what a thread that works for the caller enters."""
        return self.lane.within()

    def settle(self) -> None:
        """Return when the device has done what this thread asked of it: others may read its memory on streams of theirs."""
        self.lane.wait(self.lane.mark())

    def link(self, source: torch.Tensor, target: torch.Tensor) -> str | None:
        """Return the link of a copy from one tensor to another, None within one memory."""
        if self.lane.is_host(source) == self.lane.is_host(target):
            return None
        return "device_to_host" if self.lane.is_host(target) else "host_to_device"

    def copy_into(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` into `target`, cast to its type; done on return."""
        link = self.link(source, target)
        if link is None:
            target.copy_(source)
            return
        travels = source if link == "device_to_host" else target
        with self._links.moving(link, source.numel() * travels.element_size()):
            self.lane.copy_now(target, source)

    def begin(
        self, target: torch.Tensor, source: torch.Tensor, *, after: Mark | None = None, counted: bool = True
    ) -> Copy:
        """Begin a copy across, of one type, after what was asked of the device so far (or `after`)."""
        if counted:
            self._links.begin(self.link(source, target) or "device_to_host", target.nbytes)
        mark = self.lane.copy(target, source, self.lane.mark() if after is None else after)
        return Copy(self.lane, mark, target, source)

    def finish(self, copy: Copy) -> torch.Tensor:
        """Wait for a copy, and count that; return its values."""
        if not copy.done():
            link = "device_to_host" if self.lane.is_host(copy.values) else "host_to_device"
            started = time.perf_counter()
            copy.wait()
            self._links.stalled(link, "begun earlier", time.perf_counter() - started)
        return copy.wait()


class GradientTiles:
    """The rows of a gradient, tile by tile, in fp32 beside the state, brought ahead of use where they are not there."""

    def __init__(self, transfers: Transfers, rows: torch.Tensor) -> None:
        self._transfers = transfers
        self._rows = rows
        self._ahead: tuple[int, int, Copy] | None = None

    def tile(self, first: int, stop: int, beside: torch.Tensor) -> torch.Tensor:
        """Return rows `[first, stop)` in the memory of `beside`, in fp32, for the caller to change."""
        part = self._rows[first:stop]
        link = self._transfers.link(part, beside)
        if link is None:
            return part.float()
        if link == "host_to_device":
            there = torch.empty_like(beside)
            self._transfers.copy_into(there, part)
            return there
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[:2] != (first, stop):
            ahead = self._begin(first, stop)
        # The tiles of a parameter are of one size, but for the last.
        following = min(2 * stop - first, self._rows.numel())
        if following > stop:
            self._ahead = self._begin(stop, following)
        return self._transfers.finish(ahead[2]).float()

    def _begin(self, first: int, stop: int) -> tuple[int, int, Copy]:
        staging = self._transfers.lane.empty_host(stop - first, self._rows.dtype)
        return first, stop, self._transfers.begin(staging, self._rows[first:stop])


class RowsUp:
    """New rows on their way to the parameters' memory: a tile is copied while the next is computed."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._under_way: deque[Copy] = deque()

    def put(self, rows: torch.Tensor, master: torch.Tensor) -> None:
        """Cast `master`, which is the caller's again on return, into `rows`; those are there after `settle`."""
        if self._transfers.link(master, rows) != "host_to_device":
            self._transfers.copy_into(rows, master)
            return
        staging = self._transfers.lane.empty_host(rows.numel(), rows.dtype)
        staging.copy_(master)
        self._under_way.append(self._transfers.begin(rows, staging))
        while len(self._under_way) > _MOST_UP:
            self._transfers.finish(self._under_way.popleft())

    def settle(self) -> None:
        """Return when all rows are there."""
        while self._under_way:
            self._transfers.finish(self._under_way.popleft())
