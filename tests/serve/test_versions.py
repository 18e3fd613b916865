"""A service in front of versions: it lists, reads and gives them as it does any other checkpoints."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import urllib3

import zstore
from tests.checkpoint.checkpoints import save_arrays
from tests.serve.conftest import Serve
from tests.waiting import until
from zstore.checkpoint.reader import tags
from zstore.remote.folder import open_folder
from zstore.remote.upload import place_of, upload_checkpoint

zarr = pytest.importorskip("zarr")
pytest.importorskip("icechunk", reason="extra versions")


def save_two(url: str, folder: Path) -> np.ndarray[Any, Any]:
    """Make two versions; return the weights that they have in common."""
    weights = np.arange(60_000, dtype=np.float32).reshape(300, 200)
    place_of(url, versions=True).repository.create()  # type: ignore[union-attr]
    for number in (1, 2):
        arrays = {"model/frozen": weights, "model/w": np.full(5000, number, np.float32)}
        arrays["optimizer/exp_avg/w"] = arrays["model/w"] + 1
        upload_checkpoint(save_arrays(folder, arrays, world_size=2, step=number), url)
    return weights


def test_versions_are_served_like_folders(tmp_path: Path, serve: Serve, http: urllib3.PoolManager) -> None:
    url = f"file://{tmp_path}/runs/one"
    weights = save_two(url, tmp_path / "local")
    base = serve(url)
    listed = http.request("GET", f"{base}/api/runs/one/checkpoints").json()["checkpoints"]
    assert [one["step"] for one in listed] == [1, 2]
    assert all(one["shared_bytes"] > weights.nbytes for one in listed)
    assert all(weights.nbytes > one["freed_bytes"] > 20_000 for one in listed)
    with zstore.open_checkpoint(f"{base}/one") as checkpoint:
        assert checkpoint.step == 2
        assert np.array_equal(checkpoint["model/frozen"][100:120], weights[100:120])
        assert np.array_equal(checkpoint["model/w"][:], np.full(5000, 2, np.float32))
    group = zarr.open_group(f"{base}/zarr/one/step-00000001", mode="r")
    assert np.array_equal(group["model/frozen"][:], weights)
    answer = http.request("GET", f"{base}/weights/one/latest/model.safetensors?dtype=fp32")
    assert (answer.status, weights.tobytes() in answer.data) == (200, True)


def test_the_service_prunes_versions_and_what_killed_saves_left(
    tmp_path: Path, serve: Serve, http: urllib3.PoolManager
) -> None:
    url = f"file://{tmp_path}/runs/one"
    weights = save_two(url, tmp_path / "local")
    packs = tmp_path / "runs/one/packs"
    left = [packs / f"{'0' * 64}-{'1' * 32}", packs / f"pieces-{'1' * 32}/pieces/a"]
    young = packs / f"{'0' * 64}-{'2' * 32}"
    for path in (*left, young):
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(b"left")
    for path in left:
        os.utime(path, (0, time.time() - 90_000))
    base = serve(f"file://{tmp_path}/runs", token="secret-of-the-tests", allow_actions=True)
    headers = {"Authorization": "Bearer secret-of-the-tests"}

    def ask(method: str, path: str, rules: Any = None) -> Any:
        answer = http.request(method, f"{base}/api/{path}", json=rules, headers=headers)
        assert answer.status < 300, answer.data
        return answer.json()

    plan = ask("POST", "runs/one/prune", {"keep_last": 1})
    job = ask("POST", "runs/one/prune", {"keep_last": 1, "plan": plan["plan"]})["job"]
    until(lambda: ask("GET", f"jobs/{job}")["state"] != "running")
    found = ask("GET", f"jobs/{job}")
    assert found["state"] == "done"
    assert "packs that killed saves left a day ago or before, now removed: 2" in found["lines"]
    assert [path.exists() for path in (*left, young)] == [False, False, True]
    assert [info.record.step for info in tags(open_folder(url))] == [2]
    with zstore.open_checkpoint(url) as checkpoint:
        assert np.array_equal(checkpoint["model/frozen"][:], weights)
