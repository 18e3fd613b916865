"""Progress of a run in training: lines in the log, and values for the monitors, all on rank 0."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from zstore.io import most_resident_bytes
from zstore.sizes import format_bytes

from ..config.keys import acting
from .journal import RunJournal
from .monitors import Monitors
from .statistics import cuda_peak_bytes
from .utilisation import PhaseTimes, StepUtilisation

if TYPE_CHECKING:
    from ..training.training import Training

_log = logging.getLogger("zstore")

_METRICS = "Train/Samples/"

Loss = float | None | Callable[[], float]
"""A loss, None if it is not known, or a function that waits for it."""


def _mean_of(losses: list[torch.Tensor], *, are_parts: bool) -> torch.Tensor | None:
    """Return a step's loss from those of its micro-batches, one element, on its device; None if it is not known."""
    if len(losses) <= 1:
        return losses[0] if losses else None
    stacked = torch.stack([loss.float().reshape(()) for loss in losses])
    return stacked.sum() if are_parts else stacked.mean()


def _value_of(loss: torch.Tensor | None) -> Loss:
    """Return a loss as a number: at once if it is in host memory, else a function that waits for the copy, which any thread
    may call. The calling thread does not wait."""
    if loss is None or loss.device.type != "cuda":
        return None if loss is None else float(loss)
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
        settings, world = training.config.settings, training.world
        self._training = training
        self._times = times
        self.monitors = monitors
        self._writes = bool(monitors)
        self.utilisation = StepUtilisation(training)
        self.journal = RunJournal(training, self.utilisation)
        self._every = settings.steps_per_print
        reports = self._every > 0 or self._writes or self.journal.enabled
        self.enabled = self.utilisation.counts = reports and world.rank == 0 and not training.config.frozen
        """Whether steps are reported at all."""
        self._losses: list[torch.Tensor] = []
        self._are_parts = False
        """Whether the losses were divided by the number of micro-batches."""
        losses = self._to_send = list[torch.Tensor]()  # the step's, if it is known, until the other ranks have it
        world.messages["loss"] = lambda: float(losses.pop()) if losses else None  # it must not hold the training
        self._last_step = PhaseTimes()
        self._last_line = training.counters.global_steps, training.samples, PhaseTimes()
        self._line_s = time.perf_counter()
        if settings.dump_state and world.rank == 0:
            config = json.dumps(acting(settings), indent=2)
            _log.info("state at the start:\n%s\n%s", config, _memory_line(training))

    def forward_begins(self) -> bool:
        """Return whether a forward is one of training, by its model's mode or its gradients: the time of evaluations is no
        step's."""
        trains = self._training.model.training or torch.is_grad_enabled()
        self.utilisation.forward_begins(trains=trains)
        return trains

    def add_loss(self, loss: torch.Tensor, *, is_part: bool = False) -> None:
        """Note the loss of a micro-batch, before its backward; one that `is_part` of the step's is divided already."""
        # Not by the accumulation: zero_grad() forgets gradients, and lets it go on.
        if self._training.gradients.step.backwards == 0:
            self._losses.clear()
        self._losses.append(loss.detach())
        self._are_parts = is_part

    def _take_loss(self) -> torch.Tensor | None:
        losses, self._losses = self._losses, []
        return _mean_of(losses, are_parts=self._are_parts)

    def step_begins(self) -> None:
        """Send the step's loss with its first message, by which the device has computed it (all ranks of several)."""
        self._to_send[:] = [] if (loss := self._take_loss()) is None else [loss]
        self._training.world.received["loss"] = []

    def step_ended(self) -> None:
        """Report an optimizer step, taken or skipped."""
        self.utilisation.step_ended()
        prints = self._every > 0 and self._training.counters.global_steps % self._every == 0
        taken, losses = (
            self._take_loss(),
            self._training.world.received.get("loss", []),
        )  # the next step's may not be known
        loss = sum(losses) / len(losses) if losses else _value_of(taken)
        times = replace(self._times)
        spent, self._last_step = times - self._last_step, times
        if self._writes or prints:
            loss = number = loss() if callable(loss) else loss
            if self._writes:
                self._write(number, spent)
            if prints:
                self._print(number, times)
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

    def _print(self, loss: float | None, times: PhaseTimes) -> None:
        training, settings = self._training, self._training.config.settings
        (before, samples, earlier), now_s = self._last_line, time.perf_counter()
        step = training.counters.global_steps
        self._last_line = step, training.samples, times
        passed_s, self._line_s = now_s - self._line_s, now_s
        rates = ", ".join(f"{group['lr']:.3g}" for group in training.optimizer.param_groups)
        known = "" if loss is None else f"loss {loss:.4f}, "
        skipped = training.counters.skipped_steps
        lines = [f"{known}lr {rates}, gradient norm {training.norm:.4g}, skipped {skipped}"]
        steps = step - before  # a load may have moved the count either way
        if settings.wall_clock_breakdown and steps > 0:
            phases = zip(("forward", "backward", "step"), vars(times - earlier).values(), strict=True)
            means = ", ".join(f"{name} {1e3 * seconds / steps:.1f} ms" for name, seconds in phases)
            lines.append(f"{means}, mean of {steps} steps")
        if settings.timers.throughput.enabled and steps > 0:
            lines.append(f"{(training.samples - samples) / passed_s:.4g} samples/s, mean of {steps} steps")
        if settings.memory_breakdown:
            lines.append(_memory_line(training))
        for line in lines:
            _log.info("step %d: %s", step, line)

    def close(self) -> None:
        """Close the monitors."""
        self.monitors.close()


def _memory_line(training: Training) -> str:
    store, device = training.state.store.statistics(), training.world.device
    sizes = (store.device_bytes, store.host_bytes, store.disk_bytes, store.pool_bytes, store.pool_peak_bytes)
    line = "state on device {}, host {}, disk {}; buffers {}, at most {} in use; peak of the process {}".format(
        *map(format_bytes, (*sizes, most_resident_bytes()))
    )
    return line + (f", of CUDA {format_bytes(nbytes)}" if (nbytes := cuda_peak_bytes(device)) else "")
