"""A run publishes its weights to a service once, and whoever serves them takes them from there."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.engine.published import consolidated, in_folder, publishing, same, served, versions
from tests.engine.runs import start, step
from tests.serve.answers import TOKEN, Client
from tests.serve.conftest import Serve
from tests.serve.proxy import proxy_to
from tests.waiting import until
from zstore.errors import CheckpointNotFoundError, UsageError
from zstore.open.arrived import arrived
from zstore.open.sources import folder_of
from zstore.publish import Receiver, pull
from zstore.testing.ranks import kill_ranks, run_ranks

OPTIONS = {"token": TOKEN}


@pytest.fixture
def url(tmp_path: Path, serve: Serve) -> str:
    (tmp_path / "runs").mkdir()
    return serve(tmp_path / "runs", token=TOKEN, allow_actions=True) + "/gpt/weights"


def config_of(url: str, **keys: Any) -> dict[str, Any]:
    return publishing(url, own={"storage_options": OPTIONS}, **keys)


def _train(rank: int, url: str, tmp_path: Path) -> None:
    tempfile.tempdir = str(tmp_path / "room")
    with start(config_of(url, stage=2, publish={"full_every": 3})) as engine:
        for _ in range(5):
            step(engine)
        assert len(list((tmp_path / "room").glob("zstore-weights-*.lock"))) == 2
        assert list((tmp_path / "room").glob("zstore-weights-*/.weight_v00*")) == []
        consolidated(engine, tmp_path / "ckpt")


def test_two_ranks_publish_and_sixteen_receive(url: str, tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    run_ranks(_train, 2, url, tmp_path)
    assert list((tmp_path / "room").glob("zstore-weights-*")) == []
    found = [(bool(one["weights"]), len(one["deltas"])) for one in versions(tmp_path / "runs/gpt/weights").values()]
    assert found == [(True, 0), (False, 2), (False, 2), (True, 2), (False, 2)]
    expected = load_file(tmp_path / "ckpt/step-5/hf/model.safetensors")
    models = [served() for _ in range(16)]
    with ThreadPoolExecutor(16) as threads:
        got = list(threads.map(lambda model: Receiver(model, url, storage_options=OPTIONS).update(), models))
    assert got == [5] * 16
    assert all(same(dict(model.state_dict()), expected) for model in models)
    assert pull(url, tmp_path / "hf", storage_options=OPTIONS).version == 5
    assert same(in_folder(tmp_path / "hf"), expected)


def test_what_a_service_refuses_is_told_and_then_all_weights_are_published(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, place = served(), tmp_path / "runs/gpt/weights"
    receiver = Receiver(model, url, storage_options=OPTIONS)
    with pytest.raises(CheckpointNotFoundError, match="there is no run 'gpt'"):
        receiver.update()
    with start(config_of(url)) as engine:
        engine.save_checkpoint(str(tmp_path / "runs/gpt"))
        with pytest.raises(CheckpointNotFoundError, match="has no version of weights"):
            receiver.update()
        step(engine)
        step(engine)
        assert receiver.update() == 2
        (place / ".weight_v000003").write_text("in the way")
        step(engine)
        assert "step 3 could not be published: " in caplog.text
        (place / ".weight_v000003").unlink()
        assert receiver.update() == 2
        step(engine)
        assert receiver.update() == 3
        assert same(dict(model.state_dict()), consolidated(engine, tmp_path / "ckpt"))
    found = versions(place)
    assert [(one["step"], bool(one["weights"])) for one in found.values()] == [(1, True), (2, False), (4, True)]


def test_a_connection_that_breaks_is_made_again(tmp_path: Path, url: str) -> None:
    port = int(url.split(":")[2].partition("/")[0])
    with proxy_to(port) as proxy, start(config_of(url.replace(f":{port}", f":{proxy.port}"))) as engine:
        for after in (100, 10_000, 100_000, 222_500):
            proxy.after(after, proxy.cut)
            step(engine)
        expected = consolidated(engine, tmp_path / "ckpt")
    model = served()
    assert Receiver(model, url, storage_options=OPTIONS).update() == 4
    assert same(dict(model.state_dict()), expected)


def _folders(room: Path) -> list[Path]:
    return [path for path in room.glob("zstore-weights-*") if path.is_dir()]


def _die_publishing(rank: int, url: str, room: Path) -> None:
    tempfile.tempdir = str(room)
    with start(config_of(url)) as engine:
        step(engine)
        os.kill(os.getpid(), signal.SIGKILL)


def _die_receiving(rank: int, url: str, room: Path) -> None:
    tempfile.tempdir = str(room)
    with arrived(folder_of(url, OPTIONS), None):
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_killed_processes_left_is_removed_by_the_next_one(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = tmp_path / "room"
    room.mkdir()
    assert kill_ranks(_die_publishing, 1, url, room) == [False]
    (first,) = _folders(room)
    assert kill_ranks(_die_receiving, 1, url, room) == [False]
    (second,) = _folders(room)
    monkeypatch.setattr(tempfile, "tempdir", str(room))
    assert first != second, "the receiver removed what the trainer left"
    assert list(second.glob("*/*.safetensors"))
    with start(config_of(url)) as engine:
        step(engine)
        (mine,) = _folders(room)
        assert mine != second
        assert pull(url, tmp_path / "hf", storage_options=OPTIONS).version == 2
        assert mine.is_dir(), "of a living one"
    assert list(room.glob("zstore-weights-*")) == []


def test_a_receiver_asks_once_from_its_own_version_on(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def requests() -> list[str]:
        found = re.findall(r'"(GET|HEAD) (\S+)" \d+', caplog.text)
        caplog.clear()
        return [f"{method} {path}" for method, path in found]

    model = served()
    receiver = Receiver(model, url, storage_options=OPTIONS)
    caplog.set_level("INFO", "zstore.serve.access")
    with start(config_of(url)) as engine:
        step(engine)
        receiver.update()
        pull(url, tmp_path / "hf", storage_options=OPTIONS)
        for _ in range(3):
            step(engine)
        requests()
        assert receiver.update() == 4
        until(lambda: "/api/runs/gpt/weights" in caplog.text, "the answer has ended")
        files = [f"GET /zarr/gpt/weights/weight_v{number:06d}/delta-00000.bin" for number in (2, 3, 4)]
        assert sorted(requests()) == ["GET /api/runs/gpt/weights", *files]
        assert receiver.update() == 4
        until(lambda: "/api/runs/gpt/weights" in caplog.text, "the answer has ended")
        assert requests() == ["GET /api/runs/gpt/weights"]
        assert pull(url, tmp_path / "hf", storage_options=OPTIONS).version == 4
        assert set(requests()) >= set(files)
        assert same(dict(model.state_dict()), consolidated(engine, tmp_path / "ckpt"))
        assert same(dict(model.state_dict()), in_folder(tmp_path / "hf"))


def test_a_service_lets_one_run_publish(url: str, tmp_path: Path) -> None:
    place = tmp_path / "runs/gpt/weights"
    said = rf"publishes its weights there already.* process {os.getpid()} on "
    with start(config_of(url)) as engine:
        step(engine)
        with pytest.raises(UsageError, match=said):
            start(config_of(url))
        with pytest.raises(UsageError, match=said):
            start(publishing(place))
        step(engine)
        client = Client(url.partition("/gpt")[0])
        assert client.raw("POST", "/api/uploads/weights/gpt/9?publisher=another", {"index": "{}"}).status == 400
    until(lambda: not (place / ".publishing").exists(), "the service has noticed")
    (place / ".weight_v000003").mkdir()
    (place / ".weight_v000003/delta-00000.bin").write_bytes(b"of a killed trainer")
    assert kill_ranks(_die_publishing, 1, url, tmp_path) == [False]
    until(lambda: not (place / ".publishing").exists(), "the service has noticed")
    with start(publishing(place)) as engine, pytest.raises(UsageError, match=f'"pid": {os.getpid()}'):
        start(config_of(url))
    with start(config_of(url)) as engine:
        step(engine)
    assert [bool(one["deltas"]) for one in versions(place).values()] == [False, True, False, False]


def test_a_run_goes_on_when_its_service_was_away(tmp_path: Path, url: str) -> None:
    """It has its place again, and another one that took it meanwhile would be told of."""
    port = int(url.split(":")[2].partition("/")[0])
    place = tmp_path / "runs/gpt/weights"
    with proxy_to(port) as proxy, start(config_of(url.replace(f":{port}", f":{proxy.port}"))) as engine:
        step(engine)
        proxy.cut()
        until(lambda: not (place / ".publishing").exists(), "the service has noticed")
        step(engine)
        assert (place / ".publishing").exists()
        with pytest.raises(UsageError, match="publishes its weights there already"):
            start(config_of(url))
        proxy.cut()
        until(lambda: not (place / ".publishing").exists(), "the service has noticed")
        with start(config_of(url)) as other:
            step(other)
            step(engine)
            step(other)
    first, again, others, last = [one["run"] for one in versions(place).values()]
    assert first == again != others == last


@pytest.mark.parametrize("by", ["folder", "service"])
def test_a_version_that_is_being_read_stays(by: str, url: str, tmp_path: Path) -> None:
    place, model = tmp_path / "runs/gpt/weights", served()
    source = folder_of(place if by == "folder" else url, OPTIONS if by == "service" else None)
    with start(config_of(url, publish={"full_every": 1})) as engine:
        step(engine)
        step(engine)
        expected = consolidated(engine, tmp_path / "ckpt")
        receiver = Receiver(model, source.location, storage_options=OPTIONS if by == "service" else None)
        with arrived(source, None) as found:
            assert found is not None
            for _ in range(5):
                step(engine)
            assert list(versions(place)) == [2, 6, 7], "it is read"
            assert found.full is not None
            assert same(load_file(found.full / "model.safetensors"), expected)
        until(lambda: _is_free(place / "weight_v000002"), "the service has noticed")
        step(engine)
        assert list(versions(place)) == [7, 8]
        assert receiver.update() == 8


def _is_free(version: Path) -> bool:
    with (version / "model.safetensors.index.json").open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.fixture
def client(tmp_path: Path, serve: Serve) -> Client:
    """Of a service with a run that published to its own folder."""
    to = tmp_path / "runs/gpt/weights"
    with start(publishing(to)) as engine:
        step(engine)
        step(engine)
    return Client(serve(tmp_path / "runs", token=TOKEN, allow_actions=True))


def test_a_version_may_be_sent_again_and_not_replaced(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "runs/gpt/weights/weight_v000002"
    delta, index = (folder / "delta-00000.bin").read_bytes(), (folder / "model.safetensors.index.json").read_text()
    path = "/api/uploads/weights/other/2"

    def put(name: str, data: bytes, at: str = path) -> Any:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return client.pool.request("PUT", f"{client.base}{at}/{name}", body=data, headers=headers)

    assert client.raw("POST", path, {"index": index}).status == 400
    assert put("delta-00000.bin", delta[:-1]).status == 204
    answer = client.raw("POST", path, {"index": index})
    assert (answer.status, answer.json()["error"]) == (
        400,
        "version 2 is not whole: delta-00000.bin: send its files before its index",
    )
    assert client.raw("GET", "/zarr/other/weights/").status == 404
    for _ in range(2):
        assert put("delta-00000.bin", delta).status == 204
    for _ in range(2):
        assert client.raw("POST", path, {"index": index}).status == 204
    assert client.raw("POST", path, {"index": index + " "}).status == 409
    assert put("delta-00000.bin", delta).status == 409
    assert client.raw("GET", "/zarr/other/weights/weight_v000002/delta-00000.bin").data == delta
    for name in (".hidden", "run.sh", "delta-%2e%2e%2fx"):
        assert put(name, b"x", "/api/uploads/weights/other/3").status in (400, 404), name
    assert client.raw("POST", "/api/uploads/weights/other/3", {"index": "{}"}).status == 400
    assert client.raw("POST", "/api/uploads/weights/other/3", {"index": index}).status == 400
    assert sorted(path.name for path in (tmp_path / "runs/other").iterdir()) == ["weights"]


def test_what_is_under_way_is_not_served(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "runs/gpt/weights"
    (folder / ".weight_v000003").mkdir()
    (folder / ".weight_v000003/delta-00000.bin").write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    (folder / "weight_v000009").symlink_to(tmp_path)
    for name in (".weight_v000003/delta-00000.bin", "notes.txt", "weight_v000009/runs"):
        assert client.raw("GET", f"/zarr/gpt/weights/{name}").status == 404, name
    assert client.raw("GET", "/zarr/gpt/weights/weight_v000001/model.safetensors").status == 200


def test_only_who_may_write_publishes(tmp_path: Path, serve: Serve) -> None:
    (tmp_path / "runs").mkdir()
    url = serve(tmp_path / "runs", token=TOKEN) + "/gpt/weights"
    with pytest.raises(UsageError, match=r"--allow-actions"):
        start(config_of(url))
    assert list((tmp_path / "runs").iterdir()) == []
    with pytest.raises(UsageError, match=r"expected a URL like http://127.0.0.1:\d+/RUN/weights"):
        start(config_of(url.replace("weights", "elsewhere")))
