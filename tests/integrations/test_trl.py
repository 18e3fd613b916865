"""trl's Trainers on zstore beside themselves alone, in one run at 2 ranks."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import zstore.hf
from tests.integrations.tokens import preferences, texts, tokenizer
from tests.integrations.trainers import CHECKPOINTING, QUIET, config, history, llama
from zstore.errors import ConfigError
from zstore.testing.ranks import run_ranks

RUN = {
    **QUIET,
    "bf16": False,
    "max_steps": 2,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 2,
    CHECKPOINTING: True,
}


def _lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def _sft(kind: type, place: Path, *, lora: bool = False, **extra: Any) -> Any:
    args = SFTConfig(os.fspath(place), max_length=16, **{**RUN, "save_strategy": "steps", "save_steps": 1})
    adapters = {"peft_config": _lora()} if lora else {}
    data = {"train_dataset": texts(12), "eval_dataset": texts(4, 5)}
    return kind(llama(), args, processing_class=tokenizer(), **data, **adapters, **extra)


def _dpo(kind: type, place: Path, **extra: Any) -> Any:
    args = DPOConfig(os.fspath(place), **RUN, save_strategy="no")
    data = {"train_dataset": preferences(12)}
    return kind(llama(), ref_model=llama(5), args=args, processing_class=tokenizer(), **data, **extra)


def _grpo(kind: type, place: Path, **extra: Any) -> Any:
    """Its reference model is loaded from the folder beside, as trl does it; texts end at different lengths."""
    args = GRPOConfig(os.fspath(place), num_generations=2, max_completion_length=5, beta=0.1, **RUN, save_strategy="no")
    model = transformers.AutoModelForCausalLM.from_pretrained(place.parent / "model")
    data = preferences(12).remove_columns(["chosen", "rejected"])
    return kind(model, _reward, args, train_dataset=data, processing_class=tokenizer(), **extra)


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def _beside(rank: int, folder: str, names: list[str]) -> None:
    warnings.simplefilter("default")
    transformers_logging.disable_progress_bar()
    place = Path(folder)
    llama().save_pretrained(place / "model")
    torch.distributed.barrier()
    ours = {"zstore_config": config(place / "nvme")}
    for name in (one for one in names if one != "lora"):
        kind, make = {"sft": (SFTTrainer, _sft), "dpo": (DPOTrainer, _dpo), "grpo": (GRPOTrainer, _grpo)}[name]
        wanted = _trained(make(kind, place / f"{name}-plain"))
        found = _trained(make(zstore.hf.wrap(kind), place / name, **ours))
        _same(wanted, found)
        found.close()
    if "lora" in names:
        _lora_beside(rank, place, ours)


def _lora_beside(rank: int, place: Path, ours: dict[str, Any]) -> None:
    wanted = _trained(_sft(SFTTrainer, place / "lora-plain", lora=True))
    found = _trained(_sft(zstore.hf.SFTTrainer, place / "lora", lora=True, **ours))
    _same(wanted, found)
    found.close()
    resumed = _sft(zstore.hf.wrap(SFTTrainer), place / "lora", lora=True, **ours)
    resumed.train(resume_from_checkpoint=os.fspath(place / "lora" / "checkpoint-1"))
    assert history(resumed, "loss") == history(found, "loss")
    resumed.save_model(os.fspath(place / "adapters"))
    if rank == 0:
        _check_adapters(place)


def _trained(trainer: Any) -> Any:
    """Trained before another is made, which would set the seed again."""
    trainer.train()
    return trainer


def _same(wanted: Any, found: Any) -> None:
    for name in ("loss", "grad_norm"):
        assert history(found, name) == pytest.approx(history(wanted, name), rel=1e-4, abs=1e-6), name


def _check_adapters(place: Path) -> None:
    """Adapters are written as peft has them, and a checkpoint has nothing of the base."""
    name = "adapter_model.safetensors"
    found, wanted = load_file(place / "adapters" / name), load_file(place / "lora-plain" / "checkpoint-2" / name)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(load_file(place / "lora" / "checkpoint-2" / name), found)
    PeftModel.from_pretrained(llama(), place / "adapters")
    saved = zstore.open_checkpoint(place / "lora" / "checkpoint-2")
    assert [one for one in saved if one.startswith("model/")]
    assert all("lora" in one for one in saved if one.startswith(("model/", "optimizer/")))


@pytest.mark.parametrize(
    "names", [["lora", "dpo"], pytest.param(["sft", "grpo"], marks=pytest.mark.soak)], ids="-and-".join
)
def test_sft_lora_dpo_and_grpo_have_the_losses_of_trl_alone(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "nvme").mkdir()
    run_ranks(_beside, 2, os.fspath(tmp_path), names)


def test_activation_offloading_is_the_engines(tmp_path: Path) -> None:
    def run(kind: type, name: str, **extra: Any) -> Any:
        offloading = bool(extra)
        args = SFTConfig(os.fspath(tmp_path / name), **RUN, save_strategy="no", activation_offloading=offloading)
        return _trained(kind(llama(), args, train_dataset=texts(8), processing_class=tokenizer(), **extra))

    found = run(zstore.hf.SFTTrainer, "ours", zstore_config={})
    _same(run(SFTTrainer, "plain"), found)
    assert found.engine.training_state.config.activations == "host"
    with pytest.raises(ConfigError, match=r"zstore\.activations is 'device'"):
        run(zstore.hf.SFTTrainer, "refused", zstore_config={"zstore": {"activations": "device"}})
