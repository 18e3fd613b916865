"""The journal that an engine writes, compared with what the engine itself says."""

import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm
from tests.engine.models import batch, make_net
from tests.engine.runs import make_config, start, step
from tests.waiting import until
from zstore.engine import Engine
from zstore.errors import ConfigError, DiskFullError
from zstore.io.files import Files
from zstore.journal import journal_file, journals, read, run_of, steps
from zstore.remote.service import open_folder
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def kinds(folder: Path, *, run_id: str | None = None) -> list[str]:
    return [record["kind"] for record in read(folder, run_id)]


def of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read(folder) if record["kind"] == kind]


def test_steps_saves_and_loads_are_as_the_engine_says(tmp_path: Path) -> None:
    expected: list[tuple[int, float, float, float]] = []
    config = make_config(2, "nvme", tmp_path, gradient_clipping=1.0)
    ckpt = tmp_path / "ckpt"

    def take(engine: Engine) -> None:
        losses = []
        for micro in range(2):
            loss = engine(*batch(engine.global_steps, micro, 0))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        norm = engine.get_global_grad_norm()
        assert norm is not None
        expected.append((engine.global_steps, sum(losses) / 2, norm, engine.get_lr()[0]))

    with start(config) as engine:
        run = engine.training_state.run_id
        for number in range(3):
            engine.journal.note(tokens=100 + number, total_steps=7)
            take(engine)
            assert not ckpt.exists()  # nobody knows where it will be
        handle = engine.save_checkpoint(str(ckpt), wait=False)
        summary = handle.wait()
        take(engine)
        engine.save_checkpoint(str(tmp_path / "elsewhere"), "tag")
        assert not journals(tmp_path / "elsewhere")
        held, plan = engine.statistics().held, engine.training_state.plan
    assert journals(ckpt) == [journal_file(run)]
    records = read(ckpt)
    assert [r["kind"] for r in records[:2]] == ["start", "memory"]
    first, memory, end = records[0], records[1], records[-1]
    assert (first["run"], first["step"], first["total_steps"]) == (run, 0, 7)
    assert (first["pid"], first["world_size"]) == (os.getpid(), 1)
    assert first["config"]["gradient_clipping"] == 1.0
    assert first["versions"]["torch"] == torch.__version__
    assert (end["kind"], end["step"], end["reason"]) == ("end", 4, "done")
    sizes, tiers = Counter[str](), Counter[str]()
    for _, tier, kind, nbytes in memory["arrays"]:
        sizes[kind] += nbytes
        tiers[tier] += nbytes
    masters, slots = held.optimizer_state // 3, held.optimizer_state // 3 * 2
    gradients, buffers = plan.held["gradients"].total, plan.held["buffers"].total
    state = {"parameters": held.parameters, "master weights": masters, "optimizer state": slots}
    assert sizes == state | {"gradients": gradients, "buffers": buffers}
    assert {tier: tiers[tier] for tier in ("device", "host", "disk")} == asdict(plan.held_total)

    taken = of_kind(ckpt, "step")
    assert [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in taken] == [
        (number, pytest.approx(loss, rel=1e-6), norm, lr) for number, loss, norm, lr in expected
    ]
    assert [r["tokens"] for r in taken] == [100, 101, 102, 102]
    assert {r["samples"] for r in taken} == {4}
    assert taken[0]["rate/optimizer_write"] > 0
    assert taken[0]["stall_s"] == pytest.approx(sum(n for name, n in taken[0].items() if name.startswith("stall/")))
    assert taken[0]["memory/disk"] > 0
    assert taken[0]["memory/process"] > 2**20
    assert all(r["step_s"] >= 0.9 * (r["forward_s"] + r["backward_s"] + r["optimizer_s"]) > 0 for r in taken)
    saves = of_kind(ckpt, "save")
    expected = [(3, "step-00000003", "committed"), (4, "tag", "committed")]
    assert [(r["step"], r["tag"], r["state"]) for r in saves] == expected
    assert saves[0]["location"] == str(summary.path)
    assert saves[0]["linked_bytes"] == summary.linked_bytes > 0
    assert saves[0]["written_bytes"] == summary.written_bytes > 0
    assert saves[0]["stall_s"] == handle.stall_s
    assert saves[1]["stall_s"] >= saves[1]["elapsed_s"] > 0

    with start(config) as engine:  # goes on in the same file
        engine.load_checkpoint(str(ckpt))
        take(engine)
    assert journals(ckpt) == [journal_file(run)]
    again = read(ckpt)[len(records) :]
    assert [r["kind"] for r in again] == ["start", "memory", "load", "step", "end"]
    assert again[0]["step"] == 3
    load = next(r for r in again if r["kind"] == "load")
    assert (load["step"], load["tag"], load["location"]) == (3, "step-00000003", str(summary.path))
    assert steps(read(ckpt))["step"] == [1, 2, 3, 4]
    assert steps(read(ckpt))["loss"][3] == again[-2]["loss"]


def test_divided_losses_are_summed_and_a_skipped_step_has_numbers_of_json(tmp_path: Path) -> None:
    fp16 = {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 4}}
    with start(make_config(zstore={"journal": str(tmp_path)}, **fp16)) as engine:
        losses = [engine(*batch(0, micro, 0)) for micro in range(2)]
        for loss in losses:
            engine.backward(loss / 2, scale_wrt_gas=False)
            engine.step()
        step(engine, factor=math.inf)
    one, two = of_kind(tmp_path, "step")
    assert one["loss"] == pytest.approx(sum(loss.item() for loss in losses) / 2, rel=1e-3)
    assert (one["skipped"], two["skipped"]) == (False, True)
    assert (two["grad_norm"], two["loss"]) == (None, None)


def test_where_the_config_says_or_nowhere(tmp_path: Path) -> None:
    for journal, expected in ((str(tmp_path / "own"), ["own"]), (False, [])):
        with start(make_config(zstore={"journal": journal})) as engine:
            step(engine)
            engine.save_checkpoint(str(tmp_path / f"ckpt-{len(expected)}"))
        assert [p.parent.name for p in tmp_path.rglob("journal-*")] == ["own"]
    with start(make_config(), frozen=True) as engine:
        assert not engine.journal.enabled
    for wrong in (True, 3):
        with pytest.raises(ConfigError, match=r"zstore\.journal: expected .*path"):
            start(make_config(zstore={"journal": wrong}))


def test_a_load_names_the_folder_and_the_first_save_another(tmp_path: Path) -> None:
    with start() as engine:
        step(engine)
        engine.save_checkpoint(str(tmp_path / "one"))
    before = read(tmp_path / "one")
    with start() as engine:
        engine.load_checkpoint(str(tmp_path / "one"))
        step(engine)
        engine.save_checkpoint(str(tmp_path / "two"))
        step(engine)
    one, two = read(tmp_path / "one")[len(before) :], read(tmp_path / "two")
    assert [r["kind"] for r in one] == ["start", "memory", "load", "step", "end"]
    assert [r["kind"] for r in two] == ["start", "memory", "save", "step", "end"]
    with start() as engine:  # a process that only looks leaves nothing
        engine.load_checkpoint(str(tmp_path / "two"))
    assert read(tmp_path / "two") == two
    with start() as engine:  # weights of another run to begin with
        engine.load_checkpoint(str(tmp_path / "two"), load_module_only=True)
        step(engine)
        assert engine.journal.writer.file is None


def test_a_failed_save_is_written_down_and_the_refused_one_makes_no_journal(tmp_path: Path) -> None:
    files: Files = FaultyFiles(faults=(Fault(kind="write", pattern="*/bad.*/model/*", times=None, error_number=28),))
    with start(_files=files) as engine:
        step(engine)
        with pytest.raises(DiskFullError):
            engine.save_checkpoint(str(tmp_path / "ckpt"), "bad")
        engine.save_checkpoint(str(tmp_path / "ckpt"), "good")
    states = [(r["tag"], r["state"]) for r in of_kind(tmp_path / "ckpt", "save")]
    assert states == [("bad", "failed"), ("good", "committed")]
    assert "No space left" in of_kind(tmp_path / "ckpt", "save")[0]["problem"]


def test_a_folder_that_cannot_be_written_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with start(make_config(zstore={"journal": str(tmp_path / "file" / "below")})) as engine:
        for _ in range(3):
            step(engine)
    assert sum("journal cannot be written" in record.message for record in caplog.records) == 1


SCRIPT = """
import os, sys
from tests.engine.runs import make_config, start, step
end = sys.argv[2]
engine = start(make_config())
engine.note_save_folder(sys.argv[1])
for _ in range(3):
    step(engine)
if end == "error":
    raise RuntimeError("as a bug would")
if end == "killed":
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.endings
def test_how_a_process_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def process(end: str) -> Any:
        arguments = [sys.executable, "-c", SCRIPT, str(tmp_path / end), end]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return warm.Popen(arguments, stdin=warm.PIPE, stdout=warm.PIPE, stderr=warm.PIPE, env=environment)

    fails, killed = process("error"), process("killed")
    fails.communicate(timeout=200)
    (end,) = of_kind(tmp_path / "error", "end")
    assert (end["step"], end["reason"], end["problem"]) == (3, "failed", "RuntimeError: as a bug would")
    assert killed.stdout.readline() == b"ready\n"
    until(lambda: len(of_kind(tmp_path / "killed", "step")) >= 3)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=200)
    assert kinds(tmp_path / "killed")[-1] == "step"
    with start() as engine:
        engine.note_save_folder(str(tmp_path / "killed"))
        engine.training_state.run_id = read(tmp_path / "killed")[0]["run"]
        step(engine)
    assert "not record the end of this run's previous process: it was killed" in caplog.text
    assert "`zstore plan --config` shows what to change" in caplog.text


def test_the_journal_of_a_run_at_a_url_is_sent_along(tmp_path: Path) -> None:
    url = "memory://journal-url/run"
    with start(make_config(zstore={"upload_folder": str(tmp_path)})) as engine:
        engine.note_save_folder(url)
        step(engine)
        engine.save_checkpoint(url)
        sent = read(open_folder(url))
        step(engine)
    states = [r["state"] for r in sent if r["kind"] == "save"]
    assert states == ["uploaded"]
    assert [r["kind"] for r in read(open_folder(url))][-2:] == ["step", "end"]
    (local,) = tmp_path.rglob("journal-*")
    assert read(open_folder(url)) == read(local.parent)


CASES = ((1, "none"), (3, "forward"), (3, "backward"))


def _train(rank: int, folder: Path) -> list[list[float]]:
    found = []
    for stage, overlap in CASES:
        own = {"journal": str(folder / f"{stage}-{overlap}"), "step_overlap": overlap}
        losses = []
        with start(make_config(stage, "cpu", bf16={"enabled": False}, zstore=own)) as engine:
            assert engine.journal.enabled == (rank == 0)
            for _ in range(3):
                here = []
                for micro in range(2):
                    loss = engine(*batch(engine.global_steps, micro, rank))
                    here.append(loss.item())
                    engine.backward(loss)
                    engine.step()
                losses.append(sum(here) / 2)
        found.append(losses)
    return found


def test_the_loss_is_the_mean_over_all_ranks_and_rank_0_alone_writes(tmp_path: Path) -> None:
    ranks = run_ranks(_train, 2, tmp_path)
    first = make_net()
    with torch.no_grad():  # the model before any step, on the samples of both ranks
        alone = [first(*batch(0, micro, rank)).item() for rank in range(2) for micro in range(2)]
    for (stage, overlap), one, other in zip(CASES, *ranks, strict=True):
        folder = tmp_path / f"{stage}-{overlap}"
        (name,) = journals(folder)
        assert run_of(name) == read(folder)[0]["run"]
        assert (kinds(folder), read(folder)[0]["world_size"]) == (["start", "memory", "step", "step", "step", "end"], 2)
        found = [record["loss"] for record in of_kind(folder, "step")]
        assert found[0] == pytest.approx(sum(alone) / 4, rel=1e-5)
        assert found == [pytest.approx((mine + theirs) / 2, rel=1e-6) for mine, theirs in zip(one, other, strict=True)]
        assert found[0] != pytest.approx(one[0], rel=1e-5)


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    clock, passed = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + passed[0])

    def wait(seconds: float) -> None:
        passed[0] += seconds

    return wait


def _save(_rank: int, folder: Path) -> tuple[int, int]:
    with start(make_config(1, "nvme", folder / "nvme", zstore={"journal": str(folder)})) as engine:
        step(engine)
        engine.save_checkpoint(str(folder / "ckpt"))
        torch.distributed.barrier()
        files = [path.stat() for path in (folder / "ckpt").rglob("c.*")]
        torch.distributed.barrier()  # the names on the drive go with the engine
    return sum(f.st_size for f in files if f.st_nlink > 1), sum(f.st_size for f in files if f.st_nlink == 1)


def test_bytes_of_a_save_are_those_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    first, second = run_ranks(_save, 2, tmp_path)
    (committed,) = [record for record in of_kind(tmp_path, "save") if record["state"] == "committed"]
    assert (committed["linked_bytes"], committed["written_bytes"]) == first == second
    assert min(first) > 0


def test_an_evaluation_is_no_time_of_a_step(tmp_path: Path, pass_time: Callable[[float], None]) -> None:
    with start(make_config(zstore={"journal": str(tmp_path)})) as engine:
        step(engine)
        handle = engine.module.register_forward_hook(lambda *_: pass_time(1000.0))
        engine.eval_batch(iter([batch(0, 0, 0)] * 2), 2)
        handle.remove()
        engine.train()
        step(engine)
    _, after = of_kind(tmp_path, "step")
    assert after["step_s"] < 1000
    assert after["step_s"] >= 0.9 * (after["forward_s"] + after["backward_s"] + after["optimizer_s"]) > 0


def test_values_of_a_loops_own_are_in_the_journal(tmp_path: Path) -> None:
    with start(make_config(zstore={"journal": str(tmp_path)})) as engine:
        step(engine)
        engine.log({"accuracy": 0.5, "share": torch.tensor([0.25]), "text": "no number", "many": torch.ones(2)})
        step(engine)
        engine.log({"eval_loss": math.nan, "worst": -math.inf})
        engine.log({"text": "nothing"})
    one, two = of_kind(tmp_path, "metrics")
    assert {name: value for name, value in one.items() if "/" in name} == {"metric/accuracy": 0.5, "metric/share": 0.25}
    assert (two["step"], two["metric/eval_loss"], two["metric/worst"]) == (2, None, None)
    assert two["not_finite"] == {"metric/eval_loss": "nan", "metric/worst": "-inf"}


def test_a_loop_s_folders_and_lightning_s_have_it_above_or_not_at_all(tmp_path: Path) -> None:
    with start() as engine:
        step(engine)
        engine.save_checkpoint(str(tmp_path / "run" / "checkpoint-1"))
    with start() as engine:
        engine.load_checkpoint(str(tmp_path / "run" / "checkpoint-1"))
        step(engine)
        engine.save_checkpoint(str(tmp_path / "run" / "checkpoint-2"))
    assert [path.parent.name for path in tmp_path.rglob("journal-*")] == ["run"]
    assert steps(read(tmp_path / "run"))["step"] == [1, 2]
    with start() as engine:
        step(engine)
        engine.save_checkpoint(str(tmp_path / "fit" / "step=1.ckpt"))
    assert not list((tmp_path / "fit").rglob("journal-*"))
