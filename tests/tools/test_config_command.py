"""`zstore config`: what it says of each key; `zstore doctor`: what it says, against what the system's own tools say."""

import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.commands import run
from zstore.engine.config.config import load_config
from zstore.engine.plan.run import native_types
from zstore.tools import doctor
from zstore.tools.config import config_command
from zstore.tools.doctor import BLOCK_BYTES, Diagnosis, doctor_command, examine, examine_folder

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.json"))


def told(capsys: pytest.CaptureFixture[str], path: Path, code: int, **options: Any) -> dict[str, Any]:
    assert config_command(path, json=True, **options) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["sound"] == (code == 0)
    return found


def write(tmp_path: Path, config: dict[str, Any]) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_of_a_common_config_is_explained(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, path, 0, hidden_size=64)
    statuses = {fact["key"]: fact["status"] for fact in found["keys"]}
    assert all(fact["text"] for fact in found["keys"])
    for notice in load_config(path).notices:
        if ":" in notice.message and notice.key in statuses:
            assert statuses[notice.key] == notice.message.partition(":")[0]
    assert {key for key, value in found["resolved"].items() if value == "auto"} == set()


def test_what_a_key_becomes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path,
        {
            "train_batch_size": 8, "bfloat16": {"enabled": True}, "gradient_clipping": None,
            "zero_optimization": {"stage": 1, "cpu_offload": True, "sub_group_size": 5, "round_robin_gradients": False},
            "prescale_gradients": True, "amp": {"enabled": False}, "fp16": {"enabled": False, "loss_scale": 4},
            "autotuning": {"enabled": True},
            "zstore": {"storage_options": {"key": "secret"}, "keep": {"last": 2}, "upload_folder": "/up"},
        },
    )  # fmt: skip
    found = told(capsys, path, 0, world_size=4)
    facts = {fact["key"]: fact for fact in found["keys"]}
    assert {key: fact["status"] for key, fact in facts.items()} == {
        "train_batch_size": "active", "bfloat16.enabled": "active", "zero_optimization.stage": "active",
        "zero_optimization.offload_optimizer.device": "active", "zstore.keep": "active",
        "zero_optimization.sub_group_size": "no effect", "zero_optimization.round_robin_gradients": "no effect",
        "prescale_gradients": "not implemented", "amp": "no effect", "fp16.enabled": "active", "fp16.loss_scale": "no effect",
        "autotuning": "no effect", "zstore.storage_options": "active", "zstore.upload_folder": "active",
    }  # fmt: skip
    assert facts["fp16.loss_scale"]["text"] == "enabled turns the section off"
    assert (facts["zstore.keep"]["value"], facts["zstore.upload_folder"]["value"]) == ('{"last": 2}', '"/up"')
    assert "secret" not in json.dumps(found)
    assert found["resolved"]["train_micro_batch_size_per_gpu"] == 2
    assert found["resolved"]["precision"] == "bf16"


def test_all_problems_come_at_once_with_the_right_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path, {"train_batch": 8, "optimizer": {"type": "Adam", "params": {"lrr": 1}}, "pipeline": {"x": 1}}
    )
    found = told(capsys, path, 1)
    assert {fact["key"]: fact["status"] for fact in found["keys"]} == {
        "train_batch": "error", "optimizer.type": "active", "optimizer.params.lrr": "error", "pipeline": "refused",
    }  # fmt: skip
    assert len(found["problems"]) == 3
    assert any("did you mean optimizer.params.lr?" in problem for problem in found["problems"])
    path = write(tmp_path, {"train_batch_size": 6})
    assert "6 is not a multiple" in told(capsys, path, 1, world_size=4)["problems"][0]


def test_what_only_a_script_knows_is_left_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_max_lr": "auto"}}
    path = write(tmp_path, {"train_micro_batch_size_per_gpu": "auto", "scheduler": schedule})
    found = told(capsys, path, 0)
    assert found["open"] == [
        "gradient_accumulation_steps", "scheduler.params.total_num_steps", "train_batch_size",
        "train_micro_batch_size_per_gpu",
    ]  # fmt: skip
    assert set(found["open"]) & set(found["resolved"]) == set()


def test_the_command(tmp_path: Path) -> None:
    path = write(tmp_path, {"train_batch_size": 8, "seeds": 1})
    done = run("config", str(path))
    assert done.returncode == 1
    assert "2 keys: 1 error, 1 active" in done.stdout
    assert "problem: seeds: unknown key; did you mean seed?" in done.stderr


TINY = 2 * BLOCK_BYTES

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Diagnosis:
    monkeypatch.setattr(doctor, "RATE_BYTES", TINY)
    return examine(tmp_path, rate_bytes=TINY)


def test_a_good_folder_has_no_fault_and_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    folder = examine_folder(tmp_path, TINY)
    assert folder.fault is None
    assert folder.hard_links is True
    assert folder.free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.01)
    for rate in (folder.read_bytes_per_s, folder.write_bytes_per_s):
        assert 1e5 < rate < 1e12
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]
    assert examine_folder(tmp_path, BLOCK_BYTES - 1).read_bytes_per_s is None


@linux
def test_memory_and_devices_are_the_systems(report: Diagnosis) -> None:
    cpu, total_bytes = report.devices[0], os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert cpu.memory_bytes == total_bytes
    assert report.available_bytes is not None
    assert 0 < report.available_bytes <= total_bytes
    assert cpu.name.endswith(f", {len(os.sched_getaffinity(0))} cores")
    assert set(cpu.native) == native_types(torch.device("cpu"))
    assert report.huge_pages in {"always", "madvise", "never", None}


@linux
def test_a_folder_that_cannot_be_written_is_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor_command(Path("/proc"), json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["folder"]["direct_io"] is None
    assert "/proc cannot be written" in found["fault"]
    assert doctor_command(Path("/proc")) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("- /proc cannot be written: check its permissions")


def test_json_and_text_are_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], report: Diagnosis) -> None:
    assert doctor_command(tmp_path, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == asdict(report).keys() | {"fault", "advice"}
    assert f"torch {torch.__version__}" in found["system"]
    assert doctor_command(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    for word in ("system", "device", "memory", "huge pages", "folder", "direct I/O", "hard links", "drive"):
        assert any(line.startswith(word) for line in lines)
    assert "what to do:" in lines
    assert ": zstore plan --model gpt-base --gpus " in lines[-1]


@pytest.mark.cuda
def test_a_gpu_is_listed(report: Diagnosis) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    gpus = report.devices[1:]
    assert len(gpus) == torch.cuda.device_count()
    assert gpus[0].name == torch.cuda.get_device_name(0)
