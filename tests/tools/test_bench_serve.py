"""The benchmarks of the service run, tiny, and give figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import journal, serve


def test_serve_benchmark_sets_the_service_beside_other_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "serve.json"
    arguments = ["--gib", "0.001", "--rounds", "1", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["serve", "--path", str(tmp_path), *arguments])
    serve.main()
    figures = json.loads(out.read_text())
    assert set(figures) == {pattern.name for pattern in serve.PATTERNS}
    for pattern in serve.PATTERNS:
        rows = figures[pattern.name]
        assert rows["zstore"]["ratio"] == 1
        assert all(row["requests_per_s"] > 0 for row in rows.values())
    assert [path.name for path in tmp_path.iterdir()] == ["serve.json"]


def test_journal_benchmark_counts_what_a_step_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "journal.json"
    arguments = ["--steps", "2", "--batch", "1", "--tokens", "8", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["journal", "--path", str(tmp_path), *arguments])
    journal.main()
    figures = json.loads(out.read_text())
    assert 0 < figures["inside_us"] < 1e6 * figures["step_s"]
    assert figures["behind_us"] >= 0  # so few steps may end before its thread wakes
    assert 100 < figures["bytes_per_step"] < 10_000
    assert [path.name for path in tmp_path.iterdir()] == ["journal.json"]
