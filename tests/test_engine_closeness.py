"""Closeness, not bits: the same global batch at other world sizes and stages gives the same curve, up to rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zstore
from tests.engine_models import batch, make_net
from zstore.testing.ranks import run_ranks

STEPS, SAMPLES = 6, 8


def _curve(rank: int, world_size: int, stage: int, precision: str) -> list[float]:
    config: dict[str, Any] = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": stage} | ({"stage3_param_persistence_threshold": 50} if stage == 3 else {}),
        "steps_per_print": 0,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    engine, *_ = zstore.initialize(model=make_net(rank), config=config)  # rank 0's values count
    with engine:
        curve = []
        for step in range(STEPS):
            losses = []
            for micro in range(engine.gradient_accumulation_steps()):
                # The same samples in every step, whoever has them.
                loss = engine(*batch(step % 2, 0, micro * world_size + rank))
                losses.append(float(loss.detach()))
                engine.backward(loss)
                engine.step()
            curve.append(float(np.mean(engine.world.all_gather_object(losses))))
        return curve


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (3, "fp32"), (3, "bf16")])
def test_four_ranks_follow_one(stage: int, precision: str) -> None:
    (alone,) = run_ranks(_curve, 1, 1, 0, "fp32")
    curves = run_ranks(_curve, 4, 4, stage, precision)
    assert curves[1:] == curves[:-1]
    np.testing.assert_allclose(curves[0], alone, rtol=1e-5 if precision == "fp32" else 5e-3)
    assert alone[-1] < alone[0] - 0.2
