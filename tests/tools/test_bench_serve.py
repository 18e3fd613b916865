"""The benchmarks of the service run, tiny, and give figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import serve


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
