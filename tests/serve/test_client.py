"""Checkpoints of a running service, through every reader and command: as from their folder."""

import contextlib
import functools
import http.server
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zstore
from tests.checkpoint.checkpoints import open_world, save_arrays
from tests.serve.conftest import OPTIONS, TOKEN, Serve, serving_of
from tests.tools.commands import here
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CheckpointNotFoundError, CorruptionError, StorageError, UsageError
from zstore.open.sources import folder_of
from zstore.remote.bucket import BucketFolder, Retries
from zstore.remote.service import ServiceConnection, ServiceFolder, UploadPlace, open_folder
from zstore.serve.app import serving
from zstore.serve.runs import Root, Settings

RNG = np.random.default_rng(3)
ARRAYS = {
    "model/h.0.weight": RNG.standard_normal((600, 300)).astype(np.float32),
    "model/odd name/ü%": RNG.standard_normal(77).astype(np.float32),
    "optimizer/exp_avg/h.0.weight": RNG.standard_normal((600, 300)).astype(np.float32),
}
QUICK = Retries(attempts=3, first_pause_s=0.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a run"
    with open_world(ARRAYS, world_size=2) as world:
        world.save(folder, step=1, tag="first 50%")
        world.arrays["model/h.0.weight"][:10] += 1
        world.fill()
        world.save(folder, step=2, tag="second")
    return folder


@pytest.fixture(scope="module")
def base(run: Path) -> Iterator[str]:
    with serving_of(run.parent, token=TOKEN) as url:
        yield url


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZSTORE_TOKEN", raising=False)


def command(*words: str, exit_code: int = 0) -> dict[str, Any]:
    code, out, err = here(*words, "--json")
    assert code == exit_code, err
    return json.loads(out)


def test_commands_say_the_same_of_both(run: Path, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZSTORE_TOKEN", TOKEN)
    url = f"{base}/a%20run"
    here, there = command("ls", str(run))["checkpoints"], command("ls", url)["checkpoints"]
    assert [entry["path"] for entry in there] == [f"{url}/first%252050%2525", f"{url}/second"]
    for ours, theirs in zip(here, there, strict=True):
        assert {key: ours[key] for key in ("tag", "step", "size_bytes")} == {
            key: theirs[key] for key in ("tag", "step", "size_bytes")
        }
    assert command("inspect", url)["arrays"] == command("inspect", str(run))["arrays"]
    assert command("inspect", there[0]["path"])["checkpoint"]["tag"] == "first 50%"
    assert command("verify", f"{url}@first 50%")["faults"] == []
    assert command("diff", url, str(run))["bytes"] == 0
    (entry,) = command("diff", f"{url}@first 50%", url, exit_code=1)["arrays"]
    assert (entry["name"], entry["status"]) == ("model/h.0.weight", "values")
    command("consolidate", url, str(tmp_path / "theirs"), "--dtype", "bf16")
    command("consolidate", str(run), str(tmp_path / "ours"), "--dtype", "bf16")
    name = "model.safetensors"
    assert (tmp_path / "theirs" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()
    command("reshard", url, str(tmp_path / "three"), "--world-size", "3")
    with open_checkpoint(tmp_path / "three") as copy, open_checkpoint(run) as original:
        assert copy.record.world_size == 3
        assert verify_checkpoint(copy) == []
        for each in original.arrays:
            assert np.array_equal(copy.read_array(each), original.read_array(each))


def test_python_reads_what_is_there_and_counts_it(run: Path, base: str) -> None:
    with (
        zstore.open_checkpoint(f"{base}/a%20run", storage_options=OPTIONS) as there,
        zstore.open_checkpoint(run) as here,
    ):
        assert list(there) == list(here)
        for name in here:
            assert np.array_equal(there[name].numpy(), here[name].numpy())
        assert np.array_equal(there["model/h.0.weight"][7:9, ::3], here["model/h.0.weight"][7:9, ::3])
        assert there.verify() == []
        reading = there.source.reading()
        assert reading is not None
        assert reading.read_bytes > reading.asked_bytes > 0
        group = there.zarr()
        assert np.array_equal(group["model/h.0.weight"][:], here["model/h.0.weight"].numpy())
    weights = zstore.load_state_dict(f"{base}/a%20run", dtype="bf16", storage_options=OPTIONS)
    assert weights["h.0.weight"].equal(zstore.load_state_dict(run, dtype="bf16")["h.0.weight"])


def test_the_contract_of_a_folder(run: Path, base: str) -> None:
    there, here = folder_of(f"{base}/a%20run", OPTIONS), folder_of(run)
    assert isinstance(there, ServiceFolder)
    assert sorted(there.entries().folders) == sorted(here.entries().folders)
    tag = there.child("second")
    assert tag.sizes("") == {file.removeprefix("second/"): size for file, size in here.sizes("second").items()}
    data = (run / "second" / "zarr.json").read_bytes()
    assert tag.read_range("zarr.json", len(data) - 3, len(data) + 9) == data[-3:]
    with pytest.raises(CorruptionError, match="more than 10 bytes"):
        tag.read_small("zarr.json", 10)
    found = there.read_all(["second/zarr.json", "none", "first%2050%25/zstore.json"])
    assert found[0] == data
    assert isinstance(found[1], FileNotFoundError)
    assert isinstance(found[2], bytes)
    for missing in (tag.child("nothing"), there.parent):
        with pytest.raises(FileNotFoundError):
            missing.entries()


def test_what_is_wrong_is_said_and_no_token_with_it(base: str) -> None:
    cases: list[tuple[str, dict[str, Any], type[Exception], str]] = [
        ("a%20run", {}, UsageError, r"needs a token: give it by storage_options=.*ZSTORE_TOKEN"),
        ("a%20run", {"token": "wrong-token"}, UsageError, "does not accept the token given"),
        ("a%20run", {"token": "two words"}, UsageError, "blanks"),
        ("a%20run", {"token": 12345}, UsageError, "must be text"),
        ("a%20run", {**OPTIONS, "anon": True}, UsageError, r"expected the storage option token, got \['anon'\]"),
        ("other", OPTIONS, CheckpointNotFoundError, "there is no run 'other'; runs that are served: a run"),
        ("a%20run/third", OPTIONS, CheckpointNotFoundError, "third does not exist or is not a folder"),
        ("", OPTIONS, UsageError, rf"name one of its runs.*It has: {base}/a%20run"),
        ("a%20run/../x", OPTIONS, UsageError, "`..`"),
    ]
    for path, options, kind, message in cases:
        with pytest.raises(kind, match=message) as caught:
            zstore.open_checkpoint(f"{base}/{path}", storage_options=options)
        assert not any(secret in str(caught.value) for secret in (TOKEN, "wrong-token", "two words", "12345"))
    with pytest.raises(UsageError, match="has a user: a service takes a token") as caught:
        zstore.open_checkpoint(f"{base.replace('://', '://me:secret@')}/a%20run")
    assert "secret" not in str(caught.value)
    with pytest.raises(UsageError, match=f"name it as {base}/RUN"):
        UploadPlace(base)
    assert TOKEN not in repr(vars(folder_of(f"{base}/a%20run", OPTIONS)))


def test_a_service_that_goes_away_is_asked_again_and_then_given_up(tmp_path: Path) -> None:
    save_arrays(tmp_path / "one", {"model/a": np.arange(100.0)})
    settings = Settings(roots=(Root.parse(str(tmp_path)),), port=0)
    with serving(settings) as base:
        folder = open_folder(f"{base}/one", retries=QUICK)
        reader = open_checkpoint(folder)
    with reader, pytest.raises(StorageError, match=r"cannot read \(tried 3 times\).*no connection|ConnectionRefused"):
        reader.read_array("model/a")
    with pytest.raises(StorageError, match=r"cannot reach the server \(tried 3 times\)"):
        open_folder(f"{base}/one", retries=QUICK)
    # It comes back at the same address: the connection that broke is made anew.
    port = int(base.rpartition(":")[2])
    with serving(Settings(roots=settings.roots, port=port)):
        assert np.array_equal(reader.read_array("model/a"), np.arange(100.0))


def test_a_checkpoint_that_is_replaced_or_removed_is_never_mixed(tmp_path: Path, serve: Serve) -> None:
    save_arrays(tmp_path / "one", {"model/a": np.zeros(100_000)})
    base = serve(tmp_path)
    with zstore.open_checkpoint(f"{base}/one") as checkpoint, zstore.open_checkpoint(f"{base}/one") as begun:
        assert begun["model/a"][0] == 0
        save_arrays(tmp_path / "one", {"model/a": np.ones(100_000)}, overwrite=True)
        for old in (checkpoint, begun):
            with pytest.raises(CorruptionError, match=r"was replaced by another save while it was read: open it again"):
                old["model/a"].numpy()
        with zstore.open_checkpoint(f"{base}/one") as again:
            assert again["model/a"].numpy().all()
            shutil.rmtree(tmp_path / "one" / again.tag)
            with pytest.raises(CorruptionError, match="was removed while it was read"):
                again["model/a"].numpy()


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving_by(handler: Any) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_other_servers_are_read_through_fsspec(run: Path) -> None:
    handler = functools.partial(_Silent, directory=str(run.parent))
    with serving_by(handler) as url:
        folder = open_folder(f"{url}/a run/second")
        assert isinstance(folder, BucketFolder)
        assert folder.read_small("zstore.json") == (run / "second/zstore.json").read_bytes()


@pytest.mark.parametrize("listing", [b"[]", b'{"folders": [5], "files": []}', b"<html>"])
def test_an_answer_that_is_no_listing_is_an_error_at_once(listing: bytes) -> None:
    class Odd(_Silent):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"service": "zstore"}' if self.path == "/api" else listing)

    with serving_by(Odd) as url, pytest.raises(StorageError, match=r"expected (a list of folders|JSON from GET)"):
        open_folder(f"{url}/run").entries()


def test_a_redirect_does_not_get_the_token(base: str) -> None:
    """A server that sends its clients to a service: what they would send there is theirs to say."""

    class Redirects(_Silent):
        def do_GET(self) -> None:
            assert "Authorization" not in self.headers
            self.send_response(302)
            self.send_header("Location", f"{base}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()

    with serving_by(Redirects) as url, pytest.raises(UsageError, match=rf"leads to {base}: name that"):
        open_folder(f"{url}/a run", OPTIONS)


def test_a_server_that_falls_silent_or_cuts_the_answer_is_asked_again(base: str) -> None:
    """A proxy that cuts the first answers short: no byte of those is used."""
    direct = ServiceFolder(ServiceConnection(base, token=TOKEN), "a run/second")
    whole = direct.read_small("zarr.json")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        answers = [
            b"HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 9\r\n\r\nshort",
        ]
        answers.append(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(whole) + whole)

        def answer() -> None:
            for text in answers:
                with listening.accept()[0] as connection:
                    connection.recv(65536)
                    connection.sendall(text)

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        connection = ServiceConnection(url, retries=QUICK)
        folder = ServiceFolder(connection, "a run/second")
        assert folder.read_small("zarr.json") == whole
        thread.join()
