"""What the service says of a run by its journal, beside numbers worked out by hand and processes that live or do not."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.serve.conftest import Serve
from tests.serve.sample import RUN_ID
from tests.waiting import until
from zstore.journal import encode, read, steps

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


def get(base: str, path: str) -> Any:
    answer = httpx.get(base + path)
    assert answer.status_code == 200, answer.text
    return answer.json()


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
