"""The benchmarks run, tiny, and give figures; their rates are not judged here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import disk, limits, step


def test_disk_benchmark_compares_every_pattern_with_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "disk.json"
    monkeypatch.setattr(limits.shutil, "which", lambda _: None)  # fio needs seconds to start its jobs
    monkeypatch.setattr(
        sys, "argv", ["disk", "--path", str(tmp_path), "--gib", "0.03", "--rounds", "1", "--json", str(out)]
    )
    disk.main()
    figures = json.loads(out.read_text())
    assert set(figures) == {"write", "read", "mixed"}
    for row in figures.values():
        assert row["percent"] == pytest.approx(100 * row["store"] / row["limit"])


def test_step_benchmark_counts_the_bytes_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "step.json"
    monkeypatch.setattr(limits.shutil, "which", lambda _: None)
    arguments = ["--model", "gpt-tiny", "--steps", "2", "--tokens", "16", "--gib", "0.03"]
    monkeypatch.setattr(sys, "argv", ["step", "--path", str(tmp_path), *arguments, "--json", str(out)])
    step.main()
    figures = json.loads(out.read_text())
    # Master and two moments, read and written; small parameters rest in memory, padding and checksums add to the others.
    assert 20 < figures["bytes_per_parameter"] < 27
    assert 0 < figures["save_new_blocks_percent"] < 25  # of a tiny model, the small parameters are much
