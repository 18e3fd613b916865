"""The mean of whole gradients over two ranks, summed where they are: the bits of the sum by rows, and what is sent."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.bits import Case, Model, Run, digest
from tests.reference import DTYPES
from zstore.testing.ranks import run_ranks

SIZES = {"large": 70_001, "small": 33, "middle": 4097, "one": 1}


class _Product(nn.Module):
    """Parameters whose gradients are the factors that they are multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterDict({name: torch.zeros(numel) for name, numel in SIZES.items()})

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        products = ((self.factors[name], values) for name, values in gradients.items())
        return torch.stack([(factor * values.to(factor.dtype)).sum() for factor, values in products]).sum()


def _draw(rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return values that round: signs, halves of ties, numbers below the least normal one, zeros; in fp16 the greatest."""
    generator = torch.Generator().manual_seed(rank)
    info = torch.finfo(dtype)
    found = {}
    for name, numel in SIZES.items():
        scale = torch.tensor([info.tiny / 4, info.tiny, 1.0, 1.01, 1e3])
        values = torch.randn(numel, generator=generator).clamp(-1.9, 1.9)
        values = values * scale[torch.randint(0, len(scale), (numel,), generator=generator)]
        values[torch.rand(numel, generator=generator) < 0.1] = -0.0
        found[name] = values.to(dtype)
        if dtype == torch.float16:
            found[name][0] = info.max
    return found


def _run(rank: int, world_size: int, precision: str) -> tuple[list[str], int, int]:
    """Return what differs from the sum in rank order, rounded once, as the plain loop takes it; what a step sent, and in
    how many collectives."""
    stored = "bf16" if precision == "bf16" else "fp32"
    model = Model(
        _Product, lambda step, _, rank: _draw(10 * step + rank, DTYPES[precision]), lambda model, batch: model(batch)
    )
    types = (None, "fp16" if precision == "fp16" else None)
    with Run(Case(0, "none", stored, 1, 0.0, types=types), rank, world_size, model=model) as run:
        world = run.engine.world
        before = world.sent_bytes
        differing: list[str] = []

        def look(batches: list[list[Any]]) -> None:
            for name, mean in run.reference._accumulated(batches).items():
                gradient = run.engine.get_gradient(name)
                differing.extend([name] * (gradient is None or digest(gradient) != digest(mean.float())))

        found = run.step(look) + differing
        sent, calls = (world.sent_bytes - before)["all_reduce"], world.links.statistics()["all_reduce"].operations
        return found + run.differences(), sent, calls


@pytest.mark.parametrize(
    ("precision", "world_size"),
    [
        pytest.param("fp32", 2, marks=pytest.mark.soak),
        ("bf16", 2),
        pytest.param("fp16", 2, marks=pytest.mark.soak),
        ("fp32", 3),
    ],
)
def test_the_mean_of_whole_gradients_is_the_sum_in_rank_order_rounded_once(precision: str, world_size: int) -> None:
    for found, sent, calls in run_ranks(_run, world_size, world_size, precision):
        assert found == []
        if world_size == 2 and precision != "fp16":
            # Without padding: the large one by itself, where it is, and the others together.
            assert sent == DTYPES[precision].itemsize * sum(SIZES.values())
            assert calls == 2
