"""Uploads through a service whose root is a bucket, which sends them on."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import urllib3

import zstore
from tests.checkpoint.buckets import Bucket
from tests.checkpoint.checkpoints import open_world, save_arrays
from tests.serve.conftest import Serve
from tests.serve.proxy import proxy_to
from tests.serve.test_uploads import OPTIONS, TOKEN, make_arrays, save
from tests.serve.upload_kills import upload
from tests.waiting import until
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError, UsageError
from zstore.remote.commit import remover
from zstore.remote.folder import open_folder
from zstore.remote.upload import upload_checkpoint
from zstore.serve.tokens import Role, Token, TokenFile, digest_of
from zstore.testing.faults import DeadlyFiles
from zstore.testing.ranks import loaded_context

zarr = pytest.importorskip("zarr")
pytest.importorskip("moto", reason="extra test")


@pytest.fixture
def url(bucket: Bucket, tmp_path: Path, serve: Serve) -> str:
    """A service over the runs in a bucket, of which there are none yet."""
    (tmp_path / "uploads").mkdir()
    root = bucket.url.rpartition("/")[0]
    settings = {"upload_folder": tmp_path / "uploads", "storage_options": bucket.options}
    return serve(root, token=TOKEN, allow_actions=True, **settings)


def test_uploads_go_on_to_the_bucket(bucket: Bucket, url: str, tmp_path: Path, http: urllib3.PoolManager) -> None:
    arrays = make_arrays()
    with open_world(arrays, world_size=2) as world:
        for number in (1, 2, 3):
            arrays["model/h.0.weight"][:] = number
            world.fill()
            save(world, tmp_path / "local", f"{url}/one", step=number)
    assert [info.record.step for info in tags(bucket.folder)] == [1, 2, 3]
    with open_checkpoint(bucket.folder) as reader:
        assert verify_checkpoint(reader) == []
        for name, expected in arrays.items():
            assert reader.read_array(name).tobytes() == expected.tobytes()
    group = zarr.open_group(f"{bucket.url}/step-00000003", mode="r", storage_options=bucket.options)
    assert (group["model/frozen"][...] == arrays["model/frozen"]).all()
    # It serves what it took in.
    with zstore.open_checkpoint(f"{url}/one", storage_options=OPTIONS) as checkpoint:
        assert checkpoint.step == 3
        assert (checkpoint["model/h.0.weight"][:] == 3).all()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    # Of a list that takes long to make the one before is given.
    until(
        lambda: (
            [run["name"] for run in http.request("GET", f"{url}/api/runs", headers=headers).json()["runs"]] == ["one"]
        )
    )
    assert [path for path in (tmp_path / "uploads").rglob("*") if path.is_file()] == []


def test_a_run_and_a_token_hold_no_more_than_their_quotas_behind_a_url(
    bucket: Bucket, tmp_path: Path, serve: Serve
) -> None:
    (tmp_path / "uploads").mkdir()
    tokens = tmp_path / "tokens.json"
    arrays = make_arrays()
    size = sum(array.nbytes for array in arrays.values())
    saved = {}
    for step in (1, 2, 3):
        arrays = {name: array + 1 for name, array in arrays.items()}
        saved[step] = save_arrays(tmp_path / str(step), arrays, step=step)

    def begin(*, quota: int | None = None, run_quota: int | None = None) -> str:
        one = Token(name="ci", role=Role.ACT, created=0, quota=quota, sha256=digest_of(TOKEN.encode()))
        tokens.write_text(TokenFile(tokens=(one,)).model_dump_json())
        root = bucket.url.rpartition("/")[0]
        settings = {"upload_folder": tmp_path / "uploads", "storage_options": bucket.options, "run_quota": run_quota}
        return serve(root, tokens=tokens, allow_actions=True, **settings)

    limited = begin(run_quota=int(2.5 * size))
    for step in (1, 2):
        upload_checkpoint(saved[step], f"{limited}/one", OPTIONS)
    with pytest.raises(StorageError, match="the run 'one' may hold"):
        upload_checkpoint(saved[3], f"{limited}/one", OPTIONS)
    limited = begin(quota=int(2.5 * size))
    with pytest.raises(StorageError, match="the token 'ci' may hold"):
        upload_checkpoint(saved[3], f"{limited}/one", OPTIONS)
    remover(bucket.folder)(tags(bucket.folder)[0])
    for url in (limited, begin(run_quota=int(2.5 * size))):
        upload_checkpoint(saved[3], f"{url}/one", OPTIONS)
    assert [info.tag for info in tags(bucket.folder)] == ["step-00000002", "step-00000003"]


def test_a_tag_is_refused_replaced_and_found_again(bucket: Bucket, url: str, tmp_path: Path) -> None:
    arrays = make_arrays()
    first = save_arrays(tmp_path / "a", arrays)
    upload_checkpoint(first, f"{url}/one", OPTIONS)
    upload_checkpoint(first, f"{url}/one", OPTIONS)  # the same save: it is there
    assert len(tags(bucket.folder)) == 1
    arrays["model/frozen"] += 1
    other = save_arrays(tmp_path / "b", arrays)
    with pytest.raises(CheckpointExistsError):
        upload_checkpoint(other, f"{url}/one", OPTIONS)
    upload_checkpoint(other, f"{url}/one", OPTIONS, overwrite=True)
    with open_checkpoint(bucket.folder) as reader:
        assert reader.read_array("model/frozen").tobytes() == arrays["model/frozen"].tobytes()


def test_journal_and_companions_go_with_the_checkpoint(
    bucket: Bucket, url: str, tmp_path: Path, http: urllib3.PoolManager
) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    config = json.dumps({"model_type": "gpt2"}).encode()
    sent = http.request("PUT", f"{url}/api/uploads/companions/one/config.json", body=config, headers=headers)
    assert sent.status == 204
    upload_checkpoint(save_arrays(tmp_path / "local", make_arrays()), f"{url}/one", OPTIONS)
    assert bucket.folder.read_small("config.json") == config


def test_without_a_folder_for_uploads_they_are_refused(bucket: Bucket, tmp_path: Path, serve: Serve) -> None:
    root = bucket.url.rpartition("/")[0]
    url = serve(root, token=TOKEN, allow_actions=True, storage_options=bucket.options)
    with pytest.raises(UsageError, match="--upload-folder DIR"):
        upload_checkpoint(save_arrays(tmp_path / "local", make_arrays()), f"{url}/one", OPTIONS)


def serve_until_killed(
    root: str, base: str, options: dict[str, Any], port: int, request: int | None, file: int
) -> None:
    """A service that is killed at a request that writes, or at a file operation of its uploads."""
    from tests.checkpoint.mortal_s3 import MortalFileSystem
    from zstore.serve.server import run
    from zstore.serve.settings import Root, Settings

    MortalFileSystem.kill_at = request
    run(
        Settings(
            roots=(Root.parse(root),),
            port=port,
            token=TOKEN,
            allow_actions=True,
            upload_folder=Path(base),
            storage_options=options,
            files=DeadlyFiles(file),
        )
    )


class Killed:
    """Uploads into a service in front of `bucket`, each of which loses it, or its client, once."""

    def __init__(self, bucket: Bucket, base: Path) -> None:
        self.bucket, self.uploads, self.local = bucket, base / "uploads", base / "local"
        self.uploads.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.arrays, self.number = make_arrays(), 0

    @contextlib.contextmanager
    def service(self, request: int | None = None, file: int = -1) -> Iterator[BaseProcess]:
        root = self.bucket.url.rpartition("/")[0]
        arguments = root, str(self.uploads), self.bucket.options, self.port, request, file
        process = loaded_context().Process(target=serve_until_killed, args=arguments, daemon=True)
        process.start()

        def answers() -> bool:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self.port)):
                return True
            return not process.is_alive()

        until(answers)
        try:
            yield process
        finally:
            process.kill()
            process.join()

    def checkpoint(self) -> Path:
        """Return the next checkpoint, of which `frozen` is as it was."""
        self.number += 1
        self.arrays["model/h.0.weight"][:] = self.number
        return save_arrays(self.local, self.arrays, world_size=2, step=self.number, run_id="run")

    def upload(self, path: Path) -> None:
        upload_checkpoint(path, f"http://127.0.0.1:{self.port}/one", OPTIONS)

    def whole(self) -> int:
        """Return how many checkpoints are seen, all of them without a fault."""
        with contextlib.suppress(CheckpointNotFoundError):
            found = tags(open_folder(self.bucket.url, self.bucket.options))
            assert [info.record.step for info in found] == list(range(1, len(found) + 1))
            for info in found:
                with open_checkpoint(info.folder) as reader:
                    assert verify_checkpoint(reader) == []
                    assert (reader.read_array("model/h.0.weight") == info.record.step).all()
            return len(found)
        return 0

    def kill_service(self, request: int | None = None, file: int = -1) -> bool:
        """Upload; the service is killed, another one started, and the same client goes on. Return whether it was killed."""
        path, errors = self.checkpoint(), Queue[BaseException | None]()

        def upload() -> None:
            try:
                errors.put(self.upload(path))
            except BaseException as error:
                errors.put(error)

        with self.service(request, file) as process:
            client = threading.Thread(target=upload)
            client.start()
            while client.is_alive() and process.is_alive():
                client.join(0.02)
            killed = not process.is_alive()
        assert self.whole() in ((self.number - 1, self.number) if killed else (self.number,))
        if killed:
            with self.service():
                client.join(100)
        assert errors.get(timeout=100) is None
        assert self.whole() == self.number
        assert [file for file in self.uploads.rglob("*") if file.is_file()] == []
        return killed

    def kill_client(self, after_bytes: int) -> bool:
        """Kill the client once it sent so many bytes; another one uploads the same. Return whether it was killed."""
        path = self.checkpoint()
        with self.service(), proxy_to(self.port) as proxy:
            arguments = str(path), f"http://127.0.0.1:{proxy.port}/one", False
            client = loaded_context().Process(target=upload, args=arguments, daemon=True)
            proxy.after(after_bytes, client.kill)
            client.start()
            client.join(100)
            killed = client.exitcode == -signal.SIGKILL
            assert self.whole() == self.number - killed
            self.upload(path)
        assert self.whole() == self.number
        return killed

    def names(self) -> set[str]:
        """Return what is beside the checkpoints in the bucket."""
        self.bucket.fs.invalidate_cache()
        entries = self.bucket.folder.entries()
        return {*entries.files, *entries.folders} - {info.tag for info in tags(self.bucket.folder)}


def test_service_and_client_are_killed_in_between(bucket: Bucket, tmp_path: Path) -> None:
    killed = Killed(bucket, tmp_path)
    assert killed.kill_service(request=1)
    assert all(killed.kill_service(request=request) for request in (2, 7))
    assert all(killed.kill_service(file=file) for file in (5, 25))
    assert killed.kill_client(100_000)
    assert killed.names() == {"latest"}


@pytest.mark.soak
def test_the_service_is_killed_at_every_request_and_operation(bucket: Bucket, tmp_path: Path) -> None:
    killed = Killed(bucket, tmp_path)
    kills = sum(killed.kill_service(request=request) for request in range(40))
    kills += sum(killed.kill_service(file=file) for file in range(80))
    assert kills > 60
    assert killed.names() == {"latest"}
