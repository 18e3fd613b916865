"""Optimizers that are not element-wise: at stage 0 the client's own object steps whole tensors, as in a plain loop."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from tests.engine.models import batch, make_net
from tests.reference import Reference
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine import Engine
from zstore.errors import CheckpointMismatchError, UsageError
from zstore.io.tensors import as_torch
from zstore.testing.ranks import run_ranks

torch.set_num_threads(1)


class Lamb(torch.optim.Optimizer):
    """A step as long as the whole weight, along the mean of gradients that are clipped by the norm of all."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in trained]).norm().clamp(min=1.0)
        for p in trained:
            state = self.state[p]
            if not state:
                state |= {"step": 0, "mean": torch.zeros_like(p)}
            state["step"] += 1
            mean = state["mean"].lerp_(p.grad / total, 0.1)
            p.sub_(mean * (self.defaults["lr"] * p.norm() / mean.norm().clamp(min=1e-6)))


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": lambda net: torch.optim.Adafactor(net.parameters(), lr=0.05, weight_decay=0.01),
    "Lamb": lambda net: Lamb(net.parameters()),
    "Muon": lambda net: torch.optim.Muon([p for p in net.parameters() if p.ndim == 2], lr=0.05),
}


def make_config(**keys: Any) -> dict[str, Any]:
    zero = {"stage": 0}
    made = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "steps_per_print": 0}
    return made | {"gradient_clipping": 0.0} | keys


def started(make: Callable[[Any], torch.optim.Optimizer], **keys: Any) -> Engine:
    net = make_net()
    return zstore.initialize(model=net, optimizer=make(net), config=make_config(**keys))[0]


class Masters(nn.Module):
    """Stands for the model to whoever makes an optimizer of the reference's fp32 masters."""

    def __init__(self, masters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, master in masters.items():
            self.register_parameter(name.replace(".", "/"), master)


def compare(rank: int, world_size: int, name: str, precision: str, folder: str) -> list[str]:
    """Return what differs from the plain loop over four steps, with a resume after the second."""
    config: Any = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.3}
    config |= {} if precision == "fp32" else {precision: {"enabled": True}}
    reference = Reference(make_net(), world_size, precision=precision, accumulation=2, clip=0.3)
    reference.optimizer = MAKE[name](Masters(reference.masters))
    kept = {id(p) for group in reference.optimizer.param_groups for p in group["params"]}
    reference.masters = {name: master for name, master in reference.masters.items() if id(master) in kept}
    reference.trained = {name: reference.trained[name] for name in reference.masters}
    differences: list[str] = []

    def train(engine: Engine, number: int) -> None:
        for micro in range(2):
            engine.backward(engine(*batch(number, micro, rank)))
            engine.step()
        reference.step([[batch(number, micro, r) for r in range(world_size)] for micro in range(2)])
        state = engine.training_state.state
        for record in engine.training_state.trained:
            master = as_torch(state.store.read(f"model/{record.name}").wait())
            pairs = ((master, reference.masters[record.name]), (record.parameter, reference.trained[record.name]))
            if not all(torch.equal(here.view(-1), there.view(-1)) for here, there in pairs):
                differences.append(f"step {number}: {record.name}")

    with started(MAKE[name], **config) as engine:
        for number in range(2):
            train(engine, number)
        engine.save_checkpoint(folder, client_state={"mine": 5})
    with started(MAKE[name], **config) as engine:
        path, state = engine.load_checkpoint(folder)
        assert (path is None, state) == (False, {"mine": 5})
        for number in (2, 3):
            train(engine, number)
    return differences


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MAKE)
def test_bits_are_those_of_the_class_itself(name: str, precision: str, tmp_path: Path) -> None:
    assert compare(0, 1, name, precision, str(tmp_path)) == []
    for tag in tmp_path.glob("step-*"):
        with open_checkpoint(tmp_path, tag.name) as opened:
            assert verify_checkpoint(opened) == []


def test_every_rank_takes_the_same_step(tmp_path: Path) -> None:
    assert run_ranks(compare, 2, 2, "Adafactor", "bf16", str(tmp_path)) == [[], []]


@pytest.mark.parametrize("skipped", [True, False])
def test_a_step_that_is_skipped_is_not_taken(skipped: bool) -> None:
    with started(MAKE["Lamb"], fp16={"enabled": True, "initial_scale_power": 4}) as engine:
        loss = engine(*batch(0, 0, 0))
        engine.backward(loss * (math.inf if skipped else 1.0))
        engine.step()
        assert engine.skipped_steps == int(skipped)
        assert bool(engine.optimizer.state) is not skipped


def test_what_steps_whole_tensors_is_refused_where_that_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"LBFGS .* closure"):
        started(lambda net: torch.optim.LBFGS(net.parameters()))
    refused = [
        ({"step_overlap": "backward"}, "Lamb .* take step_overlap out"),
        ({"moments": "bf16"}, '"moments": .* Lamb, .* leave the key out'),
    ]
    for own, message in refused:
        with pytest.raises(UsageError, match=message):
            started(MAKE["Lamb"], zstore=own, bf16={"enabled": True})
    message = r"Lamb .* sharded \(stages 1 to 3\) or offloaded .* stage 0 without offload"
    with pytest.raises(UsageError, match=message):
        started(MAKE["Lamb"], zero_optimization={"stage": 1})


def test_a_checkpoint_without_the_optimizers_state_is_refused(tmp_path: Path) -> None:
    with started(lambda net: torch.optim.SGD(net.parameters(), lr=0.1)) as engine:
        engine.backward(engine(*batch(0, 0, 0)))
        engine.step()
        engine.save_checkpoint(str(tmp_path))
    with started(MAKE["Lamb"]) as engine:
        before = {name: value.clone() for name, value in engine.module.state_dict().items()}
        with pytest.raises(CheckpointMismatchError, match="as Lamb does"):
            engine.load_checkpoint(str(tmp_path))
        assert all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())
        engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)
        with pytest.raises(UsageError, match="is a reserved key"):
            engine.save_checkpoint(str(tmp_path), client_state={"zstore.client_optimizer": json.dumps({})})
