"""A service that serves another one's runs: read through, kept, checked, and there when the other one is gone."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import urllib3

import zstore
from tests.checkpoint.checkpoints import save_arrays, values
from zstore.errors import StorageError, UsageError
from zstore.io.files import Files
from zstore.serve.kept import KeptFiles
from zstore.serve.server import serving
from zstore.serve.settings import Root, Settings
from zstore.serve.upstream import TOKEN_VARIABLE

ARRAYS = {"model/a": np.arange(5000.0).reshape(50, 100), "optimizer/exp_avg/a": np.arange(70000, dtype=np.float32)}
BIG = {f"model/{name}": np.full(20000, number, np.float32) for number, name in enumerate("abcd")}
TOKEN = "the-token-of-the-other-one"
CHECKPOINT = "step-00000001"
FILE = f"/zarr/gpt/{CHECKPOINT}/optimizer/exp_avg/a/c.0"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    save_arrays(tmp_path / "there" / "gpt", ARRAYS, run_id="one")
    save_arrays(tmp_path / "there" / "big", BIG, run_id="big")
    return tmp_path / "there"


Replica = Callable[..., AbstractContextManager[str]]


@pytest.fixture
def other(runs: Path) -> Iterator[str]:
    with serving(Settings(roots=(Root.parse(str(runs)),), port=0, token=TOKEN)) as base:
        yield base


@pytest.fixture
def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replica:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)

    @contextmanager
    def begin(upstream: str, **more: Any) -> Iterator[str]:
        settings: dict[str, Any] = {"roots": (), "port": 0, "cache": tmp_path / "kept"} | more
        with serving(Settings(upstreams=(upstream,), **settings)) as base:
            yield base

    return begin


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kept" / "files").glob("*/*"))


def test_runs_of_another_service_are_read_and_kept(
    other: str, replica: Replica, runs: Path, tmp_path: Path, http: urllib3.PoolManager
) -> None:
    with replica(other) as base:
        assert [run["name"] for run in http.request("GET", f"{base}/api/runs").json()["runs"]] == ["big", "gpt"]
        assert kept(tmp_path) == []
        plain = (runs / "gpt" / CHECKPOINT / "optimizer/exp_avg/a/c.0").read_bytes()
        part = http.request("GET", base + FILE, headers={"Range": "bytes=100-199"})
        assert (part.status, part.data) == (206, plain[100:200])
        assert http.request("GET", base + FILE).data == plain
        with zstore.open_checkpoint(f"{base}/gpt") as opened:
            for name, array in ARRAYS.items():
                assert np.array_equal(opened[name][:], array)
        contents = [path.read_bytes() for path in kept(tmp_path)]
        assert contents.count(plain) == 1
        new = save_arrays(runs / "gpt", ARRAYS, run_id="one", step=2)
        assert new.name in {path.name for path in (runs / "gpt").iterdir()}
        with zstore.open_checkpoint(f"{base}/gpt/{new.name}") as opened:
            assert opened.step == 2
        refused = http.request("PUT", f"{base}/api/uploads/companions/gpt/config.json", body=b"{}")
        assert refused.status == 403


def test_the_weights_are_those_that_the_other_service_gives(
    other: str, replica: Replica, http: urllib3.PoolManager
) -> None:
    path = f"/weights/gpt/{CHECKPOINT}/model.safetensors?dtype=fp32"
    there = http.request("GET", other + path, headers={"Authorization": f"Bearer {TOKEN}"})
    with replica(other) as base:
        here = http.request("GET", base + path)
        assert (here.status, here.data) == (there.status, there.data) == (200, here.data)


def test_what_is_kept_is_served_when_the_other_service_is_gone(
    runs: Path, replica: Replica, http: urllib3.PoolManager, tmp_path: Path
) -> None:
    plain = values(runs / "gpt")
    with serving(Settings(roots=(Root.parse(str(runs)),), port=0, token=TOKEN)) as other, replica(other) as base:
        with zstore.open_checkpoint(f"{base}/gpt/{CHECKPOINT}") as opened:
            assert {name: opened[name][:].tobytes() for name in ARRAYS} == plain
        second = save_arrays(runs / "gpt", {"model/b": np.arange(9.0)}, run_id="one", step=2).name
        with zstore.open_checkpoint(f"{base}/gpt/{second}"):
            pass  # its metadata alone
    # A replica that starts when nobody answers.
    with replica(other) as base:
        assert [run["name"] for run in http.request("GET", f"{base}/api/runs").json()["runs"]] == ["big", "gpt"]
        with zstore.open_checkpoint(f"{base}/gpt/{CHECKPOINT}") as opened:
            assert {name: opened[name][:].tobytes() for name in ARRAYS} == plain
        lost = http.request("GET", f"{base}/zarr/gpt/{second}/model/b/c.0")
        assert lost.status >= 500
        assert "does not answer" in lost.json()["error"]


def test_many_readers_fetch_a_file_once(
    other: str, replica: Replica, http: urllib3.PoolManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zstore.remote.service_folder import ServiceFolder

    asked: list[str] = []
    read_range = ServiceFolder.read_range

    def note(self: ServiceFolder, file: str, start: int, stop: int) -> bytes:
        asked.append(file)
        return read_range(self, file, start, stop)

    monkeypatch.setattr(ServiceFolder, "read_range", note)
    with replica(other) as base:
        answers: list[int] = []

        def read(number: int) -> None:
            headers = {"Range": f"bytes={number * 1000}-{number * 1000 + 9}"}
            answers.append(http.request("GET", base + FILE, headers=headers).status)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert answers == [206] * 12
    assert asked.count("optimizer/exp_avg/a/c.0") == 1


def test_a_file_that_came_damaged_is_not_kept(
    other: str, replica: Replica, runs: Path, http: urllib3.PoolManager, tmp_path: Path
) -> None:
    file = runs / "gpt" / CHECKPOINT / "optimizer/exp_avg/a/c.0"
    plain = file.read_bytes()
    file.chmod(0o644)
    damaged = bytearray(plain)
    damaged[5000] ^= 1
    file.write_bytes(damaged)
    with replica(other) as base:
        answer = http.request("GET", base + FILE)
        assert (answer.status, "is not kept" in answer.json()["error"]) == (422, True), answer.json()
        assert bytes(damaged) not in [path.read_bytes() for path in kept(tmp_path)]
        file.write_bytes(plain)
        assert http.request("GET", base + FILE).data == plain


def test_what_a_killed_process_was_fetching_is_removed_at_the_next_start(
    other: str, replica: Replica, tmp_path: Path, http: urllib3.PoolManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "left"

    def files() -> set[str]:
        return {path.relative_to(left).as_posix() for path in left.rglob("*") if path.is_file()}

    def verify(part: Path, *_: Any) -> None:
        shutil.copytree(tmp_path / "kept", left)

    monkeypatch.setattr("zstore.serve.upstream.verify_shard", verify)
    with replica(other) as base:
        assert http.request("GET", base + FILE).status == 200
    whole = {
        path.relative_to(tmp_path / "kept").as_posix() for path in (tmp_path / "kept").rglob("*") if path.is_file()
    }
    parts = files() - whole
    assert len(parts) == 1
    with replica(other, cache=left):
        assert not parts & files()


def test_who_writes_a_file_again_does_not_meet_who_wrote_it_before(tmp_path: Path) -> None:
    """The first may still be read, and is removed when it no longer is."""
    kept = KeptFiles(tmp_path, None, Files())
    place = kept.place("weights", "a")
    assert kept.part(place) != kept.part(place)


def test_what_was_used_least_recently_goes(
    other: str, replica: Replica, runs: Path, http: urllib3.PoolManager, tmp_path: Path
) -> None:
    size = (runs / "big" / CHECKPOINT / "model/a/c.0").stat().st_size
    with replica(other, cache_bytes=3 * size) as base:
        for name in "abcd":
            assert http.request("GET", f"{base}/zarr/big/{CHECKPOINT}/model/{name}/c.0").status == 200
        there = [path.read_bytes() for path in kept(tmp_path)]
        plain = {name: (runs / "big" / CHECKPOINT / f"model/{name}/c.0").read_bytes() for name in "abcd"}
        assert [name for name in "abcd" if plain[name] in there][-1] == "d"
        assert plain["a"] not in there
        assert sum(map(len, there)) <= 3 * size


def test_runs_of_both_are_served_and_the_own_ones_come_first(
    other: str, replica: Replica, runs: Path, tmp_path: Path, http: urllib3.PoolManager
) -> None:
    save_arrays(tmp_path / "here" / "gpt", {"model/own": np.arange(3.0)}, run_id="mine")
    with replica(other, roots=(Root.parse(str(tmp_path / "here")),)) as base:
        assert {run["name"] for run in http.request("GET", f"{base}/api/runs").json()["runs"]} == {"gpt", "big"}
        with zstore.open_checkpoint(f"{base}/gpt") as opened:
            assert list(opened) == ["model/own"]


def test_the_token_of_the_replica_is_not_shown_to_the_other_one(
    other: str, replica: Replica, monkeypatch: pytest.MonkeyPatch, http: urllib3.PoolManager
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE)
    monkeypatch.setenv("ZSTORE_TOKEN", TOKEN)  # which would do there
    with replica(other) as base:
        assert http.request("GET", f"{base}/api/runs").json()["runs"] == []


def test_settings_that_make_no_sense_are_refused() -> None:
    for settings, message in (
        ({}, "with --upstream"),
        ({"upstreams": ("http://a:1",), "cache_bytes": 1}, "name that folder too"),
        ({"upstreams": ("ftp://a",)}, "http://host:8700"),
    ):
        with pytest.raises(UsageError, match=message):
            Settings(**{"roots": (), "port": 0} | settings)


def test_without_a_cache_nothing_is_kept(runs: Path, replica: Replica) -> None:
    with serving(Settings(roots=(Root.parse(str(runs)),), port=0, token=TOKEN)) as other:
        gone = replica(other, cache=None)
        with gone as base, zstore.open_checkpoint(f"{base}/gpt") as opened:
            assert np.array_equal(opened["model/a"][:], ARRAYS["model/a"])
    with replica(other, cache=None) as base, pytest.raises((StorageError, zstore.errors.CheckpointNotFoundError)):
        zstore.open_checkpoint(f"{base}/gpt")
