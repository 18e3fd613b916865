"""Progress of a run in training: lines in the log, and values for the monitors, all on rank 0."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..config.keys import acting
from .journal import RunJournal
from .monitors import Monitors
from .statistics import MemoryStatistics
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
        if len(losses) <= 1:
            return losses[0] if losses else None
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
        settings = training.config.settings
        self._training = training
        self._times = times
        self.monitors = monitors
        self.utilisation = StepUtilisation(training)
        self.journal = RunJournal(training, self.utilisation)
        self._every = settings.steps_per_print
        self.enabled = False
        """Whether steps are reported at all."""
        self.loss: Loss = None
        """Of the last step, as reported."""
        self._writes = bool(monitors)
        if self._every > 0 or self._writes or self.journal.enabled:
            self.want()
        self._losses = StepLosses()
        self._aside_since_s: float | None = None
        """When the evaluation under way began."""
        self._last_step = PhaseTimes()
        self._last_line = PhaseTimes()
        self._line_step = training.counters.global_steps
        self._line_samples, self._line_s = training.samples, time.perf_counter()
        if settings.dump_state and training.world.rank == 0:
            config = json.dumps(acting(settings), indent=2)
            _log.info("state at the start:\n%s\n%s", config, _memory_line(training))

    def forward_begins(self) -> bool:
        """Return whether a forward is one of training, by its model's mode or its gradients: the time of evaluations is no
        step's."""
        now_s = time.perf_counter()
        if not (self._training.model.training or torch.is_grad_enabled()):
            self._aside_since_s = self._aside_since_s or now_s
            return False
        if self._aside_since_s is not None:
            self.utilisation.leave_out(now_s - self._aside_since_s)
            self._aside_since_s = None
        return True

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
        self.utilisation.step_ended()
        prints = self._every > 0 and self._training.counters.global_steps % self._every == 0
        taken, told = self._losses.take(), self._training.world.told  # the next step's may not be known
        loss = sum(told) / len(told) if told else value_of(taken)
        times = replace(self._times)
        spent, self._last_step = times - self._last_step, times
        if self._writes or prints:
            loss = number = loss() if callable(loss) else loss
            if self._writes:
                self._write(number, spent)
            if prints:
                self._print(number)
        self.loss = loss
        self.journal.step_ended(loss, spent)

    def _write(self, loss: float | None, spent: PhaseTimes) -> None:
        training = self._training
        found = {
            "train_loss": loss,
            "lr": float(training.optimizer.param_groups[0]["lr"]),
            "loss_scale": training.scaler.scale if training.config.precision == "fp16" else None,
            "grad_norm": training.norm,
            "elapsed_time_ms_forward": spent.forward_s * 1e3,
            "elapsed_time_ms_backward": spent.backward_s * 1e3,
            "elapsed_time_ms_step": spent.optimizer_s * 1e3,
            "mfu": self.utilisation.last,
        }
        values = {_METRICS + name: value for name, value in found.items() if value is not None}
        self.monitors.write(values, training.samples)

    def _print(self, loss: float | None) -> None:
        training, settings = self._training, self._training.config.settings
        step, times, now_s = training.counters.global_steps, replace(self._times), time.perf_counter()
        spent, self._last_line = times - self._last_line, times
        samples, self._line_samples = training.samples - self._line_samples, training.samples
        passed_s, self._line_s = now_s - self._line_s, now_s
        # A load may have moved the count of steps either way.
        steps, self._line_step = step - self._line_step, step
        rates = ", ".join(f"{group['lr']:.3g}" for group in training.optimizer.param_groups)
        known = "" if loss is None else f"loss {loss:.4f}, "
        skipped = training.counters.skipped_steps
        lines = [f"{known}lr {rates}, gradient norm {training.norm:.4g}, skipped {skipped}"]
        if settings.wall_clock_breakdown and steps > 0:
            phases = (("forward", spent.forward_s), ("backward", spent.backward_s), ("step", spent.optimizer_s))
            means = ", ".join(f"{name} {1e3 * seconds / steps:.1f} ms" for name, seconds in phases)
            lines.append(f"{means}, mean of {steps} steps")
        if settings.timers.throughput.enabled and steps > 0:
            lines.append(f"{samples / passed_s:.4g} samples/s, mean of {steps} steps")
        if settings.memory_breakdown:
            lines.append(_memory_line(training))
        for line in lines:
            _log.info("step %d: %s", step, line)

    def close(self) -> None:
        """Close the monitors."""
        self.monitors.close()


def _memory_line(training: Training) -> str:
    return MemoryStatistics.of(training.state.store.statistics(), training.world.device).line()
