"""`/api` says of runs, checkpoints and arrays what the commands and numpy say, as its document describes it."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
import numpy as np
import pytest
import zarr
from starlette.routing import Route

from tests.serve.answers import TOKEN, Client
from tests.serve.sample import HOSTILE_ARRAY, HOSTILE_RUN, RUN, RUN_ID, make_sample
from tests.waiting import until
from zstore import journal
from zstore.serve.app import make_app
from zstore.serve.server import serving
from zstore.serve.settings import Root, Settings
from zstore.tools.diff import diff_command
from zstore.tools.ls import ls_command
from zstore.tools.opening import Common
from zstore.tools.prune import prune_command
from zstore.tools.verify import verify_command

JSON = Common(json=True)
FIRST, LAST = "step-00000060", "step-00000300"
HOSTILE = f"/api/runs/{quote(HOSTILE_RUN, safe='')}"


@contextlib.contextmanager
def open_client(*places: Path | str, **settings: Any) -> Iterator[Client]:
    """Yield a client of a service over these folders, which takes actions."""
    roots = tuple(Root.parse(str(place)) for place in places)
    options = {"token": TOKEN, "allow_actions": True} | settings
    with serving(Settings(roots=roots, port=0, **options)) as base:
        yield Client(base)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two runs; not to be changed."""
    return make_sample(tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="module")
def client(sample: Path) -> Iterator[Client]:
    """A client of a service over the two runs."""
    with open_client(sample) as client:
        yield client


@pytest.fixture
def copy(sample: Path, tmp_path: Path) -> Path:
    """The first run, to be changed; files that checkpoints shared they share in the copy."""
    folder = tmp_path / RUN
    folder.mkdir()
    os.system(f"cp -a '{sample / RUN}/.' '{folder}'")
    return folder


def printed(capsys: pytest.CaptureFixture[str], run: Callable[[], int]) -> Any:
    """Return the JSON that a command prints."""
    capsys.readouterr()
    run()
    return json.loads(capsys.readouterr().out)


def wait_for_job(client: Client, job_id: str) -> Any:
    """Return a job once it ended."""
    until(lambda: client.get(f"/api/jobs/{job_id}")["state"] != "running")
    return client.get(f"/api/jobs/{job_id}")


def test_runs_are_listed_by_their_journals_and_checkpoints(client: Client) -> None:
    hostile, run = client.get("/api/runs")["runs"]
    assert (hostile["name"], run["name"]) == (HOSTILE_RUN, RUN)
    assert (run["state"], run["run_id"], run["step"], run["total_steps"]) == ("done", RUN_ID, 300, 1000)
    assert run["num_checkpoints"] == 5
    assert run["newest"]["checkpoint"] == LAST
    assert (hostile["newest"]["checkpoint"], hostile["newest"]["step"]) == ("checkpoint-40/step-00000040", 40)


def test_a_run_has_its_sessions_saves_and_warnings(client: Client) -> None:
    detail = client.get(f"/api/runs/{RUN}")
    killed, ended = detail["sessions"]
    assert (killed["ended_at"], killed["loop"], killed["first_step"]) == (None, "engine", 0)
    assert ended["ended_at"] is not None
    assert (ended["loop"], ended["first_step"]) == ("trainer", 120)
    assert [(save["step"], save["state"]) for save in detail["saves"]] == [
        *((step, "committed") for step in (60, 120, 180, 240, 300)),
        (300, "failed"),
    ]
    assert "<b>expected" in detail["warnings"][0]["text"]
    assert client.get(HOSTILE)["sessions"][0]["loop"] == "trainer"


def test_steps_are_those_of_the_journal(client: Client, sample: Path) -> None:
    expected = journal.steps(journal.read(sample / RUN))
    found = client.get(f"/api/runs/{RUN}/steps?points=1000")
    assert found["last_step"] == 300
    columns = found["columns"]
    assert columns["step"] == list(range(1, 301))
    for name in (
        "loss",
        "lr",
        "grad_norm",
        "tokens_per_s",
        "stall_s",
        "rate/disk read",
        "memory/host",
        "stall/waiting for room",
    ):
        assert columns[name] == pytest.approx(expected[name]), name
    few = client.get(f"/api/runs/{RUN}/steps?points=30&after=150")["columns"]
    assert few["step"] == list(range(155, 301, 5))
    losses = np.array([np.nan if loss is None else loss for loss in columns["loss"][150:]]).reshape(30, 5)
    assert few["loss"] == pytest.approx(np.nanmean(losses, axis=1))
    assert few["loss_min"] == pytest.approx(np.nanmin(losses, axis=1))
    assert few["loss_max"] == pytest.approx(np.nanmax(losses, axis=1))
    assert client.get(f"/api/runs/{RUN}/steps?after=300")["columns"]["step"] == []


def test_placement_has_the_plan_beside_what_was_measured(client: Client) -> None:
    placement = client.get(f"/api/runs/{RUN}/placement")
    assert {(part["tier"], part["kind"]) for part in placement["parts"]} == {
        ("host", "parameters"),
        ("disk", "optimizer state"),
        ("device", "buffers"),
    }
    for part in placement["parts"]:
        arrays = [array["nbytes"] for array in placement["arrays"] if array["tier"] == part["tier"]]
        assert part["measured_bytes"] == sum(arrays) == part["planned_bytes"] - 4096


@pytest.mark.parametrize("run", [RUN, HOSTILE_RUN])
def test_checkpoints_take_share_and_free_what_ls_says(
    client: Client, sample: Path, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = printed(capsys, lambda: ls_command(str(sample / run), JSON))["checkpoints"]
    found = client.get(f"/api/runs/{quote(run, safe='')}/checkpoints")
    assert [
        (one["checkpoint"], one["step"], one["size_bytes"], one["shared_bytes"], one["freed_bytes"])
        for one in found["checkpoints"]
    ] == [(one["tag"], one["step"], one["size_bytes"], one["shared_bytes"], one["freed_bytes"]) for one in expected]
    assert all(one["shared_bytes"] > 0 and one["metrics"]["loss"] > 0 for one in found["checkpoints"])


def test_what_is_not_committed_is_named(client: Client) -> None:
    found = client.get(f"/api/runs/{RUN}/checkpoints")
    (unfinished,) = found["unfinished"]
    assert unfinished == {"name": "step-00000310", "state": "interrupted", "nbytes": 5000}
    assert [refused["name"] for refused in found["refused"]] == ["step-00000001"]
    inodes = {(s.st_dev, s.st_ino): s.st_size for s in _files(client, found)}
    assert found["total_bytes"] == sum(inodes.values())


def _files(client: Client, found: Any) -> list[os.stat_result]:
    run = Path(client.get(f"/api/runs/{RUN}")["summary"]["location"])
    folders = [run / one["checkpoint"] for one in found["checkpoints"]]
    return [path.stat() for folder in folders for path in folder.rglob("*") if path.is_file()]


def test_freed_bytes_follow_links_that_others_make_and_remove(copy: Path) -> None:
    with open_client(copy) as client:
        path = f"/api/runs/{RUN}/checkpoints"
        before = client.get(path)["checkpoints"]
        shutil.rmtree(copy / FIRST)
        os.link(copy / LAST / "model" / "wte.weight" / "c.0.0", copy / "kept-elsewhere")
        nbytes = (copy / "kept-elsewhere").stat().st_size
        until(lambda: len(client.get(path)["checkpoints"]) == 4)
        after = client.get(path)["checkpoints"]
        assert after[-1]["freed_bytes"] == before[-1]["freed_bytes"] - nbytes
        (copy / "kept-elsewhere").unlink()
        until(lambda: client.get(path)["checkpoints"][-1]["freed_bytes"] == before[-1]["freed_bytes"])


def test_a_checkpoint_and_its_arrays(client: Client, sample: Path) -> None:
    detail = client.get(f"/api/runs/{RUN}/checkpoints/latest")
    assert detail["entry"]["checkpoint"] == LAST
    assert detail["state"]["client_state"] == {"epoch": 3}
    arrays = client.get(f"/api/runs/{RUN}/checkpoints/{LAST}/arrays")["arrays"]
    assert len(arrays) == detail["num_arrays"]
    assert sum(array["nbytes"] for array in arrays) == detail["array_bytes"]
    names = [array["name"] for array in arrays]
    assert names.index("model/h.2.attn.weight") < names.index("model/h.10.attn.weight")
    group = zarr.open_group(sample / RUN / LAST, mode="r")
    for array in arrays:
        folder = array["url"].removeprefix(f"/zarr/{RUN}/{LAST}/")
        stored = group[folder.replace("%25", "%")]
        assert (str(stored.dtype), list(stored.shape)) == (array["dtype"], array["shape"])
    assert client.get(f"{HOSTILE}/checkpoints/checkpoint-40/step-00000040")["entry"]["step"] == 40
    assert client.get(f"{HOSTILE}/checkpoints/checkpoint-40/step-00000040/arrays")["arrays"]


@pytest.mark.parametrize("name", ["model/broken.weight", HOSTILE_ARRAY, "model/wte.weight"])
def test_statistics_are_those_of_the_values(client: Client, sample: Path, name: str) -> None:
    stats = client.get(f"/api/runs/{RUN}/checkpoints/{LAST}/stats?array={quote(name)}")
    group = zarr.open_group(sample / RUN / LAST, mode="r")
    arrays = client.get(f"/api/runs/{RUN}/checkpoints/{LAST}/arrays")["arrays"]
    url = next(array["url"] for array in arrays if array["name"] == name)
    values = np.asarray(group[url.removeprefix(f"/zarr/{RUN}/{LAST}/").replace("%25", "%")][...], np.float64).ravel()
    finite = values[np.isfinite(values)]
    assert (stats["nan"], stats["inf"]) == (np.isnan(values).sum(), np.isinf(values).sum())
    assert [stats["min"], stats["max"]] == [finite.min(), finite.max()]
    assert [stats["mean"], stats["norm"]] == pytest.approx([finite.mean(), np.linalg.norm(finite)])
    counts, _ = np.histogram(finite, stats["histogram"]["edges"])
    assert stats["histogram"]["counts"] == counts.tolist()


def test_differences_are_those_of_the_command(client: Client, sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = f"before={FIRST}&after={LAST}"
    expected = printed(
        capsys, lambda: diff_command(f"{sample / RUN}:{FIRST}", f"{sample / RUN}:{LAST}", values=True, common=JSON)
    )
    found = client.get(f"/api/runs/{RUN}/diff?{pair}")
    assert [one["name"] for one in found["arrays"]] == [one["name"] for one in expected["arrays"]]
    assert found["counts"] == {"same": expected["num_same"], "values": len(expected["arrays"])}
    assert (found["before"], found["after"]) == (FIRST, LAST)
    (one,) = client.get(f"/api/runs/{RUN}/diff?{pair}&array=model/wte.weight")["arrays"]
    assert {key: value for key, value in one.items() if value is not None} == expected["arrays"][0]
    (same,) = client.get(f"/api/runs/{RUN}/diff?{pair}&array=model/frozen.bias")["arrays"]
    assert same["status"] == "same"


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/api/runs?x=1", 400, "unknown parameter 'x'; expected: q"),
        (f"/api/runs/{RUN}/steps?points=0", 400, "points: expected a whole number from 1 to"),
        (f"/api/runs/{RUN}/steps?points=%F0%9D%9F%8F", 400, "points: expected a whole number"),
        (f"/api/runs/{RUN}/steps?points=1&points=2", 400, "expected once"),
        (f"/api/runs/{RUN}/checkpoints/{LAST}/stats", 400, "the parameter array is missing"),
        (f"/api/runs/{RUN}/checkpoints/{LAST}/stats?array=no", 404, "has no array 'no'"),
        (f"/api/runs/{RUN}/diff?before={FIRST}&after=no", 404, "there is no checkpoint 'no'"),
        (f"/api/runs/{RUN}/checkpoints/..%2F{LAST}", 404, "there is"),
        (f"/api/runs/{RUN}/checkpoints/step-00000310.tmp-{'ab' * 16}", 404, "there is no checkpoint"),
        (f"/api/runs/{RUN}/checkpoints/step-00000001/arrays", 404, "there is no checkpoint"),
        ("/api/runs/no", 404, f"runs that are served: {HOSTILE_RUN}, {RUN}"),
        ("/api/jobs/no", 404, "there is no job 'no'"),
    ],
)
def test_a_wrong_question_is_told_what_was_expected(client: Client, path: str, status: int, text: str) -> None:
    assert text in client.get(path, status)["error"]


def test_answers_are_compressed_where_asked(client: Client) -> None:
    path = f"/api/runs/{RUN}/checkpoints/{LAST}/arrays"
    headers = {"Accept-Encoding": "gzip", "Authorization": f"Bearer {TOKEN}"}
    response = client.pool.request("GET", client.base + path, headers=headers, decode_content=False)
    assert response.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(response.data)) == client.get(path)


def test_verification_is_a_job_with_the_lines_of_the_command(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = copy / FIRST / "model" / "h.3.ln.weight" / "c.0"
    values = zarr.open_group(copy / FIRST, mode="r")["model/h.3.ln.weight"][...]
    data = bytearray(damaged.read_bytes())
    data[data.index(np.asarray(values).tobytes())] ^= 1
    damaged.unlink()
    damaged.write_bytes(data)
    with open_client(copy) as client:
        for tag in (FIRST, LAST):
            capsys.readouterr()
            code = verify_command(str(copy), tag=tag)
            faults = capsys.readouterr().out.splitlines()
            job = wait_for_job(client, client.post(f"/api/runs/{RUN}/checkpoints/{tag}/verify", status=202)["id"])
            assert (job["kind"], job["checkpoint"], job["state"], job["problem"]) == ("verify", tag, "done", None)
            assert job["done_bytes"] == job["total_bytes"] > 0
            assert job["lines"] == (faults if code else ["no faults: every chunk of 53 arrays matches its checksum"])
        assert [one["checkpoint"] for one in client.get("/api/jobs")["jobs"]] == [FIRST, LAST]
        stats = client.get(f"/api/runs/{RUN}/checkpoints/{FIRST}/stats?array=model/h.3.ln.weight", 422)
        assert "c.0" in stats["error"]


def test_pruning_removes_what_its_dry_run_showed(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = printed(capsys, lambda: prune_command(str(copy), keep_last=2, keep_every=120, dry_run=True, common=JSON))
    rules = {"keep_last": 2, "keep_every": 120}
    path = f"/api/runs/{RUN}/prune"
    with open_client(copy) as client:
        shown = client.post(path, rules)
        assert shown["job"] is None
        assert shown["freed_bytes"] == expected["freed_bytes"] > 0
        assert [(one["tag"], one["reasons"], one["size_bytes"]) for one in shown["fates"]] == [
            (one["tag"], one["reasons"], one["size_bytes"]) for one in expected["checkpoints"]
        ]
        assert (copy / FIRST).is_dir()
        assert "ask for a new plan" in client.post(path, {"keep_last": 1, "plan": shown["plan"]}, 409)["error"]
        job = wait_for_job(client, client.post(path, rules | {"plan": shown["plan"]})["job"])
        assert (job["state"], job["done_bytes"]) == ("done", job["total_bytes"])
        assert job["lines"][0].startswith("remove 2 of 5 checkpoints")
        assert sorted(p.name for p in copy.glob("step-*0") if (p / "zarr.json").exists()) == [
            "step-00000120",
            "step-00000240",
            LAST,
        ]
        assert len(client.get(f"/api/runs/{RUN}/checkpoints")["checkpoints"]) == 3
        assert "ask for a new plan" in client.post(path, rules | {"plan": shown["plan"]}, 409)["error"]
        assert "say what to keep" in client.post(path, {}, 400)["error"]
        assert "keep_last" in client.post(path, {"keep_last": "x"}, 400)["error"]
        assert "Extra inputs" in client.post(path, {"keep_latest": 1}, 400)["error"]


def test_checkpoints_in_folders_of_a_loop_are_not_pruned(client: Client) -> None:
    assert "folders of its training loop" in client.post(f"{HOSTILE}/prune", {"keep_last": 1}, 400)["error"]


def test_a_run_that_trains_is_asked_and_no_other(copy: Path) -> None:
    path = f"/api/runs/{RUN}/actions"
    with open_client(copy) as client:
        assert "does not train" in client.post(f"{path}/save", status=409)["error"]
        with (copy / f"journal-{RUN_ID}.jsonl").open("a") as file:
            start = {
                "kind": "start",
                "at": time.time(),
                "run": RUN_ID,
                "step": 300,
                "host": os.uname().nodename,
                "pid": 1,
            }
            file.write(json.dumps(start) + "\n")
        assert client.get("/api/runs")["runs"][0]["state"] == "training"
        asked = client.post(f"{path}/stop", status=202)
        assert (asked["action"], asked["run_id"]) == ("stop", RUN_ID)
        assert json.loads((copy / f"request-{RUN_ID}.json").read_text())["action"] == "stop"
        assert all(action["id"] != asked["id"] for action in client.get(f"/api/runs/{RUN}")["actions"])
        with (copy / f"journal-{RUN_ID}.jsonl").open("a") as file:
            taken = {"kind": "action", "at": time.time(), "action": "stop", "id": asked["id"], "problem": "not now"}
            file.write(json.dumps({"kind": "step", "at": time.time(), "step": 301}) + "\n" + json.dumps(taken) + "\n")
        told = client.get(f"/api/runs/{RUN}")["actions"][-1]
        assert told == {"at": taken["at"], "id": asked["id"], "action": "stop", "step": 301, "problem": "not now"}


def test_a_run_that_says_nothing_any_more_is_not_asked(copy: Path) -> None:
    journal = copy / f"journal-{RUN_ID}.jsonl"
    with journal.open("a") as file:
        now = time.time()
        start = {
            "kind": "start",
            "at": now,
            "run": RUN_ID,
            "step": 300,
            "host": os.uname().nodename,
            "pid": os.getpid(),
        }
        file.write(f"{json.dumps(start)}\n{json.dumps({'kind': 'warning', 'at': now, 'text': 'x'})}\n")
    os.utime(journal, (now - 600, now - 600))
    with open_client(copy) as client:
        assert client.get(f"/api/runs/{RUN}")["summary"]["state"] == "training"  # its process is there
        assert "wrote nothing" in client.post(f"/api/runs/{RUN}/actions/save", status=409)["error"]
        os.utime(journal)  # what counts is when lines arrived, not the clock of who wrote them
        client.post(f"/api/runs/{RUN}/actions/save", status=202)


@pytest.mark.parametrize("path", [f"checkpoints/{LAST}/verify", "prune", "actions/save", "actions/stop"])
def test_acting_needs_the_token_and_a_service_that_allows_it(client: Client, sample: Path, path: str) -> None:
    anybody = Client(client.base, token=None, document=client.document)
    assert "token" in anybody.post(f"/api/runs/{RUN}/{path}", {"keep_last": 1}, 401)["error"]
    with open_client(sample, allow_actions=False) as reader:
        assert "--allow-actions" in reader.post(f"/api/runs/{RUN}/{path}", {"keep_last": 1}, 403)["error"]


def test_a_run_behind_a_url_is_shown_too(sample: Path) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.put(str(sample / RUN), "/api-test/gpt-small", recursive=True)
    try:
        with open_client("memory://api-test/gpt-small") as client:
            local = {one["checkpoint"]: one for one in _listed(sample)}
            found = client.get(f"/api/runs/{RUN}/checkpoints")
            assert [one["checkpoint"] for one in found["checkpoints"]] == list(local)
            for one in found["checkpoints"]:
                folder = sample / RUN / one["checkpoint"]
                sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
                assert (one["num_files"], one["size_bytes"]) == (len(sizes), sum(sizes))
                assert (one["shared_bytes"], one["freed_bytes"]) == (0, sum(sizes))
            assert client.get(f"/api/runs/{RUN}/steps")["last_step"] == 300
            assert client.get(f"/api/runs/{RUN}/checkpoints/{LAST}/stats?array=model/broken.weight")["nan"] == 3
            assert "does not train" in client.post(f"/api/runs/{RUN}/actions/save", status=409)["error"]
    finally:
        fs.rm("/api-test", recursive=True)


def _listed(sample: Path) -> list[Any]:
    with open_client(sample) as client:
        return list(client.get(f"/api/runs/{RUN}/checkpoints")["checkpoints"])


def test_the_document_describes_every_route(client: Client) -> None:
    described = {(method.upper(), path) for path, methods in client.document["paths"].items() for method in methods}
    app = make_app(Settings(roots=(Root.parse("memory://none"),), port=0))
    routes = {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in app.routes
        if isinstance(route, Route) and route.path.startswith("/api")
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert described == routes
    assert client.document["openapi"].startswith("3.1")
    operations = [one for methods in client.document["paths"].values() for one in methods.values()]
    assert len({one["operationId"] for one in operations}) == len(operations)
    schemas = client.document["components"]["schemas"]
    named = set(re.findall(r"#/components/schemas/([^\"]+)", json.dumps(client.document)))
    assert named <= schemas.keys()


def test_sessions_and_uploads_are_as_described(copy: Path) -> None:
    with open_client(copy) as client:
        paths = client.document["paths"]
        assert client.get(f"/api/uploads?run={RUN}") == {
            "uploads": [],
            "held_bytes": None,
            "quota_bytes": None,
            "run_quota_bytes": None,
        }
        journal = f"/api/uploads/journals/{RUN}/{RUN_ID}"
        size = client.get(journal)["bytes"]
        assert "offset" in client.post(f"{journal}?offset=x", status=400)["error"]
        for path in ("/api/uploads/none", "/api/uploads/none/files/model/x"):
            assert "none" in client.get(path, status=404)["error"]
        sent = client.raw("POST", f"{journal}?offset={size}", headers={"Content-Type": "application/x-ndjson"})
        assert str(sent.status) in paths["/api/uploads/journals/{run}/{run_id}"]["post"]["responses"]
        session = paths["/api/session"]
        assert session["post"]["security"] == session["delete"]["security"] == [{}]
        assert paths["/api/uploads"]["get"]["security"] == [{"token": []}]
        schema = session["post"]["requestBody"]["content"]["application/json"]["schema"]
        body = {"token": TOKEN}
        jsonschema.validate(body, {**schema, "components": client.document["components"]})
        stranger = Client(client.base, token=None, document=client.document)
        assert stranger.raw("POST", "/api/session", body).status == 204
        assert "204" in session["post"]["responses"]
        assert "no token" in stranger.post("/api/session", {"token": "x"}, 401)["error"]
