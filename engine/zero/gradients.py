"""Gradients between backward and update: accumulated, averaged over ranks, and provided as this rank's rows.

The engine holds them; a training loop's view of them in `.grad` is in [Note: gradients between backward and step].

[Note: when gradients are reduced]
The stage enters only through `GradientRules`. If `each_backward` is false (stages 0 and 1, and most runs on one rank), whole
gradients accumulate and are reduced once per step. Autograd accumulates them if they have the parameter's dtype: the current
sum goes back to `.grad` for the next backward. In a different dtype (see [Note: dtypes of gradients]), each gradient is added
to the sum as soon as it is complete, so that few at a time exist in the parameters' dtype.

If it is true (stages 2 and 3), a unit's gradients are reduced asynchronously once the last of them has arrived, in one order
of units on every rank, on a separate process group: a rank whose unit is late holds up no other collective. A unit waits for
the parameters that had a gradient on any rank in the previous backward; others are agreed on and reduced at the end. The
order is the reverse of the modules' at first, then the one that rank 0 saw in the first backward. Reduced rows are added to
the current sums, in the dtype of [Note: dtypes of gradients]. On a single rank, its rows are the whole gradient.

A gradient is complete once it has arrived as often as in the previous backward (recomputing a shared module may split it),
and final if that is the last backward of its step. In the first backward, gradients become final only at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import nn

from zstore.errors import UsageError, listed
from zstore.ranks.world import World, agree_any, on_device

from ..params.record import ParameterRecord
from ..params.sharding import Unit
from ..runtime.device import Transfers, labelled
from .collectives import Bucket, GradientRules, Reductions, rows_in
from .gradient import Arrivals, BackwardPhase, Gradient, GradientState, GradientStep, take_gradient, watch_gradient
from .norm import sums_of_squares
from .sharded_gradient import GradientOwner, ShardedGradient
from .spill import GradientSpill

_MAX_NAMES = 5
"""The most parameters that an error message names."""


class Gradients:
    """The gradients of the trained parameters of `units`; `others` are parameters that get gradients although they are not
    trained. `arrived` is called with each record whose gradient arrived and was taken.

    The engine calls, in this order: for each micro-batch start_backward, end_backward, expose (or drop, if the backward
    failed); then for the update reduce, with_gradient, take, drop.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        others: Sequence[nn.Parameter],
        world: World,
        rules: GradientRules,
        transfers: Transfers,
        *,
        spill: GradientSpill | None = None,
        arrived: Callable[[ParameterRecord], None] | None = None,
    ) -> None:
        records = [record for unit in units for record in unit.owned if record.group is not None]
        dtypes = {record.dtype for record in records}
        self.step = GradientStep(rules, transfers, spill, dtypes=dtypes, world_size=world.world_size)
        self.by_record = {record: Gradient(record, self.step) for record in records}
        """The gradients by parameter."""
        self._arrivals = Arrivals(units, self.by_record, self.step)
        self._others = others
        self._world = world
        self.rules = rules
        self._reductions = Reductions(world, rules) if world.world_size > 1 else None
        self._on_arrival = arrived
        self.overlapped = 0
        """Reductions that overlapped with other work of this rank."""
        self.sums: dict[ParameterRecord, Sequence[float]] | None = None
        """Sums of squares of each shard, over all ranks, once computed in this step."""
        self.exposed = ExposedGradients(self.by_record, self.step)
        self._watches: list[Callable[[], object]] = []
        if rules.each_backward:
            self._watch()

    def _watch(self) -> None:
        self._watches = [watch_gradient(record, self._arrived) for record in self.by_record]

    @property
    def expected(self) -> list[ParameterRecord]:
        """The records that had a gradient in the previous backward, in the expected order."""
        return [gradient.record for unit in self._arrivals.units for gradient in unit if gradient.expected]

    @cached_property
    def largest_unit_bytes(self) -> int:
        """Bytes of this rank's gradient rows of the largest unit."""
        nbytes = {r: r.owned_numel * self.rules.types.planned(r.dtype).itemsize for r in self.by_record}
        return max((sum(nbytes[gradient.record] for gradient in unit) for unit in self._arrivals.units), default=0)

    @property
    def has_sent(self) -> bool:
        """Whether gradients of this backward may have been sent to another rank."""
        return self._world.world_size > 1 and self._arrivals.num_sent > 0

    def start_backward(self, *, last: bool) -> None:
        """Prepare for a backward; `last` says whether it is the last of its step."""
        self.exposed.hide()
        step = self.step
        step.start_backward(last=last)
        self._arrivals.start()
        if not self.rules.each_backward:
            for record, gradient in self.by_record.items():
                values, dtype = gradient.values, step.step_dtypes[record.dtype]
                gradient.is_taken = dtype != record.dtype or (values is not None and values.dtype != dtype)
                record.parameter.grad = None if gradient.is_taken else values
                if gradient.is_taken and not self._watches:
                    self._watch()

    def _arrived(self, record: ParameterRecord) -> None:
        gradient = self.by_record[record]
        if self.step.phase is not BackwardPhase.RUNNING and self.rules.each_backward:
            raise UsageError(
                "a backward was started without the engine: call the engine instead of its module, or use engine.backward(loss)"
            )
        if self.step.phase is not BackwardPhase.RUNNING or not gradient.is_taken:
            return
        is_complete = self._arrivals.count(gradient)
        if self._reductions is not None and self.rules.each_backward:
            for gradients in self._arrivals.ready():
                self._reduce_rows(gradients, self._reductions)
        elif is_complete:
            unit = self._arrivals.unit_of[gradient]
            if unit != self._arrivals.last_unit or gradient.pending_segments:  # a part is among the pending copies
                self.step.send()
            gradient.collect()
            self._arrivals.last_unit = unit
            if not self._arrivals.num_due[unit]:
                self.step.send()
        if self._on_arrival is not None:
            self._on_arrival(record)

    def end_backward(self) -> None:
        """Collect the gradients of a backward (all ranks)."""
        step, reductions = self.step, self._reductions if self.rules.each_backward else None
        step.drain()
        step.phase = BackwardPhase.CLOSING
        gradients = list(self.by_record.values())
        flags = [flag for g in gradients for flag in (g.num_arrivals > 0, g.record.parameter.grad is not None)]
        if reductions is not None:
            for unit in self._arrivals.ready(remaining=True):
                self._reduce_rows(unit, reductions)
            # Late gradients are in no unit that has been sent: before this, ranks differ in which units they have sent.
            late = [gradient.record.parameter.grad is not None for gradient in gradients]
            agreed = agree_any(self._world, flags + late)
            flags, late = agreed[: len(flags)], agreed[len(flags) :]
            self._reduce_rows([g for g, is_late in zip(gradients, late, strict=True) if is_late], reductions)
            reductions.drain()
        else:
            for gradient in gradients:
                gradient.collect()
        step.drain()
        for gradient, has_arrived, is_set in zip(gradients, flags[::2], flags[1::2], strict=True):
            if gradient.is_taken:
                gradient.expected = max(gradient.num_arrivals, 1) if has_arrived else 0
            # A hook may have taken it, or code in the backward may have set it.
            gradient.is_agreed |= (has_arrived or is_set) and gradient.state is not GradientState.EMPTY
        if self.rules.each_backward and not step.order_is_agreed:
            self._arrivals.agree_on_order(self._world)
        for other in self._others:
            other.grad = None
        step.phase = step.after_backward
        if step.last and self.rules.each_backward:
            # The remaining gradients received nothing in this backward.
            for gradient in gradients:
                if gradient.is_agreed and gradient.state is not GradientState.FINAL:
                    gradient.finish()
            step.send()

    def _reduce_rows(self, gradients: Sequence[Gradient], reductions: Reductions) -> None:
        """Take these gradients from their parameters, and reduce them into the rows (all ranks, in the same order)."""
        values = {gradient.record: take_gradient(gradient.record) for gradient in gradients}
        adds = {gradient.record: gradient.mark_sent() for gradient in gradients}

        def put(bucket: Bucket, mean: torch.Tensor) -> None:
            for segment, rows, part in rows_in(bucket, mean):
                self.by_record[segment.record].put(rows, part, adds=adds[segment.record])
            self.step.send()

        with labelled("reduce"):
            for bucket in reductions.start(values, put):
                for segment in bucket.segments:
                    self.by_record[segment.record].pending_segments += 1
                self.overlapped += self.rules.overlap and self.rules.scatter

    def expose(self, *, whole: bool) -> None:
        """Put the gradients of the step into `.grad`: if `whole` and possible, as in a plain loop, else as placeholders
        (all ranks). See [Note: gradients between backward and step]."""
        # An optimizer that averages some of them itself needs each rank's local ones.
        is_partial = self.rules.each_backward or (self._world.world_size > 1 and self.rules.scatter)
        whole = whole and self.step.averaged is None and not is_partial
        if whole and self.step.last:
            self.reduce()
        self.exposed.expose(whole=whole and self.step.is_whole)

    def reduce(self) -> None:
        """Average the gradients that are not averaged yet, and agree on which parameters have one (all ranks)."""
        if self.rules.each_backward:
            error = None if self.step.spill is None else self.step.spill.finish()
            if self.rules.spills:
                self._world.raise_on_all_ranks(error)
            return
        self.exposed.adopt()
        if self._reductions is None or self.step.phase is BackwardPhase.AVERAGED:
            return
        self.step.phase = BackwardPhase.AVERAGED
        gradients = list(self.by_record.values())
        agreed = agree_any(self._world, [gradient.is_agreed for gradient in gradients])
        for gradient, any_rank_has_it in zip(gradients, agreed, strict=True):
            if any_rank_has_it and not gradient.is_agreed:  # only other ranks have it
                gradient.set_full(self._zeros(gradient.record))
        averaged = self.by_record if self.step.averaged is None else self.step.averaged()
        local = {r: g.values.view(-1) for r, g in self.by_record.items() if g.values is not None and r in averaged}
        self.overlapped += self._reductions.replace(local, scatter=self.rules.scatter)

    def _zeros(self, record: ParameterRecord) -> torch.Tensor:
        return torch.zeros(record.shape, dtype=self.step.step_dtypes[record.dtype], device=record.full.device)

    def mean(self, record: ParameterRecord) -> torch.Tensor | None:
        """Return a copy of the mean over ranks of the step's current gradient, 1-D [numel]; None if no rank has any. For
        gradients that are reduced once per step (all ranks)."""
        self.exposed.adopt()
        local = self.by_record[record].values
        if self._reductions is None or self.step.phase is BackwardPhase.AVERAGED:
            return None if local is None else local.reshape(-1).clone()
        if not agree_any(self._world, [local is not None])[0]:
            return None
        average = self._zeros(record).view(-1) if local is None else local.reshape(-1).clone()
        self._reductions.replace({record: average}, scatter=False)
        return average

    def with_gradient(self, records: Iterable[ParameterRecord]) -> list[ParameterRecord]:
        """Return the `records` that had a gradient on any rank in this step."""
        return [r for r in records if (gradient := self.by_record.get(r)) is not None and gradient.is_agreed]

    def require(self, records: Sequence[ParameterRecord], step: int, changed: str) -> None:
        """Raise UsageError, on every rank, if no rank's loss reached some of the `records`; it names them and what was
        `changed`."""
        used = set(self.with_gradient(records))
        unused = [record.name for record in records if record not in used]
        if unused:
            raise UsageError(
                f"step {step}: no rank has a gradient for {listed([repr(name) for name in unused], _MAX_NAMES)}; "
                f"{changed}. Use them in the loss, freeze them with requires_grad_(False) before initialize(), or set "
                "zero_optimization.ignore_unused_parameters to true"
            )

    def owned(self, record: ParameterRecord) -> torch.Tensor | None:
        """Return this rank's rows, 1-D, of the averaged gradient; None if there are none in memory."""
        return self.by_record[record].owned() if self.with_gradient([record]) else None

    def replace(self, record: ParameterRecord, full: torch.Tensor) -> None:
        """Use `full`, 1-D [numel], the same on every rank, as the averaged gradient of a parameter that has one (all ranks).

        Raises UsageError if the gradient is not complete, or waits on disk.
        """
        if not self.step.last:
            raise UsageError(
                f"the gradient of parameter {record.name!r} was set before the last backward of the step: set it after "
                "that one and before step()"
            )
        if not self.rules.each_backward:
            self.reduce()
        self.by_record[record].replace(full)

    def take(self, records: Iterable[ParameterRecord]) -> list[torch.Tensor | None]:
        """Return `owned` of every record, for the update, which may change it; the caller keeps it alive."""
        return [self.by_record[record].take() for record in records]

    def drop(self) -> None:
        """Forget all gradients."""
        step = self.step
        step.reset()
        self.sums = None
        self.exposed.scales.clear()
        self.exposed.clipped.clear()
        if self._reductions is not None:
            self._reductions.drop()
        for record, gradient in self.by_record.items():
            record.parameter.grad = None
            gradient.drop()
        if step.spill is not None:
            step.spill.drop()

    def free(self) -> None:
        """Forget all gradients, and free the buffers reserved for the next ones."""
        self.drop()
        for gradient in self.by_record.values():
            gradient.values = None

    def held_bytes(self) -> int:
        """Return the bytes of gradients held now."""
        current = [g.values for g in self.by_record.values()]  # an update in the backward takes rows concurrently
        return sum(values.nbytes for values in current if values is not None)

    def close(self) -> None:
        """Remove the hooks from the parameters, forget all gradients, and end threads and process groups."""
        while self._watches:
            self._watches.pop()()
        self.drop()
        if self._reductions is not None:
            self._reductions.release()
        if self.step.spill is not None:
            self.step.spill.close()


class ExposedGradients:
    """The gradients of the step in the parameters' `.grad`, and what the training loop changes there. See [Note: gradients
    between backward and step]."""

    owner: GradientOwner
    """Serves operations on gradients that are not whole on this rank."""

    def __init__(self, gradients: Mapping[ParameterRecord, Gradient], step: GradientStep) -> None:
        self._of = gradients
        self._step = step
        self.scales: dict[ParameterRecord, float] = {}
        """Factors by which the loop scaled gradients that are not whole on this rank."""
        self.clipped: set[ParameterRecord] = set()
        """Whole gradients that were clipped in place."""
        self._placeholders: dict[ParameterRecord, ShardedGradient] = {}

    def expose(self, *, whole: bool) -> None:
        """Put the gradients into `.grad`: the tensors themselves if they are `whole` and of the parameter's dtype."""
        for record, gradient in self._of.items():
            if gradient.is_agreed:
                values = gradient.values
                is_usable = whole and values is not None and values.dtype == record.dtype
                self._expose(gradient, values if is_usable else None)

    def _expose(self, gradient: Gradient, values: torch.Tensor | None) -> None:
        """Put a gradient into `.grad`, or a `ShardedGradient` if `values` is None."""
        record = gradient.record
        if values is None:
            values = self._placeholders.get(record)
            if values is None:
                values = self._placeholders[record] = ShardedGradient.of(record, self.owner)
        record.parameter.grad = gradient.exposed = values

    @property
    def are_cleared(self) -> bool:
        """Whether the training loop has set all exposed gradients to None, as torch's `zero_grad()` does."""
        exposed = [record for record, gradient in self._of.items() if gradient.exposed is not None]
        return bool(exposed) and all(record.parameter.grad is None for record in exposed)

    def hide(self) -> None:
        """Remove the gradients from `.grad`, and keep them with the loop's changes."""
        self.adopt()
        for record, gradient in self._of.items():
            if gradient.exposed is not None:
                record.parameter.grad = gradient.exposed = None

    def adopt(self) -> None:
        """Adopt the gradients that the training loop put into `.grad` in place of the engine's.

        Raises UsageError if one is not whole on this rank.
        """
        for record, gradient in self._of.items():
            exposed = gradient.exposed
            if record.parameter.grad is exposed:
                continue
            if isinstance(exposed, ShardedGradient) or not self._step.is_whole:
                raise UsageError(
                    f"the .grad of parameter {record.name!r} was replaced or cleared between backward() and step(), but its "
                    "gradient is not whole on this rank, and the step would ignore the change. Multiply .grad in place by a "
                    "number, change the loss, or call engine.zero_grad(); to exclude a parameter, set requires_grad=False"
                )
            gradient.drop()
            if (values := take_gradient(record)) is not None:
                gradient.set_full(values)
                self._expose(gradient, values)

    def clip(self, factor: float) -> None:
        """Multiply the whole fp32 gradients by `factor` in place, as a plain loop does. Others are clipped in the update, by
        a single fp32 multiplication; their `.grad` is a placeholder from now on."""
        exposed = {record: gradient.exposed for record, gradient in self._of.items()}
        whole = {
            r: values for r, values in exposed.items() if values is not None and not isinstance(values, ShardedGradient)
        }
        in_place = {record: values for record, values in whole.items() if record.dtype == torch.float32}
        if factor != 1.0 and in_place:
            torch._foreach_mul_(list(in_place.values()), float(np.float32(factor)))
        self.clipped.update(in_place)
        for record in whole.keys() - in_place.keys():
            self._expose(self._of[record], None)


def sums_over_ranks(gradients: Gradients, world: World, *, sharded: bool) -> dict[ParameterRecord, Sequence[float]]:
    """Return the sum of squares of each shard, in rank order, of the averaged gradients before unscaling; `sharded`:
    whether the optimizer's state is (all ranks)."""
    agreed = {record: gradient for record, gradient in gradients.by_record.items() if gradient.is_agreed}
    if not agreed:
        return {}
    per_record: list[Sequence[float | torch.Tensor]] = []
    for record, gradient in agreed.items():
        known = gradient.squares(gradients.by_record.values())
        rows = gradient.owned() if known is None else None
        if rows is None:
            per_record.append([known or 0.0])
        else:
            whole = sharded or world.world_size == 1  # splitting takes as long as the norm
            per_record.append([rows] if whole else torch.split(rows, max(record.grid.shard_numel, 1)))
    sums = iter(sums_of_squares([part for shards in per_record for part in shards if isinstance(part, torch.Tensor)]))
    squares = [[next(sums) if isinstance(part, torch.Tensor) else part for part in shards] for shards in per_record]
    if sharded:  # else every rank has all rows
        own = on_device([shards[0] for shards in squares], torch.float64, world.device)
        gathered = torch.empty(world.world_size * len(agreed), dtype=torch.float64, device=world.device)
        world.all_gather(gathered, own, kind="control")
        squares = gathered.view(world.world_size, -1).t().tolist()
    return dict(zip(agreed, squares, strict=True))
