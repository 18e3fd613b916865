"""Monitors: the destinations of a run's metrics, written after each step on rank 0.

[Note: metrics]
There is one value per name and optimizer step, indexed by the samples seen over all ranks. The names are DeepSpeed's:
`Train/Samples/` and `train_loss` (mean over all micro-batches of the step), `lr` (of the first group, for the next step),
`loss_scale` (fp16 only), `elapsed_time_ms_forward`, `_backward`, `_step`; `grad_norm` and `mfu` are zstore's own. CSV and
TensorBoard files are complete when `write` returns, so a killed run loses nothing; wandb writes every 15 s, in its own process.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from zstore.errors import ConfigError, UsageError
from zstore.io import user_path

from ..config.config import Config
from ..config.keys import active_values
from ..config.sections import CsvMonitorSection, WandbSection

if TYPE_CHECKING:
    from zstore.ranks.world import World

_log = logging.getLogger("zstore")

_SAMPLES = "Train/samples"


class Monitor(Protocol):
    """A destination of metrics: `write` is called after each step, `close` at the end (rank 0). Both may raise anything."""

    def write(self, values: Mapping[str, float], samples: int) -> None:
        """Write the values of one step."""

    def close(self) -> None:
        """Complete and close all files."""


class CsvMonitor:
    """A CSV file per metric, with a header `step,<name>` and a row per step; later runs append."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, values: Mapping[str, float], samples: int) -> None:
        last_error: OSError | None = None
        for name, value in values.items():
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            try:
                with path.open("a", newline="", encoding="utf-8") as file:
                    rows = csv.writer(file)
                    if file.tell() == 0:
                        rows.writerow(["step", name.rpartition("/")[2]])
                    rows.writerow([samples, value])
            except OSError as error:
                last_error = error
        if last_error is not None:
            raise last_error

    def close(self) -> None:
        """Do nothing: no file is open."""


class TensorboardMonitor:
    """Writes scalars to an event file."""

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
    """A run of Weights & Biases: the script's own, which is left open, or a new one.

    Values are logged against the metric `Train/samples`: wandb's step counter belongs to the script, and cannot go back,
    as training does when it loads an earlier checkpoint.
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
    """All monitors of a run. The first failure of each is logged as a warning, and each step retries it.

    A script writes its own values with `write_events`, as with DeepSpeed's `engine.monitor`.
    """

    def __init__(self, monitors: Sequence[Monitor] = (), *, enabled: bool = False) -> None:
        self._monitors = list(monitors)
        self.enabled = enabled
        """Whether the config enables a monitor; the same on every rank."""
        self._failed: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._monitors)

    def write(self, values: Mapping[str, float], samples: int) -> None:
        """Write the values of one step to each monitor."""
        for monitor in self._monitors:
            self._try(monitor, partial(monitor.write, values, samples))

    def write_events(self, events: Sequence[tuple[Any, ...]]) -> None:
        """Write (name, value, sample) triples, on rank 0; further items of a triple are ignored. Raises UsageError for
        anything else."""
        for event in events:
            try:
                name, value, sample = event[:3]
                values, num_samples = {str(name): float(value)}, int(sample)
            except (TypeError, ValueError) as error:
                raise UsageError(
                    f"write_events(): expected (name, number, sample) triples, got {event!r:.100}"
                ) from error
            self.write(values, num_samples)

    def close(self) -> None:
        """Close all monitors; a second call does nothing."""
        monitors, self._monitors = self._monitors, []
        for monitor in monitors:
            self._try(monitor, monitor.close)

    def _try(self, monitor: Monitor, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if id(monitor) not in self._failed:
                self._failed.add(id(monitor))
                text = "%s failed, and metrics may be missing from now on; training continues: %s: %s"
                _log.warning(text, type(monitor).__name__, type(error).__name__, error)


def open_monitors(config: Config, world: World) -> Monitors:
    """Return the monitors that the config enables; none on ranks other than 0 or for a frozen engine (all ranks).

    Raises ConfigError, on every rank, if a package is not installed or a folder cannot be used.
    """
    if config.frozen:  # nothing to report, and a different engine may use these folders
        return Monitors()
    csv_files, tensorboard, wandb = config.settings.csv_monitor, config.settings.tensorboard, config.settings.wandb
    makers: dict[str, tuple[bool, Callable[[], Monitor]]] = {
        "csv_monitor": (csv_files.enabled, lambda: CsvMonitor(_folder(csv_files))),
        "tensorboard": (tensorboard.enabled, lambda: TensorboardMonitor(_folder(tensorboard))),
        "wandb": (wandb.enabled, lambda: WandbMonitor(wandb, active_values(config.settings))),
    }
    enabled_makers = {key: make for key, (enabled, make) in makers.items() if enabled}
    opened: list[Monitor] = []
    try:
        with world.agreeing():
            for key, make in enabled_makers.items() if world.rank == 0 else ():
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
    return Monitors(opened, enabled=bool(enabled_makers))


def _folder(section: CsvMonitorSection) -> Path:
    return user_path(section.output_path) / section.job_name
