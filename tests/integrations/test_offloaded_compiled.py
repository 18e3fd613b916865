"""`Offloaded(overlap="forward")` with models that were compiled, and run, before there was the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zstore.optim import Offloaded

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),  # from torch 2.15 on
    pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks"),
]


def _in_place(model: nn.Module, inputs: torch.Tensor) -> Any:
    model.compile(backend="eager")
    return model


WAYS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "torch.compile": lambda model, _: torch.compile(model, backend="eager"),
    "Module.compile": _in_place,
    "a function": lambda model, _: torch.compile(lambda x: model(x), backend="eager"),  # noqa: PLW0108
    "torch.fx": lambda model, _: torch.fx.symbolic_trace(model),
    "torch.jit": torch.jit.trace,
    "torch.export": lambda model, inputs: torch.export.export(model, (inputs,)).module(),
}


def _losses(way: str, make: Callable[..., torch.optim.Optimizer]) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.Tanh())])
    inputs = torch.randn(4, 512)
    called = WAYS[way](model, inputs)
    called(inputs).square().mean().backward()
    parameters = list((called if way == "torch.export" else model).parameters())
    optimizer, losses = make(parameters), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = called(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_made_before_the_optimizer_waits_for_updates(way: str, tmp_path: Path) -> None:
    def offloaded(parameters: list[nn.Parameter]) -> Offloaded:
        return Offloaded(torch.optim.AdamW, parameters, lr=1e-2, path=tmp_path, overlap="forward")

    assert _losses(way, offloaded) == _losses(way, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))


def test_a_whole_graph_is_refused_with_the_way_out(tmp_path: Path) -> None:
    model = torch.compile(nn.Linear(64, 64), backend="eager", fullgraph=True)
    model(torch.ones(1, 64)).sum().backward()
    with Offloaded(torch.optim.AdamW, model.parameters(), path=tmp_path, overlap="forward") as optimizer:
        optimizer.step()
        with pytest.raises(Exception, match="compile without fullgraph=True"):
            model(torch.ones(1, 64))
