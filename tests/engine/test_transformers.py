"""transformers models of eight architectures: three steps to the bits of the plain loop, and their text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import zstore
from tests.engine.bits import ADAM, differing_arrays
from tests.engine.runs import all_released
from tests.engine.transformers_models import (
    ARCHITECTURES,
    PAD,
    REENTRANT,
    VOCAB,
    WRITERS,
    batch_for,
    build,
    checkpoint_layers,
    loss_of,
)
from tests.reference import DTYPES, Reference
from zstore.testing.ranks import run_ranks
from zstore.tools.consolidate import consolidate_command

WORLD_SIZE, STEPS = 2, 2
LONG = 1100
"""A position where frequencies in 16 bits would have turned queries and keys elsewhere."""


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
            found += [f"step {step}: {array}" for array in differing_arrays(engine, reference, rows)]
            if float(loss.detach()) != reference.losses[rank][0]:
                found.append(f"step {step}: loss {float(loss.detach())} != {reference.losses[rank][0]}")
            if engine.get_global_grad_norm() != reference.norm:
                found.append(f"step {step}: norm {engine.get_global_grad_norm()} != {reference.norm}")
    return found


def write(name: str, rank: int, world_size: int, **zero: Any) -> list[str]:
    """Return what differs from the plain model's text, before and after a step; ranks stop at different lengths."""
    model, plain = build(name), build(name)
    engine, *_ = zstore.initialize(model=model, config=settings(3, "fp32", **zero))
    reference = Reference(plain, world_size, stage=3, clip=0.5, adam=ADAM, loss=loss_of)
    prompts = torch.randint(2, VOCAB, (1, 4), generator=torch.Generator().manual_seed(rank))
    always: dict[str, Any] = {"do_sample": False, "pad_token_id": PAD}
    found: list[str] = []
    lengths = set()
    with engine:
        for step in range(2):
            engine.eval()
            plain.eval()
            # The first rank's text ends where it first writes this token, the others' go on.
            free = plain.generate(prompts, max_new_tokens=9, eos_token_id=None, **always)
            ends: dict[str, Any] = {"eos_token_id": int(free[0, -6]) if rank == 0 else None}
            for options in ({"max_new_tokens": 9 - 2 * rank}, {"max_new_tokens": 9, **ends}, {"num_beams": 2, **ends}):
                expected = plain.generate(prompts, **{"max_new_tokens": 8} | options, **always)
                for call in (engine.generate, partial(model.generate, synced_gpus=world_size > 1)):
                    text = call(prompts, **{"max_new_tokens": 8} | options, **always)
                    lengths.add(text.shape[1])
                    if text.tolist() != expected.tolist():
                        found.append(f"step {step}, {options}: {text.tolist()} != {expected.tolist()}")
                if world_size > 1 and not all_released(engine):
                    found.append(f"step {step}: still gathered after generate")
            engine.train()
            plain.train()
            reference.step([[batch_for(name, step, r, torch.float32) for r in range(world_size)]])
            engine.backward(loss_of(engine, batch_for(name, step, rank, torch.float32)))
            engine.step()
    everywhere = engine.world.all_gather_object(sorted(lengths)) if world_size > 1 else []
    if world_size > 1 and everywhere[0] == everywhere[1]:
        found.append(f"all ranks wrote texts of the same lengths: {everywhere}")
    return found


def _on_two_ranks(rank: int) -> dict[str, list[str]]:
    found = {name: train(name, rank, WORLD_SIZE, settings(3, "bf16")) for name in ARCHITECTURES}
    return found | {f"{name} writes": write(name, rank, WORLD_SIZE) for name in WRITERS}


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, list[str]]]:
    """What each rank found; one start of the ranks serves all tests."""
    return run_ranks(_on_two_ranks, WORLD_SIZE)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trains_sharded_to_the_bit(name: str, on_two_ranks: list[dict[str, list[str]]]) -> None:
    assert [found[name] for found in on_two_ranks] == [[], []]


@pytest.mark.parametrize("name", WRITERS)
def test_ranks_write_what_the_plain_model_does(name: str, on_two_ranks: list[dict[str, list[str]]], nvme: Path) -> None:
    assert [found[f"{name} writes"] for found in on_two_ranks] == [[], []]
    assert write(name, 0, 1, offload_param={"device": "nvme", "nvme_path": str(nvme)}) == []


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trains_from_disk_to_the_bit(name: str, nvme: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(nvme)}
    assert train(name, 0, 1, settings(3, "bf16", offload_optimizer=disk, offload_param=disk)) == []


@pytest.mark.parametrize("stage", [0, 3])
def test_long_positions_are_those_of_transformers(stage: int, tmp_path: Path) -> None:
    """Engine, its 16-bit folder and its consolidated checkpoint beside transformers' own model in bf16."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=VOCAB, max_position_embeddings=2048, **shape)
    )
    model.save_pretrained(tmp_path / "plain")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).eval()
    ids = torch.randint(2, VOCAB, (1, LONG), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), zstore.initialize(model=model, config=settings(stage, "bf16"))[0] as engine:
        engine.eval()
        expected = plain(ids).logits
        assert torch.equal(engine(input_ids=ids).logits, expected)
        engine.save_16bit_model(str(tmp_path / "16-bit"))
        engine.save_checkpoint(str(tmp_path / "saved"))
        assert consolidate_command(tmp_path / "saved", tmp_path / "consolidated", dtype="bf16") == 0
        for folder in ("16-bit", "consolidated"):
            saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.bfloat16).eval()
            assert torch.equal(saved(ids).logits, expected), folder
