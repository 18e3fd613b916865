"""The strategy for `import pytorch_lightning`."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from .precision import EnginePrecision
from .strategy import EngineStrategy, register


class ZstorePrecision(EnginePrecision, Precision):  # type: ignore[misc]
    """EnginePrecision for `pytorch_lightning`."""


class ZstoreStrategy(EngineStrategy, DDPStrategy):  # type: ignore[misc]
    """EngineStrategy for `pytorch_lightning`."""

    library = "pytorch_lightning"
    precision_class: Any = ZstorePrecision


register(StrategyRegistry, ZstoreStrategy)
