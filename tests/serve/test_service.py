"""The service: what it serves, and to whom."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import urllib3

from tests.checkpoint.checkpoints import save_arrays
from tests.serve.conftest import Serve


def test_the_service_lists_its_runs(tmp_path: Path, serve: Serve, http: urllib3.PoolManager) -> None:
    save_arrays(tmp_path / "runs" / "one", {"model/a": np.arange(8.0)})
    base = serve(tmp_path / "runs")
    assert http.request("GET", f"{base}/api").json()["service"] == "zstore"
    assert [run["name"] for run in http.request("GET", f"{base}/api/runs").json()["runs"]] == ["one"]
