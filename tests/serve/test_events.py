"""Live events: what comes, in order and without gaps, for many listeners at the cost of one."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3

from tests.serve.answers import TOKEN, Client
from tests.serve.conftest import Serve
from tests.serve.sample import RUN, RUN_ID, JournalWriter, make_sample
from tests.waiting import GUARD_S
from zstore.serve import server
from zstore.serve.server import serving
from zstore.serve.settings import Root, Settings

EVENTS = f"/api/runs/{RUN}/events"


class Listener:
    """Reads the events of a run."""

    def __init__(self, client: Client, last_id: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"} | ({} if last_id is None else {"Last-Event-ID": last_id})
        self._response = client.pool.request("GET", client.base + EVENTS, headers=headers, preload_content=False)
        assert self._response.status == 200
        assert self._response.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in self._response.headers
        self._blocks = self._split()
        self.last_id = last_id
        assert next(self._blocks) == "retry: 2000"

    def _split(self) -> Iterator[str]:
        text = ""
        for data in self._response.stream(amt=None):
            text += data.decode()
            *blocks, text = text.split("\n\n")
            yield from blocks

    def take(self) -> tuple[str, Any]:
        """Return the next event: its name and data."""
        while (block := next(self._blocks)).startswith(":"):
            pass
        name, event_id, data = (line.partition(": ")[2] for line in block.split("\n"))
        self.last_id = event_id
        return name, json.loads(data)

    def take_until(self, name: str) -> Any:
        """Return the data of the next event of that name."""
        deadline = time.monotonic() + GUARD_S
        while time.monotonic() < deadline:
            found, data = self.take()
            if found == name:
                return data
        raise AssertionError(f"no event {name!r} came")

    def steps_until(self, last: int) -> list[float]:
        """Return the steps that come, up to one."""
        steps: list[float] = []
        while not steps or steps[-1] < last:
            steps += self.take_until("steps")["columns"]["step"]
        return steps

    def close(self) -> None:
        """End the connection."""
        self._response.close()


@pytest.fixture
def run(tmp_path: Path) -> JournalWriter:
    """A run that trains, with 10 steps."""
    folder = tmp_path / RUN
    folder.mkdir()
    journal = JournalWriter(folder / f"journal-{RUN_ID}.jsonl", time.time())
    journal.start(RUN_ID, pid=os.getpid())
    journal.steps(10)
    return journal


@pytest.fixture
def client(serve: Serve, run: JournalWriter) -> Client:
    """A client of a service over that run."""
    return Client(serve(run.path.parent.parent, token=TOKEN, allow_actions=True))


def test_steps_come_live_and_each_once(client: Client, run: JournalWriter) -> None:
    listener = Listener(client)
    assert listener.steps_until(10) == list(range(1, 11))
    run.steps(3)
    assert listener.steps_until(13) == [11, 12, 13]
    with run.path.open("a") as file:
        file.write('{"kind":"step","at":1,"step":14')  # not written to its end yet
    run.step = 14
    with run.path.open("a") as file:
        file.write(',"loss":2.5}\n')
    run.steps(1)
    assert listener.steps_until(15) == [14, 15]
    listener.close()


def test_a_listener_that_comes_back_misses_nothing(client: Client, run: JournalWriter) -> None:
    listener = Listener(client)
    listener.steps_until(10)
    listener.close()
    run.steps(70)
    run.write("warning", text="meanwhile")
    run.saved(run.path.parent, linked_bytes=1, written_bytes=2)
    again = Listener(client, listener.last_id)
    assert again.steps_until(80) == list(range(11, 81))
    assert again.take_until("save")["state"] == "committed"
    assert again.take_until("warning")["text"] == "meanwhile"
    detail = again.take_until("run")
    assert detail == client.get(f"/api/runs/{RUN}") | {"summary": detail["summary"]}
    again.close()


def test_many_steps_come_as_fewer_rows_with_the_extremes_of_the_loss(client: Client, run: JournalWriter) -> None:
    listener = Listener(client)
    listener.steps_until(10)
    run.steps(5000)
    rows: list[float] = []
    lowest: list[float] = []
    while not rows or rows[-1] < 5010:
        columns = listener.take_until("steps")["columns"]
        rows += columns["step"]
        lowest += [loss for loss in columns["loss_min"] if loss is not None]
    assert len(rows) <= 1000
    assert rows == sorted(set(rows))
    losses = client.get(f"/api/runs/{RUN}/steps?points=20000&after=10")["columns"]["loss"]
    assert min(lowest) == min(loss for loss in losses if loss is not None)
    listener.close()


def test_checkpoints_jobs_and_the_end_are_told(client: Client, run: JournalWriter, tmp_path: Path) -> None:
    made = make_sample(tmp_path / "made") / RUN / "step-00000060"
    listener = Listener(client)
    listener.steps_until(10)
    shutil.copytree(made, run.path.parent / made.name)
    assert listener.take_until("checkpoints") == {"num_checkpoints": 1}
    job = client.post(f"/api/runs/{RUN}/checkpoints/{made.name}/verify", status=202)
    while (told := listener.take_until("job"))["state"] == "running":
        assert told["id"] == job["id"]
    assert (told["id"], told["state"]) == (job["id"], "done")
    run.write("end", step=10, reason="stopped")
    assert listener.take_until("run")["summary"]["state"] == "done"
    assert listener.take_until("end") == {"step": 10, "reason": "stopped"}
    listener.close()


def test_a_run_that_resumes_takes_its_steps_again(client: Client, run: JournalWriter) -> None:
    listener = Listener(client)
    listener.steps_until(10)
    run.step = 6
    run.start(RUN_ID, pid=os.getpid())
    run.steps(2)
    assert listener.steps_until(8) == [7, 8]
    assert client.get(f"/api/runs/{RUN}/steps")["columns"]["step"] == [1, 2, 3, 4, 5, 6, 7, 8]
    listener.close()


def test_a_run_that_is_not_there_has_no_events(client: Client) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    response = client.pool.request("GET", f"{client.base}/api/runs/no/events", headers=headers)
    assert response.status == 404
    assert "there is no run" in response.json()["error"]


def test_the_service_ends_while_pages_listen(run: JournalWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_GRACE_S", 1000)  # what it would wait for answers that do not end
    with serving(Settings(roots=(Root.parse(str(run.path.parent)),), port=0, token=TOKEN)) as base:
        listeners = [Listener(Client(base)) for _ in range(3)]
        for listener in listeners:
            listener.steps_until(10)
    for listener in listeners:
        with pytest.raises((StopIteration, urllib3.exceptions.HTTPError)):
            listener.take()
