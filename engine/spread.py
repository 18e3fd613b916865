"""An order of things in a row, of which any first part lies evenly among all of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_BITS = 32


def spread_turns(sizes: Sequence[int]) -> list[int]:
    """Return the turn of each thing: where the middle of it lies among all, from 0 to 1, with binary digits in reverse.

    Were the first parameters in memory and the last ones on disk, the drive would rest in one half of a pass and hold it up
    in the other. Source: the van der Corput sequence.
    """
    total = max(sum(sizes), 1)
    turns: list[int] = []
    before = 0
    for size in sizes:
        place = min(((2 * before + size) << _BITS) // (2 * total), (1 << _BITS) - 1)
        turns.append(int(f"{place:0{_BITS}b}"[::-1], 2))
        before += size
    return turns
