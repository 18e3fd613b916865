"""Tags, group and note of a run: changed by the API, by `zstore tag` and on the page; what the list of runs finds by them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.checkpoint.checkpoints import save_arrays
from tests.serve.answers import TOKEN, Client
from tests.serve.browser import Watched, needs_chromium, new_context, open_browser, watch
from tests.serve.conftest import Serve
from tests.serve.sample import JournalWriter
from zstore.checkpoint.marks import read_marks
from zstore.serve.server import serving
from zstore.serve.settings import Root, Settings
from zstore.tools.cli import app

MARKS = "/api/runs/small/marks"
NO_MARKS: dict[str, Any] = {"tags": [], "group": "", "note": ""}


def make_runs(folder: Path) -> Path:
    """Make a run with a journal, one with a checkpoint alone, and one whose journal has other settings."""
    for name, stage in (("small", 2), ("large", 3)):
        path = folder / name / f"journal-{name}.jsonl"
        path.parent.mkdir(parents=True)
        JournalWriter(path, 1e9).start(name)
        path.write_text(path.read_text().replace('{"stage":3}', f'{{"stage":{stage}}}'))
    save_arrays(folder / "bare", {"model/a": np.ones(3, np.float32)})
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return make_runs(tmp_path / "runs")


@pytest.fixture
def client(serve: Serve, runs: Path) -> Client:
    """A client of a service over `runs`, which takes actions."""
    return Client(serve(runs, token=TOKEN, allow_actions=True))


def marks_of(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: summary[name] for name in NO_MARKS}


def found(client: Client, words: str) -> list[str]:
    answer = client.get(f"/api/runs?q={words}")
    assert answer["num_runs"] == 3
    return [run["name"] for run in answer["runs"]]


def test_marks_are_changed_one_by_one_and_stay_with_those_of_checkpoints(client: Client, runs: Path) -> None:
    client.post("/api/runs/bare/tags", {"checkpoint": "latest", "tag": "best"})
    for path, place in ((MARKS, "small"), ("/api/runs/bare/marks", "bare")):
        assert marks_of(client.get(f"/api/runs/{place}")["summary"]) == NO_MARKS
        client.post(path, {"tags": ["b", "lr=3e-4", "b"]})
        client.post(path, {"group": "sweep 1"})
        answer = client.post(path, {"note": "<b>good</b>"})
        expected = {"tags": ["b", "lr=3e-4"], "group": "sweep 1", "note": "<b>good</b>"}
        assert marks_of(answer) == marks_of(client.get(f"/api/runs/{place}")["summary"]) == expected
        assert json.loads((runs / place / "tags.json").read_text())["run"] == expected
    assert read_marks(runs / "bare").tags == {"best": "step-00000001"}
    assert marks_of(client.post(MARKS, {"tags": [], "group": "", "note": ""})) == NO_MARKS
    client.post("/api/runs/bare/tags", {"tag": "best"})
    assert read_marks(runs / "bare").run.tags == ["b", "lr=3e-4"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tags": ["a b"]}, "a tag of a run is a word of up to 64 characters without a comma, got 'a b'"),
        ({"tags": ["a,b"]}, "without a comma"),
        ({"tags": [""]}, "is a word"),
        ({"tags": ["x" * 65]}, "is a word of up to 64"),
        ({"tags": ["\u202e"]}, "is a word"),
        ({"tags": [str(number) for number in range(33)]}, "a run has up to 32 tags, got 33"),
        ({"group": "x" * 201}, "a group has up to 200 characters on one line"),
        ({"note": "a\nb"}, "a note has up to 1000 characters on one line"),
        ({"name": "other"}, "Extra inputs"),
    ],
)
def test_what_cannot_be_a_mark_is_refused(client: Client, runs: Path, change: Any, message: str) -> None:
    assert message in client.post(MARKS, change, 400)["error"]
    assert not (runs / "small/tags.json").exists()


def test_runs_are_found_by_their_marks_names_and_settings(client: Client) -> None:
    client.post(MARKS, {"tags": ["baseline"], "group": "sweep", "note": "order of the paper"})
    assert found(client, "") == ["bare", "large", "small"]
    assert found(client, "PAPER") == found(client, "baseline%20sweep") == ["small"]
    assert found(client, "stage=3") == found(client, "zero_optimization.stage%3D3") == ["large"]
    assert found(client, "stage=3%20baseline") == []
    assert found(client, "larg") == ["large"]


def test_damaged_marks_are_told_in_the_list(client: Client, runs: Path) -> None:
    (runs / "small/tags.json").write_text(
        '{"format": "zstore tags", "version": 1, "tags": {}, "held": [], "notes": {}}'
    )
    assert marks_of(client.get("/api/runs/small")["summary"]) == NO_MARKS, "as before runs had marks"
    for run in ([], {"tags": 3}, {"tags": [3]}, {"other": 1}):
        document = {"format": "zstore tags", "version": 1, "tags": {}, "held": [], "notes": {}, "run": run}
        (runs / "small/tags.json").write_text(json.dumps(document))
        (summary,) = client.get("/api/runs?q=small")["runs"]
        assert "does not hold tags" in summary["problem"]
        assert "does not hold tags" in client.post(MARKS, {"group": "x"}, 422)["error"]


def test_roles_decide(serve: Serve, runs: Path) -> None:
    assert Client(serve(runs), token=None).post(MARKS, {"group": "x"}, 403)
    base = serve(runs, token=TOKEN, allow_actions=True)
    assert Client(base, token=None, document={"paths": {}}).raw("POST", MARKS, {"group": "x"}).status == 401
    assert not (runs / "small/tags.json").exists()


def test_the_command_marks_a_run_here_and_at_a_service(client: Client, runs: Path) -> None:
    for place, options in ((str(runs / "small"), []), (f"{client.base}/bare", ["--storage-option", f"token={TOKEN}"])):
        words = ["--run-tags", "a, lr=3e-4", "--group", "g", "--note", "n"]
        done = CliRunner().invoke(app, ["tag", place, *words, *options, "--json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["run"] == {"tags": ["a", "lr=3e-4"], "group": "g", "note": "n"}
        done = CliRunner().invoke(app, ["tag", place, "--run-tags", "", *options])
        assert "group of the run: g" in done.stdout
        assert "tags of the run" not in done.stdout
    done = CliRunner().invoke(app, ["tag", str(runs / "small"), "--hold"])
    assert done.exit_code == 2, "a hold is one of a checkpoint"
    assert CliRunner().invoke(app, ["tag", str(runs / "bare"), "best", "1", "--group", "g"]).exit_code == 2


@pytest.fixture
def watched(runs: Path) -> Iterator[Watched]:
    settings = Settings(roots=(Root.parse(str(runs)),), port=0, token=TOKEN, allow_actions=True)
    with serving(settings) as base, open_browser() as browser:
        yield watch(new_context(browser), base)


@needs_chromium
def test_the_page_changes_searches_and_groups(watched: Watched, runs: Path) -> None:
    page = watched.page
    page.goto(f"{watched.origin}/run/small")
    page.fill("[data-test=token]", TOKEN)
    page.click("[data-test=sign-in]")
    page.click("[data-test=edit-run-marks]")
    page.fill("[data-test=run-tags]", "baseline, <i>x</i>")
    page.fill("[data-test=run-group]", "sweep")
    page.click("[data-test=marks-save]")
    page.wait_for_selector("[data-test=mark]")
    assert page.locator("[data-test=mark]").all_inner_texts() == ["group: sweep", "<i>x</i>", "baseline"]
    assert read_marks(runs / "small").run.group == "sweep"
    page.click("[data-test=nav-runs]")
    page.click("[data-test=group-runs]")
    page.wait_for_selector("[data-test=run-group]")
    rows = page.locator("table tbody tr")
    assert rows.first.inner_text().strip() == "sweep"
    assert page.locator("[data-test=run-group]").all_inner_texts() == ["sweep", "No group"]
    page.fill("[data-test=filter]", "stage=3")
    page.locator("[data-test=run]").nth(1).wait_for(state="detached")
    assert page.locator("[data-test=run] a").all_inner_texts() == ["large"]
    page.reload()
    page.wait_for_selector("[data-test=run]")
    assert page.locator("[data-test=run] a").all_inner_texts() == ["large"]
    assert "filter=stage%3D3" in page.url
    watched.errors[:] = [error for error in watched.errors if "401" not in error]
    watched.check()
