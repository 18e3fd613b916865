"""Versions in Azure's blob storage, on azurite (`npm install azurite`, in PATH), a server of its protocol."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.checkpoints import save_arrays
from tests.waiting import until
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.retention import Keep
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CheckpointError
from zstore.io.pool import Workers
from zstore.remote.folder import open_folder
from zstore.remote.retries import Retries
from zstore.remote.upload import place_of, target_for, upload_checkpoint
from zstore.remote.versions import VersionsFolder

icechunk = pytest.importorskip("icechunk", reason="extra versions")
zarr = pytest.importorskip("zarr")
pytest.importorskip("adlfs", reason="pip install adlfs")
AZURITE = shutil.which("azurite-blob")
pytestmark = pytest.mark.skipif(AZURITE is None, reason="npm install azurite")
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, which its documentation names."""
URL = "abfs://container/run"


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [str(AZURITE), "--silent", "--disableTelemetry", "--inMemoryPersistence", "--skipApiVersionCheck"]
    words += ["--blobHost", "127.0.0.1", "--blobPort", str(port)]

    def answers() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return process.poll() is not None
        return True

    with subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd=tmp_path) as process:
        try:
            until(answers)
            yield f"http://127.0.0.1:{port}/{ACCOUNT}"
        finally:
            process.kill()


@pytest.fixture
def options(endpoint: str) -> dict[str, Any]:
    parts = {"DefaultEndpointsProtocol": "http", "AccountName": ACCOUNT, "AccountKey": KEY, "BlobEndpoint": endpoint}
    found = {"connection_string": "".join(f"{name}={value};" for name, value in parts.items())}
    open_folder(URL, found).fs.mkdir("container")  # type: ignore[attr-defined]
    return found


def test_versions_in_azure(endpoint: str, options: dict[str, Any], tmp_path: Path) -> None:
    frozen = np.arange(60_000, dtype=np.float32)
    paths = []
    for number in (1, 2, 3):
        arrays = {"model/frozen": frozen, "model/w": np.full(500, number, np.float32)}
        arrays["optimizer/exp_avg/w"] = arrays["model/w"]
        paths.append(save_arrays(tmp_path / "local", arrays, world_size=2, step=number, run_id="run"))
        upload_checkpoint(paths[-1], URL, options, versions=True)
    folder = open_folder(URL, options)
    assert isinstance(folder, VersionsFolder)
    first, second, _ = (version.packs for version in folder.all().values())
    assert sum(nbytes for pack, nbytes in second.items() if pack not in first) < frozen.nbytes / 2
    # Of two that commit at a time one is told.
    targets = []
    for number in (4, 5):
        with open_checkpoint(save_arrays(tmp_path / "two", arrays, step=number, run_id="run")) as reader:
            target = target_for(
                place_of(URL, options), Retries(), tag=reader.tag, save_id=reader.record.id, run_id="run"
            )
            target.begin(overwrite=False, keep=Keep(last=2))
            targets.append((target, reader.path))
    with Workers(2, "test") as workers:
        for (target, path), told in zip(targets, (None, "another save was committed to"), strict=True):
            with open_checkpoint(path) as reader:
                target.send(workers, reader, [0], lambda _: None)
                if told is None:
                    assert target.commit(reader) == []
                    assert target.retire() == []
                    continue
                with pytest.raises(CheckpointError, match=told):
                    target.commit(reader)
    folder = open_folder(URL, options)
    assert isinstance(folder, VersionsFolder)
    assert [info.record.step for info in tags(folder)] == [3, 4]
    assert folder.tidy(leftover_s=0) > 0
    needed = {pack for version in folder.all().values() for pack in version.packs}
    assert {path.rpartition("/")[2] for path in folder.fs.find(f"{folder.root}/packs")} == needed
    with open_checkpoint(folder) as reader:
        assert verify_checkpoint(reader) == []
    # icechunk alone reads it.
    storage = icechunk.azure_storage(
        account=ACCOUNT,
        container="container",
        prefix="run/versions",
        access_key=KEY,
        config={"azure_storage_endpoint": endpoint, "allow_http": "true"},
    )
    access = icechunk.containers_credentials({f"{URL}/packs/": icechunk.azure_credentials(access_key=KEY)})
    session = icechunk.Repository.open(storage, authorize_virtual_chunk_access=access).readonly_session("main")
    assert (zarr.open_group(session.store, mode="r")["model/frozen"][...] == frozen).all()
