"""What a Trainer on zstore leaves on disk, and its evaluation, beside Trainer alone at 2 ranks."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback
from transformers.trainer_utils import rotate_checkpoints
from transformers.utils import logging as transformers_logging

import zstore.hf
from tests.integrations.tokens import tokenizer
from tests.integrations.trainers import QUIET, Texts, arguments, config, history, llama
from tests.tools.commands import run
from zstore.engine.adapters.huggingface.checkpoints import committed, rotate, wait_for_removal
from zstore.errors import ConfigError
from zstore.journal import read
from zstore.journal.names import run_of
from zstore.testing.ranks import run_ranks

RUN = {
    "num_train_epochs": 1,
    "gradient_accumulation_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "learning_rate": 0.3,
}
"""A rate at which the first checkpoint is the best."""


class _Watch(TrainerCallback):  # type: ignore[misc]
    """Looks at each checkpoint as soon as it is saved."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        found = committed(folder)
        assert found is not None
        assert (folder / "model.safetensors").exists()
        self.steps.append(found.record.step)


def _trainer(kind: type, folder: Path, **extra: Any) -> Any:
    data = {"train_dataset": Texts(12), "eval_dataset": Texts(6, seed=3)}
    return kind(llama(), arguments(folder, **RUN), processing_class=tokenizer(), **data, **extra)


def _files_beside(rank: int, folder: str) -> None:
    warnings.simplefilter("default")
    transformers_logging.disable_progress_bar()
    place = Path(folder)
    first = _trainer(Trainer, place / "first").evaluate()["eval_loss"]
    wanted = _trainer(Trainer, place / "plain")
    wanted.train()
    own = config(place / "nvme")
    found = _trainer(zstore.hf.Trainer, place / "ours", zstore_config=own)
    assert found.evaluate()["eval_loss"] == pytest.approx(first, rel=1e-6)
    found.train()
    assert history(found, "loss", "eval_loss")[1:] == pytest.approx(history(wanted, "loss", "eval_loss")[1:], rel=1e-4)
    best = [Path(one.state.best_model_checkpoint).name for one in (wanted, found)]
    assert best[0] == best[1] != "checkpoint-3"
    after = found.evaluate()["eval_loss"]
    assert after == pytest.approx(wanted.evaluate()["eval_loss"], rel=1e-5)
    state = found.engine.module_state_dict()
    for _ in range(2):  # in place of what is there
        found.save_model()
    if rank == 0:
        _check_folder(place / "ours", best[1], state)
    torch.distributed.barrier()
    watch = _Watch()
    found.add_callback(watch)
    found.train()  # again, with the same engine
    wanted.train()
    assert history(found, "loss") == pytest.approx(history(wanted, "loss"), rel=2e-3)
    assert watch.steps == [4, 5, 6]
    found.close()
    only = zstore.hf.Trainer(llama(), arguments(place / "only"), eval_dataset=Texts(6, seed=3), zstore_config=own)
    assert only.evaluate()["eval_loss"] == pytest.approx(first, rel=1e-6)
    assert only.engine.optimizer is None
    only.close()
    _generate(rank, place)


def _check_folder(out: Path, best: str, state: dict[str, Any]) -> None:
    """Folders hold what from_pretrained finds; `zstore ls` sees the checkpoints."""
    kept = {path.name for path in out.glob("checkpoint-*")}
    assert kept == {best, "checkpoint-3"}
    for folder in (out, out / best):
        assert {"config.json", "model.safetensors", "tokenizer.json", "training_args.bin"} <= set(os.listdir(folder))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(dict(model.state_dict()), state)
    assert not [path for path in out.rglob("*") if path.name.startswith(".zstore")]
    assert json.loads((out / best / "trainer_state.json").read_text())["global_step"] == int(best[-1])


def _generate(rank: int, place: Path) -> None:
    """Texts end at different lengths on the ranks, and parameters are gathered by both."""
    torch.manual_seed(0)
    shape = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 24}
    data = [{"input_ids": [3 + (5 * row + n) % 20 for n in range(4 + row)], "labels": [4, 5, 1]} for row in range(4)]
    results = []
    for kind, extra in ((Seq2SeqTrainer, {}), (zstore.hf.Seq2SeqTrainer, {"zstore_config": config(place / "nvme")})):
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(**shape, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0)
        )
        args = Seq2SeqTrainingArguments(
            os.fspath(place / "t5"),
            **QUIET,
            max_steps=2,
            predict_with_generate=True,
            generation_max_length=8,
            save_strategy="no",
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
        )
        collate = transformers.DataCollatorForSeq2Seq(tokenizer(), model)
        trainer = kind(model, args, data_collator=collate, train_dataset=data, eval_dataset=data, **extra)
        trainer.train()
        results.append(trainer.predict(data).predictions)
    torch.testing.assert_close(torch.tensor(results[1]), torch.tensor(results[0]))


def test_folders_evaluation_and_generation_are_those_of_trainer_alone(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    run_ranks(_files_beside, 2, os.fspath(tmp_path))
    listed = json.loads(run("ls", os.fspath(tmp_path / "ours"), "--json").stdout)
    assert "checkpoint-3/step-3" in {one["tag"] for one in listed["checkpoints"]}
    assert [one["tag"] for one in listed["checkpoints"] if one["newest"]] == ["checkpoint-3/step-3"]


def _steps(journal: Path) -> list[int]:
    return [one["step"] for one in read(journal.parent) if one["kind"] == "step"]


def _kept(out: Path) -> set[str]:
    return set(os.listdir(out)) if out.exists() else set()


@pytest.mark.parametrize(
    "saves",
    [
        {"save_strategy": "no"},
        {"save_strategy": "steps", "save_steps": 1},
        {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1},
        {**{name: value for name, value in RUN.items() if name != "learning_rate"}, "save_total_limit": 1},
        {"save_strategy": "steps", "save_steps": 1, "save_only_model": True, "save_total_limit": 2},
    ],
    ids=["no", "steps", "newest", "best", "weights"],
)
@pytest.mark.parametrize("looks", [pytest.param(False, marks=pytest.mark.soak), True])
@pytest.mark.filterwarnings("default")
def test_output_dir_has_what_trainer_alone_leaves_there(tmp_path: Path, saves: dict[str, Any], looks: bool) -> None:
    settings = {**saves, "num_train_epochs": 1}
    watch = [_Watch()] if looks and not saves.get("save_only_model") else []
    for kind, name, extra in (
        (Trainer, "plain", {}),
        (zstore.hf.Trainer, "ours", {"zstore_config": {}, "callbacks": watch}),
    ):
        data = {"train_dataset": Texts(8), "eval_dataset": Texts(2, seed=3)}
        trainer = kind(llama(), arguments(tmp_path / name, **settings), **data, **extra)
        trainer.train()
        if extra:
            trainer.close()
    assert _kept(tmp_path / "ours") == _kept(tmp_path / "plain")
    found = list((tmp_path / "ours").rglob("journal-*.jsonl"))
    if saves["save_strategy"] == "no" or saves.get("save_only_model"):
        assert not found
    else:
        (journal,) = found
        assert _steps(journal) == [1, 2, 3, 4]
        assert read(tmp_path / "ours") == read(tmp_path / "ours", run_of(journal.name)) == read(journal.parent)


@pytest.mark.filterwarnings("default")
def test_the_journal_of_a_resumed_run_goes_on(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    first = zstore.hf.Trainer(llama(), arguments(tmp_path, **settings), train_dataset=Texts(8), zstore_config={})
    first.train()
    first.close()
    second = zstore.hf.Trainer(llama(), arguments(tmp_path, **settings), train_dataset=Texts(8), zstore_config={})
    second.train(resume_from_checkpoint=os.fspath(tmp_path / "checkpoint-2"))
    second.close()
    (journal,) = tmp_path.rglob("journal-*.jsonl")
    assert journal.parent.name == "checkpoint-4"
    assert _steps(journal) == [1, 2, 3, 4, 3, 4]


def _resumes(kind: type, folder: Path, **extra: Any) -> None:
    args = arguments(folder, max_steps=4)
    kind(llama(), args, train_dataset=Texts(12), **extra).train(
        resume_from_checkpoint=os.fspath(folder / "checkpoint-2")
    )


def test_a_plain_trainer_refuses_a_checkpoint_whose_optimizer_it_cannot_read(tmp_path: Path) -> None:
    given: dict[str, Any] = {"zstore_config": {}}
    saving = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    folders = {"plain": tmp_path / "plain", "ours": tmp_path / "ours"}
    Trainer(llama(), arguments(folders["plain"], **saving), train_dataset=Texts(12)).train()
    trainer = zstore.hf.Trainer(llama(), arguments(folders["ours"], **saving), train_dataset=Texts(12), **given)
    trainer.train()
    trainer.close()
    names = {name: set(os.listdir(folder / "checkpoint-2")) for name, folder in folders.items()}
    assert names["plain"] <= names["ours"]
    _resumes(Trainer, folders["plain"])
    with pytest.raises(pickle.UnpicklingError, match=r"zstore: the state.*Resume with zstore\.hf\.Trainer"):
        _resumes(Trainer, folders["ours"])
    _resumes(zstore.hf.Trainer, folders["ours"], **given)


@pytest.mark.parametrize("seed", range(8))
def test_the_checkpoints_that_transformers_would_delete_go(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    folders = {name: tmp_path / name for name in ("theirs", "ours")}
    numbers = rng.sample(range(1, 30), rng.randrange(1, 7))
    for folder in folders.values():
        for place, number in enumerate(numbers):
            made = folder / f"checkpoint-{number}"
            made.mkdir(parents=True)
            (made / "file").touch()
            os.utime(made, (1000 + 10 * place,) * 2)
    (folders["ours"] / ".checkpoint-99.removed").mkdir()  # of a process that was killed
    limit = rng.randrange(1, 4)
    best = rng.choice([None, *numbers])

    def best_in(name: str) -> str | None:
        return None if best is None else str(folders[name] / f"checkpoint-{best}")

    theirs = str(folders["theirs"])
    rotate_checkpoints(theirs, save_total_limit=limit, best_model_checkpoint=best_in("theirs"), use_mtime=True)
    args = SimpleNamespace(save_total_limit=limit)
    state = SimpleNamespace(best_model_checkpoint=best_in("ours"))
    rotate(SimpleNamespace(args=args, state=state, engine=None), str(folders["ours"]))
    wait_for_removal()
    assert sorted(os.listdir(folders["ours"])) == sorted(os.listdir(folders["theirs"]))


class _Terminated(TrainerCallback):  # type: ignore[misc]
    """Asks for a checkpoint, as transformers does a while after SIGTERM, where it is seen before an optimizer step."""

    def __init__(self, trainer: Any) -> None:
        (self.jit,) = [each for each in trainer.callback_handler.callbacks if hasattr(each, "jit_manager")]

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            self.jit.jit_manager._enable_checkpoint()


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_checkpoint_on_sigterm_resumes_with_the_losses_of_trainer_alone(place: str, tmp_path: Path) -> None:
    def trainer_of(folder: str, **keys: Any) -> Any:
        given = arguments(tmp_path / folder, max_steps=4, gradient_accumulation_steps=2, enable_jit_checkpoint=True)
        kind = zstore.hf.Trainer if keys else Trainer
        return kind(model=llama(), args=given, train_dataset=Texts(16), **keys)

    keys = {"zstore_config": config(tmp_path) if place == "disk" else {}}
    (alone := trainer_of("alone")).train()
    stopped = trainer_of("stopped", **keys)
    stopped.add_callback(_Terminated(stopped))
    stopped.train()
    assert [path.name for path in (tmp_path / "stopped").glob("checkpoint-*")] == ["checkpoint-2"]
    (resumed := trainer_of("stopped", **keys)).train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert history(resumed, "loss") == pytest.approx(history(alone, "loss"), rel=1e-5)


def test_a_checkpoint_on_sigterm_and_an_update_in_the_backward_exclude_each_other(tmp_path: Path) -> None:
    keys = config(tmp_path, zstore={"step_overlap": "backward"})
    given, before = arguments(tmp_path, enable_jit_checkpoint=True, max_steps=1), signal.getsignal(signal.SIGTERM)
    with pytest.raises(ConfigError, match="enable_jit_checkpoint saves between backward and step: set it to"):
        zstore.hf.Trainer(model=llama(), args=given, train_dataset=Texts(4), zstore_config=keys)
    assert signal.getsignal(signal.SIGTERM) is before
