"""Gradients between backward and update: accumulated, averaged over ranks, this rank's rows handed out.

[Note: who holds gradients]
Between two backwards no parameter has a `.grad`: the engine holds them. So nothing that a training loop does to `.grad`
between `backward` and `step` (zero_grad, clip_grad_norm_) changes the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zstore.dist import World
from zstore.errors import UsageError

from .collectives import reduce_whole
from .parameters import ParameterRecord
from .sharding import Sharding


class Gradients(Protocol):
    """What the engine asks of gradients, in this order: for each micro-batch start_backward, end_backward (or drop,
    where the backward failed); then for the update reduce, has, squares, take, drop."""

    overlapped: int
    """Reductions that went on while this rank did something else."""

    def start_backward(self, *, last: bool) -> None:
        """Make ready for a backward, the `last` of its step or not."""

    def end_backward(self) -> None:
        """Take the gradients of a backward (all ranks)."""

    def reduce(self) -> None:
        """Average over ranks what is not averaged yet, and agree on which parameters have a gradient (all ranks)."""

    def has(self, record: ParameterRecord) -> bool:
        """Return whether any rank had a gradient of the parameter in this step."""

    def owned(self, record: ParameterRecord) -> torch.Tensor | None:
        """Return this rank's rows, 1-D, of the averaged gradient; None where there are none in memory."""

    def take(self, record: ParameterRecord) -> torch.Tensor | None:
        """Return what `owned` returns, for the update, which may change it; whoever takes it keeps it alive."""

    def squares(self, record: ParameterRecord) -> float | None:
        """Return the sum of squares of this rank's rows where it is known already; None: take it from `owned`."""

    def drop(self) -> None:
        """Forget all gradients."""

    def held_bytes(self) -> int:
        """Return the bytes of gradients held now."""

    def close(self) -> None:
        """Take the hooks off the parameters."""


@dataclass(frozen=True, kw_only=True)
class ReduceRules:
    """How gradients are averaged over the ranks; the bits are the same."""

    bucket_numel: int
    """Most elements of one reduction."""
    scatter: bool = True
    """Each rank gets its rows of a sharded gradient alone, where that may be chosen; else all of it."""
    overlap: bool = True
    """Go on while a reduction is under way, where that may be chosen."""


class WholeGradients:
    """Gradients accumulated by autograd in whole, reduced once a step (stages 0 and 1, and any stage on one rank)."""

    def __init__(
        self,
        records: Sequence[ParameterRecord],
        others: Sequence[torch.nn.Parameter],
        world: World,
        sharding: Sharding,
        rules: ReduceRules,
    ) -> None:
        self._records = records
        self._others = others
        self._world = world
        self._everywhere = not (sharding.optimizer_state and rules.scatter)
        self._rules = rules
        self.overlapped = 0
        self._held: dict[ParameterRecord, torch.Tensor] = {}

    def start_backward(self, *, last: bool) -> None:
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
            self.overlapped += reduce_whole(
                self._world,
                agreed,
                self._rules.bucket_numel,
                self._flat,
                everywhere=self._everywhere,
                overlap=self._rules.overlap,
            )

    def _flat(self, record: ParameterRecord) -> torch.Tensor:
        return self._held[record].view(-1)

    def has(self, record: ParameterRecord) -> bool:
        """See Gradients."""
        return record in self._held

    def owned(self, record: ParameterRecord) -> torch.Tensor | None:
        """See Gradients."""
        if record not in self._held:
            return None
        first, stop = record.owned_range
        return self._flat(record)[first:stop]

    def whole(self, record: ParameterRecord) -> torch.Tensor | None:
        """Return this rank's own gradient, as accumulated so far and not averaged; None where it has none."""
        return self._held.get(record)

    def take(self, record: ParameterRecord) -> torch.Tensor | None:
        """See Gradients."""
        return self.owned(record)

    def squares(self, record: ParameterRecord) -> float | None:
        """See Gradients."""
        return None

    def drop(self) -> None:
        """See Gradients."""
        self._held.clear()
        forget_gradients([record.parameter for record in self._records])

    def held_bytes(self) -> int:
        """See Gradients."""
        return sum(gradient.nbytes for gradient in self._held.values())

    def close(self) -> None:
        """See Gradients."""
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
