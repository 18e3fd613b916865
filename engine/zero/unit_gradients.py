"""Gradients taken as they arrive, unit by unit, of which each rank holds its own rows alone.

[Note: gradients by unit]
At stages 2 and 3 a unit's gradients are reduced as soon as the last of them has come, in one order of units that is
the same on every rank, on a process group of their own, asynchronously: a rank whose unit is late holds up no other
collective. A unit waits for the parameters that had a gradient on any rank in the backward before. Unexpected or late
gradients are agreed on and reduced at the end of the backward. The order is the reverse of the modules' at
first, then the one that rank 0 saw in the first backward. Each reduced row is added to the row held so far, in the
type of [Note: types of gradients]. Without other ranks, a gradient is its own rows, and there is nothing to wait for.

A gradient is complete when it came as often as in the backward before: recomputation of a shared module may bring it in
several parts. In the last backward of a step it is final then, which an update in the backward waits for. Before
any backward nothing is known, and gradients are final at the end.

[Note: the life of a gradient]
In each step a gradient goes through these states in this order. Its rows are the sum over the backwards so far.

| state | begins | rows |
|---|---|---|
| EMPTY | with the step | none, or memory of the step before |
| HELD | when its first values are sent | whole while no segment is under way; later backwards add to them |
| FINAL | when it is complete in the step's last backward, or that ends | those of the step: an update may take them |

Whether any rank had it (`is_agreed`) is no part of this order: that is known when a backward ends, before or after the
gradient is final. Rows that the host budget cannot hold go to disk each time they are whole, and are added up there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial

import torch

from zstore.errors import UsageError
from zstore.ranks.world import World

from ..params.record import ParameterRecord
from ..params.sharding import add_in, is_narrower
from ..params.units import Unit
from ..runtime.device import D2HQueue, Transfers, labelled
from .collectives import Segment
from .exchanges import GradientRules, Reductions
from .gradients import INCOMPLETE, Gradients, agree_any, forget_gradients, take_gradient, watch_gradient
from .norm import SumOfSquares
from .spill import GradientSpill


class GradientState(Enum):
    """How far a gradient came in its step. See [Note: the life of a gradient]."""

    EMPTY = "empty"
    """No value of this step was sent yet."""
    HELD = "held"
    """Values of this step are in the rows, or on their way there."""
    FINAL = "final"
    """Nothing is to be added in this step."""


class BackwardPhase(Enum):
    """Parts of a backward."""

    OVER = "over"
    """None is under way: a gradient that comes now is of one that the engine does not know of."""
    RUNNING = "running"
    """Autograd brings gradients."""
    CLOSING = "closing"
    """Autograd is done, and the ranks agree on which gradients there are: until then no further one is final."""


class ArrivingGradient:
    """The gradient of one parameter, and this rank's rows of it. See [Note: the life of a gradient]."""

    def __init__(
        self, record: ParameterRecord, rules: GradientRules, transfers: Transfers, spill: GradientSpill | None
    ) -> None:
        self.record = record
        self.state = GradientState.EMPTY
        self.is_agreed = False
        """Whether any rank had it in a backward of this step that is over."""
        self.came = 0
        """How often it, or a part of it, came in this backward."""
        self.expected = 1
        """How often it came in the backward before; at least once if it came on any rank."""
        self.segments_left = 0
        """Segments that were sent and are not in the rows yet."""
        self.rows: torch.Tensor | None = None
        """1-D; None: they have no memory yet, are on disk, or an update took them."""
        self._squares: SumOfSquares | None = None
        """That of the rows, once it was begun."""
        self._spill = spill if spill is not None and record in spill else None
        """Has the rows on disk; None: they wait in memory."""
        self._rules = rules
        self._transfers = transfers

    def note_sent(self) -> bool:
        """Note that values of a backward are on their way; return whether they are to be added to the rows in memory."""
        adds = self.state is not GradientState.EMPTY if self._spill is None else self.segments_left > 0
        if self.state is GradientState.EMPTY:
            self.state = GradientState.HELD
        return adds

    def type_of_rows(self, arriving: torch.dtype, of_step: torch.dtype) -> torch.dtype:
        """Return the type of the rows in memory for values of one that arrive, whose sum over the step has another."""
        return of_step if self._spill is None else arriving

    def make_room(self, part: torch.Tensor, of_step: torch.dtype, *, add: bool) -> torch.Tensor:
        """Return the rows, on the tier on which they wait for the update, with room for values like `part` or, to `add` them,
        for sums with their own."""
        held, dtype = self.rows, self.type_of_rows(part.dtype, of_step)
        if add:
            self._squares = None
        if held is not None and not is_narrower(held.dtype, dtype):
            return held
        if self.record in self._rules.to_host:
            # Of those that are used as they arrive few are there at a time, in memory that they share.
            what = "" if self._rules.squares_at_once else self.record.name
            rows = self._transfers.empty_host(self.record.owned_numel, dtype, what)
        else:
            rows = torch.empty(self.record.owned_numel, dtype=dtype, device=self.record.full.device)
        self.rows = rows if held is None or not add else rows.copy_(held)
        return rows

    def begin_squares(self, rows: torch.Tensor) -> None:
        """Begin to take the sum of squares of this rank's `rows`, or of what they become."""
        one_by_one = self._rules.squares_at_once
        self._squares = SumOfSquares(rows, self._transfers, one_by_one=one_by_one)

    def note_whole(self, total: torch.dtype) -> None:
        """Note that all that was sent is in the rows, a sum of the type `total`: take them to disk if they belong there."""
        if self._spill is not None and self.rows is not None:
            rows, squares, self.rows, self._squares = self.rows, self._squares, None, None
            with self._spill.keeping_error():
                self._spill.add(self.record, rows, total, squares)

    def finish(self, *, for_update: bool) -> None:
        """Note that the gradient is final; with `for_update` one uses it at once."""
        self.state = GradientState.FINAL
        if self._rules.squares_at_once and self.rows is not None and self._squares is None:
            self.begin_squares(self.rows)
        if for_update and self._spill is not None:
            self._spill.finish()

    def owned(self) -> torch.Tensor | None:
        """Return the rows, or a copy of those on disk."""
        return self.rows if self._spill is None else self._spill.owned(self.record)

    def take(self) -> torch.Tensor | None:
        """Return the rows for an update; None if it reads them from disk itself."""
        rows = self.rows
        if not self._rules.keeps_rows:
            self.rows = None
        return rows

    def replace(self, values: torch.Tensor, of_step: torch.dtype) -> None:
        """Use other `values` of the rows in place of those of this step."""
        if self._spill is not None:
            raise UsageError(
                f"the gradient of parameter {self.record.name!r} waits on disk and cannot be set: keep offload_optimizer in "
                'host memory ("device": "cpu"), or change the loss'
            )
        rows = self.make_room(values, of_step, add=False).copy_(values)
        if self._squares is not None:
            self.begin_squares(rows)

    def squares(self, others: Iterable[ArrivingGradient]) -> float | None:
        """Return the sum of squares of the rows, None if it was not begun. The host waits for it once for all `others`."""
        if self._spill is not None:
            return self._spill.squares(self.record)
        if self._squares is None:
            return None
        return self._squares.value(other._squares for other in others if other._squares is not None)

    def drop(self) -> None:
        """Forget the values of this step."""
        self.state, self.is_agreed, self.segments_left, self._squares = GradientState.EMPTY, False, 0, None
        if not self._rules.keeps_rows:
            self.rows = None


@dataclass(eq=False)
class ArrivingUnit:
    """Gradients that are reduced together."""

    name: str
    gradients: list[ArrivingGradient]
    num_due: int = 0
    """How many of the expected ones have not come as often as expected."""


class Arrivals:
    """Which gradients came in a backward, in which order the units are reduced, and which of them may be by now."""

    def __init__(self, units: Sequence[Unit], gradients: Mapping[ParameterRecord, ArrivingGradient]) -> None:
        found = [(unit.name, [gradients[one] for one in unit.owned if one in gradients]) for unit in reversed(units)]
        self.units = [ArrivingUnit(name, some) for name, some in found if some]
        """In the order in which they are reduced."""
        self._unit_of = {gradient: unit for unit in self.units for gradient in unit.gradients}
        self.order_is_agreed = False
        self.sent = 0
        """Units that were handed out."""
        self._came: list[ArrivingGradient] = []
        """Those of this backward, in their order, until that of the units is agreed on."""

    def start(self) -> None:
        """Prepare for a backward."""
        self.sent = 0
        self._came.clear()
        for unit in self.units:
            unit.num_due = sum(gradient.expected > 0 for gradient in unit.gradients)
            for gradient in unit.gradients:
                gradient.came = 0

    def note(self, gradient: ArrivingGradient) -> bool:
        """Note that a gradient, or a part of it, came; return whether it came as often as expected."""
        gradient.came += 1
        if gradient.came == gradient.expected:
            self._unit_of[gradient].num_due -= 1
        if gradient.came == 1 and not self.order_is_agreed:
            self._came.append(gradient)
        return gradient.came >= gradient.expected

    def ready(self, *, rest: bool = False) -> Iterator[list[ParameterRecord]]:
        """Hand out the expected gradients of each unit that has them all, up to the first that has not; or of the `rest`."""
        while self.sent < len(self.units) and (rest or not self.units[self.sent].num_due):
            self.sent += 1
            yield [gradient.record for gradient in self.units[self.sent - 1].gradients if gradient.expected]

    def agree_on_order(self, world: World) -> None:
        """Take the order in which rank 0's units were complete in this backward (all ranks)."""
        complete = dict.fromkeys(self._unit_of[gradient].name for gradient in reversed(self._came))
        names: list[str] = world.broadcast_object(list(reversed(complete)))
        by_name = {unit.name: unit for unit in self.units}
        self.units = [by_name[name] for name in dict.fromkeys((*names, *by_name))]
        self.order_is_agreed = True


class UnitGradients(Gradients):
    """Averages gradients by unit: see the note above. `spill` keeps rows on disk; `arrived` is told each one that was taken."""

    def __init__(
        self,
        units: Sequence[Unit],
        others: Sequence[torch.nn.Parameter],
        world: World,
        rules: GradientRules,
        transfers: Transfers,
        *,
        spill: GradientSpill | None = None,
        arrived: Callable[[ParameterRecord], None] | None = None,
    ) -> None:
        records = [record for unit in units for record in unit.owned if record.group is not None]
        super().__init__(records, others, world, rules)
        self._of = {record: ArrivingGradient(record, rules, transfers, spill) for record in records}
        self.arrivals = Arrivals(units, self._of)
        self._reductions = Reductions(world, rules) if world.world_size > 1 else None
        self._transfers = transfers
        self._d2h = D2HQueue(transfers)
        self._spill = spill
        self._tell = arrived
        self._reducer = rules.exchanges.reducer
        self.on_final: Callable[[ParameterRecord], None] | None = None
        """Called with each record whose gradient is complete in the last backward of a step."""
        self.comes_in_parts = True
        """Whether a gradient may come in several parts in the first backward, before it is known how often each comes."""
        self._phase = BackwardPhase.OVER
        self._watches = [watch_gradient(record, self._arrived) for record in records]

    # -- for the update in the backward -----------------------------------------------------------------------------

    @property
    def expected(self) -> list[ParameterRecord]:
        """The records that had a gradient in the backward before, in the order in which they are expected."""
        return [gradient.record for unit in self.arrivals.units for gradient in unit.gradients if gradient.expected]

    @cached_property
    def largest_unit_bytes(self) -> int:
        """Bytes of this rank's rows of the gradients of one unit, at most."""
        nbytes = {r: r.owned_numel * self._rules.types.planned(r.dtype).itemsize for r in self._records}
        return max((sum(nbytes[one.record] for one in unit.gradients) for unit in self.arrivals.units), default=0)

    def waiting_bytes(self, record: ParameterRecord) -> int:
        """Return the bytes of a gradient that waits in memory for the update; 0 if it does not."""
        rows = self._of[record].rows
        return 0 if rows is None else rows.nbytes

    @property
    def has_sent(self) -> bool:
        """Whether another rank may have got gradients of this backward."""
        return self._world.world_size > 1 and self.arrivals.sent > 0

    # -- backward ---------------------------------------------------------------------------------------------------

    def start_backward(self, *, last: bool) -> None:
        super().start_backward(last=last)
        self._phase = BackwardPhase.RUNNING
        self.arrivals.start()

    def _arrived(self, record: ParameterRecord) -> None:
        if self._phase is BackwardPhase.OVER:
            raise UsageError(
                "a backward that the engine does not know of: call the engine and not its module, or engine.backward(loss)"
            )
        is_complete = self.arrivals.note(self._of[record])
        if self._world.world_size > 1:
            for records in self.arrivals.ready():
                self.send(records)
        elif is_complete:
            self.send([record])
        if self._tell is not None:
            self._tell(record)

    def end_backward(self) -> None:
        self._d2h.drain()
        self._phase = BackwardPhase.CLOSING
        if self._world.world_size > 1:
            for records in self.arrivals.ready(rest=True):
                self.send(records)
        gradients = list(self._of.values())
        here = [(one.came > 0, one.record.parameter.grad is not None) for one in gradients]
        flags = agree_any(self._world, [flag for both in here for flag in both])
        self.send([record for record, is_late in zip(self._records, flags[1::2], strict=True) if is_late])
        if self._reductions is not None:
            self._reductions.drain()
        self._d2h.drain()
        for gradient, has_come in zip(gradients, flags[::2], strict=True):
            gradient.expected = max(gradient.came, 1) if has_come else 0
            gradient.is_agreed |= has_come and gradient.state is not GradientState.EMPTY  # a hook may have taken it
        if not self.arrivals.order_is_agreed:
            self.arrivals.agree_on_order(self._world)
        forget_gradients(self._others)
        self._phase = BackwardPhase.OVER
        if self._last:
            # This backward brought nothing to the rows of the others.
            for gradient in gradients:
                if gradient.is_agreed and gradient.state is not GradientState.FINAL:
                    self._finish(gradient)

    def show(self, *, whole: bool) -> None:
        for record in self._records:
            if self.has(record):
                self._show(record)

    # -- rows: see [Note: types of gradients] -------------------------------------------------------------------------

    def send(self, records: Sequence[ParameterRecord]) -> None:
        """Take these gradients off their parameters, and reduce them into the rows if there are other ranks."""
        values = {record: take_gradient(record) for record in records}
        if self._reductions is None:
            for record, gradient in values.items():
                if gradient is not None:
                    self._add(self._of[record], gradient.view(-1))
            return
        adds = {record: self._of[record].note_sent() for record in records}

        def put(segment: Segment, rows: slice, part: torch.Tensor) -> None:
            self._put(self._of[segment.record], rows, part, adds=adds[segment.record])

        with labelled("reduce"):
            for bucket in self._reductions.start(values, put):
                for segment in bucket.segments:
                    self._of[segment.record].segments_left += 1
                self.overlapped += self._rules.overlap and self._rules.scatter

    def _add(self, gradient: ArrivingGradient, values: torch.Tensor) -> None:
        """Add the values of a gradient to the rows, if one rank has all of them."""
        adds = gradient.note_sent()
        gradient.segments_left += 1
        if not adds and (gradient.record not in self._rules.to_host or self._transfers.streams.device_is_host):
            gradient.rows = values.to(gradient.type_of_rows(values.dtype, self._of_step(gradient.record)))
            self._count_segment(gradient)
            return
        if not adds and values.device.type != "cpu" and not self._several:  # there it costs the host nothing
            gradient.begin_squares(values)
        self._put(gradient, slice(None), values, adds=adds)

    def _put(self, gradient: ArrivingGradient, rows: slice, part: torch.Tensor, *, adds: bool) -> None:
        """Copy a segment of a gradient into its rows, or add it to them."""
        held = gradient.make_room(part, self._of_step(gradient.record), add=adds)
        add = partial(add_in, dtype=self._total(gradient.record)) if adds else None
        self._d2h.put(held[rows], part, add=add, arrived=partial(self._count_segment, gradient))

    def _count_segment(self, gradient: ArrivingGradient) -> None:
        """Note that a segment of a gradient is in its rows; it may be the last one."""
        gradient.segments_left -= 1
        if gradient.segments_left:
            return
        record = gradient.record
        gradient.note_whole(self._total(record))
        if gradient.state is GradientState.FINAL and self.on_final is not None:
            raise UsageError(
                f"parameter {record.name!r} got a part of its gradient after its update in this backward had begun: its "
                'module is used more often than in the step before; set "step_overlap" to "forward" or "none"'
            )
        is_known = self.arrivals.order_is_agreed or not self.comes_in_parts  # else a first part is not known as one
        if self._last and is_known and self._phase is BackwardPhase.RUNNING:  # in the end it may be no rank's
            self._finish(gradient)

    def _finish(self, gradient: ArrivingGradient) -> None:
        """Tell that the gradient is final, and there to be used."""
        gradient.finish(for_update=self.on_final is not None)
        if self.on_final is not None and (self._spill is None or self._spill.lost is None):
            self.on_final(gradient.record)

    # -- for the update ---------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        lost = None if self._spill is None else self._spill.finish()
        if self._rules.spills:
            self._world.raise_together(lost)

    def has(self, record: ParameterRecord) -> bool:
        return record in self._of and self._of[record].is_agreed

    def owned(self, record: ParameterRecord) -> torch.Tensor | None:
        return self._of[record].owned() if self.has(record) else None

    def replace(self, record: ParameterRecord, full: torch.Tensor) -> None:
        if not self._last:
            raise UsageError(INCOMPLETE.format(record.name))
        self._of[record].replace(full[slice(*record.owned_range)], self._of_step(record))

    def take(self, record: ParameterRecord) -> torch.Tensor | None:
        return self._of[record].take()

    def squares(self, record: ParameterRecord) -> float | None:
        return self._of[record].squares(self._of.values())

    def drop(self) -> None:
        super().drop()
        self._phase = BackwardPhase.OVER
        self._d2h.drop()
        if self._reductions is not None:
            self._reductions.drop()
        for gradient in self._of.values():
            gradient.drop()
        if self._spill is not None:
            self._spill.drop()

    def free(self) -> None:
        super().free()
        for gradient in self._of.values():
            gradient.rows = None

    def held_bytes(self) -> int:
        held = [gradient.rows for gradient in self._of.values()]  # an update in the backward takes rows meanwhile
        return sum(rows.nbytes for rows in held if rows is not None)

    def close(self) -> None:
        super().close()
        if self._reductions is not None:
            self._reductions.release()
        if self._reducer is not None:
            self._reducer.release()
        if self._spill is not None:
            self._spill.close()
