"""transformers models of eight architectures: three steps to the bits of the plain loop, and their text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zstore
from tests.reference import DTYPES, Reference
from tests.test_engine_bits import ADAM, engine_digests, reference_digests
from tests.test_engine_models import all_released
from tests.transformers_models import ARCHITECTURES, batch_for, build, checkpoint_layers, loss_of
from zstore.testing.ranks import run_ranks

WORLD_SIZE, STEPS = 2, 3

# How their layers are checkpointed by transformers itself: whether reentrant.
REENTRANT = {"Llama": False, "T5": False, "Whisper": True, "GPT-Neo": True, "Mixtral": False}


def settings(stage: int, precision: str, **zero: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0} | zero,
        "steps_per_print": 0,
    }
    return config | ({precision: {"enabled": True}} if precision != "fp32" else {})


def train(name: str, rank: int, world_size: int, config: dict[str, Any]) -> list[str]:
    """Return what differs from the plain loop: bits of state and parameters, losses with and without gradients."""
    precision = "bf16" if "bf16" in config else "fp32"
    dtype = DTYPES[precision]
    models = [build(name), build(name)]
    if (reentrant := REENTRANT.get(name)) is not None:
        for model in models:
            checkpoint_layers(model, reentrant)
    engine, *_ = zstore.initialize(model=models[0], config=config)
    reference = Reference(models[1], world_size, stage=3, precision=precision, clip=0.5, adam=ADAM, loss=loss_of)
    found: list[str] = []
    with engine:
        rows = {record.name: record.owned_range for record in engine.training_state.state.records}
        for step in range(STEPS):
            held_out = batch_for(name, 50 + step, rank, dtype)
            engine.eval()
            reference.model.eval()
            with torch.no_grad():
                before, expected_before = loss_of(engine, held_out), loss_of(reference.at_rank(rank), held_out)
            if float(before) != float(expected_before):
                found.append(f"step {step}: evaluated to {float(before)} != {float(expected_before)}")
            if not all_released(engine):
                found.append(f"step {step}: still gathered after a forward without gradients")
            engine.train()
            reference.model.train()
            reference.step([[batch_for(name, step, r, dtype) for r in range(world_size)]])
            loss = loss_of(engine, batch_for(name, step, rank, dtype))
            engine.backward(loss)
            if not all_released(engine):
                found.append(f"step {step}: still gathered after the backward")
            engine.step()
            expected, mine = reference_digests(reference, rows), engine_digests(engine)
            found += [f"step {step}: {array}" for array in expected if mine.get(array) != expected[array]]
            if float(loss.detach()) != reference.losses[rank][0]:
                found.append(f"step {step}: loss {float(loss.detach())} != {reference.losses[rank][0]}")
            if engine.get_global_grad_norm() != reference.norm:
                found.append(f"step {step}: norm {engine.get_global_grad_norm()} != {reference.norm}")
    return found


def _on_two_ranks(rank: int) -> dict[str, list[str]]:
    return {name: train(name, rank, WORLD_SIZE, settings(3, "bf16")) for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, list[str]]]:
    """What each rank found; one start of the ranks serves all tests."""
    return run_ranks(_on_two_ranks, WORLD_SIZE, timeout_s=120)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trains_sharded_to_the_bit(name: str, on_two_ranks: list[dict[str, list[str]]]) -> None:
    assert [found[name] for found in on_two_ranks] == [[], []]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trains_from_disk_to_the_bit(name: str, nvme: Path) -> None:
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": str(nvme)}}
    assert train(name, 0, 1, settings(3, "bf16", **offload)) == []
