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

Rows of gradients that the host budget cannot hold go to disk when they are complete, and come back to be added to; their
sum of squares is taken on the way.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial

import torch

from zstore.errors import UsageError
from zstore.ranks.work import Kind
from zstore.ranks.world import World

from ..device import Add, D2HQueue, Event, Transfers, labelled
from ..params.record import ParameterRecord
from ..params.sharding import add_in, is_narrower
from ..params.units import Unit
from .collectives import Reduce, Reducing, Reduction, Segment, bucket_limit, pack, plan_buckets, put_rows
from .gradients import INCOMPLETE, GradientRules, Gradients, agree_any, forget_gradients, take_gradient, watch_gradient
from .norm import SumOfSquares, counted
from .spill import GradientSpill

Told = Callable[[ParameterRecord], None]


class Arrivals:
    """Which gradients came in a backward, in which order the units are reduced, and which of them may be by now."""

    def __init__(self, units: Sequence[Unit], records: Sequence[ParameterRecord]) -> None:
        self.units = [unit for unit in reversed(units) if any(record.group is not None for record in unit.owned)]
        """In the order in which they are reduced."""
        self._unit_of = {record: unit for unit in self.units for record in unit.owned}
        self.counts: Counter[ParameterRecord] = Counter()
        """How often each gradient came in this backward."""
        self.expected: Counter[ParameterRecord] = Counter(dict.fromkeys(records, 1))
        """How often each came in the backward before, on any rank at least once."""
        self.order_is_agreed = False
        self.sent = 0
        """Units that were handed out."""
        self._due: dict[Unit, set[ParameterRecord]] = {}

    def start(self) -> None:
        """Prepare for a backward."""
        self.counts.clear()
        self.sent = 0
        self._due = {unit: {record for record in unit.owned if self.expected[record]} for unit in self.units}

    def note(self, record: ParameterRecord) -> bool:
        """Note that a gradient, or a part of it, came; return whether it came as often as expected."""
        self.counts[record] += 1
        is_complete = self.counts[record] >= self.expected[record]
        if is_complete:
            self._due[self._unit_of[record]].discard(record)
        return is_complete

    def ready(self, *, rest: bool = False) -> Iterator[list[ParameterRecord]]:
        """Hand out the expected gradients of each unit that has them all, up to the first that has not; or of the `rest`."""
        while self.sent < len(self.units) and (rest or not self._due[self.units[self.sent]]):
            self.sent += 1
            yield [record for record in self.units[self.sent - 1].owned if self.expected[record]]

    def expect(self, records: Iterable[ParameterRecord]) -> None:
        """Expect in later backwards the gradients that came in this one on some rank, as often as here."""
        self.expected = Counter({record: max(self.counts[record], 1) for record in records})

    def end_parts(self, count: int) -> None:
        """Note that all units were sent, and came in `count` backwards."""
        self.sent = len(self.units)
        self.counts = Counter({record: -(-came // count) for record, came in self.counts.items()})

    def agree_on_order(self, world: World) -> None:
        """Take the order in which rank 0's units were complete in this backward (all ranks)."""
        complete = dict.fromkeys(self._unit_of[record].name for record in reversed(self.counts))
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
        arrived: Told | None = None,
    ) -> None:
        records = [record for unit in units for record in unit.owned if record.group is not None]
        super().__init__(records, others, world, rules)
        self.arrivals = Arrivals(units, records)
        self._reduce_world = world.second()
        self._transfers = transfers
        self._d2h = D2HQueue(transfers)
        self._spill = spill
        self._tell = arrived
        self._reducer = rules.exchanges.reducer
        self.on_final: Told | None = None
        """Called with each record whose gradient is complete in the last backward of a step."""
        self.comes_in_parts = True
        """Whether a gradient may come in several parts in the first backward, before it is known how often each comes."""
        self.taken: dict[ParameterRecord, Event] = {}
        """When each gradient of an update in the backward was final: from then on nothing may read the parameter."""
        self._rows: dict[ParameterRecord, torch.Tensor] = {}
        self._filled: set[ParameterRecord] = set()
        """Records whose rows have values of this step."""
        self._agreed: set[ParameterRecord] = set()
        self._squares: dict[ParameterRecord, SumOfSquares] = {}
        self._final: set[ParameterRecord] = set()
        self._lost: Exception | None = None
        """Why a gradient that belongs on disk is not there."""
        self._in_backward = False
        self._last = False
        self._closing = False
        """The backward is over, and its remaining gradients are being agreed on."""
        self._under_way: deque[tuple[Reducing, set[ParameterRecord]]] = deque()
        self._segments_left: Counter[ParameterRecord] = Counter()
        self._handles = [watch_gradient(record, self._arrived) for record in records]

    # -- for the update in the backward -----------------------------------------------------------------------------

    @property
    def expected(self) -> list[ParameterRecord]:
        """The records that had a gradient in the backward before, in the order in which they are expected."""
        return [record for unit in self.arrivals.units for record in unit.owned if self.arrivals.expected[record]]

    @cached_property
    def largest_unit_bytes(self) -> int:
        """Bytes of this rank's rows of the gradients of one unit, at most."""
        planned = self._rules.types.planned
        records = [[record for record in unit.owned if record.group is not None] for unit in self.arrivals.units]
        return max((sum(r.owned_numel * planned(r.dtype).itemsize for r in unit) for unit in records), default=0)

    def waiting_bytes(self, record: ParameterRecord) -> int:
        """Return the bytes of a gradient that waits in memory for the update; 0 if it does not."""
        rows = self._rows.get(record)
        return 0 if rows is None else rows.nbytes

    @property
    def has_sent(self) -> bool:
        """Whether another rank may have got gradients of this backward."""
        return self._world.world_size > 1 and self.arrivals.sent > 0

    # -- backward ---------------------------------------------------------------------------------------------------

    def start_backward(self, *, last: bool) -> None:
        super().start_backward(last=last)
        forget_gradients([record.parameter for record in self._agreed])
        self._in_backward = True
        self._last = last
        self._closing = False
        self.arrivals.start()
        if self._reducer is not None:
            self._reducer.begin_backward()

    def _arrived(self, record: ParameterRecord) -> None:
        if not self._in_backward:
            raise UsageError(
                "a backward that the engine does not know of: call the engine and not its module, or engine.backward(loss)"
            )
        is_complete = self.arrivals.note(record)
        if self._world.world_size > 1 and not self.waits:
            for records in self.arrivals.ready():
                self.send(records)
        elif is_complete and not self.waits:
            self.send([record])
        if self._tell is not None:
            self._tell(record)

    def end_backward(self) -> None:
        self._d2h.drain()
        self._closing = True
        if self._world.world_size > 1:
            for records in self.arrivals.ready(rest=True):
                self.send(records)
        left = [record.parameter.grad is not None for record in self._records]
        came = agree_any(self._world, [self.arrivals.counts[record] > 0 for record in self._records] + left)
        self.send([record for record, late in zip(self._records, came[len(left) :], strict=True) if late])
        self.drain()
        fired = [record for record, any_ in zip(self._records, came[: len(left)], strict=True) if any_]
        self.arrivals.expect(fired)
        self._agreed.update(fired)
        if not self.arrivals.order_is_agreed:
            self.arrivals.agree_on_order(self._world)
        forget_gradients(self._others)
        self._in_backward = False
        if self._last:
            # This backward brought nothing to the rows of the others.
            for record in [record for record in self._records if record in self._agreed - self._final]:
                self._finish(record)

    def show(self, *, whole: bool) -> None:
        for record in self._agreed:
            self._show(record)

    # -- a backward of several micro-batches, while `waits` is set: see engine/backward/by_block.py ----------------------------

    def begin_part(self, number: int, *, last: bool) -> None:
        """Take what is sent from here on as gradients of micro-batch `number` of this step, maybe its `last`."""
        if last or number == 0 or self._spill is not None:
            self.drain()
        self._backwards, self._last, self._several = number + 1, last, True

    def drain(self) -> None:
        """Wait until the rows have all that was sent."""
        while self._under_way:
            self._add_up()
        self._d2h.drain()

    # -- reduction --------------------------------------------------------------------------------------------------

    def send(self, records: Sequence[ParameterRecord]) -> None:
        """Start the reduction of these gradients and take them off their parameters."""
        gradients = {record: take_gradient(record) for record in records}
        if self._world.world_size == 1:
            for record, gradient in gradients.items():
                if gradient is not None:
                    self._add(record, gradient.view(-1))
            return
        # Rows on disk are added when the rows are complete.
        fresh = {record for record in records if record not in self._filled or self._spill_of(record)}
        self._filled |= fresh
        for record in [record for record in records if record not in fresh]:
            self._widen(record)

        def flat(record: ParameterRecord) -> torch.Tensor | None:
            gradient = gradients[record]
            return None if gradient is None else gradient.view(-1)

        with labelled("reduce"):
            for reduction in self._reductions(records, flat):
                self._under_way.append((reduction, fresh))
                for segment in reduction.bucket.segments:
                    self._segments_left[segment.record] += self._rules.copies
                if self._rules.overlap and self._rules.scatter:
                    self.overlapped += 1
                else:
                    self._add_up()
        gradients.clear()
        while self._under_way and self._under_way[0][0].done():
            self._add_up()

    def _reductions(
        self, records: Sequence[ParameterRecord], flat: Callable[[ParameterRecord], torch.Tensor | None]
    ) -> Iterator[Reducing]:
        """Begin the reductions of the gradients that `flat` gives, bucket by bucket."""
        kind: Kind = "reduce_scatter" if self._rules.scatter else "all_reduce"
        reduce: Reduce = self._rules.exchanges.reduce if self._rules.scatter else Reduction
        world_size, limit = self._world.world_size, bucket_limit(self._world, self._rules.bucket_numel)
        if (reducer := self._reducer) is not None:
            taken = [record for record in records if reducer.takes(record)]
            for bucket in reducer.buckets(taken, world_size, limit, self._rules.reduced):
                yield reducer.start(bucket, pack(bucket, world_size, flat), kind)
            records = [record for record in records if not reducer.takes(record)]
        for bucket in plan_buckets(records, world_size, limit, self._rules.reduced):
            yield reduce(self._reduce_world, bucket, pack(bucket, world_size, flat), kind)

    def _add_up(self) -> None:
        """Wait for the oldest reduction; its rows are the first of the step, or are added to those held."""
        reduction, fresh = self._under_way.popleft()
        mean = reduction.finish()
        if not self._rules.scatter:
            everyone = mean.new_empty(self._world.world_size, mean.shape[1])
            self._reduce_world.all_gather(everyone.view(-1), mean[0], kind="all_reduce")
            first = reduction.bucket.segments[0].record.state_shard * self._rules.copies
            mean = everyone[first : first + self._rules.copies]

        def put(segment: Segment, rows: slice, part: torch.Tensor) -> None:
            record = segment.record
            held = self._rows.get(record)
            if held is None or is_narrower(held.dtype, self._room(record, part.dtype)):
                held = self._rows[record] = self._empty(record, part)
            self._put(record, held[rows], part, add=record not in fresh)

        put_rows(reduction.bucket, mean, put)

    # -- rows: see [Note: types of gradients] -------------------------------------------------------------------------

    def _room(self, record: ParameterRecord, arriving: torch.dtype) -> torch.dtype:
        """Return the type of rows for a gradient that arrives in one."""
        if self._spill_of(record) is not None:
            return arriving
        return self._of_step(record)

    def _empty(self, record: ParameterRecord, like: torch.Tensor) -> torch.Tensor:
        """Return memory for the rows, on the tier on which they wait for the update."""
        dtype = self._room(record, like.dtype)
        if record in self._rules.to_host:
            # Of those that are used as they arrive few are there at a time, in memory that they share.
            what = "" if self._rules.squares_at_once else record.name
            return self._transfers.empty_host(record.owned_numel, dtype, what)
        return torch.empty(record.owned_numel, dtype=dtype, device=record.full.device)

    def _widen(self, record: ParameterRecord) -> None:
        """Make room in the rows of earlier backwards for sums in the type of this one."""
        held = self._rows.get(record)
        if held is not None and is_narrower(held.dtype, self._total(record)):
            self._rows[record] = self._empty(record, held).copy_(held)

    def _take_squares(self, record: ParameterRecord, rows: torch.Tensor) -> None:
        """Begin to take the sum of squares of this rank's rows, or of what they become."""
        one_by_one = self._rules.squares_at_once
        self._squares[record] = SumOfSquares(counted(record, rows), self._transfers, one_by_one=one_by_one)

    def _put(self, record: ParameterRecord, rows: torch.Tensor, part: torch.Tensor, *, add: bool) -> None:
        """Copy a segment of a gradient into its rows, or `add` it to them."""
        summed: Add | None = partial(add_in, dtype=self._total(record)) if add else None
        self._d2h.put(rows, part, add=summed, arrived=partial(self._count_segment, record))

    def _count_segment(self, record: ParameterRecord) -> None:
        """Note that a segment of a gradient is in its rows."""
        self._segments_left[record] -= 1
        if not self._segments_left[record]:
            self._complete(record)

    def _add(self, record: ParameterRecord, gradient: torch.Tensor) -> None:
        """Add a gradient to the rows, if one rank has all of them."""
        add = record in self._filled and record in self._rows
        self._filled.add(record)
        self._segments_left[record] += 1
        if not add and (record not in self._rules.to_host or self._transfers.streams.device_is_host):
            self._rows[record] = gradient.to(self._room(record, gradient.dtype))
            self._count_segment(record)
            return
        if add:
            self._widen(record)
            self._squares.pop(record, None)
        else:
            self._rows[record] = self._empty(record, gradient)
            if gradient.device.type != "cpu" and not self._several:  # there it costs the host nothing
                self._take_squares(record, gradient)
        self._put(record, self._rows[record], gradient, add=add)

    # -- complete rows ----------------------------------------------------------------------------------------------

    def _spill_of(self, record: ParameterRecord) -> GradientSpill | None:
        """Return the object that keeps a gradient on disk; None if it waits in memory."""
        return self._spill if self._spill is not None and record in self._spill else None

    def _complete(self, record: ParameterRecord) -> None:
        """The rows of this backward are complete: take them to disk if they belong there."""
        if (spill := self._spill_of(record)) is not None:
            rows, squares = self._rows.pop(record), self._squares.pop(record, None)
            self._on_disk(partial(spill.add, record, rows, self._total(record), squares))
        if record in self._final and self.on_final is not None:
            raise UsageError(
                f"parameter {record.name!r} got a part of its gradient after its update in this backward had begun: its "
                'module is used more often than in the step before; set "step_overlap" to "forward" or "none"'
            )
        if not self._last or self._closing or (self.comes_in_parts and not self.arrivals.order_is_agreed):
            return  # at the end of a backward it may be no rank's; and nobody knows a first part as one
        self._finish(record)

    def _finish(self, record: ParameterRecord) -> None:
        """Tell that the gradient is final, and there to be used."""
        if self._rules.squares_at_once and record in self._rows and record not in self._squares:
            self._take_squares(record, self._rows[record])
        self._final.add(record)
        if self.on_final is None:
            return
        if (spill := self._spill_of(record)) is not None:
            self._on_disk(spill.drain)
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

    # -- for the update ---------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        if self._spill is not None:
            self._on_disk(self._spill.drain)
        if self._rules.spills:
            self._world.raise_together(self._lost)

    def has(self, record: ParameterRecord) -> bool:
        return record in self._agreed

    def owned(self, record: ParameterRecord) -> torch.Tensor | None:
        if record not in self._agreed:
            return None
        if (spill := self._spill_of(record)) is not None:
            return spill.owned(record)
        return self._rows.get(record)

    def begun(self) -> dict[ParameterRecord, torch.Tensor | None]:
        if self._spill is not None:
            self._on_disk(self._spill.drain)
        if self._lost is not None:
            raise self._lost
        agreed = [record for record in self._records if record in self._agreed]
        return {record: None if self._spill_of(record) else self._rows[record] for record in agreed}

    def _take_up(self, record: ParameterRecord, rows: torch.Tensor) -> None:
        self._agreed.add(record)
        self._filled.add(record)
        if (spill := self._spill_of(record)) is not None:
            spill.add(record, rows, rows.dtype)
            spill.drain()
        else:
            self._rows[record] = self._empty(record, rows).copy_(rows)

    def replace(self, record: ParameterRecord, full: torch.Tensor) -> None:
        if not self._last:
            raise UsageError(INCOMPLETE.format(record.name))
        if self._spill_of(record) is not None:
            raise UsageError(
                f"the gradient of parameter {record.name!r} waits on disk and cannot be set: keep offload_optimizer in host "
                'memory ("device": "cpu"), or change the loss'
            )
        self._rows[record].copy_(full[slice(*record.owned_range)])
        if record in self._squares:
            self._take_squares(record, self._rows[record])

    def take(self, record: ParameterRecord, *, keep: bool = False) -> torch.Tensor | None:
        """Do as `Gradients.take`; with `keep` the rows stay, not to be changed."""
        if self._spill_of(record) is not None:
            return None  # the update reads it from disk itself
        kept = keep or (self._rules.keeps_rows and self._world.world_size > 1)
        # Not `owned`: an update in the backward takes gradients that are not agreed on before its end.
        rows = self._rows.get(record) if kept else self._rows.pop(record, None)
        return rows if record in self._filled else None

    def squares(self, record: ParameterRecord) -> float | None:
        if (spill := self._spill_of(record)) is not None:
            return spill.squares(record)
        begun = self._squares.get(record)
        return None if begun is None else begun.value(self._squares.values())

    def drop(self) -> None:
        super().drop()
        self._in_backward = False
        self._d2h.drop()
        self._under_way.clear()
        self._segments_left.clear()
        self._filled.clear()
        self._agreed.clear()
        self._squares.clear()
        self._final.clear()
        self.taken.clear()
        self._lost = None
        if not self._rules.keeps_rows or self._world.world_size == 1:
            self._rows.clear()
        if self._spill is not None:
            self._spill.drop()

    def free(self) -> None:
        super().free()
        self._rows.clear()

    def held_bytes(self) -> int:
        lost = 0 if self._reducer is None else self._reducer.held_bytes
        # A copy: an update in the backward takes rows meanwhile.
        return sum(rows.nbytes for rows in list(self._rows.values())) + lost

    def close(self) -> None:
        super().close()
        self._reduce_world.release()
        if self._reducer is not None:
            self._reducer.release()
        if self._spill is not None:
            self._spill.close()
