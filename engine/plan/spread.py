"""An order of things in a row, of which any first part lies evenly among all of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def spread_turns(sizes: Sequence[int]) -> list[int]:
    """Return the turn of each thing: where the middle of it lies among all, in at most as many parts as there are
    things, with binary digits in reverse. A second one in a part comes after the first ones of all.

    Were the first parameters in memory and the last ones on disk, the drive would rest in one half of a pass and hold it up
    in the other. Source: the van der Corput sequence.
    """
    total = max(sum(sizes), 1)
    bits = max(len(sizes).bit_length() - 1, 1)
    turns: list[int] = []
    seen: Counter[int] = Counter()
    before = 0
    for size in sizes:
        place = min(((2 * before + size) << bits) // (2 * total), (1 << bits) - 1)
        turns.append((seen[place] << bits) + int(f"{place:0{bits}b}"[::-1], 2))
        seen[place] += 1
        before += size
    return turns
