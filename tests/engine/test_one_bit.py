"""Optimizers that send signs: rules against loops over Python numbers, the exchange by its formula, bytes, resume."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.bits import misplanned
from tests.engine.models import batch
from tests.engine.runs import make_config, start, state_of, take_steps
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine import Engine
from zstore.engine.config.config import load_config
from zstore.engine.extras.one_bit import (
    AdamRule,
    LambRule,
    OneBitStep,
    Phase,
    TensorState,
    ZeroOneRule,
    chunk_numel,
    compressed_mean,
    decode,
    encode,
)
from zstore.engine.extras.whole_tensors import Lamb
from zstore.errors import RankError
from zstore.ranks.world import World
from zstore.testing.ranks import run_ranks

Vector = list[float]
SHAPE = (4, 6)
ADAM, ZERO_ONE, LAMB = (AdamRule(), "OneBitAdam"), (ZeroOneRule(), "ZeroOneAdam"), (LambRule(), "OneBitLamb")
BETA1, BETA2, LR, EPS = 0.8, 0.9, 0.05, 1e-3


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)))


def gradients(steps: int) -> Iterator[torch.Tensor]:
    """One element never has a gradient."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        gradient = torch.randn(24, generator=generator) + 0.5
        gradient[7] = 0
        yield gradient


class Lossy:
    """Signs and one scale of a tensor, with the error kept; `loss` 0 sends it as it is."""

    def __init__(self, loss: bool) -> None:
        self.loss = loss
        self.error: Vector = [0.0] * 24
        self.calls = 0

    def numbers(self, values: Vector) -> Vector:
        self.calls += 1
        if not self.loss:
            return list(values)
        meant = [value + error for value, error in zip(values, self.error, strict=True)]
        scale = sum(abs(value) for value in meant) / len(meant)
        sent = [math.copysign(scale, value) for value in meant]
        self.error = [value - one for value, one in zip(meant, sent, strict=True)]
        return sent

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.numbers(tensor.tolist()))


def tensor_state(rule: tuple[AdamRule, str], **settings: Any) -> TensorState:
    given = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS} | settings
    config: Any = load_config({"optimizer": {"type": rule[1], "params": given}}).settings
    slots = {name: torch.zeros(24) for name in (*rule[0].slots, *rule[0].local_slots)}
    arguments = config.optimizer.params.arguments()
    return TensorState(arguments, rule[0].initial(), parameter().detach().flatten(), slots)


def run(
    rule: tuple[AdamRule, str], steps: int, compressed: Lossy, **settings: Any
) -> tuple[list[torch.Tensor], list[Phase]]:
    state, weights, phases = tensor_state(rule, **settings), [], list[Phase]()
    for step, gradient in enumerate(gradients(steps), 1):
        before = compressed.calls
        phases.append(rule[0].phase(state.group, step))
        rule[0].update(state, gradient.clone(), compressed)
        weights.append(state.master.clone())
        assert compressed.calls - before == (phases[-1] == "compressed")
        assert state.scalars["step"] == step
    return weights, phases


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize(("rule", "phase"), [(ADAM, "freeze_step"), (ZERO_ONE, "var_update_scaler")])
def test_the_warm_up_has_the_bits_of_adamw(rule: tuple[AdamRule, str], phase: str, corrects: bool) -> None:
    weights, phases = run(rule, 9, Lossy(True), weight_decay=0.1, bias_correction=corrects, **{phase: 9})
    assert phases == ["exact"] * 9
    plain = parameter()
    adam = torch.optim.AdamW([plain], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=0.1, fused=True)
    moment = variance = torch.zeros(24)
    free = parameter().detach().flatten()
    for gradient, found in zip(gradients(9), weights, strict=True):
        plain.grad = gradient.view(SHAPE).clone()
        adam.step()
        if corrects:
            assert torch.equal(found, plain.detach().flatten())
            continue
        moment, variance = moment * BETA1 + gradient * (1 - BETA1), variance * BETA2 + gradient**2 * (1 - BETA2)
        free = free * (1 - LR * 0.1) - LR * moment / (variance.sqrt() + EPS)
        torch.testing.assert_close(found, free, rtol=1e-5, atol=1e-6)


def test_the_warm_up_has_the_bits_of_lamb() -> None:
    weights, phases = run(LAMB, 9, Lossy(True), weight_decay=0.1, freeze_step=9)
    assert phases == ["exact"] * 9
    plain = parameter()
    lamb = Lamb([plain], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=0.1)
    for gradient, found in zip(gradients(9), weights, strict=True):
        plain.grad = gradient.view(SHAPE).clone()
        lamb.step()
        assert torch.equal(found, plain.detach().flatten())


def adam_by_numbers(steps: int, freeze: int, decay: float, send: Callable[[Vector], Vector]) -> Iterator[Vector]:
    weights, moment, variance = parameter().detach().flatten().tolist(), [0.0] * 24, [0.0] * 24
    for step, gradient in enumerate(gradients(steps), 1):
        moment = [BETA1 * m + (1 - BETA1) * g for m, g in zip(moment, gradient.tolist(), strict=True)]
        if step <= freeze:
            variance = [BETA2 * v + (1 - BETA2) * g * g for v, g in zip(variance, gradient.tolist(), strict=True)]
        else:
            moment = [m if v > 0 else 0.0 for m, v in zip(send(moment), variance, strict=True)]
        seen = 1 - BETA2 ** min(step, freeze)
        for i in range(24):
            divisor = math.sqrt(variance[i] / seen) + EPS
            weights[i] -= LR * (moment[i] / (1 - BETA1**step) / divisor + decay * weights[i])
        yield list(weights)


def test_the_state_of_an_adam_goes_on_as_that_of_one_bit_adam() -> None:
    """With the step count alone, the variance is taken to be of all updates before."""
    finals = []
    for known in (True, False):
        state = tensor_state(ADAM, freeze_step=5)
        for step, gradient in enumerate(gradients(8), 1):
            if step == 6 and not known:
                state.scalars = {**ADAM[0].initial(), "step": 5.0}
            ADAM[0].update(state, gradient.clone(), Lossy(False))
        finals.append(state.master)
    assert torch.equal(*finals)


def zero_one_by_numbers(steps: int, phases: list[Phase], frozen: int, decay: float, send: Lossy) -> Iterator[Vector]:
    """0/1 Adam, element by element, for phases that are given."""
    weights, moment, variance = parameter().detach().flatten().tolist(), [0.0] * 24, [0.0] * 24
    anchor, total, rates, seen = list(weights), [0.0] * 24, 0.0, 0
    for step, (gradient, phase) in enumerate(zip(gradients(steps), phases, strict=True), 1):
        gained, start = [(1 - BETA1) * g for g in gradient.tolist()], 1 - BETA1**step
        if phase == "exact":
            seen += 1
            variance = [BETA2 * v + (1 - BETA2) * g * g for v, g in zip(variance, gradient.tolist(), strict=True)]
        divisor = [math.sqrt(v / (1 - BETA2**seen)) + EPS for v in variance]
        if step <= frozen:
            gained = send.numbers(gained) if phase == "compressed" else gained
            moment = [(BETA1 * m + g) * (v > 0) for m, g, v in zip(moment, gained, variance, strict=True)]
            weights = [
                w * (1 - LR * decay) - LR * m / start / d for w, m, d in zip(weights, moment, divisor, strict=True)
            ]
            anchor = list(weights)
        else:
            moment = [BETA1 * m + g for m, g in zip(moment, gained, strict=True)]
            total, rates = [u + LR * m / start for u, m in zip(total, moment, strict=True)], rates + LR
            weights = [a - u / d for a, u, d in zip(anchor, total, divisor, strict=True)]
            if phase == "compressed":
                means = send.numbers([u / rates for u in total])
                moment = [m * start * (v > 0) for m, v in zip(means, variance, strict=True)]
                pairs = zip(anchor, moment, divisor, strict=True)
                anchor = [a * (1 - rates * decay) - rates * m / start / d for a, m, d in pairs]
                weights, total, rates = list(anchor), [0.0] * 24, 0.0
        yield list(weights)


@pytest.mark.parametrize("loss", [False, True])
def test_zero_one_adam_follows_its_formula(loss: bool) -> None:
    settings = {"var_freeze_step": 14, "var_update_scaler": 4, "local_step_scaler": 5, "local_step_clipper": 3}
    weights, phases = run(ZERO_ONE, 30, Lossy(loss), weight_decay=0.1, **settings)
    exact = {1, 2, 3, 4, 6, 8, 10, 12}  # every one, then every second; every fourth from 13 to the freeze: none
    meetings = {15, 16, 17, 18, 19, 20, 22, 24, 27, 30}
    assert phases == [
        "exact" if n in exact else "compressed" if n <= 14 or n in meetings else "local" for n in range(1, 31)
    ]
    for found, wanted in zip(weights, zero_one_by_numbers(30, phases, 14, 0.1, Lossy(loss)), strict=True):
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-4, atol=1e-5)


def test_a_rate_of_zero_lets_ranks_of_zero_one_adam_meet() -> None:
    weights, phases = run(ZERO_ONE, 5, Lossy(True), var_freeze_step=2, lr=0.0)
    assert phases == ["exact"] * 2 + ["compressed"] * 3
    assert all(torch.equal(found, parameter().detach().flatten()) for found in weights)


def lamb_by_numbers(steps: int, freeze: int, decay: float, send: Callable[[Vector], Vector]) -> Iterator[Vector]:
    weights = parameter().detach().flatten().tolist()
    moment, variance, fresh, frozen, ratio = [0.0] * 24, [0.0] * 24, [0.0] * 24, 0.0, 1.0
    for step, gradient in enumerate(gradients(steps), 1):
        last = moment
        moment = [BETA1 * m + (1 - BETA1) * g for m, g in zip(moment, gradient.tolist(), strict=True)]
        if step <= freeze:
            variance = [BETA2 * v + (1 - BETA2) * g * g for v, g in zip(variance, gradient.tolist(), strict=True)]
            fresh = variance
        else:
            moment = [m if v > 0 else 0.0 for m, v in zip(send(moment), variance, strict=True)]
            rebuilt = [(m - BETA1 * before) / (1 - BETA1) for m, before in zip(moment, last, strict=True)]
            fresh = [BETA2 * v + (1 - BETA2) * g * g for v, g in zip(fresh, rebuilt, strict=True)]
        update = [m / (math.sqrt(v) + EPS) for m, v in zip(moment, variance, strict=True)]
        whole = [u + decay * w for u, w in zip(update, weights, strict=True)]
        seen = 1 - BETA2 ** min(step, freeze)
        if step <= freeze:
            factor = min(max(math.hypot(*weights) / math.hypot(*whole), 0.01), 10.0)
            frozen = 0.9 * frozen + 0.1 * factor
        else:
            found = max((math.sqrt(v) + EPS) / (math.sqrt(f) + EPS) for v, f in zip(variance, fresh, strict=True))
            part = min(1.0, math.hypot(*update) / math.hypot(*whole))
            found = found * math.sqrt((1 - BETA2**step) / seen) * part + 1 - part
            ratio = min(max(min(max(found, 0.5), 4.0), 0.9 * ratio), 1.1 * ratio)
            factor = frozen * ratio
        rate = LR * math.sqrt(seen) / (1 - BETA1**step)
        weights = [w - rate * factor * u for w, u in zip(weights, whole, strict=True)]
        yield list(weights)


@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize(
    ("kind", "by_numbers", "freeze", "rtol"), [(ADAM, adam_by_numbers, 5, 1e-4), (LAMB, lamb_by_numbers, 12, 1e-3)]
)
def test_a_rule_with_a_frozen_variance_follows_its_formula(
    kind: tuple[AdamRule, str], by_numbers: Any, freeze: int, rtol: float, loss: bool
) -> None:
    weights, phases = run(kind, 30, Lossy(loss), weight_decay=0.1, freeze_step=freeze)
    assert phases == ["exact"] * freeze + ["compressed"] * (30 - freeze)
    for found, wanted in zip(weights, by_numbers(30, freeze, 0.1, Lossy(loss).numbers), strict=True):
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=rtol, atol=rtol / 10)


def config_of(kind: str, stage: int, **keys: Any) -> dict[str, Any]:
    params: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.01}
    if kind in {"OneBitAdam", "OneBitLamb"}:
        params["freeze_step"] = 2
    if kind == "ZeroOneAdam":
        params |= {"var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 4}
    return make_config(stage, scheduler=None, optimizer={"type": kind, "params": params}, **keys)


def own_of(engine: Engine) -> list[Any]:
    stepper = engine.training_state.update.stepper
    assert isinstance(stepper, OneBitStep)
    return [{name: values.tolist() for name, values in own.items()} for own in stepper.local.values()]


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
            take_steps(adam, 1)
            states.append(state_of(adam))
    for stage in (0, 1):
        with start(config_of("OneBitAdam", stage)) as engine:
            training = engine.training_state
            wrong += misplanned(engine)
            held = training.plan.held
            planned = held["worker_error"].device + held["server_error"].device
            assert isinstance(training.update.stepper, OneBitStep)
            kept = sum(values.nbytes for own in training.update.stepper.local.values() for values in own.values())
            if planned != kept:
                wrong.append(f"planned {planned}, kept {kept}")
            numels = [record.numel for record in training.trained if not record.name.startswith("unused")]
            expected = (world_size - 1) * sum(chunk_numel(n, world_size) // 8 + 4 for n in numels)
            for number in range(5):
                before = training.world.sent_bytes
                take_steps(engine, 1)
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
                    take_steps(resumed, 1)
                if not same_state(resumed, engine):
                    wrong.append(f"{stage}: resumed otherwise")
    wrong += resumes("ZeroOneAdam", f"{folder}/ZeroOneAdam", (4, 5))
    wrong += resumes("OneBitLamb", f"{folder}/OneBitLamb", (4,))
    return wrong


def resumes(kind: str, folder: str, tags: tuple[int, ...]) -> list[str]:
    """A run goes on the same from each of some steps after which it was saved, those of its own too."""
    with start(config_of(kind, 0)) as engine:
        for number in range(1, 7):
            take_steps(engine, 1)
            if number in tags:
                engine.save_checkpoint(folder, tag=str(number))
        for tag in tags:
            with start(config_of(kind, 0)) as resumed:
                resumed.load_checkpoint(folder, tag=str(tag))
                for _ in range(6 - tag):
                    take_steps(resumed, 1)
                if not same_state(resumed, engine):
                    return [f"{kind}: resumed otherwise from {tag}"]
    return []


def fails(rank: int, world_size: int) -> str:
    """One rank fails in a step, while the others wait in its exchange."""
    with start(config_of("OneBitAdam", 1)) as engine:
        for _ in range(2):
            take_steps(engine, 1)
        if rank:
            record = engine.training_state.trained[0]
            engine.training_state.state.scalars[record]["variance_updates"] = "not a number"  # type: ignore[assignment]
        with pytest.raises(TypeError if rank else RankError) as raised:
            take_steps(engine, 1)
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
        take_steps(engine, 1)
        assert (engine.global_steps, math.isfinite(before)) == (4, True)
    # A run of Adam goes on with signs, and the other way round.
    with start(config_of("AdamW", 0)) as engine:
        engine.load_checkpoint(str(tmp_path / "1"))
        take_steps(engine, 1)
        engine.save_checkpoint(str(tmp_path / "exact"))
        masters = state_of(engine)["model/embed.weight"]
    with start(config_of("OneBitAdam", 1)) as engine:
        engine.load_checkpoint(str(tmp_path / "exact"))
        assert state_of(engine)["model/embed.weight"] == masters
        take_steps(engine, 1)
    with start(config_of("ZeroOneAdam", 1)) as engine:
        engine.load_checkpoint(str(tmp_path / "ZeroOneAdam"), tag="4")
        take_steps(engine, 1)
        assert math.isfinite(loss_of(engine, 0))
