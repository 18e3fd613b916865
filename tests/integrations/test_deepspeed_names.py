"""Names of DeepSpeed's that scripts import and ask after: modules, classes that are not built, access to the engine's state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zstore.engine.access import safe_access
from zstore.engine.adapters.deepspeed import optimizers
from zstore.engine.adapters.deepspeed.engine import initialize
from zstore.engine.adapters.deepspeed.modules import AnsweredModule, absent, fill
from zstore.engine.adapters.deepspeed.names import ABSENT, MODULES
from zstore.errors import UsageError

STEP = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))


@pytest.mark.parametrize("dotted", sorted(f"{module}.{name}" for module, names in ABSENT.items() for name in names))
def test_what_is_not_built_raises_when_it_is_used(dotted: str) -> None:
    kind = absent(dotted)
    derived = type("Derived", (kind,), {})
    assert not isinstance(nn.Linear(1, 1), kind)
    for each in (kind, derived):
        with pytest.raises(UsageError, match=dotted):
            each()


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_its_names(module: str) -> None:
    filled = AnsweredModule(module)
    fill(filled)
    assert {name for names in MODULES[module].values() for name in names} <= set(vars(filled))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_engines_state_is_seen_and_set_by_deepspeeds_names(stage: int) -> None:
    model = _model()
    config: dict[str, Any] = {**STEP, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    engine, optimizer, *_ = initialize(model=model, config=config)
    with engine:
        weight, plain = next(model.parameters()), next(_model().parameters())
        adam = torch.optim.Adam([plain], lr=0.1)
        for factor in (0.25, -1.0):
            engine.backward(engine(torch.ones(1, 8)).sum())
            safe_access.safe_set_full_grad(weight, torch.full((8, 8), factor / 2))
            rows = safe_access.safe_get_local_grad(weight)
            assert rows is not None
            safe_access.safe_set_local_grad(weight, rows * 2)
            plain.grad = torch.full((8, 8), factor)
            engine.step()
            adam.step()
        torch.testing.assert_close(safe_access.safe_get_full_fp32_param(weight), plain.data, rtol=1e-6, atol=1e-6)
        safe_access.safe_set_local_optimizer_state(weight, torch.arange(64.0), "exp_avg")
        safe_access.safe_set_local_fp32_param(weight, torch.arange(64.0))
        assert torch.equal(weight.data.flatten(), torch.arange(64.0))
        for found in (
            safe_access.safe_get_local_optimizer_state(weight, "exp_avg"),
            safe_access.safe_get_local_fp32_param(weight),
        ):
            assert found is not None
            assert torch.equal(found, torch.arange(64.0))
        assert isinstance(optimizer, optimizers.FusedAdam)
        assert not isinstance(optimizer, optimizers.FusedLion)
        assert int(optimizer.state[weight]["step"]) == 2
        if stage == 3:
            assert weight.ds_tensor.shape == (64,)


def test_a_gradient_is_set_where_there_is_one_and_it_is_complete() -> None:
    config = {**STEP, "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
    engine, *_ = initialize(model=_model(), config=config)
    with engine:
        weight = next(engine.module.parameters())
        values = torch.ones(8, 8)
        with pytest.raises(UsageError, match="no gradient"):
            safe_access.safe_set_full_grad(weight, values)
        engine.backward(engine(torch.ones(1, 8)).sum())
        with pytest.raises(UsageError, match="last backward"):
            safe_access.safe_set_full_grad(weight, values)
