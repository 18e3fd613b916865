"""Checkpoints and journals that are uploaded to a service: the same bytes arrive, nothing half-made is seen, only changes are
sent; and engines that save to a service."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiofiles
import numpy as np
import numpy.typing as npt
import pytest
import urllib3

from tests.checkpoint.checkpoints import World, as_bytes, begin_upload, open_world, save_arrays, values, wait_all
from tests.engine.runs import ADAM, make_config, start, state_of, step, whole
from tests.serve.conftest import BEARER, OPTIONS, TOKEN, Serve
from tests.serve.proxy import proxy_to
from tests.serve.test_upload_kills import digests
from tests.waiting import until
from zstore.checkpoint.build import reshard_checkpoint
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.retention import Keep
from zstore.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    DiskFullError,
    StorageError,
    UsageError,
)
from zstore.io.machine import Workers
from zstore.journal import JournalTail, journal_file
from zstore.remote.bucket import Retries
from zstore.remote.service import UploadPlace
from zstore.remote.target import local_files
from zstore.remote.upload import target_in, upload_checkpoint
from zstore.testing.faults import FaultyFiles
from zstore.testing.ranks import run_ranks
from zstore.tools.train import TrainOptions, train_command

Array = npt.NDArray[Any]
RNG = np.random.default_rng(5)
QUICK = Retries(attempts=3, first_pause_s=0.0)


def make_arrays() -> dict[str, Array]:
    return {
        "model/h.0.weight": RNG.standard_normal((1000, 30)).astype(np.float32),
        "model/frozen": RNG.standard_normal((900, 40)).astype(np.float32),
        "optimizer/exp_avg/h.0.weight": RNG.standard_normal((1000, 30)).astype(np.float32),
    }


def save(world: World, local: Path, url: str, **fields: Any) -> list[Any]:
    return wait_all(begin_upload(world, local, url, OPTIONS, **fields))


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(make_arrays(), world_size=2, small={"buffer/n": np.array(7)}) as world:
        yield world


def test_only_what_changed_is_sent_again(tmp_path: Path, url: str, world: World) -> None:
    local, arrived = tmp_path / "local", tmp_path / "runs" / "one"
    first = save(world, local, f"{url}/one")
    assert first[0].url == f"{url}/one/step-00000001"
    assert values(arrived) == as_bytes({**world.arrays, **world.small})
    assert {path.name for path in arrived.iterdir()} == {"latest", "step-00000001"}
    shards = {path: path.stat().st_size for path in arrived.rglob("c.*")}
    assert sum(one.uploaded_bytes for one in first) == sum(shards.values())
    world.arrays["model/h.0.weight"][:] += 1
    world.fill()
    second = save(world, local, f"{url}/one", step=2)
    changed = sum(size for path, size in shards.items() if path.parent == arrived / "step-00000001/model/h.0.weight")
    assert sum(one.uploaded_bytes for one in second) == changed
    assert values(arrived) == as_bytes({**world.arrays, **world.small})
    assert whole(arrived) == ["step-00000001", "step-00000002"]
    frozen = "model/frozen/c.0.0"
    assert (arrived / "step-00000001" / frozen).samefile(arrived / "step-00000002" / frozen)


def test_a_file_with_the_same_checksums_and_other_bytes_is_sent(tmp_path: Path, url: str) -> None:
    arrays = make_arrays()
    path = save_arrays(tmp_path / "a", arrays, run_id="run")
    upload_checkpoint(path, f"{url}/one", OPTIONS)
    # As if the checksums of two contents agreed: the service's copy has other bytes than its manifest says.
    stored = tmp_path / "runs/one/step-00000001/model/frozen/c.0.0"
    data = bytearray(stored.read_bytes())
    data[5000] ^= 1
    stored.chmod(0o644)
    stored.write_bytes(data)
    path = save_arrays(tmp_path / "a", arrays, run_id="run", step=2)
    upload_checkpoint(path, f"{url}/one", OPTIONS)
    assert values(tmp_path / "runs/one", "step-00000002") == as_bytes(arrays)
    assert digests(tmp_path / "runs/one/step-00000002") == digests(path)


def test_an_upload_goes_on_where_its_connection_broke(tmp_path: Path, url: str) -> None:
    path = save_arrays(tmp_path / "a", {"model/a": RNG.standard_normal((3000, 500))}, run_id="run")
    with proxy_to(int(url.rpartition(":")[2])) as proxy:
        for at in (2_000_000, 5_000_000, 9_000_000):
            proxy.after(at, proxy.cut)
        advanced: list[int] = []
        upload_checkpoint(path, f"http://127.0.0.1:{proxy.port}/one", OPTIONS, advance=advanced.append)
        total = (path / "model/a/c.0.0").stat().st_size
        # What was under way in sockets is sent twice, the rest once.
        assert proxy.sent_bytes < total + 3 * 2_500_000
        assert total <= sum(advanced) < total + 10_000
    assert digests(tmp_path / "runs/one/step-00000001") == digests(path)


def test_the_successor_of_a_client_that_ended_goes_on(tmp_path: Path, url: str, http: urllib3.PoolManager) -> None:
    path = save_arrays(tmp_path / "a", {"model/a": RNG.standard_normal((3000, 500))}, run_id="run")
    with proxy_to(int(url.rpartition(":")[2])) as proxy:
        proxy.after(6_000_000, proxy.close)
        through = UploadPlace(f"http://127.0.0.1:{proxy.port}/one", OPTIONS)
        target = target_in(through.open(QUICK), tag="step-00000001", save_id="0" * 32, run_id="run")
        with open_checkpoint(path) as reader, Workers(1, "test") as workers:
            target.begin(reader, overwrite=False)
            with pytest.raises(StorageError, match="no connection"):
                target.send(workers, reader.path, local_files(reader), lambda _: None)
    runs = tmp_path / "runs"
    assert [one.name for one in (runs / "one").iterdir()] == [".uploads"]
    assert http.request("GET", f"{url}/api/runs", headers=BEARER).json()["runs"] == []
    with pytest.raises(CheckpointNotFoundError):
        open_checkpoint(runs / "one")

    def received() -> int:
        (state,) = http.request("GET", f"{url}/api/uploads", headers=BEARER).json()["uploads"]
        upload = http.request("GET", f"{url}/api/uploads/{state['id']}", headers=BEARER).json()
        return sum(int(file["received"]) for file in upload["files"])

    until(lambda: received() > 4_000_000)  # the service may still take in what came before the end
    there, total = received(), (path / "model/a/c.0.0").stat().st_size
    assert there < total
    with proxy_to(int(url.rpartition(":")[2])) as proxy:
        upload_checkpoint(path, f"http://127.0.0.1:{proxy.port}/one", OPTIONS)
        assert proxy.sent_bytes < total - there + 100_000
    assert whole(runs / "one") == ["step-00000001"]
    assert not (runs / "one" / ".uploads").exists()
    # Once more: it is there, and nothing is sent.
    upload_checkpoint(path, f"{url}/one", OPTIONS)


def test_a_cancelled_upload_ends_within_a_file_and_is_given_up_at_the_service(tmp_path: Path, url: str) -> None:
    path = save_arrays(tmp_path / "a", {"model/a": RNG.standard_normal((3000, 500))}, run_id="run")
    retries = Retries()
    target = target_in(UploadPlace(f"{url}/one", OPTIONS).open(retries), "step-00000001", "0" * 32, "run")
    with open_checkpoint(path) as reader, Workers(1, "test") as workers:
        target.begin(reader, overwrite=False)
        with pytest.raises(CheckpointError, match="cancelled"):
            target.send(
                workers,
                reader.path,
                files := local_files(reader),
                Mock(side_effect=[None, None, CheckpointError("cancelled")]),
            )
        (path / "model/a/c.0.0").write_bytes(b"short")
        with pytest.raises(StorageError, match="the file has 5 bytes, expected"):
            target.send(workers, reader.path, files, lambda _: None)
        assert (tmp_path / "runs/one/.uploads").exists()
        retries.cancelled.set()
        target.discard(ended=True)
    assert not any(path.is_file() for path in (tmp_path / "runs").rglob("*"))


def test_a_tag_is_replaced_by_its_own_run_and_else_only_where_that_is_asked_for(tmp_path: Path, url: str) -> None:
    local, runs = tmp_path / "a", tmp_path / "runs"
    first = save_arrays(local, make_arrays(), run_id="run")
    upload_checkpoint(first, f"{url}/one", OPTIONS)
    with open_world(make_arrays()) as world:
        (summary,) = save(world, tmp_path / "b", f"{url}/one")
        assert any("was replaced" in message for message in summary.messages)
        assert values(runs / "one/step-00000001") == as_bytes(world.arrays)
    again = save_arrays(tmp_path / "c", make_arrays(), run_id="run")
    with pytest.raises(CheckpointExistsError, match="pass overwrite=True"):
        upload_checkpoint(again, f"{url}/one", OPTIONS)
    upload_checkpoint(again, f"{url}/one", OPTIONS, overwrite=True)
    assert digests(runs / "one/step-00000001") == digests(again)
    assert {path.name for path in (runs / "one").iterdir()} == {"latest", "step-00000001"}


def test_two_runs_cannot_write_one_name(tmp_path: Path, url: str) -> None:
    upload_checkpoint(save_arrays(tmp_path / "a", make_arrays(), run_id="a"), f"{url}/one", OPTIONS)
    other = save_arrays(tmp_path / "b", make_arrays(), run_id="b", step=2)
    with pytest.raises(CheckpointExistsError, match=r"another training run.*save under another name"):
        upload_checkpoint(other, f"{url}/one", OPTIONS, overwrite=True)
    with open_world(make_arrays()) as world, pytest.raises(CheckpointExistsError, match="another training run"):
        save(world, tmp_path / "c", f"{url}/one", run_id="c", step=3)
    assert whole(tmp_path / "runs/one") == ["step-00000001"]
    upload_checkpoint(other, f"{url}/two", OPTIONS)
    # Of two that begin at a name without checkpoints it is the first one's.
    third = UploadPlace(f"{url}/three", OPTIONS)
    with open_checkpoint(other) as reader:
        target_in(third.open(QUICK), tag="step-00000002", save_id="0" * 32, run_id="b").begin(reader, overwrite=False)
    with pytest.raises(CheckpointExistsError, match="another training run uploads"):
        upload_checkpoint(tmp_path / "a", f"{url}/three", OPTIONS)


def test_retention_is_the_client_s(tmp_path: Path, url: str) -> None:
    with open_world({"model/a": np.arange(4.0)}) as world:
        for step in range(1, 5):
            save(world, tmp_path / "a", f"{url}/one", step=step, keep=Keep(last=2))
    assert [info.record.step for info in tags(tmp_path / "runs/one")] == [3, 4]


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_what_lies_beside_the_arrays_arrives_too(codec: str | None, tmp_path: Path, url: str) -> None:
    path = save_arrays(tmp_path / "a", make_arrays(), world_size=3, small={"buffer/n": np.array(7)})
    if codec:  # an archive
        with open_checkpoint(path) as reader:
            path = reshard_checkpoint(reader, tmp_path / "b", 2, lambda _: None, codec=codec)
    (path / "config.json").write_text("{}")
    (path / "empty").write_text("")
    upload_checkpoint(path, f"{url}/one", OPTIONS)
    assert digests(tmp_path / "runs/one/step-00000001") == digests(path)


def test_a_drive_without_room_refuses_before_anything_is_sent(tmp_path: Path, serve: Serve) -> None:
    files = FaultyFiles()
    (tmp_path / "runs").mkdir()
    base = serve(tmp_path / "runs", token=TOKEN, files=files)
    path = save_arrays(tmp_path / "a", make_arrays(), run_id="run")
    files.free = sum(one.stat().st_size for one in path.rglob("c.*"))
    with pytest.raises(DiskFullError, match=r"the upload needs \d+ bytes, but only \d+ are free: make room on"):
        upload_checkpoint(path, f"{base}/one", OPTIONS)
    assert not list((tmp_path / "runs/one").rglob("c.*"))
    files.free = None
    upload_checkpoint(path, f"{base}/one", OPTIONS)
    assert digests(tmp_path / "runs/one/step-00000001") == digests(path)


def test_an_upload_resumes_after_a_drive_was_full(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = save_arrays(tmp_path / "a", make_arrays(), run_id="run"), aiofiles.open
    with monkeypatch.context() as patch:
        patch.setattr(aiofiles, "open", lambda path, mode: real("/dev/full", mode))
        with pytest.raises(DiskFullError, match="the file cannot be written"):
            upload_checkpoint(path, f"{url}/one", OPTIONS)
    upload_checkpoint(path, f"{url}/one", OPTIONS)
    assert digests(tmp_path / "runs/one/step-00000001") == digests(path)


@pytest.fixture
def run_url(url: str) -> str:
    return f"{url}/run"


def make(tmp_path: Path, stage: int = 1, token: str = TOKEN, **own: Any) -> dict[str, Any]:
    own = {"storage_options": {"token": token}, "upload_folder": str(tmp_path / "local"), **own}
    return make_config(stage, zstore=own)


def _train(rank: int, tmp_path: Path, run_url: str) -> int:
    with start(make(tmp_path, 3, keep=2)) as engine:
        for number in range(3):
            step(engine)
            engine.save_checkpoint(run_url, wait=number == 2)
        return int(engine.global_steps)


def test_two_ranks_save_to_a_service_and_one_goes_on(tmp_path: Path, run_url: str) -> None:
    assert run_ranks(_train, 2, tmp_path, run_url) == [3, 3]
    assert whole(tmp_path / "runs/run") == ["step-00000002", "step-00000003"]
    assert not list((tmp_path / "local").glob("*/step-*"))
    with start(make(tmp_path)) as engine:
        path, _ = engine.load_checkpoint(run_url)
        assert path == f"{run_url}/step-00000003"
        step(engine)
        expected = state_of(engine)
        engine.save_checkpoint(run_url, tag="again")
    with start(make(tmp_path, 2)) as engine:
        engine.load_checkpoint(run_url, tag="again")
        assert {**state_of(engine), "counters": ()} == {**expected, "counters": ()}
    (journal,) = (tmp_path / "runs/run").glob("journal-*.jsonl")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == [1, 2, 3, 4]
    assert [line["kind"] for line in lines].count("start") >= 2
    of_ranks = [one for one in lines if one["kind"] == "save" and one["state"] == "uploaded" and one["tag"] != "again"]
    shards = [path.stat().st_size for path in (tmp_path / "runs/run/step-00000002").rglob("c.*")]
    assert of_ranks[0]["uploaded_bytes"] == sum(shards), "of both ranks, the first time all of it"
    assert ("uploaded", "again") in [(line["state"], line["tag"]) for line in lines if line["kind"] == "save"]
    assert whole(tmp_path / "runs/run") == ["step-00000002", "step-00000003", "again"]


def test_what_is_wrong_surfaces(tmp_path: Path, run_url: str) -> None:
    with start(make(tmp_path, token="other")) as engine:
        step(engine)
        ticket = engine.save_checkpoint(run_url, wait=False)
        with pytest.raises(UsageError, match="does not accept the token"):
            ticket.wait()
        with pytest.raises(UsageError, match="does not accept the token"):
            engine.wait_for_checkpoint()
        with pytest.raises(UsageError, match=r"a run of a service: name it as http://.*/one"):
            engine.save_checkpoint(f"{run_url[:-3]}one/inside")
    assert not list((tmp_path / "local").glob("*/*.tmp-*"))


def test_the_command_trains_to_a_service(tmp_path: Path, run_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, config = tmp_path / "text.txt", tmp_path / "ds.json"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    own = {"keep": 1, "upload_folder": str(tmp_path / "local")}
    config.write_text(json.dumps({"train_batch_size": 4, "optimizer": ADAM, "zstore": own}))
    model = tmp_path / "config.json"
    model.write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 300}))
    options: dict[str, Any] = {"model": str(model), "data": text, "config": config, "save": run_url}
    with pytest.raises(UsageError, match="needs a token"):
        train_command(TrainOptions(**options, steps=2, save_every=1, seq_len=16))
    monkeypatch.setenv("ZSTORE_TOKEN", TOKEN)
    train_command(TrainOptions(**options, steps=2, save_every=1, seq_len=16))
    train_command(TrainOptions(**options, steps=3, save_every=1, resume="auto"))
    assert whole(tmp_path / "runs/run") == ["step-00000003"]


def _lines(*numbers: int) -> bytes:
    return b"".join(b'{"kind":"step","step":%d}\n' % number for number in numbers)


def test_lines_are_appended_once_at_their_place(tmp_path: Path, url: str, http: urllib3.PoolManager) -> None:
    stored = tmp_path / "runs/one" / journal_file("abc")

    def post(lines: bytes, offset: Any, run: str = "one", run_id: str = "abc") -> tuple[int, Any]:
        place = f"{url}/api/runs/{run}/journals/{run_id}?offset={offset}"
        answer = http.request("POST", place, body=lines, headers=BEARER)
        return answer.status, answer.json()

    first, second = _lines(1, 2), _lines(3)
    assert post(first, 0) == (200, {"bytes": len(first)})
    assert post(second, len(first)) == (200, {"bytes": len(first) + len(second)})
    assert post(second, len(first))[0] == 200  # the answer was lost
    assert post(first + second + _lines(4), 0)[0] == 200
    assert stored.read_bytes() == _lines(1, 2, 3, 4)
    for lines, offset, expected in [
        (_lines(9), 0, 409),
        (_lines(9), 10**6, 409),
        (b"{}", 0, 400),
        (b"", 0, 400),
        (b"text\n", 0, 400),
        (_lines(5), "x", 400),
        (_lines(5), -1, 400),
        (b"{" + b" " * 2**20 + b"}\n", 0, 413),
    ]:
        assert post(lines, offset)[0] == expected, (lines[:20], offset)
    assert post(first, 0, run_id="..%2fx")[0] in (400, 404)
    assert post(first, 0, run=".hidden")[0] == 400
    # A line that the end of the service cut off.
    with stored.open("ab") as file:
        file.write(b'{"kind": "st')
    assert post(_lines(5), len(_lines(1, 2, 3, 4)))[0] == 200
    assert stored.read_bytes() == _lines(1, 2, 3, 4, 5)
    save_arrays(tmp_path / "runs/other", {"model/a": np.zeros(3)}, run_id="other")
    assert post(first, 0, run="other")[0] == 409
    assert http.request("POST", f"{url}/api/runs/one/journals/abc?offset=0", body=first).status == 401


def test_lines_of_deep_json_are_passed_over(tmp_path: Path, url: str, http: urllib3.PoolManager) -> None:
    deep = b'{"kind":"start","config":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    place = f"{url}/api/runs/one/journals/abc?offset=0"
    assert http.request("POST", place, body=deep + _lines(7), headers=BEARER).status == 200
    runs = http.request("GET", f"{url}/api/runs", headers=BEARER)
    assert (runs.status, runs.json()["runs"][0]["step"]) == (200, 7)


def test_a_journal_is_sent_as_it_grows_and_goes_on_elsewhere(tmp_path: Path, url: str) -> None:
    stored = tmp_path / "runs/one" / journal_file("abc")
    problems: list[str] = []

    def tail(path: Path, place: str, options: dict[str, str] = OPTIONS) -> JournalTail:
        start = path.stat().st_size if path.exists() else 0
        return JournalTail(path, UploadPlace(place, options), "abc", start, failed=problems.append)

    with proxy_to(int(url.rpartition(":")[2])) as proxy:
        first = tail(tmp_path / "first.jsonl", f"http://127.0.0.1:{proxy.port}/one")
        proxy.after(1500, proxy.cut)
        for number in range(1, 40):
            with (tmp_path / "first.jsonl").open("ab") as file:
                file.write(_lines(number))
            first.send()
    assert problems == []
    again = tail(tmp_path / "second.jsonl", f"{url}/one")  # on another machine, whose folder has nothing of it
    (tmp_path / "second.jsonl").write_bytes(_lines(40) + b'{"kind": "st')
    again.send(is_end=True)
    assert stored.read_bytes() == _lines(*range(1, 41))
    # As many whole lines at a time as the service takes; one that is longer than that is refused for good.
    long = tmp_path / "long.jsonl"
    at_most = tail(long, f"{url}/two")
    long.write_bytes(b"".join(b'{"a":"%s"}\n' % (b"x" * size) for size in (400_000, 900_000, 1_100_000)))
    for _ in range(2):
        at_most.send()
    assert (tmp_path / "runs/two" / journal_file("abc")).stat().st_size == 1_300_000 + 2 * 9
    assert "may have" in problems.pop()
    refused = tail(tmp_path / "third.jsonl", f"{url}/one", {"token": "x"})
    for _ in range(2):
        refused.send()
    (problem,) = problems
    assert "does not accept the token" in problem
