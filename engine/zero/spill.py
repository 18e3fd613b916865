"""Gradients that wait for the update on disk if they do not fit into the host budget.

One thread writes them during the backward, with a bound on pending bytes. To accumulate, it reads a gradient, adds to it
and writes it again; it sums the squares while the rows are in memory. An array has the planned dtype; if a step turns out to
accumulate in a wider one, a wider array permanently replaces it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import closing, contextmanager

import torch

from zstore.io import Ticket, Workers
from zstore.io.memory import as_torch, dtype_name
from zstore.store import Store

from ..params.record import ParameterRecord
from ..params.sharding import is_narrower
from ..plan.plan import spill_pool_bytes
from ..runtime.device import Transfers, one_thread
from .norm import SumOfSquares, sums_of_squares

_MAX_PENDING_BYTES = 64 * 1024 * 1024


class GradientSpill:
    """Rows of gradients on disk, used from one thread; `arrays` has each record's array, which a wider one may replace."""

    def __init__(self, store: Store, arrays: MutableMapping[ParameterRecord, str], transfers: Transfers) -> None:
        self._store = store
        self._transfers = transfers
        self._arrays = arrays
        self._pool = store.make_pool(spill_pool_bytes(store.options.host_budget_bytes or 0))
        self._workers = Workers(1, "zstore-gradients")
        self._pending: deque[tuple[Ticket[None], int]] = deque()
        self._present: set[ParameterRecord] = set()
        """Records with a gradient in this step."""
        self._squares: dict[ParameterRecord, float | SumOfSquares] = {}
        """The sum of squares of each written gradient."""
        self.error: Exception | None = None
        """The error that kept a gradient of this step from being written, if raised within `keeping_error`."""

    def __contains__(self, record: ParameterRecord) -> bool:
        return record in self._arrays

    def add(
        self, record: ParameterRecord, rows: torch.Tensor, total: torch.dtype, squares: SumOfSquares | None = None
    ) -> None:
        """Add `rows`, 1-D, to this step's rows, rounded to `total`; takes ownership of them.

        `squares` is their sum of squares, if it has been started. May raise the error of an earlier write.
        """
        adds = record in self._present
        dtype = total if adds or is_narrower(total, rows.dtype) else rows.dtype
        on_host = self._transfers.streams.is_host(rows)
        previous_rows = self._widen(record, dtype, on_host=on_host)
        self._present.add(record)
        nbytes = rows.nbytes
        while self._pending and sum(size for _, size in self._pending) + nbytes > _MAX_PENDING_BYTES:
            self._pending.popleft()[0].wait()
        context = self._transfers.streams.stream_context()

        def write() -> None:
            with context(), one_thread():
                stored = self._read(record, on_host=on_host) if adds and previous_rows is None else previous_rows
                values = rows.to(dtype) if stored is None else stored.to(dtype).add_(rows)
                self._write(self._arrays[record], values)
                self._squares[record] = (None if adds else squares) or sums_of_squares([values])[0]

        self._pending.append((self._workers.submit(write), nbytes))

    def _widen(self, record: ParameterRecord, dtype: torch.dtype, *, on_host: bool) -> torch.Tensor | None:
        """Replace the array of a parameter if it is too narrow for `dtype`; return this step's rows in it, if any."""
        narrower = self._store.spec(self._arrays[record])
        if not is_narrower(getattr(torch, narrower.dtype), dtype):
            return None
        self.drain()
        rows = self._read(record, on_host=on_host) if record in self._present else None
        wider = record.spec(f"gradient_{dtype_name(dtype)}", dtype)
        self._store.create(wider, grid=record.state_grid, shard=record.state_shard, tier="disk")
        self._arrays[record] = wider.name
        self._store.remove(narrower.name)
        return rows

    def _write(self, name: str, rows: torch.Tensor) -> None:
        with closing(self._store.tiles([[name]], "fill", pool=self._pool)) as tiles:
            for tile in tiles:
                self._transfers.copy_into(as_torch(tile.views[0]), rows[tile.first : tile.stop])

    def _read(self, record: ParameterRecord, *, on_host: bool) -> torch.Tensor:
        """Return the stored rows of a gradient: in host memory or on the parameter's device."""
        name = self._arrays[record]
        dtype: torch.dtype = getattr(torch, self._store.spec(name).dtype)
        if on_host:
            rows = self._transfers.empty_host(record.owned_numel, dtype)
        else:
            rows = torch.empty(record.owned_numel, dtype=dtype, device=record.full.device)
        with closing(self._store.tiles([[name]], "read", pool=self._pool)) as tiles:
            for tile in tiles:
                self._transfers.copy_into(rows[tile.first : tile.stop], as_torch(tile.views[0]))
        return rows

    def drain(self) -> None:
        """Wait until everything is on disk; raise the error of a write."""
        while self._pending:
            self._pending.popleft()[0].wait()

    @contextmanager
    def keeping_error(self) -> Iterator[None]:
        """Store an error of the block in `error`: in a backward only this rank has it, and the others continue."""
        try:
            yield
        except Exception as error:
            error.add_note("This happened while a gradient was being spilled to disk to wait for the update.")
            self.error = self.error or error

    def finish(self) -> Exception | None:
        """Wait until everything is on disk; return the error that kept a gradient of this step from being written."""
        with self.keeping_error():
            self.drain()
        return self.error

    def squares(self, record: ParameterRecord) -> float | None:
        """Return the sum of squares of a gradient of this step, if it has one."""
        squares = self._squares.get(record)
        return squares.value() if isinstance(squares, SumOfSquares) else squares

    def owned(self, record: ParameterRecord) -> torch.Tensor | None:
        """Return a copy of this step's rows, 1-D; None if there are none."""
        if record not in self._present:
            return None
        self.drain()
        return self._read(record, on_host=False)

    def drop(self) -> None:
        """Forget this step's gradients, and errors of their writes."""
        while self._pending:
            self._pending.popleft()[0].error()
        self.error = None
        self._present.clear()
        self._squares.clear()

    def close(self) -> None:
        """Stop the thread."""
        self._workers.close()
