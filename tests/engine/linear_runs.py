"""Engines over one linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zstore
from zstore.engine import Engine


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "steps_per_print": 0,
    } | changes


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 4)


def start(model: nn.Module | None = None, **changes: Any) -> Engine:
    engine, *_ = zstore.initialize(model=model or linear(), config=settings(**changes))
    return engine


def one_step(engine: Engine, x: torch.Tensor | None = None) -> float:
    x = torch.ones(2, 8, dtype=next(engine.parameters()).dtype) if x is None else x
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())
