"""Schedules by config, and the rates that DeepSpeed's have."""

from typing import Any

import torch
from torch import nn

from zstore.engine.config.config import load_config
from zstore.engine.config.resolve import ResolveContext
from zstore.engine.training.lr_schedules import NamedSchedule, named_schedule

OWN_LR = 0.5
"""Learning rate of the first group; the second has twice as much, and so on."""

# The learning rate of each step, as DeepSpeed 0.19.8 gives it.
KNOWN: list[tuple[str, dict[str, Any], list[float]]] = [
    (
        "WarmupLR",
        {"warmup_min_lr": 0.1, "warmup_max_lr": 1.1, "warmup_num_steps": 4},
        [0.1, 0.1, 0.6, 0.892481250361, 1.1, 1.1, 1.1],
    ),
    ("WarmupLR", {"warmup_num_steps": 1}, [0, 0, 0.5, 0.5]),
    ("WarmupLR", {"warmup_num_steps": 2, "warmup_type": "linear"}, [0, 0, 0.25, 0.5, 0.5]),
    (
        "WarmupDecayLR",
        {"total_num_steps": 8, "warmup_min_lr": 0.1, "warmup_max_lr": 1.1, "warmup_num_steps": 3},
        [0.1, 0.1, 0.730929753571, 1.1, 1.1, 0.9, 0.7, 0.5, 0.3, 0.1, 0.1, 0.1],
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 2, "warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"},
        [0, 0, 0.25, 0.5, 0.75, 0, 0],
    ),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 8,
            "warmup_min_ratio": 0.2,
            "warmup_num_steps": 3,
            "cos_min_ratio": 0.1,
            "warmup_type": "linear",
        },
        [0, 0.1, 0.2333333333, 0.3666666667, 0.4570288237, 0.3445288237, 0.2054711763, 0.0929711763, 0.05, 0.05, 0.05],
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 6, "warmup_num_steps": 1},
        [0, 0, 0.5, 0.426784017627, 0.250025, 0.0732659823729, 5e-5, 5e-5],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 0.9,
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 2,
            "decay_lr_rate": 0.5,
            "decay_step_size": 2,
        },
        [0.1, 0.3, 0.5, 0.7, 0.9, 0.5, 0.1, 0.08, 0.0666666666667, 0.0571428571429, 0.05],
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.1, "cycle_max_lr": 0.9, "cycle_first_step_size": 4, "cycle_first_stair_count": 2},
        [0.1, 0.1, 0.5, 0.5, 0.9, 0.5, 0.5, 0.1, 0.1, 0.1],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 3.0},
        [0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0],
    ),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 0.1,
            "lr_range_test_step_size": 2,
            "lr_range_test_step_rate": 3.0,
            "lr_range_test_staircase": True,
        },
        [0.1, 0.1, 0.4, 0.4, 0.7, 0.7, 1.0],
    ),
]


def adam(groups: int = 1) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [nn.Parameter(torch.zeros(1))], "lr": OWN_LR * (n + 1)} for n in range(groups)])


def made(name: str, params: dict[str, Any], optimizer: torch.optim.Optimizer | None = None) -> NamedSchedule:
    config = {"train_batch_size": 1, "scheduler": {"type": name, "params": params}}
    section = load_config(config).resolve(ResolveContext(world_size=1, client_optimizer=True)).settings.scheduler
    return named_schedule(section, optimizer or adam())
