"""`zstore report`: the page of a run as one file holds what the service answers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import urllib3

from tests.checkpoint.checkpoints import save_arrays
from tests.serve.conftest import Serve
from tests.serve.sample import HOSTILE_RUN, RUN, make_sample
from zstore.serve.report.bundle import Inside, one_file, read_assets
from zstore.tools import cli

Report = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sample(tmp_path_factory.mktemp("sample"))


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Report:
    """`report(run, "--option", ...)` writes `report.html`; returns the exit code, and what was printed on stderr."""

    def run(*words: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["zstore", "report", *map(str, words), "--out", str(tmp_path / "report.html")])
        try:
            cli.main()
        except SystemExit as end:
            return int(end.code or 0), capsys.readouterr().err
        return 0, capsys.readouterr().err

    return run


def data_in(path: Path) -> dict[str, Any]:
    """What the report holds, by path of the API."""
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def note_in(path: Path) -> str:
    found = re.search(r'<p class="report-note">(.*?)</p>', path.read_text())
    assert found is not None
    return found[1]


@pytest.mark.parametrize("name", [RUN, HOSTILE_RUN])
def test_it_holds_what_the_service_answers(
    name: str, sample: Path, tmp_path: Path, serve: Serve, http: urllib3.PoolManager, report: Report
) -> None:
    code, err = report(sample / name)
    assert code == 0, err
    data = data_in(tmp_path / "report.html")
    base = serve(sample)
    paths = [path for path in data if path not in ("/api", "/api/runs")]
    for path in paths:
        asked, told = http.request("GET", base + path).json(), data[path]
        if path.endswith("/placement"):  # in a report the largest come last
            asked["arrays"].sort(key=lambda array: array["name"])
            told["arrays"].sort(key=lambda array: array["name"])
        assert told == asked, path
    asked = http.request("GET", base + "/api/runs").json()["runs"]
    assert data["/api/runs"]["runs"] == [run for run in asked if run["name"] == name]
    kinds = [path.partition("/checkpoints/")[2].partition("/")[2].partition("?")[0] for path in paths]
    assert kinds.count("stats") + sum(kind.endswith("/stats") for kind in kinds) == 50
    assert sum("/diff?" in path and "array=" not in path for path in paths) == (4 if name == RUN else 1)
    assert sum("/diff?" in path and "array=" in path for path in paths) > 10
    assert "Not in this file: statistics of 3 of 53 arrays." in note_in(tmp_path / "report.html")


def test_it_is_made_of_a_run_behind_a_service_too(sample: Path, tmp_path: Path, serve: Serve, report: Report) -> None:
    code, err = report(f"{serve(sample)}/{quote(HOSTILE_RUN)}", "--arrays", "2")
    assert code == 0, err
    data = data_in(tmp_path / "report.html")
    (tmp_path / "report.html").unlink()
    assert report(sample / HOSTILE_RUN, "--arrays", "2")[0] == 0
    local = data_in(tmp_path / "report.html")
    assert list(data) == list(local)
    for path, answer in local.items():
        if path.endswith(("/steps", "/arrays")) or "/stats?" in path or "/diff?" in path:
            assert data[path] == answer


def test_it_stays_within_its_size_and_says_what_it_lacks(sample: Path, tmp_path: Path, report: Report) -> None:
    assets = read_assets()
    page = one_file(assets["index.html"].decode(), assets, Inside(data={}, title="", note=""))
    most_bytes = len(page.encode()) + 120_000
    code, err = report(sample / RUN, "--max-size", most_bytes)
    assert code == 0, err
    out = tmp_path / "report.html"
    assert most_bytes / 2 < out.stat().st_size <= most_bytes
    data = data_in(out)
    assert f"/api/runs/{RUN}/steps" in data
    for each in ("arrays of step-00000060 (too large)", "statistics of"):
        assert each in err
        assert each in note_in(out)
    code, err = report(sample / RUN, "--max-size", "50kB")
    assert code == 1
    assert "exists: remove it" in err
    out.unlink()
    code, err = report(sample / RUN, "--max-size", "50kB")
    assert code == 2
    assert "--max-size" in err
    assert not out.exists()


def test_statistics_are_made_of_as_many_arrays_as_asked(sample: Path, tmp_path: Path, report: Report) -> None:
    code, err = report(sample / RUN, "--arrays", "1")
    assert code == 0, err
    stats = [answer for path, answer in data_in(tmp_path / "report.html").items() if "/stats?" in path]
    assert [one["array"] for one in stats] == ["model/wte.weight"]


def test_a_run_without_checkpoints_and_one_without_a_journal(sample: Path, tmp_path: Path, report: Report) -> None:
    journal = next((sample / RUN).glob("journal-*"))
    (tmp_path / "only").mkdir()
    shutil.copy(journal, tmp_path / "only")
    assert report(tmp_path / "only")[0] == 0
    data = data_in(tmp_path / "report.html")
    assert data["/api/runs/only/checkpoints"]["checkpoints"] == []
    assert data["/api/runs/only/steps"]["last_step"] == 300
    (tmp_path / "report.html").unlink()
    save_arrays(tmp_path / "plain", {"model/w": np.arange(8.0)})
    assert report(tmp_path / "plain")[0] == 0
    data = data_in(tmp_path / "report.html")
    assert data["/api/runs/plain"]["summary"]["state"] == "unknown"
    assert [path.rpartition("/")[2] for path in data][-3:] == ["step-00000001", "arrays", "stats?array=model%2Fw"]


def test_texts_that_are_no_unicode_are_in_it_as_the_service_answers_them(tmp_path: Path, report: Report) -> None:
    lines = [
        {"kind": "start", "at": 1.0, "run": "abc", "step": 0, "host": "h", "pid": 1, "loop": "train"},
        {"kind": "warning", "at": 2.0, "text": "half of a pair: \ud800"},
    ]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "journal-abc.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    code, err = report(folder)
    assert code == 0, err
    assert data_in(tmp_path / "report.html")["/api/runs/run"]["warnings"][0]["text"] == "half of a pair: ?"


def test_a_damaged_array_is_named_and_the_rest_is_there(tmp_path: Path, report: Report) -> None:
    tag = save_arrays(tmp_path / "run", {"model/w": np.arange(8.0), "model/v": np.arange(9.0)})
    shard = next((tag / "model" / "w").glob("c*"))
    data = bytearray(shard.read_bytes())
    data[4096] ^= 1
    shard.write_bytes(data)
    code, err = report(tmp_path / "run")
    assert code == 0, err
    assert "not in it: statistics of model/w (" in err
    assert sum("/stats?" in path for path in data_in(tmp_path / "report.html")) == 1


def test_what_is_no_run_is_refused_with_what_to_name(sample: Path, tmp_path: Path, report: Report) -> None:
    for place, what in (
        (sample, f"is a folder of runs: name one of them, like {sample}/"),
        (sample / RUN / "step-00000300", "name the folder above"),
        (tmp_path / "missing", "has no run: expected a folder of checkpoints"),
    ):
        code, err = report(place)
        assert code in (1, 2), err
        assert what in err
    assert not (tmp_path / "report.html").exists()
