"""transformers models of eight architectures: their training to the bits of the plain loop, and their text."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.engine.bits import Case, Model, Run, all_released, compare
from tests.engine.runs import make_config, start
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
from zstore.testing.ranks import run_ranks
from zstore.tools.consolidate import consolidate_command

LONG = 1100
"""A position where frequencies in 16 bits would have turned queries and keys elsewhere."""
SHARDED = Case(3, "none", "bf16", 1, 0.5, threshold=0)
ON_DISK = Case(3, "nvme", "bf16", 1, 0.5, threshold=0, parameters="nvme")


def checkpointed(name: str) -> nn.Module:
    model = build(name)
    if (reentrant := REENTRANT.get(name)) is not None:
        refused = name == "Whisper" and transformers.__version__ < "5"  # they go through the encoder's graph once each
        checkpoint_layers(model, reentrant and not refused)
    return model


def model_of(name: str, make: Any = checkpointed) -> Model:
    return Model(partial(make, name), lambda step, _, rank: batch_for(name, step, rank), loss_of)


def write(name: str, rank: int, world_size: int, parameters: str = "none") -> list[str]:
    """Return what differs from the plain model's text, before and after a step; ranks stop at different lengths."""
    case = Case(3, "none", "fp32", 1, 0.5, threshold=0, parameters=parameters)
    prompts = torch.randint(2, VOCAB, (1, 4), generator=torch.Generator().manual_seed(rank))
    routed = {"output_router_logits": False} if name == "Mixtral" else {}  # transformers 4 writes nothing with them
    always: dict[str, Any] = {"do_sample": False, "pad_token_id": PAD, **routed}
    found: list[str] = []
    lengths = set()
    with Run(case, rank, world_size, model=model_of(name, build)) as run:
        engine, plain = run.engine, run.reference.model
        for step in range(2):
            engine.eval()
            plain.eval()
            # The first rank's text ends where it first writes this token, the others' go on.
            free = plain.generate(prompts, max_new_tokens=9, eos_token_id=None, **always)  # type: ignore[operator]
            ends: dict[str, Any] = {"eos_token_id": int(free[0, -6]) if rank == 0 else None}
            for some in ({"max_new_tokens": 9 - 2 * rank}, {"max_new_tokens": 9, **ends}, {"num_beams": 2, **ends}):
                options = {"max_new_tokens": 8} | some | always
                expected = plain.generate(prompts, **options)  # type: ignore[operator]
                for call in (engine.generate, partial(engine.module.generate, synced_gpus=world_size > 1)):
                    text = call(prompts, **options)
                    lengths.add(text.shape[1])
                    if text.tolist() != expected.tolist():
                        found.append(f"step {step}, {options}: {text.tolist()} != {expected.tolist()}")
                if world_size > 1 and not all_released(engine):
                    found.append(f"step {step}: still gathered after generate")
            engine.train()
            found += run.step()
        everywhere = engine.world.all_gather_object(sorted(lengths)) if world_size > 1 else []
    if world_size > 1 and everywhere[0] == everywhere[1]:
        found.append(f"all ranks wrote texts of the same lengths: {everywhere}")
    return found


def _on_two_ranks(rank: int) -> dict[str, list[str]]:
    found = {name: compare(SHARDED, rank, 2, model=model_of(name)) for name in ARCHITECTURES}
    return found | {f"{name} writes": write(name, rank, 2) for name in WRITERS}


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, list[str]]]:
    return run_ranks(_on_two_ranks, 2)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trains_to_the_bit_sharded_and_from_disk(name: str, on_two_ranks: list[dict[str, list[str]]]) -> None:
    assert [found[name] for found in on_two_ranks] == [[], []]
    assert compare(ON_DISK, 0, 1, 2, model=model_of(name)) == []


@pytest.mark.parametrize("name", WRITERS)
def test_ranks_write_what_the_plain_model_does(name: str, on_two_ranks: list[dict[str, list[str]]]) -> None:
    assert [found[f"{name} writes"] for found in on_two_ranks] == [[], []]
    assert write(name, 0, 1, "nvme") == []


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
    config = make_config(stage)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    ids = torch.randint(2, VOCAB, (1, LONG), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), start(config, model) as engine:
        engine.eval()
        expected = plain(ids).logits
        assert torch.equal(engine(input_ids=ids).logits, expected)
        engine.save_16bit_model(str(tmp_path / "16-bit"))
        engine.save_checkpoint(str(tmp_path / "saved"))
        assert consolidate_command(tmp_path / "saved", tmp_path / "consolidated", dtype="bf16") == 0
        for folder in ("16-bit", "consolidated"):
            saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.bfloat16).eval()
            assert torch.equal(saved(ids).logits, expected), folder
