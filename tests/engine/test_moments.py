"""Moments in bf16 and in 8 bits: their codes, training beside fp32, bytes, and checkpoints between all three."""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zstore
from tests.engine.bits import digest, engine_digests
from tests.engine.models import batch, make_net
from tests.engine.runs import make_config, start, step
from zstore.checkpoint.moments import block_numel, stored_slots, values_of_codes, whole_moment
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.reshard import reshard_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine import Engine
from zstore.engine.extras.moments.codes import dequantize, quantize, random_words, round_to_bf16, word_of
from zstore.errors import CheckpointMismatchError, ConfigError, UsageError
from zstore.format.partition import make_grid
from zstore.testing.ranks import run_ranks

FORMAT = Path(__file__).parents[2] / "docs/format.md"
KINDS = ("fp32", "bf16", "int8")


def with_moments(kind: str, stage: int = 1, tier: str = "none", nvme: str | Path = "", **keys: Any) -> dict[str, Any]:
    own = keys.pop("zstore", {})
    return make_config(stage, tier, nvme, zstore={"moments": kind, **own}, **keys)


# -- codes ------------------------------------------------------------------------------------------------------------


def float_of(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


SIGNED = [float_of(((119 << 4) + code) << 19) - 2**-8 for code in range(128)]
POSITIVE = [float_of(((111 << 4) + code) << 19) for code in range(256)]


def reference(values: list[float], signed: bool, block: int, noise: list[float]) -> tuple[list[int], list[float]]:
    """Codes and scales in plain Python: each value goes up to the next number where its share of the way there, plus
    `noise` from 0 to 1, comes to 1."""
    numbers = SIGNED if signed else POSITIVE
    codes: list[int] = []
    scales: list[float] = []
    for first in range(0, len(values), block):
        part = values[first : first + block]
        scale = float(np.float32(max(map(abs, part)) / numbers[-1]))
        scales.append(scale)
        for offset, value in enumerate(part):
            ratio = abs(value) / scale if scale else 0.0
            below = max((n for n in range(len(numbers)) if numbers[n] <= ratio), default=0)
            if below + 1 < len(numbers) and ratio > numbers[below]:
                share = (ratio - numbers[below]) / (numbers[below + 1] - numbers[below])
                below += share + noise[first + offset] >= 1
            codes.append(-below if value < 0 else below)
    return codes, scales


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_plain_python(signed: bool) -> None:
    rng = np.random.default_rng(3)
    numel, block, word = 16 * 7 + 5, 16, 40
    values = (rng.standard_normal(numel) * 10.0 ** rng.uniform(-6, 0, numel)).astype(np.float32)
    values[16:32] = 0
    values = values if signed else values**2
    codes = torch.empty(numel, dtype=torch.int8 if signed else torch.uint8)
    scales = torch.empty(-(-numel // block))
    quantize(torch.from_numpy(values.copy()), codes, scales, block, (word, 0), torch.empty(numel))
    noise = [((int(w) & 0xFFFF) + 0.5) / 2**16 for w in random_words()[word : word + numel]]
    wanted, wanted_scales = reference(values.tolist(), signed, block, noise)
    np.testing.assert_allclose(scales.numpy(), wanted_scales, rtol=2e-7)
    # In fp32 a value may lie on the other side of what the noise asks for: by one, and rarely.
    apart = np.abs(np.array(wanted) - codes.numpy().astype(int))
    assert apart.max() <= 1
    assert np.count_nonzero(apart) <= 1
    numbers = np.array(SIGNED if signed else POSITIVE)
    expected = np.sign(codes.numpy()) * numbers[np.abs(codes.numpy().astype(int))] if signed else numbers[codes.numpy()]
    found = dequantize(codes, scales, block, torch.empty(numel), torch.empty(numel)).numpy()
    np.testing.assert_allclose(found, expected * np.repeat(scales.numpy(), block)[:numel], rtol=2e-7)
    assert (found[16:32] == 0).all()
    if not signed:
        assert (found[values > 0] > 0).all()  # a divisor must not vanish


def test_rounding_is_fair_and_close() -> None:
    """Over many steps the mean is the value, which rounding to the nearest would keep on one side."""
    values = torch.tensor([1.0, 0.7712, -0.03307, 0.0021, -0.2471, 3e-4, 0.5004, -0.11] * 2)
    for signed in (True, False):
        given = values if signed else values.square().clamp_min(2**-15)
        total = torch.zeros(16)
        for number in range(600):
            codes = torch.empty(16, dtype=torch.int8 if signed else torch.uint8)
            scales = torch.empty(1)
            quantize(given.clone(), codes, scales, 16, (word_of("w", number), 1), torch.empty(16))
            total += dequantize(codes, scales, 16, torch.empty(16), torch.empty(16))
        apart = (total / 600 - given).abs() / (given.abs() + 2**-8 * signed)
        assert apart.max() < 0.006
        one = dequantize(codes, scales, 16, torch.empty(16), torch.empty(16))
        assert ((one - given).abs() <= (given.abs() + 2**-8 * signed) / 16).all()
    total = torch.zeros(16)
    for number in range(600):
        out = torch.empty(16, dtype=torch.bfloat16)
        round_to_bf16(values.clone(), out, (word_of("w", number), 0))
        assert ((out.float() - values).abs() <= values.abs() * 2**-7).all()
        total += out.float()
    assert ((total / 600 - values).abs() / values.abs()).max() < 8e-4


@pytest.mark.parametrize(
    "shape", [(1,), (70_001,), (3, 5), (1000, 77), (768, 768), (2, 2**20), (3, 300_001), (0,), (4, 0)]
)
def test_blocks_lie_in_one_shard_and_chunk_at_every_world_size(shape: tuple[int, ...]) -> None:
    block = block_numel(shape)
    assert block in (16, 32, 64, 128, 256)
    for world_size in (1, 2, 3, 7, 64):
        grid = make_grid(shape, world_size)
        if grid.num_shards:
            assert grid.shard_numel % block == 0
            assert grid.chunk_numel % block == 0
            packed = grid.packed(block)
            assert grid.numel_per_value(packed) == block
            assert [packed.present_chunks(n) for n in range(grid.num_shards)] == [
                grid.present_chunks(n) for n in range(grid.num_shards)
            ]


# -- training ---------------------------------------------------------------------------------------------------------


def in_plain_python(kind: str, model: nn.Module, steps: int) -> dict[str, torch.Tensor]:
    """Train by torch's own AdamW, moments reduced after each step over whole tensors; return parameters and moments."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2, weight_decay=0.1, fused=True)
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        model(*batch(number - 1, 0, 0)).backward()
        optimizer.step()
        for name, parameter in named.items():
            state = optimizer.state.get(parameter)
            for half, slot in enumerate(("exp_avg", "exp_avg_sq") if state else ()):
                state[slot].copy_(reduced(kind, name, state[slot], number, half))
    found = {f"model/{name}": p.detach() for name, p in named.items()}
    for name, parameter in named.items():
        state = optimizer.state.get(parameter, {})
        found |= {f"{slot}/{name}": state[slot] for slot in ("exp_avg", "exp_avg_sq") if slot in state}
    return found


def reduced(kind: str, name: str, values: torch.Tensor, number: int, half: int) -> torch.Tensor:
    """Return the values of a whole moment after rounding, by the formulas of docs/format.md in numpy."""
    flat = values.reshape(-1).numpy()
    seed = int.from_bytes(hashlib.blake2b(f"{number} {name}".encode(), digest_size=4).digest(), "little")
    words = random_words().numpy()[: 2**17]
    noise = (words[(seed + np.arange(flat.size)) % 2**17] >> 16 * half) & 0xFFFF
    if kind == "bf16":
        bits = (flat.view(np.int32) + noise.astype(np.int32)) & ~0xFFFF
        return torch.from_numpy(bits.astype(np.int32).view(np.float32)).view(values.shape)
    block, signed = block_numel(tuple(values.view(-1, values.shape[-1]).shape if values.dim() else (1,))), half == 0
    padded = np.pad(flat, (0, -flat.size % block)).reshape(-1, block)
    largest = np.float32(247 / 256 if signed else 31 / 32)
    scales = np.abs(padded).max(1, keepdims=True) / largest
    ratio = np.abs(padded) / np.where(scales == 0, np.float32(1), scales) + np.float32(2**-8 if signed else 0)
    fair = (np.pad(noise, (0, -flat.size % block)).reshape(-1, block) << 3) + 4
    codes = ((ratio.astype(np.float32).view(np.int32) + fair - ((119 if signed else 111) << 23)) >> 19).clip(
        0, 127 if signed else 255
    )
    numbers = np.array(SIGNED if signed else POSITIVE, np.float32)[codes]
    found = np.where(padded < 0, -numbers, numbers) * scales
    return torch.from_numpy(found.astype(np.float32).reshape(-1)[: flat.size].copy()).view(values.shape)


def plain_config(kind: str, **keys: Any) -> dict[str, Any]:
    more: dict[str, Any] = {"bf16": {"enabled": False}, "gradient_accumulation_steps": 1, "scheduler": None}
    return with_moments(kind, **more, **keys)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_run_has_the_bits_of_torch_s_adamw_with_moments_reduced_after_each_step(kind: str) -> None:
    expected = in_plain_python(kind, make_net(), 3)
    with start(plain_config(kind)) as engine:
        for _ in range(3):
            step(engine)
        for key, values in expected.items():
            slot, _, name = key.partition("/")
            found = engine.get_full_parameter(name) if slot == "model" else engine.get_optimizer_state(name, slot)
            assert found is not None
            assert torch.equal(found, values), key


RUNS = [(0, "none", "none"), (1, "nvme", "forward"), (2, "cpu", "backward"), (3, "nvme", "forward")]
BITS = [("bf16", "AdamW", RUNS[1:3]), ("int8", "AdamW", RUNS[:2])]
"""Kind, optimizer and runs that are compared."""
MORE_BITS = [("bf16", "AdamW", RUNS), ("int8", "AdamW", RUNS), ("int8", "Lamb", RUNS)]


def _bits(rank: int, nvme: str, folder: str, cases: list[Any]) -> list[list[dict[str, str]]]:
    """Whole state after runs at several stages and tiers; one more goes on from a save."""
    return [_bits_of(nvme, f"{folder}/{kind}-{name}", kind, name, runs) for kind, name, runs in cases]


def _bits_of(nvme: str, folder: str, kind: str, name: str, runs: list[tuple[int, str, str]]) -> list[dict[str, str]]:
    found = []
    for stage, tier, overlap in runs:
        keys: dict[str, Any] = {"zstore": {"step_overlap": overlap, "split_master": stage == 3}}
        keys["optimizer"] = {"type": name, "params": {"lr": 1e-2, "weight_decay": 0.1}}
        config = with_moments(kind, stage, tier, nvme, train_batch_size=4, gradient_accumulation_steps=None, **keys)
        with start({k: v for k, v in config.items() if v is not None}) as engine:
            for number in range(3):
                samples(engine)
                if stage == 1 and number == 1:
                    engine.save_checkpoint(folder, tag=kind)
            found.append(whole_digests(engine))
    with start({k: v for k, v in config.items() if v is not None}) as engine:
        engine.load_checkpoint(folder, tag=kind)
        samples(engine)
        found.append(whole_digests(engine))
    return found


def samples(engine: Engine) -> None:
    """One step on four samples, however many ranks share them."""
    ids = torch.cat([batch(engine.global_steps, 0, rank)[0] for rank in range(2)])
    for micro in range(engine.gradient_accumulation_steps()):
        part = micro if engine.world_size == 1 else engine.global_rank
        engine.backward(engine(ids[2 * part : 2 * part + 2]))
        engine.step()


def whole_digests(engine: Engine) -> dict[str, str]:
    found = {}
    for record in engine.training_state.trained:
        for slot in ("exp_avg", "exp_avg_sq"):
            values = engine.get_optimizer_state(record.name, slot)
            assert values is not None
            found[f"{slot}/{record.name}"] = digest(values.reshape(-1))
        master = engine.get_full_parameter(record.name)
        assert master is not None
        found[record.name] = digest(master.reshape(-1))
    return found


@pytest.mark.parametrize("cases", [BITS, pytest.param(MORE_BITS, marks=pytest.mark.soak)], ids=["some", "more"])
def test_every_stage_tier_step_mode_and_resume_has_the_same_bits(cases: list[Any], nvme: Path, tmp_path: Path) -> None:
    for by_case in run_ranks(_bits, 2, str(nvme), str(tmp_path), cases):
        for found in by_case:
            assert all(one == found[0] for one in found)


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_traffic_and_files_are_as_planned(nvme: Path) -> None:
    """A weight of long rows has the largest chunks, so that little of the traffic is padding: of fp32 24 bytes each way
    together, of bf16 16 and of int8 12 and the scales."""
    model = nn.Linear(2**19, 8, bias=False)
    numel = model.weight.numel()
    moved: dict[str, float] = {}
    for kind in KINDS:
        with start(with_moments(kind, 1, "nvme", nvme, gradient_accumulation_steps=1), model) as engine:
            x = torch.ones(2, 2**19, dtype=torch.bfloat16)
            links: dict[str, dict[str, Any]] = {}
            for _ in range(2):  # the first step does not read the zeros that slots begin as
                before = engine.statistics()
                engine.backward(engine(x).float().mean())
                engine.step()
                engine.training_state.pending.complete()
                links = engine.statistics().links_since(before)
            counted = links["optimizer_read"]["bytes"] + links["optimizer_write"]["bytes"]
            plan = engine.training_state.plan
            assert counted == plan.traffic["optimizer state"].total
            assert plan.held_total.disk == engine.statistics().store.disk_bytes
            held = sum(one.total for slot, one in plan.held.items() if slot in ("master", "exp_avg", "exp_avg_sq"))
            assert held == engine.statistics().held.optimizer_state
            moved[kind] = counted / numel
    assert 24 < moved["fp32"] <= 24.2
    assert 16 < moved["bf16"] <= 16.2
    assert 12 < moved["int8"] <= 12.3


# -- keys -------------------------------------------------------------------------------------------------------------


def dtypes(config: dict[str, Any], **given: Any) -> set[str]:
    with start(config, **given) as engine:
        store = engine.training_state.state.store
        return {store.spec(name).dtype for name in store.names() if name.startswith("optimizer/exp_avg/")}


def test_deepspeed_s_keys_ask_for_bf16() -> None:
    assert dtypes(make_config()) == {"float32"}
    assert dtypes(make_config(bf16={"enabled": True, "bf16_optimizer_states": True})) == {"bfloat16"}
    lower: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"fp32_optimizer_states": False}}}
    assert dtypes(make_config(**lower)) == {"bfloat16"}
    with pytest.raises(ConfigError, match=r'fp32_optimizer_states.*zstore\.moments.*one for "int8"; keep one'):
        start(with_moments("int8", **lower))
    with pytest.raises(ConfigError, match="moments"):
        start(with_moments("int4"))


def test_what_would_not_bear_it_stays_in_fp32_or_is_refused() -> None:
    assert stored_slots(("sum",), "int8", (16,)) == {}
    assert stored_slots(("square_avg", "grad_avg"), "int8", (16,)) == {}
    assert set(stored_slots(("exp_avg", "exp_avg_sq", "max_exp_avg_sqs"), "bf16", (16,))) == {"exp_avg"}
    config = {k: v for k, v in with_moments("int8").items() if k not in ("optimizer", "scheduler")}
    model = nn.Linear(8, 8)
    with pytest.raises(UsageError, match=r'"moments": "int8": expected an optimizer that keeps averages.*Adagrad.*sum'):
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
        assert state is not None
        assert state.abs().max() > 0
        assert engine.training_state.state.store.spec("optimizer/momentum_buffer/weight").dtype == "int8"


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_any_moments_load_into_any_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
                    state = {
                        slot: engine.get_optimizer_state("embed.weight", slot) for slot in ("exp_avg", "exp_avg_sq")
                    }
                    exact = {slot: values for slot, values in state.items() if values is not None}
                most = {"fp32": 0.0, "bf16": 2**-7, "int8": 1 / 16}[own] if own != saved else 0.0
                for slot, values in exact.items():
                    found = engine.get_optimizer_state("embed.weight", slot)
                    assert found is not None
                    least = values.abs().max() * 2**-8 * most
                    assert ((found - values).abs() <= values.abs() * most + least).all()
                step(engine)
                assert engine.global_steps == 3


def given(values: torch.Tensor | None) -> torch.Tensor:
    assert values is not None
    return values


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_are_what_the_format_says(tmp_path: Path) -> None:
    with start(with_moments("int8")) as engine:
        step(engine)
        engine.save_checkpoint(tmp_path / "ckpt", tag="t")
        expected = {slot: engine.get_optimizer_state("embed.weight", slot) for slot in ("exp_avg", "exp_avg_sq")}
    names: dict[str, Any] = {"np": np}
    exec(re.findall(r"```python\n(def moment_values.*?)```", FORMAT.read_text(), re.DOTALL)[0], names)
    with open_checkpoint(tmp_path / "ckpt") as reader:
        assert verify_checkpoint(reader) == []
        for slot, values in expected.items():
            assert values is not None
            codes = reader.read_array(f"optimizer/{slot}/embed.weight")
            scales = reader.read_array(f"optimizer/{slot}_scale/embed.weight")
            assert codes.dtype == (np.int8 if slot == "exp_avg" else np.uint8)
            assert names["moment_values"](codes, scales).tobytes() == values.numpy().tobytes()
            assert whole_moment(reader, f"optimizer/{slot}/embed.weight", 13, codes.reshape(-1)[13:99]).tobytes() == (
                values.reshape(-1)[13:99].numpy().tobytes()
            )
        resharded = tmp_path / "three"
        reshard_checkpoint(reader, resharded, 3)
        del reader.arrays["optimizer/exp_avg_scale/embed.weight"]
        with pytest.raises(CheckpointMismatchError, match="is in 8 bits: expected arrays"):
            whole_moment(reader, "optimizer/exp_avg/embed.weight", 0, codes.reshape(-1).view(np.int8))
    with start(with_moments("int8")) as engine, start(with_moments("int8")) as other:
        engine.load_checkpoint(tmp_path / "ckpt")
        other.load_checkpoint(resharded)
        assert engine_digests(engine) == engine_digests(other)


def test_a_moment_that_is_set_is_kept_in_codes() -> None:
    with start(with_moments("int8")) as engine:
        step(engine)
        values = torch.linspace(-1, 1, 1203 * 56).view(1203, 56)
        engine.set_optimizer_state("embed.weight", "exp_avg", values)
        found = engine.get_optimizer_state("embed.weight", "exp_avg")
        assert found is not None
        assert ((found - values).abs() <= values.abs() / 16 + 2**-11).all()
        step(engine)


def test_numbers_of_codes_are_those_of_the_note() -> None:
    assert values_of_codes("uint8").tolist() == POSITIVE
    assert values_of_codes("int8").tolist() == [0.0, *(-value for value in SIGNED[:0:-1]), *SIGNED]
