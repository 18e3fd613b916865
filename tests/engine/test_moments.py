"""Moments in bf16: training beside torch's AdamW, bytes, and checkpoints to and from fp32."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zstore
from tests.engine.bits import ADAM, Case, Rule, compare_all
from tests.engine.runs import make_config, moved_since, start, step
from zstore.engine.config.optimizers import reduced_slots
from zstore.errors import ConfigError, UsageError
from zstore.io import LinkStatistics
from zstore.optim import Lamb
from zstore.testing.ranks import run_ranks

KINDS = ("fp32", "bf16")


def with_moments(kind: str, stage: int = 1, tier: str = "none", nvme: str | Path = "", **keys: Any) -> dict[str, Any]:
    own = keys.pop("zstore", {})
    return make_config(stage, tier, nvme, zstore={"moments": kind, **own}, **keys)


def reduced(name: str, values: torch.Tensor, number: int, half: int) -> torch.Tensor:
    flat = values.reshape(-1).numpy()
    seed = int.from_bytes(hashlib.blake2b(f"{number} {name}".encode(), digest_size=4).digest(), "little")
    words = np.random.Philox(key=0).random_raw(2**16).view("<u4").astype(np.int64)
    noise = (words[(seed + np.arange(flat.size)) % 2**17] >> 16 * half) & 0xFFFF
    bits = (flat.view(np.int32) + noise.astype(np.int32)) & ~0xFFFF
    return torch.from_numpy(bits.astype(np.int32).view(np.float32)).view(values.shape)


def rounded(kind: Any, named: dict[str, nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    """An optimizer whose moments are rounded after each step, over whole tensors."""
    optimizer: torch.optim.Optimizer = kind(named.values(), **settings)

    def after(*_: object) -> None:
        for name, parameter in named.items():
            state = optimizer.state.get(parameter)
            for half, slot in enumerate(("exp_avg", "exp_avg_sq") if state and parameter.grad is not None else ()):
                state[slot].copy_(reduced(name, state[slot], int(state["step"]), half))

    optimizer.register_step_post_hook(after)
    return optimizer


LAMB = {"lr": 1e-2, "weight_decay": 0.1}
RULES = {
    "AdamW": Rule(lambda of: rounded(torch.optim.AdamW, of, **ADAM, fused=True), {"type": "AdamW", "params": ADAM}),
    "Lamb": Rule(lambda named: rounded(Lamb, named, **LAMB), {"type": "Lamb", "params": LAMB}),
}
PLACES = [(0, "none", "none"), (1, "nvme", "forward"), (2, "cpu", "backward"), (3, "nvme", "forward")]


def _bits(rank: int, world_size: int, precision: str, name: str) -> list[tuple[str, list[str]]]:
    cases = [
        Case(stage, tier, precision, 1, 0.0, overlap=overlap, own={"moments": "bf16"}, optimizer=name, resume=stage % 2)
        for stage, tier, overlap in PLACES
    ]
    return compare_all(rank, world_size, cases, 3, rules=RULES)


@pytest.mark.parametrize(
    ("world_size", "precision", "name"),
    [
        (1, "fp32", "AdamW"),
        (2, "bf16", "AdamW"),
        pytest.param(3, "fp32", "AdamW", marks=pytest.mark.soak),
        pytest.param(2, "bf16", "Lamb", marks=pytest.mark.soak),
    ],
)
def test_runs_have_the_bits_of_torch_with_rounded_moments(world_size: int, precision: str, name: str) -> None:
    assert run_ranks(_bits, world_size, world_size, precision, name) == [[]] * world_size


def test_rounding_is_fair() -> None:
    """The mean of a value that lies between two numbers is the value: of 2^17 words, within four deviations."""
    with start(with_moments("bf16")) as engine:
        state = engine.training_state.state
        record = next(record for record in engine.training_state.trained if record.name == "embed.weight")
        values = torch.full((2**17,), 1 + 2**-9)
        out = torch.empty(2**17, dtype=torch.bfloat16)
        state.codec.of(record.name, 1, record.owned_range[0]).put([values], [out], 0)
    assert set(out.float().tolist()) == {1.0, 1 + 2**-7}
    assert out.double().mean().item() == pytest.approx(1 + 2**-9, abs=4 * 2**-7 * 0.43 / 2**8.5)


def test_traffic_and_files_are_as_planned(nvme: Path) -> None:
    """A weight of long rows has the largest chunks, so that little of the traffic is padding: of fp32 24 bytes each way
    together, of bf16 16."""
    model = nn.Linear(2**19, 8, bias=False)
    numel = model.weight.numel()
    moved: dict[str, float] = {}
    for kind in KINDS:
        with start(with_moments(kind, 1, "nvme", nvme, gradient_accumulation_steps=1), model) as engine:
            x = torch.ones(2, 2**19, dtype=torch.bfloat16)
            links: dict[str, LinkStatistics] = {}
            for _ in range(2):  # the first step does not read the zeros that slots begin as
                before = engine.statistics()
                engine.backward(engine(x).float().mean())
                engine.step()
                engine.training_state.update.wait()
                links = moved_since(engine, before)
            counted = links["optimizer_read"].bytes + links["optimizer_write"].bytes
            plan = engine.training_state.plan
            assert counted == plan.read_bytes + plan.written_bytes
            assert plan.held_total.disk == engine.statistics().store.disk_bytes
            held = sum(one.total for slot, one in plan.held.items() if slot in ("master", "exp_avg", "exp_avg_sq"))
            assert held == engine.statistics().held.optimizer_state
            moved[kind] = counted / numel
    assert 24 < moved["fp32"] <= 24.2
    assert 16 < moved["bf16"] <= 16.2


def dtypes(config: dict[str, Any], **given: Any) -> set[str]:
    with start(config, **given) as engine:
        store = engine.training_state.state.store
        return {store.spec(name).dtype for name in store.names() if name.startswith("optimizer/exp_avg/")}


def test_deepspeed_s_keys_ask_for_bf16() -> None:
    assert dtypes(make_config()) == {"float32"}
    assert dtypes(make_config(bf16={"enabled": True, "bf16_optimizer_states": True})) == {"bfloat16"}
    lower: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"fp32_optimizer_states": False}}}
    assert dtypes(make_config(**lower)) == {"bfloat16"}
    with pytest.raises(ConfigError, match=r'fp32_optimizer_states.*zstore\.moments.*the other in "fp32"; keep one'):
        start(with_moments("fp32", **lower))
    with pytest.raises(ConfigError, match="moments"):
        start(with_moments("int4"))


def test_what_would_not_bear_it_stays_in_fp32_or_is_refused() -> None:
    assert reduced_slots(("sum",)) == set()
    assert reduced_slots(("square_avg", "grad_avg")) == set()
    assert reduced_slots(("exp_avg", "exp_avg_sq", "max_exp_avg_sqs")) == {"exp_avg"}
    config = {k: v for k, v in with_moments("bf16").items() if k not in ("optimizer", "scheduler")}
    model = nn.Linear(8, 8)
    with pytest.raises(UsageError, match=r'"moments": "bf16": expected .* that stores averages.*Adagrad.*sum'):
        zstore.initialize(model=model, optimizer=torch.optim.Adagrad(model.parameters()), config=config)
    model = nn.Linear(300, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = zstore.initialize(model=model, optimizer=optimizer, config=config | {"bf16": {"enabled": False}})[0]
    with engine:
        for _ in range(2):
            for _ in range(2):
                engine.backward(engine(torch.ones(2, 300)).square().mean())
                engine.step()
        state = engine.get_optimizer_state("weight", "momentum_buffer")
        assert state.abs().max() > 0
        assert engine.training_state.state.store.spec("optimizer/momentum_buffer/weight").dtype == "bfloat16"


def test_moments_load_into_the_other_type(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    exact: dict[str, torch.Tensor] = {}
    for kind in KINDS:
        with start(with_moments(kind)) as engine:
            for _ in range(2):
                step(engine)
            engine.save_checkpoint(tmp_path / kind, tag="t")
    for saved in KINDS:
        for own in KINDS:
            caplog.clear()
            with caplog.at_level("INFO", logger="zstore"), start(with_moments(own)) as engine:
                engine.load_checkpoint(tmp_path / saved)
                said = [record for record in caplog.messages if "moments are converted" in record]
                assert len(said) == (own != saved)
                if own == "fp32":  # the first
                    state = {one: engine.get_optimizer_state("embed.weight", one) for one in ("exp_avg", "exp_avg_sq")}
                    exact = {slot: values for slot, values in state.items() if values is not None}
                most = {"fp32": 0.0, "bf16": 2**-7}[own] if own != saved else 0.0
                for slot, values in exact.items():
                    found = engine.get_optimizer_state("embed.weight", slot)
                    least = values.abs().max() * 2**-8 * most
                    assert ((found - values).abs() <= values.abs() * most + least).all()
                step(engine)
                assert engine.global_steps == 3


def test_a_moment_that_is_set_is_rounded() -> None:
    with start(with_moments("bf16")) as engine:
        step(engine)
        values = torch.linspace(-1, 1, 1203 * 56).view(1203, 56)
        engine.set_optimizer_state("embed.weight", "exp_avg", values)
        found = engine.get_optimizer_state("embed.weight", "exp_avg")
        assert torch.equal(found, values.bfloat16().float())
        step(engine)
