"""What `zstore doctor` says, against what the system's own tools say."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from zstore.engine.plan.rates import measure_rates
from zstore.errors import ConfigError
from zstore.tools import doctor
from zstore.tools.doctor import Diagnosis, doctor_command, examine
from zstore.tools.drive import BLOCK_BYTES, file_system_of, measure_drive, probe_folder

TINY = 2 * BLOCK_BYTES

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def report(tmp_path: Path) -> Diagnosis:
    return examine(tmp_path, rate_bytes=TINY)


def test_a_good_folder_has_no_faults_and_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    report = examine(tmp_path, rate_bytes=TINY)
    assert report.faults == ()
    assert report.folder.writable
    assert report.folder.hard_links is True
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_the_rates_are_of_bytes_that_were_moved(report: Diagnosis) -> None:
    assert report.drive is not None
    assert report.drive.file_bytes == TINY
    for rate in (report.drive.read_bytes_per_s, report.drive.write_bytes_per_s, report.drive.write_new_bytes_per_s):
        assert 1e5 < rate < 1e12


def test_no_room_for_a_block_gives_no_rate(tmp_path: Path) -> None:
    assert measure_drive(tmp_path, BLOCK_BYTES - 1) is None


@linux
@pytest.mark.parametrize("path", ["/", "/proc", "/dev/shm", "/dev"])
def test_the_file_system_is_the_one_that_df_names(path: str) -> None:
    listed = subprocess.run(["df", "--output=fstype", path], capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"df does not know {path}")
    assert file_system_of(Path(path)) == listed.stdout.split()[-1]


@linux
def test_memory_and_cores_are_the_systems(report: Diagnosis) -> None:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    assert report.memory.total_bytes == pages * page_bytes
    assert report.memory.available_bytes is not None
    assert 0 < report.memory.available_bytes <= report.memory.total_bytes
    assert report.memory.transparent_huge_pages in {"always", "madvise", "never", None}
    if report.memory.transparent_huge_pages == "never":
        assert report.memory.huge_pages is False
    assert report.devices[0].num_cores == len(os.sched_getaffinity(0))


def test_free_space_is_the_folders(tmp_path: Path) -> None:
    assert probe_folder(tmp_path).free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.01)


@linux
def test_a_folder_that_cannot_be_written_is_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor_command(Path("/proc"), json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["folder"]["direct_io"] is None
    assert found["drive"] is None
    assert "/proc cannot be written" in found["faults"][0]


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected an existing folder"):
        probe_folder(tmp_path / "missing")


def test_json_is_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, report: Diagnosis
) -> None:
    monkeypatch.setattr(doctor, "RATE_BYTES", TINY)
    assert doctor_command(tmp_path, json=True) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out).keys() == asdict(report).keys()
    assert json.loads(printed.out)["versions"]["torch"] == report.versions["torch"]
    rates = measure_rates(torch.device("cpu"))
    assert json.loads(printed.out)["devices"][0]["matmul_flops"] == rates.flops
    assert json.loads(printed.out)["devices"][0]["native"] == sorted(rates.native)


def test_the_table_names_all_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "RATE_BYTES", TINY)
    monkeypatch.setenv("COLUMNS", "200")
    assert doctor_command(tmp_path, json=False) == 0
    out = capsys.readouterr().out
    for word in (
        "system",
        "versions",
        "cpu",
        "memory",
        "huge pages",
        "file system",
        "direct I/O",
        "hard links",
        "preallocation",
    ):
        assert word in out
    assert "GB/s" in out
    assert re.search(r"matrix products +GFLOP/s a core: fp32 [\d.]+, bf16 [\d.]+, fp16 [\d.]+ *$", out, re.MULTILINE)


@pytest.mark.cuda
def test_a_gpu_is_listed_and_pins_our_buffers(report: Diagnosis) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    gpus = [device for device in report.devices if device.kind == "cuda"]
    assert len(gpus) == torch.cuda.device_count()
    assert gpus[0].name == torch.cuda.get_device_name(0)
    assert gpus[0].pinning is True
