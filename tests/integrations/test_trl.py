"""trl's Trainers with `deepspeed=...` on zstore, beside themselves alone."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import zstore
from tests.integrations.tokens import preferences, texts, tokenizer
from tests.integrations.trainers import CHECKPOINTING, QUIET, config, history, llama, open_door, plain_again
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


def _sft(place: Path, ds: Any = None, *, lora: bool = False, **extra: Any) -> Any:
    args = SFTConfig(
        os.fspath(place), max_length=16, deepspeed=ds, **{**RUN, "save_strategy": "steps", "save_steps": 1}
    )
    adapters = {"peft_config": _lora()} if lora else {}
    data = {"train_dataset": texts(12), "eval_dataset": texts(4, 5)}
    return SFTTrainer(llama(), args, processing_class=tokenizer(), **data, **adapters, **extra)


def _dpo(place: Path, ds: Any = None) -> Any:
    args = DPOConfig(os.fspath(place), **RUN, save_strategy="no", deepspeed=ds)
    return DPOTrainer(
        llama(), ref_model=llama(5), args=args, processing_class=tokenizer(), train_dataset=preferences(12)
    )


def _grpo(place: Path, ds: Any = None) -> Any:
    """Its reference model is loaded from the folder beside, as trl does it; texts end at different lengths."""
    args = GRPOConfig(
        os.fspath(place), num_generations=2, max_completion_length=5, beta=0.1, **RUN, save_strategy="no", deepspeed=ds
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(place.parent / "model")
    data = preferences(12).remove_columns(["chosen", "rejected"])
    return GRPOTrainer(model, _reward, args, train_dataset=data, processing_class=tokenizer())


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def _beside(rank: int, folder: str, names: list[str]) -> None:
    open_door()
    transformers_logging.disable_progress_bar()
    place = Path(folder)
    llama().save_pretrained(place / "model")
    torch.distributed.barrier()
    makes = {"sft": _sft, "dpo": _dpo, "grpo": _grpo, "lora": partial(_sft, lora=True)}
    for name in names:
        plain_again()
        wanted = _trained(makes[name](place / f"{name}-plain"))
        for stage in (3, 2):
            ds = config(place / "nvme", stage=stage)
            found = _trained(makes[name](place / f"{name}-{stage}", ds))
            _same(wanted, found)
            found.accelerator.free_memory()
            if name == "lora":
                _resume_lora(rank, place, stage, found, ds)


def _resume_lora(rank: int, place: Path, stage: int, found: Any, ds: Any) -> None:
    resumed = _sft(place / f"lora-{stage}", ds, lora=True)
    resumed.train(resume_from_checkpoint=os.fspath(place / f"lora-{stage}" / "checkpoint-1"))
    assert history(resumed, "loss") == pytest.approx(history(found, "loss"), rel=1e-6)
    resumed.save_model(os.fspath(place / "adapters"))
    if rank == 0:
        _check_adapters(place, stage)
    torch.distributed.barrier()


def _trained(trainer: Any) -> Any:
    """Trained before another is made, which would set the seed again."""
    trainer.train()
    return trainer


def _same(wanted: Any, found: Any) -> None:
    for name in ("loss", "grad_norm"):
        assert history(found, name) == pytest.approx(history(wanted, name), rel=1e-4, abs=1e-6), name


def _check_adapters(place: Path, stage: int) -> None:
    """Adapters are written as peft has them, and a checkpoint has nothing of the base."""
    name = "adapter_model.safetensors"
    found, wanted = load_file(place / "adapters" / name), load_file(place / "lora-plain" / "checkpoint-2" / name)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(load_file(place / f"lora-{stage}" / "checkpoint-2" / name), found)
    PeftModel.from_pretrained(llama(), place / "adapters")
    saved = zstore.open_checkpoint(place / f"lora-{stage}" / "checkpoint-2")
    assert [one for one in saved if one.startswith("model/")]
    assert all("lora" in one for one in saved if one.startswith(("model/", "optimizer/")))


@pytest.mark.parametrize(
    "names", [["lora", "dpo"], pytest.param(["sft", "grpo"], marks=pytest.mark.soak)], ids="-and-".join
)
def test_sft_lora_dpo_and_grpo_have_the_losses_of_trl_alone(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "nvme").mkdir()
    run_ranks(_beside, 2, os.fspath(tmp_path), names)
