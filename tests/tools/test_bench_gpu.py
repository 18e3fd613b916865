"""`make gpu` on the CPU, small: every part gives figures, each is kept, and what fails stops no other."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bench import checkpoint, children, gpu, limits, waits
from bench.children import run_group
from bench.gpu_parts import FAULTS, ORDER, Part, Run, lines_of
from tests.tools.commands import run_here

*NAMES, _ = ORDER


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Return the exit status."""
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture(autouse=True)
def no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the signals to pytest."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)


# Each benchmark has its own small run in `make test`.
@pytest.mark.soak
# In this process; in one of its own it is a line of what it says.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_every_part_runs_small_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.shutil, "which", lambda _: None)
    monkeypatch.setattr(children, "run_child", run_here)
    monkeypatch.setattr(checkpoint, "run_child", run_here)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def launch(run: Run, folder: Path, limit_s: float) -> str | None:
        """In this process, without the seconds that one takes to start; tests need one of their own."""
        if run.module == "pytest":
            return in_a_process(run, folder, limit_s)
        monkeypatch.setattr(sys, "argv", [run.module, *gpu.arguments_of(run, folder)])
        import_module(run.module).main()
        return None

    in_a_process = gpu.launch
    monkeypatch.setattr(gpu, "launch", launch)
    (tmp_path / "drive").mkdir()
    status = call(monkeypatch, "--tiny", "--path", str(tmp_path / "drive"), "--out", str(tmp_path / "out"))
    assert status == 0, (tmp_path / "out" / "gpu.md").read_text()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gpu.json", "gpu.md", "traces.zip"]
    assert list((tmp_path / "drive").iterdir()) == []

    parts = json.loads((tmp_path / "out" / "gpu.json").read_text())["parts"]
    assert [(part["name"], part["status"]) for part in parts] == [(name, "passed") for name in NAMES]
    figures = {part["name"]: {run["label"]: run["figures"] for run in part["runs"]} for part in parts}
    assert figures["ceilings"]["links"]["rates"]["disk read"] > 0
    assert [row["mode"] for row in figures["waits"]["waits"]["rows"]] == list(waits.MODES)
    for tier in ("none", "cpu", "nvme"):
        found = figures["speed"][tier]
        assert ("times_plain" in found, "percent" in found) == (tier != "nvme", tier == "nvme")
    for label, beside in (("1.2b, cpu, 1024 tokens", ["compute", "FSDP2"]), ("1.2b, nvme, 1024 tokens", [])):
        rows = (figures["speed"] | figures["fits"])[label]["models"][0]["rows"]
        assert [row["contender"] for row in rows] == [*beside, "zstore"]
        # torch's own optimizer and sharding take the same steps.
        for row in rows[1:]:
            assert row["losses"] == pytest.approx(rows[1]["losses"], rel=1e-3)
    saved = {(row["who"], row["what"]) for row in figures["checkpoint"]["checkpoint"]["rows"]}
    for who in ("zstore, from memory", "zstore, from the device", "DCP 4 threads"):
        assert {(who, "save"), (who, "load")} <= saved
    text = (tmp_path / "out" / "gpu.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == [f"## {part['title']}" for part in parts]
    # Every time stands beside the least that it could be, or a rate beside the limit.
    for run in (run for part in parts[1:] for run in part["runs"]):
        for line in lines_of(run["module"], run["figures"]):
            if re.search(r"\d m?s\b", line):
                assert "machine allows" in line or "% of " in line or "rate of its memory" in line, line


def canned(label: str, name: str | None = None, **keys: Any) -> Part:
    run = Run(label=label, module="bench.overhead", arguments=(), out="out.json", **keys)
    return Part(name=name or label, title=label.title(), limit_s=60, runs=(run,))


class Launches:
    """Stands in for processes: notes what was to run, and does what `fails` says of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *parts: Part) -> None:
        self.ran: list[str] = []
        self.fails: dict[str, Callable[[], str]] = {}
        self._call = lambda *more: call(monkeypatch, "--tiny", "--out", str(tmp_path), *more)
        self._path = tmp_path / "gpu.json"
        monkeypatch.setattr(gpu, "make_parts", lambda _: list(parts))
        monkeypatch.setattr(gpu, "launch", self._launch)

    def _launch(self, run: Run, folder: Path, limit_s: float) -> str | None:
        self.ran.append(run.label)
        (folder / run.out).write_text(json.dumps({"rows": []}))
        return self.fails[run.label]() if run.label in self.fails else None

    def __call__(self, *arguments: str) -> tuple[int, list[str]]:
        """Return the exit status and what ran."""
        self.ran = []
        return self._call(*arguments), self.ran

    @property
    def recorded(self) -> dict[str, str]:
        return {part["name"]: part["status"] for part in json.loads(self._path.read_text())["parts"]}


def test_a_part_that_fails_is_recorded_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launches = Launches(
        monkeypatch, tmp_path, canned("one"), canned("two"), canned("peer", is_peer=True), canned("three")
    )
    launches.fails = {"two": lambda: "exit status 1: out of\nwords", "peer": lambda: "exit status 1: theirs"}
    assert launches() == (1, ["one", "two", "peer", "three"])
    assert launches.recorded == {"one": "passed", "two": "failed", "peer": "passed", "three": "passed"}
    assert "```\nexit status 1: out of\nwords\n```" in (tmp_path / "gpu.md").read_text()
    assert "exit status 1: theirs" in (tmp_path / "gpu.md").read_text()
    # The next run goes on with what is missing.
    launches.fails = {}
    assert launches() == (0, ["two"])
    assert set(launches.recorded.values()) == {"passed"}
    assert launches("--only", "three,one") == (0, [])
    assert launches("--only", "three,one", "--redo") == (0, ["one", "three"])
    assert list(launches.recorded) == ["one", "two", "peer", "three"]
    assert launches("--only", "four") == (2, [])
    assert "--only: expected some of one, two, peer, three, got four" in capsys.readouterr().err


def test_a_run_that_is_cut_off_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told_to_end() -> str:
        raise SystemExit(143)

    launches = Launches(monkeypatch, tmp_path, canned("one"), canned("two"), canned("three"))
    launches.fails = {"two": told_to_end}
    assert launches() == (143, ["one", "two"])
    assert launches.recorded == {"one": "passed", "two": "cut off"}
    (run,) = json.loads((tmp_path / "gpu.json").read_text())["parts"][1]["runs"]
    assert (run["figures"], run["error"]) == ({"rows": []}, "cut off")
    launches.fails = {}
    assert launches() == (0, ["two", "three"])


def test_the_docs_count_the_tests_that_passed_on_a_device() -> None:
    root = Path(gpu.__file__).parent.parent
    (runs,) = [
        part["runs"] for part in gpu.Record(root / "bench" / "results").parts.values() if part["name"] == "ceilings"
    ]
    found = {run["label"]: run["figures"] for run in runs}
    rows = [line for line in (root / "docs" / "devices.md").read_text().splitlines() if "on an H200" in line]
    for label, name in (("cuda", "CUDA, one device"), ("late copies", "CUDA, one device"), ("nccl", "NCCL, one rank")):
        (row,) = [row for row in rows if name in row]
        passed, tests = map(int, re.search(r"(\d+) of (\d+)", row).groups())  # type: ignore[union-attr]
        figures = found[label]
        # Those that need a second device are a row of their own.
        assert (passed, tests) == (figures["passed"], figures["tests"] - sum(figures["skipped"].values()))


def test_a_process_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script = "sleep 1000 & echo begun; wait"  # what it started has its output, too, so that nobody else ends that
    assert run_group(["sh", "-c", script], 0.5, os.environ, folder=tmp_path) == "not done within 0.5 s: begun"
    assert run_group(["sh", "-c", "echo words; exit 3"], 60, os.environ) == "exit status 3: words"
    assert run_group(["true"], 60, os.environ) is None


def test_a_row_of_ours_that_failed_is_a_fault_and_a_peers_is_none() -> None:
    def figures(*rows: tuple[str, str | None]) -> dict[str, Any]:
        return {"models": [{"rows": [{"contender": who, "error": error} for who, error in rows]}]}

    faults = FAULTS["bench.offload"]
    assert faults(figures(("deepspeed", "no compiler"), ("zstore", None))) == []
    assert faults(figures(("zstore", "no room"))) == ["zstore: no room"]
    assert faults(figures(("compute", None))) == ["zstore was not reached"]
    rows = [
        {"who": "DCP async", "what": "save", "error": "x"},
        {"who": "zstore, from disk", "what": "load", "error": "y"},
    ]
    assert FAULTS["bench.checkpoint"]({"rows": rows}) == ["zstore, from disk, load: y"]
