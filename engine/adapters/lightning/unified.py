"""The strategy for `import lightning`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from .precision import EnginePrecision
from .strategy import EngineStrategy, register


class ZstorePrecision(EnginePrecision, Precision):  # type: ignore[misc]
    """EnginePrecision for `lightning`."""


class ZstoreStrategy(EngineStrategy, DDPStrategy):  # type: ignore[misc]
    """EngineStrategy for `lightning`."""

    library = "lightning.pytorch"
    precision_class: Any = ZstorePrecision


register(StrategyRegistry, ZstoreStrategy)
