"""`zero_grad()` between a backward and its step, beside a plain loop that never took what is forgotten."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.bits import Case, Model, Rule, Run
from zstore.errors import RankError, UsageError
from zstore.journal import read, steps
from zstore.testing.ranks import run_ranks

WIDTH = 384
OBJECTS: dict[str, Callable[[Run], Any]] = {
    "engine": lambda run: run.engine,
    "optimizer": lambda run: run.engine.optimizer,
    "client": lambda run: run.client,
    "module": lambda run: run.engine.module,
}
WAYS: dict[str, Callable[[Run], Any]] = {
    name + zeros: lambda run, of=of, zeros=zeros: of(run).zero_grad(set_to_none=not zeros)  # type: ignore[misc]
    for name, of in OBJECTS.items()
    for zeros in ("", ", zeros")
}
SPILLED = "gradients on disk"
PLACES: dict[str, Callable[..., Case]] = {
    **{f"stage {stage}": partial(Case, stage, "none", threshold=0) for stage in range(4)},
    "cpu": partial(Case, 2, "cpu"),
    "nvme": partial(Case, 1, "nvme"),
    "all on nvme": partial(Case, 3, "nvme", threshold=0, parameters="nvme"),
    SPILLED: partial(Case, 3, "nvme", threshold=0, parameters="nvme"),
}
LOOP = (
    # Micro-batches by number; a bad one's gradients are NaN, and forgotten with those of the step so far.
    [(0, False), (1, False)],
    [(2, True), (3, False)],
    [(4, False), (5, True)],  # with one micro-batch to a step: a step without gradients
    [(6, False), (7, False)],
)


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


def _data(number: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x.to(next(model.parameters()).dtype)).float().square().mean()
    return loss


MODEL = Model(_net, lambda step, micro, rank: _data(2 * step + micro, rank), _loss)
CLIENT = Rule(lambda named: torch.optim.AdamW(named.values(), lr=0.01, weight_decay=0.1, fused=True))


def _run(
    place: str, accumulation: int = 1, rank: int = 0, world_size: int = 1, *, precision: str = "fp32", **more: Any
) -> Run:
    if place == SPILLED:
        more["budget"] = (1_100_000, 1_600_000)[world_size - 1]
    case = PLACES[place](precision, accumulation, more.pop("clip", 0.0), **more)
    return Run(case, rank, world_size, model=MODEL, rule=CLIENT)


def _backward(run: Run, number: int, *, bad: bool = False) -> float:
    loss = _loss(run.engine, _data(number, run.rank))
    given = loss * math.nan if bad else loss
    if run.case.own_backward:
        given.backward()  # type: ignore[no-untyped-call]
    else:
        run.engine.backward(given)
    return loss.item()


def _plain_step(run: Run, *numbers: int) -> None:
    run.reference.step([[_data(number, rank) for rank in range(run.world_size)] for number in numbers])


def _differing(place: str, accumulation: int, way: str, rank: int = 0, world_size: int = 1) -> list[str]:
    """Return what differs from a plain loop of the micro-batches that count."""
    forget = WAYS[way]
    with _run(place, accumulation, rank, world_size) as run:
        for step in LOOP if accumulation == 2 else [[micro] for each in LOOP for micro in each]:
            forget(run)
            counted: list[int] = []
            for number, bad in step:
                _backward(run, number, bad=bad)
                counted.append(number)
                if bad:
                    forget(run)
                    counted.clear()
                run.engine.step()
                forget(run)  # keeps the gradients of a step that goes on
            _plain_step(run, *counted)
        return run.differences()


@pytest.mark.parametrize(
    ("way", "accumulation", "place"),
    [
        *((way, 2, place) for way in WAYS if "zeros" not in way for place in ("stage 0", "all on nvme")),
        ("client", 1, "stage 0"),
        ("engine", 1, "stage 2"),
        ("optimizer", 1, "cpu"),
        ("module", 1, "nvme"),
        ("client", 1, "all on nvme"),
        ("engine", 1, SPILLED),
        ("optimizer", 2, SPILLED),
    ],
)
def test_a_step_forgets_what_a_plain_loop_forgets(way: str, accumulation: int, place: str) -> None:
    assert _differing(place, accumulation, way) == []


@pytest.mark.parametrize("way", [way for way in WAYS if "zeros" in way])
@pytest.mark.parametrize("place", ["stage 0", "cpu", SPILLED])
def test_zeros_are_no_gradients_for_a_good_micro_batch_that_follows(way: str, place: str) -> None:
    with _run(place) as run:
        _backward(run, 0)
        WAYS[way](run)
        _backward(run, 1)
        run.engine.step()
        _plain_step(run, 1)
        assert run.differences() == []


def _on_rank(rank: int, accumulation: int) -> dict[str, list[str]]:
    ways = ["engine", "optimizer", "client", "module"]
    found = {p: _differing(p, accumulation, ways[number % 4], rank, 2) for number, p in enumerate(PLACES)}
    return {place: differing for place, differing in found.items() if differing}


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_two_ranks_forget_together(accumulation: int) -> None:
    assert run_ranks(_on_rank, 2, accumulation) == [{}, {}]


def _alone(rank: int, way: str) -> str:
    with _run("stage 2", 1, rank, 2) as run:
        _backward(run, 0)
        try:
            if rank == 0:
                WAYS[way](run)
            run.engine.step()
        except (UsageError, RankError) as error:
            return str(error)
    return ""


@pytest.mark.parametrize("way", ["engine", "client"])
def test_a_rank_that_forgets_alone_is_told(way: str) -> None:
    assert "zero_grad() was called on rank 0 while rank 1 is in step" in run_ranks(_alone, 2, way)[0]


@pytest.mark.parametrize("way", [*WAYS, "none"])
def test_updates_in_the_backward_cannot_be_taken_back(way: str) -> None:
    with _run("cpu", 2, overlap="backward") as run:
        _backward(run, 0, bad=True)
        WAYS["engine"](run)  # no update yet: it is not the last micro-batch of its step
        run.engine.step()
        _backward(run, 1)
        told = r'"backward" the backward has updated .* set "step_overlap" to "forward"'
        if way.startswith("engine"):
            with pytest.raises(UsageError, match=told):
                WAYS[way](run)
        elif way != "none":
            WAYS[way](run)
            with pytest.raises(UsageError, match=told):
                run.engine.step()
            return
        run.engine.step()


@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("stage 0", {"precision": "fp16"}),
        ("all on nvme", {"precision": "fp16"}),
        *(("all on nvme", {"clip": 0.05, "overlap": mode}) for mode in ("none", "forward", "auto")),
        *((place, {"own_backward": True}) for place in ("stage 0", "all on nvme")),
    ],
)
def test_a_step_goes_without_a_micro_batch_that_is_forgotten(place: str, how: dict[str, Any]) -> None:
    with _run(place, **how) as run:
        for number in range(4):
            _backward(run, number, bad=number == 1)
            if number == 1:
                WAYS["client" if "precision" in how else "engine"](run)
                assert run.engine.get_gradient("0.weight") is None
                continue
            run.engine.step()
            _plain_step(run, number)
        assert (run.engine.skipped_steps, run.engine.global_steps) == (0, 3)
        assert run.differences() == []


def test_a_micro_batch_that_is_forgotten_needs_no_step(tmp_path: Path) -> None:
    with _run("stage 0") as run:
        WAYS["client"](run)
        for way in ("engine", "client"):
            _backward(run, 0, bad=True)
            WAYS[way](run)
            assert run.engine.clip_grad_norm_(1.0) == 0.0
            run.engine.step()
            _backward(run, 0, bad=True)
            WAYS[way](run)
            run.engine.save_checkpoint(str(tmp_path / way))  # between two steps
            run.engine.step()
            with pytest.raises(UsageError, match=r"engine\.step\(\) without engine\.backward"):
                run.engine.step()
        assert all(torch.equal(run.engine.get_full_parameter(name), p) for name, p in run.parameters.items())


def test_the_reported_loss_is_of_the_micro_batches_that_count(tmp_path: Path) -> None:
    with _run("stage 0", 3, own={"journal": str(tmp_path)}) as run:
        losses = []
        for number in range(3):
            losses.append(_backward(run, number, bad=number == 1))
            if number == 1:
                run.engine.zero_grad()
            run.engine.step()
    assert steps(read(tmp_path))["loss"] == losses[2:]
