"""What `zstore doctor` says, against what the system's own tools say."""

import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from zstore.engine.plan.run import native_types
from zstore.tools import doctor
from zstore.tools.doctor import BLOCK_BYTES, Diagnosis, doctor_command, examine, examine_folder

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
        assert rate is not None
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


def test_json_and_text_are_the_report_and_end_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], report: Diagnosis
) -> None:
    assert doctor_command(tmp_path, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == asdict(report).keys() | {"fault", "advice"}
    assert f"torch {torch.__version__}" in found["system"]
    assert doctor_command(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    for word in ("system", "device", "memory", "huge pages", "folder", "direct I/O", "hard links", "drive"):
        assert any(line.startswith(word) for line in lines)
    assert lines[-1].startswith("- see which config fits here: zstore plan --model M --gpus ")


@pytest.mark.cuda
def test_a_gpu_is_listed(report: Diagnosis) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    gpus = report.devices[1:]
    assert len(gpus) == torch.cuda.device_count()
    assert gpus[0].name == torch.cuda.get_device_name(0)
