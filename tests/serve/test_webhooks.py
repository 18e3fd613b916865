"""Webhooks: what is told of runs, to whom, how often, and again if it was not taken."""

from __future__ import annotations

import hashlib
import hmac
import http.server
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import urllib3
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.conftest import Serve
from tests.serve.sample import JournalWriter
from tests.waiting import until
from zstore.errors import UsageError
from zstore.serve import webhooks
from zstore.serve.settings import Root, Settings
from zstore.serve.views.library import Library
from zstore.serve.webhooks import Seen, Webhooks, events_of

QUICK = urllib3.Retry(total=5, backoff_factor=0.001, redirect=0, status_forcelist=[503], allowed_methods=None)
SECRET = "a secret of webhooks"


class Receiver:
    """A service that keeps what it was sent, and answers with `statuses`, the last one from then on."""

    def __init__(self, *statuses: int) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        left = list(statuses) or [204]
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append((dict(self.headers.items()), body))
                status = left.pop(0) if len(left) > 1 else left[0]
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook/secret-path"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def events(self) -> list[tuple[str, str | None]]:
        return [(message["event"], message["run"]) for message in map(json.loads, (body for _, body in self.got))]


@pytest.fixture
def receive() -> Iterator[Callable[..., Receiver]]:
    made: list[Receiver] = []

    def start(*statuses: int) -> Receiver:
        made.append(Receiver(*statuses))
        return made[-1]

    yield start
    for one in made:
        one.server.shutdown()
        one.server.server_close()


class Watched:
    """Runs below a folder, looked at when a test says so."""

    def __init__(self, folder: Path, *urls: str, retries: urllib3.Retry = QUICK, **settings: Any) -> None:
        self.folder = folder
        settings = {"stalled_s": 1e9} | settings
        self.library = Library(Settings(roots=(Root.parse(str(folder)),), webhooks=urls, **settings))
        self.webhooks = Webhooks(self.library.settings, self.library.listing.get, [], retries)
        self.at = time.time()

    def look(self, *, later_s: float = 0.0) -> None:
        self.library.runs.forget()
        self.library.listing.forget()
        self.webhooks.look(self.at + later_s)

    def journal(self, name: str, *, later_s: float = 0.0) -> JournalWriter:
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        journal = JournalWriter(self.folder / name / f"journal-{name}.jsonl", self.at + later_s)
        journal.start(name, pid=os.getpid())
        journal.steps(3)
        return journal


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def start(*urls: str, **settings: Any) -> Watched:
        made.append(Watched(tmp_path / "runs", *urls, **settings))
        return made[-1]

    (tmp_path / "runs").mkdir()
    yield start
    for one in made:
        one.webhooks.close()
        one.library.close()


def test_what_happens_to_a_run_is_told_once(watched: Callable[..., Watched], receive: Callable[..., Receiver]) -> None:
    receiver = receive()
    site = watched(receiver.url)
    old = site.journal("old")
    old.write("end", step=3, reason="failed", problem="it was so before")
    run = site.journal("run")
    site.look()  # what is so already is not told
    run.write("step", step=4, loss=None, step_s=0.1, not_finite={"loss": "nan"})
    site.look()
    run.write("step", step=5, loss=None, step_s=0.1, not_finite={"loss": "nan"})
    site.look()  # the same again
    run.write("save", step=5, tag="step-5", state="failed", problem="no room")
    site.look()
    site.look()
    run.write("end", step=5, reason="failed", problem="NonFiniteError: the loss")
    site.look()
    site.look()
    new = site.journal("new")
    new.write("end", step=3, reason="done")
    site.look()
    expected = [("not_finite", "run"), ("save_failed", "run"), ("failed", "run"), ("done", "new")]
    until(lambda: len(receiver.got) >= len(expected))
    assert receiver.events == expected
    texts = [json.loads(body)["text"] for _, body in receiver.got]
    assert texts[0] == "run, step 4: numbers are NaN or infinite"
    assert "no room" in texts[1]
    assert "NonFiniteError: the loss" in texts[2]
    assert {headers["Content-Type"] for headers, _ in receiver.got} == {"application/json"}


def test_a_run_that_stalls_and_one_that_was_killed(
    watched: Callable[..., Watched], receive: Callable[..., Receiver]
) -> None:
    receiver = receive()
    site = watched(receiver.url, stalled_s=60.0)
    run = site.journal("run")
    site.look()
    site.look(later_s=59)
    site.look(later_s=70)
    site.look(later_s=80)
    run.at += 81
    run.steps(1)
    site.look(later_s=82)
    gone = site.journal("gone", later_s=82)
    site.look(later_s=82)
    gone.start("gone", pid=2**22 + 1)  # of a process that is not there
    site.look(later_s=82)
    expected = [("stalled", "run"), ("going_on", "run"), ("killed", "gone")]
    until(lambda: len(receiver.got) >= len(expected))
    assert receiver.events == expected


def test_a_message_that_is_not_taken_is_sent_again_and_later_ones_after_it(
    watched: Callable[..., Watched], receive: Callable[..., Receiver], caplog: pytest.LogCaptureFixture
) -> None:
    slow, refusing, moved = receive(503, 503, 204), receive(400), receive(302)
    site = watched(slow.url, refusing.url, moved.url, webhook_secret=SECRET)
    site.look()
    for name in ("one", "two"):
        site.journal(name).write("end", step=3, reason="done")
        site.look()
    until(lambda: len(slow.got) == 4 and len(refusing.got) == 2 and len(moved.got) == 2)
    assert slow.events == [("done", "one")] * 3 + [("done", "two")]
    assert refusing.events == moved.events == [("done", "one"), ("done", "two")]  # another try would end alike
    for headers, body in slow.got:
        signed = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
        assert headers["X-Zstore-Signature-256"] == f"sha256={signed}"
    until(lambda: caplog.text.count("not taken by 127.0.0.1") >= 4)
    assert "status 400" in caplog.text
    assert "secret-path" not in caplog.text
    assert SECRET not in caplog.text


def test_a_url_that_takes_nothing_holds_up_no_other(
    watched: Callable[..., Watched],
    receive: Callable[..., Receiver],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhooks, "_MOST_WAITING", 1)
    receiver = receive()
    nobody = "http://127.0.0.1:9/hook"
    site = watched(nobody, receiver.url, retries=urllib3.Retry(total=100, backoff_factor=100.0))
    site.look()
    for number in range(4):
        site.journal(f"run{number}").write("end", step=3, reason="done")
        site.look()
        until(lambda number=number: len(receiver.got) > number)
    assert "left out for 127.0.0.1" in caplog.text


def test_little_room_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receive: Callable[..., Receiver]
) -> None:
    receiver = receive()
    free = iter([500, 40, 30, 500, 40])
    usage = type("usage", (), {"total": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("now", (usage,), {"free": next(free)}))
    library = Library(Settings(roots=(Root.parse(str(tmp_path)),), webhooks=(receiver.url,)))
    hooks = Webhooks(library.settings, library.listing.get, [tmp_path], QUICK)
    for _ in range(5):
        hooks.look(0.0)
    until(lambda: len(receiver.got) == 2)
    assert receiver.events == [("little_room", None)] * 2
    assert "40 bytes of 1.00 kB are free" in json.loads(receiver.got[0][1])["text"]
    hooks.close()
    library.close()


def test_the_service_watches_by_itself(
    tmp_path: Path, serve: Serve, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "LOOK_S", 0.05)
    receiver = receive()
    (tmp_path / "run").mkdir()
    journal = JournalWriter(tmp_path / "run" / "journal-run.jsonl", time.time())
    journal.start("run", pid=os.getpid())
    serve(tmp_path, webhooks=(receiver.url,))
    until(partial(_fails_to_save, journal, receiver))  # again: what was so at its first look it does not tell
    assert receiver.events[0] == ("save_failed", "run")


def _fails_to_save(journal: JournalWriter, receiver: Receiver) -> bool:
    journal.steps(1)
    journal.write("save", step=journal.step, tag=f"step-{journal.step}", state="failed", problem="no room")
    return bool(receiver.got)


def test_a_url_must_be_one() -> None:
    with pytest.raises(UsageError, match="got 'slack'"):
        Settings(roots=(Root.parse("."),), webhooks=("slack",))


states = st.sampled_from(["training", "done", "failed", "killed", "lost", "unknown"])
steps = st.none() | st.integers(0, 9)
looks = st.builds(
    Seen,
    state=states,
    step=steps,
    not_finite_step=steps,
    failed_save=st.none() | st.sampled_from(["step 1: a", "step 2: b"]),
    is_stalled=st.booleans(),
)


@given(looks, looks)
def test_events_are_of_what_changed(before: Seen, now: Seen) -> None:
    events = dict(events_of(before, now, "an error"))
    assert not dict(events_of(now, now, None))
    assert (now.state in events) == (now.state != before.state and now.state in ("failed", "killed", "lost", "done"))
    assert ("stalled" in events) == (now.is_stalled and not before.is_stalled)
    assert ("save_failed" in events) == (now.failed_save is not None and now.failed_save != before.failed_save)
    if "not_finite" in events:
        assert now.not_finite_step is not None
