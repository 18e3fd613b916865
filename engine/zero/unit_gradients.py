"""Gradients taken as they come, unit by unit, of which each rank holds its own rows alone.

[Note: gradients by unit]
At stages 2 and 3 a unit's gradients are reduced as soon as the last of them has come, in one order of units that is
the same on every rank, on a process group of their own, asynchronously: a rank whose unit is late holds up no other
collective. A unit waits for the parameters that had a gradient on any rank in the backward before. What comes
unexpectedly or late is agreed on and reduced at the end of the backward. The order is the reverse of the modules' at
first, then the one that rank 0 saw in the first backward. Each reduced row is added to the row held so far, in the
type of [Note: types of gradients]. Alone, a gradient is its own rows, and there is nothing to wait for.

A gradient is complete when it came as often as in the backward before: recomputation of a shared module may bring it in
several parts. In the last backward of a step it is final then, which an update within the backward waits for. Before
any backward nothing is known, and gradients are final at the end.

Rows of gradients that the host budget cannot hold go to disk when they are complete, and come back to be added to; their
sum of squares is taken on the way.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch.utils.hooks import RemovableHandle

from zstore.errors import UsageError
from zstore.ranks.world import Kind, World

from ..device.copies import Transfers
from ..params.gradient_types import is_narrower
from ..params.record import ParameterRecord
from ..params.units import Unit
from .collectives import Reduction, bucket_limit, pack, plan_buckets
from .d2h import Landing
from .gradients import ReduceRules, agree_any, forget_gradients, take_gradient, watch_gradient
from .norm import sum_of_squares
from .spill import GradientSpill

Told = Callable[[ParameterRecord], None]


def _nothing(record: ParameterRecord) -> None:
    """Take no note of a gradient."""


@dataclass(frozen=True, kw_only=True)
class GradientRules:
    """How gradients are taken and where their rows wait for the update."""

    reduce: ReduceRules
    """`scatter` and `overlap` may be chosen where nothing else is gathered in a backward (stage 2): elsewhere a rank that
    waits for a reduction might hold up the gather that another one waits for."""
    to_host: frozenset[ParameterRecord] = frozenset()
    """Parameters whose rows wait in host memory, wherever the device is."""
    spill: GradientSpill | None = None
    """Keeps rows on disk."""
    keeps_rows: bool = True
    """Keep the rows' memory from step to step; else it is free as soon as an update took it."""
    squares_at_once: bool = False
    """Take sums of squares as gradients become final: an update may take them before the norm is asked for."""


class UnitGradients:
    """See [Note: gradients by unit]."""

    def __init__(
        self,
        units: Sequence[Unit],
        others: Sequence[torch.nn.Parameter],
        world: World,
        rules: GradientRules,
        transfers: Transfers,
        arrived: Told | None = None,
    ) -> None:
        self._order = [unit for unit in reversed(units) if any(record.group is not None for record in unit.owned)]
        self._records = [record for unit in units for record in unit.owned if record.group is not None]
        self._unit_of = {record: unit for unit in self._order for record in unit.owned}
        self._others = others
        self._world = world
        self._reduce_world = world.second()
        self._rules = rules
        self._transfers = transfers
        self._landing = Landing(transfers, self._count_segment)
        self._tell = arrived or _nothing
        self.on_final: Told = _nothing
        """Told each record whose gradient is complete in the last backward of a step."""
        self.comes_in_parts = True
        """Whether a gradient may come in several parts in the first backward, before it is known how often each comes."""
        self._expected: Counter[ParameterRecord] = Counter(dict.fromkeys(self._records, 1))
        """How often each gradient came in the backward before, on any rank at least once."""
        self._rows: dict[ParameterRecord, torch.Tensor] = {}
        self._filled: set[ParameterRecord] = set()
        """Records whose rows have values of this step."""
        self._agreed: set[ParameterRecord] = set()
        self._squares: dict[ParameterRecord, float] = {}
        self._final: set[ParameterRecord] = set()
        self._lost: Exception | None = None
        """Why a gradient that belongs on disk is not there."""
        self._order_is_agreed = False
        self._fired: Counter[ParameterRecord] = Counter()
        self._due: dict[Unit, set[ParameterRecord]] = {}
        self._next = 0
        self._in_backward = False
        self._last = False
        self._backwards = 0
        """Of this step, the one under way included."""
        self._several = False
        """Whether this step has more than one backward, as far as is known."""
        self.overlapped = 0
        self._closing = False
        """The backward is over, and what is left of it is being agreed on."""
        self._under_way: deque[tuple[Reduction, set[ParameterRecord]]] = deque()
        self._segments_left: Counter[ParameterRecord] = Counter()
        self._handles: list[RemovableHandle] = []
        for record in self._records:
            self._handles.append(watch_gradient(record, self._arrived))

    def forget_listener(self) -> None:
        """Tell nobody of final gradients any more."""
        self.on_final = _nothing

    @property
    def expected(self) -> list[ParameterRecord]:
        """The records that had a gradient in the backward before, in the order in which they are expected."""
        return [record for unit in self._order for record in unit.owned if self._expected[record]]

    @cached_property
    def largest_unit_bytes(self) -> int:
        """Bytes of this rank's rows of the gradients of one unit, at most."""
        planned = self._rules.reduce.types.planned
        records = [[record for record in unit.owned if record.group is not None] for unit in self._order]
        return max((sum(r.owned_numel * planned(r.dtype).itemsize for r in unit) for unit in records), default=0)

    def waiting_bytes(self, record: ParameterRecord) -> int:
        """Return the bytes of a gradient that waits in memory for the update; 0 where it does not."""
        rows = self._rows.get(record)
        return 0 if rows is None else rows.nbytes

    @property
    def has_sent(self) -> bool:
        """Whether another rank may have got gradients of this backward."""
        return self._world.world_size > 1 and self._next > 0

    def start_backward(self, *, last: bool) -> None:
        """See Gradients."""
        self._backwards += 1
        self._several = self._several or not last or self._backwards > 1
        self._fired.clear()
        self._next = 0
        self._in_backward = True
        self._last = last
        self._closing = False
        self._due = {unit: {r for r in unit.owned if self._expected[r]} for unit in self._order}

    def _arrived(self, record: ParameterRecord) -> None:
        if not self._in_backward:
            raise UsageError(
                "a backward that the engine does not know of: call engine.backward(loss), not loss.backward()"
            )
        self._fired[record] += 1
        if self._fired[record] >= self._expected[record]:
            self._due[self._unit_of[record]].discard(record)
            if self._world.world_size == 1:
                self._send([record])
        if self._world.world_size > 1:
            while self._next < len(self._order) and not self._due[self._order[self._next]]:
                self._send_unit()
        self._tell(record)

    def _send_unit(self) -> None:
        unit = self._order[self._next]
        self._next += 1
        self._send([record for record in unit.owned if self._expected[record]])

    # -- reduction --------------------------------------------------------------------------------------------------

    def _send(self, records: Sequence[ParameterRecord]) -> None:
        """Start the reduction of these gradients and take them off their parameters."""
        gradients = {record: take_gradient(record) for record in records}
        if self._world.world_size == 1:
            for record, gradient in gradients.items():
                if gradient is not None:
                    self._add(record, gradient.view(-1))
            return
        # What is on disk is added when the rows are complete.
        fresh = {record for record in records if record not in self._filled or self._is_spilled(record)}
        self._filled |= fresh
        for record in records:
            if record not in fresh:
                self._widen(record)

        def flat(record: ParameterRecord) -> torch.Tensor | None:
            gradient = gradients[record]
            return None if gradient is None else gradient.view(-1)

        kind: Kind = "reduce_scatter" if self._rules.reduce.scatter else "all_reduce"
        limit = bucket_limit(self._world, self._rules.reduce.bucket_numel)
        for bucket in plan_buckets(records, self._world.world_size, limit, self._rules.reduce.reduced):
            matrix = pack(bucket, self._world.world_size, flat)
            self._under_way.append((Reduction(self._reduce_world, bucket, matrix, kind), fresh))
            self._segments_left.update(segment.record for segment in bucket.segments)
            if self._rules.reduce.overlap and self._rules.reduce.scatter:
                self.overlapped += 1
            else:
                self._add_up()
        gradients.clear()
        while self._under_way and self._under_way[0][0].done():
            self._add_up()

    def _add_up(self) -> None:
        """Wait for the oldest reduction; its rows are the first of the step, or are added to those held."""
        reduction, fresh = self._under_way.popleft()
        row = reduction.finish()
        if not self._rules.reduce.scatter:
            everyone = row.new_empty(self._world.world_size * row.numel())
            self._reduce_world.all_gather(everyone, row, kind="all_reduce")
        for segment in reduction.bucket.segments:
            record = segment.record
            held = self._rows.get(record)
            if held is None or is_narrower(held.dtype, self._room(record, row.dtype)):
                held = self._rows[record] = self._empty(record, row)
            rows = held[segment.first : segment.stop]
            part = row[segment.offset : segment.offset + rows.numel()]
            self._landing.put(record, rows, part, total=None if record in fresh else self._total(record))

    # -- rows: see [Note: types of gradients] -------------------------------------------------------------------------

    def _total(self, record: ParameterRecord) -> torch.dtype:
        """Return the type of the sum of what came before and what comes now."""
        return self._rules.reduce.types.held(record.dtype, several=self._backwards > 1)

    def _room(self, record: ParameterRecord, arriving: torch.dtype) -> torch.dtype:
        """Return the type of rows for a gradient that arrives in one."""
        if self._is_spilled(record):
            return arriving
        return self._rules.reduce.types.held(record.dtype, several=self._several)

    def _empty(self, record: ParameterRecord, like: torch.Tensor) -> torch.Tensor:
        """Return memory for the rows, where they wait for the update."""
        dtype = self._room(record, like.dtype)
        if record in self._rules.to_host:
            return self._transfers.lane.empty_host(record.owned_numel, dtype)
        return torch.empty(record.owned_numel, dtype=dtype, device=record.full.device)

    def _widen(self, record: ParameterRecord) -> None:
        """Make room in the rows of earlier backwards for sums in the type of this one."""
        held = self._rows.get(record)
        if held is not None and is_narrower(held.dtype, self._total(record)):
            self._rows[record] = self._empty(record, held).copy_(held)

    def _count_segment(self, record: ParameterRecord) -> None:
        """Note that a segment of a gradient is in its rows."""
        self._segments_left[record] -= 1
        if not self._segments_left[record]:
            self._complete(record)

    def _add(self, record: ParameterRecord, gradient: torch.Tensor) -> None:
        """Add a gradient to the rows, where one rank has all of them."""
        add = record in self._filled and record in self._rows
        self._filled.add(record)
        self._segments_left[record] += 1
        if not add and (record not in self._rules.to_host or self._transfers.lane.device_is_host):
            self._rows[record] = gradient.to(self._room(record, gradient.dtype))
            self._count_segment(record)
            return
        if add:
            self._widen(record)
        else:
            self._rows[record] = self._empty(record, gradient)
        self._landing.put(record, self._rows[record], gradient, total=self._total(record) if add else None)

    # -- complete rows ----------------------------------------------------------------------------------------------

    def _is_spilled(self, record: ParameterRecord) -> bool:
        return self._rules.spill is not None and record in self._rules.spill

    def _complete(self, record: ParameterRecord) -> None:
        """The rows of this backward are complete: take them to disk where they belong there."""
        if self._rules.spill is not None and record in self._rules.spill:
            self._on_disk(partial(self._rules.spill.add, record, self._rows.pop(record), self._total(record)))
            self._squares.pop(record, None)
        if record in self._final and self.on_final is not _nothing:
            raise UsageError(
                f"parameter {record.name!r} got a part of its gradient after its update in this backward had begun: its "
                'module is used more often than in the step before; set "step_overlap" to "forward" or "none"'
            )
        if not self._last or self._closing or (self.comes_in_parts and not self._order_is_agreed):
            return  # what the end of a backward sends may turn out to be no rank's; a first part is not known as one
        if self._rules.squares_at_once and record in self._rows:
            self._squares[record] = sum_of_squares(self._rows[record])
        self._finish(record)

    def _finish(self, record: ParameterRecord) -> None:
        """Tell that the gradient is final, and there to be used."""
        self._final.add(record)
        if self.on_final is _nothing:
            return
        if self._rules.spill is not None and record in self._rules.spill:
            self._on_disk(self._rules.spill.settle)
        if self._lost is None:
            self.on_final(record)

    def _on_disk(self, call: Callable[[], None]) -> None:
        """Do something with gradients on disk. Its error waits for `reduce`: this rank alone has it, and the others are in
        the same backward."""
        try:
            call()
        except Exception as error:
            error.add_note("This happened to a gradient that waits on disk for the update.")
            self._lost = self._lost or error

    def end_backward(self) -> None:
        """See Gradients."""
        self._landing.settle()
        self._closing = True
        if self._world.world_size > 1:
            while self._next < len(self._order):
                self._send_unit()
        left = [record.parameter.grad is not None for record in self._records]
        came = agree_any(self._world, [self._fired[record] > 0 for record in self._records] + left)
        fired, late = came[: len(left)], came[len(left) :]
        self._send([record for record, any_ in zip(self._records, late, strict=True) if any_])
        while self._under_way:
            self._add_up()
        self._landing.settle()
        self._expected = Counter(
            {r: max(self._fired[r], 1) for r, any_ in zip(self._records, fired, strict=True) if any_}
        )
        self._agreed.update(self._expected)
        if not self._order_is_agreed:
            self._agree_on_order()
        forget_gradients(self._others)
        self._in_backward = False
        if self._last:
            for record in [record for record in self._records if record in self._agreed - self._final]:
                self._complete_earlier(record)

    def _complete_earlier(self, record: ParameterRecord) -> None:
        """The last backward brought nothing to the rows of those before."""
        if self._rules.squares_at_once and record in self._rows:
            self._squares[record] = sum_of_squares(self._rows[record])
        self._finish(record)

    def _agree_on_order(self) -> None:
        """Take the order in which rank 0's units were complete in this backward."""
        complete: dict[str, None] = {}
        for record in reversed(self._fired):
            complete.setdefault(self._unit_of[record].name)
        names: list[str] = self._world.broadcast_object(list(reversed(complete)))
        by_name = {unit.name: unit for unit in self._order}
        seen = [by_name[name] for name in names]
        self._order = [*seen, *(unit for unit in self._order if unit.name not in set(names))]
        self._order_is_agreed = True

    # -- for the update ---------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """See Gradients."""
        if self._rules.spill is None:
            return
        self._on_disk(self._rules.spill.settle)
        self._world.raise_together(self._lost)

    def has(self, record: ParameterRecord) -> bool:
        """See Gradients."""
        return record in self._agreed

    def owned(self, record: ParameterRecord) -> torch.Tensor | None:
        """See Gradients."""
        if record not in self._agreed:
            return None
        if self._rules.spill is not None and record in self._rules.spill:
            return self._rules.spill.owned(record)
        return self._rows.get(record)

    def take(self, record: ParameterRecord) -> torch.Tensor | None:
        """See Gradients."""
        if self._is_spilled(record):
            return None  # the update reads it from disk itself
        kept = self._rules.keeps_rows and self._world.world_size > 1
        # Not `owned`: an update within the backward takes what is not agreed on before its end.
        rows = self._rows.get(record) if kept else self._rows.pop(record, None)
        return rows if record in self._filled else None

    def squares(self, record: ParameterRecord) -> float | None:
        """See Gradients."""
        if self._rules.spill is not None and record in self._rules.spill:
            return self._rules.spill.squares(record)
        return self._squares.get(record)

    def drop(self) -> None:
        """See Gradients."""
        self._in_backward = False
        self._backwards, self._several = 0, False
        self._landing.drop()
        self._under_way.clear()
        self._segments_left.clear()
        self._filled.clear()
        self._agreed.clear()
        self._squares.clear()
        self._final.clear()
        self._lost = None
        if not self._rules.keeps_rows or self._world.world_size == 1:
            self._rows.clear()
        if self._rules.spill is not None:
            self._rules.spill.drop()
        forget_gradients([record.parameter for record in self._records])

    def held_bytes(self) -> int:
        """See Gradients."""
        # A copy: an update within the backward takes rows meanwhile.
        return sum(rows.nbytes for rows in list(self._rows.values()))

    def close(self) -> None:
        """See Gradients."""
        for handle in self._handles:
            handle.remove()
        self.drop()
        self._reduce_world.release()
        if self._rules.spill is not None:
            self._rules.spill.close()
