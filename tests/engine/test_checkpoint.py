"""Saves and loads: what comes back, tags, what is refused, and every layout loaded at every other."""

import random
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from tests.engine import runs
from tests.engine.models import make_net
from tests.engine.runs import constant_rate_config, resume_config, train_by_sample
from zstore.checkpoint.build import reshard_checkpoint
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine import Engine
from zstore.errors import CheckpointExistsError, CheckpointMismatchError, RankError, RunFolderError, UsageError
from zstore.format.arrays import WHOLE_BYTES
from zstore.testing.ranks import run_ranks


def start(stage: int, tier: str, folder: str, *, seed: int = 0) -> Engine:
    return runs.start(resume_config(stage, tier, folder), make_net(seed))


def _draw() -> list[float]:
    return [torch.rand(1).item(), random.random(), float(np.random.rand())]


def _drawn(rank: int, folder: str, stage: int, tier: str) -> list[list[float]]:
    """Return what the generators give after a save, and after its load; test_bits.py resumes runs."""
    with start(stage, tier, folder) as engine:
        train_by_sample(engine, 1)
        torch.rand(3 + rank), random.random(), np.random.rand()
        engine.save_checkpoint(f"{folder}/ckpt", "mid", {"epoch": 3, "best": [torch.arange(5) * 0.5, "x"]})
        drawn = [_draw()]
    with start(stage, tier, folder, seed=1) as engine:
        path, state = engine.load_checkpoint(f"{folder}/ckpt")
        assert path == f"{folder}/ckpt/mid"
        assert (state["epoch"], state["best"][0].tolist(), state["best"][1]) == (3, [0, 0.5, 1, 1.5, 2], "x")
        assert (engine.global_steps, engine.skipped_steps) == (1, 0)
        return [*drawn, _draw()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resume_has_the_state_of_generators_and_client(world_size: int, tmp_path: Path) -> None:
    found = run_ranks(_drawn, world_size, str(tmp_path), 3, "nvme")
    assert all(before == after for before, after in found)
    assert len({str(before) for before, _ in found}) == world_size


def small(**changes: Any) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    model = changes.pop("model", model)
    return runs.start(constant_rate_config(**({"bf16": {"enabled": False}} | changes)), model)


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
    state = {"args": arguments, "best": np.float64(1.25), "nan": np.float32("nan"), "on": np.bool_(1), "arrays": arrays}
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
        with pytest.raises(UsageError, match=r"client_state\['loader'\]\['seen'\] is a builtins.set"):
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


def test_an_equal_tag_replaces_that_of_its_own_run_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def _odd_ranks(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with pytest.raises(RunFolderError if rank == 1 else RankError, match="rank 1 of 2" if rank == 0 else "below"):
        start(2, "nvme", f"{folder}/file/below" if rank == 1 else f"{folder}/nvme")
    engine = start(2, "none", folder)
    with engine:
        train_by_sample(engine, 1)
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
        losses = train_by_sample(engine, 1)
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


Layout = tuple[int, int]
"""World size and stage."""

TIERS = {0: "none", 1: "cpu", 2: "nvme", 3: "nvme"}
"""Of each stage's optimizer state: every tier is saved from and loaded into."""
EVERY: list[Layout] = [(world_size, stage) for world_size in (1, 2, 3, 4) for stage in (0, 1, 2, 3)]


def tag_of(layout: Layout) -> str:
    return "world-{}-stage-{}".format(*layout)


def start_at(stage: int, folder: str, seed: int) -> Engine:
    return runs.start(resume_config(stage, TIERS[stage], folder, 1), make_net(seed))


def _save_at(rank: int, folder: str, stage: int, tag: str) -> list[float]:
    with start_at(stage, folder, seed=0) as engine:
        train_by_sample(engine, 1)
        engine.save_checkpoint(f"{folder}/saved", tag, {"tag": tag})
        return train_by_sample(engine, 1)


def _load_all(rank: int, folder: str, stage: int, tags: Sequence[str], again: str) -> tuple[list[int], list[float]]:
    with start_at(stage, folder, seed=1) as engine:
        steps = []
        for tag in tags:
            path, state = engine.load_checkpoint(f"{folder}/saved", tag)
            assert path == f"{folder}/saved/{tag}"
            assert state == {"tag": tag}
            engine.save_checkpoint(f"{folder}/{again}", tag, state)
            steps.append(engine.global_steps)
            assert engine.train_batch_size() == 12
        return steps, train_by_sample(engine, 1)  # what was loaded last can be trained


def check_elastic(folder: Path, saved: Iterable[Layout], loaded: Iterable[Layout]) -> None:
    saved = list(saved)
    losses = []
    for layout in saved:
        losses = run_ranks(_save_at, layout[0], str(folder), layout[1], tag_of(layout), timeout_s=180)
    for layout in loaded:
        tags = [tag_of(other) for other in saved if other != layout]
        again = f"again-{tag_of(layout)}"
        results = run_ranks(_load_all, layout[0], str(folder), layout[1], tags, again, timeout_s=600)
        assert [steps for steps, _ in results] == [[1] * len(tags)] * layout[0]
        np.testing.assert_allclose(np.mean([loss for _, loss in results]), np.mean(losses), rtol=2e-3)
        for tag in tags:
            with open_checkpoint(folder / "saved", tag) as one, open_checkpoint(folder / again, tag) as other:
                assert other.record.world_size == layout[0]
                assert verify_checkpoint(other) == []
                assert one.arrays.keys() == other.arrays.keys()
                assert one.record.run == other.record.run
                # Small arrays are one file, those of each rank are of large ones alone.
                for array in [*one.arrays.values(), *other.arrays.values()]:
                    assert array.spec.nbytes >= WHOLE_BYTES or array.grid.num_shards == 1
                assert other.arrays["model/embed.weight"].grid.num_shards == layout[0]
                different = [n for n in one.arrays if one.read_array(n).tobytes() != other.read_array(n).tobytes()]
                assert different == [], (tag, layout)


def _read_bytes(rank: int, folder: str, stage: int) -> int:
    """Return the bytes that this rank's load reads, of state in memory, so that nothing is linked."""
    settings = resume_config(stage, "none" if stage == 1 else "cpu", folder, 1)
    with runs.start(settings, make_net(1, vocab=60_000)) as engine:
        engine.load_checkpoint(f"{folder}/saved")
        assert engine.load_report.linked_bytes == 0
        return engine.load_report.read_bytes


def _save_wide(rank: int, folder: str) -> None:
    with runs.start(resume_config(2, "cpu", folder), make_net(vocab=60_000)) as engine:
        train_by_sample(engine, 1)
        engine.save_checkpoint(f"{folder}/saved")


@pytest.mark.parametrize(
    ("saved", "loaded", "stage"),
    [pytest.param(2, 2, 1, marks=pytest.mark.soak), (3, 2, 2), pytest.param(1, 3, 3, marks=pytest.mark.soak)],
)
def test_each_rank_reads_only_its_own_rows(tmp_path: Path, saved: int, loaded: int, stage: int) -> None:
    run_ranks(_save_wide, saved, str(tmp_path))
    with open_checkpoint(tmp_path / "saved") as reader:
        state_bytes = sum(array.spec.nbytes for array in reader.arrays.values())
    found = run_ranks(_read_bytes, loaded, str(tmp_path), stage)
    # Beside its rows a rank reads the rest of the chunks in which they begin and end; small arrays are one chunk.
    assert state_bytes <= sum(found) < 1.15 * state_bytes
    assert max(found) < 1.2 * state_bytes / loaded


def _load_from(rank: int, folder: str, source: str) -> Any:
    with start_at(3, folder, seed=1) as engine:
        engine.load_checkpoint(f"{folder}/{source}", "one")
        engine.save_checkpoint(f"{folder}/again", source)
        return train_by_sample(engine, 1)


def test_an_archive_goes_on_as_what_it_was_made_of(tmp_path: Path) -> None:
    """At the same layout too, where files that are not compressed would be linked."""
    run_ranks(_save_at, 1, str(tmp_path), 3, "one")
    with open_checkpoint(tmp_path / "saved") as reader:
        reshard_checkpoint(reader, tmp_path / "archive", codec="zstd")
    assert run_ranks(_load_from, 1, str(tmp_path), "archive") == run_ranks(_load_from, 1, str(tmp_path), "saved")
    with open_checkpoint(tmp_path / "saved") as one, open_checkpoint(tmp_path / "again", "archive") as other:
        assert verify_checkpoint(other) == []
        assert {array.codec for array in other.arrays.values()} == {None}
        assert all(one.read_array(name).tobytes() == other.read_array(name).tobytes() for name in one.arrays)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [([(2, 3)], [(1, 1)]), pytest.param(EVERY, EVERY, marks=pytest.mark.soak)],
    ids=["one", "every"],
)
def test_every_layout_loads_at_every_other(saved: list[Layout], loaded: list[Layout], tmp_path: Path) -> None:
    check_elastic(tmp_path, saved, loaded)
