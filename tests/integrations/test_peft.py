"""Adapters of every method that peft has: saved as peft saves those of the plain model, and loaded by it."""

import copy
import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file
from torch import nn
from transformers.utils import logging as transformers_logging

import zstore
from tests.integrations.trainers import VOCAB, config, llama, open_door, train
from zstore.engine.adapters.deepspeed.engine import DeepSpeedEngine, initialize
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks
from zstore.tools.consolidate import consolidate_command

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SETTINGS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10, "init_r": 4, "target_r": 2},
    "FOURIERFT": {"n_frequency": 64},
    "PSOFT": {"r": 4},
    "ADAMSS": {"r": 4, "num_subspaces": 2},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 1, "target_modules": None},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 8},
    "HRA": {"r": 4},
    "IA3": {"feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MISS": {"r": 4},
    "MULTITASK_PROMPT_TUNING": {"num_tasks": 2},
    "OFT": {"oft_block_size": 4, "r": 0},
    "POLY": {"r": 4, "n_tasks": 2, "n_skills": 2},
    "P_TUNING": {"encoder_hidden_size": 16},
    "ROAD": {"group_size": 8},
    "SHADOW": {"target_modules": None, "shadow_dropout": 0.0},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2], "target_modules": ["embed_tokens"]},
    "VBLORA": {"num_vectors": 16, "vector_length": 8, "topk": 2, "r": 2},
    "WAVEFT": {"n_frequency": 64},
}
"""Of methods whose defaults do not fit a model of 32 features."""
OF_EACH_KIND = {
    "LORA",
    "IA3",
    "LN_TUNING",
    "OFT",
    "POLY",
    "PREFIX_TUNING",
    "SHIRA",
    "TRAINABLE_TOKENS",
    "VERA",
    "XLORA",
}
"""Low ranks, factors, parameters of the model itself, rotations, several tasks, prompts, sparse parts, rows, parts that
layers share, adapters of adapters; `make soak` has all."""
REFUSED = "CPT"
"""Its forward gives a parameter other memory."""
METHODS = sorted(str(getattr(kind, "value", kind)) for kind in PEFT_TYPE_TO_CONFIG_MAPPING)
ADAPTER = "adapter_model.safetensors"
LR = 1e-2
CONSTANT = {"lr_scheduler_type": "constant"}
STAGE_3 = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "steps_per_print": 0,
}


def adapted(method: str, seed: int = 1) -> Any:
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(method)]
    usual = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "num_virtual_tokens": 4}
    given = usual | SETTINGS.get(method, {})
    base = llama()
    base.config.use_cache = False  # type: ignore[union-attr]
    torch.manual_seed(seed)
    return peft.get_peft_model(base, kind(**{n: v for n, v in given.items() if n in kind.__dataclass_fields__}))


def batch(method: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
    tasks = {"task_ids": torch.zeros(2, dtype=torch.int64)} if "task_ids" in needs(method) else {}
    return {"input_ids": ids, "labels": ids, **tasks}


def needs(method: str) -> set[str]:
    return {"task_ids"} if method in ("POLY", "MULTITASK_PROMPT_TUNING") else set()


def saved_by_trainer(engine: DeepSpeedEngine) -> Any:
    return engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)


def logits(folder: Path, method: str) -> torch.Tensor:
    base = llama()
    base.config.use_cache = False  # type: ignore[union-attr]
    model = peft.PeftModel.from_pretrained(base, folder).eval()
    with torch.no_grad():
        found: torch.Tensor = model(**{k: v for k, v in batch(method).items() if k != "labels"}).logits
    return found


def trained_loras(folder: Path) -> dict[str, str]:
    for seed in range(2):
        model = adapted("LORA", seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(generator=torch.Generator().manual_seed(seed))
        model.save_pretrained(folder / str(seed))
    return {str(seed): str(folder / str(seed)) for seed in range(2)}


@pytest.mark.parametrize(
    "method",
    [
        method if method in OF_EACH_KIND else pytest.param(method, marks=pytest.mark.soak)
        for method in METHODS
        if method != REFUSED
    ],
)
def test_a_method_is_saved_and_loaded(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if method == "ADAMSS":
        pytest.importorskip("sklearn")
    if method == "XLORA":
        if peft.__version__ < "0.21":
            pytest.skip("PEFT freezes its adapters after the model is built")
        loras = {"adapters": trained_loras(tmp_path), "hidden_size": llama().config.hidden_size}  # type: ignore[union-attr]
        monkeypatch.setitem(SETTINGS, method, loras)
    plain, ours = adapted(method), adapted(method)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)
    torch.manual_seed(2)
    plain(**batch(method)).loss.backward()
    optimizer.step()
    plain.save_pretrained(tmp_path / "plain")
    with initialize(model=ours, config=STAGE_3)[0] as engine:
        torch.manual_seed(2)
        engine.backward(engine(**batch(method)).loss)
        engine.step()
        ours.save_pretrained(tmp_path / "ours", state_dict=saved_by_trainer(engine))
    wanted, found = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("plain", "ours"))
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    torch.testing.assert_close(logits(tmp_path / "ours", method), logits(tmp_path / "plain", method))


def test_a_method_that_gives_a_parameter_other_memory_is_refused() -> None:
    with zstore.initialize(model=adapted(REFUSED), config=STAGE_3)[0] as engine:
        engine(**batch(REFUSED))
        with pytest.raises(UsageError, match=r"delta_embedding.weight' was given different storage"):
            engine(**batch(REFUSED))


def with_frozen_a(seed: int) -> nn.Module:
    """LoRA-FA: random matrices that are not trained, and that no base model has."""
    model: nn.Module = adapted("LORA", seed)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    return model


def _on_ranks(rank: int, folder: str) -> None:
    open_door()
    transformers_logging.disable_progress_bar()
    place, run = Path(folder), {"save_strategy": "steps", "save_steps": 2, **CONSTANT}
    for stage in (3, 2):
        ds, out = config(place / "nvme", stage=stage), place / str(stage)
        model = with_frozen_a(1)
        plain = copy.deepcopy(model)
        first = train(out, ds, model=model, max_steps=2, **run)
        first.save_model(os.fspath(out / "out"))
        first.accelerator.free_memory()
        if rank == 0:
            plain.save_pretrained(out / "plain")  # type: ignore[operator]
            wanted, found = (load_file(out / kind / ADAPTER) for kind in ("plain", "out"))
            assert {key: torch.equal(found[key], value) for key, value in wanted.items()} == {
                key: "lora_A" in key for key in wanted
            }
        torch.distributed.barrier()
        # Adapters of another seed are replaced, those that are not trained too.
        resume = os.fspath(out / "checkpoint-2")
        again = train(out, ds, model=with_frozen_a(7), max_steps=3, **CONSTANT, resume=resume)
        again.save_model(os.fspath(out / "again"))
        again.accelerator.free_memory()
        if rank == 0:
            before, after = (load_file(out / kind / ADAPTER) for kind in ("out", "again"))
            assert {k: torch.equal(before[k], after[k]) for k in before} == {k: "lora_A" in k for k in before}
            consolidate_command(out / "checkpoint-2", out / "weights", "fp32")
            assert not (out / "weights/config.json").exists()  # transformers takes its folder for a whole model
            assert torch.equal(logits(out / "weights", "LORA"), logits(out / "out", "LORA"))
        torch.distributed.barrier()


def test_adapters_that_are_partly_frozen_are_saved_and_resumed_whole(tmp_path: Path) -> None:
    run_ranks(_on_ranks, 2, os.fspath(tmp_path))


def test_a_consolidated_lora_has_the_names_of_peft(tmp_path: Path) -> None:
    kinds = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"], "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(llama(), peft.LoraConfig(use_dora=True, **kinds), "mine")
    model.save_pretrained(tmp_path / "plain", save_embedding_layers=False)
    with zstore.initialize(model=model, config=STAGE_3)[0] as engine:
        engine.save_checkpoint(tmp_path / "run", exclude_frozen_parameters=True)
        consolidate_command(tmp_path / "run", tmp_path / "out", "fp32")
    wanted, found = load_file(tmp_path / "plain/mine" / ADAPTER), load_file(tmp_path / "out" / ADAPTER)
    assert sorted(found) == sorted(wanted)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
