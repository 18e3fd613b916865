"""What is known of the trained parameters of a DeepSpeed checkpoint. Data alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .pieces import Elements

MASTER = "fp32"
"""The master among a parameter's states; the others are the optimizer's slots, by their names."""

Shapes = dict[str, tuple[int, ...]]


@dataclass
class TrainedParameter:
    """One parameter that the optimizer updates."""

    shape: tuple[int, ...]
    states: dict[str, tuple[str, Elements]]
    """Data type and elements of the master and of each slot."""
    scalars: dict[str, float]


@dataclass
class States:
    """What the optimizer's files hold."""

    stage: int
    world_size: int
    parameters: dict[str, TrainedParameter] = field(default_factory=dict)
    groups: list[Mapping[Any, Any]] = field(default_factory=list)
    """The optimizer's parameter groups: their settings."""
    scaler: Any = None
    """The loss scaler, an object or a dict."""
    num_offloaded: int = 0
    """Flat tensors that were on NVMe."""
    notes: list[str] = field(default_factory=list)
