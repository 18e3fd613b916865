"""Dividing work among processes so that each has about the same bytes of it. Pure.

[Note: the line of bytes]
The items are in one line, each with its bytes, and the line is cut into as many pieces of equal length as there are
processes. A unit of an item, which is not divided, belongs to the process whose piece has its first byte. So every unit
belongs to one process, a process has neighbouring ones, and its bytes differ from the mean by less than one unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class UnitRange(NamedTuple):
    """Units `[first, stop)` of the item with the number `item`."""

    item: int
    first: int
    stop: int


def shares_of(items: Sequence[tuple[int, int]], rank: int, world_size: int) -> list[UnitRange]:
    """Return the shares of process `rank` of `world_size`, in the items' order; see [Note: the line of bytes].

    An item is (number of units, bytes of each); units of no bytes count as one byte.
    """
    total = sum(units * max(1, nbytes) for units, nbytes in items)
    low, high = total * rank // world_size, total * (rank + 1) // world_size
    found: list[UnitRange] = []
    at = 0
    for number, (units, nbytes) in enumerate(items):
        size = max(1, nbytes)
        if at >= high:
            break
        first = min(units, max(0, -(-(low - at) // size)))
        stop = min(units, max(0, -(-(high - at) // size)))
        if first < stop:
            found.append(UnitRange(number, first, stop))
        at += units * size
    return found


def items_of(sizes: Iterable[int], rank: int, world_size: int) -> list[int]:
    """Return the numbers of the items that belong to process `rank`; each is one unit of so many bytes."""
    return [share.item for share in shares_of([(1, size) for size in sizes], rank, world_size)]
