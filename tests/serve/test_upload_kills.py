"""Service and clients of uploads are killed (SIGKILL) at every stage: former checkpoints stay whole, and the upload goes on."""

import contextlib
import hashlib
import json
import os
import signal
import socket
import threading
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.checkpoints import save_arrays
from tests.serve.conftest import OPTIONS, TOKEN
from tests.serve.proxy import proxy_to
from tests.waiting import until
from zstore.checkpoint.catalog import scan
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.remote.upload import upload_checkpoint
from zstore.testing.faults import DeadlyFiles, FaultyFiles
from zstore.testing.ranks import loaded_context

RUN = "run"
_PORT_FILE = "operations"


def _serve(runs: str, port: int, fail_at: int | None) -> None:
    """A service that is killed at file operation `fail_at` of its uploads; else it leaves how many there were."""
    from zstore.serve.app import run
    from zstore.serve.runs import Root, Settings

    files: FaultyFiles = DeadlyFiles(fail_at)
    settings = Settings(roots=(Root.parse(runs),), port=port, token=TOKEN, files=files)
    with contextlib.suppress(KeyboardInterrupt):
        run(settings)
    (Path(runs).parent / _PORT_FILE).write_text(str(len(files.operations)))


def upload(path: str, url: str, overwrite: bool) -> None:
    upload_checkpoint(path, url, OPTIONS, overwrite=overwrite)


def digests(folder: Path) -> dict[str, str]:
    """The content of every file of a checkpoint; of the record all that a commit does not set."""
    found = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
    record = json.loads((folder / "zstore.json").read_bytes())
    for key in ("committed_ns", "digest"):
        del record[key]
    return found | {"zstore.json": json.dumps(record)}


class KilledUploads:
    """Uploads of one run after each other into a service in `folder`, each of which loses its service or its client once."""

    def __init__(self, folder: Path) -> None:
        self.runs, self.local = folder / "runs", folder / "local"
        self.runs.mkdir(parents=True)
        self._context = loaded_context()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port: int = free.getsockname()[1]
        self._folder = folder
        self._number = 0
        self._random = np.random.default_rng(3)
        self._frozen = self._random.standard_normal((100, 100))
        self._committed: dict[str, dict[str, str]] = {}
        """Digests of what was committed, by tag."""
        self.operations = 0
        """Of the service, on files, in the last upload that ended well."""
        self.sent_bytes = 0
        """In the last upload of which no process was killed."""

    def checkpoint(self) -> tuple[Path, bool]:
        """Return the next checkpoint, part of which is as in the one before, and whether it replaces another."""
        self._number += 1
        replaces = self._number % 3 == 0
        arrays: dict[str, Any] = {
            "model/a": self._random.standard_normal((150, 100)),
            "model/frozen": self._frozen,
            "optimizer/exp_avg/a": self._random.standard_normal((50, 100)),
        }
        path = save_arrays(
            self.local / str(self._number), arrays, world_size=2, run_id="one", step=self._number - replaces
        )
        (path / "config.json").write_text("{}")
        return path, replaces

    def serve(self, fail_at: int | None = None) -> BaseProcess:
        process = self._context.Process(target=_serve, args=(str(self.runs), self._port, fail_at), daemon=True)
        process.start()

        def answers() -> bool:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self._port)):
                return True
            return not process.is_alive()

        until(answers)
        return process

    def stop(self, process: BaseProcess) -> None:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGINT)
        process.join(200)
        assert process.exitcode is not None
        left = self._folder / _PORT_FILE
        self.operations = int(left.read_text())
        left.unlink()

    def whole(self) -> list[str]:
        """The tags that are seen: all without a fault, each as it was committed or the one of the upload under way."""
        found = [info.tag for info in scan(self.runs / RUN).tags] if (self.runs / RUN).exists() else []
        for tag in found:
            with open_checkpoint(self.runs / RUN, tag) as reader:
                assert verify_checkpoint(reader) == []
                if tag in self._committed:
                    assert digests(reader.path) == self._committed[tag]
        if self.runs.joinpath(RUN).exists():
            assert scan(self.runs / RUN).refusals == ()
        return found

    def _check(self, path: Path, *, done: bool) -> None:
        """The former checkpoints are whole; that of the upload is whole or is not seen, and where `done`, is whole."""
        if (self.runs / RUN / path.name / "zstore.json").exists():
            ours = digests(path)
            stored = digests(self.runs / RUN / path.name)
            assert not done or stored == ours
            if stored == ours:
                self._committed[path.name] = ours
        found = self.whole()
        assert not done or path.name in found
        assert set(list(self._committed)[-5:]) <= set(found)

    def plain(self) -> None:
        path, replaces = self.checkpoint()
        process = self.serve()
        with proxy_to(self._port) as proxy:
            upload_checkpoint(path, f"http://127.0.0.1:{proxy.port}/{RUN}", OPTIONS, overwrite=replaces)
            self.sent_bytes = proxy.sent_bytes
        self.stop(process)
        self._check(path, done=True)

    def kill_service(self, fail_at: int) -> bool:
        """Kill the service at one of its file operations, start another: the same client's upload goes on; return whether it
        was killed."""
        path, replaces = self.checkpoint()
        process = self.serve(fail_at)
        errors: list[BaseException] = []

        def upload() -> None:
            try:
                upload_checkpoint(path, f"http://127.0.0.1:{self._port}/{RUN}", OPTIONS, overwrite=replaces)
            except BaseException as error:
                errors.append(error)

        client = threading.Thread(target=upload)
        client.start()
        while client.is_alive() and process.is_alive():
            client.join(0.02)
        killed = not process.is_alive()
        if killed:
            process.join()
            assert process.exitcode == -signal.SIGKILL
            self._check(path, done=False)
            process = self.serve()
        client.join(100)
        self.stop(process)
        assert not errors, errors
        self._check(path, done=True)
        return killed

    def kill_client(self, after_bytes: int) -> bool:
        """Kill the client once it sent so many bytes; another goes on with the upload. Return whether it was killed."""
        path, replaces = self.checkpoint()
        process = self.serve()
        with proxy_to(self._port) as proxy:
            url = f"http://127.0.0.1:{proxy.port}/{RUN}"
            client = self._context.Process(target=upload, args=(str(path), url, replaces), daemon=True)
            proxy.after(after_bytes, client.kill)
            client.start()
            client.join(200)
            killed = client.exitcode == -signal.SIGKILL
            assert killed or client.exitcode == 0
            self._check(path, done=not killed)
            before = proxy.sent_bytes
            upload_checkpoint(path, url, OPTIONS, overwrite=replaces)
            again = proxy.sent_bytes - before
        self.stop(process)
        self._check(path, done=True)
        # What was durable when the client ended is not sent again: but for files that were on their way.
        assert not killed or again < self.sent_bytes
        return killed


def test_uploads_survive_kills_of_service_and_client(tmp_path: Path) -> None:
    uploads = KilledUploads(tmp_path)
    uploads.plain()
    operations, sent = uploads.operations, uploads.sent_bytes
    killed = [uploads.kill_service(operations * number // 4) for number in (1, 3)]
    killed.append(uploads.kill_client(sent // 4))
    assert sum(killed) == 3


@pytest.mark.soak
def test_uploads_survive_kills_of_the_service_at_every_operation(tmp_path: Path) -> None:
    uploads = KilledUploads(tmp_path)
    uploads.plain()
    # Every third upload replaces a checkpoint; those that link more have fewer operations than the first.
    killed = sum(uploads.kill_service(fail_at) for fail_at in range(uploads.operations) for _ in range(3))
    assert killed >= 250


@pytest.mark.soak
def test_uploads_survive_kills_of_the_client_at_every_byte(tmp_path: Path) -> None:
    uploads = KilledUploads(tmp_path)
    uploads.plain()
    sent = uploads.sent_bytes
    assert sum(uploads.kill_client(sent * number // 200) for number in range(150)) >= 120
