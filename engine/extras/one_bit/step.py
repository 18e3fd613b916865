"""Steps of the optimizers that send signs: every rank takes them over whole tensors, by their rule.

[Note: the state of one rank]
Masters and shared slots are whole on every rank and the same there, so they are in the store like any state. The state of
one rank alone, errors of messages and own slots, is kept here. After a step of the phase "local" masters and all
slots are a rank's own too, until ranks exchange again. A checkpoint has a rank's own state in rows by rank, beside the
client's state, which rank 0 writes; each chunk of a server error belongs to one rank, so that these make one array of the
parameter's elements. At another world size each rank starts from the mean of the rows, which keeps the sum that the ranks
still owe, and from its chunk of the server error.

The phase of a parameter follows from its own number of updates: one of which no rank has a gradient takes no part in a
step, as with any optimizer. A rank that fails goes on through the exchanges, since the others wait in them, and raises at
the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from zstore.errors import UsageError
from zstore.format import model_array, optimizer_array
from zstore.ranks.world import World

from ...optim.state import OptimizerState
from ...optim.stepper import Stepper, whole_gradient
from ...optim.update import Update
from ...params.record import ParameterRecord
from .exchange import Errors, compressed_mean
from .kernel import OneBitKernel
from .rule import Compressed, Phase, TensorState

_MASTER, _WORKER, _SERVER = "master", "worker_error", "server_error"


class OneBitStep(Stepper):
    """Takes the updates of a run with an optimizer that sends signs (all ranks). See [Note: the state of one rank]."""

    keeps_state = owns_gradients = True

    def __init__(self, client: torch.optim.Optimizer, state: OptimizerState, world: World) -> None:
        self._groups = client.param_groups
        self._state = state
        self._world = world
        self.name = type(client).__name__
        self._own: dict[ParameterRecord, dict[str, torch.Tensor]] = {}
        self._errors: dict[ParameterRecord, Errors] = {}
        for record in self.records:
            device = record.full.device
            rule = self._kernel(record).rule
            self._own[record] = {name: torch.zeros(record.numel, device=device) for name in rule.own_slots}
            self._errors[record] = Errors.none_yet(record.numel, world.world_size, device)
        self._phases: dict[ParameterRecord, Phase] = {}
        """Phases of the step under way."""
        self._apart: set[ParameterRecord] = set()
        """Those of which ranks have masters of their own: their last update exchanged nothing."""
        self._collected: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def records(self) -> list[ParameterRecord]:
        return list(self._state.scalars)

    def held_bytes(self) -> int:
        """Return the bytes of this rank's own state."""
        errors = sum(one.worker.nbytes + one.server.nbytes for one in self._errors.values())
        return errors + sum(values.nbytes for slots in self._own.values() for values in slots.values())

    def _kernel(self, record: ParameterRecord) -> OneBitKernel:
        kernel, _ = self._state.kernel_of(record)
        if not isinstance(kernel, OneBitKernel):
            raise UsageError(f"parameter {record.name!r} belongs to an optimizer that sends no signs")
        return kernel

    # -- before the update ------------------------------------------------------------------------------------------

    def averaged(self) -> set[ParameterRecord]:
        """Begin a step; return the parameters whose gradients are averaged over the ranks in it."""
        for record, scalars in self._state.scalars.items():
            group = self._groups[self._state.kernel_of(record)[1]]
            self._phases[record] = self._kernel(record).rule.phase(group, int(scalars["step"]) + 1)
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
        groups = [[model_array(one.name), *(optimizer_array(s, one.name) for s in self._shared(one))] for one in mine]
        error: Exception | None = None

        def step() -> None:
            nonlocal error
            for record in mine:
                error = self._try_step(record, update, error)

        with torch.no_grad():
            self._state.change_whole(groups, step)
        if error is not None:
            raise error
        local = {record for record in mine if self._phases[record] == "local"}
        self._apart = self._apart.difference(mine) | local

    def _shared(self, record: ParameterRecord) -> tuple[str, ...]:
        return self._kernel(record).slots

    def _try_step(self, record: ParameterRecord, update: Update, error: Exception | None) -> Exception | None:
        """Update a parameter; return the first error, this one's or a former one."""
        left = 1 if self._phases[record] == "compressed" else 0

        def compressed(values: torch.Tensor) -> torch.Tensor:
            nonlocal left
            left -= 1
            return compressed_mean(self._world, values, self._errors[record])

        if error is None:
            try:
                self._step(record, update, compressed)
            except Exception as raised:
                error = raised
        if left > 0:
            compressed(torch.zeros(record.numel, device=record.full.device))
        return error

    def _step(self, record: ParameterRecord, update: Update, compressed: Compressed) -> None:
        group = update.settings.groups[self._state.kernel_of(record)[1]]
        master = self._state.whole_master(record)
        gradient = whole_gradient(self._state, update, record, master)
        rule = self._kernel(record).rule
        # A checkpoint of the exact optimizer has the step count alone.
        scalars = {**rule.initial(), **self._state.scalars[record]}
        one = TensorState(tuple(record.shape), master, self._slots(record), scalars)
        rule.update(group, one, gradient, compressed)
        self._state.scalars[record] = one.scalars
        self._cast(record)

    def _slots(self, record: ParameterRecord) -> dict[str, torch.Tensor]:
        shared = {name: self._state.whole_slot(record, name) for name in self._shared(record)}
        return {name: (shared | self._own[record])[name] for name in self._kernel(record).rule.slots}

    def _cast(self, record: ParameterRecord) -> None:
        if not self._state.is_master(record):
            self._state.transfers.copy_into(record.owned(), self._state.whole_master(record))

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _rows_of(self, record: ParameterRecord) -> dict[str, torch.Tensor]:
        """Return this rank's own state of a parameter, 1-D [numel] each, without the server error."""
        found = dict(self._own[record])
        if self._world.world_size > 1:
            found[_WORKER] = self._errors[record].worker
        if record in self._apart:
            found |= {_MASTER: self._state.whole_master(record), **self._slots(record)}
        return found

    def collect(self) -> None:
        """Bring each rank's own state to rank 0, for `state` (all ranks)."""
        self._collected = {record.name: {} for record in self.records}
        ranks = self._world.world_size
        for record in self.records:
            found = {name: self._gathered(values) for name, values in self._rows_of(record).items()}
            if ranks > 1:
                found[_SERVER] = self._gathered(self._errors[record].server).view(-1)[: record.numel]
            if self._world.rank == 0:
                self._collected[record.name] = {name: values.cpu() for name, values in found.items()}

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        everyone = torch.empty(self._world.world_size, mine.numel(), device=mine.device)
        self._world.all_gather(everyone.view(-1), mine)
        return everyone

    def state(self) -> dict[str, Any]:
        """Return the state that `collect` brought, by parameter name: on rank 0 all of it, elsewhere nothing."""
        collected, self._collected = self._collected, {}
        return collected

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace this rank's own state by the `state` of a former run, on any number of ranks."""
        with torch.no_grad():
            for record in self.records:
                self._load(record, saved.get(record.name, {}))
        self._apart = {record for record in self.records if _MASTER in saved.get(record.name, {})}

    def _load(self, record: ParameterRecord, kept: Mapping[str, Any]) -> None:
        errors = self._errors[record]
        targets = {**self._own[record], _WORKER: errors.worker}
        if _MASTER in kept:
            targets |= {_MASTER: self._state.whole_master(record), **self._slots(record)}
        for name, target in targets.items():
            rows = kept.get(name)
            if not target.numel():
                continue
            target.zero_() if rows is None else target.copy_(self._row(rows))
        if errors.server.numel():
            whole = torch.zeros(self._world.world_size, errors.server.numel())
            if _SERVER in kept:
                whole.view(-1)[: record.numel] = kept[_SERVER].view(-1)
            errors.server.copy_(whole[self._world.rank])
        if _MASTER in kept:
            self._cast(record)

    def _row(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's of the saved rows: its own, or at another world size their mean."""
        return rows[self._world.rank] if len(rows) == self._world.world_size else rows.mean(dim=0)
