"""Tiny models and data for Trainers, and what a run of one comes to."""

import dataclasses
import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

transformers.logging.set_verbosity_error()

VOCAB, TOKENS = 64, 8
CHECKPOINTING: dict[str, Any] = {"activation_checkpointing": True}
"""The argument of Trainers, which has another name and default in older versions of transformers."""
if "activation_checkpointing" not in {field.name for field in dataclasses.fields(TrainingArguments)}:
    CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False}
"""Arguments of a run on the CPU that talks to nobody."""


def llama(seed: int = 0, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 32, "vocab_size": VOCAB}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.LlamaConfig(**(sizes | layers | ends | changes))
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


class Texts(Dataset[dict[str, Any]]):
    """Random texts, of which some labels do not count, so that ranks have different numbers of them."""

    def __init__(self, samples: int, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(2, VOCAB, (samples, TOKENS), generator=generator)
        self.keep = torch.rand((samples, TOKENS), generator=generator) < 0.8

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.ids[index]
        return {"input_ids": ids, "labels": torch.where(self.keep[index], ids, -100)}


def arguments(folder: Path | str, **changes: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            **QUIET,
            "output_dir": os.fspath(folder),
            "logging_steps": 1,
            "save_strategy": "no",
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "learning_rate": 1e-2,
            **changes,
        }
    )


def open_door() -> None:
    """Do as `import zstore.as_deepspeed` at the start, in a process that has the libraries loaded already, to save time:
    they look for DeepSpeed as they are imported, and look again here."""
    warnings.simplefilter("ignore")  # those of the libraries are their own
    looked = (
        "accelerate.utils",
        "accelerate.accelerator",
        "transformers.integrations.deepspeed",
        "transformers.trainer",
    )
    before: list[Any] = [sys.modules.pop(name, None) or importlib.import_module(name) for name in looked]
    for name in looked:
        sys.modules.pop(name, None)
    importlib.import_module("zstore.as_deepspeed")
    sys.modules.update(zip(looked, before, strict=True))
    for module in before[:3]:
        importlib.reload(module)
    before[3].DeepSpeedSchedulerWrapper = before[0].DeepSpeedSchedulerWrapper


def plain_again() -> None:
    """Let the next Trainer or Accelerator train without DeepSpeed, after one that did."""
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def train(folder: Path, ds: Any = None, kind: Any = Trainer, model: Any = None, **run: Any) -> Any:
    if ds is None:
        plain_again()
    given = {name: run.pop(name) for name in ("callbacks", "optimizers", "train_dataset") if name in run}
    resume = run.pop("resume", None)
    args = arguments(folder, deepspeed=ds, **run)
    data = {"train_dataset": Texts(14), "eval_dataset": Texts(6, seed=3)} | given
    trainer = kind(model=llama() if model is None else model, args=args, **data)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """The trained weights in fp32, on rank 0; other ranks get none of sharded ones."""
    engine = trainer.model_wrapped
    if not hasattr(engine, "get_full_parameter"):
        return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    names = [name for name, _ in trainer.model.named_parameters()]
    found = {name: engine.get_full_parameter(name, rank0_only=True) for name in names}
    return {name: value.float().cpu() for name, value in found.items() if value is not None}


def config(folder: Path | str, device: str = "nvme", stage: int = 3, **changes: Any) -> dict[str, Any]:
    Path(folder).mkdir(exist_ok=True)
    offload = {"device": device} | ({"nvme_path": os.fspath(folder)} if device == "nvme" else {})
    if stage < 3:
        zero = {"stage": stage, "offload_optimizer": offload}
        return config(folder, device, **changes) | {"zero_optimization": zero}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
            "offload_param": offload,
            "offload_optimizer": offload,
        },
        **changes,
    }


def history(trainer: Any, *names: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history for name in names if name in entry]
