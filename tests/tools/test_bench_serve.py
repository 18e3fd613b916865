"""The benchmarks of the service run, tiny, and give figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import journal, serve, serve_runs, weights_serve


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
        assert ("http.server" in rows) == (pattern.range_bytes is None)
        assert all(row["requests_per_s"] > 0 for row in rows.values())
    assert [path.name for path in tmp_path.iterdir()] == ["serve.json"]


def test_load_benchmark_counts_what_many_clients_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "load.json"
    clients = ["--range-clients", "3", "--downloads", "2", "--pages", "2", "--model", "none"]
    arguments = ["--load", "--seconds", "0.3", "--pace", "0.02", "--gib", "0.001", *clients, "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["serve", "--path", str(tmp_path), *arguments])
    serve.main()
    figures = json.loads(out.read_text())
    assert figures["errors"] == []
    assert figures["clients"]["ranges"]["requests"] >= 3
    assert figures["clients"]["weights"]["requests"] >= 2
    assert figures["service_peak_bytes"] > 2**20


def test_runs_benchmark_times_others_and_the_first_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "runs.json"
    sizes = ["--runs", "2", "--checkpoints", "1", "--steps", "300", "--mib", "1", "--pages", "1", "--downloads", "1"]
    monkeypatch.setattr(
        sys, "argv", ["serve_runs", "--path", str(tmp_path), *sizes, "--seconds", "0.5", "--json", str(out)]
    )
    serve_runs.main()
    figures = json.loads(out.read_text())
    assert (figures["runs"], figures["checkpoints"]) == (2, 2)
    assert all(0 < figures["p50_s"][kind] <= figures["p99_s"][kind] for kind in figures["p99_s"])
    assert 0 < figures["first_view_s"] <= figures["whole_view_s"]
    assert figures["peak_bytes"] > 2**20


def test_weights_benchmark_sets_files_made_on_the_way_beside_finished_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "weights.json"
    arguments = ["--gib", "0.016", "--rounds", "1", "--dtypes", "bf16", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["weights_serve", "--path", str(tmp_path), *arguments])
    weights_serve.main()
    figures = json.loads(out.read_text())
    assert set(figures) == {"bf16, 1 client", "bf16, 4 clients", "zstore consolidate --dtype bf16"}
    assert {"zstore", "http.server"} <= set(figures["bf16, 1 client"])
    assert all(row["gb_per_s"] > 0 for row in figures["bf16, 4 clients"].values())


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
