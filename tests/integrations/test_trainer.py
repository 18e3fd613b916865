"""transformers' Trainer with `TrainingArguments(deepspeed=...)` on zstore, beside the plain Trainer."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from tests.integrations.trainers import (
    CHECKPOINTING,
    Texts,
    arguments,
    config,
    history,
    llama,
    open_door,
    train,
    weights,
)
from zstore.errors import UsageError
from zstore.optim import Lamb
from zstore.testing.ranks import run_ranks

EPOCHS = {
    "num_train_epochs": 2,
    "gradient_accumulation_steps": 3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "eval_strategy": "epoch",
    "max_grad_norm": 0.5,
    "label_smoothing_factor": 0.1,
    **CHECKPOINTING,
}
"""Two epochs with short accumulations at their ends, clipping, a cosine schedule after a warm-up, evaluation."""


def same(found: Any, wanted: Any) -> None:
    """Compare what two Trainers logged, and their weights. The rates are not those of the same moment: see docs/trainer.md."""
    for name in ("loss", "grad_norm", "eval_loss"):
        assert history(found, name) == pytest.approx(history(wanted, name), rel=1e-5 if name == "loss" else 1e-4), name
    assert found.state.global_step == wanted.state.global_step
    expected = weights(wanted)
    for name, value in weights(found).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=2e-4)  # a fiftieth of a step


def _beside(rank: int, folder: str, world_size: int) -> None:
    open_door()
    place = Path(folder)
    wanted = train(place / "plain", **EPOCHS)
    rates = history(wanted, "learning_rate")
    for number, (stage, device) in enumerate(((2, "cpu"), (2, "nvme"), (3, "none"), (3, "nvme"))):
        own = (number + world_size) % 2 == 0
        ds = config(place / "nvme", device, stage)
        if not own:  # the Trainer's optimizer, with its two groups of parameters
            del ds["optimizer"]
        found = train(place / f"{stage}-{device}", ds, **EPOCHS)
        same(found, wanted)
        logged = history(found, "learning_rate")
        # The engine advances the schedule of its own optimizer in the backward.
        assert (logged[:-1] if own else logged) == pytest.approx(rates[1:] if own else rates)
        assert found.evaluate()["eval_loss"] == pytest.approx(history(wanted, "eval_loss")[-1], rel=1e-6)
        predicted, truth = found.predict(Texts(3, seed=4)), wanted.predict(Texts(3, seed=4))
        assert torch.allclose(*map(torch.tensor, (predicted.predictions, truth.predictions)), rtol=1e-4, atol=1e-5)
        found.accelerator.free_memory()


@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_norms_and_weights_are_those_of_the_plain_trainer(tmp_path: Path, world_size: int) -> None:
    run_ranks(_beside, world_size, os.fspath(tmp_path), world_size)


SAVES = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
STEPS = SAVES | {"max_steps": 6, "lr_scheduler_type": "cosine", "warmup_steps": 1}


def _saved(rank: int, folder: str, stage: int, device: str) -> list[float]:
    open_door()
    place = Path(folder)
    ds = config(place / "nvme", device, stage, checkpoint={"writer": {"decoupled": True}})
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    whole = train(place / "whole", ds, **STEPS, train_dataset=Texts(16), **sizes)
    whole.accelerator.free_memory()
    return history(whole, "loss")


def _resumed(rank: int, folder: str, stage: int, device: str, world_size: int) -> list[float]:
    """Resume with the samples of a step that it had at another world size."""
    open_door()
    place = Path(folder)
    run = {
        **STEPS,
        "train_dataset": Texts(16),
        "per_device_train_batch_size": 4 // world_size,
        "gradient_accumulation_steps": 2,
    }
    found = train(
        place / "again", config(place / "nvme", device, stage), **run, resume=str(place / "whole" / "checkpoint-4")
    )
    return history(found, "loss")


@pytest.mark.parametrize(("stage", "device"), [(3, "nvme"), (2, "cpu")])
def test_a_resume_at_another_world_size_goes_on_with_the_losses(tmp_path: Path, stage: int, device: str) -> None:
    wanted = run_ranks(_saved, 1, os.fspath(tmp_path), stage, device)[0]
    kept = sorted(path.name for path in (tmp_path / "whole").glob("*checkpoint-*"))
    assert kept == ["checkpoint-4", "checkpoint-6"]
    for world_size in (1, 2) if transformers.__version__ >= "5" else (1,):  # Accelerate 1.10 draws other samples on 2
        for found in run_ranks(_resumed, world_size, os.fspath(tmp_path), stage, device, world_size):
            assert found[-2:] == pytest.approx(wanted[4:], rel=1e-5)
        shutil.rmtree(tmp_path / "again")


class _Worse(TrainerCallback):  # type: ignore[misc]
    """Makes every weight worse from the third step on, so that the best model is an early one."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        import deepspeed

        if state.global_step >= 3:
            with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.6)


def _best(rank: int, folder: str) -> None:
    open_door()
    place = Path(folder)
    run = {**STEPS, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    wanted = train(place / "plain", **run, callbacks=[_Plainly()])
    for name, more in (("plainly", {}), ("decoupled", {"checkpoint": {"writer": {"decoupled": True}}})):
        found = train(place / name, config(place / "nvme", **more), **run, callbacks=[_Worse()])
        same(found, wanted)
        assert found.state.best_global_step == 2
        assert sorted(path.name for path in (place / name).glob("checkpoint-*")) == ["checkpoint-2"]


class _Plainly(_Worse):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters() if state.global_step >= 3 else ():
                parameter.mul_(1.6)


def test_the_best_model_is_loaded_after_a_callback_changed_weights(tmp_path: Path) -> None:
    run_ranks(_best, 2, os.fspath(tmp_path))


def _second(rank: int, folder: str) -> None:
    open_door()
    place = Path(folder)
    wanted = train(place / "plain", max_steps=3)
    wanted = train(place / "plain-2", model=wanted.model, max_steps=3)
    for stage, device in ((0, "none"), (2, "nvme"), (3, "nvme")):
        ds = config(place / "nvme", device, stage)
        if stage == 0:
            ds["zero_optimization"] = {"stage": 0}
        first = train(place / f"{stage}-{device}", ds, max_steps=3)
        found = train(place / f"{stage}-{device}-2", ds, model=first.model, max_steps=3)
        same(found, wanted)
        assert first.evaluate()["eval_loss"] == pytest.approx(found.evaluate()["eval_loss"], rel=1e-6)
        found.accelerator.free_memory()


def test_a_second_trainer_trains_the_model_of_the_first_on(tmp_path: Path) -> None:
    run_ranks(_second, 2, os.fspath(tmp_path))


def _evaluated(rank: int, folder: str) -> None:
    open_door()
    import deepspeed

    place = Path(folder)
    ds = config(place / "nvme")
    ds["zero_optimization"]["stage3_param_persistence_threshold"] = 100
    # Rank 0's values count, whatever the others build.
    torch.manual_seed(rank)
    with deepspeed.zero.Init(config_dict_or_path=ds):
        built = torch.nn.Linear(16, 16)
        own = built.weight.detach().clone()
    theirs = [own.clone()]
    torch.distributed.broadcast_object_list(theirs, src=0)
    with deepspeed.zero.GatheredParameters({built.weight, built.bias}):
        assert torch.equal(built.weight, theirs[0])
    found = train(place / "out", ds, max_steps=2)
    wanted = found.evaluate()["eval_loss"]
    found.save_model(place / "final")
    found.accelerator.free_memory()
    found.accelerator.wait_for_everyone()
    # Read in shards, and evaluated by an engine without an optimizer; then trained by another one.
    args = arguments(place / "again", deepspeed=ds)
    model = AutoModelForCausalLM.from_pretrained(place / "final")
    alone = Trainer(model=model, args=args, eval_dataset=Texts(6, seed=3))
    assert alone.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-6)
    more = train(place / "more", ds, model=model, max_steps=2)
    assert len(history(more, "loss")) == 2
    assert more.evaluate()["eval_loss"] != pytest.approx(wanted, rel=1e-3)


def test_a_saved_model_is_evaluated_by_itself_and_trained_on(tmp_path: Path) -> None:
    run_ranks(_evaluated, 2, os.fspath(tmp_path))


def _own_optimizers(rank: int, folder: str) -> None:
    open_door()
    place = Path(folder)
    run = {"optim": "sgd", "learning_rate": 0.5, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    found = {}
    for name, ds in (("plain", None), ("ours", config(place / "nvme"))):
        model = llama(attention_bias=True)
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter_name.endswith("bias"))
        if ds is not None:
            del ds["optimizer"]
        found[name] = train(place / name, ds, model=model, **run)
    same(found["ours"], found["plain"])
    # accelerate makes DeepSpeed's Adam of the groups of any.
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed as mapped

    for kind in (torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Muon, Lamb):
        assert type(mapped(kind([torch.nn.Parameter(torch.zeros(2, 2))]))) is kind
    with pytest.raises(UsageError, match=r"eps=\(1e-30, 0.001\) of a parameter group is not Adam's"):
        train(place / "unknown", ds, optim="adafactor", max_steps=1)


def test_an_offloaded_optimizer_of_the_trainer_stays_what_it_is(tmp_path: Path) -> None:
    run_ranks(_own_optimizers, 2, os.fspath(tmp_path))
