"""What the service says of runs, beside numbers worked out by hand and processes that live or do not."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.serve.answers import Client
from tests.serve.browser import needs_chromium, new_context, open_browser
from tests.serve.conftest import Serve
from tests.serve.sample import RUN_ID, make_sample
from tests.waiting import until
from zstore.journal.lines import encode
from zstore.serve.views.columns import row_of
from zstore.serve.views.steptable import StepTable


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sample(tmp_path_factory.mktemp("sample"))


ELSEWHERE = "a-machine-of-its-own"


def write(folder: Path, *lines: dict[str, Any], run: str = RUN_ID) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"journal-{run}.jsonl"
    with path.open("ab") as file:
        file.writelines(encode({"at": 1000.0, **line}) for line in lines)
    return path


def start(run: str = RUN_ID, **values: Any) -> dict[str, Any]:
    facts = {"run": run, "step": 0, "loop": "engine", "world_size": 1, "host": os.uname().nodename, "pid": os.getpid()}
    return {"kind": "start", "at": time.time(), **facts, **values}


def step(number: int, **values: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, "loss": 1.0, "tokens": 1000, "step_s": 1.0, **values}


def test_tokens_a_second_are_tokens_by_time() -> None:
    table = StepTable()
    for number, step_s in enumerate((1.0, 3.0), 1):
        table.add(row_of(step(number, step_s=step_s)))
    assert table.columns(points=2)["tokens_per_s"] == [1000.0, pytest.approx(1000 / 3)]
    (together,) = table.columns(points=1)["tokens_per_s"]
    assert together == pytest.approx(2000 / 4)


def test_a_run_that_was_resumed_long_ago_trains(tmp_path: Path, serve: Serve) -> None:
    lines = [start(pid=2**22 + 1), *map(step, range(1, 1000)), start(), *map(step, range(900, 2000))]
    write(tmp_path / "run", *lines)
    client = Client(serve(tmp_path), token=None)
    assert client.get("/api/runs")["runs"][0]["state"] == "training"
    write(tmp_path / "run", *lines, start(pid=2**22 + 1), *map(step, range(1900, 3000)))
    assert client.get("/api/runs")["runs"][0]["state"] == "killed"


def test_the_state_of_a_run_and_its_error(tmp_path: Path, serve: Serve) -> None:
    old = time.time() - 3600
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        write(tmp_path / "local", start(pid=process.pid), step(1))
        write(tmp_path / "ended", start(), step(1), {"kind": "end", "step": 1, "reason": "done"})
        write(tmp_path / "asked", start(), step(1), {"kind": "end", "step": 1, "reason": "stopped"})
        wrong = {"kind": "end", "step": 1, "reason": "failed", "problem": "ValueError: bad batch"}
        write(tmp_path / "wrong", start(), step(1), wrong)
        write(
            tmp_path / "far", start(host=ELSEWHERE, at=5.0), step(1, at=6.0)
        )  # a clock of 1970: what counts is arrival
        os.utime(write(tmp_path / "silent", start(host=ELSEWHERE), step(1)), (old, old))
        client = Client(serve(tmp_path), token=None)

        def listed() -> dict[str, tuple[str, str | None]]:
            return {run["name"]: (run["state"], run["error"]) for run in client.get("/api/runs")["runs"]}

        def states() -> dict[str, tuple[str, str | None]]:
            found = listed()
            for name in found:
                summary = client.get(f"/api/runs/{name}")["summary"]
                assert (summary["state"], summary["error"]) == found[name]
            return found

        expected = {
            "local": ("training", None),
            "ended": ("done", None),
            "asked": ("done", None),
            "wrong": ("failed", "ValueError: bad batch"),
            "far": ("training", None),
            "silent": ("lost", None),
        }
        assert states() == expected
        process.kill()
        until(lambda: listed()["local"] == ("killed", None))  # before its parent asks how it ended, too
        assert states() == expected | {"local": ("killed", None)}
        process.wait()
        assert states() == expected | {"local": ("killed", None)}  # at once, though its last line is fresh


def test_numbers_that_are_not_finite_are_events(tmp_path: Path, serve: Serve) -> None:
    lines = [
        step(1),
        step(2, loss=math.nan, grad_norm=math.inf),
        {"kind": "metrics", "step": 3, "values": {"a": -math.inf}},
    ]
    write(tmp_path / "run", start(), *lines, step(4))
    client = Client(serve(tmp_path), token=None)
    assert [run["not_finite_step"] for run in client.get("/api/runs")["runs"]] == [3]
    found = client.get("/api/runs/run")["not_finite"]
    assert [(one["step"], one["values"]) for one in found] == [
        (2, {"loss": "nan", "grad_norm": "inf"}),
        (3, {"a": "-inf"}),
    ]
    assert client.get("/api/runs/run/steps")["columns"]["not_finite"] == [None, 2.0, 1.0, None]


def test_evaluations_and_metrics_of_ones_own_are_columns(tmp_path: Path, serve: Serve) -> None:
    evaluated = {"kind": "eval", "step": 2, "loss": 2.5, "perplexity": 12.0, "samples": 8}
    logged = {"kind": "metrics", "step": 2, "values": {"accuracy": 0.25, "text": "x"}}
    write(
        tmp_path / "run",
        start(),
        {"kind": "eval", "step": 0, "loss": 9.0},
        step(1),
        step(2),
        evaluated,
        logged,
        step(3),
    )
    columns = Client(serve(tmp_path), token=None).get("/api/runs/run/steps")["columns"]
    assert columns["step"] == [0, 1, 2, 3]
    assert columns["loss"] == [None, 1.0, 1.0, 1.0]
    assert columns["metric/eval_loss"] == [9.0, None, 2.5, None]
    assert columns["metric/perplexity"] == [None, None, 12.0, None]
    assert columns["metric/accuracy"] == [None, None, 0.25, None]
    assert "metric/text" not in columns


def test_two_journals_of_a_folder_are_sessions_of_one_run(tmp_path: Path, serve: Serve) -> None:
    for number, (first, last) in enumerate(((1, 5), (4, 7))):
        lines = [step(n, at=1000.0 * number + n, loss=10.0 * number + n) for n in range(first, last + 1)]
        write(tmp_path / "run", start(str(number), at=1000.0 * number, step=first - 1), *lines, run=str(number))
    client = Client(serve(tmp_path), token=None)
    assert [session["run_id"] for session in client.get("/api/runs/run")["sessions"]] == ["0", "1"]
    columns = client.get("/api/runs/run/steps")["columns"]
    assert (columns["step"], columns["loss"]) == ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 14, 15, 16, 17])
    columns = client.get("/api/runs/run/steps?after=2&until=5")["columns"]
    assert (columns["step"], columns["loss"]) == ([3, 4, 5], [3, 14, 15])


def test_a_slash_in_the_first_part_of_a_path_is_none(sample: Path, serve: Serve) -> None:
    client = Client(serve(sample), token=None)
    for path in ("/zarr%2Fgpt-small%2Flatest%2Fzarr.json", "/zarr%2fgpt-small", "/weights%2Fgpt-small", "/api%2Fruns"):
        assert client.raw("GET", path).status == 404, path


def test_a_request_of_no_path_is_refused(sample: Path, serve: Serve) -> None:
    base = urlsplit(serve(sample))
    with socket.create_connection((base.hostname, base.port)) as connection:
        connection.sendall(f"OPTIONS * HTTP/1.1\r\nHost: {base.netloc}\r\nConnection: close\r\n\r\n".encode())
        answer = connection.makefile("rb").read().decode()
    assert answer.startswith("HTTP/1.1 40"), answer
    assert Client(serve(sample), token=None).raw("GET", "/healthz").status == 200


def test_the_methods_of_a_path_are_all_of_its_routes(sample: Path, serve: Serve) -> None:
    client = Client(serve(sample), token=None)
    for path, methods in (
        ("/api/session", "DELETE, POST"),
        ("/api/uploads/abc", "DELETE, GET, HEAD"),
        ("/api/runs/gpt-small", "GET, HEAD"),
        ("/api/runs/gpt-small/checkpoints/step-00000300", "GET, HEAD"),
        ("/api/runs/gpt-small/checkpoints/checkpoint-60/step-00000300/verify", "POST"),
        ("/api/runs/gpt-small/checkpoints/step-00000300/verify", "POST"),
        ("/zarr/gpt-small/latest/zarr.json", "GET, HEAD"),
    ):
        for method in {"PATCH", "GET"} - set(methods.split(", ")):
            answer = client.raw(method, path)
            assert (answer.status, answer.headers["Allow"]) == (405, methods)


TICKS = """async () => {
  const { Plot, axis, baseAxis } = await import("/assets/plot.js");
  const { short, bytes, duration } = await import("/assets/format.js");
  const ticks = async (range, text) => {
    const host = document.body.appendChild(document.createElement("div"));
    const scales = { x: { time: false }, y: { range } };
    const axes = [baseAxis(null, short), axis(null, text, { size: 90 })];
    const plot = new Plot(host, () => ({ data: [[0, 1], range], height: 200, series: [{}, {}], scales, axes }));
    plot.draw();
    await null; // uPlot draws in a microtask.
    return { values: plot.chart.axes[1]._splits, texts: plot.chart.axes[1]._values };
  };
  return Promise.all([[0, 2.2e-5], [0, 3e-4], [1e-3, 1.2e-3], [12340, 12352], [0, 2.5e6], [2.51, 2.53]].map(async (range) => ({
    short: await ticks(range, short), bytes: await ticks(range, bytes), times: await ticks(range, duration),
  })));
}"""


@needs_chromium
def test_ticks_are_written_as_what_they_are(sample: Path, serve: Serve) -> None:
    with open_browser() as browser:
        page = new_context(browser).new_page()
        page.goto(serve(sample))
        found = page.evaluate(TICKS)
    for one in found:
        for text, value in zip(one["short"]["texts"], one["short"]["values"], strict=True):
            unit = {"k": 1e3, "M": 1e6}.get(text[-1], 1.0)
            assert float(text.rstrip("kM")) * unit == pytest.approx(value, rel=1e-9), text
        assert len(set(one["times"]["texts"])) == len(one["times"]["values"])
    assert found[0]["short"]["texts"] == ["0", "5e-6", "1e-5", "1.5e-5", "2e-5"]
    assert found[0]["short"]["values"] == [0, 5e-06, 1e-05, 1.5e-05, 2e-05]
