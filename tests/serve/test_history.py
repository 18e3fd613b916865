"""Journals as the service keeps them: in bounded memory, and whatever is in them."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from tests.serve.answers import Client
from tests.serve.conftest import Serve
from tests.serve.sample import RUN_ID, JournalWriter
from tests.waiting import until
from zstore.checkpoint.folder import LocalFolder
from zstore.serve.app import make_app
from zstore.serve.models import RunList
from zstore.serve.routes.operations import answer_heavy
from zstore.serve.settings import Root, Settings
from zstore.serve.views.history import History


def test_a_step_taken_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / f"journal-{RUN_ID}.jsonl", 1000.0)
    history = History(LocalFolder(tmp_path))
    journal.start(RUN_ID)
    journal.steps(40)
    history.refresh()
    journal.step = 25
    journal.start(RUN_ID)
    journal.steps(3)
    history.refresh()
    assert history.current is not None
    assert history.current.table.columns(points=100)["step"] == list(range(1, 29))
    assert history.current.table.columns(points=100, after_line=40)["step"] == [26, 27, 28]


def test_a_journal_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / f"journal-{RUN_ID}.jsonl"
    history = History(LocalFolder(tmp_path))
    for count in (30, 5):
        path.unlink(missing_ok=True)
        journal = JournalWriter(path, 1000.0)
        journal.start(RUN_ID)
        journal.steps(count)
        history.refresh()
        assert history.current is not None
        assert len(history.current.table) == count


def test_the_newest_of_several_journals_counts(tmp_path: Path) -> None:
    history = History(LocalFolder(tmp_path))
    for number, count in enumerate((7, 3)):
        journal = JournalWriter(tmp_path / f"journal-{number}.jsonl", 1000.0 + 1000 * number)
        journal.start(str(number))
        journal.steps(count)
        history.refresh()
        assert history.current is not None
        assert (history.current.run_id, len(history.current.table)) == (str(number), count)
    assert [view.run_id for view in history.views] == ["0", "1"]


WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    1e308,
    10**400,
    math.nan,
    math.inf,
    "x\0<b>",
    [],
    [[1]],
    {},
    {"a": {"b": math.nan}},
    "\ud800",
)


def test_a_journal_with_anything_in_it_is_shown(tmp_path: Path, serve: Serve) -> None:
    good = tmp_path / "good.jsonl"
    journal = JournalWriter(good, 1000.0)
    journal.start(RUN_ID)
    journal.write("warning", text="x")
    journal.saved(tmp_path, linked_bytes=1, written_bytes=1)
    journal.steps(3)
    journal.write("end", step=3, reason="done")
    lines = [json.loads(line) for line in good.read_text().splitlines()]
    chance = random.Random(0)
    with (tmp_path / f"journal-{RUN_ID}.jsonl").open("w") as file:
        file.write('[1]\nnull\n{"kind":3}\n{"kind":"step"}\nnot JSON\n{"kind":"step","step":' + "[" * 100_000 + "\n\n")
        for _ in range(1500):
            line = dict(chance.choice(lines))
            for key in chance.sample(list(line), 2):
                line[key] = chance.choice(WRONG)
            for key in ("links", "memory"):
                if isinstance(line.get(key), dict) and chance.random() < 0.5:
                    line[key] = {**line[key], chance.choice(list(line[key]) or ["a"]): chance.choice(WRONG)}
            if line.get("kind") == "plan":
                line["parts"] = [
                    {"kind": chance.choice(WRONG), "tier": "host"},
                    {"tier": chance.choice(WRONG)},
                    chance.choice(WRONG),
                ]
                line["arrays"] = [chance.choice(WRONG), [chance.choice(WRONG) for _ in range(4)]]
            file.write(json.dumps(line) + "\n")
        file.write(json.dumps({"kind": "step", "at": 5.0, "step": 10**6, "loss": 2.0}) + "\n")
    name = tmp_path.name
    client = Client(serve(tmp_path, token="a-token-of-the-tests"), token="a-token-of-the-tests")
    assert client.get("/api/runs")["runs"][0]["name"] == name
    for path in ("", "/placement", "/steps", "/steps?points=3", "/checkpoints"):
        client.get(f"/api/runs/{name}{path}")
    assert b"NaN" not in client.raw("GET", f"/api/runs/{name}").data


def test_the_answer_of_a_run_is_bounded(tmp_path: Path, serve: Serve) -> None:
    journal = JournalWriter(tmp_path / f"journal-{RUN_ID}.jsonl", 1000.0)
    journal.start(RUN_ID)
    journal.steps(1)
    for number in range(130):
        journal.write(
            "start", run=RUN_ID, step=number, config={"text": "x" * 200_000}, versions={str(n): "v" for n in range(999)}
        )
        journal.write("warning", text="y" * 100_000)
        journal.write("step", step=number, not_finite={f"name {n} {'z' * 99}": "nan" for n in range(999)})
    client = Client(serve(tmp_path), token=None)
    until(lambda: client.get(f"/api/runs/{tmp_path.name}/steps")["is_whole"])
    answer = client.raw("GET", f"/api/runs/{tmp_path.name}")
    assert answer.status == 200
    assert len(answer.data) < 4 * 2**20
    sessions = json.loads(answer.data)["sessions"]
    assert sessions[-1]["config"] == {"config": "(200012 bytes of JSON, not shown: the journal has them)"}


def test_reading_for_a_client_that_went_away_is_given_up() -> None:
    app = make_app(Settings(roots=(Root.parse("/nowhere"),)))

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    def work(advance: Callable[[int], None]) -> RunList:
        until(lambda: advance(1))
        return RunList(runs=[], num_runs=0)

    async def ask() -> None:
        await answer_heavy(Request({"type": "http", "app": app}, gone), work)  # type: ignore[arg-type]

    with pytest.raises(ClientDisconnect):
        asyncio.run(ask())
