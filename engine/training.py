"""Everything that one training run consists of, and the steps that change it. The engine is the face of this."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from zstore.errors import NonFiniteError, UsageError
from zstore.ranks.world import World

from .config import BatchSizes, Config
from .loader import TrainingLoader
from .optim.client_step import ClientStep
from .optim.in_backward import ReadGuard, WithinBackward
from .optim.loss_scale import LossScaler
from .optim.optimizer import ZeroOptimizer
from .optim.schedules import Schedule
from .optim.state import OptimizerState
from .optim.update import Settings, Update
from .optim.updater import StepMode, Updater
from .params.record import ParameterRecord, Residency
from .params.sharding import Sharding
from .plan.plan import Plan
from .runtime.interrupts import interrupts_wait
from .zero.accumulation import Accumulation
from .zero.collectives import all_gather_rows
from .zero.gradients import Gradients
from .zero.hooks import UnitHooks
from .zero.norm import global_norm, scale_factor
from .zero.unit_gradients import UnitGradients

_log = logging.getLogger("zstore")

_NAMED = 5
"""Parameters that an error names."""


def _nothing() -> None:
    """Nothing is to be done."""


@dataclass
class Counters:
    """How far training is. `micro_steps` counts calls of `step()`, `global_steps` those that ended an accumulation."""

    global_steps: int = 0
    """Optimizer steps, skipped ones too."""
    skipped_steps: int = 0
    """Steps that overflowed in fp16 and changed nothing."""
    micro_steps: int = 0


@dataclass(kw_only=True)
class Training:
    """The parts of a run on this rank, wired by `initialize`."""

    world: World
    config: Config
    batch: BatchSizes
    """Sizes in use: those of the config, or after a load at another world size, recomputed from the saved global
    batch."""
    sharding: Sharding
    model: nn.Module
    device: torch.device
    plan: Plan
    """Where everything rests, as it was decided before anything was laid out."""
    state: OptimizerState
    updater: Updater
    step_mode: StepMode
    gradients: Gradients
    hooks: UnitHooks | None
    """None where parameters are not sharded."""
    optimizer: ZeroOptimizer
    schedule: Schedule
    scaler: LossScaler
    loader: TrainingLoader | None
    run_id: str
    """Of the whole training run; a resumed one keeps it."""
    counters: Counters = field(default_factory=Counters)
    accumulation: Accumulation = field(default_factory=Accumulation)
    earlier_samples: int = 0
    """Samples that steps of other batch sizes had more than those of the present one."""
    norm: float | None = None
    """Global norm of the last step's unscaled gradients."""
    was_applied: bool = False
    """Whether the last step changed parameters."""
    torn: bool = False
    """Whether a step or a load stopped half way: the state is a mixture until a load mends it."""
    behind: bool = False
    """Whether an update was started behind `step()` of which the ranks did not agree yet that it is done."""
    within: WithinBackward | None = None
    """The update that goes on within the backward under way, and until `step()`."""
    before_change: Callable[[], None] = _nothing
    """Called before a step changes anything: what must have seen the state of the step before is waited for."""
    client_step: ClientStep | None = None
    """Takes the steps of an optimizer that must see whole tensors."""
    guard: ReadGuard | None = None
    """Watches for reading what an update within the backward changed."""

    def __post_init__(self) -> None:
        if self.step_mode is StepMode.BACKWARD and isinstance(self.gradients, UnitGradients):
            self.guard = ReadGuard(self.model, {record.parameter: record for record in self.trained})

    @property
    def trained(self) -> list[ParameterRecord]:
        """The parameters that the optimizer updates, in order."""
        return list(self.state.scalars)

    @property
    def is_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its step."""
        return self.accumulation.is_boundary(self.batch.accumulation_steps)

    @property
    def updates_within(self) -> bool:
        """Whether the backward of the micro-batch under way updates parameters. Gradients that are reduced once a step,
        at stages 0 and 1 with more ranks, are final at its end alone."""
        return self.is_boundary and self.step_mode is StepMode.BACKWARD and isinstance(self.gradients, UnitGradients)

    def scaled(self, loss: torch.Tensor, *, divide: bool) -> torch.Tensor:
        """Return the loss that backward starts from: times the loss scale, and where asked for divided by the accumulation
        steps."""
        scaled = loss.float()
        if divide and self.batch.accumulation_steps > 1:
            scaled = scaled / self.batch.accumulation_steps
        return scaled if self.scaler.scale == 1.0 else scaled * self.scaler.scale

    def backward(self, scaled_loss: torch.Tensor, *, retain_graph: bool) -> None:
        """Accumulate the gradients of one micro-batch. Where that fails, the accumulation starts anew."""
        error = self._wait()
        if self.updates_within:
            self._start_within()
        try:
            self.gradients.start_backward(last=self.is_boundary)
            if self.hooks is not None:
                self.hooks.start_backward()
            scaled_loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            self.gradients.end_backward()
            if self.hooks is not None:
                self.hooks.end_backward()
            # Not before: ranks whose forwards differ meet in the backward's own collectives, which tell them.
            self._agree(error)
        except BaseException as raised:
            if self.give_up_within():
                raised.add_note(
                    'With "step_overlap": "backward" parameters were updated before: load a checkpoint before going on.'
                )
            self.restart_accumulation()
            if self.hooks is not None:
                self.hooks.abandon()
            raise
        if self.within is not None:
            self.within.end_backward()
        self.accumulation.backwards += 1

    def _settings(self, factor: float) -> Settings:
        return Settings.of(self.optimizer.param_groups, step=self.counters.global_steps + 1, factor=factor)

    def _start_within(self) -> None:
        """Begin the update of step mode `backward`. See [Note: step modes]."""
        self.require_whole()
        if not isinstance(self.gradients, UnitGradients):
            raise UsageError("an update within the backward needs gradients by unit")
        if self.within is not None:
            raise UsageError(
                'a second backward before step(), but with "step_overlap": "backward" the first one has updated the '
                'parameters: call step() after each backward, or set "step_overlap" to "forward" or "none"'
            )
        if self.guard is None:
            raise UsageError("an update within the backward needs its guard")
        self.before_change()
        settings = self._settings(scale_factor(0.0, 0.0, self.scaler.scale))
        within = WithinBackward(self.state, self.gradients, self.guard, settings)
        with interrupts_wait():
            within.start(self.updater)
            self.within = within

    def give_up_within(self) -> bool:
        """Give an update within a failed backward up; return whether it changed anything, so that the state is torn."""
        within = self.within
        if within is None:
            return False
        before, self.torn = self.torn, True  # also where this is interrupted
        changed = within.give_up(self.updater)
        self.torn, self.within = before or changed, None
        return changed

    def complete(self) -> None:
        """Return when no update is under way but one within a backward (all ranks).

        Raises, on every rank, what ended the update on any, and the state is torn.
        """
        if self.within is None:
            self._agree(self._wait())

    def _wait(self) -> BaseException | None:
        """Wait for the update that runs behind; return what ended it, to be agreed on. Alone, raise it."""
        error = self.updater.wait() if self.behind else None
        self.torn |= error is not None
        if error is not None and self.world.world_size == 1:
            raise error
        return error

    def _agree(self, error: BaseException | None) -> None:
        """Raise what ended the update behind on any rank on every rank (all ranks)."""
        if not self.behind:
            return
        self.behind = False
        try:
            self.world.raise_together(error)
        except BaseException:
            self.torn = True
            raise

    def settle(self) -> None:
        """Return when no update runs behind; where one failed on any rank the state is torn on all (all ranks)."""
        try:
            self.complete()
        except Exception as error:
            _log.warning("the update that was under way failed: %s", error)

    def restart_accumulation(self) -> None:
        """Forget the gradients of the step under way."""
        self.gradients.drop()
        self.counters.micro_steps -= self.accumulation.stepped
        self.accumulation.restart()

    def name_boundary(self, is_boundary: bool | None) -> None:
        """Let the caller say whether the micro-batch under way is the last of its step, from now on; None: count again."""
        if self.within is not None and not is_boundary:
            raise UsageError(
                "the micro-batch under way cannot be declared not the last of its step any more: with "
                '"step_overlap": "backward" its backward has updated parameters; call step() first'
            )
        self.accumulation.named = is_boundary

    def batch_of(self, train_batch_size: int) -> BatchSizes:
        """Return the batch sizes with so many samples a step, by more or fewer micro-batches.

        Raises UsageError where there are none, and in the middle of a step.
        """
        micro, world_size = self.batch.micro_batch_size, self.world.world_size
        if type(train_batch_size) is not int or train_batch_size < 1 or train_batch_size % (micro * world_size):
            raise UsageError(
                f"train_batch_size: expected a multiple of {micro * world_size}, which is train_micro_batch_size_per_gpu "
                f"{micro} x world size {world_size}; got {train_batch_size!r}"
            )
        if not self.accumulation.is_new:
            raise UsageError(
                f"set_train_batch_size({train_batch_size}) in the middle of a step, whose losses were divided by "
                f"{self.batch.accumulation_steps} micro-batches: call it after the step() that ends an accumulation"
            )
        steps = train_batch_size // (micro * world_size)
        return replace(self.batch, train_batch_size=train_batch_size, accumulation_steps=steps)

    def resize(self, batch: BatchSizes) -> None:
        """Go on with other batch sizes."""
        self.earlier_samples += self.counters.global_steps * (self.batch.train_batch_size - batch.train_batch_size)
        self.batch = batch

    @property
    def samples(self) -> int:
        """Samples seen by all ranks, as far as accumulations were not ended early."""
        return self.counters.global_steps * self.batch.train_batch_size + self.earlier_samples

    def require_whole(self) -> None:
        """Raise UsageError where the state is a mixture, which must be neither trained nor saved."""
        # What ended an update within the backward is raised in step(), on every rank.
        if self.torn or (self.within is None and self.updater.error is not None):
            raise UsageError(
                "a step or a load stopped half way, so that the state is a mixture of two: load a checkpoint before going on"
            ) from self.updater.error

    def step(self) -> None:
        """Take one optimizer step with the gradients accumulated, or skip it where they are not finite in fp16, and in
        bf16 with `check_grad_overflow`.

        Else such gradients raise NonFiniteError on every rank, and where the config asks for it parameters without a
        gradient UsageError, before any state is changed; the gradients are dropped.
        """
        if self.hooks is not None:
            self.hooks.residence.forget()  # what a forward without a backward left is old now
        try:
            self.require_whole()
            self.gradients.reduce()
            if not self.config.zero.ignore_unused_parameters:
                self._require_gradients()
            norm = global_norm(self.trained, self.gradients, self.world, state_is_sharded=self.sharding.optimizer_state)
            self.norm = norm / self.scaler.scale
            overflow = not math.isfinite(norm)
            if overflow and not self.scaler.skips:
                raise NonFiniteError(self._non_finite(norm))
            self.before_change()
            if self.within is not None:
                self._finish_within(self.within)
            elif overflow:
                self.world.raise_together(None)  # brings what a rank wishes for to all, as every update does
            else:
                self._update(scale_factor(self.norm, self.config.gradient_clipping, self.scaler.scale))
        finally:
            # Still there: the step failed. What this rank did not change, another did.
            self.torn |= self.within is not None
            self.give_up_within()
            self.gradients.drop()
        self._note(overflow)

    def _require_gradients(self) -> None:
        """Raise UsageError, on every rank, that names the parameters to which no rank's loss led."""
        unused = [record.name for record in self.trained if not self.gradients.has(record)]
        if unused:
            more = f" and {len(unused) - _NAMED} more" if len(unused) > _NAMED else ""
            raise UsageError(
                f"step {self.counters.global_steps + 1}: on no rank was there a gradient for "
                f"{', '.join(map(repr, unused[:_NAMED]))}{more}; {self._what_changed()}. Use them in the loss, freeze them "
                "with requires_grad_(False) before initialize(), or set zero_optimization.ignore_unused_parameters to true"
            )

    def _non_finite(self, norm: float) -> str:
        step = self.counters.global_steps + 1
        return (
            f"step {step}: the norm of the gradients is {norm}; {self._what_changed()}. Look for a loss that is NaN or "
            "infinite, or lower the learning rate"
        )

    def _what_changed(self) -> str:
        if self.within is None:
            return "no parameter and no optimizer state was changed"
        return 'with "step_overlap": "backward" parameters were changed before it was known: load a checkpoint'

    def _finish_within(self, within: WithinBackward) -> None:
        now = self._settings(1.0)
        self._change(lambda: within.finish(self.updater, now))
        self.within = None

    def _update(self, factor: float) -> None:
        """Update everything that had a gradient, or in step mode `forward` all that nobody reads before gathering it."""
        records = [record for record in self.trained if self.gradients.has(record)]
        settings = self._settings(factor)
        behind: list[ParameterRecord] = []
        if self.step_mode is StepMode.FORWARD:
            behind = [record for record in records if record.residency is not Residency.RESIDENT]
            records = [record for record in records if record.residency is Residency.RESIDENT]

        def at_once() -> None:
            update = Update(self.state, records, settings, self.gradients.take)
            if self.client_step is None:
                update.run()
            else:
                self.client_step.run(records, settings.factor, self.gradients.take)
            update.note_scalars(records)

        def later() -> None:
            held = {record: self.gradients.take(record) for record in behind}
            update = Update(self.state, behind, settings, held.pop)
            update.note_scalars(behind)
            self.behind = True
            self.updater.start(update)

        self._change(at_once, later if behind else None)

    def _change(self, change: Callable[[], None], then: Callable[[], None] | None = None) -> None:
        """Change the state, on every rank or with an error on every rank; resident parameters follow, and then what
        `then` does."""
        self.torn = True
        with self.world.agreeing("The step was applied in part: load a checkpoint before going on."):
            change()
        self.gather_resident(self.trained)
        if then is not None:
            then()
        self.torn = False

    def gather_resident(self, records: list[ParameterRecord]) -> None:
        """Bring every rank's rows of resident parameters to all ranks, after their owners changed them."""
        if self.sharding.optimizer_state:
            resident = [record for record in records if record.residency is Residency.RESIDENT]
            all_gather_rows(self.world, resident, self.config.allgather_bucket_numel, lambda record: record.full)

    def _note(self, overflow: bool) -> None:
        """Count the step and let loss scale and schedule follow."""
        before = self.scaler.scale
        self.was_applied = not overflow
        self.counters.global_steps += 1
        self.counters.skipped_steps += int(overflow)
        try:
            self.scaler.update(overflow)
        finally:
            if overflow and self.world.rank == 0:
                scale = f"; the loss scale was {before:g} and is {self.scaler.scale:g}" if self.scaler.settings else ""
                _log.info("step %d skipped: its gradients are not finite%s", self.counters.global_steps, scale)
        if not overflow:
            self.optimizer.note_step()
            self.schedule.advance()

    def close(self) -> None:
        """Give hooks, memory, threads and the run folder back."""
        # Before all else: an update that waits for a backward would never end.
        self.give_up_within()
        error = self.updater.wait()
        if error is not None and not self.torn:
            _log.warning("the last update failed, and nobody had asked for it yet: %s", error)
        self.updater.close()
        if self.guard is not None:
            self.guard.remove()
        self.gradients.close()
        if self.hooks is not None:
            self.hooks.remove()
        self.state.store.close()
