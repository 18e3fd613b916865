"""Gradients that wait for the update on disk, in 16 bits, where the host budget cannot hold them.

One thread writes them behind the backward; how much may be on its way is bounded. A gradient that more comes to is read
back, added to and written again. The sum of squares is taken while the rows are at hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import torch

from zstore.io import Ticket
from zstore.store import TensorStore

from .lanes import Within
from .norm import sum_of_squares
from .parameters import ParameterRecord
from .tensors import as_torch
from .transfers import Transfers

_POOL_BYTES = 16 * 1024 * 1024
_MOST_UNDER_WAY_BYTES = 64 * 1024 * 1024


def spill_pool_bytes(budget_bytes: int) -> int:
    """Return the bytes of the buffers through which gradients pass, where a host budget may send them to disk."""
    return min(_POOL_BYTES, budget_bytes // 16)


class GradientSpill:
    """Rows of the records in `arrays`, each in its array of the store. Used from one thread."""

    def __init__(
        self,
        store: TensorStore,
        arrays: Mapping[ParameterRecord, str],
        transfers: Transfers,
        pool_bytes: int = _POOL_BYTES,
    ) -> None:
        self._store = store
        self._transfers = transfers
        self._arrays = arrays
        self._pool = store.make_pool(pool_bytes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zstore-gradients")
        self._under_way: deque[tuple[Ticket[None], int]] = deque()
        self._squares: dict[ParameterRecord, float] = {}
        """Of the gradients that are there in this step."""

    def __contains__(self, record: ParameterRecord) -> bool:
        return record in self._arrays

    def add(self, record: ParameterRecord, rows: torch.Tensor) -> None:
        """Keep `rows`, 1-D, added to what is kept of this step; they belong to this from now on.

        Raises the error of an earlier write.
        """
        if record in self._squares:
            self.settle()
            lane = self._transfers.lane
            empty = lane.empty_host(rows.numel(), rows.dtype) if lane.is_host(rows) else torch.empty_like(rows)
            rows = self._read(record, empty).add_(rows)
        self._squares[record] = sum_of_squares(rows)
        nbytes = rows.nbytes
        while self._under_way and sum(size for _, size in self._under_way) + nbytes > _MOST_UNDER_WAY_BYTES:
            self._under_way.popleft()[0].wait()
        within = self._transfers.within()
        self._under_way.append((Ticket(self._thread.submit(self._write, self._arrays[record], rows, within)), nbytes))

    def _write(self, name: str, rows: torch.Tensor, within: Within) -> None:
        with within(), closing(self._store.stream([[name]], "fill", pool=self._pool)) as tiles:
            for tile in tiles:
                self._transfers.copy_into(as_torch(tile.views[0]), rows[tile.first : tile.stop])

    def _read(self, record: ParameterRecord, rows: torch.Tensor) -> torch.Tensor:
        """Fill `rows` with what is kept, and return it."""
        with closing(self._store.stream([[self._arrays[record]]], "read", pool=self._pool)) as tiles:
            for tile in tiles:
                self._transfers.copy_into(rows[tile.first : tile.stop], as_torch(tile.views[0]))
        return rows

    def settle(self) -> None:
        """Return when everything is on disk; raise the error of a write."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def squares(self, record: ParameterRecord) -> float | None:
        """Return the sum of squares of a gradient of this step, None where there is none."""
        return self._squares.get(record)

    def owned(self, record: ParameterRecord) -> torch.Tensor | None:
        """Return a copy of the rows of this step, 1-D; None where there are none."""
        if record not in self._squares:
            return None
        self.settle()
        return self._read(record, torch.empty(record.owned_numel, dtype=record.dtype, device=record.full.device))

    def drop(self) -> None:
        """Forget this step's gradients; errors of their writes with them."""
        while self._under_way:
            self._under_way.popleft()[0].error()
        self._squares.clear()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
