"""Progress of a run in training: lines in the log, and values for the monitors, all on rank 0."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..config.keys import acting
from .memory import lack_of_memory, memory_statistics
from .monitors import Monitors
from .utilisation import PhaseTimes, StepUtilisation

if TYPE_CHECKING:
    from ..training.training import Training

_log = logging.getLogger("zstore")

_METRICS = "Train/Samples/"

Loss = float | None | Callable[[], float]
"""A loss, None if it is not known, or a function that waits for it."""


class StepLosses:
    """Collects the losses of a step's micro-batches on this rank."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._are_parts = False

    def add(self, loss: torch.Tensor, *, is_new: bool, is_part: bool) -> None:
        """Note the loss of a micro-batch, with which `is_new` begins a step; one that `is_part` of the step's was divided by
        the number of micro-batches."""
        if is_new:
            self._losses.clear()
        self._losses.append(loss.detach())
        self._are_parts = is_part

    def take(self) -> torch.Tensor | None:
        """Return the step's loss, one element, on its device, and forget it; None if it is not known."""
        losses, self._losses = self._losses, []
        if not losses:
            return None
        if len(losses) == 1:
            return losses[0]
        stacked = torch.stack([loss.float().reshape(()) for loss in losses])
        return stacked.sum() if self._are_parts else stacked.mean()


def value_of(loss: torch.Tensor | None) -> Loss:
    """Return a loss as a number: at once if it is in host memory, else a function that waits for the copy, which any thread
    may call. The calling thread does not wait."""
    if loss is None:
        return None
    if loss.device.type != "cuda":
        return float(loss)
    here = torch.empty((), dtype=torch.float32, pin_memory=True)
    here.copy_(loss.reshape(()), non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(loss.device))

    def wait() -> float:
        arrived.synchronize()
        return float(here)

    return wait


class RunReport:
    """Is told of every known loss and of every step, and reports as the config asks. See [Note: metrics] in `monitors`.

    The value of the loss is copied from the device once in a step that is reported, else never.
    """

    def __init__(self, training: Training, times: PhaseTimes, monitors: Monitors) -> None:
        self._training = training
        self._times = times
        self.monitors = monitors
        self.utilisation = StepUtilisation(training)
        self._writes = bool(monitors)
        self._every = training.config.settings.steps_per_print
        self.enabled = False
        """Whether steps are reported at all."""
        self.loss: Loss = None
        """Of the last step, as reported."""
        self.aside_s = 0.0
        """Seconds of evaluations, which are no step's."""
        if self._every > 0 or self._writes:
            self.want()
        self._looks = training.world.local_rank == 0
        self._losses = StepLosses()
        self._aside_since_s: float | None = None
        """When the evaluation under way began."""
        self._last_step = PhaseTimes()
        self._last_line = PhaseTimes()
        self._line_step = training.counters.global_steps
        self._line_samples, self._line_s = training.samples, time.perf_counter()
        if training.config.settings.dump_state and training.world.rank == 0:
            _log.info("state at the start:\n%s", state_text(training))

    def look_at(self, inputs: Iterable[Any]) -> bool:
        """Return whether a forward is one of training, by its model's mode or its gradients: the time of evaluations is no
        step's. Warn before the first if it needs more memory than there is."""
        trains = self._training.model.training or torch.is_grad_enabled()
        now_s = time.perf_counter()
        if not trains:
            self._aside_since_s = self._aside_since_s or now_s
        elif self._aside_since_s is not None:
            aside_s, self._aside_since_s = now_s - self._aside_since_s, None
            self.aside_s += aside_s
            self.utilisation.leave_out(aside_s)
        if self._looks and torch.is_grad_enabled() and self._training.model.training:
            self._looks = False
            if told := lack_of_memory(self._training, inputs):
                _log.warning("%s", told)
        return trains

    def add_loss(self, loss: torch.Tensor, *, is_part: bool = False) -> None:
        """Note the loss of a micro-batch, before its backward; one that `is_part` of the step's is divided already."""
        # Not the accumulation's: zero_grad() forgets gradients, and lets it go on.
        self._losses.add(loss, is_new=self._training.gradients.backwards == 0, is_part=is_part)

    def want(self) -> None:
        """Have each step's loss and utilisation known on rank 0; call it before the first step."""
        if self._training.world.rank == 0 and not self._training.config.frozen:
            self.enabled = self.utilisation.counts = True

    def step_begins(self) -> None:
        """Let the loss of the step travel to the other ranks with its first message, by which the device has computed it (all
        ranks of several)."""
        taken = self._losses.take()
        world = self._training.world
        world.told, world.tells = [], lambda: None if taken is None else float(taken)

    def step_ended(self) -> None:
        """Report an optimizer step, taken or skipped."""
        prints = self._every > 0 and self._training.counters.global_steps % self._every == 0
        if not self.enabled:
            return
        self.utilisation.step_ended()
        taken, told = self._losses.take(), self._training.world.told  # the next step's may not be known
        loss = sum(told) / len(told) if told else value_of(taken)
        if self._writes or prints:
            loss = number = loss() if callable(loss) else loss
            if self._writes:
                self._write(number)
            if prints:
                self._print(number)
        self.loss = loss

    def _write(self, loss: float | None) -> None:
        training, times = self._training, replace(self._times)
        spent, self._last_step = times - self._last_step, times
        values = {} if loss is None else {"train_loss": loss}
        values["lr"] = float(training.optimizer.param_groups[0]["lr"])
        if training.config.precision == "fp16":
            values["loss_scale"] = training.scaler.scale
        if training.norm is not None:
            values["grad_norm"] = training.norm
        values["elapsed_time_ms_forward"] = spent.forward_s * 1e3
        values["elapsed_time_ms_backward"] = spent.backward_s * 1e3
        values["elapsed_time_ms_step"] = spent.optimizer_s * 1e3
        if self.utilisation.last is not None:
            values["mfu"] = self.utilisation.last
        self.monitors.write({_METRICS + name: value for name, value in values.items()}, training.samples)

    def _print(self, loss: float | None) -> None:
        training, settings = self._training, self._training.config.settings
        step = training.counters.global_steps
        _log.info(
            "step %d: %slr %s, gradient norm %.4g, skipped %d",
            step,
            "" if loss is None else f"loss {loss:.4f}, ",
            ", ".join(f"{group['lr']:.3g}" for group in training.optimizer.param_groups),
            training.norm,
            training.counters.skipped_steps,
        )
        times = replace(self._times)
        spent, self._last_line = times - self._last_line, times
        # A load may have moved the count of steps either way.
        steps, self._line_step = step - self._line_step, step
        if settings.wall_clock_breakdown and steps > 0:
            _log.info(
                "step %d: forward %.1f ms, backward %.1f ms, step %.1f ms, mean of %d steps",
                step,
                *(1e3 * seconds / steps for seconds in (spent.forward_s, spent.backward_s, spent.optimizer_s)),
                steps,
            )
        if settings.timers.throughput.enabled and steps > 0:
            samples, self._line_samples = training.samples - self._line_samples, training.samples
            now_s = time.perf_counter()
            passed_s, self._line_s = now_s - self._line_s, now_s
            _log.info("step %d: %.4g samples/s, mean of %d steps", step, samples / passed_s, steps)
        if settings.memory_breakdown:
            _log.info("step %d: %s", step, memory_statistics(training.state.store, training.world.device).line())

    def close(self) -> None:
        """Close the monitors."""
        self.monitors.close()


def state_text(training: Training) -> str:
    """Return the config as it acts and the places of all state, a line for each parameter."""
    state, world = training.state, training.world
    lines = [json.dumps(acting(training.config.settings), indent=2)]
    for record in state.records:
        tiers: dict[str, list[str]] = {}
        for array in state.all_arrays(record):
            tiers.setdefault(state.store.tier_of(array), []).append(array.removesuffix(f"/{record.name}"))
        rests = "; ".join(f"{tier}: {', '.join(names)}" for tier, names in tiers.items())
        frozen = ", frozen" if record.group is None else ""
        dtype, residency = str(record.dtype).removeprefix("torch."), record.residency.name.lower()
        lines.append(f"{record.name} {list(record.parameter.shape)} {dtype}{frozen}, {residency}; {rests}")
    memory = memory_statistics(state.store, world.device).line()
    return "\n".join([*lines, f"{len(state.records)} parameters on rank {world.rank}; {memory}"])
