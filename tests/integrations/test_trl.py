"""Loops of accelerate's and trl's Trainers with `deepspeed=...` on zstore, beside themselves alone."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers.utils import logging as transformers_logging
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import zstore
from tests.integrations.tokens import preferences, texts, tokenizer
from tests.integrations.trainers import CHECKPOINTING, QUIET, Texts, config, history, llama, open_door, plain_again
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks


def loop(out: Path, ds: Any = None, **plugin: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train an epoch, save, train another, load, and repeat it; return the losses, and the weights as they are saved."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, PartialState

    plain_again()
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)  # several ranks on CPUs
    given = None if ds is None else DeepSpeedPlugin(hf_ds_config=ds, gradient_accumulation_steps=2, **plugin)
    accelerator = Accelerator(deepspeed_plugin=given, gradient_accumulation_steps=2, cpu=given is None)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(Texts(16), batch_size=2), schedule
    )

    def epoch() -> list[float]:
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return [*losses, *schedule.get_last_lr()]

    losses = epoch()
    accelerator.save_state(os.fspath(out / "state"))
    second = epoch()
    accelerator.load_state(os.fspath(out / "state"))
    assert epoch() == second
    accelerator.save_model(model, out / "weights")
    accelerator.wait_for_everyone()
    saved = load_file(out / "weights" / "model.safetensors")
    accelerator.free_memory()
    return losses + second, saved


def _beside(rank: int, folder: str) -> None:
    open_door()
    place = Path(folder)
    wanted, expected = loop(place / "plain")
    for stage in (2, 3):
        ds = config(place / "nvme", stage=stage, checkpoint={"writer": {"decoupled": True}}, gradient_clipping=1.0)
        del ds["optimizer"]
        found, saved = loop(place / str(stage), ds)
        assert found == pytest.approx(wanted, rel=1e-4)
        torch.testing.assert_close(saved, expected, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loop_has_the_losses_and_weights_that_it_has_alone(tmp_path: Path, world_size: int) -> None:
    run_ranks(_beside, world_size, os.fspath(tmp_path))


def _disagreeing(rank: int) -> None:
    open_door()
    import accelerate.state
    import deepspeed

    alone = {"num_processes": 1, "distributed_type": "DistributedType.DEEPSPEED"}
    accelerate.state.PartialState._shared_state.update(alone)
    with pytest.raises(UsageError, match=r"there are 2 ranks, but accelerate counts 1.*use_cpu=True"):
        deepspeed.initialize(model=torch.nn.Linear(1, 1), config={})


def test_ranks_that_accelerate_does_not_know_of_are_refused() -> None:
    run_ranks(_disagreeing, 2)


RUN = {
    **QUIET,
    "bf16": False,
    "max_steps": 2,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 2,
    **CHECKPOINTING,
}


def _lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def _sft(place: Path, ds: Any = None, *, lora: bool = False, **extra: Any) -> Any:
    args = SFTConfig(str(place), max_length=16, deepspeed=ds, **{**RUN, "save_strategy": "steps", "save_steps": 1})
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


def _beside_trl(rank: int, folder: str, names: list[str]) -> None:
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
    run_ranks(_beside_trl, 2, os.fspath(tmp_path), names)
