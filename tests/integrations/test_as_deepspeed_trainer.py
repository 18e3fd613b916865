"""`TrainingArguments(deepspeed=...)` under `zstore.as_deepspeed`, beside the plain Trainer, in one run of two ranks."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks

SCRIPTS = Path(__file__).parents[1] / "scripts" / "deepspeed"
LOOKED = ("accelerate.utils", "accelerate.accelerator", "transformers.integrations.deepspeed", "transformers.trainer")


def answer_import() -> None:
    """Install in a process that has these loaded already, for the sake of speed: they look for DeepSpeed as they are
    imported, and look again here. And let accelerate know of gloo without `use_cpu`: by itself it takes a machine without
    GPUs for one rank."""
    import accelerate.state

    from zstore.as_deepspeed import install

    before: list[Any] = [sys.modules.pop(name) for name in LOOKED]
    install()
    sys.modules.update(zip(LOOKED, before, strict=True))
    for module in before[:3]:
        importlib.reload(module)
    before[3].DeepSpeedSchedulerWrapper = before[0].DeepSpeedSchedulerWrapper
    prepare = accelerate.state.PartialState._prepare_backend

    def with_gloo(self: Any, cpu: bool = False, *others: Any) -> Any:
        backend, kind = prepare(self, cpu, *others)
        return (backend or "gloo", kind)

    accelerate.state.PartialState._prepare_backend = with_gloo


def script(*words: object, name: str = "trainer") -> dict[str, Any]:
    """Run a script with arguments, in this process; return what this rank printed after each first word."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    path = str(SCRIPTS / f"{name}.py")
    sys.argv = [path, *map(str, words)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the libraries are their own
        runpy.run_path(path, run_name="__main__")
    lines = [line.split(" ", 3) for line in printed.getvalue().splitlines() if line.startswith("rank ")]
    return {word: rest for _, _, word, rest in lines}


def write_config(folder: Path, zero: dict[str, Any], **sections: Any) -> Path:
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    path = folder / f"{len(list(folder.glob('*.json')))}.json"
    path.write_text(
        json.dumps(dict.fromkeys(sizes, "auto") | {"bf16": {"enabled": "auto"}, "zero_optimization": zero} | sections)
    )
    return path


def write_model(folder: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    plain = LlamaConfig(vocab_size=64, bos_token_id=None, eos_token_id=None, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(plain).save_pretrained(folder / "model")
    return folder / "model"


def stage3(folder: Path) -> dict[str, Any]:
    (folder / "nvme").mkdir()
    disk = {"device": "nvme", "nvme_path": str(folder / "nvme")}
    offload = {"offload_optimizer": disk, "offload_param": disk, "stage3_param_persistence_threshold": 100}
    return {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
        **offload,
    }


def trainers(rank: int, where: str) -> dict[str, Any]:
    import accelerate.state
    import torch
    import torch.distributed as dist
    from transformers import logging

    answer_import()
    import deepspeed

    logging.set_verbosity_error()
    folder = Path(where)
    model = folder / "model"
    configs = {}
    if rank == 0:
        write_model(folder)
        adam = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
        configs = {
            "stage2": write_config(folder, {"stage": 2}, optimizer=adam),
            "stage3": write_config(folder, stage3(folder)),
        }
    box = [configs]
    dist.broadcast_object_list(box, src=0)
    configs = box[0]

    alone = {"num_processes": 1, "distributed_type": "DistributedType.DEEPSPEED"}
    accelerate.state.PartialState._shared_state.update(alone)
    with pytest.raises(UsageError, match="there are 2 ranks, and accelerate knows of 1"):
        deepspeed.initialize(model=torch.nn.Linear(1, 1), config={})
    accelerate.state.PartialState._shared_state.clear()

    torch.manual_seed(rank)
    with deepspeed.zero.Init(config_dict_or_path=str(configs["stage3"])):
        built = torch.nn.Linear(16, 16)
        own = built.weight.detach().clone()
    assert built.state_dict()["weight"].isnan().all()
    theirs = [own.clone()]
    dist.broadcast_object_list(theirs, src=0)
    with deepspeed.zero.GatheredParameters({built.weight, built.bias}):
        assert torch.equal(built.weight, own) == (rank == 0)
        assert torch.equal(built.weight, theirs[0])
    del built

    found = {"plain": script("--model", model, "--out", folder / "plain")}
    for name, config in configs.items():
        found[name] = script("--model", model, "--out", folder / name, "--deepspeed", config)
    again = ("--resume_from_checkpoint", folder / "stage3" / "checkpoint-2", "--deepspeed", configs["stage3"])
    found["resumed"] = script("--model", model, "--out", folder / "resumed", *again)
    final = ("--model", folder / "stage3" / "final", "--out", folder / "evaluated")
    found["evaluated"] = script(*final, "--evaluate_only", "--deepspeed", configs["stage3"])
    lora = ("--lora", "--best", "--deepspeed", configs["stage3"])
    found["lora"] = script("--model", model, "--out", folder / "lora", *lora)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("trainer")
    return folder, run_ranks(trainers, 2, str(folder), timeout_s=200)


def others(rank: int, where: str) -> list[dict[str, Any]]:
    import torch.distributed as dist
    from transformers import logging

    answer_import()
    logging.set_verbosity_error()
    folder = Path(where)
    config = folder / "0.json"
    if rank == 0:
        write_model(folder)
        write_config(folder, stage3(folder))
    dist.barrier()
    words = ("--model", folder / "model")
    found = []
    for number, how in enumerate(((), ("--deepspeed", config))):
        out = ("--out", folder / f"out-{number}", *how)
        found.append(
            {
                "dpo": script(*words, *out, name="preferences"),
                "grpo": script(*words, *out, "--grpo", name="preferences"),
                "loop": script(*words, *out, name="accelerate_loop"),
            }
        )
    return found


@pytest.mark.soak
def test_trl_and_accelerate_train_as_without_deepspeed(tmp_path: Path) -> None:
    for plain, ours in run_ranks(others, 2, str(tmp_path), timeout_s=200):
        told = [{name: json.loads(each["losses"]) for name, each in kind.items()} for kind in (plain, ours)]
        assert len(told[0]["dpo"]) == 3
        assert told[1]["dpo"] == pytest.approx(told[0]["dpo"], rel=1e-4)
        assert len(told[0]["grpo"]) == len(told[1]["grpo"]) == 3
        assert told[1]["grpo"][0] == pytest.approx(told[0]["grpo"][0], abs=1e-4)
        for their_epoch, our_epoch in zip(told[0]["loop"], told[1]["loop"], strict=True):
            assert our_epoch == pytest.approx(their_epoch, rel=1e-4)
        assert told[1]["loop"][1] == told[1]["loop"][2]
    assert (tmp_path / "out-1" / "final" / "model.safetensors").exists()


def test_losses_and_norms_are_those_of_the_plain_trainer(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    for found in runs[1]:
        losses, norms = json.loads(found["plain"]["losses"])
        assert len(losses) == 4
        for name in ("stage2", "stage3", "resumed"):
            theirs = json.loads(found[name]["losses"])
            assert theirs[0] == pytest.approx(losses, rel=1e-5), name
            assert theirs[1] == pytest.approx(norms, rel=1e-4), name
            assert float(found[name]["after"]) == pytest.approx(float(found["plain"]["after"]), rel=1e-5)


def test_what_was_saved_is_what_was_trained(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, ((first, _)) = runs
    assert first["stage3"]["saved"] == first["plain"]["saved"]
    assert float(first["evaluated"]["after"]) == pytest.approx(float(first["stage3"]["after"]), rel=1e-6)
    assert sorted(path.name for path in (folder / "stage3").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert (folder / "stage3" / "checkpoint-4" / "global_step4").is_dir()


def test_an_adapter_is_trained_and_saved_alone(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, ((first, _)) = runs
    losses, _ = json.loads(first["lora"]["losses"])
    assert losses[-1] < losses[0]
    assert "adapter_model.safetensors" in first["lora"]["saved"]
    assert not list((folder / "lora").glob("*/model.safetensors"))
