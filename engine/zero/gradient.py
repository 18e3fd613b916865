"""The gradient of one parameter in a step, and which gradients arrived in a backward.

[Note: the life of a gradient]
In each step a gradient passes through the states of `GradientState` in order. Its values are the sum over the backwards of
the step; they are complete when no segment is pending (`pending_segments`). Whether any rank had a gradient (`is_agreed`) is
known at the end of a backward, which may be before or after the gradient is final. Rows that do not fit into the host budget
are written to disk whenever they are complete, and accumulated there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, cast

import torch

from zstore.errors import UsageError
from zstore.io.memory import plain_memory
from zstore.ranks.world import World

from ..params.record import OTHER_MODES, ParameterRecord
from ..params.sharding import Unit, add_in, is_narrower
from ..runtime.device import D2HQueue, Transfers
from .collectives import GradientRules
from .norm import SumOfSquares, begin_squares
from .spill import GradientSpill

_ALIGN_NUMEL = 64
"""Each gradient of a unit begins at a multiple of this many elements in the unit's host buffer."""


class GradientState(Enum):
    """State of a gradient within its step. See [Note: the life of a gradient]."""

    EMPTY = "empty"
    """No value of this step has been sent yet."""
    HELD = "held"
    """Values of this step are in memory or on disk, or being copied there."""
    FINAL = "final"
    """Nothing more will be added in this step."""


class BackwardPhase(Enum):
    """Phase of a step for the gradients."""

    RUNNING = "running"
    """Autograd is computing gradients."""
    CLOSING = "closing"
    """Autograd is done, and the ranks are agreeing on which gradients exist: until then no gradient becomes final."""
    OWN = "own"
    """No backward is running; each rank has its local sums."""
    AVERAGED = "averaged"
    """No backward is running; the values are the mean over ranks."""


class GradientStep:
    """The phase of a step for all gradients, their dtypes, and their copies to host memory. Used from one thread at a time."""

    def __init__(
        self,
        rules: GradientRules,
        transfers: Transfers,
        spill: GradientSpill | None,
        *,
        dtypes: Collection[torch.dtype],
        world_size: int,
    ) -> None:
        self.rules = rules
        self.transfers = transfers
        self.spill = spill
        """Stores rows on disk."""
        self.after_backward = BackwardPhase.AVERAGED if rules.each_backward or world_size == 1 else BackwardPhase.OWN
        """The phase after a backward."""
        self.order_is_agreed = False
        """Whether a first backward has completed, so the number and order of arrivals per gradient are known."""
        self.arrives_in_parts = True
        """Whether a gradient may arrive in several parts before the order is agreed."""
        self.on_final: Callable[[Sequence[ParameterRecord]], None] | None = None
        """Called with the records whose gradients are complete in the last backward of a step, one unit at a time."""
        self.averaged: Callable[[], set[ParameterRecord]] | None = None
        """Returns the parameters averaged across ranks in this step; the rest stay local. None: all of them."""
        self._dtypes = dtypes
        self._d2h = D2HQueue(transfers)
        self._host_buffers: dict[tuple[Gradient, torch.dtype], torch.Tensor] = {}
        """Host buffers for gradients of this step, allocated with their unit's and not used yet."""
        self.unsquared: dict[Gradient, torch.Tensor] = {}
        """Gradients whose squared norm has not been launched yet, with the values to use."""
        self.final: list[Gradient] = []
        """Gradients to pass to `on_final`."""
        self.reset()
        self._update_dtypes()

    def reset(self) -> None:
        """Start a step; discard pending copies after they stop writing."""
        self.backwards = 0
        """Number of backwards in this step, including the current one."""
        self.last = False
        """Whether the last backward of this step has started."""
        self.phase = self.after_backward
        self._d2h.drop()
        self._host_buffers.clear()
        self.unsquared.clear()
        self.final.clear()

    def host_rows(self, gradient: Gradient, dtype: torch.dtype) -> torch.Tensor:
        """Return a host buffer for this rank's rows of a gradient: part of one allocation for all gradients of its unit that
        wait for the update there. If the device is the host, or the gradient is spilled to disk, it has its own allocation."""
        record, spilled = gradient.record, self.spill or ()
        if self.transfers.streams.device_is_host or record in spilled:
            return self.transfers.empty_host(record.owned_numel, dtype)
        if (gradient, dtype) not in self._host_buffers:
            in_memory = (g for g in gradient.unit if g.record in self.rules.to_host and g.record not in spilled)
            unit = [g for g in in_memory if g.record.dtype == record.dtype]
            sizes = [size for g in unit for size in (g.record.owned_numel, -g.record.owned_numel % _ALIGN_NUMEL)]
            buffer = self.transfers.empty_host(sum(sizes), dtype, unit[0].record.name)
            self._host_buffers.update(zip([(g, dtype) for g in unit], buffer.split_with_sizes(sizes)[::2], strict=True))
        return self._host_buffers.pop((gradient, dtype))

    def put(self, gradient: Gradient, rows: torch.Tensor, part: torch.Tensor, dtype: torch.dtype | None) -> None:
        """Store `part` in `rows`: immediately if they are on the same device, else asynchronously, once `send` is called."""
        if self.transfers.link(part, rows) is None:
            gradient.arrive(rows, part, dtype)
            return
        target = rows if dtype is None and rows.dtype == part.dtype else None
        self._d2h.put(target, part, partial(gradient.arrive, rows, dtype=dtype))
        if self._d2h.is_full:
            self.send()

    def send(self) -> None:
        """Process the gradients that have arrived as one batch (typically a unit): one call for their norms, one copy to host
        memory, one call of `on_final` for those that are final."""
        self._begin_squares()  # before any is written to disk
        self._d2h.send()
        self._begin_squares()
        final, self.final = self.final, []
        if not final or self.on_final is None:
            return
        if self.spill is not None and any(gradient.record in self.spill for gradient in final):
            self.spill.finish()
        if self.spill is None or self.spill.error is None:
            self.on_final([gradient.record for gradient in final])

    def _begin_squares(self) -> None:
        unsquared, self.unsquared = self.unsquared, {}
        squares_of = begin_squares(list(unsquared.values()), self.transfers, one_by_one=self.rules.squares_at_once)
        for gradient, squares in zip(unsquared, squares_of, strict=True):
            gradient.sum_of_squares = squares

    def drain(self) -> None:
        """`send`, then wait for all pending copies."""
        self.send()
        self._d2h.drain()
        self.send()

    def start_backward(self, *, last: bool) -> None:
        """Begin a backward; `last` says whether it is the last of the step."""
        self.backwards, self.last = self.backwards + 1, last
        self._update_dtypes()
        self.phase = BackwardPhase.RUNNING

    def _update_dtypes(self) -> None:
        several, type_of = self.backwards > 1, self.rules.types.accumulated
        self.sum_dtypes = {dtype: type_of(dtype, several=several) for dtype in self._dtypes}
        """Dtype of the sum up to the current backward, by parameter dtype."""
        self.step_dtypes = {dtype: type_of(dtype, several=several or not self.last) for dtype in self._dtypes}
        """Dtype of the sum over the step, by parameter dtype, given the number of backwards known so far."""

    @property
    def is_whole(self) -> bool:
        """Whether this rank has whole gradients, averaged if there are several ranks."""
        return not self.rules.each_backward and self.phase is BackwardPhase.AVERAGED and self.averaged is None


class Gradient:
    """The gradient of one parameter on this rank. See [Note: the life of a gradient]."""

    def __init__(self, record: ParameterRecord, step: GradientStep) -> None:
        self.record = record
        self.state = GradientState.EMPTY
        self.is_agreed = False
        """Whether any rank had it in a backward of this step (while sums are local: whether this rank did)."""
        self.is_taken = step.rules.each_backward
        """Whether the engine, not autograd, accumulates it."""
        self.num_arrivals = 0
        """Arrivals, of all or part of it, in this backward."""
        self.expected = 1
        """Arrivals in the previous backward; at least 1 if any rank had it."""
        self.pending_segments = 0
        """Segments that were sent but are not in `values` yet."""
        self.values: torch.Tensor | None = None
        """This rank's rows, 1-D, or the full gradient in the parameter's shape; None if not allocated yet, on disk, or taken by
        an update."""
        self.exposed: torch.Tensor | None = None
        """The tensor that was put into `.grad`."""
        self.sum_of_squares: SumOfSquares | None = None
        """Squared norm of this rank's rows, once launched."""
        self.unit: Sequence[Gradient] = (self,)
        """The gradients of its unit, which are reduced together."""
        self._spill = step.spill if step.spill is not None and record in step.spill else None
        """Set if the rows are spilled to disk."""
        self._step = step

    def mark_sent(self) -> bool:
        """Note that values of a backward are being copied; return whether they are added to the values in memory."""
        adds = self.state is not GradientState.EMPTY if self._spill is None else self.pending_segments > 0
        if self.state is GradientState.EMPTY:
            self.state = GradientState.HELD
        return adds

    def collect(self) -> None:
        """Detach the gradient from the parameter and accumulate it."""
        step, values = self._step, take_gradient(self.record)
        if values is None:
            return
        adds, values = self.mark_sent(), values.view(-1) if step.rules.each_backward else values
        if not self.is_taken:  # autograd has accumulated them
            self.values = values
            return
        self.pending_segments += 1
        if not adds and (step.transfers.streams.device_is_host or self.record not in step.rules.to_host):
            self.values = values if self._spill is not None else values.to(step.step_dtypes[self.record.dtype])
            self._count_segment()
            return
        if not adds and values.device.type != "cpu" and step.backwards == 1 and step.last:  # needs no host time
            step.unsquared[self] = values
        self.put(None, values, adds=adds)

    def put(self, rows: slice | None, part: torch.Tensor, *, adds: bool) -> None:
        """Copy a segment of the gradient into (or, if `adds`, accumulate it onto) `rows`; None means all values."""
        values = self._allocate(part, add=adds)
        dtype = self._step.sum_dtypes[self.record.dtype] if adds else None
        self._step.put(self, values if rows is None else values[rows], part, dtype)

    def arrive(self, rows: torch.Tensor, values: torch.Tensor, dtype: torch.dtype | None) -> None:
        """Store values on the same device as `rows`: accumulated in `dtype`, or overwriting if None."""
        if dtype is not None:
            add_in(rows, values, dtype)
        elif values is not rows:
            rows.copy_(values)
        self._count_segment()

    def _allocate(self, part: torch.Tensor, *, add: bool) -> torch.Tensor:
        """Return a buffer for the values, on the tier on which they wait for the update, with a dtype wide enough for `part`
        or, to `add` it, for the sum; if it adds, the buffer has the current values."""
        record, current = self.record, self.values
        dtype = self._step.step_dtypes[record.dtype] if self._spill is None else part.dtype
        if add:
            self.sum_of_squares = None
            self._step.unsquared.pop(self, None)
        if current is not None and not is_narrower(current.dtype, dtype):
            return current
        if record in self._step.rules.to_host:
            values = self._step.host_rows(self, dtype)
            self.values = values if current is None or not add else values.copy_(current)
        elif current is not None and add:
            self.values = current.to(dtype)
        else:
            self.values = torch.empty(record.owned_numel, dtype=dtype, device=record.full.device)
        return self.values

    def _count_segment(self) -> None:
        """Record that a segment arrived; finish if it was the last."""
        self.pending_segments -= 1
        if self.pending_segments:
            return
        step, record = self._step, self.record
        if self._spill is not None and self.values is not None:
            rows, squares, self.values, self.sum_of_squares = self.values, self.sum_of_squares, None, None
            with self._spill.keeping_error():
                self._spill.add(record, rows, step.sum_dtypes[record.dtype], squares)
        if self.state is GradientState.FINAL and step.on_final is not None:
            raise UsageError(
                f"parameter {record.name!r} received a part of its gradient after its update in this backward had started: "
                f"its module is used more often than in the previous step; {OTHER_MODES}"
            )
        is_known = step.order_is_agreed or not step.arrives_in_parts  # else it may be the first of several parts
        # Once the backward is over, ranks may still agree that none has it.
        if step.last and is_known and step.phase is BackwardPhase.RUNNING:
            self.finish()

    def finish(self) -> None:
        """Mark the gradient as final: the next `send` passes it to an update in the backward."""
        step, self.state = self._step, GradientState.FINAL
        if step.rules.squares_at_once and self.values is not None and self.sum_of_squares is None:
            step.unsquared.setdefault(self, self.values)
        step.final.append(self)

    def owned(self) -> torch.Tensor | None:
        """Return this rank's rows, 1-D, or a copy of the rows on disk; None if there are none."""
        return self._rows_of(self.values) if self._spill is None else self._spill.owned(self.record)

    def _rows_of(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """Return this rank's rows, whether `values` is the full gradient or already the rows."""
        if values is None:
            return None
        flat, (first, stop) = values.view(-1), self.record.owned_range
        return flat if flat.numel() == stop - first else flat[first:stop]

    def take(self) -> torch.Tensor | None:
        """Return the rows for an update; None if it reads them from disk itself."""
        rows = self._rows_of(self.values)
        if not self._step.rules.keeps_rows:
            self.values = None
        return rows

    def set_full(self, values: torch.Tensor) -> None:
        """Use `values`, a full gradient, as this step's."""
        self.values, self.state, self.is_agreed = values, GradientState.HELD, True

    def replace(self, full: torch.Tensor) -> None:
        """Replace this step's values with `full`, 1-D [numel]."""
        if self._spill is not None:
            raise UsageError(
                f"the gradient of parameter {self.record.name!r} is on disk and cannot be set: keep offload_optimizer in "
                'host memory ("device": "cpu"), or change the loss'
            )
        values = full[slice(*self.record.owned_range)] if self._step.rules.each_backward else full
        replaced = self._allocate(values, add=False)
        replaced.view(-1).copy_(values)
        if self.sum_of_squares is not None:
            self._step.unsquared[self] = replaced
            self._step.send()

    def squares(self, others: Iterable[Gradient]) -> float | None:
        """Return the rows' sum of squares; None if it was not launched. A single wait also completes those of `others`."""
        if self._spill is not None:
            return self._spill.squares(self.record)
        if self.sum_of_squares is None:
            return None
        return self.sum_of_squares.value(other.sum_of_squares for other in others if other.sum_of_squares is not None)

    def drop(self) -> None:
        """Forget the values of this step."""
        self.state, self.is_agreed, self.pending_segments, self.sum_of_squares = GradientState.EMPTY, False, 0, None
        self.exposed = None
        if not self._step.rules.keeps_rows:
            self.values = None


class Arrivals:
    """The gradients that have arrived in a backward, the units' order of reduction, and which units are ready."""

    def __init__(
        self, units: Sequence[Unit], gradients: Mapping[ParameterRecord, Gradient], step: GradientStep
    ) -> None:
        trained = ([gradients[record] for record in unit.owned if record in gradients] for unit in reversed(units))
        self._units = [unit for unit in trained if unit]
        for unit in self._units:
            for gradient in unit:
                gradient.unit = unit
        self._order: Sequence[int] = range(len(self._units))
        """Indices of the units, in reduction order."""
        self.unit_of = {gradient: index for index, unit in enumerate(self._units) for gradient in unit}
        self.num_due = [0] * len(self._units)
        """Expected gradients of each unit that have not arrived as often as expected."""
        self._step = step
        self.num_sent = 0
        """Units that `ready` has yielded."""
        self.last_unit: int | None = None
        """The unit of the last gradient taken without a reduction."""
        self._arrived: list[Gradient] = []
        """Gradients in arrival order, recorded until the unit order is fixed."""

    @property
    def units(self) -> list[list[Gradient]]:
        """The gradients that are reduced together, in the order of reduction."""
        return [self._units[index] for index in self._order]

    def start(self) -> None:
        """Prepare for a backward."""
        self.num_sent, self.last_unit = 0, None
        self._arrived.clear()
        for index, unit in enumerate(self._units):
            self.num_due[index] = sum(gradient.expected > 0 for gradient in unit)
            for gradient in unit:
                gradient.num_arrivals = 0

    def count(self, gradient: Gradient) -> bool:
        """Count the arrival of a gradient, or a part of it; return whether it has arrived as often as expected."""
        gradient.num_arrivals += 1
        if gradient.num_arrivals == gradient.expected:
            self.num_due[self.unit_of[gradient]] -= 1
        if gradient.num_arrivals == 1 and not self._step.order_is_agreed:
            self._arrived.append(gradient)
        return gradient.num_arrivals >= gradient.expected

    def ready(self, *, remaining: bool = False) -> Iterator[list[Gradient]]:
        """Yield the expected gradients of each complete unit, up to the first incomplete one; or of all `remaining` units."""
        while self.num_sent < len(self._order) and (remaining or not self.num_due[self._order[self.num_sent]]):
            self.num_sent += 1
            yield [gradient for gradient in self._units[self._order[self.num_sent - 1]] if gradient.expected]

    def agree_on_order(self, world: World) -> None:
        """Use the order in which rank 0's units were completed in this backward (all ranks)."""
        complete = dict.fromkeys(self.unit_of[gradient] for gradient in reversed(self._arrived))
        indices: list[int] = world.broadcast_object(list(reversed(complete)))
        self._order = list(dict.fromkeys((*indices, *self._order)))
        self._step.order_is_agreed = True


class _Hooks(dict[int, Callable[[torch.Tensor], object]]):
    """The post-accumulate hooks of a parameter. The engine's hook stays last, so that other hooks see the gradient before
    it is taken."""

    ENGINE = -1

    def __setitem__(self, key: int, hook: Callable[[torch.Tensor], object]) -> None:
        engine_hook = self.pop(self.ENGINE, None)
        super().__setitem__(key, hook)
        if engine_hook is not None and key != self.ENGINE:
            super().__setitem__(self.ENGINE, engine_hook)


def watch_gradient(record: ParameterRecord, arrived: Callable[[ParameterRecord], None]) -> Callable[[], object]:
    """Call the method `arrived` with the record whenever autograd has accumulated its gradient. The references are weak, since
    the garbage collector cannot see references held by autograd's hooks. Return the function that removes the hook."""
    weak_method, weak_record, parameter = (
        weakref.WeakMethod(arrived),
        weakref.ref(record),
        cast("Any", record.parameter),
    )

    def accumulated(_: torch.Tensor) -> None:
        method, live_record = weak_method(), weak_record()
        if method is not None and live_record is not None:
            method(live_record)

    def call_earlier(tensor: torch.Tensor) -> None:
        for hook in list(earlier.values()):  # their handles remove them from this dict
            hook(tensor)

    earlier, hooks = parameter._post_accumulate_grad_hooks, _Hooks()
    if earlier:
        hooks[0] = call_earlier
    hooks[_Hooks.ENGINE] = accumulated
    parameter._post_accumulate_grad_hooks = hooks
    return partial(hooks.pop, _Hooks.ENGINE, None)


def take_gradient(record: ParameterRecord) -> torch.Tensor | None:
    """Return the gradient of the parameter, contiguous, and remove it from the parameter."""
    gradient = record.parameter.grad
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        raise UsageError(
            f"parameter {record.name!r} has a sparse gradient; build the module with sparse=False (nn.Embedding)"
        )
    record.parameter.grad = None
    return plain_memory(gradient)
