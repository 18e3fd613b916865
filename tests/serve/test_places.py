"""What a service makes of the places that it is given: links that lead out of them, folders that are missing, odd URLs."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import urllib3

import zstore
from tests.checkpoint.checkpoints import save_arrays
from tests.serve.conftest import Serve
from zstore.errors import UsageError
from zstore.tools.serve import serve_command

ARRAYS = {"model/a": np.arange(8.0)}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    save_arrays(tmp_path / "runs" / "one", ARRAYS)
    shutil.copytree(tmp_path / "runs/one", tmp_path / "outside/secret")
    return tmp_path / "runs"


def test_links_that_lead_out_and_names_that_no_url_has_are_no_runs(
    runs: Path, serve: Serve, http: urllib3.PoolManager
) -> None:
    (runs / "out").symlink_to(runs.parent / "outside/secret")
    (runs / "newest").symlink_to("one")
    (runs / "empty").symlink_to(runs.parent / "outside")
    base = serve(runs, token="secret-of-the-tests")
    token = {"Authorization": "Bearer secret-of-the-tests"}
    listed = http.request("GET", f"{base}/api/runs", headers=token).json()["runs"]
    assert [run["name"] for run in listed] == ["newest", "one"]
    for path in ("zarr/out/", "zarr/out/latest/zarr.json", "weights/out/latest/", "api/runs/out/checkpoints"):
        assert http.request("GET", f"{base}/{path}", headers=token).status == 404, path
    for name in ("out", "empty"):
        answer = http.request("GET", f"{base}/api/uploads?run={name}", headers=token)
        assert (answer.status, "a link in the folder of runs" in answer.json()["error"]) == (400, True)


def test_a_checkpoint_that_a_link_replaces_is_not_followed(runs: Path, serve: Serve, http: urllib3.PoolManager) -> None:
    (runs / "one/alias").symlink_to("step-00000001")
    base = serve(runs)
    for name in ("alias", "step-00000001"):
        assert http.request("GET", f"{base}/zarr/one/{name}/zarr.json").status == 200
    (runs / "one/out").symlink_to(runs.parent / "outside/secret/step-00000001")
    (runs / "one/step-00000001/secret.json").symlink_to(runs.parent / "outside/secret/step-00000001/zarr.json")
    for path in ("out/zarr.json", "out/", "step-00000001/secret.json"):
        assert http.request("GET", f"{base}/zarr/one/{path}").status == 404, path
    shutil.rmtree(runs / "one/step-00000001")
    (runs / "one/step-00000001").symlink_to(runs.parent / "outside/secret/step-00000001")
    for name in ("alias", "step-00000001", "latest"):
        assert http.request("GET", f"{base}/zarr/one/{name}/zarr.json").status == 404, name


def test_https_to_a_service_without_a_certificate_says_so(runs: Path, serve: Serve) -> None:
    url = serve(runs).replace("http://", "https://")
    with pytest.raises(UsageError, match=r"does not speak TLS.*write http://"):
        zstore.open_checkpoint(f"{url}/one")


def test_a_folder_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="cannot listen"):
        serve_command([str(tmp_path), f"{tmp_path}/rusn"], port=taken.getsockname()[1])
    assert (
        capsys.readouterr().err == f"warning: there is no folder {tmp_path}/rusn: what is made there later is served\n"
    )
