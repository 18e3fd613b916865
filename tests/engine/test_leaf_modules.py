"""Leaf modules: gathered as a whole at stage 3, so that a rank may call other modules of one than another does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zstore
from zstore.engine.adapters.deepspeed import utils
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks


class Expert(nn.Linear):
    """One of a mixture's."""


class Mixture(nn.Module):
    """Calls the expert that its input names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.third = Expert(8, 8), Expert(8, 8), Expert(8, 8)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return (self.one, self.other, self.third)[expert](x).tanh() + x


class Special(Mixture):
    """A subclass."""


class Net(nn.Module):
    """Two mixtures that are in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.first, self.second, self.end = nn.Linear(4, 8), Special(), Mixture(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.end(self.second(self.first(self.start(x), expert), 1 - expert))


def _net() -> Net:
    torch.manual_seed(3)
    return Net()


def _inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def _train(rank: int, leaf_module: dict[str, Any] | None, live_numel: int) -> list[list[float]]:
    model = _net()
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": live_numel,
    }
    if leaf_module is None:
        utils.set_z3_leaf_modules(model, [Mixture])
    else:
        zero["leaf_module"] = leaf_module
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": zero,
    }
    with zstore.initialize(model=model, config=config)[0] as engine:
        for step in range(3):
            engine.backward(engine(_inputs(step, rank), rank).square().mean())
            engine.step()
        with zstore.gather(model):
            return [p.flatten().tolist() for p in model.parameters()]


def _plain() -> list[list[float]]:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (model(_inputs(step, rank), rank).square().mean() / 2).backward()
        optimizer.step()
    return [p.flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize(
    ("leaf_module", "live_numel"),
    [
        pytest.param(None, 1_000_000_000, marks=pytest.mark.soak),
        ({"classes": "Mixture", "names": ["first"]}, 1_000_000_000),
        ({"classes": [f"{__name__}.Special"], "name_suffixes": ["cond"]}, 1),
    ],
)
def test_ranks_call_different_experts_of_a_leaf(leaf_module: dict[str, Any] | None, live_numel: int) -> None:
    for found in run_ranks(_train, 2, leaf_module, live_numel):
        assert all(
            ours == pytest.approx(theirs, rel=1e-5, abs=1e-7) for ours, theirs in zip(found, _plain(), strict=True)
        )


def test_marks_are_set_by_class_name_and_ending_and_taken_away(caplog: pytest.LogCaptureFixture) -> None:
    model = _net()
    assert utils.set_z3_leaf_modules(model, ["Special"]) == [model.first]
    assert utils.set_z3_leaf_modules(model, [Mixture]) == [model.first, model.second]
    assert utils.get_z3_leaf_modules(model) == [model.first, model.second]
    assert utils.unset_z3_leaf_modules(model, [f"{__name__}.Mixture"]) == [model.second]
    assert utils.set_z3_leaf_modules_by_name(model, ["second", "third"], raise_if_not_found=False) == (
        [model.second],
        ["third"],
    )
    assert utils.set_z3_leaf_modules_by_suffix(model, ["first", "cond"], flag=False) == (
        [model.first, model.second],
        [],
    )
    assert not utils.get_z3_leaf_modules(model)
    utils.set_z3_leaf_module(model.first, True)
    assert utils.z3_leaf_module(model.first)
    assert utils.set_z3_leaf_modules(model, ["Absent"], raise_if_not_found=False) == []
    for call in (
        lambda: utils.set_z3_leaf_modules(model, ["Absent"]),
        lambda: utils.set_z3_leaf_modules_by_name(model, ["absent"]),
    ):
        with pytest.raises(UsageError, match=r"no module.*[aA]bsent"):
            call()
    zero = {"stage": 3, "leaf_module": {"classes": ["Absent"], "names": ["second"]}}
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    with zstore.initialize(model=model, config=config)[0]:
        assert utils.z3_leaf_module(model.second)
    assert "zero_optimization.leaf_module: the model has no module Absent" in caplog.text
