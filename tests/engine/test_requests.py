"""Requests of people to a run: both ranks carry them out after the same step."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.asking import actions, ask
from tests.engine.runs import make_config, start, step, whole
from tests.interrupting import between
from tests.waiting import until
from zstore.checkpoint.reader import open_checkpoint
from zstore.engine.report.requests import Requests
from zstore.errors import CheckpointExistsError
from zstore.journal import read
from zstore.journal.names import request_file
from zstore.journal.requests import Request
from zstore.ranks.world import World
from zstore.testing.ranks import run_ranks


def _train(rank: int, folder: Path) -> tuple[int, str]:
    engine = start(make_config(2))
    engine.note_save_folder(str(folder))
    step(engine)
    ids = []
    for action in ("stop", "save"):
        if rank == 0:  # the other one is behind: it cannot end its step before rank 0 begins the same
            ids.append(ask(engine, folder, action))
        step(engine)
    engine.save_on_signal(str(folder), client_state={"seen": "last"})
    if rank == 0:
        ids.append(ask(engine, folder, "stop"))
    try:
        for _ in range(3):
            step(engine)
    except SystemExit as stopped:
        engine.close()
        return int(stopped.code or 0), json.dumps(ids)
    return -1, ""


def test_both_ranks_save_and_stop_after_the_same_step(tmp_path: Path) -> None:
    (code, text), (other, _) = run_ranks(_train, 2, tmp_path)
    assert (code, other) == (75, 75)
    refused, save, stop = json.loads(text)
    assert whole(tmp_path) == ["step-00000003", "step-00000004"]
    assert [(number, is_refused) for _, number, is_refused in actions(tmp_path)] == [
        (refused, True),
        (save, False),
        (stop, False),
    ]
    records = read(tmp_path)
    assert any("watches no signals" in r["text"] for r in records if r["kind"] == "warning")
    assert (records[-1]["kind"], records[-1]["reason"], records[-1]["step"]) == ("end", "stopped", 4)
    with open_checkpoint(tmp_path, "step-00000003") as reader:
        assert reader.record.state["client_state"] == {}


def test_a_loop_takes_requests_itself_and_old_or_foreign_ones_are_removed(tmp_path: Path) -> None:
    taken: list[str] = []
    with start() as engine:
        run_id = engine.training_state.run_id
        (tmp_path / request_file(run_id)).write_text('{"id": "old", "action": "save", "at": 1.0}')
        (tmp_path / request_file("other")).write_text('{"id": "1", "action": "save", "at": 1.0}')
        engine.take_requests(taken.append)
        engine.note_save_folder(str(tmp_path))
        step(engine)
        asked = ask(engine, tmp_path, "stop")
        step(engine)
        assert taken == ["stop"]
        (tmp_path / request_file(run_id)).write_text("{}")
        until(lambda: not (tmp_path / request_file(run_id)).exists())
        step(engine)
    assert taken == ["stop"]
    assert actions(tmp_path) == [("stop", asked, False)]
    assert (tmp_path / request_file("other")).exists()


def test_a_request_that_cannot_be_carried_out_stops_nothing(tmp_path: Path) -> None:
    with start() as engine:
        step(engine)
        engine.save_checkpoint(str(tmp_path), "step-00000002")
    with start() as engine:
        engine.note_save_folder(str(tmp_path))
        step(engine)
        ask(engine, tmp_path, "save")
        step(engine)  # the tag is another run's
        with pytest.raises(CheckpointExistsError):
            engine.save_checkpoint(str(tmp_path))
        step(engine)
        run_id = engine.training_state.run_id
    (record,) = [r for r in read(tmp_path, run_id) if r["kind"] == "action"]
    assert "CheckpointExistsError" in record["problem"]


class _Finder:
    """Finds requests as a journal's thread does."""

    def __init__(self) -> None:
        self.found: deque[Request] = deque(maxlen=1)


def test_a_request_that_comes_while_another_is_told_is_not_lost() -> None:
    finder, world = _Finder(), World()
    requests = Requests(world)
    requests.watch(finder, print)
    first, second = (Request(id=name, action="save", at=0.0) for name in ("first", "second"))
    places = 0
    with between("opcode", lambda code: code is Requests.tell.__code__, lambda: None):
        requests.tell()  # which may pass unseen
    for place in itertools.count():
        finder.found.append(first)
        passed = itertools.count()

        def second_comes(passed: Iterator[int] = passed, place: int = place) -> None:
            if next(passed) == place:
                finder.found.append(second)

        with between("opcode", lambda code: code is Requests.tell.__code__, second_comes):
            requests.tell()
        if next(passed) <= place:
            break  # it has no more instructions
        places += 1
        requests.tell()
        assert json.loads(world.asks) == ["save", "second"], place
    assert places > 10
