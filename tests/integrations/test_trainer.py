"""Trainer on zstore beside Trainer alone, in one run."""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, default_data_collator

import zstore.hf
from tests.integrations.trainers import CHECKPOINTING, Texts, arguments, config, history, llama
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks

LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")
EPOCH = {
    "num_train_epochs": 2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "eval_strategy": "epoch",
    "max_grad_norm": 0.5,
    "label_smoothing_factor": 0.1,
    CHECKPOINTING: True,
    "include_num_input_tokens_seen": "all",
}
"""Two epochs with short accumulations at their ends, clipping, a cosine schedule after a warm-up, evaluation."""


def _quiet() -> None:
    warnings.simplefilter("default")  # accelerate's, of threads and devices


def _train(
    kind: type, folder: Path, run: dict[str, Any], extra: dict[str, Any], samples: int = 14, **train: Any
) -> Any:
    trainer = kind(
        llama(), arguments(folder, **run), train_dataset=Texts(samples), eval_dataset=Texts(6, seed=3), **extra
    )
    trainer.train(**train)
    return trainer


def _beside(rank: int, folder: str, world_size: int) -> None:
    _quiet()
    place = Path(folder)
    # At 2 ranks 4 batches in 2 steps of 2, and with a short one at the end: 7 batches in 3, 3 and 1.
    run = {**EPOCH, "gradient_accumulation_steps": 3}
    wanted = _train(Trainer, place / "plain", run, {})
    # Nothing is saved, so that no folder checkpoint-N has the journal.
    ours = config(place / "nvme", zstore={"journal": os.fspath(place / "ours")})
    found = _train(zstore.hf.Trainer, place / "ours", run, {"zstore_config": ours})
    for name in LOGGED:
        assert history(found, name) == pytest.approx(history(wanted, name), rel=1e-5, abs=1e-8), name
    assert found.state.global_step == wanted.state.global_step == (6 if world_size == 1 else 4)
    expected = wanted.accelerator.unwrap_model(wanted.model_wrapped).state_dict()
    state = found.engine.module_state_dict()
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
    assert bool(state) == (rank == 0)
    assert found.evaluate()["eval_loss"] == pytest.approx(wanted.evaluate()["eval_loss"], rel=1e-6)
    predicted, truth = found.predict(Texts(3, seed=4)), wanted.predict(Texts(3, seed=4))
    torch.testing.assert_close(
        torch.tensor(predicted.predictions), torch.tensor(truth.predictions), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_an_epoch_from_disk_has_the_losses_of_trainer_alone(tmp_path: Path, world_size: int) -> None:
    (tmp_path / "nvme").mkdir()
    run_ranks(_beside, world_size, os.fspath(tmp_path), world_size)


def _resume(rank: int, folder: str, world_size: int) -> list[float]:
    """Train to the middle, resume, and go on to the end; return the losses logged."""
    _quiet()
    place = Path(folder)
    run = {
        "num_train_epochs": 2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 2,
    }
    extra = {"zstore_config": config(place / "nvme")}
    whole = _train(zstore.hf.Trainer, place / "whole", run, extra, 16)
    kept = sorted(path.name for path in (place / "whole").glob("checkpoint-*"))
    assert kept == ["checkpoint-6", "checkpoint-8"] if world_size == 1 else ["checkpoint-2", "checkpoint-4"]
    if rank == 0:
        shutil.rmtree(place / "whole" / kept[-1])
    torch.distributed.barrier()
    whole.close()
    resumed = _train(zstore.hf.Trainer, place / "whole", run, extra, 16, resume_from_checkpoint=True)
    assert history(resumed, "loss") == history(whole, "loss")
    assert history(resumed, "learning_rate") == history(whole, "learning_rate")
    return history(whole, "loss")


def _go_on_at_two_ranks(rank: int, folder: str) -> list[float]:
    _quiet()
    place = Path(folder)
    run = {
        "num_train_epochs": 2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "gradient_accumulation_steps": 2,
        "save_strategy": "no",
    }
    extra = {"zstore_config": config(place / "nvme")}
    middle = os.fspath(place / "whole" / "checkpoint-6")
    resumed = _train(zstore.hf.Trainer, place / "two", run, extra, 16, resume_from_checkpoint=middle)
    assert resumed.args.gradient_accumulation_steps == 1
    return history(resumed, "loss")


def test_a_run_resumes_with_the_same_bits_and_at_another_world_size(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    whole, *_ = run_ranks(_resume, 1, os.fspath(tmp_path), 1)
    two, *_ = run_ranks(_go_on_at_two_ranks, 2, os.fspath(tmp_path))
    assert two == pytest.approx(whole, rel=1e-5)


def _trainers(kind: type, folder: Path, models: list[Any], **extra: Any) -> list[Any]:
    """Return a Trainer that evaluates alone, and two that train."""
    return [
        kind(
            model,
            arguments(folder / str(number), max_steps=2),
            train_dataset=Texts(6, seed=number) if number else None,
            eval_dataset=Texts(4, seed=3),
            **extra,
        )
        for number, model in enumerate(models)
    ]


def _one_after_the_other(rank: int, folder: str) -> None:
    _quiet()
    place = Path(folder)
    # A model for each: once a Trainer evaluated it, Trainer alone no longer averages its gradients over ranks.
    models = [llama() for _ in range(3)]
    wanted = _trainers(Trainer, place / "plain", models)
    losses = [wanted[0].evaluate()["eval_loss"]]
    for before, trainer in itertools.pairwise(wanted):
        trainer.model.load_state_dict(before.model.state_dict())
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    for stages in ({}, {"zero_optimization": {"stage": 3}}, config(place / "nvme")):
        found = _trainers(zstore.hf.Trainer, place / "ours", [llama()] * 3, zstore_config=stages)
        assert found[0].evaluate()["eval_loss"] == pytest.approx(losses[0], rel=1e-5)
        for trainer, expected, loss in zip(found[1:], wanted[1:], losses[1:], strict=True):
            trainer.train()
            for name in ("loss", "grad_norm"):
                assert history(trainer, name) == pytest.approx(history(expected, name), rel=1e-4), name
            assert [one.evaluate()["eval_loss"] for one in found] == pytest.approx([loss] * 3, rel=1e-4)
        with pytest.raises(UsageError, match="another one trains its model now"):
            found[1].train()
        found[2].close()


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_second_trainer_takes_the_model_over(tmp_path: Path, world_size: int) -> None:
    (tmp_path / "nvme").mkdir()
    run_ranks(_one_after_the_other, world_size, os.fspath(tmp_path))


def test_a_step_before_the_training_is_the_trainers_own(tmp_path: Path) -> None:
    def gradients(kind: Any) -> list[torch.Tensor]:
        model = llama()
        trainer = kind(
            model, arguments(tmp_path), compute_loss_func=lambda outputs, *_, **__: outputs["logits"].square().mean()
        )
        trainer.training_step(model, default_data_collator([Texts(1)[0]]))
        return [parameter.grad for parameter in model.parameters()]

    for own, others in zip(gradients(zstore.hf.Trainer), gradients(Trainer), strict=True):
        assert torch.equal(own, others)


class _Order(nn.Module):
    """Keeps what it saw in a buffer that grows, and takes one of another length over."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("seen", torch.empty(0))

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if "seen" in state_dict:
            self.seen = state_dict["seen"].clone()
        return super().load_state_dict(state_dict, strict, assign)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen = torch.cat([self.seen, x.flatten()])
        return {"loss": self.linear(x).square().mean()}


@pytest.mark.parametrize("offloads", [False, True])
def test_a_buffer_that_grows_is_resumed_as_the_model_loads_it(tmp_path: Path, offloads: bool) -> None:
    data = [{"x": torch.tensor([float(number)])} for number in range(8)]

    def seen(kind: Any, resumes: bool, **own: Any) -> torch.Tensor:
        torch.manual_seed(0)
        saves = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        args = arguments(tmp_path / kind.__module__, remove_unused_columns=False, **saves)
        trainer = kind(_Order(), args, train_dataset=data, **own)
        trainer.train(resume_from_checkpoint=str(tmp_path / kind.__module__ / "checkpoint-2") if resumes else None)
        found: torch.Tensor = trainer.model.seen
        return found

    plain = seen(Trainer, resumes=False)
    own = {"zstore_config": config(tmp_path) if offloads else {}}
    assert torch.equal(seen(zstore.hf.Trainer, resumes=False, **own), plain)
    assert torch.equal(seen(zstore.hf.Trainer, resumes=True, **own), plain)
