"""Monitors: the metrics that they get, and that they keep them."""

import csv
import json
import math
import os
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm
from tests.engine.models import batch
from tests.engine.runs import make_config, start, step
from zstore.engine.report.monitors import CsvMonitor, Monitors
from zstore.errors import ConfigError, RankError
from zstore.testing.ranks import run_ranks

NAMES = {"train_loss", "lr", "grad_norm", *(f"elapsed_time_ms_{phase}" for phase in ("forward", "backward", "step"))}


def csv_config(folder: Path, **keys: Any) -> dict[str, Any]:
    return make_config(csv_monitor={"enabled": True, "output_path": str(folder), "job_name": "job"}, **keys)


def columns(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = {}
    for path in folder.glob("*.csv"):
        with path.open(newline="") as file:
            header, *rows = csv.reader(file)
        name = path.stem.removeprefix("Train_Samples_")
        assert header == ["step", name]
        found[name] = [(int(samples), float(value)) for samples, value in rows]
    return found


def test_a_csv_file_for_each_metric(tmp_path: Path) -> None:
    losses, norms, rates = [], [], []
    with start(csv_config(tmp_path / "metrics")) as engine:
        for _ in range(3):
            micro_losses = []
            for micro in range(2):
                loss = engine(*batch(engine.global_steps, micro, 0))
                micro_losses.append(loss.detach().float())
                engine.backward(loss)
                engine.step()
            losses.append(float(sum(micro_losses) / 2))
            norms.append(engine.get_global_grad_norm())
            rates.append(engine.get_lr()[0])
        # Before the end, as a killed run would leave it.
        found, done = columns(tmp_path / "metrics" / "job"), engine.statistics()
    assert set(found) == NAMES
    # 2 samples, 2 micro-batches.
    assert all([samples for samples, _ in rows] == [4, 8, 12] for rows in found.values())
    assert [value for _, value in found["train_loss"]] == pytest.approx(losses, rel=1e-6)
    assert [value for _, value in found["grad_norm"]] == norms
    assert [value for _, value in found["lr"]] == rates
    for phase, seconds in (("forward", done.forward_s), ("backward", done.backward_s), ("step", done.optimizer_s)):
        assert sum(value for _, value in found[f"elapsed_time_ms_{phase}"]) == pytest.approx(1e3 * seconds)
    assert columns(tmp_path / "metrics" / "job") == found


def test_the_loss_scale_of_fp16_and_a_skipped_step(tmp_path: Path) -> None:
    with start(
        csv_config(tmp_path, bf16={"enabled": False}, fp16={"enabled": True, "initial_scale_power": 4})
    ) as engine:
        step(engine)
        step(engine, factor=math.inf)
        step(engine, factor=math.inf)
        found = columns(tmp_path / "job")
    assert set(found) == NAMES | {"loss_scale"}
    # The first overflow is forgiven.
    assert found["loss_scale"] == [(4, 16.0), (8, 16.0), (12, 8.0)]
    assert math.isnan(found["grad_norm"][1][1]) or math.isinf(found["grad_norm"][1][1])


def test_the_value_of_the_loss_is_taken_once_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    real = torch.Tensor.__float__

    def counting(self: torch.Tensor) -> float:
        taken.append(self)
        return real(self)

    def takes(**keys: Any) -> int:
        with start(make_config(**keys)) as engine:
            monkeypatch.setattr(torch.Tensor, "__float__", counting)
            taken.clear()
            step(engine)
            step(engine)
            monkeypatch.setattr(torch.Tensor, "__float__", real)
        return len(taken)

    silent = takes(zstore={"journal": False})
    assert takes() == silent + 2
    assert takes(csv_monitor={"enabled": True, "output_path": str(tmp_path)}) == silent + 2
    assert takes(csv_monitor={"enabled": True, "output_path": str(tmp_path)}, steps_per_print=1) == silent + 2


def test_a_full_disk_warns_once_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "job").mkdir()
    full = tmp_path / "job" / "Train_Samples_lr.csv"
    full.symlink_to("/dev/full")
    with start(csv_config(tmp_path)) as engine:
        step(engine)
        step(engine)
        full.unlink()
        step(engine)
        assert engine.global_steps == 3
        found = columns(tmp_path / "job")
    (warning,) = [r.getMessage() for r in caplog.records if not r.getMessage().startswith("config: ")]
    assert warning.startswith("CsvMonitor failed, and metrics may be missing from now on; training continues: OSError:")
    # The other metrics are whole, and this one is tried again.
    assert [samples for samples, _ in found["train_loss"]] == [4, 8, 12]
    assert [samples for samples, _ in found["lr"]] == [12]


class Broken:
    def write(self, values: Mapping[str, float], samples: int) -> None:
        raise RuntimeError("no writer")

    def close(self) -> None:
        raise RuntimeError("no end")


def test_a_broken_monitor_keeps_nothing_from_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitors = Monitors([Broken(), CsvMonitor(tmp_path)])
    monitors.write({"a/b": 1.0}, 1)
    monitors.write({"a/b": 2.0}, 2)
    monitors.close()
    monitors.close()
    CsvMonitor(tmp_path).write({"a/b": 3.0}, 3)  # a resumed run
    assert (tmp_path / "a_b.csv").read_text().split() == ["step,b", "1,1.0", "2,2.0", "3,3.0"]
    assert [one.getMessage().rpartition("continues: ")[2] for one in caplog.records] == ["RuntimeError: no writer"]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    keys = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    with start(make_config(tensorboard=keys, csv_monitor=keys)) as engine:
        step(engine)
        step(engine)
        # Before the end, as a killed run would leave it.
        events = EventAccumulator(str(tmp_path / "job"))
        events.Reload()
        expected = columns(tmp_path / "job")
    found = {
        tag.removeprefix("Train/Samples/"): [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    assert set(found) == NAMES
    for name, rows in expected.items():
        assert [samples for samples, _ in found[name]] == [4, 8]
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in rows])


def offline_history(folder: Path) -> list[dict[str, float]]:
    """The history rows of the one offline run under `folder`: protobuf records in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, position, pending, rows = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        _, size, kind = struct.unpack_from("<IHB", data, position)
        if kind == 0 or 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        pending += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record, pending = Record.FromString(pending), b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


WANDB_RUN = """
import sys
from tests.engine.runs import make_config, start, step
import wandb
who = sys.argv[1]
if who == "own":
    run = wandb.init(project="mine")
    run.log({"theirs": 1.0})
wandb_keys = {"enabled": True, "project": "p", "group": "g", "team": "t"}
csv_keys = {"enabled": True, "output_path": "metrics", "job_name": "job"}
engine = start(make_config(wandb=wandb_keys, csv_monitor=csv_keys))
step(engine)
step(engine)
print(wandb.run.entity, wandb.run.project, wandb.run.group, wandb.run.config.get("bf16", {}).get("enabled"))
if who != "unclosed":
    engine.close()
print("open", wandb.run is not None)
if who == "own":
    run.log({"theirs": 2.0})
    run.finish()
"""


@pytest.mark.parametrize(
    "who", ["ours", pytest.param("own", marks=pytest.mark.soak), pytest.param("unclosed", marks=pytest.mark.soak)]
)
def test_wandb_offline(who: str, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path]))}
    command = [sys.executable, "-c", WANDB_RUN, who]
    done = warm.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    named = " mine  None" if who == "own" else "t p g True"
    assert named in done.stdout
    assert f"open {who != 'ours'}" in done.stdout
    rows = offline_history(tmp_path)
    ours = [row for row in rows if "Train/samples" in row]
    assert [row["Train/samples"] for row in ours] == [4, 8]
    for name, expected in columns(tmp_path / "metrics" / "job").items():
        found = [row[f"Train/Samples/{name}"] for row in ours]
        assert found == pytest.approx([value for _, value in expected])
    assert [row["theirs"] for row in rows if "theirs" in row] == ([1.0, 2.0] if who == "own" else [])


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_package(name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"{name}\.enabled is true, but .* pip install 'zstore\[{name}\]'"):
        start(make_config(**{name: {"enabled": True}}))


def _on_ranks(rank: int, folder: str) -> tuple[bool, str]:
    with start(csv_config(Path(folder) / "good")) as engine:
        step(engine)
        has_monitors = bool(engine.report.monitors)
    try:
        start(csv_config(Path(folder) / "bad"))
    except (ConfigError, RankError) as error:
        found = "csv_monitor: the monitor cannot be opened: FileExistsError" in str(error)
        return has_monitors, type(error).__name__ if found else str(error)
    return has_monitors, "no error"


def test_rank_0_alone_writes_and_its_error_reaches_all(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "job").write_text("a file")
    assert run_ranks(_on_ranks, 2, str(tmp_path)) == [(True, "ConfigError"), (False, "RankError")]
    assert [samples for samples, _ in columns(tmp_path / "good" / "job")["train_loss"]] == [8]
