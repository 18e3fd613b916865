"""Engines in the step modes `forward` and `backward`, whose updates a gate holds."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.engine.models import Net, batch, make_net
from tests.engine.runs import make_config, start, state_of
from zstore.engine import Engine
from zstore.testing.faults import GatedFiles

WIDTH = 136
"""Wide enough that a block's matrices rest on disk."""
HELD = "*optimizer*up.weight*"
"""Files of the blocks' updates."""


def make_model() -> Net:
    return make_net(vocab=67, width=WIDTH)


def data(number: int) -> tuple[Any, ...]:
    return batch(number, 0, 0, vocab=67)


def config(mode: str, nvme: str | Path, *, threshold: int = 0, **keys: Any) -> dict[str, Any]:
    """Everything on disk at stage 3, one micro-batch a step."""
    made = make_config(3, "nvme", nvme, "nvme", zstore={"step_overlap": mode}, gradient_accumulation_steps=1)
    made["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    return made | keys


def plain(**keys: Any) -> dict[str, Any]:
    """All in memory, updated in step(): what the others are compared with."""
    return make_config(0, gradient_accumulation_steps=1, **keys)


def step(engine: Engine) -> None:
    engine.backward(engine(*data(engine.global_steps)))
    engine.step()


@functools.cache
def expected(steps: int) -> dict[str, Any]:
    with start(plain(), make_model()) as engine:
        for _ in range(steps):
            step(engine)
        return state_of(engine)


@contextmanager
def held(mode: str, nvme: Path, **keys: Any) -> Iterator[tuple[Engine, GatedFiles]]:
    """Give an engine one step old, and a gate that, once closed, holds its updates."""
    files = GatedFiles("write", pattern=HELD)
    files.open_gate()
    with start(config(mode, nvme, **keys), make_model(), _files=files) as engine, files.holding():
        step(engine)
        engine.training_state.update.wait()
        yield engine, files


def opening(files: GatedFiles, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, which a reader of the state makes first, so that it opens the gate."""

    def first_open(*args: Any) -> Any:
        files.open_gate()
        return call(*args)

    return first_open


class Branches(nn.Module):
    """Uses the layers that it is told to, each as often; those of `reads` without a gradient; with checkpoints."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.order = [0, 1, 2, 3]
        self.reads: int | None = None
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
        x = x.requires_grad_()
        if self.reads is not None:
            x = nn.functional.linear(x, self.layers[self.reads].weight.detach())
        for number in order or self.order:
            layer = self.layers[number]
            y = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
            x = x + torch.tanh(y)
        return x.float().square().mean()


def say(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])
