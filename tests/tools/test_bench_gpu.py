"""What `make gpu` records of a run, and how it ends one: the figures of the docs, processes that hang, rows that failed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from bench import gpu
from bench.children import run_group
from bench.gpu_parts import FAULTS


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
