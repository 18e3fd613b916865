"""`save_checkpoint(trainable_only=True)`: what is trained alone, and a resume beside the same base weights only."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from crc32c import crc32c
from torch import nn

import zstore
from tests.engine.bits import engine_digests
from tests.engine.runs import make_config
from zstore.checkpoint.reader import open_checkpoint
from zstore.engine import Engine
from zstore.engine.checkpoint.base import combine
from zstore.errors import CheckpointMismatchError
from zstore.testing.ranks import run_ranks
from zstore.tools.consolidate import consolidate_command
from zstore.tools.inspect import inspect_command
from zstore.tools.opening import Common

LAST = "model.layers.1."


def save_base(folder: Path, seed: int = 1) -> None:
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=600, **shape))
    model.bfloat16().save_pretrained(folder)


def load_base(folder: Path, config: Any = None) -> nn.Module:
    """The last layer alone is trained."""
    if config is None:
        model: nn.Module = transformers.LlamaForCausalLM.from_pretrained(folder)
    else:
        model = zstore.from_pretrained(transformers.LlamaForCausalLM, folder, config=config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(LAST))
    return model


def config_of(nvme: Path, stage: int, tier: str = "none", **keys: Any) -> dict[str, Any]:
    place = {"device": tier, "nvme_path": str(nvme)}
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 100}
    zero |= {"offload_optimizer": place} if stage else {}
    zero |= {"offload_param": place} if stage == 3 else {}
    return make_config(stage, zero_optimization=zero, gradient_accumulation_steps=1, **keys)


def start(model: nn.Module, config: dict[str, Any]) -> Engine:
    return zstore.initialize(model=model, config=config)[0]


def step(engine: Engine) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        ids = torch.randint(2, 600, (2, 6), generator=torch.Generator().manual_seed(engine.global_steps))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


def save(rank: int, folder: str) -> dict[str, str]:
    """Two steps on two ranks from disk; what is trained after that."""
    base, config = Path(folder, "base"), config_of(Path(folder), 3, "nvme")
    with start(load_base(base, config), config) as engine:
        step(engine)
        engine.save_checkpoint(folder + "/ckpt", trainable_only=True)
        step(engine)
        frozen = [name for name, p in engine.module.named_parameters() if not p.requires_grad]
        with open_checkpoint(folder + "/ckpt") as reader:
            found = reader.record.base
            assert found is not None
            assert found.folder == str(base)
            assert sorted(found.digests) == sorted(frozen) == sorted(reader.record.absent_parameters)
            assert not any(name.removeprefix("model/") in frozen for name in reader.arrays)
        return {name: value for name, value in trained_digests(engine).items() if rank == 0}


def trained_digests(engine: Engine) -> dict[str, str]:
    return {name: value for name, value in engine_digests(engine).items() if LAST in name and "parameter" not in name}


def test_a_resume_takes_the_base_from_where_it_came_and_refuses_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, ckpt = tmp_path / "base", str(tmp_path / "ckpt")
    save_base(base)
    run_ranks(save, 2, str(tmp_path))
    plain = transformers.LlamaForCausalLM.from_pretrained(base).state_dict()
    with open_checkpoint(ckpt) as reader:
        found = reader.record.base
        assert found is not None
        for name, (dtype, digest) in found.digests.items():
            assert (dtype, digest) == ("bfloat16", crc32c(plain[name].view(torch.int16).numpy().tobytes()))
    for stage, tier in ((0, "none"), (3, "cpu")):
        with start(load_base(base), config_of(tmp_path, stage, tier)) as engine:
            engine.load_checkpoint(ckpt)
            assert engine.global_steps == 1
            step(engine)
            engine.save_checkpoint(str(tmp_path / f"again{stage}"), trainable_only=True)
            with open_checkpoint(tmp_path / f"again{stage}") as reader:
                assert reader.record.base == found
    save_base(tmp_path / "other", 2)
    changed = load_base(base)
    with torch.no_grad():
        changed.get_parameter("model.layers.0.mlp.up_proj.weight")[-1, -1] += 1
    for model, first in (
        (load_base(tmp_path / "other"), "model.embed_tokens.weight"),
        (changed, "layers.0.mlp.up_proj"),
    ):
        with start(model, config_of(tmp_path, 2, "cpu")) as engine:
            before = trained_digests(engine)
            with pytest.raises(CheckpointMismatchError, match=rf"'\S*{first}\S*' is not .* came from {base}\. Build"):
                engine.load_checkpoint(ckpt)
            assert trained_digests(engine) == before
            engine.load_checkpoint(ckpt, load_module_strict=False)
    assert inspect_command(ckpt) == 0
    assert f"base         {base}: a resume builds the model from there" in capsys.readouterr().out
    assert inspect_command(ckpt, Common(json=True)) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"]["base"] == {"folder": str(base), "revision": None}
    assert consolidate_command(ckpt, tmp_path / "weights") == 0
    assert f"they came from {base}" in " ".join(capsys.readouterr().err.split())


def test_precisions_that_can_be_compared_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_base(tmp_path / "base")
    fp32: dict[str, Any] = {"bf16": {"enabled": False}}
    for saved, loaded, said in (({}, fp32, 0), (fp32, {}, 1)):
        ckpt = str(tmp_path / f"ckpt{said}")
        with start(load_base(tmp_path / "base"), config_of(tmp_path, 0, **saved)) as engine:
            engine.save_checkpoint(ckpt, trainable_only=True)
        with start(load_base(tmp_path / "base"), config_of(tmp_path, 0, **loaded)) as engine:
            engine.load_checkpoint(ckpt)
        assert sum("was not checked" in record.getMessage() for record in caplog.records) == said
    assert "loaded in part" not in caplog.text  # what was left out on purpose


def test_checksums_are_combined() -> None:
    draw = random.Random(0)
    for _ in range(50):
        one, other = (draw.randbytes(draw.choice((0, 1, 7, 4096, 70_001))) for _ in range(2))
        assert combine(crc32c(one), crc32c(other), len(other)) == crc32c(one + other)
