"""Sessions and warnings of a run come in pages, however many journals it has and whatever is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serve.answers import Client
from tests.serve.browser import needs_chromium, new_context, open_browser, watch
from tests.serve.conftest import Serve
from tests.serve.sample import JournalWriter

PATH = "/api/runs/run"


def make_run(folder: Path, *, journals: int, sessions: int, warnings: int, text: str = "", **config: Any) -> None:
    """Write journals of some processes each, every one with some warnings, all in order of time."""
    folder.mkdir(parents=True)
    at = 1e9
    for number in range(journals):
        journal = JournalWriter(folder / f"journal-{number:04}.jsonl", at)
        for session in range(sessions):
            start = {"run": f"{number:04}", "step": session, "pid": 1, "config": {"number": session, **config}}
            journal.write("start", **start)
            for _ in range(warnings):
                journal.at += 1
                journal.write("warning", text=f"{journal.at:.0f}{text}")
            journal.write("end", reason="done")
        at = journal.at


def pages(client: Client, kind: str, limit: int) -> list[Any]:
    found: list[Any] = []
    while page := client.get(f"{PATH}?limit={limit}&skip={len(found)}")[kind]:
        assert len(page) <= limit
        found = page + found
    return found


def test_pages_are_one_list_in_order(tmp_path: Path, serve: Serve) -> None:
    make_run(tmp_path / "run", journals=3, sessions=15, warnings=2)
    client = Client(serve(tmp_path), token=None)
    first = client.get(PATH)
    assert (first["num_sessions"], first["num_warnings"]) == (45, 90)
    assert [one["text"] for one in first["warnings"]] == [f"{1e9 + number:.0f}" for number in range(71, 91)]
    assert [one["first_step"] for one in first["sessions"]] == [*range(10, 15), *range(15)]
    expected = [json.loads(line)["text"] for line in _lines(tmp_path / "run") if '"warning"' in line]
    for limit in (7, 20, 100):
        assert [one["text"] for one in pages(client, "warnings", limit)] == expected
        sessions = pages(client, "sessions", limit)
        assert [(one["run_id"], one["config"]["number"]) for one in sessions] == [
            (f"{run:04}", number) for run in range(3) for number in range(15)
        ]
    assert client.get(f"{PATH}?skip=1000")["sessions"] == []


def _lines(folder: Path) -> list[str]:
    return [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "skip=-1", "limit=1&limit=2"])
def test_pages_that_cannot_be(tmp_path: Path, serve: Serve, query: str) -> None:
    make_run(tmp_path / "run", journals=1, sessions=1, warnings=0)
    assert Client(serve(tmp_path), token=None).get(f"{PATH}?{query}", 400)


def test_an_answer_is_bounded_whatever_the_journals_have(tmp_path: Path, serve: Serve) -> None:
    # 30 MB of journals, which the API once sent as one answer.
    make_run(tmp_path / "run", journals=30, sessions=20, warnings=1, text="w" * 4000, notes="c" * 45_000)
    client = Client(serve(tmp_path), token=None)
    assert len(client.raw("GET", PATH).data) < 20 * (50_000 + 5_000)
    assert len(client.raw("GET", f"{PATH}?limit=100").data) < 100 * (50_000 + 5_000)


@needs_chromium
def test_the_page_shows_what_is_older(tmp_path: Path, serve: Serve) -> None:
    make_run(tmp_path / "run", journals=1, sessions=25, warnings=2)
    base = serve(tmp_path)
    with open_browser() as browser:
        watched = watch(new_context(browser), base)
        page = watched.page
        page.goto(f"{base}/run/run")
        for number in (20, 40, 50):
            page.locator("[data-test=warnings] li").nth(number - 1).wait_for()
            assert page.locator("[data-test=warnings] li").count() == number
            if number < 50:
                page.click("[data-test=older-warnings]")
        assert page.locator("[data-test=older-warnings]").count() == 0
        page.click("[data-test=older-sessions]")
        page.locator("[data-test=sessions] li").nth(24).wait_for()
        texts = page.locator("[data-test=warnings] li .name").all_inner_texts()
        assert texts == sorted(texts, reverse=True)
        watched.check()
