"""Saving and loading through the engine: exact resume, other world sizes, and what is refused."""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import zstore
from tests.engine.bits import engine_digests
from tests.engine.models import make_net
from tests.engine.resume_runs import config, train
from zstore.checkpoint.reader import open_checkpoint
from zstore.engine import Engine
from zstore.errors import CheckpointExistsError, CheckpointMismatchError, RankError, RunFolderError, UsageError
from zstore.format.arrays import WHOLE_BYTES
from zstore.ranks.world import World
from zstore.testing.ranks import run_ranks

STEPS = 2


def start(*args: Any, model: nn.Module | None = None, seed: int = 0, **kwargs: Any) -> Engine:
    engine, *_ = zstore.initialize(model=model or make_net(seed), config=config(*args, **kwargs))
    return engine


def _save_and_go_on(rank: int, folder: str, stage: int, tier: str, precision: str) -> dict[str, Any]:
    engine = start(stage, tier, folder, precision=precision)
    with engine:
        train(engine, STEPS)
        torch.rand(3 + rank), random.random(), np.random.rand()
        engine.save_checkpoint(f"{folder}/ckpt", "mid", {"epoch": 3, "best": [torch.arange(5) * 0.5, "x"]})
        at_save = engine_digests(engine)
        drawn = [torch.rand(1).item(), random.random(), float(np.random.rand())]
        losses = train(engine, STEPS)
        return {"at_save": at_save, "drawn": drawn, "losses": losses, "after": engine_digests(engine)}


def _resume(rank: int, folder: str, stage: int, tier: str, precision: str) -> dict[str, Any]:
    engine = start(stage, tier, folder, precision=precision, seed=1)
    with engine:
        path, state = engine.load_checkpoint(f"{folder}/ckpt")
        assert path == f"{folder}/ckpt/mid"
        assert state["epoch"] == 3
        assert state["best"][0].tolist() == [0, 0.5, 1, 1.5, 2]
        assert state["best"][1] == "x"
        assert (engine.global_steps, engine.skipped_steps) == (STEPS, 0)
        at_save = engine_digests(engine)
        drawn = [torch.rand(1).item(), random.random(), float(np.random.rand())]
        losses = train(engine, STEPS)
        return {"at_save": at_save, "drawn": drawn, "losses": losses, "after": engine_digests(engine)}


@pytest.mark.parametrize(
    ("world_size", "stage", "tier", "precision"),
    [
        (1, 0, "none", "fp32"),
        (1, 3, "nvme", "fp16"),
        (2, 3, "nvme", "bf16"),
        pytest.param(2, 0, "none", "bf16", marks=pytest.mark.soak),
        pytest.param(3, 1, "cpu", "fp32", marks=pytest.mark.soak),
    ],
)
def test_resume_is_exact(tmp_path: Path, world_size: int, stage: int, tier: str, precision: str) -> None:
    args = (str(tmp_path), stage, tier, precision)
    saved = run_ranks(_save_and_go_on, world_size, *args)
    resumed = run_ranks(_resume, world_size, *args)
    assert resumed == saved
    assert len({str(result["drawn"]) for result in saved}) == world_size


def _save(rank: int, folder: str, stage: int, tier: str) -> list[float]:
    with start(stage, tier, folder) as engine:
        train(engine, STEPS)
        engine.save_checkpoint(f"{folder}/ckpt", client_state={"note": "elastic"})
        return train(engine, STEPS)


def _load_elsewhere(rank: int, folder: str, stage: int, tier: str) -> tuple[list[float], str]:
    with start(stage, tier, folder, seed=1, batch_size=2 * World.current().world_size) as e:
        path, state = e.load_checkpoint(f"{folder}/ckpt")
        assert path is not None
        assert state == {"note": "elastic"}
        assert e.train_batch_size() == 12
        e.save_checkpoint(f"{folder}/again", tag=f"from-{e.world_size}", client_state=state)
        return train(e, STEPS), path


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 3, "nvme"), (1, 1, "cpu")),
        pytest.param((1, 0, "none"), (3, 2, "nvme"), marks=pytest.mark.soak),
        pytest.param((3, 3, "cpu"), (2, 0, "none"), marks=pytest.mark.soak),
    ],
)
def test_another_world_size(tmp_path: Path, before: tuple[int, int, str], after: tuple[int, int, str]) -> None:
    whole = run_ranks(_save, before[0], str(tmp_path), *before[1:])
    loaded = run_ranks(_load_elsewhere, after[0], str(tmp_path), *after[1:])
    per_step = [np.mean([loss for rank in whole for loss in _of_step(rank, step)]) for step in range(STEPS)]
    here = [np.mean([loss for rank, _ in loaded for loss in _of_step(rank, step)]) for step in range(STEPS)]
    np.testing.assert_allclose(here, per_step, rtol=2e-3)
    with open_checkpoint(tmp_path / "ckpt") as one, open_checkpoint(tmp_path / "again") as other:
        assert one.arrays.keys() == other.arrays.keys()
        assert (one.record.world_size, other.record.world_size) == (before[0], after[0])
        assert one.record.run == other.record.run
        for name in one.arrays:
            np.testing.assert_array_equal(one.read_array(name), other.read_array(name), err_msg=name)
        # Small arrays are one file, those of each rank are of large ones alone.
        for name, array in [*one.arrays.items(), *other.arrays.items()]:
            assert array.spec.nbytes >= WHOLE_BYTES or array.grid.num_shards == 1, name
        assert one.arrays["model/embed.weight"].grid.num_shards == before[0]


def _of_step(losses: list[float], step: int) -> list[float]:
    each = len(losses) // STEPS
    return losses[step * each : (step + 1) * each]


# -- refusals, one process -------------------------------------------------------------------------------------------


def small(**changes: Any) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    base = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
    engine, *_ = zstore.initialize(model=changes.pop("model", model), config=base | {"steps_per_print": 0} | changes)
    return engine


def small_step(engine: Engine, micros: int = 2) -> None:
    for _ in range(micros):
        engine.backward(engine(torch.ones(2, 6)).square().mean())
        engine.step()


def test_client_state_takes_numpy_and_namespaces(tmp_path: Path) -> None:
    arguments = Namespace(lr=np.float32(0.5), out=Path("runs/a"), inner=Namespace(steps=np.int64(3)), betas=(0.9, 0.95))
    arrays = {
        "bf16": np.array([1.5, -2], ml_dtypes.bfloat16),
        "big endian": np.arange(4, dtype=">i4"),
        "backwards": np.arange(3.0)[::-1],
        "scalar": np.array(2.5),
        "flags": np.array([[True, False]]),
    }
    state = {
        "args": arguments,
        "best": np.float64(1.25),
        "nan": np.float32("nan"),
        "on": np.bool_(True),
        "arrays": arrays,
    }
    with small() as engine:
        engine.save_checkpoint(str(tmp_path), "x", state)
        _, back = engine.load_checkpoint(str(tmp_path))
        assert back["args"] == {"lr": 0.5, "out": "runs/a", "inner": {"steps": 3}, "betas": [0.9, 0.95]}
        assert (back["best"], back["on"], str(back["nan"])) == (1.25, True, "nan")
        for name, array in arrays.items():
            assert isinstance(back["arrays"][name], torch.Tensor)
            assert back["arrays"][name].shape == array.shape
            assert back["arrays"][name].tolist() == array.astype(np.float64).tolist(), name
        assert back["arrays"]["bf16"].dtype == torch.bfloat16
        engine.save_checkpoint(str(tmp_path), "y", arguments)
        assert engine.load_checkpoint(str(tmp_path))[1]["lr"] == 0.5


@pytest.mark.parametrize("made", ["value", "function"])
def test_announced_client_state_is_checked_at_the_end_of_the_next_step(tmp_path: Path, made: str) -> None:
    def announce(engine: Engine, value: Any) -> None:
        state = value if made == "value" else lambda: value
        engine.save_on_signal(str(tmp_path / "ckpt"), client_state=state)

    with small() as engine:
        announce(engine, {"epoch": 1, "loader": {"seen": {1, 2}}})
        small_step(engine, 1)
        with pytest.raises(
            UsageError, match=r"client_state\['loader'\]\['seen'\] is a builtins.set, which cannot be stored"
        ):
            small_step(engine, 1)
        assert engine.global_steps == 1
        announce(engine, {"epoch": np.int64(2)})
        small_step(engine)
        assert engine.global_steps == 2
    assert not list((tmp_path / "ckpt").glob("step-*"))


def test_options_of_a_load(tmp_path: Path) -> None:
    with small() as engine:
        with pytest.raises(UsageError, match="no option 'load_module'; it has load_module_strict"):
            engine.load_checkpoint(str(tmp_path), load_module=True)
        with pytest.raises(UsageError, match="load_module_only='yes'\\): expected True or False"):
            engine.load_checkpoint(str(tmp_path), load_module_only="yes")
        engine.save_checkpoint(str(tmp_path), client_sd={"step": 7})
        assert engine.load_checkpoint(str(tmp_path), load_optimizer_states=True)[1] == {"step": 7}


def test_an_equal_tag_replaces_a_checkpoint_of_its_own_run_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small() as engine:
        for epoch in range(2):  # `ckpt_id = loss.item()`, twice the same
            engine.save_checkpoint(str(tmp_path), 0.5, {"epoch": epoch})
            small_step(engine)
        assert [r.message for r in caplog.records if "replaced" in r.message] == [
            f"checkpoint '0.5' of this run (step 0) was replaced in {tmp_path}"
        ]
        run = engine.training_state.run_id
    with small() as other:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(CheckpointExistsError, match=r"by another run \(step 1\): load it first .* overwrite=True"):
            other.save_checkpoint(str(tmp_path), 0.5)
        assert sorted(tmp_path.rglob("*")) == before
        assert other.load_checkpoint(str(tmp_path))[1] == {"epoch": 1}
        small_step(other)
        other.save_checkpoint(str(tmp_path), 0.5, {"epoch": 2})  # it goes on with that run
        assert other.training_state.run_id == run
    with small() as third:
        third.save_checkpoint(str(tmp_path), 0.5, overwrite=True)
    with open_checkpoint(tmp_path, "0.5") as reader:
        assert (reader.record.step, reader.record.run != run) == (0, True)


def test_a_stop_never_replaces_a_checkpoint_of_another_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small() as engine:
        engine.save_checkpoint(str(tmp_path), "last")
    with small() as other:
        small_step(other)
        with pytest.raises(SystemExit):
            other.save_and_stop(str(tmp_path), "last")
        beside = f"last-{other.training_state.run_id[:8]}"
        assert f"this one is saved as {beside!r}" in caplog.text
    with open_checkpoint(tmp_path, "last") as reader, open_checkpoint(tmp_path, beside) as saved:
        assert (reader.record.step, saved.record.step) == (0, 1)


def test_old_checkpoints_go_and_the_run_is_known(tmp_path: Path) -> None:
    changes = {"zstore": {"keep": 2}}
    with small(**changes) as engine:
        for _ in range(3):
            engine.save_checkpoint(str(tmp_path))
            small_step(engine)
    with small(**changes) as engine:
        engine.load_checkpoint(str(tmp_path))
        small_step(engine)
        engine.save_checkpoint(str(tmp_path))
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000002", "step-00000003"]


def test_frozen_parameters_and_a_changed_choice_of_them(tmp_path: Path) -> None:
    def model(*, frozen: bool) -> nn.Module:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
        net[0].requires_grad_(not frozen)
        return net

    with small(model=model(frozen=False), bf16={"enabled": True}) as engine:
        weight = engine.module[0].weight.clone()
        engine.save_checkpoint(str(tmp_path), "all")
    with small(model=model(frozen=True), bf16={"enabled": True}) as engine:
        engine.module[0].weight.data.zero_()
        engine.load_checkpoint(str(tmp_path), "all")
        assert torch.equal(engine.module[0].weight, weight)
        assert engine.module[0].weight.dtype == torch.bfloat16
        engine.save_checkpoint(str(tmp_path), "some")
    with open_checkpoint(tmp_path, "some") as reader:
        assert reader.arrays["model/0.weight"].spec.dtype == "bfloat16"
        assert "optimizer/exp_avg/0.weight" not in reader.arrays
    with (
        small(model=model(frozen=False)) as engine,
        pytest.raises(CheckpointMismatchError, match=r"missing: optimizer/exp_avg/0\.weight"),
    ):
        engine.load_checkpoint(str(tmp_path), "some")


# -- refusals, several ranks -----------------------------------------------------------------------------------------


def _odd_ranks(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with pytest.raises(
        RunFolderError if rank == 1 else RankError, match="rank 1 of 2 failed" if rank == 0 else "below"
    ):
        start(2, "nvme", f"{folder}/file/below" if rank == 1 else f"{folder}/nvme")
    engine = start(2, "none", folder)
    with engine:
        train(engine, 1)
        # An index that the embedding does not have, on every rank.
        with pytest.raises(IndexError):
            engine(torch.full((1, 4), 99999))
        for name, action in {
            "state": lambda: engine.save_checkpoint(folder, "bad", {"x": object()} if rank == 1 else {}),
            "tag": lambda: engine.save_checkpoint(folder, "../x" if rank == 1 else "x"),
            "folder": lambda: engine.save_checkpoint(f"{folder}/file/below", "bad"),
            "folders": lambda: engine.save_checkpoint(f"{folder}/of-{rank}", "bad"),
            "absent": lambda: engine.load_checkpoint(folder, "absent"),
        }.items():
            try:
                action()
            except Exception as error:
                found[name] = type(error).__name__
        engine.save_checkpoint(folder, f"loss-{rank}", {"t": torch.full((2,), float(rank))})
        found["state back"] = engine.load_checkpoint(folder)[1]["t"].tolist()
        losses = train(engine, 1)
        found["finite"] = all(np.isfinite(losses))
    return found


def test_ranks_that_differ(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    first, second = run_ranks(_odd_ranks, 2, str(tmp_path))
    assert first["state"] == first["tag"] == "RankError"
    assert second["state"] == second["tag"] == "UsageError"
    assert first["folder"] not in ("RankError", "")
    assert second["folder"] != ""
    assert first["folders"] == "RankError"
    assert second["folders"] == "UsageError"
    assert first["absent"] == second["absent"] == "CheckpointNotFoundError"
    assert first["state back"] == second["state back"] == [0.0, 0.0]
    assert first["finite"]
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["loss-0", "nvme"]
