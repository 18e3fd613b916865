"""A service in front of versions: it lists, reads and gives them as it does any other checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import urllib3

import zstore
from tests.checkpoint.checkpoints import save_arrays
from tests.serve.conftest import Serve
from zstore.remote.upload import place_of, upload_checkpoint

zarr = pytest.importorskip("zarr")
pytest.importorskip("icechunk", reason="extra versions")


def test_versions_are_served_like_folders(tmp_path: Path, serve: Serve, http: urllib3.PoolManager) -> None:
    url = f"file://{tmp_path}/runs/one"
    weights = np.arange(60_000, dtype=np.float32).reshape(300, 200)
    place_of(url, versions=True).repository.create()  # type: ignore[union-attr]
    for number in (1, 2):
        arrays = {"model/frozen": weights, "model/w": np.full(5000, number, np.float32)}
        arrays["optimizer/exp_avg/w"] = arrays["model/w"] + 1
        upload_checkpoint(save_arrays(tmp_path / "local", arrays, world_size=2, step=number), url)
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
