"""Moving tags, holds and notes at a service: what its lists say, its actions, and what its URLs lead to as a tag moves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import urllib3
import zarr
from safetensors.numpy import load
from typer.testing import CliRunner

import zstore
from tests.checkpoint.checkpoints import save_arrays
from tests.serve.answers import TOKEN, Client
from tests.serve.conftest import Serve
from zstore.checkpoint.catalog import scan
from zstore.checkpoint.folder import LocalFolder
from zstore.checkpoint.marks import change_marks, read_marks
from zstore.errors import CheckpointNotFoundError, UsageError
from zstore.serve.views.timeline import Timeline
from zstore.tools.cli import app

FIRST, SECOND, THIRD = (f"step-{number:08d}" for number in (1, 2, 3))
OPTIONS = {"token": TOKEN}
TAGS = "/api/runs/gpt/tags"


def save(folder: Path, number: int, **options: Any) -> Path:
    arrays = {"model/w": np.full((40, 30), number, np.float32)}
    return save_arrays(folder, arrays, world_size=2, step=number, **options)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of one run with three checkpoints, each of its number."""
    for number in (1, 2, 3):
        save(tmp_path / "runs/gpt", number)
    return tmp_path / "runs"


@pytest.fixture
def client(serve: Serve, runs: Path) -> Client:
    """A client of a service over `runs`, which takes actions."""
    return Client(serve(runs, token=TOKEN, allow_actions=True))


def value(location: str, tag: str | None = None) -> float:
    with zstore.open_checkpoint(location, tag, storage_options=OPTIONS) as opened:
        assert opened.verify() == []
        return float(opened["model/w"][0, 0])


# -- the list and the actions -----------------------------------------------------------------------------------------


def listed(answer: Any) -> dict[str, tuple[list[str], bool, str | None]]:
    return {one["checkpoint"]: (one["moving_tags"], one["held"], one["note"]) for one in answer["checkpoints"]}


def test_actions_move_tags_hold_and_note(client: Client, runs: Path) -> None:
    path = "/api/runs/gpt/checkpoints"
    nothing: tuple[list[str], bool, None] = ([], False, None)
    assert listed(client.get(path)) == dict.fromkeys((FIRST, SECOND, THIRD), nothing)
    client.post(TAGS, {"checkpoint": FIRST, "tag": "prod"})
    client.post(TAGS, {"checkpoint": "prod", "tag": "best", "note": "eval <b>0.3</b>"})
    answer = client.post(TAGS, {"checkpoint": "2", "held": True})
    expected = {FIRST: (["best", "prod"], False, "eval <b>0.3</b>"), SECOND: ([], True, None), THIRD: nothing}
    assert listed(answer) == listed(client.get(path)) == expected
    assert read_marks(runs / "gpt").tags == {"best": FIRST, "prod": FIRST}
    assert client.get(f"{path}/best")["entry"]["checkpoint"] == FIRST
    assert len(client.get(f"{path}/best/arrays")["arrays"]) == 1
    plan = client.post("/api/runs/gpt/prune", {"keep_last": 1})
    assert [fate["reasons"] for fate in plan["fates"]] == [["@best", "@prod"], ["held"], ["last"]]
    client.post(TAGS, {"checkpoint": SECOND, "held": False})
    client.post(TAGS, {"tag": "best"})
    answer = client.post(TAGS, {"checkpoint": FIRST, "note": ""})
    assert listed(answer) == {FIRST: (["prod"], False, None), SECOND: nothing, THIRD: nothing}


@pytest.mark.parametrize(
    ("body", "status", "problem"),
    [
        ({}, 400, "there is no moving tag None"),
        ({"tag": "best"}, 400, "there is no moving tag 'best'"),
        ({"held": True}, 400, "name it"),
        ({"checkpoint": "nobody", "tag": "best"}, 404, "no committed checkpoint with the tag 'nobody'"),
        ({"checkpoint": "../gpt", "tag": "best"}, 400, "cannot be a tag"),
        ({"checkpoint": FIRST, "tag": "a/b"}, 400, "cannot be a tag that moves"),
        ({"checkpoint": FIRST, "tag": SECOND}, 400, "which comes first"),
        ({"checkpoint": FIRST, "note": "a\nb"}, 400, "on one line"),
        ({"checkpoint": FIRST, "color": "red"}, 400, "color"),
    ],
)
def test_bad_requests_change_nothing(client: Client, runs: Path, body: Any, status: int, problem: str) -> None:
    assert problem in client.post(TAGS, body, status)["error"]
    assert not (runs / "gpt/tags.json").exists()


def test_acting_needs_the_token_and_a_service_that_allows_it(client: Client, serve: Serve, runs: Path) -> None:
    body = {"checkpoint": FIRST, "tag": "prod"}
    anybody = Client(client.base, token=None, document=client.document)
    assert "token" in anybody.post(TAGS, body, 401)["error"]
    reader = Client(serve(runs, token=TOKEN), document=client.document)
    assert "--allow-actions" in reader.post(TAGS, body, 403)["error"]
    assert not (runs / "gpt/tags.json").exists()


def test_what_others_change_is_seen(runs: Path) -> None:
    timeline = Timeline(LocalFolder(runs / "gpt"))
    before = timeline.mark()
    change_marks(runs / "gpt", FIRST, tag="best")
    timeline.forget()
    assert timeline.mark() != before
    shutil.rmtree(runs / "gpt" / FIRST)
    timeline.forget()
    assert timeline.answer().dangling == {"best": FIRST}
    (runs / "gpt/tags.json").write_text("{")
    timeline.forget()
    answer = timeline.answer()
    assert [one.checkpoint for one in answer.checkpoints] == [SECOND, THIRD]
    assert "tags.json is not JSON" in answer.refused[0].reason


# -- URLs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def open_base(serve: Serve, runs: Path) -> str:
    """A service that anybody reads."""
    change_marks(runs / "gpt", FIRST, tag="prod")
    return serve(runs)


@pytest.mark.parametrize("form", ["gpt/prod", "gpt@prod"])
def test_files_and_their_etags_follow_the_tag(form: str, open_base: str, runs: Path, http: urllib3.PoolManager) -> None:
    url = f"{open_base}/zarr/{form}/model/w/c.0.0"
    first = http.request("GET", url)
    assert first.status == 200
    assert first.data == http.request("GET", url.replace(form, f"gpt/{FIRST}")).data
    etag = {"If-None-Match": first.headers["ETag"]}
    assert http.request("GET", url, headers=etag).status == 304
    assert "no-cache" in first.headers["Cache-Control"]
    change_marks(runs / "gpt", SECOND, tag="prod")
    second = http.request("GET", url, headers=etag)
    assert (second.status, second.data) == (200, http.request("GET", url.replace(form, f"gpt/{SECOND}")).data)
    assert second.headers["ETag"] != first.headers["ETag"]
    xarray = http.request("GET", url.replace("/zarr/", "/xarray/"))
    assert xarray.data == second.data
    names = http.request("GET", f"{open_base}/zarr/{form}/", headers={"Accept": "application/json"}).json()
    assert "zstore.json" in [file["name"] for file in names["files"]]
    assert http.request("GET", url.replace("prod", "bets")).status == 404
    assert http.request("GET", f"{open_base}/zarr/{form}").headers["Location"] == f"./{form.rpartition('/')[2]}/"
    group = zarr.open_group(f"{open_base}/zarr/{form}", mode="r")
    assert group["model/w"][0, 0] == 2
    shutil.rmtree(runs / "gpt" / SECOND)
    assert http.request("GET", url).status == 404
    assert http.request("GET", f"{open_base}/zarr/gpt/tags.json").json()["tags"] == {"prod": SECOND}


@pytest.mark.parametrize("form", ["gpt/prod", "gpt@prod"])
def test_weights_follow_the_tag_and_a_resumed_download_does_not_mix_two(
    form: str, open_base: str, runs: Path, http: urllib3.PoolManager
) -> None:
    url = f"{open_base}/weights/{form}/model.safetensors?dtype=fp32"
    first = http.request("GET", url)
    assert load(first.data)["w"][0, 0] == 1
    assert http.request("GET", url, headers={"Range": "bytes=10-"}).status == 200  # it may be another one by now
    resumed = {"Range": "bytes=10-", "If-Range": first.headers["ETag"]}
    assert http.request("GET", url, headers=resumed).status == 206
    change_marks(runs / "gpt", SECOND, tag="prod")
    again = http.request("GET", url, headers=resumed)
    assert (again.status, load(again.data)["w"][0, 0]) == (200, 2)
    assert again.headers["ETag"] != first.headers["ETag"]
    assert http.request("GET", url, headers={"If-None-Match": first.headers["ETag"]}).status == 200
    assert http.request("GET", f"{open_base}/weights/{form}/").json()["checkpoint"] == SECOND


def test_a_checkpoint_of_that_name_comes_first(open_base: str, runs: Path, http: urllib3.PoolManager) -> None:
    save(runs / "gpt", 5, tag="prod")
    assert value(f"{open_base}/gpt/prod") == value(f"{open_base}/gpt@prod") == 5


# -- readers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["/gpt@prod", "/zarr/gpt@prod", "/gpt/prod", "/zarr/gpt/prod"])
def test_readers_take_a_tag_and_keep_to_its_checkpoint(form: str, client: Client, runs: Path) -> None:
    change_marks(runs / "gpt", FIRST, tag="prod")
    with zstore.open_checkpoint(client.base + form, storage_options=OPTIONS) as opened:
        assert opened.tag == FIRST
        change_marks(runs / "gpt", SECOND, tag="prod")
        assert opened["model/w"][0, 0] == 1
        assert opened.verify() == []
    assert value(client.base + form) == value(f"{client.base}/gpt", "prod") == 2


def test_a_run_of_that_name_comes_first(serve: Serve, runs: Path) -> None:
    change_marks(runs / "gpt", FIRST, tag="prod")
    save(runs / "gpt@prod", 7)
    client = Client(serve(runs, token=TOKEN))
    assert value(f"{client.base}/gpt@prod") == 7
    files = client.raw("GET", "/zarr/gpt@prod/", headers={"Accept": "application/json"}).json()
    assert files["folders"] == ["step-00000007"]
    with pytest.raises(CheckpointNotFoundError, match="and the moving tags 'prod'"):
        value(f"{client.base}/gpt@bets")
    with pytest.raises(CheckpointNotFoundError, match="there is no run 'nobody'"):
        value(f"{client.base}/nobody@prod")


def test_the_command_acts_through_a_service(client: Client, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZSTORE_TOKEN", TOKEN)

    def told(*words: str) -> str:
        done = CliRunner().invoke(app, ["tag", f"{client.base}/gpt", *words], catch_exceptions=False)
        assert done.exit_code == 0
        return done.stdout

    assert "prod" in told("prod", "1")
    assert "before the crash" in told("prod", "--hold", "--note", "before the crash")
    marks = read_marks(runs / "gpt")
    assert (marks.tags, marks.held, marks.notes) == ({"prod": FIRST}, [FIRST], {FIRST: "before the crash"})
    ls = CliRunner().invoke(app, ["ls", f"{client.base}/gpt"], catch_exceptions=False)
    assert "@prod held before the crash" in " ".join(ls.stdout.split())
    told("prod", "--remove")
    assert read_marks(runs / "gpt").tags == {}
    monkeypatch.delenv("ZSTORE_TOKEN")
    with pytest.raises(UsageError, match="needs a token"):
        CliRunner().invoke(app, ["tag", f"{client.base}/gpt", "prod", "1"], catch_exceptions=False)


def test_uploads_keep_what_is_marked(serve: Serve, tmp_path: Path, runs: Path) -> None:
    from zstore.remote.upload import upload_checkpoint

    (tmp_path / "there").mkdir()
    base = serve(tmp_path / "there", token=TOKEN, allow_actions=True, keep_last=1)
    for number, tag in enumerate((FIRST, SECOND, THIRD)):
        upload_checkpoint(runs / "gpt" / tag, f"{base}/copy", OPTIONS)
        if number == 0:
            change_marks(tmp_path / "there/copy", FIRST, tag="best")
    assert [info.tag for info in scan(tmp_path / "there/copy").tags] == [FIRST, THIRD]
