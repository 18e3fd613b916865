"""Runs of optimizers that send signs: the exchange by its formula, bits until the freeze, bytes, resume on any ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.models import batch
from tests.engine.runs import make_config, start, state_of, step
from tests.engine.test_whole_tensors import misplanned
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine import Engine
from zstore.engine.extras.one_bit.step import OneBitStep, chunk_numel, compressed_mean, decode, encode
from zstore.errors import RankError
from zstore.ranks.world import World
from zstore.testing.ranks import run_ranks

torch.set_num_threads(1)


def config_of(kind: str, stage: int, **keys: Any) -> dict[str, Any]:
    params: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.01}
    if kind in {"OneBitAdam", "OneBitLamb"}:
        params["freeze_step"] = 2
    if kind == "ZeroOneAdam":
        params |= {"var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 4}
    return make_config(stage, scheduler=None, optimizer={"type": kind, "params": params}, **keys)


def own_of(engine: Engine) -> list[Any]:
    """What this rank has for itself, as plain numbers."""
    stepper = engine.training_state.update.stepper
    assert isinstance(stepper, OneBitStep)
    return [{name: values.tolist() for name, values in own.items()} for own in stepper.own.values()]


def same_state(one: Engine, other: Engine) -> bool:
    return state_of(one) == state_of(other) and own_of(one) == own_of(other)


def loss_of(engine: Engine, rank: int) -> float:
    with torch.no_grad():
        return float(engine(*batch(0, 0, rank)))


def test_signs_lose_less_than_the_row() -> None:
    rows = torch.randn(3, 24, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1e-6], [1.0], [1e4]])
    rows[0, 5:] = 0
    found = encode(rows, [5, 24, 24])
    assert (found.dtype, tuple(found.shape)) == (torch.uint8, (3, 3 + 4))
    values = decode(found)
    assert torch.equal(values >= 0, rows >= 0)
    for row, value, count in zip(rows, values, (5, 24, 24), strict=True):
        size, scale = row[:count].abs().double(), float(value[0].abs())
        assert scale == pytest.approx(float(size.mean()), rel=1e-6)
        lost = (row - value)[:count].double().square().sum().item()
        assert lost == pytest.approx(float(size.square().sum()) - count * scale**2, rel=1e-5)
        assert len(set(value.abs().tolist())) == 1
    assert not decode(encode(torch.zeros(1, 8), [0])).any()


def plain_exchange(values: list[torch.Tensor], rounds: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The algorithm written down over all ranks at once: means of each round, and what each worker still owes."""
    ranks, numel = len(values), values[0].numel()
    chunk = math.ceil(math.ceil(numel / ranks) / 8) * 8
    cuts = [slice(r * chunk, min((r + 1) * chunk, numel)) for r in range(ranks)]

    def signs(part: torch.Tensor) -> torch.Tensor:
        return torch.where(part >= 0, 1.0, -1.0) * (part.abs().sum() / max(part.numel(), 1))

    worker, server = [torch.zeros(numel) for _ in values], torch.zeros(numel)
    means = []
    for _ in range(rounds):
        corrected = [value + error for value, error in zip(values, worker, strict=True)]
        sent = [torch.cat([signs(one[cut]) for cut in cuts]) for one in corrected]
        worker = [one - what for one, what in zip(corrected, sent, strict=True)]
        mean = torch.stack(sent).sum(dim=0) / ranks + server
        means.append(torch.cat([signs(mean[cut]) for cut in cuts]))
        server = mean - means[-1]
    return means, worker


def exchange(rank: int, world_size: int, numel: int) -> list[str]:
    world = World.current()
    values = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    means, worker = plain_exchange(values, 4)
    owed, wrong = torch.zeros(numel), []
    errors = {"worker_error": owed, "server_error": torch.zeros(chunk_numel(numel, world_size))}
    for number, expected in enumerate(means):
        before = world.sent_bytes
        found = compressed_mean(world, errors, values[rank])
        sent = world.sent_bytes - before
        bytes_each = (world_size - 1) * (chunk_numel(numel, world_size) // 8 + 4)
        if dict(sent) != {"all_to_all": bytes_each, "all_gather": bytes_each}:
            wrong.append(f"{numel}: round {number} sent {dict(sent)}")
        if not torch.allclose(found, expected, rtol=1e-5, atol=1e-6):
            wrong.append(f"{numel}: round {number} gives another mean")
    if not torch.allclose(owed, worker[rank], rtol=1e-4, atol=1e-5):
        wrong.append(f"{numel}: other errors")
    return wrong


def runs(rank: int, world_size: int, folder: str) -> list[str]:
    wrong = [line for numel in (1, 7, 100, 1000) for line in exchange(rank, world_size, numel)]
    with start(config_of("AdamW", 0)) as adam:
        states = []
        for _ in range(2):
            step(adam)
            states.append(state_of(adam))
    for stage in (0, 1):
        with start(config_of("OneBitAdam", stage)) as engine:
            training = engine.training_state
            wrong += misplanned(engine)
            held = training.plan.held
            planned = held["worker_error"].device + held["server_error"].device
            assert isinstance(training.update.stepper, OneBitStep)
            kept = sum(values.nbytes for own in training.update.stepper.own.values() for values in own.values())
            if planned != kept:
                wrong.append(f"planned {planned}, kept {kept}")
            numels = [record.numel for record in training.trained if not record.name.startswith("unused")]
            expected = (world_size - 1) * sum(chunk_numel(n, world_size) // 8 + 4 for n in numels)
            for number in range(5):
                before = training.world.sent_bytes
                step(engine)
                sent = training.world.sent_bytes - before
                if number < 2:  # bit by bit
                    now, exact = state_of(engine), states[number]
                    wrong += [f"{stage}: step {number}: {k}" for k in exact if k != "scalars" and now[k] != exact[k]]
                elif (sent["all_to_all"], sent["all_gather"], sent["all_reduce"]) != (expected, expected, 0):
                    wrong.append(f"{stage}: step {number} sent {dict(sent)}, expected {expected}")
                if number == 2:
                    engine.save_checkpoint(f"{folder}/{stage}")
            with start(config_of("OneBitAdam", stage)) as resumed:
                resumed.load_checkpoint(f"{folder}/{stage}")
                for _ in range(2):
                    step(resumed)
                if not same_state(resumed, engine):
                    wrong.append(f"{stage}: resumed otherwise")
    wrong += resumes("ZeroOneAdam", f"{folder}/ZeroOneAdam", (4, 5))
    wrong += resumes("OneBitLamb", f"{folder}/OneBitLamb", (4,))
    return wrong


def resumes(kind: str, folder: str, tags: tuple[int, ...]) -> list[str]:
    """A run goes on the same from each of some steps after which it was saved, those of its own too."""
    with start(config_of(kind, 0)) as engine:
        for number in range(1, 7):
            step(engine)
            if number in tags:
                engine.save_checkpoint(folder, tag=str(number))
        for tag in tags:
            with start(config_of(kind, 0)) as resumed:
                resumed.load_checkpoint(folder, tag=str(tag))
                for _ in range(6 - tag):
                    step(resumed)
                if not same_state(resumed, engine):
                    return [f"{kind}: resumed otherwise from {tag}"]
    return []


def fails(rank: int, world_size: int) -> str:
    """One rank fails in a step, while the others wait in its exchange."""
    with start(config_of("OneBitAdam", 1)) as engine:
        for _ in range(2):
            step(engine)
        if rank:
            record = engine.training_state.trained[0]
            engine.training_state.state.scalars[record]["variance_updates"] = "not a number"  # type: ignore[assignment]
        with pytest.raises(TypeError if rank else RankError) as raised:
            step(engine)
        return str(raised.value)


def test_a_rank_that_fails_ends_the_exchange() -> None:
    others, _ = run_ranks(fails, 2, 2)
    assert "rank 1" in others
    assert "TypeError" in others


@pytest.mark.soak
def test_two_ranks(tmp_path: Path) -> None:
    assert run_ranks(runs, 2, 2, str(tmp_path)) == [[], []]
    for stage in ("0", "1"):
        with open_checkpoint(tmp_path / stage, "step-00000003") as opened:
            assert verify_checkpoint(opened) == []
    # Alone: what the ranks share is the same, and no errors are owed any more.
    with start(config_of("OneBitAdam", 1)) as engine:
        engine.load_checkpoint(str(tmp_path / "1"))
        before = loss_of(engine, 0)
        step(engine)
        assert (engine.global_steps, math.isfinite(before)) == (4, True)
    # A run of Adam goes on with signs, and the other way round.
    with start(config_of("AdamW", 0)) as engine:
        engine.load_checkpoint(str(tmp_path / "1"))
        step(engine)
        engine.save_checkpoint(str(tmp_path / "exact"))
        masters = state_of(engine)["model/embed.weight"]
    with start(config_of("OneBitAdam", 1)) as engine:
        engine.load_checkpoint(str(tmp_path / "exact"))
        assert state_of(engine)["model/embed.weight"] == masters
        step(engine)
    with start(config_of("ZeroOneAdam", 1)) as engine:
        engine.load_checkpoint(str(tmp_path / "ZeroOneAdam"), tag="4")
        step(engine)
        assert math.isfinite(loss_of(engine, 0))
