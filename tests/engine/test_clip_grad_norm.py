"""`engine.clip_grad_norm_`: the norm before the step, and clipping that the loop asks for."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from zstore.errors import UsageError


def _engine(clip: float, **changes: Any) -> zstore.engine.Engine:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        **changes,
    }
    engine, *_ = zstore.initialize(model=nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), config=config)
    return engine


def _backward(engine: zstore.engine.Engine, value: float) -> None:
    engine.backward(engine(torch.full((1, 4), value)).square().mean())


def test_clipping_by_the_loop_has_the_bits_of_clipping_by_the_config() -> None:
    by_config, by_loop = _engine(0.1), _engine(0.0)
    with by_config, by_loop:
        for value in (1.0, 2.0):
            _backward(by_config, value)
            by_config.step()
            _backward(by_loop, value)
            norm = by_loop.clip_grad_norm_(0.1)
            assert norm == by_loop.clip_grad_norm_(0.1)  # taken once
            by_loop.step()
            assert norm == by_config.get_global_grad_norm() == by_loop.get_global_grad_norm()
        found, wanted = by_loop.module_state_dict(), by_config.module_state_dict()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        assert by_loop.gradient_clipping() == 0.1
        _backward(by_loop, 1.0)
        by_loop.clip_grad_norm_(math.inf)
        assert by_loop.gradient_clipping() == 0.0


def test_calls_out_of_place_are_refused() -> None:
    with _engine(0.0) as engine:
        with pytest.raises(UsageError, match="without a backward"):
            engine.clip_grad_norm_(1.0)
        _backward(engine, 1.0)
        with pytest.raises(UsageError, match="at least 0"):
            engine.clip_grad_norm_(-1.0)
        engine.clip_grad_norm_(1.0)
        with pytest.raises(UsageError, match="after the norm"):
            _backward(engine, 1.0)
        engine.step()
    with _engine(0.0, zstore={"step_overlap": "backward"}) as engine:
        _backward(engine, 1.0)
        with pytest.raises(UsageError, match='"gradient_clipping"'):
            engine.clip_grad_norm_(1.0)
        assert engine.clip_grad_norm_(math.inf) > 0
        engine.step()


def test_a_config_that_says_nothing_clips_to_1_as_deepspeed_does(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with caplog.at_level(logging.INFO, "zstore"):
        engine, *_ = zstore.initialize(model=model, config=config)
    assert (
        caplog.text.count("gradient_clipping is not set: gradients are clipped to a norm of 1, DeepSpeed's default")
        == 1
    )
    with engine:
        for value in (4.0, 5.0):
            _backward(engine, value)
            engine.step()
            plain(torch.full((1, 4), value)).square().mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
            assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-6)
            assert norm > 1.0
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(engine.module_state_dict().values(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
