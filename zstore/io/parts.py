"""Memory in several places, for one transfer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..format.arrays import Bytes


class ScatteredMemory:
    """Memory in several places for one transfer, as if it were one array of `size` bytes."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.views = views
        """Of bytes, each contiguous, in the order of the file."""
        self.size = sum(view.nbytes for view in views)

    def __getitem__(self, part: slice) -> ScatteredMemory:
        """Return a part of it, which is the same memory."""
        start, stop, _ = part.indices(self.size)
        found: list[memoryview] = []
        at = 0
        for view in self.views:
            if piece := view[max(0, start - at) : max(0, stop - at)]:
                found.append(piece)
            at += view.nbytes
        return ScatteredMemory(found)

    def fill(self, data: bytes | Bytes) -> None:
        """Copy `data`, of as many bytes, into the places."""
        source, at = np.frombuffer(data, np.uint8).data, 0
        for view in self.views:
            view[:] = source[at : at + view.nbytes]
            at += view.nbytes

    def copy_into(self, out: Bytes) -> None:
        """Copy the places' bytes into `out`, of as many bytes."""
        target, at = out.data, 0
        for view in self.views:
            target[at : at + view.nbytes] = view
            at += view.nbytes
