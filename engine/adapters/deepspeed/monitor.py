"""`deepspeed.monitor`: a script's own values, written to the destinations in a config's sections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from zstore.engine.config.keys import Section
from zstore.engine.report.monitors import monitors_of
from zstore.ranks.world import World

from .config import DeepSpeedMonitorConfig


class MonitorMaster:
    """All monitors that the sections switch on. Rank 0 writes; other ranks' values are dropped."""

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        self.monitor_config = monitor_config
        sections = monitor_config.csv_monitor, monitor_config.tensorboard, monitor_config.wandb
        self._monitors = monitors_of(*sections, config={}, opens=World.current().rank == 0)
        self.enabled = self._monitors.enabled

    def write_events(self, event_list: Sequence[tuple[Any, ...]]) -> None:
        """Write (name, value, sample) triples. Raises UsageError for anything else."""
        self._monitors.write_events(event_list)


class _OfOne(MonitorMaster):
    """The monitor of one section, whose keys are its attributes."""

    key: ClassVar[str]

    def __init__(self, section: Section) -> None:
        super().__init__(DeepSpeedMonitorConfig().model_copy(update={self.key: section}))

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self.monitor_config, self.key), name)


csvMonitor = type("csvMonitor", (_OfOne,), {"key": "csv_monitor", "__doc__": "CSV files."})  # noqa: N816 - DeepSpeed's name
TensorBoardMonitor = type("TensorBoardMonitor", (_OfOne,), {"key": "tensorboard", "__doc__": "TensorBoard."})
WandbMonitor = type("WandbMonitor", (_OfOne,), {"key": "wandb", "__doc__": "Weights & Biases."})
