"""Indexes of long journals: the same steps as by reading all of it, whatever happens to them."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.answers import Client
from tests.serve.browser import needs_chromium, new_context, open_browser
from tests.serve.conftest import Serve
from tests.serve.sample import RUN_ID, JournalWriter
from tests.waiting import until
from zstore.checkpoint.folder import LocalFolder
from zstore.open.sources import folder_of
from zstore.serve.views import history as histories
from zstore.serve.views import steptable
from zstore.serve.views.history import History
from zstore.serve.views.index import index_name
from zstore.serve.views.steptable import StepTable, TableState

JOURNAL = f"journal-{RUN_ID}.jsonl"
LONG_BYTES = 1 << 16

ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("steps"), st.integers(1, 40)),
        st.tuples(st.just("again"), st.integers(0, 60)),
        st.tuples(st.just("note"), st.integers(0, 3)),
        st.tuples(st.just("save"), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(acts=ACTS, ends=st.tuples(st.integers(-3, 500), st.integers(-3, 500)), points=st.integers(1, 60))
def test_any_range_is_that_of_a_plain_list(acts: list[tuple[str, int]], ends: tuple[int, int], points: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steptable, "BLOCK_ROWS", 8)
        patch.setattr(steptable, "FANOUT", 2)
        blocks: dict[tuple[int, int], steptable.Matrix] = {}
        table, rows, lines, step = StepTable(blocks), dict[int, dict[str, float]](), 0, 0
        for act, value in acts:
            if act == "save":
                table = StepTable(blocks, TableState(**json.loads(json.dumps(table.save().__dict__))))
            if act == "again":
                step = max(0, step - value)
            for _ in range(value if act == "steps" else 0):
                step, lines = step + 1, lines + 1
                rows = {n: row for n, row in rows.items() if n < step}
                rows[step] = {"loss": float(lines), "step_s": 1.0 + lines % 3, "tokens_per_s": float(lines % 7)}
                table.add({"step": float(step), "loss_min": float(lines), "loss_max": float(lines), **rows[step]})
            if act == "note" and rows and step >= max(rows):
                name = f"metric/{value}"
                if step == max(rows):
                    lines += 1
                    rows[step] = {**rows[step], name: float(lines)}
                    table.note(float(step), {name: float(lines)})
        wanted = {n: row for n, row in rows.items() if ends[0] < n <= ends[1]}
        assert (len(table), table.num_lines) == (len(rows), lines)
        whole = table.columns(points=10**6, after_step=ends[0], until_step=ends[1])
        assert whole["step"] == list(wanted)
        for name in {name for row in wanted.values() for name in row}:
            assert whole[name] == [row.get(name) for row in wanted.values()]
        few = table.columns(points=points, after_step=ends[0], until_step=ends[1])
        assert len(few["step"]) == min(len(wanted), points)
        if wanted:
            losses = [row["loss"] for row in wanted.values()]
            assert (few["step"][-1], sorted(set(few["step"]), key=float)) == (max(wanted), few["step"])
            assert (min(few["loss_min"], key=float), max(few["loss_max"], key=float)) == (min(losses), max(losses))
            one = table.columns(points=1, after_step=ends[0], until_step=ends[1])
            times = np.array([row["step_s"] for row in wanted.values()])
            assert one["loss"] == [pytest.approx(np.mean(losses))]
            rates = [row["tokens_per_s"] for row in wanted.values()]
            assert one["tokens_per_s"] == [pytest.approx(np.average(rates, weights=times))]


def test_the_rows_after_a_line() -> None:
    table = StepTable()
    for step in range(1, 5001):
        table.add({"step": float(step)})
    for line in (0, 1, 511, 512, 513, 4000, 4999, 5000):
        assert table.columns(points=10**4, after_line=line)["step"] == list(range(line + 1, 5001))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Journals are long from 64 KiB on."""
    monkeypatch.setattr(histories, "_LONG_BYTES", LONG_BYTES)
    yield
    until(lambda: all(one.poll() is not None for one in histories._building))


def written(folder: Path, count: int = 3000) -> JournalWriter:
    journal = JournalWriter(folder / JOURNAL, 1000.0)
    journal.start(RUN_ID)
    journal.steps(count)
    journal.write("warning", text="lone \ud800")
    return journal


def columns(history: History, points: int = 10**6) -> dict[str, list[float | None]]:
    with history.lock:
        return history.columns(points=points, after_step=-math.inf, until_step=math.inf)


def in_memory(folder: Path) -> History:
    """The history by reading all, without an index."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(histories, "_LONG_BYTES", 1 << 60)
        history = History(LocalFolder(folder))
        history.refresh()
    return history


def is_whole(history: History) -> bool:
    history.refresh()
    return all(view.is_whole for view in history.views)


def same(history: History, folder: Path) -> None:
    wanted = in_memory(folder)
    assert columns(history) == columns(wanted)
    (mine,), (theirs,) = history.views, wanted.views
    assert mine == theirs  # sessions, saves, warnings, the plan, ...
    assert (mine.table.num_lines, mine.table.last) == (theirs.table.num_lines, theirs.table.last)


@pytest.mark.usefixtures("short")
def test_a_long_journal_is_a_sample_until_its_index_is_made(tmp_path: Path) -> None:
    journal = written(tmp_path)
    history = History(LocalFolder(tmp_path))
    history.refresh()
    wanted, sample = columns(in_memory(tmp_path)), columns(history)
    records = [json.loads(line) for line in (tmp_path / JOURNAL).read_text().splitlines()]
    assert wanted["loss"] == [record["loss"] for record in records if record["kind"] == "step"]
    assert not any(view.is_whole for view in history.views)
    assert 500 < len(sample["step"]) < 3000
    assert (sample["step"][0], sample["step"][-1]) == (1, 3000)
    assert (
        dict(zip(sample["step"], sample["loss"], strict=True)).items()
        <= dict(zip(wanted["step"], wanted["loss"], strict=True)).items()
    )
    (view,) = history.views
    assert (view.step, view.total_steps, len(view.sessions), len(view.warnings)) == (3000, 1000, 1, 1)
    journal.steps(5)
    history.refresh()
    assert columns(history)["step"][-6:] == list(range(3000, 3006))  # it goes on meanwhile
    until(partial(is_whole, history))
    same(history, tmp_path)
    journal.steps(400)
    journal.step = 3100
    journal.start(RUN_ID)
    journal.steps(700)  # more than is read here at once
    until(partial(is_whole, history))
    same(history, tmp_path)
    again = History(LocalFolder(tmp_path))
    assert is_whole(again)
    same(again, tmp_path)


def indexed(folder: Path) -> History:
    history = History(LocalFolder(folder))
    until(partial(is_whole, history))
    return history


@pytest.mark.usefixtures("short")
def test_an_index_that_is_damaged_or_of_another_journal_is_made_anew(tmp_path: Path) -> None:
    written(tmp_path)
    indexed(tmp_path)
    path = tmp_path / index_name(JOURNAL)
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 11):
        path.write_bytes(whole[:place] + bytes(byte ^ 0xFF for byte in whole[place : place + 64]) + whole[place + 64 :])
        history = indexed(tmp_path)
        columns(history)  # may find that it is damaged
        until(partial(is_whole, history))
        same(history, tmp_path)
    path.write_bytes(b"no database" * 1000)
    same(indexed(tmp_path), tmp_path)
    (tmp_path / JOURNAL).unlink()
    other = JournalWriter(tmp_path / JOURNAL, 2000.0)
    other.start(RUN_ID)
    other.steps(4000)
    same(indexed(tmp_path), tmp_path)


@pytest.mark.usefixtures("short")
def test_an_index_that_goes_while_it_is_used_is_made_anew(tmp_path: Path) -> None:
    journal = written(tmp_path)
    history = indexed(tmp_path)
    (tmp_path / index_name(JOURNAL)).unlink()
    journal.step = 100
    journal.start(RUN_ID)
    journal.steps(10)
    until(partial(is_whole, history))
    same(history, tmp_path)


@pytest.mark.usefixtures("short")
def test_a_process_that_is_killed_while_it_writes_an_index_harms_nothing(tmp_path: Path) -> None:
    written(tmp_path, 20_000)
    for _ in range(4):
        history = History(LocalFolder(tmp_path))
        history.refresh()
        (reader,) = history._readers.values()
        if reader._builder is not None:
            os.kill(reader._builder.pid, signal.SIGKILL)
            until(partial(is_whole, history))  # it reads the rest itself
            same(history, tmp_path)
    same(indexed(tmp_path), tmp_path)


@pytest.mark.usefixtures("short")
def test_a_link_in_the_place_of_an_index_is_not_followed(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "target"
    run.mkdir()
    written(run)
    (run / index_name(JOURNAL)).symlink_to(target)
    same(indexed(run), run)
    assert not target.exists()


@pytest.mark.usefixtures("short")
def test_without_room_for_an_index_all_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    (tmp_path / index_name(JOURNAL)).mkdir()  # nothing can be written there, ...
    same(indexed(tmp_path), tmp_path)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: "/nowhere")  # ... nor in a temporary folder, ...
    same(indexed(tmp_path), tmp_path)
    monkeypatch.setattr(tempfile, "mkdtemp", mock.Mock(side_effect=FileNotFoundError))  # ... which may be missing
    same(indexed(tmp_path), tmp_path)


@pytest.mark.usefixtures("short")
def test_a_report_has_all_steps_and_other_folders_have_no_index(tmp_path: Path) -> None:
    written(tmp_path)
    history = History(LocalFolder(tmp_path))
    history.refresh(is_whole=True)
    same(history, tmp_path)
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    written(tmp_path, 100)
    same(indexed(tmp_path), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [JOURNAL]


@pytest.mark.usefixtures("short")
def test_the_page_is_told_that_steps_are_a_sample(tmp_path: Path, serve: Serve) -> None:
    written(tmp_path)
    client = Client(serve(tmp_path), token=None)
    path = f"/api/runs/{tmp_path.name}/steps?points=50"
    first = client.get(path)
    assert (first["is_whole"], first["last_step"], len(first["columns"]["step"])) == (False, 3000, 50)
    until(lambda: client.get(path)["is_whole"])
    wanted = columns(in_memory(tmp_path), 50)
    assert client.get(path)["columns"] == wanted


@pytest.mark.usefixtures("short")
def test_a_long_journal_behind_a_url_is_read_into_an_index_elsewhere(tmp_path: Path) -> None:
    written(tmp_path)
    files = fsspec.filesystem("memory")
    files.put(str(tmp_path / JOURNAL), f"/runs/long/{JOURNAL}")
    history = History(folder_of("memory://runs/long", None))
    history.refresh()
    assert is_whole(history)
    assert columns(history) == columns(in_memory(tmp_path))


@needs_chromium
@pytest.mark.usefixtures("short")
def test_the_page_says_that_it_shows_a_sample_until_it_shows_all(tmp_path: Path, serve: Serve) -> None:
    written(tmp_path)
    with open_browser() as browser:
        page = new_context(browser).new_page()
        sample = page.locator("[data-test=sample]")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(histories, "_MOST_AT_ONCE", 0)  # nothing is built yet
            page.goto(f"{serve(tmp_path)}/run/{tmp_path.name}")
            sample.wait_for()
        sample.wait_for(state="detached")
