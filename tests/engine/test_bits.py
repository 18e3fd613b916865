"""Exactness: after every step, every master, moment, parameter and loss has the bits of the plain loop."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.bits import SPILLS, STEPS, Case, Model, Run, compare_all, digest
from tests.reference import DTYPES
from tests.rounding import erring_sqrt
from zstore.testing.ranks import run_ranks

TIERS = ("none", "cpu", "nvme")
PRECISIONS = ("bf16", "fp16", "fp32")
MODES = ("none", "backward", "forward")


def drawn_ways(rng: random.Random) -> dict[str, Any]:
    ways = (rng.random() < 0.5 for _ in range(3))
    return dict(zip(("resume", "built", "own_backward"), ways, strict=True))


def sample_cases(world_size: int, count: int) -> list[Case]:
    """Return `count` of the ten stages and tiers, with the other choices and the model drawn from a fixed seed."""
    rng = random.Random(world_size)
    pairs = [(0, "none"), *((stage, tier) for stage in (1, 2, 3) for tier in TIERS)]
    rng.shuffle(pairs)
    cases = [
        Case(
            stage,
            tier,
            rng.choice(PRECISIONS),
            rng.choice((1, 3)),
            rng.choice((0.0, 0.25)),
            rng.choice((500_000_000, 40_000)),
            rng.choice((0, 100, 100_000)),
            parameters=rng.choice(TIERS) if stage == 3 else "none",
            overlap=rng.choice(MODES),
            seed=rng.randrange(10**6),
            **drawn_ways(rng),
        )
        for stage, tier in pairs
    ]
    return cases[:count]


@pytest.mark.parametrize(
    ("world_size", "count"),
    [(1, 10), pytest.param(2, 10, marks=pytest.mark.soak), (3, 5), pytest.param(4, 2, marks=pytest.mark.soak)],
)
def test_bits_equal_the_plain_loop(world_size: int, count: int) -> None:
    for failed in run_ranks(compare_all, world_size, world_size, sample_cases(world_size, count)):
        assert failed == []


SPILLS_ALONE = 1_600_000
"""A host budget that leaves gradients on disk, where parameters do not rest there."""


def of_stage_3(optimizer: str, parameters: str, *rest: Any, **keys: Any) -> Case:
    return Case(3, optimizer, *rest, parameters=parameters, **keys)


def typed(
    stage: int, tiers: tuple[str, str], precision: str, accumulation: int, overlap: str, *types: str | None, **more: Any
) -> Case:
    """A case of types in which gradients accumulate and in which they are reduced."""
    clip = 0.0 if overlap == "backward" else 0.25
    given = {"parameters": tiers[1], "overlap": overlap, "types": types, "threshold": 0}
    return Case(stage, tiers[0], precision, accumulation, clip, **given, **more)


NARROW = {"stage3_max_live_parameters": 100_000, "stage3_max_reuse_distance": 50_000}
NARROW |= {"stage3_prefetch_bucket_size": 10_000}
WRITTEN = {
    "parameters anywhere, under each key": [
        of_stage_3("none", "cpu", "bf16", 3, 0.0, overlap="backward", keys={"stage3_prefetch_bucket_size": 0}),
        of_stage_3("nvme", "nvme", "bf16", 1, 0.25, overlap="forward", keys={"stage3_max_live_parameters": 20_000}),
        of_stage_3(
            "cpu", "nvme", "fp32", 1, 0.25, 40_000, overlap="backward", keys={"stage3_max_reuse_distance": 10**9}
        ),
        of_stage_3("nvme", "cpu", "fp16", 3, 0.0, threshold=1000, overlap="forward", keys=NARROW),
        of_stage_3(
            "nvme", "nvme", "bf16", 3, 0.0, overlap="backward", keys={"stage3_model_persistence_threshold": 300}
        ),
        of_stage_3("nvme", "nvme", "fp32", 1, 0.0, keys={"offload_param": {"buffer_count": 1, "buffer_size": 1}}),
        of_stage_3("cpu", "cpu", "bf16", 3, 0.25, 40_000, overlap="forward", keys={"allgather_bucket_size": 5000}),
        Case(1, "nvme", "bf16", 1, 0.25, keys={"offload_optimizer": {"buffer_count": 1, "buffer_size": 1}}),
        of_stage_3("none", "nvme", "fp32", 1, 0.0, threshold=0),
    ],
    "types of gradients": [
        typed(0, ("none", "none"), "bf16", 1, "none", None, "fp32"),
        typed(0, ("none", "none"), "fp32", 3, "none", "bf16", "bf16"),
        typed(1, ("cpu", "none"), "fp16", 3, "none", "fp16", "fp32"),
        typed(1, ("none", "none"), "bf16", 1, "none", "fp32", None),
        typed(2, ("none", "none"), "bf16", 1, "backward", None, "fp32"),
        typed(2, ("none", "none"), "bf16", 1, "backward", None, None),  # takes gradients that wait in place
        typed(3, ("none", "none"), "bf16", 1, "backward", None, None),
        typed(2, ("cpu", "none"), "fp16", 2, "backward", "fp32", "bf16"),
        typed(2, ("nvme", "none"), "bf16", 3, "none", "bf16", "fp32", budget=SPILLS_ALONE),
        typed(3, ("none", "none"), "fp32", 2, "forward", "fp16", "bf16"),
        typed(3, ("nvme", "nvme"), "bf16", 3, "forward", None, None, budget=SPILLS),
        typed(3, ("nvme", "nvme"), "fp16", 2, "backward", None, "fp32", budget=SPILLS),
        typed(3, ("cpu", "cpu"), "bf16", 2, "backward", "bf16", None),
        typed(
            3, ("nvme", "nvme"), "bf16", 1, "backward", None, None, own={"host_budget_bytes": SPILLS}
        ),  # as they arrive
        typed(2, ("cpu", "none"), "bf16", 1, "backward", None, None, resume=1),
    ],
    "models built in shards": [
        Case(stage, tier, precision, 1, 0.0, parameters=own, built=True)
        for stage, tier, own in ((3, "none", "none"), (3, "nvme", "nvme"), (3, "cpu", "none"), (3, "none", "nvme"))
        for precision in ("bf16", "fp32")
    ]
    + [
        Case(2, "nvme", "bf16", 1, 0.0, seed=3, built=True),
        Case(3, "cpu", "fp32", 1, 0.0, parameters="cpu", built=True),
    ],
    # Fewer micro-batches than the config says, as many and more.
    "ends that the caller names": [
        typed(0, ("none", "none"), "bf16", 2, "none", None, None, counts=(1, 2, 3), resume=2),
        typed(1, ("cpu", "none"), "fp16", 1, "none", None, None, counts=(1, 3, 1)),
        typed(2, ("none", "none"), "bf16", 1, "backward", None, None, counts=(2, 1, 3)),
        typed(3, ("nvme", "nvme"), "bf16", 1, "forward", None, None, counts=(1, 3, 2), budget=SPILLS, resume=1),
        typed(3, ("cpu", "cpu"), "bf16", 2, "backward", None, None, counts=(1, 3, 1)),
    ],
}


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(3, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("kind", WRITTEN)
def test_bits_of_what_is_seldom_drawn_equal_the_plain_loop(kind: str, world_size: int) -> None:
    for failed in run_ranks(compare_all, world_size, world_size, WRITTEN[kind], timeout_s=180):
        assert failed == []


def all_cases() -> list[Case]:
    places = [(0, "none", "none"), *((stage, tier, "none") for stage in (1, 2) for tier in TIERS)]
    places += [(3, tier, parameters) for tier in TIERS for parameters in TIERS]
    choices = itertools.product(places, PRECISIONS, (1, 3), (0.0, 0.25), (500_000_000, 40_000), MODES)
    rng = random.Random(0)

    def drawn() -> dict[str, Any]:
        types = rng.choice((None, *PRECISIONS)), rng.choice((None, *PRECISIONS))
        return {"threshold": rng.choice((0, 100, 1000)), "seed": rng.randrange(10**6), "types": types} | drawn_ways(rng)

    return [
        Case(stage, tier, *rest, parameters=parameters, overlap=overlap, **drawn())
        for (stage, tier, parameters), *rest, overlap in choices
    ]


CASES_A_PROCESS = 64
"""An engine's process groups live as long as its process: hundreds of them slow it down."""


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bits_equal_the_plain_loop_in_every_combination(world_size: int) -> None:
    cases = all_cases()
    for first in range(0, len(cases), CASES_A_PROCESS):
        chunk = cases[first : first + CASES_A_PROCESS]
        for failed in run_ranks(compare_all, world_size, world_size, chunk, STEPS, timeout_s=900):
            assert failed == []


def test_the_roots_that_soak_lets_err_do_so_by_one_ulp() -> None:
    """Of `pytest --sqrt-errs`: wherever torch's sqrt is called from, and in ranks."""
    values = np.random.default_rng(0).random(10_000, np.float32)
    given, written = torch.from_numpy(values), torch.empty(0)
    exact = given.sqrt()
    with erring_sqrt():
        found = [given.sqrt(), given.clone().sqrt_(), torch.sqrt(given, out=written), *torch._foreach_sqrt([given])]
        assert torch.tensor([0.0, torch.inf, -1.0]).sqrt().isnan().tolist() == [False, False, True]
    assert all(torch.equal(root, found[0]) for root in [*found, written])
    ulps = found[0].view(torch.int32) - exact.view(torch.int32)
    assert set(ulps.tolist()) == {0, 1}
    assert 1500 < int(ulps.sum()) < 2500
    assert torch.equal(given.sqrt(), exact)


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


def _mean(rank: int, world_size: int, precision: str) -> tuple[list[str], int, int]:
    """Return what differs from the sum in rank order, rounded once, as the plain loop takes it; what a step sent, and in
    how many collectives."""
    stored = "bf16" if precision == "bf16" else "fp32"
    model = Model(_Product, lambda step, _, rank: _draw(10 * step + rank, DTYPES[precision]), lambda net, x: net(x))
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
    for found, sent, calls in run_ranks(_mean, world_size, world_size, precision):
        assert found == []
        if world_size == 2 and precision != "fp16":
            # Without padding: the large one by itself, where it is, and the others together.
            assert sent == DTYPES[precision].itemsize * sum(SIZES.values())
            assert calls == 2
