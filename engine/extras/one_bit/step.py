"""Steps of the optimizers that send signs: every rank takes them over whole tensors, by their rule.

[Note: the state of one rank]
Masters and shared slots are whole on every rank and the same there, so they are in the store like any state. The state of
one rank alone, errors of messages and own slots, is kept here, and a checkpoint has it in rows by rank, beside the client's
state, which rank 0 writes. At another world size each rank starts from the mean of the rows, which keeps the sum that the
ranks still owe; the server errors, which belong to chunks of that many ranks, start from zero.

The phase of a parameter follows from its own number of updates: one of which no rank has a gradient takes no part in a
step, as with any optimizer. A rank that fails ends the exchanges in which the others wait for it.

[Note: two phases]
The mean of tensors sent as signs, with error feedback (https://arxiv.org/abs/2102.02888, section 4): rank r averages chunk r.
1. Each rank adds the loss of its last messages (the worker error), sends each chunk as signs and a scale to the rank that
   averages it, and keeps the new loss.
2. That rank adds the messages up in the order of the ranks, divides, adds the loss of its own last message (the server
   error), and sends the mean as signs and a scale to all, keeping the loss.
All ranks decode the same bytes, so that they have the same bits. The scale, the mean of the absolute values, loses least: the
loss is shorter than the message, so that errors that are fed back do not grow (https://arxiv.org/abs/1901.09847, lemma 8).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from zstore.format import round_up
from zstore.ranks.world import World, on_device

from ...optim.kernel import Kernel
from ...optim.rules import Kind, Rule, register
from ...optim.state import OptimizerState
from ...optim.stepper import Stepper, whole_gradient
from ...optim.update import Changes
from ...params.record import ParameterRecord
from ...plan.plan import Slots, TensorSlot
from .rules import AdamRule, LambRule, TensorState, ZeroOneRule

_PER_BYTE = 8
_SCALE_BYTES = 4


def chunk_numel(numel: int, world_size: int) -> int:
    """Return how many elements of a tensor each rank averages, padding included: whole bytes of signs."""
    return round_up(-(-numel // world_size), _PER_BYTE)


def encode(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return `rows` [k, n] (fp32, n a multiple of 8) as bytes [k, n / 8 + 4]: signs, the lowest bit first and zero positive,
    then the scale, for which `counts` elements of each row count: behind them there are zeros."""
    bits = (rows >= 0).view(rows.shape[0], -1, _PER_BYTE).to(torch.uint8)
    shifts = torch.arange(_PER_BYTE, dtype=torch.uint8, device=rows.device)
    signs = (bits << shifts).sum(dim=2, dtype=torch.uint8)
    scales = rows.abs().sum(dim=1) / on_device([max(count, 1) for count in counts], torch.float32, rows.device)
    return torch.cat([signs, scales.view(-1, 1).view(torch.uint8)], dim=1)


def decode(encoded: torch.Tensor) -> torch.Tensor:
    """Return the values [k, n], fp32, of bytes [k, n / 8 + 4]: plus or minus the row's scale."""
    scales = encoded[:, -_SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    shifts = torch.arange(_PER_BYTE, dtype=torch.uint8, device=encoded.device)
    bits = (encoded[:, :-_SCALE_BYTES].unsqueeze(2) >> shifts) & 1
    return torch.where(bits.view(encoded.shape[0], -1).bool(), scales, -scales)


def compressed_mean(world: World, errors: Mapping[str, torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """Return the mean of `values` [numel], fp32, over the ranks as it is after both phases: the same bits on every rank (all
    ranks). The `errors`, fp32, are changed: worker_error [numel] and server_error [chunk_numel]. See [Note: two phases]."""
    if world.world_size == 1:
        return values
    worker, server = errors["worker_error"], errors["server_error"]
    ranks, numel, chunk = world.world_size, values.numel(), server.numel()
    counts = [min(max(numel - rank * chunk, 0), chunk) for rank in range(ranks)]
    meant = torch.zeros(ranks, chunk, device=values.device)
    torch.add(values, worker, out=meant.view(-1)[:numel])
    sent = encode(meant, counts)
    torch.sub(meant.view(-1)[:numel], decode(sent).view(-1)[:numel], out=worker)
    received = torch.empty_like(sent)
    world.all_to_all(received, sent, kind="all_to_all").wait()
    mean, count = torch.zeros_like(server), counts[world.rank]
    for one in decode(received):  # in this order on every device
        mean += one
    mean.div_(ranks).add_(server)[count:] = 0
    mine = encode(mean.view(1, -1), [count])
    torch.sub(mean, decode(mine).view(-1), out=server)[count:] = 0
    world.all_gather(received.view(-1), mine.view(-1))
    return decode(received).view(-1)[:numel]


def error_numels(numel: int, world_size: int) -> dict[str, int]:
    """Return the elements of the errors that a rank keeps of a tensor: none if nothing is sent."""
    if world_size == 1 or not numel:
        return {}
    return {"worker_error": numel, "server_error": chunk_numel(numel, world_size)}


class OneBitStep(Stepper):
    """Takes the updates of a run with an optimizer that sends signs (all ranks). See [Note: the state of one rank]."""

    keeps_state = owns_gradients = True

    def __init__(self, client: torch.optim.Optimizer, state: OptimizerState, world: World) -> None:
        self._groups = client.param_groups
        self._state = state
        self._world = world
        self.name = type(client).__name__
        self.own: dict[ParameterRecord, dict[str, torch.Tensor]] = {}
        """This rank's own state of each parameter, 1-D."""
        for record in (record for record in state.scalars if record.numel):
            sizes = dict.fromkeys(self._rule_of(record)[0].own_slots, record.numel)
            sizes |= error_numels(record.numel, world.world_size)
            self.own[record] = {name: torch.zeros(size, device=record.full.device) for name, size in sizes.items()}

    def _rule_of(self, record: ParameterRecord) -> tuple[AdamRule, int]:
        """Return the rule of a parameter, and the number of its group."""
        return cast("tuple[AdamRule, int]", self._state.kernel_of(record))

    # -- steps ------------------------------------------------------------------------------------------------------

    def averaged(self) -> set[ParameterRecord]:
        exact = set()
        for record, scalars in self._state.scalars.items():
            rule, group = self._rule_of(record)
            if rule.phase(self._groups[group], int(scalars["step"]) + 1) == "exact":
                exact.add(record)
        return exact

    def agreed_norm(self, norm: float) -> float:
        """Return the root of the mean square of the ranks' norms: their gradients may be their own."""
        mine = torch.tensor([norm], dtype=torch.float64, device=self._world.device)
        everyone = mine.new_empty(self._world.world_size)
        self._world.all_gather(everyone, mine, kind="control")
        return float(everyone.square().mean().sqrt())

    def run(self, changes: Changes) -> None:
        mine = [record for record in changes.records if record.numel]

        def step() -> None:
            for record in mine:
                rule, state = self._tensor(record, changes.settings.groups)
                gradient = whole_gradient(self._state, changes, record, state.master)
                rule.update(state, gradient, partial(compressed_mean, self._world, self.own[record]))
                self._keep(record, state)

        try:
            with torch.no_grad():
                self._state.change_whole([self._state.arrays_of(record) for record in mine], step)
        except Exception as error:
            self._world.watch.escaped(error)  # the others wait in an exchange
            raise

    def _tensor(self, record: ParameterRecord, groups: Sequence[Mapping[str, Any]]) -> tuple[AdamRule, TensorState]:
        """Return a parameter's rule, and its state as the rule takes it."""
        rule, group = self._rule_of(record)
        slots = {name: self._state.whole_slot(record, name) for name in rule.slots} | self.own[record]
        scalars = {**rule.initial(), **self._state.scalars[record]}  # that of an AdamW has the step count alone
        return rule, TensorState(groups[group], scalars, self._state.whole_master(record), slots)

    def _keep(self, record: ParameterRecord, state: TensorState) -> None:
        self._state.scalars[record] = state.scalars
        if not self._state.is_master(record):
            self._state.transfers.copy_into(record.owned(), state.master)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the ranks' own state in rows, by parameter name: on rank 0 all of it, elsewhere nothing (all ranks)."""
        found: dict[str, Any] = {}
        for record, own in self.own.items():
            kept = found[record.name] = {}
            for name, mine in own.items():
                rows = mine.new_empty(self._world.world_size, mine.numel())
                self._world.all_gather(rows.view(-1), mine)
                if self._world.rank == 0:
                    kept[name] = rows.cpu()
        return found

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        with torch.no_grad():
            for record, own in self.own.items():
                for name, target in own.items():
                    rows = saved.get(record.name, {}).get(name, torch.zeros(1, target.numel()))
                    row = rows[self._world.rank] if len(rows) == self._world.world_size else rows.mean(dim=0)
                    target.copy_(row if row.shape == target.shape else torch.zeros_like(target))
                rule, state = self._tensor(record, self._groups)
                rule.restore(state)
                self._keep(record, state)


class OneBitAdam(torch.optim.Optimizer):
    """The parameter groups of 1-bit Adam, which a config names."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: the engine takes the steps."""


class ZeroOneAdam(OneBitAdam):
    """Those of 0/1 Adam."""


class OneBitLamb(OneBitAdam):
    """Those of 1-bit LAMB."""


RULES: dict[Kind, AdamRule] = {OneBitAdam: AdamRule(), ZeroOneAdam: ZeroOneRule(), OneBitLamb: LambRule()}


def _slots(kernel: Kernel, shape: Sequence[int], world_size: int) -> Slots:
    """Return a rank's arrays for a parameter of `shape`."""
    errors = error_numels(math.prod(shape), world_size).items()
    return (*kernel.slots, *cast("AdamRule", kernel).own_slots, *(TensorSlot(name, (numel,)) for name, numel in errors))


register(
    Rule(
        kinds=tuple(RULES),
        kernel=lambda kind, _: RULES[kind],
        stepper=OneBitStep,
        slots=_slots,
        make=lambda kind, groups, arguments, _: kind(groups, dict(arguments)),
    )
)
