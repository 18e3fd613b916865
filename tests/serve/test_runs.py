"""`/api` says of runs, checkpoints and arrays what the commands, zarr-python and the files say, and of journals what is worked
out by hand."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import httpx
import pytest
import zarr

from tests.serve.conftest import Serve, serving_of
from tests.serve.sample import HOSTILE_RUN, RUN, RUN_ID, arrays_of, make_sample
from tests.waiting import until
from zstore import journal
from zstore.journal import encode, read, steps
from zstore.tools.ls import ls_command
from zstore.tools.options import Common

FIRST, LAST = "step-00000060", "step-00000300"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs; not to be changed."""
    return make_sample(tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="module")
def client(sample: Path) -> Iterator[httpx.Client]:
    with serving_of(sample) as base, httpx.Client(base_url=base) as client:
        yield client


def get(service: httpx.Client | str, path: str) -> Any:
    answer = httpx.get(service + path) if isinstance(service, str) else service.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def run_path(run: str) -> str:
    return f"/api/runs/{quote(run, safe='')}"


def test_runs_are_listed_by_their_journals_and_checkpoints(client: httpx.Client) -> None:
    hostile, run = get(client, "/api/runs")["runs"]
    assert (hostile["name"], run["name"]) == (HOSTILE_RUN, RUN)
    assert (run["state"], run["run_id"], run["step"], run["total_steps"]) == ("done", RUN_ID, 300, 1000)
    assert (run["num_checkpoints"], run["newest"]["checkpoint"]) == (5, LAST)
    assert (hostile["newest"]["checkpoint"], hostile["newest"]["step"]) == ("checkpoint-40/step-00000040", 40)


def test_a_run_has_its_sessions_and_saves(client: httpx.Client) -> None:
    detail = get(client, run_path(RUN))
    killed, ended = detail["sessions"]
    assert (killed["ended_at"], killed["first_step"]) == (None, 0)
    assert ended["ended_at"] is not None
    assert ended["first_step"] == 120
    assert [(save["step"], save["state"]) for save in detail["saves"]] == [
        *((step, "committed") for step in (60, 120, 180, 240, 300)),
        (300, "failed"),
    ]
    assert detail["summary"]["failed_save"].startswith("step 300: ")


def test_steps_are_those_of_the_journal(client: httpx.Client, sample: Path) -> None:
    expected = journal.steps(journal.read(sample / RUN))
    found = get(client, f"{run_path(RUN)}/steps")
    assert found["columns"]["step"] == list(range(1, 301))
    for name in ("loss", "lr", "grad_norm", "tokens_per_s", "stall_s", "rate/disk read", "memory/host"):
        assert found["columns"][name] == pytest.approx(expected[name]), name
    few = get(client, f"{run_path(RUN)}/steps?points=30&after=150")["columns"]
    assert few["step"] == list(range(155, 301, 5))
    assert few["loss"] == [expected["loss"][int(step) - 1] for step in few["step"]]
    assert get(client, f"{run_path(RUN)}/steps?after=300")["columns"]["step"] == []
    assert get(client, f"{run_path(RUN)}/steps?after=297")["columns"]["step"] == [298, 299, 300]


def test_placement_has_the_tier_of_every_array(client: httpx.Client) -> None:
    placement = get(client, f"{run_path(RUN)}/placement")
    kinds = {("host", "parameters"), ("disk", "optimizer state"), ("device", "buffers")}
    assert {(array["tier"], array["kind"]) for array in placement["arrays"]} == kinds
    assert {one["name"]: one["nbytes"] for one in placement["arrays"]} == {n: a.nbytes for n, a in arrays_of().items()}
    assert (placement["host_budget_bytes"], placement["device_bytes"]) == (64 * 2**20, 256 * 2**20)


@pytest.mark.parametrize("run", [RUN, HOSTILE_RUN])
def test_sizes_are_as_ls_says(client: httpx.Client, sample: Path, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    ls_command(str(sample / run), Common(json=True))
    expected = json.loads(capsys.readouterr().out)["checkpoints"]
    found = get(client, f"{run_path(run)}/checkpoints")
    names = ("step", "size_bytes", "shared_bytes", "freed_bytes")
    assert [(one["checkpoint"], *(one[name] for name in names)) for one in found["checkpoints"]] == [
        (one["tag"], *(one[name] for name in names)) for one in expected
    ]
    assert all(one["shared_bytes"] > 0 and one["metrics"]["loss"] > 0 for one in found["checkpoints"])


def test_what_is_no_checkpoint_is_named_and_each_file_counts_once(client: httpx.Client, sample: Path) -> None:
    found = get(client, f"{run_path(RUN)}/checkpoints")
    assert [refused["name"] for refused in found["refused"]] == ["step-00000001"]
    folders = [sample / RUN / one["checkpoint"] for one in found["checkpoints"]]
    stats = [path.stat() for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert found["total_bytes"] == sum({(s.st_dev, s.st_ino): s.st_size for s in stats}.values())


def test_a_checkpoint_and_its_arrays_are_what_zarr_opens(client: httpx.Client) -> None:
    detail = get(client, f"{run_path(RUN)}/checkpoints/latest")
    assert (detail["entry"]["checkpoint"], detail["state"]["client_state"]) == (LAST, {"epoch": 3})
    arrays = get(client, f"{run_path(RUN)}/checkpoints/{LAST}/arrays")["arrays"]
    assert len(arrays) == detail["num_arrays"]
    assert sum(array["nbytes"] for array in arrays) == detail["array_bytes"]
    names = [array["name"] for array in arrays]
    assert names.index("model/h.2.attn.weight") < names.index("model/h.10.attn.weight")
    for array in (arrays[0], arrays[-1]):
        stored = zarr.open_array(f"{client.base_url}/{array['url']}", mode="r")
        assert (str(stored.dtype), list(stored.shape)) == (array["dtype"], array["shape"])
    nested = f"{run_path(HOSTILE_RUN)}/checkpoints/checkpoint-40/step-00000040"
    assert get(client, nested)["entry"]["step"] == 40
    assert get(client, f"{nested}/arrays")["arrays"]


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/api/runs/none", 404, f"runs that are served: {HOSTILE_RUN}"),
        (f"/api/runs/{RUN}/checkpoints/none", 404, "the newest are: "),
        (f"/api/runs/{RUN}/steps?points=0", 400, "query.points: Input should be greater than or equal to 1"),
        (f"/api/runs/{RUN}/steps?after=x", 400, "query.after: Input should be a valid integer"),
        ("/api/none", 404, "see /api/docs"),
    ],
)
def test_a_wrong_question_is_told_what_was_expected(client: httpx.Client, path: str, status: int, text: str) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    assert text in unquote(answer.json()["error"])


def test_a_run_in_a_bucket_is_shown_too(sample: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(sample / RUN), "/bucket/far", recursive=True)
    try:
        with serving_of("memory://bucket/far") as base, httpx.Client(base_url=base) as client:
            (run,) = get(client, "/api/runs")["runs"]
            assert (run["name"], run["step"], run["num_checkpoints"]) == ("far", 300, 5)
            assert get(client, "/api/runs/far/steps")["columns"]["step"][-1] == 300
            stored = zarr.open_group(f"{base}/zarr/far/latest", mode="r")["model/wte.weight"]
            local = zarr.open_group(sample / RUN / LAST, mode="r")["model/wte.weight"]
            assert (stored[:] == local[:]).all()  # type: ignore[index, union-attr]
    finally:
        memory.rm("/bucket", recursive=True)


ELSEWHERE = "a-machine-of-its-own"
GONE = 2**22 + 1
"""A process that cannot be."""


def write(folder: Path, *lines: dict[str, Any], run: str = RUN_ID) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"journal-{run}.jsonl"
    with path.open("ab") as file:
        file.writelines(encode({"kind": line["kind"], "at": 1000.0, **line}) for line in lines)
    return path


def start(run: str = RUN_ID, **values: Any) -> dict[str, Any]:
    facts = {"run": run, "step": 0, "world_size": 1, "host": os.uname().nodename, "pid": os.getpid()}
    return {"kind": "start", "at": time.time(), **facts, **values}


def step(number: int, **values: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, "loss": 1.0, "tokens": 1000, "step_s": 1.0, **values}


def state(base: str) -> str:
    (run,) = get(base, "/api/runs")["runs"]
    return str(run["state"])


def test_a_run_that_was_resumed_long_ago_trains(tmp_path: Path, serve: Serve) -> None:
    lines = [start(pid=GONE), *map(step, range(1, 1000)), start(), *map(step, range(900, 2000))]
    write(tmp_path / "run", *lines)
    base = serve(tmp_path)
    assert state(base) == "training"
    write(tmp_path / "run", *lines, start(pid=GONE), *map(step, range(1900, 3000)))
    assert state(base) == "killed"


def test_the_state_of_a_run_and_its_error(tmp_path: Path, serve: Serve) -> None:
    old = time.time() - 3600
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        write(tmp_path / "local", start(pid=process.pid), step(1))
        write(tmp_path / "ended", start(), step(1), {"kind": "end", "step": 1, "reason": "done"})
        write(tmp_path / "asked", start(), step(1), {"kind": "end", "step": 1, "reason": "stopped"})
        wrong = {"kind": "end", "step": 1, "reason": "failed", "problem": "ValueError: bad batch"}
        write(tmp_path / "wrong", start(), step(1), wrong)
        write(tmp_path / "far", start(host=ELSEWHERE), step(1, at=time.time()))
        write(tmp_path / "silent", start(host=ELSEWHERE, at=old), step(1, at=old))
        base = serve(tmp_path)

        def listed() -> dict[str, tuple[str, str | None]]:
            found = {run["name"]: (run["state"], run["error"]) for run in get(base, "/api/runs")["runs"]}
            for name, one in found.items():
                summary = get(base, f"/api/runs/{name}")["summary"]
                assert (summary["state"], summary["error"]) == one or name == "local"
            return found

        expected = {
            "local": ("training", None),
            "ended": ("done", None),
            "asked": ("done", None),
            "wrong": ("failed", "ValueError: bad batch"),
            "far": ("training", None),
            "silent": ("lost", None),
        }
        assert listed() == expected
        process.kill()
        until(lambda: listed()["local"] == ("killed", None))  # before its parent asks how it ended, too
        process.wait()
        assert listed() == expected | {"local": ("killed", None)}  # at once, though its last line is fresh


def test_numbers_that_are_not_finite_are_events(tmp_path: Path, serve: Serve) -> None:
    metrics = {"kind": "metrics", "step": 3, "metric/a": -math.inf}
    write(tmp_path / "run", start(), step(1), step(2, loss=math.nan, grad_norm=math.inf), metrics, step(4))
    base = serve(tmp_path)
    assert [run["not_finite_step"] for run in get(base, "/api/runs")["runs"]] == [3]
    found = get(base, "/api/runs/run")["not_finite"]
    expected = [(2, {"loss": "nan", "grad_norm": "inf"}), (3, {"metric/a": "-inf"})]
    assert [(one["step"], one["values"]) for one in found] == expected
    assert get(base, "/api/runs/run/steps")["columns"]["loss"] == [1.0, None, None, 1.0]


def test_a_line_with_many_numbers_that_are_not_finite_names_some(tmp_path: Path, serve: Serve) -> None:
    write(tmp_path / "run", start(), step(1, **{f"metric/{number}": math.nan for number in range(1000)}))
    (found,) = get(serve(tmp_path), "/api/runs/run")["not_finite"]
    assert list(found["values"]) == [f"metric/{number}" for number in range(64)]


def test_two_journals_of_a_folder_are_sessions_of_one_run(tmp_path: Path, serve: Serve) -> None:
    for number, (first, last) in enumerate(((1, 5), (4, 7))):
        lines = [step(n, at=1000.0 * number + n, loss=10.0 * number + n) for n in range(first, last + 1)]
        write(tmp_path / "run", start(str(number), at=1000.0 * number, step=first - 1), *lines, run=str(number))
    base = serve(tmp_path)
    assert [session["run_id"] for session in get(base, "/api/runs/run")["sessions"]] == ["0", "1"]
    columns = get(base, "/api/runs/run/steps")["columns"]
    assert (columns["step"], columns["loss"]) == ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 14, 15, 16, 17])


def test_a_page_that_follows_a_run_learns_when_steps_are_repeated(tmp_path: Path, serve: Serve) -> None:
    write(tmp_path / "run", start(), *(step(n, at=float(n)) for n in range(1, 11)))
    base = serve(tmp_path)
    before = get(base, "/api/runs/run/steps")
    write(tmp_path / "run", step(11, at=11.0))
    more = get(base, "/api/runs/run/steps?after=10")
    assert (more["columns"]["step"], more["epoch"] == before["epoch"]) == ([11], True)
    write(tmp_path / "run", start(step=8), *(step(n, at=20.0 + n, loss=2.0) for n in (9, 10)))
    again = get(base, "/api/runs/run/steps")
    assert again["epoch"] != before["epoch"]
    assert (again["columns"]["step"], again["columns"]["loss"][-3:]) == (list(range(1, 11)), [1.0, 2.0, 2.0])
    # An empty one goes again; another file has the same name, as after a restore from a backup.
    (empty := write(tmp_path / "run", run="empty")).touch()
    assert get(base, "/api/runs/run/steps") == again
    empty.unlink()
    (tmp_path / "run" / f"journal-{RUN_ID}.jsonl").unlink()
    write(tmp_path / "run", start(), step(1))
    replaced = get(base, "/api/runs/run/steps")
    assert (replaced["columns"]["step"], replaced["epoch"] != again["epoch"]) == ([1], True)


def test_long_journals_are_sampled_evenly_with_their_tail_and_all_else_whole(tmp_path: Path, serve: Serve) -> None:
    saves = {n: {"kind": "save", "step": n, "tag": f"step-{n}", "state": "committed"} for n in (7, 12_345, 29_999)}
    lines = [start()]
    for number in range(1, 30_001):
        lines += [step(number, at=float(number), loss=number / 7), *([saves[number]] if number in saves else [])]
    write(tmp_path / "run", *lines)
    base = serve(tmp_path)
    columns = get(base, "/api/runs/run/steps?points=10000")["columns"]
    assert 1000 < len(columns["step"]) <= 2500
    assert columns["step"][-500:] == list(range(29_501, 30_001))
    gaps = {after - before for before, after in zip(columns["step"], columns["step"][1:-500], strict=False)}
    assert len(gaps) <= 3, "every n-th, up to the tail"
    assert columns["loss"] == [number / 7 for number in columns["step"]]
    assert [save["step"] for save in get(base, "/api/runs/run")["saves"]] == list(saves)
    whole = steps(read(tmp_path / "run"))
    assert (len(whole["step"]), whole["step"][-1]) == (30_000, 30_000)


def test_a_line_that_is_being_written_is_read_once_it_is_whole(tmp_path: Path, serve: Serve) -> None:
    path = write(tmp_path / "run", start(), step(1))
    base = serve(tmp_path)
    half = encode({"kind": "save", "at": 1.0, "tag": "ü", "state": "committed"})
    for data, expected in ((half[:-3], []), (half[-3:] + b'no json\n{"kind":7}\n', ["ü"])):
        with path.open("ab") as file:
            file.write(data)
        assert [one["tag"] for one in get(base, "/api/runs/run")["saves"]] == expected


def test_texts_of_any_kind_are_answered(tmp_path: Path, serve: Serve) -> None:
    save = {"kind": "save", "state": "failed", "problem": "half of a pair: \ud800"}
    write(tmp_path / "run", start(config={"a": 1e999}), save)
    path = tmp_path / "run" / f"journal-{RUN_ID}.jsonl"
    with path.open("ab") as file:
        file.write(
            b'{"kind":"step","step":1,"loss":NaN,"grad_norm":1e999}\n{"kind":"save","state":"begun","step":"x"}\n'
            b'{"kind":"memory","arrays":5}\n{"kind":"memory","arrays":[5,["a","disk","buffers",1],["b"]]}\n'
        )
    base = serve(tmp_path)
    assert get(base, "/api/runs/run")["saves"][0]["problem"] == "half of a pair: \ud800"
    assert get(base, "/api/runs/run")["summary"]["loss"] is None
    columns = get(base, "/api/runs/run/steps")["columns"]
    assert (columns["loss"], columns["grad_norm"]) == ([None], [None])
    assert [array["name"] for array in get(base, "/api/runs/run/placement")["arrays"]] == ["a"]
    assert json.loads(httpx.get(f"{base}/api/runs").text)["runs"][0]["state"] == "training"
