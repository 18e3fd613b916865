"""Gradients between backward and update: accumulated, averaged over ranks, this rank's rows handed out.

[Note: who holds gradients]
Between two backwards no parameter has a `.grad`: the engine holds them. So nothing that a training loop does to `.grad`
between `backward` and `step` (zero_grad, clip_grad_norm_) changes the training.

[Note: sharded gradients]
At stages 2 and 3 a unit's gradients are reduced as soon as the last of them has come, in one order of units that is
the same on every rank, on a process group of their own, asynchronously: a rank whose unit is late holds up no other
collective. A unit waits for the parameters that had a gradient on any rank in the backward before. What comes
unexpectedly or late is agreed on and reduced at the end of the backward. The order is the reverse of the modules' at
first, then the one that rank 0 saw in the first backward. Each reduced row is added to the row held so far, in the
parameter's type.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from zstore.dist import World
from zstore.errors import UsageError

from .collectives import Reduction, pack, plan_buckets, reduce_whole
from .parameters import ParameterRecord
from .sharding import Sharding
from .units import Unit


class Gradients(Protocol):
    """What the engine asks of gradients, in this order: for each micro-batch start_backward, end_backward (or drop,
    where the backward failed); then for the update reduce, owned, drop."""

    def start_backward(self) -> None:
        """Make ready for a backward."""

    def end_backward(self) -> None:
        """Take the gradients of a backward (all ranks)."""

    def reduce(self) -> None:
        """Average over ranks what is not averaged yet, and agree on which parameters have a gradient (all ranks)."""

    def owned(self, record: ParameterRecord) -> torch.Tensor | None:
        """Return this rank's rows, 1-D, of the averaged gradient; None where no rank had a gradient."""

    def drop(self) -> None:
        """Forget all gradients."""

    def held_bytes(self) -> int:
        """Return the bytes of gradients held now."""

    def close(self) -> None:
        """Take the hooks off the parameters."""


class WholeGradients:
    """Gradients accumulated by autograd in whole, reduced once a step (stages 0 and 1, and any stage on one rank)."""

    def __init__(
        self,
        records: Sequence[ParameterRecord],
        others: Sequence[torch.nn.Parameter],
        world: World,
        sharding: Sharding,
        limit_numel: int,
        arrived: Callable[[ParameterRecord], None] | None = None,
    ) -> None:
        self._records = records
        self._others = others
        self._world = world
        self._everywhere = not sharding.optimizer_state
        self._limit_numel = limit_numel
        self._held: dict[ParameterRecord, torch.Tensor] = {}
        self._handles: list[RemovableHandle] = []
        if arrived is not None:
            for record in records:
                tell = partial(_tell, record, arrived)
                handle = record.parameter.register_post_accumulate_grad_hook(tell)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def start_backward(self) -> None:
        """See Gradients."""
        for record in self._records:
            record.parameter.grad = self._held.get(record)

    def end_backward(self) -> None:
        """See Gradients."""
        for record in self._records:
            gradient = take_gradient(record)
            if gradient is not None:
                self._held[record] = gradient
        forget_gradients(self._others)

    def reduce(self) -> None:
        """See Gradients."""
        had = agree_any(self._world, [record in self._held for record in self._records])
        agreed = [record for record, any_ in zip(self._records, had, strict=True) if any_]
        if self._world.world_size > 1:
            for record in agreed:
                if record not in self._held:
                    self._held[record] = torch.zeros(record.numel, dtype=record.dtype, device=record.full.device)
            reduce_whole(self._world, agreed, self._limit_numel, self._flat, everywhere=self._everywhere)

    def _flat(self, record: ParameterRecord) -> torch.Tensor:
        return self._held[record].view(-1)

    def owned(self, record: ParameterRecord) -> torch.Tensor | None:
        """See Gradients."""
        if record not in self._held:
            return None
        first, stop = record.owned_range
        return self._flat(record)[first:stop]

    def whole(self, record: ParameterRecord) -> torch.Tensor | None:
        """Return this rank's own gradient, as accumulated so far and not averaged; None where it has none."""
        return self._held.get(record)

    def drop(self) -> None:
        """See Gradients."""
        self._held.clear()
        forget_gradients([record.parameter for record in self._records])

    def held_bytes(self) -> int:
        """See Gradients."""
        return sum(gradient.nbytes for gradient in self._held.values())

    def close(self) -> None:
        """See Gradients."""
        for handle in self._handles:
            handle.remove()
        self.drop()


def _tell(record: ParameterRecord, arrived: Callable[[ParameterRecord], None], _: torch.Tensor) -> None:
    arrived(record)


class ShardedGradients:
    """Gradients of which each rank holds its own rows alone. See [Note: sharded gradients]."""

    def __init__(
        self,
        units: Sequence[Unit],
        others: Sequence[torch.nn.Parameter],
        world: World,
        limit_numel: int,
        arrived: Callable[[ParameterRecord], None],
    ) -> None:
        self._order = [unit for unit in reversed(units) if any(record.group is not None for record in unit.owned)]
        self._records = [record for unit in units for record in unit.owned if record.group is not None]
        self._unit_of = {record: unit for unit in self._order for record in unit.owned}
        self._others = others
        self._world = world
        self._reduce_world = world.second()
        self._limit_numel = limit_numel
        self._tell = arrived
        self._expected = set(self._records)
        self._rows: dict[ParameterRecord, torch.Tensor] = {}
        self._filled: set[ParameterRecord] = set()
        self._agreed: set[ParameterRecord] = set()
        self._order_is_agreed = False
        self._fired: dict[ParameterRecord, None] = {}
        self._due: dict[Unit, set[ParameterRecord]] = {}
        self._next = 0
        self._in_backward = False
        self._under_way: deque[tuple[Reduction, set[ParameterRecord]]] = deque()
        self._handles: list[RemovableHandle] = []
        for record in self._records:
            handle = record.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._hook(record)
            )
            self._handles.append(handle)

    def _hook(self, record: ParameterRecord) -> Callable[[torch.Tensor], None]:
        def accumulated(_: torch.Tensor) -> None:
            self._arrived(record)

        return accumulated

    def start_backward(self) -> None:
        """See Gradients."""
        self._fired.clear()
        self._next = 0
        self._in_backward = True
        self._due = {unit: {r for r in unit.owned if r in self._expected} for unit in self._order}

    def _arrived(self, record: ParameterRecord) -> None:
        if not self._in_backward:
            raise UsageError(
                "a backward that the engine does not know of: call engine.backward(loss), not loss.backward()"
            )
        self._fired[record] = None
        self._due[self._unit_of[record]].discard(record)
        while self._next < len(self._order) and not self._due[self._order[self._next]]:
            self._send_unit()
        self._tell(record)

    def _send_unit(self) -> None:
        unit = self._order[self._next]
        self._next += 1
        self._send([record for record in unit.owned if record in self._expected])

    def _send(self, records: Sequence[ParameterRecord]) -> None:
        """Start the reduction of these gradients and take them off their parameters."""
        gradients = {record: take_gradient(record) for record in records}
        fresh = {record for record in records if record not in self._filled}
        self._filled |= fresh

        def flat(record: ParameterRecord) -> torch.Tensor | None:
            gradient = gradients[record]
            return None if gradient is None else gradient.view(-1)

        for bucket in plan_buckets(records, self._world.world_size, self._limit_numel):
            matrix = pack(bucket, self._world.world_size, flat)
            self._under_way.append((Reduction(self._reduce_world, bucket, matrix, "reduce_scatter"), fresh))
        gradients.clear()
        while self._under_way and self._under_way[0][0].done():
            self._add_up()

    def _add_up(self) -> None:
        """Wait for the oldest reduction; its rows are the first of the step, or are added to those held."""
        reduction, fresh = self._under_way.popleft()
        row = reduction.finish()
        for segment in reduction.bucket.segments:
            record = segment.record
            first, stop = record.owned_range
            held = self._rows.get(record)
            if held is None:
                held = self._rows[record] = torch.empty(stop - first, dtype=record.dtype, device=row.device)
            rows = held[segment.first : segment.stop]
            part = row[segment.offset : segment.offset + rows.numel()]
            if record in fresh:
                rows.copy_(part)
            else:
                rows.add_(part)

    def end_backward(self) -> None:
        """See Gradients."""
        while self._next < len(self._order):
            self._send_unit()
        left = [record.parameter.grad is not None for record in self._records]
        came = agree_any(self._world, [record in self._fired for record in self._records] + left)
        fired, late = came[: len(left)], came[len(left) :]
        self._send([record for record, any_ in zip(self._records, late, strict=True) if any_])
        while self._under_way:
            self._add_up()
        self._expected = {record for record, any_ in zip(self._records, fired, strict=True) if any_}
        self._agreed |= self._expected
        if not self._order_is_agreed:
            self._agree_on_order()
        forget_gradients(self._others)
        self._in_backward = False

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

    def reduce(self) -> None:
        """See Gradients."""

    def owned(self, record: ParameterRecord) -> torch.Tensor | None:
        """See Gradients."""
        return self._rows.get(record) if record in self._agreed else None

    def drop(self) -> None:
        """See Gradients."""
        self._in_backward = False
        self._under_way.clear()
        self._filled.clear()
        self._agreed.clear()
        forget_gradients([record.parameter for record in self._records])

    def held_bytes(self) -> int:
        """See Gradients."""
        return sum(rows.nbytes for rows in self._rows.values())

    def close(self) -> None:
        """See Gradients."""
        for handle in self._handles:
            handle.remove()
        self.drop()


def take_gradient(record: ParameterRecord) -> torch.Tensor | None:
    """Return the gradient of the parameter, contiguous, and leave the parameter without one."""
    gradient = record.parameter.grad
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        raise UsageError(
            f"parameter {record.name!r} has a sparse gradient; build the module with sparse=False (nn.Embedding)"
        )
    record.parameter.grad = None
    return gradient.contiguous()


def forget_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Leave the parameters without gradients."""
    for parameter in parameters:
        parameter.grad = None


def agree_any(world: World, flags: Sequence[bool]) -> list[bool]:
    """Return for each flag whether any rank has it set (all ranks)."""
    if world.world_size == 1 or not flags:
        return list(flags)
    mine = torch.tensor(flags, dtype=torch.uint8, device=world.device)
    everyone = torch.empty(world.world_size * len(flags), dtype=torch.uint8, device=world.device)
    world.all_gather(everyone, mine, kind="control")
    return [bool(flag) for flag in everyone.view(world.world_size, -1).amax(dim=0).tolist()]
