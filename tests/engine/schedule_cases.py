"""Schedules by config, and the rates that DeepSpeed's have."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zstore.engine.config.config import load_config
from zstore.engine.config.resolve import ResolveContext
from zstore.engine.training.lr_schedules import NamedSchedule, named_schedule

DATA = Path(__file__).parents[1] / "data"
OWN_LR = 0.5
"""Learning rate of the first group; the second has twice as much, and so on."""

# The learning rate of each step, as DeepSpeed 0.19.8 gives it.
KNOWN: list[tuple[str, dict[str, Any], list[float]]] = json.loads((DATA / "schedules.json").read_text())


def adam(groups: int = 1) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [nn.Parameter(torch.zeros(1))], "lr": OWN_LR * (n + 1)} for n in range(groups)])


def made(name: str, params: dict[str, Any], optimizer: torch.optim.Optimizer | None = None) -> NamedSchedule:
    config = {"train_batch_size": 1, "scheduler": {"type": name, "params": params}}
    section = load_config(config).resolve(ResolveContext(world_size=1, client_optimizer=True)).settings.scheduler
    return named_schedule(section, optimizer or adam())
