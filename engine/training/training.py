"""One training run: its components and the steps that advance it. `Engine` is the public API."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

import torch
from torch import nn

from zstore.errors import UsageError
from zstore.ranks.world import World

from ..activations.offload import ActivationOffload
from ..config.config import Config
from ..optim.kernel import StepSettings
from ..optim.optimizer import LossScaler, ZeroOptimizer
from ..optim.state import OptimizerState
from ..optim.update import Update
from ..params.record import OTHER_MODES, ParameterRecord, Residency
from ..plan.plan import Plan
from ..runtime.device import labelled
from ..zero.fetch import all_gather_rows
from ..zero.gradients import Gradients, sums_over_ranks
from ..zero.hooks import UnitHooks
from ..zero.norm import norm_of, scale_factor
from .compiled import CompiledUnits, Compiler
from .loader import Accumulation, Counters, TrainingLoader
from .lr_schedules import LRSchedule

_log = logging.getLogger("zstore")


@dataclass(kw_only=True)
class Training:
    """The parts of a run on this rank, wired by `initialize`."""

    world: World
    config: Config
    model: nn.Module
    plan: Plan
    """The tier of each array; fixed before anything is allocated."""
    state: OptimizerState
    update: Update
    gradients: Gradients
    hooks: UnitHooks | None
    """None if parameters are not sharded."""
    optimizer: ZeroOptimizer
    run_id: str
    """Identifies the training run; kept across resumes."""
    activations: ActivationOffload | None = None
    """None if activations stay on the device."""
    schedule: LRSchedule | None = None
    loader: TrainingLoader | None = None
    compiled: CompiledUnits | None = None
    """None if no unit is compiled, or the whole model is."""
    counters: Counters = field(default_factory=Counters)
    norm: float | None = None
    """Global norm of the last step's unscaled gradients."""
    was_applied: bool = False
    """Whether the last step changed parameters."""
    offloaded_states: set[str] = field(default_factory=set)
    """Names of the states that `offload_states` has offloaded."""

    def __post_init__(self) -> None:
        self.accumulation = Accumulation(batch=self.config.batch, world_size=self.world.world_size)
        self.clip_norm = self.config.gradient_clipping
        self._scaled_norm: float | None = None
        """Norm of the gradients including the loss scale and the loop's own scaling; None until computed."""
        self._clip_factor: float | None = None
        """Factor by which this step's gradients are multiplied if the loop clipped them, excluding the loss scale."""
        self.gradients.exposed.owner = self

    @property
    def scaler(self) -> LossScaler:
        """The factor of the loss."""
        return self.optimizer.scaler

    @property
    def trained(self) -> list[ParameterRecord]:
        """The parameters that the optimizer updates, in order."""
        return list(self.state.scalars)

    @property
    def samples(self) -> int:
        """Samples seen by all ranks, assuming no accumulation was cut short."""
        accumulation = self.accumulation
        return self.counters.global_steps * accumulation.batch.train_batch_size + accumulation.earlier_samples

    def require_optimizer(self, call: str) -> None:
        """Raise UsageError if nothing is trained."""
        if self.config.frozen:
            raise UsageError(
                f"{call}: this engine has no optimizer (or was created with frozen=True) and keeps no gradients. For training "
                'call initialize() without frozen=True, with optimizer=... or an "optimizer" section in the config'
            )

    def compile(self, compiler: Compiler) -> None:
        """Compile the model, or its units if parameters are gathered and released; may be called again."""
        if self.activations is not None:
            self.activations.stay_out_of_graphs()
        if self.hooks is None:
            self.model._compiled_call_impl = compiler(self.model._call_impl)
            return
        if self.compiled is not None:
            self.compiled.remove()
        self.compiled = CompiledUnits(self.model, self.hooks, compiler)

    def require_not_offloaded(self, call: str, states: tuple[str, ...] | None = None) -> None:
        """Raise UsageError for a call that needs `states`, by default all, if any of them is offloaded."""
        offloaded = sorted(self.offloaded_states if states is None else self.offloaded_states.intersection(states))
        if offloaded:
            raise UsageError(
                f"{call}: {', '.join(offloaded)} are offloaded by offload_states(): call engine.reload_states() first"
            )

    def backward(self, loss: torch.Tensor, *, divide: bool, retain_graph: bool) -> None:
        """Accumulate the gradients of one micro-batch: of its loss times the loss scale, and if `divide`, divided by
        the number of accumulation steps. If that fails, the accumulation starts over."""
        scaled = loss.float()
        if divide and self.accumulation.batch.accumulation_steps > 1:
            scaled = scaled / self.accumulation.batch.accumulation_steps
        if self.scaler.scale != 1.0:
            scaled = scaled * self.scaler.scale
        self.begin_backward()
        try:
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        except BaseException as raised:
            self.abandon_backward(raised)
            raise
        self.end_backward()

    def begin_backward(self) -> None:
        """Prepare for the backward of a micro-batch; call `end_backward` or `abandon_backward` next."""
        self.require_not_offloaded("a backward")
        if self.gradients.sums is not None:
            raise UsageError(
                "a backward was started after the norm of the gradients was computed and before step(): compute it after the "
                "last backward"
            )
        self.update.drain()
        if self.update.runs_in_backward and self.accumulation.is_boundary:
            self.update.start_in_backward(self._settings(scale_factor(0.0, 0.0, self.scaler.scale)))
        try:
            self.gradients.start_backward(last=self.accumulation.is_boundary)
            if self.hooks is not None:
                self.hooks.start_backward()
        except BaseException as raised:
            self.abandon_backward(raised)
            raise

    def end_backward(self) -> None:
        """Finish a backward: collect and reduce its gradients (collective)."""
        try:
            self.gradients.end_backward()
            if self.hooks is not None:
                self.hooks.end_backward()
            # Not earlier: if forwards differ between ranks, the backward's own collectives report that.
            self.update.agree()
            self.gradients.expose(whole=self.scaler.scale == 1.0)
        except BaseException as raised:
            self.abandon_backward(raised)
            raise
        if self.update.is_in_backward:
            self.update.end_backward()
            if self.hooks is not None:
                self.hooks.units.invalidate(by_step=True)
        self.accumulation.backwards += 1

    def abandon_backward(self, raised: BaseException) -> None:
        """Discard a failed backward and the accumulation; if that is impossible, add a note to `raised`."""
        if self.update.abandon():
            raised.add_note(
                'With "step_overlap": "backward" parameters were already updated: load a checkpoint before continuing. For '
                f"backward passes that change nothing if they fail, {OTHER_MODES}."
            )
        self.restart_accumulation()
        if self.hooks is not None:
            self.hooks.abandon()

    def zero_grad(self) -> None:
        """Discard the current step's gradients if there was a backward since the last `step()` (all ranks).

        Raises UsageError if the backward has updated parameters with them, or if other ranks do not make the same call.
        """
        if not self.accumulation.backwards:
            return
        if self.update.is_in_backward:
            raise UsageError(
                'zero_grad() between backward() and step(): with "step_overlap": "backward" the backward has updated '
                f"parameters, which cannot be undone. Check the loss before backward(), or {OTHER_MODES}"
            )
        with self.world.calling("step", meeting="zero_grad()"):
            self.update.abandon()
            self._forget_gradients()
            self.accumulation.backwards, self.accumulation.was_cleared = 0, True

    def notice_cleared(self) -> None:
        """Call `zero_grad` if the training loop itself has set all gradients to None (all ranks)."""
        if self.accumulation.backwards and self.gradients.exposed.are_cleared:
            self.zero_grad()

    def restart_accumulation(self) -> None:
        """Discard the gradients of this step, and count its micro-batches from 0."""
        self._forget_gradients()
        self.counters.micro_steps -= self.accumulation.micro_steps
        self.accumulation.restart()

    def _forget_gradients(self) -> None:
        self._scaled_norm = self._clip_factor = None
        self.gradients.drop()

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the current micro-batch is the last of its step, from now on; None restores counting."""
        if self.update.is_in_backward and not is_boundary:
            raise UsageError(
                "this micro-batch can no longer be marked as not the last of its step: with "
                f'"step_overlap": "backward" its backward has updated parameters; call step() first, or {OTHER_MODES}'
            )
        self.accumulation.boundary_override = is_boundary

    def scaled_grad_norm(self, *, prefetch: bool = False) -> float:
        """Return the norm of the accumulated gradients, including the loss scale, computed once per step; no backward
        may follow before `step` (all ranks). With `prefetch`, start prefetching state for the coming update."""
        self.update.require_consistent()
        if self.gradients.sums is None:
            with labelled("reduce"):
                self.gradients.reduce()
            needs_gradients = not self.config.settings.zero_optimization.ignore_unused_parameters
            if needs_gradients and self.gradients.step.backwards:  # otherwise they were discarded
                self.gradients.require(self.trained, self.counters.global_steps + 1, self._what_changed)
            if prefetch:
                self.update.read_ahead()
            self.gradients.sums = sums_over_ranks(self.gradients, self.world, sharded=self.state.is_sharded)
        if self._scaled_norm is None:
            scales = self.gradients.exposed.scales
            norm = norm_of((record.name, sums, scales.get(record, 1.0)) for record, sums in self.gradients.sums.items())
            stepper = self.update.stepper
            self._scaled_norm = norm if stepper is None else stepper.agreed_norm(norm)
        return self._scaled_norm

    def clip(self, max_norm: float) -> float:
        """Clip the gradients of this and later steps to `max_norm` (0: no clipping); return the unscaled norm of this
        step's gradients before clipping (all ranks)."""
        norm, self.clip_norm = self.scaled_grad_norm() / self.scaler.scale, max_norm
        factor, previous = scale_factor(norm, max_norm, 1.0), self._clip_factor
        is_applied = math.isfinite(norm) or self.scaler.non_finite == "apply"
        if is_applied and (previous is None or not factor >= previous):  # `not`: a NaN replaces any factor
            self._clip_factor = factor
            self.gradients.exposed.clip(factor if previous is None else factor / previous)
        return norm

    def gradient_norm(self, record: ParameterRecord) -> float:
        self._require_averaged_gradients("the norm of a gradient is not available")
        with self.world.calling("gradients"):
            self.scaled_grad_norm()
        shards = (self.gradients.sums or {}).get(record, ())
        clip = 1.0 if self._clip_factor is None else self._clip_factor
        factor = self.gradients.exposed.scales.get(record, 1.0) * clip / self.scaler.scale
        return norm_of([(record.name, shards, 1.0)]) * abs(factor)

    def scale_gradient(self, record: ParameterRecord, factor: float) -> None:
        self._require_averaged_gradients("a gradient cannot be multiplied")
        if self.update.runs_in_backward:
            raise UsageError(
                f"the gradient of parameter {record.name!r} was scaled between backward() and step(), but with "
                f'"step_overlap": "backward" the parameter has been updated already: {OTHER_MODES}'
            )
        with self.world.calling("gradients"):
            self.scaled_grad_norm()
        self.gradients.exposed.scales[record] = self.gradients.exposed.scales.get(record, 1.0) * factor
        self._scaled_norm = None

    def _require_averaged_gradients(self, refusal: str) -> None:
        if self.update.stepper is not None and self.update.stepper.owns_gradients:
            raise UsageError(
                f"{refusal} with {self.optimizer.kind.__name__}, which averages over ranks itself: each rank has its own "
                "gradients until step(). Choose an optimizer whose gradients are reduced in the backward, such as AdamW"
            )

    def step(self) -> None:
        """Take one optimizer step with the accumulated gradients; skip it if they are not finite and the config says so.

        By default such gradients raise NonFiniteError on every rank, except in fp16, and parameters without a gradient
        raise UsageError if the config asks for that, before the update. After an error the gradients are dropped; for
        the state, see [Note: which state is consistent].
        """
        if self.hooks is not None:
            self.hooks.units.invalidate(by_step=True)  # a forward without a backward leaves stale values
        try:
            self.gradients.exposed.adopt()
            norm = self.scaled_grad_norm(prefetch=True)  # reduces, agrees on which gradients exist, sums squares
            self.norm = norm / self.scaler.scale
            accepted = self.scaler.accepts(norm, self.counters.global_steps + 1, self._what_changed)
            if accepted:
                settings = self._settings(self._factor(self.norm))
                now, later = self.update.split_by_mode()
                with self.update.changing():
                    with self.world.agreeing("The step was applied in part: load a checkpoint before continuing."):
                        self.update.run(now, settings)
                    self.gather_resident(self.trained)
                    self.update.start_async(later, settings)
            else:
                with self.world.agreeing():  # exchanges messages (stop signals), as every update does
                    pass
        finally:
            self.update.abandon(in_step=True)  # it still runs if the step failed
            self.update.drop_prefetched()
            self._forget_gradients()
        self._count(skipped=not accepted)

    @property
    def _what_changed(self) -> str:
        if not self.update.is_in_backward:
            return "no parameter and no optimizer state was changed"
        changed = 'with "step_overlap": "backward" parameters changed before this was detected: load a checkpoint'
        return f"{changed}, and to detect such gradients before any change, {OTHER_MODES}"

    def _factor(self, norm: float) -> float:
        """Return the factor for this step's gradients, except those that the loop has scaled itself."""
        if self._clip_factor is None:
            return scale_factor(norm, self.clip_norm, self.scaler.scale)
        return self._clip_factor / self.scaler.scale

    def _settings(self, factor: float) -> StepSettings:
        gradients = self.gradients
        factors = {record: factor * scale for record, scale in gradients.exposed.scales.items()}
        factors |= dict.fromkeys(gradients.exposed.clipped, 1.0 / self.scaler.scale)
        step = self.counters.global_steps + 1
        return StepSettings.of(self.optimizer.param_groups, step=step, factor=factor, factors=factors)

    def gather_resident(self, records: list[ParameterRecord]) -> None:
        """All-gather the rows of resident parameters, after their owners have changed them."""
        if self.state.is_sharded:
            resident = [record for record in records if record.residency is Residency.RESIDENT]
            all_gather_rows(self.world, resident, int(self.config.settings.zero_optimization.allgather_bucket_size))

    def _count(self, *, skipped: bool) -> None:
        """Count the step and update the loss scale and the LR schedule."""
        previous_scale = self.scaler.scale
        self.was_applied = not skipped
        self.counters.global_steps += 1
        self.counters.skipped_steps += int(skipped)
        try:
            if self.scaler.settings is not None:
                self.scaler.update(skipped)
        finally:
            if skipped and self.world.rank == 0:
                change = f"; the loss scale was {previous_scale:g} and is {self.scaler.scale:g}"
                scale = change if self.scaler.settings else ""
                _log.info("step %d skipped: its gradients are not finite%s", self.counters.global_steps, scale)
        if not skipped:
            self.optimizer.note_step()
            if self.schedule is not None:
                self.schedule.advance()

    def close(self) -> None:
        """Release hooks, memory, threads and the run folder."""
        self.update.close()
        self.gradients.close()
        if self.compiled is not None:
            self.compiled.remove()
        if self.hooks is not None:
            self.hooks.remove()
        if self.activations is not None:
            self.activations.close()
        self.state.plans.clear()
        self.state.store.close()
