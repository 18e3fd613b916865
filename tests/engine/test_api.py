"""What a training loop may ask of the engine, and how wrong calls are answered. One process."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.engine.bits import engine_digests
from tests.engine.linear_runs import linear, one_step, start
from tests.engine.models import make_net
from zstore.errors import UsageError


def test_it_is_a_module_and_hands_out_the_models_attributes() -> None:
    model = linear()
    model.extra = "mine"
    with start(model) as engine:
        assert isinstance(engine, nn.Module)
        assert engine.module is model
        assert engine.extra == "mine"
        assert engine.in_features == 8
        assert set(engine.parameters()) == set(model.parameters())
        engine.eval()
        assert not model.training
        engine.train()
        assert model.training
        with pytest.raises(AttributeError, match="nothing_of_that_name"):
            _ = engine.nothing_of_that_name


def test_leftovers_of_a_plain_loop_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with start() as plain, start() as other:
        one_step(plain)
        one_step(plain)
        for _ in range(2):
            other.optimizer.zero_grad()
            other.zero_grad()
            loss = other(torch.ones(2, 8)).square().mean()
            other.backward(loss)
            with other.no_sync():
                other.step()
            other.zero_grad()
            other.optimizer.step()
        assert engine_digests(plain) == engine_digests(other)
    assert [r.message for r in caplog.records if "remove optimizer.step()" in r.message] != []
    assert len([r for r in caplog.records if "remove optimizer.step()" in r.message]) == 1


def test_parameters_that_are_float64_are_named_with_the_type_that_they_get(caplog: pytest.LogCaptureFixture) -> None:
    with start(linear().double()) as engine:
        assert {p.dtype for p in engine.parameters()} == {torch.float32}
    assert "parameters that are float64 are cast to fp32, the type that the config says: weight" in caplog.text
    caplog.clear()
    start(linear()).close()
    assert "float64" not in caplog.text


def test_sparse_gradients_are_answered() -> None:
    with start(nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1))) as engine:
        loss = engine(torch.tensor([1, 2])).mean()
        with pytest.raises(UsageError, match="sparse=False"):
            engine.backward(loss)


def test_a_dropped_engine_gives_its_run_folder_back(tmp_path: Path) -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    engine = start(nn.Linear(256, 256), zero_optimization=zero)
    engine.backward(engine(torch.ones(1, 256)).mean())
    engine.step()
    assert list(tmp_path.rglob("*.shard")) != []
    del engine
    assert list(tmp_path.rglob("*.shard")) == []
    start(zero_optimization=zero).close()


def test_buffers_have_the_type_that_a_config_names() -> None:
    with start(make_net(), bf16={"enabled": True}, data_types={"buffer_dtype": "bf16"}) as engine:
        assert engine.module.shift.dtype == torch.bfloat16


@pytest.mark.parametrize("stage", [0, 3])
def test_running_statistics_are_those_of_autocast(stage: int) -> None:
    """In 16 bits a statistic that grows by small steps would stop short."""
    plain = nn.Sequential(nn.BatchNorm1d(8), nn.Flatten())
    net = copy.deepcopy(plain)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    with start(net, bf16={"enabled": True}, zero_optimization=zero) as engine:
        for number in range(40):
            x = (3.9 + 0.1 * torch.randn(4, 8, 5, generator=torch.Generator().manual_seed(number))).bfloat16()
            with torch.autocast("cpu", torch.bfloat16):
                expected = plain(x)
            loss = engine(x)
            assert torch.equal(loss, expected)
        assert torch.equal(net[0].running_mean, plain[0].running_mean)
        assert torch.equal(net[0].running_var, plain[0].running_var)
        engine.backward(loss.float().square().sum())
        engine.step()
        assert net[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("seed", [1, 2])
def test_dropout_follows_torchs_seed_and_not_the_configs(seed: int) -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout())
    plain = copy.deepcopy(model)
    with start(model, seed=seed) as engine:
        torch.manual_seed(7)
        found = engine(torch.ones(2, 4))
    torch.manual_seed(7)
    assert torch.equal(found, plain(torch.ones(2, 4)))
