"""The rules of 1-bit Adam, 0/1 Adam and 1-bit LAMB, each against loops over Python numbers and against the exact optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from zstore.engine.config.config import load_config
from zstore.engine.extras.one_bit.step import AdamRule, LambRule, Phase, TensorState, ZeroOneRule
from zstore.engine.optim.classes import Lamb
from zstore.errors import ConfigError

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


def state_of(rule: tuple[AdamRule, str], **settings: Any) -> TensorState:
    given = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS} | settings
    config: Any = load_config({"optimizer": {"type": rule[1], "params": given}}).settings
    slots = {name: torch.zeros(24) for name in (*rule[0].slots, *rule[0].own_slots)}
    arguments = config.optimizer.params.arguments()
    return TensorState(arguments, rule[0].initial(), parameter().detach().flatten(), slots)


def run(
    rule: tuple[AdamRule, str], steps: int, compressed: Lossy, **settings: Any
) -> tuple[list[torch.Tensor], list[Phase]]:
    """Return the weights after each update, and its phase."""
    state, weights, phases = state_of(rule, **settings), [], list[Phase]()
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
    """1-bit Adam, element by element."""
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


@pytest.mark.parametrize("loss", [False, True])
def test_one_bit_adam_follows_its_formula(loss: bool) -> None:
    weights, phases = run(ADAM, 30, Lossy(loss), weight_decay=0.1, freeze_step=5)
    assert phases == ["exact"] * 5 + ["compressed"] * 25
    for found, wanted in zip(weights, adam_by_numbers(30, 5, 0.1, Lossy(loss).numbers), strict=True):
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-4, atol=1e-5)


def test_the_state_of_an_adam_goes_on_as_that_of_one_bit_adam() -> None:
    """With the step count alone, the variance is taken to be of all updates before."""
    finals = []
    for known in (True, False):
        state = state_of(ADAM, freeze_step=5)
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
            variance, seen = (
                [BETA2 * v + (1 - BETA2) * g * g for v, g in zip(variance, gradient.tolist(), strict=True)],
                seen + 1,
            )
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
    """1-bit LAMB, element by element, with the default limits."""
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
def test_one_bit_lamb_follows_its_formula(loss: bool) -> None:
    weights, phases = run(LAMB, 30, Lossy(loss), weight_decay=0.1, freeze_step=12)
    assert phases == ["exact"] * 12 + ["compressed"] * 18
    for found, wanted in zip(weights, lamb_by_numbers(30, 12, 0.1, Lossy(loss).numbers), strict=True):
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("beside", "key"),
    [
        ({"zero_optimization": {"stage": 2}}, r"zero_optimization\.stage"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"zstore": {"moments": "bf16"}}, r"zstore\.moments"),
        ({"gradient_clipping": 1.0}, "gradient_clipping"),
    ],
)
def test_what_a_config_cannot_combine_is_named(beside: dict[str, Any], key: str) -> None:
    message = f'{key} and optimizer.type: .*leave [a-z_.]*{key} out \\(stage 0 or 1\\), or write type "AdamW"'
    with pytest.raises(ConfigError, match=message):
        load_config({"optimizer": {"type": "onebitadam"}} | beside)
