"""What a Trainer on zstore refuses when it is made, what it warns of, and what it takes from its arguments."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from torch import nn
from transformers import Trainer
from transformers.optimization import Adafactor, AdafactorSchedule

import zstore.hf
from tests.integrations.trainers import Texts, arguments, config, history, llama
from zstore.engine.adapters.huggingface.arguments import check_arguments
from zstore.errors import CheckpointNotFoundError, ConfigError, UsageError
from zstore.journal import journals

pytestmark = pytest.mark.filterwarnings("default")

TINY = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}


def _make(folder: Path, wanted: Any, **changes: Any) -> Any:
    return zstore.hf.Trainer(
        llama(**TINY), arguments(folder, **changes), train_dataset=Texts(4), eval_dataset=Texts(2), zstore_config=wanted
    )


@pytest.mark.parametrize(
    ("changes", "way_out"),
    [
        ({"fsdp": "full_shard"}, "zero_optimization.stage"),
        ({"save_on_each_node": True}, "shared"),
        (
            {
                "save_only_model": True,
                "load_best_model_at_end": True,
                "save_strategy": "epoch",
                "eval_strategy": "epoch",
                "metric_for_best_model": "eval_loss",
            },
            "save_only_model=False",
        ),
        ({"optim": "adafactor"}, "whole tensors, which the engine offloads: use it at stage 0 without offload"),
        ({"optim": "schedule_free_adamw"}, "whole tensors, which the engine offloads"),
        (
            {"optim": "galore_adamw"},
            "does not know what a checkpoint has to keep of its state; or choose one of adamw_torch",
        ),
        ({"optim": "lomo"}, "in a backward of its own"),
        ({"optim": "grokadamw"}, "keeps its state in its parameter groups"),
    ],
)
def test_arguments_that_zstore_does_not_serve_are_refused(
    tmp_path: Path, changes: dict[str, Any], way_out: str
) -> None:
    wanted = config(tmp_path, device="cpu")
    if "optim" in changes:
        del wanted["optimizer"]
    with pytest.raises(UsageError, match=way_out):
        _make(tmp_path, wanted, **changes)


@pytest.mark.parametrize("optim", ["lomo", "adalomo", "grokadamw"])
def test_what_no_checkpoint_can_hold_is_refused_where_nothing_is_sharded_too(optim: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"backward of its own|keeps its state in its parameter groups"):
        _make(tmp_path, {}, optim=optim)


def test_whole_tensors_are_served_where_nothing_is_sharded(tmp_path: Path) -> None:
    for optim in ("adafactor", "schedule_free_adamw", "schedule_free_sgd", "schedule_free_radam"):
        _make(tmp_path, {}, optim=optim)


def test_the_rates_that_adafactor_chooses_are_shown_and_go_on_after_a_resume(tmp_path: Path) -> None:
    def rates(kind: Any, resumes: bool) -> list[float]:
        torch.manual_seed(0)
        model = llama(**TINY)
        optimizer = Adafactor(model.parameters(), relative_step=True, warmup_init=True, lr=None)
        saves = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}
        args = arguments(tmp_path / kind.__module__, max_steps=4, **saves)
        optimizers = optimizer, AdafactorSchedule(optimizer)
        trainer = kind(model, args, train_dataset=Texts(8), optimizers=optimizers)
        trainer.train(resume_from_checkpoint=str(Path(args.output_dir) / "checkpoint-2") if resumes else None)
        return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]

    plain = rates(Trainer, resumes=False)
    assert plain[-1] > plain[1] > 0
    assert rates(zstore.hf.Trainer, resumes=False) == plain
    assert rates(zstore.hf.Trainer, resumes=True) == plain


def test_a_config_that_contradicts_the_arguments_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = config(tmp_path, device="cpu", gradient_clipping=0.5, bf16={"enabled": True})
    wanted["optimizer"]["params"]["lr"] = 3e-4
    with pytest.raises(ConfigError) as refused:
        _make(tmp_path, wanted)
    for key in ("gradient_clipping is 0.5, but max_grad_norm is 1.0", "optimizer.params.lr is 0.0003", "bf16.enabled"):
        assert key in str(refused.value)
    with pytest.raises(ConfigError, match="stage"):
        _make(tmp_path, {"zero_optimization": {"stage": 7}})
    alone = arguments(tmp_path)
    assert alone.world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun sets it
    with pytest.raises(UsageError, match="use_cpu=True"):
        check_arguments(alone)
    with pytest.raises(UsageError, match=r"wrap\(\)"):
        zstore.hf.wrap(Texts)


def test_a_config_comes_from_the_variable_and_the_rest_from_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Neither precision, clipping, an optimizer nor a schedule: all are the Trainer's.
    monkeypatch.setenv("ZSTORE_CONFIG", json.dumps({"zero_optimization": {"stage": 2}}) + " // as in a file")
    run = {"max_grad_norm": 0.3, "weight_decay": 0.1, "max_steps": 2, "lr_scheduler_type": "constant"}
    with caplog.at_level(logging.WARNING, logger="zstore"):
        ours = _make(tmp_path / "ours", None, **run)
    assert "max_grad_norm=0.3" in caplog.text
    ours.train()
    plain = Trainer(llama(**TINY), arguments(tmp_path / "plain", **run), train_dataset=Texts(4))
    plain.train()
    assert history(ours, "loss", "grad_norm") == pytest.approx(history(plain, "loss", "grad_norm"), rel=1e-5)
    assert [group["weight_decay"] for group in ours.optimizer.param_groups] == [0.1, 0.0]
    torch.testing.assert_close(ours.engine.module_state_dict(), dict(plain.model.state_dict()), rtol=1e-4, atol=1e-6)
    ours.close()


@pytest.mark.parametrize("zstore_config", [None, {}])
def test_a_trainer_without_a_config_trains_in_memory_and_says_what_offload_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, zstore_config: Any
) -> None:
    monkeypatch.delenv("ZSTORE_CONFIG", raising=False)
    run = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    with caplog.at_level(logging.INFO, logger="zstore"):
        ours = _make(tmp_path / "ours", zstore_config, **run)
    (line,) = [record.message for record in caplog.records if "nothing is configured" in record.message]
    assert "offload_param" in line
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    ours.train()
    assert ours.engine.zero_optimization_stage() == 0
    plain = Trainer(llama(**TINY), arguments(tmp_path / "plain", **run), train_dataset=Texts(4))
    plain.train()
    assert history(ours, "loss", "grad_norm") == pytest.approx(history(plain, "loss", "grad_norm"), rel=1e-5)
    ours.close()


def test_a_schedule_of_the_config_is_logged_with_the_rates_of_its_steps(tmp_path: Path) -> None:
    wanted = config(tmp_path, device="cpu")
    wanted["scheduler"] = {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    }
    run = {"max_steps": 4, "warmup_steps": 2, "bf16": True, "save_strategy": "steps", "save_steps": 2}
    trainer = _make(tmp_path / "out", wanted, **run)
    trainer.train()
    assert trainer.engine.bfloat16_enabled()
    rates = history(trainer, "learning_rate")
    assert rates == pytest.approx([0.0, 0.0, 0.005, 0.01])
    trainer.close()
    again = _make(tmp_path / "out", wanted, **run)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert history(again, "learning_rate") == rates
    again.close()


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("wanted", [{}, {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}])
def test_evaluation_alone_is_in_16_bits_where_that_is_asked_for(
    tmp_path: Path, kind: str, wanted: dict[str, Any]
) -> None:
    run = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, f"{kind}_full_eval": True}
    ours = _make(tmp_path / "ours", wanted, **run)
    plain = Trainer(llama(**TINY), arguments(tmp_path / "plain", **run), train_dataset=Texts(4), eval_dataset=Texts(2))
    for trainer in (ours, plain):
        trainer.train()
    for name in ("loss", "eval_loss", "grad_norm"):  # while it trains, Trainer evaluates in the type that it trains in
        assert history(ours, name) == pytest.approx(history(plain, name), rel=1e-5), name
    in_32_bits = history(plain, "eval_loss")[-1]
    found, expected = ours.evaluate()["eval_loss"], plain.evaluate()["eval_loss"]
    assert found != pytest.approx(in_32_bits, rel=1e-7)
    assert found == pytest.approx(expected, rel=2e-3)
    assert ours.engine.training_state.config.precision == "fp32"
    ours.close()
    alone = zstore.hf.Trainer(
        llama(**TINY), arguments(tmp_path / "alone", **run), eval_dataset=Texts(2), zstore_config=wanted
    )
    frozen = Trainer(llama(**TINY), arguments(tmp_path / "frozen", **run), eval_dataset=Texts(2))
    assert alone.evaluate()["eval_loss"] == pytest.approx(frozen.evaluate()["eval_loss"], rel=2e-3)
    assert alone.engine.training_state.config.precision == kind
    alone.close()


class _Full(nn.Linear):
    """Has no memory for so many samples: in its forward, or in its backward."""

    fails_in = "forward"

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if len(values) >= 8 and self.training:
            if self.fails_in == "forward":
                raise RuntimeError("CUDA out of memory.")
            values.register_hook(self._fail)
        return super().forward(values)

    @staticmethod
    def _fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("CUDA out of memory.")


@pytest.mark.parametrize(
    ("fails_in", "device"),
    [
        ("forward", "none"),
        ("backward", "nvme"),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (("backward", "none"), ("forward", "cpu"), ("backward", "cpu"), ("forward", "nvme"))
        ),
    ],
)
def test_a_batch_size_is_found_as_trainer_alone_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_in: str, device: str
) -> None:
    (tmp_path / "nvme").mkdir()
    monkeypatch.setattr(_Full, "fails_in", fails_in)
    run = {"max_steps": 3, "per_device_train_batch_size": 8, "auto_find_batch_size": True}
    run |= {"save_strategy": "steps", "save_steps": 2}
    trainers = []
    for kind, extra in ((Trainer, {}), (zstore.hf.Trainer, {"zstore_config": config(tmp_path / "nvme", device)})):
        for resume in (None, True):
            model = llama(**TINY)
            model.lm_head.__class__ = _Full
            trainer = kind(model, arguments(tmp_path / kind.__module__, **run), train_dataset=Texts(24), **extra)
            trainer.train(resume_from_checkpoint=resume)
            trainers.append(trainer)
            if extra:
                assert trainer.engine.train_micro_batch_size_per_gpu() == 7
                trainer.close()
    assert [trainer._train_batch_size for trainer in trainers] == [7] * 4
    plain, ours = ([history(one, "loss", "grad_norm") for one in pair] for pair in (trainers[:2], trainers[2:]))
    assert ours == [pytest.approx(each, rel=1e-5) for each in plain]


def test_units_are_compiled_as_the_arguments_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND", raising=False)
    found = []
    for backend in (None, "eager"):
        trainer = _make(tmp_path, config(tmp_path, device="cpu"), max_steps=1, torch_compile_backend=backend)
        trainer.train()
        assert trainer.engine.is_compiled == (backend is not None)
        found.append(history(trainer, "loss", "grad_norm"))
        trainer.close()
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # which TrainingArguments set for good
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_a_resume_without_a_whole_checkpoint_names_the_newest_that_is(tmp_path: Path) -> None:
    wanted = config(tmp_path, device="cpu")
    run = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = _make(tmp_path / "out", wanted, **run)
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train()
    shutil.rmtree(tmp_path / "out" / "checkpoint-2" / "step-2")  # as of a save that was killed
    with pytest.raises(
        CheckpointNotFoundError, match=r"Can't find a valid checkpoint at .*the newest that is whole is .*checkpoint-1"
    ):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    trainer.train(resume_from_checkpoint=True)  # takes that one
    assert trainer.state.global_step == 2
    trainer.close()


class _Api:
    """Stands in for the hub: notes the files that would be sent, by the patterns that huggingface_hub filters with."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, set[str]]] = []

    def create_repo(self, repo_id: str, **_: Any) -> Any:
        return argparse.Namespace(repo_id=repo_id)

    def upload_folder(self, *, folder_path: str, ignore_patterns: Any = None, **options: Any) -> Any:
        files = [path.relative_to(folder_path).as_posix() for path in Path(folder_path).rglob("*") if path.is_file()]
        sent = set(filter_repo_objects(files, ignore_patterns=ignore_patterns))
        self.sent.append((options["commit_message"], sent))
        return argparse.Namespace(is_done=lambda: True, done=lambda: True, result=lambda: None)


def test_what_goes_to_the_hub_is_whole_when_it_goes_and_has_no_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = _Api()
    if hasattr(transformers.trainer, "hf_api"):
        monkeypatch.setattr("transformers.trainer.hf_api", lambda: api)
    else:
        for name in ("upload_folder", "create_repo"):
            monkeypatch.setattr(f"transformers.trainer.{name}", getattr(api, name))
    run = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "push_to_hub": True}
    run |= {"hub_strategy": "all_checkpoints", "hub_model_id": "somebody/model", "hub_always_push": True}
    wanted = config(tmp_path, device="cpu")
    trainer = zstore.hf.Trainer(llama(**TINY), arguments(tmp_path, **run), train_dataset=Texts(4), zstore_config=wanted)
    trainer.train()
    checkpoints = [files for message, files in api.sent if message.endswith(", checkpoint")]
    assert [
        files >= {"model.safetensors", "config.json", "trainer_state.json"}
        and any(name.startswith(f"step-{number}/") for name in files)
        for number, files in enumerate(checkpoints, 1)
    ] == [True, True]
    assert journals(tmp_path / "checkpoint-2")
    monkeypatch.setattr(trainer, "create_model_card", lambda **_: None)  # it would ask the hub
    trainer.push_to_hub(commit_message="the end", blocking=False)
    message, files = api.sent[-1]
    assert (message, files >= {"model.safetensors", "config.json"}) == ("the end", True)
    assert not [name for _, files in api.sent for name in files if "journal" in name]
    assert any(message.startswith("Training in progress, step") for message, _ in api.sent)
    trainer.close()


def test_model_init_makes_a_model_for_each_training(tmp_path: Path) -> None:
    trainer = zstore.hf.Trainer(
        args=arguments(tmp_path, max_steps=2),
        model_init=lambda: llama(**TINY),
        train_dataset=Texts(4),
        zstore_config=config(tmp_path, device="cpu"),
    )
    trainer.train()
    first, engine = history(trainer, "loss"), trainer.engine
    trainer.train()
    assert history(trainer, "loss") == first
    assert trainer.engine is not engine
    trainer.close()


def test_a_trainer_that_was_closed_says_so(tmp_path: Path) -> None:
    trainer = _make(tmp_path, config(tmp_path, device="cpu"), max_steps=1)
    trainer.train()
    trainer.close()
    with pytest.raises(UsageError, match="was closed"):
        trainer.train()


def test_trainers_of_other_libraries_are_there_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import trl

    for name in [name for name in dir(trl) if name.endswith("Trainer")]:
        with warnings.catch_warnings(action="ignore"):
            theirs = getattr(trl, name)
            ours = getattr(zstore.hf, name)
        assert issubclass(ours, theirs)
        assert issubclass(ours, zstore.hf.ZstoreTrainerMixin)
        assert ours is getattr(zstore.hf, name)
    with pytest.raises(AttributeError, match=r"no 'Tokenizer'; zstore\.hf\.wrap"):
        _ = zstore.hf.Tokenizer
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match="pip install trl"):
        exec("from zstore.hf import NoSuchTrainer", {})
