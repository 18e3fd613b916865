"""Gradients over micro-batches: the type of their sum, and the type in which ranks exchange them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import zstore
from tests.engine.bits import STATIC_SCALE
from tests.engine.models import batch, make_net
from tests.engine.runs import constant_rate_config, make_config, start, state_of, step
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks

# -- many small gradients ---------------------------------------------------------------------------------------------


class Constant(nn.Module):
    """Has a gradient of `slope` at each of four elements in every micro-batch."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self) -> torch.Tensor:
        return (self.weight * self.slope).sum()


# Of the sum of 1,024 such gradients bf16 reaches a quarter, and fp16, which rounds each addition down, seven eighths.
SLOPES = {"bf16": 1.0, "fp16": 1279 / 1024}
HOST = {"stage": 1, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("precision", "zero"), [("bf16", {"stage": 0}), ("fp16", HOST), ("bf16", HOST), ("fp16", {"stage": 3})], ids=str
)
def test_the_mean_of_1024_equal_gradients_is_that_gradient(precision: str, zero: dict[str, Any]) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1024,
        "optimizer": {"type": "AdamW"},
        precision: {"enabled": True} | ({"loss_scale": STATIC_SCALE} if precision == "fp16" else {}),
        "zero_optimization": zero | {"stage3_param_persistence_threshold": 0},
        "steps_per_print": 0,
    }
    with zstore.initialize(model=Constant(SLOPES[precision]), config=config)[0] as engine:
        for _ in range(1024):
            engine.backward(engine())
            engine.step()
        assert engine.global_steps == 1
        assert engine.get_global_grad_norm() == pytest.approx(2 * SLOPES[precision], rel=1e-6)


# -- in a checkpoint --------------------------------------------------------------------------------------------------


def _saved_within_a_step(rank: int, folder: str) -> None:
    for number, (stage, device, overlap) in enumerate([(2, "cpu", "forward"), (3, "nvme", "none")]):
        place, ckpt = f"{folder}/{number}", f"{folder}/{number}/ckpt"
        config = make_config(stage, device, place, gradient_accumulation_steps=3, zstore={"step_overlap": overlap})
        with start(config) as engine:
            step(engine)
            expected = state_of(engine)
            for micro in range(2):
                engine.backward(engine(*batch(1, micro, rank)))
                if micro == 0:
                    engine.save_checkpoint(ckpt, "in the first")
                    engine.step()
                    engine.save_checkpoint(ckpt, "after the first")
            engine.save_checkpoint(ckpt, "in the second")
            engine.step()
            engine.backward(engine(*batch(1, 2, rank)))
            engine.step()
            ended = state_of(engine)
        for tag in ("in the first", "after the first", "in the second"):
            with start(config) as engine:
                engine.load_checkpoint(ckpt, tag)
                assert state_of(engine) == expected, (stage, tag)
                step(engine)
                assert state_of(engine) == ended, (stage, tag)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_save_within_a_step_has_the_state_of_the_last_step(world_size: int, tmp_path: Path) -> None:
    run_ranks(_saved_within_a_step, world_size, str(tmp_path))
    config = constant_rate_config(bf16={"enabled": False}, gradient_accumulation_steps=3)
    data = TensorDataset(torch.ones(28, 8))
    engine, _, loader, _ = zstore.initialize(model=nn.Linear(8, 1), config=config, training_data=data)
    with engine:
        engine.backward(engine(next(iter(loader))[0]).mean())
        engine.step()
        with pytest.raises(UsageError, match=r"the loader of initialize\(\) is past the micro-batches of it"):
            engine.save_checkpoint(str(tmp_path / "x"))


def _sent(rank: int) -> list[list[int]]:
    """Bytes that reductions sent, by stage and type."""
    found = []
    for stage in (0, 1, 3):
        found.append([])
        for name in (None, "bf16", "fp32"):
            keys = {} if name is None else {"communication_data_type": name}
            with start(make_config(stage, gradient_accumulation_steps=1, **keys)) as engine:
                step(engine)
                sent = engine.statistics().sent_bytes
            found[-1].append(sent["all_reduce" if stage == 0 else "reduce_scatter"])
    return found


def test_gradients_travel_in_the_type_that_is_asked_for() -> None:
    for by_stage in run_ranks(_sent, 2):
        for usual, narrow, wide in by_stage:
            assert usual == narrow == wide / 2 > 0


def test_few_gradients_are_there_in_the_parameters_type_at_a_time() -> None:
    model, seen = make_net(), []
    with start(constant_rate_config(), model) as engine:
        own = list(model.parameters())
        for parameter in own:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda _: seen.append(sum(p.grad is not None for p in own))
                )
        step(engine)
    assert max(seen) == 1
    assert len(seen) > 20
