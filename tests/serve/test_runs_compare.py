"""Runs side by side: the axes of their curves, and the page that draws, smooths, and saves them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page

from tests.serve.answers import Client
from tests.serve.browser import PHONE, Watched, needs_chromium, new_context, open_browser, overflow_px, watch
from tests.serve.conftest import Serve
from tests.serve.sample import JournalWriter
from tests.waiting import until
from zstore.serve.server import serving
from zstore.serve.settings import Root, Settings

NAMES = ("a", "b,<i>", "c")
TOKENS = 8 * 256
"""Of each step of `JournalWriter`."""


def make_runs(folder: Path) -> None:
    """Make three runs of a sweep: the first two resume, the last one logs what the others do not."""
    for number, name in enumerate(NAMES):
        (folder / name).mkdir(parents=True)
        path = folder / name / f"journal-{number:032x}.jsonl"
        journal = JournalWriter(path, 1e9 + 1000 * number)
        journal.start(f"{number:032x}", total_steps=40)
        journal.steps(30, step_s=1.0)
        if name != "c":
            journal.step = 20
            journal.start(f"{number:032x}", total_steps=40)
            journal.steps(20, step_s=1.0)
        else:
            journal.write("metrics", step=journal.step, values={"accuracy": 0.5})
        journal.write("end", step=journal.step, reason="done")
        config = {"optimizer": {"params": {"lr": (number + 1) / 10}}, "seed": 1}
        whole = path.read_text().replace('"zero_optimization"', f'"extra":{json.dumps(config)},"zero_optimization"')
        path.write_text(whole)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def watched(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("sweep")
    make_runs(folder)
    with serving(Settings(roots=(Root.parse(str(folder)),), port=0)) as base:
        yield watch(new_context(browser, accept_downloads=True), base)


def steps_of(path: Path) -> pd.DataFrame:
    """Return the steps of a journal that count, as pandas reads them."""
    lines = pd.read_json(path, lines=True)
    return lines[lines["kind"] == "step"].drop_duplicates("step", keep="last").sort_values("step")


def test_tokens_are_summed_over_resumes_and_journals(tmp_path: Path, serve: Serve) -> None:
    make_runs(tmp_path)
    later = JournalWriter(tmp_path / "a" / "journal-later.jsonl", 2e9, step=35)
    later.start("later")
    later.steps(5)
    client = Client(serve(tmp_path), token=None)
    columns = client.get("/api/runs/a/steps")["columns"]
    assert columns["step"] == list(range(1, 41))
    assert columns["tokens_seen"] == [TOKENS * step for step in range(1, 41)]
    few = client.get("/api/runs/a/steps?points=4&after=20")["columns"]
    assert few["step"] == [25, 30, 35, 40]
    assert few["tokens_seen"] == [TOKENS * step for step in few["step"]]


def test_a_journal_without_tokens_has_no_sum(tmp_path: Path, serve: Serve) -> None:
    path = tmp_path / "run" / "journal-0.jsonl"
    path.parent.mkdir()
    lines = [{"kind": "start", "at": 1.0, "run": "0"}, *({"kind": "step", "at": 1.0, "step": n} for n in (1, 2))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    columns = Client(serve(tmp_path), token=None).get("/api/runs/run/steps")["columns"]
    assert (columns["step"], columns["tokens_seen"]) == ([1, 2], [None, None])


def test_steps_without_a_line_count_as_many_tokens_as_the_next_one(tmp_path: Path, serve: Serve) -> None:
    path = tmp_path / "run" / "journal-0.jsonl"
    path.parent.mkdir()
    journal = JournalWriter(path, 1e9)
    journal.start("0")
    journal.steps(10)
    journal.step = 20  # the lines between were left out
    journal.steps(10)
    columns = Client(serve(tmp_path), token=None).get("/api/runs/run/steps")["columns"]
    assert columns["tokens_seen"] == [TOKENS * step for step in columns["step"]]


@needs_chromium
def test_a_long_journal_is_drawn_from_a_sample_and_then_whole(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "long" / f"journal-{0:032x}.jsonl"
    path.parent.mkdir()
    journal = JournalWriter(path, 1e9)
    journal.start(f"{0:032x}")
    journal.steps(12_000)
    assert path.stat().st_size > 4 * 2**20
    settings = Settings(roots=(Root.parse(str(tmp_path)),), port=0)
    with serving(settings) as base:
        page = watch(new_context(browser), base).page
        page.goto(f"{base}/runs/compare?run=long&x=tokens&y=loss")
        page.wait_for_selector("[data-test=chart-column-loss] canvas")
        # The last point of a sample is that of the whole journal.
        assert saved_csv(page, "loss")["tokens"].iloc[-1] == TOKENS * 12_000
        client = Client(base, token=None)
        until(lambda: client.get("/api/runs/long/steps")["is_whole"])
        steps = client.get("/api/runs/long/steps")["columns"]["step"]
        first = f"[data-test=chart-column-loss] .plot[aria-valuemin='{TOKENS * steps[0]:.0f}']"
        page.wait_for_selector(first)
        assert saved_csv(page, "loss")["tokens"].tolist() == [TOKENS * step for step in steps]


def saved_csv(page: Page, chart: str) -> pd.DataFrame:
    """Return what the page saves of a chart."""
    with page.expect_download() as download:
        page.click(f"[data-test='chart-column-{chart}'] [data-test=chart-csv]")
    return pd.read_csv(download.value.path())


@needs_chromium
def test_chosen_runs_are_drawn_together_and_the_url_holds_the_choice(watched: Watched, tmp_path: Path) -> None:
    make_runs(tmp_path)
    page = watched.page
    page.goto(watched.origin)
    compare = page.locator("[data-test=compare-runs]")
    for name in NAMES:
        assert compare.is_disabled() == (name in NAMES[:2])
        page.get_by_label(f"Compare {name}", exact=True).check()
    compare.click()
    page.wait_for_selector("[data-test=chart-column-loss] canvas")
    assert [one.strip(" \n×") for one in page.locator("[data-test=compared]").all_inner_texts()] == list(NAMES)
    settings = page.locator("[data-test=compare-setting]").all_inner_texts()
    assert [text.split() for text in settings] == [["extra.optimizer.params.lr", "0.1", "0.2", "0.3"]]

    shown = page.locator("[data-test=chart-column-loss] .key output").all_inner_texts()
    assert shown[0] == "40"
    assert [text.partition(" ")[2] for text in shown[1:]] == ["", "", "(step 30)"], "c ended before the others"
    page.click("[data-test=chart-column-loss] .as-table summary")
    assert page.locator("[data-test=chart-column-loss] caption").inner_text() == "The newest first"

    page.select_option("[data-test=compare-x]", "tokens")
    page.click("details.columns summary")
    page.check("[data-column='metric/accuracy']")
    page.locator("[data-test=smooth]").fill("0.9")
    url = page.url
    assert all(part in url for part in ("run=a&run=b%2C%3Ci%3E&run=c", "x=tokens", "y=metric%2Faccuracy", "smooth=0.9"))
    page.reload()
    page.wait_for_selector("[data-test='chart-column-metric/accuracy'] canvas")
    assert page.url == url

    found = saved_csv(page, "loss").set_index("tokens")
    for number, name in enumerate(NAMES):
        loss = steps_of(tmp_path / name / f"journal-{number:032x}.jsonl")["loss"].to_numpy(float)
        mean = pd.Series(loss).ewm(alpha=0.1, adjust=True, ignore_na=True).mean()  # as in pandas
        assert found[name].dropna().tolist() == pytest.approx(list(loss))
        assert found[name].dropna().index.tolist() == [TOKENS * step for step in range(1, len(loss) + 1)]
        assert found[f"{name} (smoothed 0.9)"].dropna().tolist() == pytest.approx(mean.tolist())
    assert saved_csv(page, "metric/accuracy")["c"].dropna().tolist() == [0.5]
    with page.expect_download() as download:
        page.click("[data-test=chart-column-loss] [data-test=chart-png]")
    with Image.open(download.value.path()) as image:
        assert image.width > 400
        colours = {colour for _, colour in image.convert("RGB").getcolors(2**20) or ()}
    assert {(11, 92, 173), (184, 80, 12), (20, 118, 74)} <= colours, (
        "a curve of each run in its colour, style.css has them"
    )

    page.locator("[data-test=compare-remove]").first.click()
    page.locator("[data-test=compared]").nth(2).wait_for(state="detached")
    assert "run=a&" not in page.url
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    assert overflow_px(page) <= 0
    watched.check()


@needs_chromium
def test_time_counts_from_the_beginning_of_each_run_and_zooms(watched: Watched) -> None:
    page = watched.page
    page.goto(f"{watched.origin}/runs/compare?run=a&run=c&x=time&from=5&to=12&y=loss")
    page.wait_for_selector("[data-test=chart-column-loss] canvas")
    found = saved_csv(page, "loss")
    assert found["time since it began"].tolist() == list(range(5, 13)), "steps of 1 s, from the start of each run"
    assert found[["a", "c"]].notna().all(axis=None)
    watched.check()


@needs_chromium
def test_curves_of_a_run_that_trains_grow(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "now").mkdir()
    journal = JournalWriter(tmp_path / "now" / "journal-0.jsonl", time.time())
    journal.start("0", pid=os.getpid())
    journal.steps(5)
    with serving(Settings(roots=(Root.parse(str(tmp_path)),), port=0)) as base:
        watched = watch(new_context(browser), base)
        watched.page.goto(f"{base}/runs/compare?run=now&y=loss")
        plot = "[data-test=chart-column-loss] .plot"
        watched.page.wait_for_selector(f"{plot}[aria-valuemax='5']")
        journal.steps(3)
        watched.page.wait_for_selector(f"{plot}[aria-valuemax='8']")
        watched.check()


@needs_chromium
def test_a_run_that_is_not_there_is_said_beside_the_others(watched: Watched) -> None:
    page = watched.page
    page.goto(f"{watched.origin}/runs/compare?run=a&run=gone")
    page.wait_for_selector("[data-test=chart-column-loss] canvas")
    assert "there is no run 'gone'" in page.locator("[data-test=problem]").inner_text()
    assert all("404" in error for error in watched.errors)
    watched.errors.clear()
    page.goto(f"{watched.origin}/runs/compare")
    page.wait_for_selector("text=No runs chosen")
    watched.check()
