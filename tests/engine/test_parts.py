"""The engine's small parts by themselves: loader, random states, norm."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from zstore.engine.checkpoint.record import derive_rng_state, load_rng_state, rng_state
from zstore.engine.config.resolve import BatchSizes
from zstore.engine.training.loader import TrainingLoader
from zstore.engine.zero.norm import norm_of, sums_of_squares
from zstore.errors import UsageError


def loaders(world_size: int, count: int = 21, micro: int = 2, batch: int = 8, **rest: Any) -> list[TrainingLoader]:
    sizes = BatchSizes(
        train_batch_size=batch, micro_batch_size=micro, accumulation_steps=max(1, batch // (micro * world_size))
    )
    data: Any = list(range(count))
    return [
        TrainingLoader(data, batch=sizes, rank=rank, world_size=world_size, seed=5, **rest)
        for rank in range(world_size)
    ]


def rounds(loader_of_rank: list[TrainingLoader]) -> list[list[int]]:
    return [[int(x) for batch in round_ for x in batch] for round_ in zip(*loader_of_rank, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_sample_once_an_epoch_in_an_order_that_does_not_depend_on_the_world_size(world_size: int) -> None:
    alone = loaders(1)
    ranks = loaders(world_size)
    for _ in range(2):
        order = [x for round_ in rounds(alone) for x in round_]
        found = [x for round_ in rounds(ranks) for x in round_]
        assert sorted(order) == list(range(21))
        assert found[:20] == order[:20]
        assert set(found) == set(order)
    assert len(ranks[0]) == math.ceil(21 / (2 * world_size))
    assert order != list(range(21))


def test_two_epochs_differ_and_a_position_goes_on() -> None:
    (loader,) = loaders(1, count=8)
    first, second = rounds([loader]), rounds([loader])
    assert first != second
    (again,) = loaders(1, count=8)
    again.position = 10
    assert rounds([again]) == second[1:]
    assert again.position == 16
    resumed = loaders(2, count=8)
    for one in resumed:
        one.position = 8
    assert [x for round_ in rounds(resumed) for x in round_] == [x for round_ in second for x in round_]


def test_the_last_short_round_can_be_left_out() -> None:
    assert [len(r) for r in rounds(loaders(2))] == [4, 4, 4, 4, 4, 2]
    dropped = loaders(2, drop_last=True)
    assert [len(r) for r in rounds(dropped)] == [4, 4, 4, 4]
    assert (dropped[0].position, len(dropped[0])) == (16, 4)


def test_data_that_cannot_be_dealt() -> None:
    with pytest.raises(UsageError, match="has 3 samples, fewer than one batch"):
        loaders(1, count=3, drop_last=True)
    with pytest.raises(UsageError, match="has 0 samples"):
        loaders(1, count=0)
    sizes = BatchSizes(train_batch_size=1, micro_batch_size=1, accumulation_steps=1)
    stream: Any = iter([1])
    with pytest.raises(UsageError, match="a length and an index"):
        TrainingLoader(stream, batch=sizes, rank=0, world_size=1, seed=0)


def test_it_draws_from_no_generator_of_the_loops() -> None:
    state = torch.get_rng_state()
    for batches in loaders(2):
        list(batches)
    assert torch.equal(torch.get_rng_state(), state)


def draw() -> list[float]:
    return [torch.rand(1).item(), random.random(), float(np.random.rand()), float(np.random.randn())]


def test_a_checkpoint_without_a_device_seeds_the_devices_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two resumes draw the same there, and two checkpoints do not."""
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(rng_state())
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    for state in (states[0], states[0], states[1]):
        load_rng_state({name: values for name, values in state.items() if name != "cuda"})
    assert seeds[0] == seeds[1] != seeds[2]


def test_derived_random_states_differ_by_step_and_rank() -> None:
    seen = set()
    for step, rank in [(0, 0), (0, 1), (1, 0), (0, 0)]:
        derive_rng_state(3, step, rank)
        seen.add(tuple(draw()))
    assert len(seen) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 4097, 300_001])
def test_the_sum_of_squares_is_right_and_does_not_depend_on_threads(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = values.clone()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = sums_of_squares([values])[0]
        torch.set_num_threads(2)
        assert sums_of_squares([values])[0] == one
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(values, before)
    assert one == pytest.approx(float(values.double().square().sum()), rel=4e-6)
    total = 0.0  # not sum(), which from Python 3.12 on gives other bits
    for row in values.float().split(4096):
        norm = float(torch.linalg.vector_norm(row))
        total += norm * norm
    assert one == total  # how many rows one call takes changes nothing


def test_the_norm_shows_what_is_not_finite() -> None:
    assert norm_of([("b", [9.0], 1.0), ("a", [3.0, 1.0], 2.0)]) == 5.0
    assert math.isnan(norm_of([("a", [sums_of_squares([torch.tensor([1.0, math.nan])])[0]], 1.0)]))
    assert math.isinf(norm_of([("a", [sums_of_squares([torch.tensor([1, -math.inf], dtype=torch.float16)])[0]], 1.0)]))
