"""Progress of a run in training: lines in the log, and monitors, the destinations of its metrics, step by step, on rank 0.

[Note: metrics]
One value per name and optimizer step, against the samples seen so far over all ranks. The names are DeepSpeed's:
`Train/Samples/` and `train_loss` (mean over the micro-batches of the step, of all ranks), `lr` (of the first group, for the
next step), `loss_scale` (fp16 alone), `elapsed_time_ms_forward`, `_backward`, `_step`; and `grad_norm`, which it does
not write. CSV files and TensorBoard's have everything when `write` returns, so that a killed run keeps it; wandb hands
it to a process of its own, which writes every 15 seconds.
"""

from __future__ import annotations

import csv
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from zstore.errors import ConfigError, UsageError
from zstore.io import most_resident_bytes, user_path
from zstore.sizes import format_bytes

from ..config.config import Config
from ..config.keys import acting
from ..config.sections import CsvMonitorSection, WandbSection
from .journal import RunJournal
from .statistics import PhaseTimes, StepUtilisation, cuda_peak_bytes

if TYPE_CHECKING:
    from zstore.ranks.world import World

    from ..training.training import Training

_log = logging.getLogger("zstore")

_METRICS = "Train/Samples/"
_SAMPLES = "Train/samples"

Loss = float | None | Callable[[], float]
"""A loss, None if it is not known, or a function that waits for it."""


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
    """Is told of every known loss and of every step, and reports as the config asks. See [Note: metrics].

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
        """Return the step's loss from those of its micro-batches, one element, on its device; None if it is not known."""
        losses, self._losses = self._losses, []
        if len(losses) <= 1:
            return losses[0] if losses else None
        stacked = torch.stack([loss.float().reshape(()) for loss in losses])
        return stacked.sum() if self._are_parts else stacked.mean()

    def step_begins(self) -> None:
        """Send the step's loss with its first message, by which the device has computed it (all ranks of several)."""
        self._to_send[:] = [] if (loss := self._take_loss()) is None else [loss]
        self._training.world.received["loss"] = []

    def step_ended(self) -> None:
        """Report an optimizer step, taken or skipped."""
        self.utilisation.step_ended()
        prints = self._every > 0 and self._training.counters.global_steps % self._every == 0
        # The next step's may not be known.
        taken, losses = self._take_loss(), self._training.world.received.get("loss", [])
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


def _memory_line(training: Training) -> str:
    store, device = training.state.store.statistics(), training.world.device
    sizes = (store.device_bytes, store.host_bytes, store.disk_bytes, store.pool_bytes, store.pool_peak_bytes)
    line = "state on device {}, host {}, disk {}; buffers {}, at most {} in use; peak of the process {}".format(
        *map(format_bytes, (*sizes, most_resident_bytes()))
    )
    return line + (f", of CUDA {format_bytes(nbytes)}" if (nbytes := cuda_peak_bytes(device)) else "")


# -- monitors --------------------------------------------------------------------------------------------------------


class Monitor(Protocol):
    """A destination of metrics: `write` once a step, `close` at the end (rank 0). Both may raise anything."""

    def write(self, values: Mapping[str, float], samples: int) -> None:
        """Keep the values of one step."""

    def close(self) -> None:
        """Complete and close everything."""


class CsvMonitor:
    """A CSV file for each metric, `step,<name>` and a row per step; a later run goes on at its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, values: Mapping[str, float], samples: int) -> None:
        failed: OSError | None = None
        for name, value in values.items():
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            try:
                with path.open("a", newline="", encoding="utf-8") as file:
                    rows = csv.writer(file)
                    if file.tell() == 0:
                        rows.writerow(["step", name.rpartition("/")[2]])
                    rows.writerow([samples, value])
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Do nothing: no file is open."""


class TensorboardMonitor:
    """Scalars in an event file."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder))

    def write(self, values: Mapping[str, float], samples: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbMonitor:
    """A run of Weights & Biases: the script's own if it began one, which is left open, else a new one.

    The values are logged against the metric `Train/samples` and not against wandb's own count of steps, which belongs to
    the script and never goes back, as training does when it loads an earlier checkpoint.
    """

    def __init__(self, section: WandbSection, config: Mapping[str, Any]) -> None:
        import wandb

        self._is_ours = wandb.run is None
        self._run: Any = wandb.run or wandb.init(
            project=section.project, group=section.group, entity=section.team, config=dict(config)
        )
        self._run.define_metric(_SAMPLES)
        self._run.define_metric("Train/Samples/*", step_metric=_SAMPLES)

    def write(self, values: Mapping[str, float], samples: int) -> None:
        self._run.log({**values, _SAMPLES: samples})

    def close(self) -> None:
        if self._is_ours:
            self._run.finish()


class Monitors:
    """All monitors of a run. One that fails warns once and stops nothing; it is tried again at each step.

    A script writes its own values with `write_events`, as to DeepSpeed's `engine.monitor`.
    """

    def __init__(self, monitors: Sequence[Monitor] = (), *, enabled: bool = False) -> None:
        self._monitors = list(monitors)
        self.enabled = enabled
        """Whether the config switches a monitor on: the same on every rank."""
        self._failed: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._monitors)

    def write(self, values: Mapping[str, float], samples: int) -> None:
        """Give the values of one step to each monitor."""
        for monitor in self._monitors:
            self._try(monitor, partial(monitor.write, values, samples))

    def write_events(self, events: Sequence[tuple[Any, ...]]) -> None:
        """Write (name, value, sample) triples; those of other ranks than 0 are dropped, and so are items after a triple's
        third. Raises UsageError for anything else."""
        for event in events:
            try:
                name, value, sample = event[:3]
                values, at = {str(name): float(value)}, int(sample)
            except (TypeError, ValueError) as error:
                raise UsageError(
                    f"write_events(): expected (name, number, sample) triples, got {event!r:.100}"
                ) from error
            self.write(values, at)

    def close(self) -> None:
        """Close each monitor, once."""
        monitors, self._monitors = self._monitors, []
        for monitor in monitors:
            self._try(monitor, monitor.close)

    def _try(self, monitor: Monitor, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if id(monitor) not in self._failed:
                self._failed.add(id(monitor))
                what = "%s failed, and metrics may be missing from now on; training goes on: %s: %s"
                _log.warning(what, type(monitor).__name__, type(error).__name__, error)


def open_monitors(config: Config, world: World) -> Monitors:
    """Return the monitors that the config switches on; on other ranks than 0, and of an engine without an optimizer,
    there are none (all ranks).

    Raises ConfigError, on every rank, for a package that is not installed or a place that cannot be used.
    """
    if config.frozen:  # it has nothing to report, and another engine may have these places
        return Monitors()
    csv_files, tensorboard, wandb = config.settings.csv_monitor, config.settings.tensorboard, config.settings.wandb
    makers: dict[str, tuple[bool, Callable[[], Monitor]]] = {
        "csv_monitor": (csv_files.enabled, lambda: CsvMonitor(_folder(csv_files))),
        "tensorboard": (tensorboard.enabled, lambda: TensorboardMonitor(_folder(tensorboard))),
        "wandb": (wandb.enabled, lambda: WandbMonitor(wandb, acting(config.settings))),
    }
    wanted = {key: make for key, (enabled, make) in makers.items() if enabled}
    opened: list[Monitor] = []
    try:
        with world.agreeing():
            for key, make in wanted.items() if world.rank == 0 else ():
                try:
                    opened.append(make())
                except ImportError as error:
                    raise ConfigError(
                        f"{key}.enabled is true, but the package {key} is not installed: pip install 'zstore[{key}]', or set "
                        "it to false"
                    ) from error
                except Exception as error:
                    kind = type(error).__name__
                    raise ConfigError(f"{key}: the monitor cannot be opened: {kind}: {error}") from error
    except BaseException:
        Monitors(opened).close()
        raise
    return Monitors(opened, enabled=bool(wanted))


def _folder(section: CsvMonitorSection) -> Path:
    return user_path(section.output_path) / section.job_name
