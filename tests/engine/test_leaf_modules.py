"""Leaf modules: gathered as a whole at stage 3, so that a rank may call other modules of one than another does."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from tests.engine.bits import Case, Model, compare_all
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


LEAVES = Model(
    Net,
    lambda step, micro, rank: (torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank)), rank),
    loss=lambda model, batch: model(*batch).square().mean(),
)


def _marked() -> Net:
    model = Net()
    utils.set_z3_leaf_modules(model, [Mixture])
    return model


MODELS = {"keys": LEAVES, "marked": replace(LEAVES, make=_marked)}


def _leaf(live_numel: int, **leaf_module: Any) -> dict[str, Any]:
    return {"stage3_max_live_parameters": live_numel, "leaf_module": leaf_module}


def _on_ranks(rank: int) -> list[tuple[str, list[str]]]:
    case = partial(Case, 3, "none", "fp32", 1, 0.0, threshold=0)
    several = _leaf(1_000_000_000, classes="Mixture", names=["first"])
    one = _leaf(1, classes=[f"{__name__}.Special"], name_suffixes=["cond"])
    cases = [case(model="keys", keys=several), case(model="keys", keys=one), case(model="marked")]
    return compare_all(rank, 2, cases, 3, models=MODELS)


def test_ranks_call_different_experts_of_a_leaf_to_the_bits_of_the_plain_loop() -> None:
    assert run_ranks(_on_ranks, 2) == [[], []]


def test_marks_are_set_by_class_name_and_ending_and_taken_away(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    assert utils.set_z3_leaf_modules(model, ["Special"]) == [model.first]
    assert utils.set_z3_leaf_modules(model, [Mixture]) == [model.first, model.second]
    assert utils.get_z3_leaf_modules(model) == [model.first, model.second]
    assert utils.unset_z3_leaf_modules(model, [f"{__name__}.Mixture"]) == [model.second]
    found = utils.set_z3_leaf_modules_by_name(model, ["second", "third"], raise_if_not_found=False)
    assert found == ([model.second], ["third"])
    found = utils.set_z3_leaf_modules_by_suffix(model, ["first", "cond"], flag=False)
    assert found == ([model.first, model.second], [])
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
