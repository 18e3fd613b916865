"""Gradients between backward and update: accumulated, averaged over ranks, this rank's rows handed out.

The engine holds them; a training loop's view of them in `.grad` is in [Note: gradients between backward and step].
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from zstore.errors import UsageError, listed
from zstore.io.tensors import plain_memory
from zstore.ranks.world import World, on_device

from ..params.record import ParameterRecord
from ..params.sharding import add_in, is_narrower
from .collectives import reduce_whole
from .exchanges import GradientRules
from .sharded_gradient import GradientActs, ShardedGradient

_NAMED = 5
"""Parameters that an error names."""


INCOMPLETE = (
    "the gradient of parameter {!r} is set before the last backward of the step: set it after that one, before step()"
)


class Gradients(ABC):
    """The gradients of `records`; `others` are parameters that get gradients although they are not trained.

    The engine calls, in this order: for each micro-batch start_backward, end_backward, show (or drop, if the backward
    failed); then for the update reduce, has, squares, take, drop.
    """

    def __init__(
        self, records: Sequence[ParameterRecord], others: Sequence[nn.Parameter], world: World, rules: GradientRules
    ) -> None:
        self._records = records
        self._others = others
        self._world = world
        self._rules = rules
        self.overlapped = 0
        """Reductions that overlapped with other work of this rank."""
        self.backwards = 0
        """Backwards of this step, the one under way included."""
        self._last = False
        """Whether the last backward of this step has begun."""
        self._watches: list[Callable[[], object]] = []
        self.acts: GradientActs | None = None
        """Serves the loop's use of gradients that it cannot have whole; None: `.grad` stays None."""
        self.sums: dict[ParameterRecord, Sequence[float]] | None = None
        """Sums of squares of each shard, over all ranks, once computed in this step."""
        self.scales: dict[ParameterRecord, float] = {}
        """The loop's factors of gradients that it cannot have whole."""
        self.clipped: set[ParameterRecord] = set()
        """Whole gradients that were clipped in place."""
        self._shown: dict[ParameterRecord, torch.Tensor] = {}
        """The tensors that were put into `.grad`."""
        self._stand_ins: dict[ParameterRecord, ShardedGradient] = {}

    def start_backward(self, *, last: bool) -> None:
        """Prepare for a backward, the `last` of its step or not."""
        self.hide()
        self.backwards += 1
        self._last = last

    @property
    def _several(self) -> bool:
        """Whether this step has more than one backward, as far as is known."""
        return self.backwards > 1 or not self._last

    def _total(self, record: ParameterRecord) -> torch.dtype:
        """Return the type of the sum of the gradients so far and the new ones."""
        return self._rules.types.held(record.dtype, several=self.backwards > 1)

    def _of_step(self, record: ParameterRecord) -> torch.dtype:
        """Return the type of the sum of the step's gradients, as far as it is known how many there are."""
        return self._rules.types.held(record.dtype, several=self._several)

    @abstractmethod
    def end_backward(self) -> None:
        """Take the gradients of a backward (all ranks)."""

    @abstractmethod
    def show(self, *, whole: bool) -> None:
        """Put the gradients of the step so far into `.grad`; without `whole` none of them is that of a plain loop (all
        ranks). See [Note: gradients between backward and step]."""

    def _show(self, record: ParameterRecord, gradient: torch.Tensor | None = None) -> None:
        """Put a gradient into `.grad`; None: a `ShardedGradient` in its place."""
        if gradient is None:
            if self.acts is None:
                return
            gradient = self._stand_ins.get(record)
            if gradient is None:
                gradient = self._stand_ins[record] = ShardedGradient.of(record, self.acts)
        record.parameter.grad = self._shown[record] = gradient

    @property
    def are_cleared(self) -> bool:
        """Whether the training loop has set all gradients that were shown to None, as `zero_grad()` of torch does."""
        return bool(self._shown) and all(record.parameter.grad is None for record in self._shown)

    def hide(self) -> None:
        """Take the gradients of the step so far out of `.grad`, as the loop left them there, and keep them."""
        self.adopt()
        forget_gradients([record.parameter for record in self._shown])
        self._shown.clear()

    def adopt(self) -> None:
        """Take over the gradients that the training loop put into `.grad` in place of those shown there.

        Raises UsageError if one is not whole on this rank.
        """
        for record in self._records:
            found, shown = record.parameter.grad, self._shown.get(record)
            if found is shown:
                continue
            if isinstance(shown, ShardedGradient) or not self._replace(record, take_gradient(record)):
                raise UsageError(
                    f"the .grad of parameter {record.name!r} was replaced or cleared between backward() and step(), but its "
                    "gradient is not whole on this rank, so that the step would not know. Multiply .grad in place by a number, "
                    "change the loss, or forget all with engine.zero_grad(); with requires_grad=False there is no gradient"
                )

    def _replace(self, record: ParameterRecord, gradient: torch.Tensor | None) -> bool:
        """Use a whole gradient that is no longer in `.grad`, None: none, in place of the parameter's own; return whether
        that is possible."""
        return False

    def clip(self, factor: float) -> None:
        """Multiply the whole fp32 gradients by `factor` in place: a plain loop sees clipped ones too. Others are clipped
        in the update, whose bits are those of one product in fp32: `.grad` is their placeholder from now on."""
        whole = [r for r, shown in self._shown.items() if not isinstance(shown, ShardedGradient)]
        here = [record for record in whole if record.dtype == torch.float32]
        if factor != 1.0 and here:
            torch._foreach_mul_([self._shown[record] for record in here], float(np.float32(factor)))
        self.clipped.update(here)
        for record in whole:
            if record.dtype != torch.float32:
                self._show(record)

    @abstractmethod
    def reduce(self) -> None:
        """Average the gradients that are not averaged yet, and agree on which parameters have one (all ranks)."""

    @abstractmethod
    def has(self, record: ParameterRecord) -> bool:
        """Return whether any rank had a gradient of the parameter in this step."""

    def require(self, records: Sequence[ParameterRecord], step: int, changed: str) -> None:
        """Raise UsageError, on every rank, that names those of `records` to which no rank's loss led in a step, and says
        what was `changed`."""
        unused = [record.name for record in records if not self.has(record)]
        if unused:
            raise UsageError(
                f"step {step}: on no rank was there a gradient for {listed([repr(name) for name in unused], _NAMED)}; "
                f"{changed}. Use them in the loss, freeze them with requires_grad_(False) before initialize(), or set "
                "zero_optimization.ignore_unused_parameters to true"
            )

    @abstractmethod
    def owned(self, record: ParameterRecord) -> torch.Tensor | None:
        """Return this rank's rows, 1-D, of the averaged gradient; None if there are none in memory."""

    @abstractmethod
    def replace(self, record: ParameterRecord, full: torch.Tensor) -> None:
        """Use `full`, 1-D [numel], the same on every rank, as the averaged gradient of a parameter that has one (all ranks).

        Raises UsageError if the gradient is not complete, or waits on disk.
        """

    def take(self, record: ParameterRecord) -> torch.Tensor | None:
        """Return the same as `owned`, for the update, which may change it; the caller keeps it alive."""
        return self.owned(record)

    def squares(self, record: ParameterRecord) -> float | None:
        """Return the sum of squares of this rank's rows if it is known already; None: take it from `owned`."""
        return None

    def drop(self) -> None:
        """Forget all gradients."""
        self.backwards, self._last, self.sums = 0, False, None
        self.scales.clear()
        self.clipped.clear()
        self._shown.clear()
        forget_gradients([record.parameter for record in self._records])

    def free(self) -> None:
        """Forget all gradients, and free the memory that is kept for the next ones."""
        self.drop()

    @abstractmethod
    def held_bytes(self) -> int:
        """Return the bytes of gradients held now."""

    def close(self) -> None:
        """Remove the hooks from the parameters, and forget all gradients."""
        while self._watches:
            self._watches.pop()()
        self.drop()


class WholeGradients(Gradients):
    """Gradients accumulated in whole, reduced once a step (stages 0 and 1, and any stage on one rank).

    If they accumulate in the parameter's type autograd does it: the held gradient goes back to `.grad` for the next
    backward. If the type is another one (see [Note: types of gradients]), each gradient is added to the held one as soon as
    it came as often as in the backward before, so that few at a time exist in the parameters' type.
    """

    def __init__(
        self, records: Sequence[ParameterRecord], others: Sequence[nn.Parameter], world: World, rules: GradientRules
    ) -> None:
        super().__init__(records, others, world, rules)
        self.averaged: Callable[[], set[ParameterRecord]] | None = None
        """Returns those of the step that are averaged over ranks; of others each rank keeps its own. None: all are."""
        self._alone = world.world_size == 1
        self._held: dict[ParameterRecord, torch.Tensor] = {}
        """In the parameters' shapes."""
        self._folded: set[ParameterRecord] = set()
        """Those whose gradients of this backward are added here, not by autograd."""
        self._fired: Counter[ParameterRecord] = Counter()
        self._expected: Counter[ParameterRecord] = Counter(dict.fromkeys(records, 1))
        """How often each gradient came in the last backward in which it was counted."""
        self._is_reduced = False
        """Whether the held gradients are the mean over ranks."""

    def start_backward(self, *, last: bool) -> None:
        super().start_backward(last=last)
        self._is_reduced = False
        self._fired.clear()
        self._folded = {record for record in self._records if self._is_folded(record)}
        if self._folded and not self._watches:
            trained = [record for record in self._records if record.parameter.requires_grad]
            self._watches = [watch_gradient(record, self._arrived) for record in trained]
        for record in self._records:
            record.parameter.grad = None if record in self._folded else self._held.get(record)

    def _is_folded(self, record: ParameterRecord) -> bool:
        held, wanted = self._held.get(record), self._of_step(record)
        return wanted != record.dtype or (held is not None and held.dtype != wanted)

    def _arrived(self, record: ParameterRecord) -> None:
        if record in self._folded:
            self._fired[record] += 1
            if self._fired[record] >= self._expected[record]:
                self._fold(record)

    def _fold(self, record: ParameterRecord) -> None:
        """Take the gradient off the parameter and add it to the held one."""
        gradient = take_gradient(record)
        if gradient is None:
            return
        held, room = self._held.get(record), self._of_step(record)
        if held is None:
            self._held[record] = gradient.to(room)
            return
        if is_narrower(held.dtype, room):
            self._held[record] = held = held.to(room)
        add_in(held, gradient, self._total(record))

    def end_backward(self) -> None:
        for record in self._records:
            if record in self._folded:
                self._fold(record)
                self._expected[record] = max(self._fired[record], 1)
            elif (gradient := take_gradient(record)) is not None:
                self._held[record] = gradient
        self._folded.clear()
        forget_gradients(self._others)

    def show(self, *, whole: bool) -> None:
        # An optimizer that averages some of them itself has each rank's own.
        whole = whole and self.averaged is None and (self._alone or not self._rules.scatter)
        if whole and self._last:
            self.reduce()
        whole = whole and (self._alone or self._is_reduced)
        for record, held in self._held.items():
            self._show(record, held if whole and held.dtype == record.dtype else None)

    def _replace(self, record: ParameterRecord, gradient: torch.Tensor | None) -> bool:
        if not (self._alone or self._is_reduced) or self.averaged is not None:
            return False
        self._held.pop(record, None)
        self._shown.pop(record, None)
        if gradient is not None:
            self._held[record] = gradient
            self._show(record, gradient)
        return True

    def reduce(self) -> None:
        self.adopt()
        if self._is_reduced:
            return
        self._is_reduced = True
        self._hold_zeros()
        averaged = self._held if self.averaged is None else self.averaged()
        if self._world.world_size > 1:
            self.overlapped += reduce_whole(
                self._world,
                [record for record in self._records if record in self._held and record in averaged],
                self._rules.bucket_numel,
                self._flat,
                self._rules.reduced,
                scatter=self._rules.exchanges.reduce if self._rules.scatter else None,
                overlap=self._rules.overlap,
            )

    def _hold_zeros(self) -> None:
        """Hold zeros for the gradients that other ranks alone have (all ranks)."""
        had = agree_any(self._world, [record in self._held for record in self._records])
        for record, any_ in zip(self._records, had, strict=True):
            if any_ and record not in self._held:
                self._held[record] = self._zeros(record).view(record.shape)

    def _zeros(self, record: ParameterRecord) -> torch.Tensor:
        return torch.zeros(record.numel, dtype=self._of_step(record), device=record.full.device)

    def _flat(self, record: ParameterRecord) -> torch.Tensor:
        return self._held[record].view(-1)

    def mean(self, record: ParameterRecord) -> torch.Tensor | None:
        """Return the mean over ranks of the step's gradient so far, 1-D [numel], a copy; None if no rank has
        any (all ranks)."""
        self.adopt()
        held = self._held.get(record)
        if self._is_reduced or self._alone:
            return None if held is None else held.reshape(-1).clone()
        if not agree_any(self._world, [held is not None])[0]:
            return None
        found = self._zeros(record) if held is None else held.reshape(-1).clone()
        reduce_whole(
            self._world, [record], self._rules.bucket_numel, lambda _: found, self._rules.reduced, scatter=None
        )
        return found

    def has(self, record: ParameterRecord) -> bool:
        return record in self._held

    def owned(self, record: ParameterRecord) -> torch.Tensor | None:
        if record not in self._held:
            return None
        flat, (first, stop) = self._flat(record), record.owned_range
        return flat if stop - first == flat.numel() else flat[first:stop]

    def replace(self, record: ParameterRecord, full: torch.Tensor) -> None:
        if not self._last:
            raise UsageError(INCOMPLETE.format(record.name))
        self.reduce()
        self._flat(record).copy_(full)

    def drop(self) -> None:
        super().drop()
        self._held.clear()
        self._folded.clear()
        self._is_reduced = False

    def held_bytes(self) -> int:
        return sum(gradient.nbytes for gradient in self._held.values())


class _Hooks(dict[int, Callable[[torch.Tensor], object]]):
    """The post-accumulate hooks of a parameter, of which the engine's is the last whenever others are registered: they see the
    gradient before it is taken."""

    OURS = -1

    def __setitem__(self, key: int, hook: Callable[[torch.Tensor], object]) -> None:
        ours = self.pop(self.OURS, None)
        super().__setitem__(key, hook)
        if ours is not None and key != self.OURS:
            super().__setitem__(self.OURS, ours)


def watch_gradient(record: ParameterRecord, arrived: Callable[[ParameterRecord], None]) -> Callable[[], object]:
    """Call `arrived`, a method, with the record each time that autograd added to its gradient, as long as its object
    exists: autograd holds the hook out of the collector's sight. Return the function that ends this."""
    method, known, parameter = weakref.WeakMethod(arrived), weakref.ref(record), cast("Any", record.parameter)

    def accumulated(_: torch.Tensor) -> None:
        tell, told = method(), known()
        if tell is not None and told is not None:
            tell(told)

    def call_former(tensor: torch.Tensor) -> None:
        for hook in list(former.values()):  # their handles remove them from there
            hook(tensor)

    former, hooks = parameter._post_accumulate_grad_hooks, _Hooks()
    if former:
        hooks[0] = call_former
    hooks[_Hooks.OURS] = accumulated
    parameter._post_accumulate_grad_hooks = hooks
    return partial(hooks.pop, _Hooks.OURS, None)


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
    return plain_memory(gradient)


def forget_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Leave the parameters without gradients."""
    for parameter in parameters:
        parameter.grad = None


def agree_any(world: World, flags: Sequence[bool]) -> list[bool]:
    """Return for each flag whether any rank has it set (all ranks)."""
    if world.world_size == 1 or not flags:
        return list(flags)
    mine = on_device(flags, torch.uint8, world.device)
    everyone = torch.empty(world.world_size * len(flags), dtype=torch.uint8, device=world.device)
    world.all_gather(everyone, mine, kind="control")
    return [bool(flag) for flag in everyone.view(world.world_size, -1).amax(dim=0).tolist()]
