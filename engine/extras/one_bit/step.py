"""The optimizers that send signs, and their steps in an engine: every rank takes them over whole tensors, by their rule.

[Note: the state of one rank]
Masters and shared slots are whole on every rank and the same there, so they are in the store like any state. The state of
one rank alone, errors of messages and own slots, is kept here, and a checkpoint has it in rows by rank, beside the client's
state, which rank 0 writes. At another world size each rank starts from the mean of the rows, which keeps the sum that the
ranks still owe; the server errors, which belong to chunks of that many ranks, start from zero.

The phase of a parameter follows from its own number of updates: one of which no rank has a gradient takes no part in a
step, as with any optimizer. A rank that fails goes on through the exchanges, since the others wait in them, and raises at
the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch

from zstore.errors import UsageError
from zstore.format import model_array, optimizer_array
from zstore.ranks.world import World

from ...config.config import load_config
from ...optim.kernel import Kernel, ParameterStep, Scalars, WholeStep
from ...optim.lion import called
from ...optim.rules import Rule, register
from ...optim.state import OptimizerState
from ...optim.stepper import Stepper, whole_gradient
from ...optim.update import Update
from ...params.record import ParameterRecord
from ...plan.plan import RanksSlot, Slots
from .exchange import chunk_numel, compressed_mean
from .rules import AdamRule, LambRule, Phase, TensorState, ZeroOneRule


class OneBitAdam(torch.optim.Optimizer):
    """1-bit Adam: parameter groups with settings, whose steps an engine takes. Arguments are those of a config's
    `optimizer.params`, by name; see docs/optimizers.md. Raises ConfigError for others."""

    rule: ClassVar[AdamRule] = AdamRule()

    def __init__(self, params: Any, **arguments: Any) -> None:
        name = type(self).__name__
        section: Any = load_config({"optimizer": {"type": name, "params": arguments}}, name=f"{name}(...)").settings
        super().__init__(params, section.optimizer.params.arguments())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Return the result of `closure`. Raises UsageError if a parameter has a gradient: its ranks' gradients are not
        averaged, and an engine must exchange their compressed form."""
        loss = called(closure)
        if any(parameter.grad is not None for group in self.param_groups for parameter in group["params"]):
            raise UsageError(
                f"{type(self).__name__} takes its steps in an engine, which exchanges what ranks send: pass it to "
                "zstore.initialize(optimizer=...) and call engine.step(), or use torch's AdamW or zstore.optim.Lamb"
            )
        return loss


class ZeroOneAdam(OneBitAdam):
    """0/1 Adam; the rest as `OneBitAdam`."""

    rule = ZeroOneRule()


class OneBitLamb(OneBitAdam):
    """1-bit LAMB; the rest as `OneBitAdam`."""

    rule = LambRule()


class OneBitKernel(Kernel):
    """Kernel of parameters that a rule updates: the slots that are the same on every rank are in the store."""

    def __init__(self, rule: AdamRule) -> None:
        self.rule = rule
        self.slots = tuple(name for name in rule.slots if name not in rule.own_slots)

    def initial(self) -> Scalars:
        return dict(self.rule.scalars)

    def start(self, group: Mapping[str, Any], scalars: Scalars) -> ParameterStep:
        """The step was taken, and counted, before."""
        return WholeStep(scalars)


class OneBitStep(Stepper):
    """Takes the updates of a run with an optimizer that sends signs (all ranks). See [Note: the state of one rank]."""

    keeps_state = owns_gradients = True

    def __init__(self, client: torch.optim.Optimizer, state: OptimizerState, world: World) -> None:
        self._groups = client.param_groups
        self._rule = cast("OneBitAdam", client).rule
        self._state = state
        self._world = world
        self.name = type(client).__name__
        self.own: dict[ParameterRecord, dict[str, torch.Tensor]] = {}
        """This rank's own state of each parameter, 1-D."""
        for record in self.records:
            sizes = dict.fromkeys(self._rule.own_slots, record.numel)
            if world.world_size > 1:
                sizes |= {"worker_error": record.numel, "server_error": chunk_numel(record.numel, world.world_size)}
            self.own[record] = {name: torch.zeros(size, device=record.full.device) for name, size in sizes.items()}
        self._phases: dict[ParameterRecord, Phase] = {}
        """Phases of the step under way."""
        self._collected: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def records(self) -> list[ParameterRecord]:
        return list(self._state.scalars)

    # -- before the update ------------------------------------------------------------------------------------------

    def averaged(self) -> set[ParameterRecord]:
        for record, scalars in self._state.scalars.items():
            group = self._groups[self._state.kernel_of(record)[1]]
            self._phases[record] = self._rule.phase(group, int(scalars["step"]) + 1)
        return {record for record, phase in self._phases.items() if phase == "exact"}

    def agreed_norm(self, norm: float) -> float:
        """Return the norm that all ranks go by: the root of the mean square of theirs if gradients are a rank's own, which
        is not finite if one is not (all ranks)."""
        if self._world.world_size == 1 or all(phase == "exact" for phase in self._phases.values()):
            return norm
        mine = torch.full((1,), norm, dtype=torch.float64, device=self._world.device)
        everyone = torch.empty(self._world.world_size, dtype=torch.float64, device=self._world.device)
        self._world.all_gather(everyone, mine, kind="control")
        return math.sqrt(float(everyone.square().mean())) if bool(everyone.isfinite().all()) else math.nan

    # -- the update -------------------------------------------------------------------------------------------------

    def run(self, update: Update) -> None:
        mine = [record for record in update.records if record.numel]
        shared = [name for name in self._rule.slots if name not in self._rule.own_slots]
        groups = [[model_array(one.name), *(optimizer_array(slot, one.name) for slot in shared)] for one in mine]
        errors: list[Exception] = []

        def step() -> None:
            for record in mine:
                self._step(record, update, errors)

        with torch.no_grad():
            self._state.change_whole(groups, step)
        if errors:
            raise errors[0]

    def _step(self, record: ParameterRecord, update: Update, errors: list[Exception]) -> None:
        """Update a parameter, or after an error of the step take part in its exchange alone."""
        own, owes = self.own[record], self._phases[record] == "compressed"

        def compressed(values: torch.Tensor) -> torch.Tensor:
            nonlocal owes
            owes = False
            if self._world.world_size == 1:
                return values.clone()
            return compressed_mean(self._world, values, own["worker_error"], own["server_error"])

        try:
            if not errors:
                group, state = update.settings.groups[self._state.kernel_of(record)[1]], self._tensor(record)
                gradient = whole_gradient(self._state, update, record, state.master)
                self._rule.update(group, state, gradient, compressed)
                self._keep(record, state)
        except Exception as error:
            errors.append(error)
        if owes:
            compressed(torch.zeros(record.numel, device=record.full.device))

    def _tensor(self, record: ParameterRecord) -> TensorState:
        """Return the state of a parameter as its rule takes it."""
        own, whole = self.own[record], self._state.whole_slot
        slots = {name: own[name] if name in own else whole(record, name) for name in self._rule.slots}
        scalars = {**self._rule.scalars, **self._state.scalars[record]}  # that of an AdamW has the step count alone
        return TensorState(tuple(record.shape), self._state.whole_master(record), slots, scalars)

    def _keep(self, record: ParameterRecord, state: TensorState) -> None:
        self._state.scalars[record] = state.scalars
        if not self._state.is_master(record):
            self._state.transfers.copy_into(record.owned(), state.master)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        self._collected = {}
        for record, own in self.own.items():
            kept = self._collected[record.name] = {}
            for name, mine in own.items():
                everyone = torch.empty(self._world.world_size, mine.numel(), device=mine.device)
                self._world.all_gather(everyone.view(-1), mine)
                if self._world.rank == 0:
                    kept[name] = everyone.cpu()

    def state(self) -> dict[str, Any]:
        """Return the state that `collect` brought, by parameter name: on rank 0 all of it, elsewhere nothing."""
        collected, self._collected = self._collected, {}
        return collected

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        with torch.no_grad():
            for record, own in ((record, own) for record, own in self.own.items() if record.numel):
                for name, target in own.items():
                    target.copy_(self._row(saved.get(record.name, {}).get(name), target))
                state = self._tensor(record)
                self._rule.restore(self._groups[self._state.kernel_of(record)[1]], state)
                self._keep(record, state)

    def _row(self, rows: torch.Tensor | None, target: torch.Tensor) -> torch.Tensor:
        """Return this rank's of the saved rows: its own, or at another world size their mean."""
        if rows is not None and len(rows) == self._world.world_size:
            return rows[self._world.rank]
        return rows.mean(dim=0) if rows is not None and rows.shape[1] == target.numel() else torch.zeros_like(target)


def _planned_slots(kernel: Kernel, shape: Sequence[int]) -> Slots:
    """Return a rank's arrays for a parameter of `shape`, and between ranks the loss of its messages."""
    numel = math.prod(shape)
    worker = RanksSlot("worker_error", lambda ranks: (numel,) if ranks > 1 and numel else None)
    server = RanksSlot("server_error", lambda ranks: (chunk_numel(numel, ranks),) if ranks > 1 and numel else None)
    return (*cast("OneBitKernel", kernel).rule.slots, worker, server)


def _rule_of(kind: type[OneBitAdam]) -> Rule:
    return Rule(
        kinds=(kind,),
        kernel=lambda *_: OneBitKernel(kind.rule),
        stepper=OneBitStep,
        slots=_planned_slots,
        make=lambda groups, arguments, _: kind(groups, **arguments),
    )


for _kind in (OneBitAdam, ZeroOneAdam, OneBitLamb):
    register(_rule_of(_kind))
