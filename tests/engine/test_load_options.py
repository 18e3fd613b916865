"""Loading a part of a checkpoint, as fine-tuning does: what comes, what stays, and how training goes on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.bits import engine_digests, reference_digests
from tests.engine.models import batch, make_net
from tests.engine.runs import ADAM, make_config, start, step
from tests.reference import Reference
from zstore.engine import Engine
from zstore.errors import CheckpointMismatchError
from zstore.testing.ranks import run_ranks

OWN_LR = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 4}}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint after three steps, and what the engine held."""
    with start() as engine:
        for _ in range(3):
            step(engine)
        engine.save_checkpoint(str(tmp_path / "ckpt"), "base", {"note": 1})
        return tmp_path / "ckpt", held(engine)


def held(engine: Engine) -> dict[str, Any]:
    training = engine.training_state
    digests = engine_digests(engine)
    return {
        "weights": {name: value for name, value in digests.items() if not name.startswith("optimizer/")},
        "slots": {name: value for name, value in digests.items() if name.startswith("optimizer/")},
        "scalars": {record.name: dict(scalars) for record, scalars in training.state.scalars.items()},
        "counters": (engine.global_steps, engine.micro_steps),
        "lr": engine.get_lr(),
        "schedule": engine.lr_scheduler.state_dict(),
        "run": training.run_id,
        "generator": torch.get_rng_state().tolist(),
    }


def other(**keys: Any) -> Engine:
    return start(make_config(1, "cpu", scheduler=OWN_LR, **keys), make_net(seed=5))


@pytest.mark.parametrize(
    ("options", "loaded"),
    [
        ({}, {"weights", "slots", "scalars", "counters", "schedule", "run", "generator"}),
        ({"load_module_only": True}, {"weights"}),
        ({"load_optimizer_states": False}, {"weights", "counters", "schedule", "generator"}),
        ({"load_lr_scheduler_states": False}, {"weights", "slots", "scalars", "counters", "generator"}),
        (
            {"load_optimizer_states": False, "load_lr_scheduler_states": False, "load_module_strict": False},
            {"weights", "counters", "generator"},
        ),
    ],
)
def test_what_is_not_asked_for_stays(
    saved: tuple[Path, dict[str, Any]], options: dict[str, bool], loaded: set[str]
) -> None:
    folder, theirs = saved
    with other() as engine:
        torch.manual_seed(77)
        mine = held(engine)
        path, state = engine.load_checkpoint(str(folder), **options)
        assert (path, state) == (str(folder / "base"), {"note": 1})
        after = held(engine)
        # Where the schedule is loaded, the learning rate is that of this config's schedule at the saved position.
        assert (after.pop("lr") != mine.pop("lr")) == ("schedule" in loaded)
        for name, value in after.items():
            assert value == (theirs if name in loaded else mine)[name], name
        step(engine)


def test_fine_tuning_goes_on_as_a_plain_loop_from_the_weights(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = saved
    reference = Reference(make_net(), 1, precision="bf16", accumulation=2, adam={"lr": 1e-3, "weight_decay": 0.1})
    keys = {"optimizer": {"type": "AdamW", "params": ADAM["params"] | {"lr": 1e-3}}, "scheduler": None}
    with start(make_config(1, "cpu", **keys), make_net(seed=5)) as engine:
        engine.load_checkpoint(str(folder), load_module_only=True)
        for name, parameter in reference.model.named_parameters():
            master = engine.get_full_parameter(name)
            assert master is not None
            parameter.data.copy_(master)
            if name in reference.masters:
                reference.masters[name].data.copy_(master)
        for number in range(2):
            step(engine)
            reference.step([[batch(number, micro, 0)] for micro in range(2)])
        rows = {record.name: record.owned_range for record in engine.training_state.state.records}
        assert engine_digests(engine) == {
            name: value for name, value in reference_digests(reference, rows).items() if name in engine_digests(engine)
        }


class Grown(nn.Module):
    """The saved model with another head beside it, and without one of its parts."""

    def __init__(self) -> None:
        super().__init__()
        base = make_net(seed=5)
        for name, child in base.named_children():
            if name != "unused":
                self.add_module(name, child)
        self.start, self.mix = base.start, base.mix
        self.register_buffer("shift", base.shift)
        self.register_buffer("extra", torch.full((3,), 2.0))
        self.score = nn.Linear(56, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.score(self.blocks[0](self.embed(ids) + self.start)).float().square().mean()


def test_a_model_that_differs(saved: tuple[Path, dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    folder, theirs = saved
    with start(make_config(1, "cpu"), Grown()) as engine:
        mine = engine_digests(engine)
        with pytest.raises(CheckpointMismatchError) as caught:
            engine.load_checkpoint(str(folder), load_module_only=True)
        for line in ("missing: model/score.weight", "missing: buffer/extra", "optimizer: model/unused.weight"):
            assert line in str(caught.value)
        assert "optimizer/exp_avg" not in str(caught.value)  # not asked for, so no difference
        assert engine_digests(engine) == mine
        with caplog.at_level(logging.WARNING):
            engine.load_checkpoint(str(folder), load_module_strict=False)
        assert "is loaded in part:" in caplog.text
        assert "missing: optimizer/exp_avg/score.bias" in caplog.text
        after, both = engine_digests(engine), theirs["weights"] | theirs["slots"]
        for name in after:
            assert after[name] == (mine if "score" in name else both)[name]
        scalars = {record.name: dict(s) for record, s in engine.training_state.state.scalars.items()}
        assert scalars["score.weight"] == {"step": 0.0}
        assert scalars["embed.weight"] == {"step": 3.0}
        assert engine.module.extra.tolist() == [2.0, 2.0, 2.0]
        step(engine)
    with (
        start(make_config(1, "cpu"), make_net(vocab=1100)) as engine,
        pytest.raises(CheckpointMismatchError, match=r"model/embed.weight: shape \(1203, 56\) in the checkpoint"),
    ):
        engine.load_checkpoint(str(folder), load_module_strict=False)


def _fine_tune(rank: int, folder: str) -> list[Any]:
    with start(make_config(3, gradient_accumulation_steps=1), make_net(seed=5)) as engine:
        with pytest.raises(CheckpointMismatchError, match="cannot be kept at world size 3"):
            engine.load_checkpoint(folder)
        engine.load_checkpoint(folder, load_module_only=True)
        values = [engine.get_full_parameter(name) for name in ("embed.weight", "frozen.weight", "blocks.0.gain")]
        step(engine)
        return [None if value is None else value.float().sum().item() for value in values]


def test_weights_load_where_the_batch_cannot_be_kept(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = saved
    with start() as engine:
        engine.load_checkpoint(str(folder))
        names = ("embed.weight", "frozen.weight", "blocks.0.gain")
        expected = [value.float().sum().item() for n in names if (value := engine.get_full_parameter(n)) is not None]
    assert run_ranks(_fine_tune, 3, str(folder)) == [expected] * 3
