"""What one client may take from others: room, places of uploads, connections, tries of the token."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import urllib3

from tests.checkpoint.checkpoints import save_arrays
from tests.serve.browser import TIMEOUT_MS, needs_chromium, new_context, open_browser
from tests.serve.test_upload_refusals import MOMENTS, NAMES, A, Client
from tests.serve.test_uploads import SmallDrive
from tests.waiting import until
from zstore.errors import UsageError
from zstore.serve.guard.connections import ConnectionLimits
from zstore.serve.inbox import inbox
from zstore.serve.server import serving
from zstore.serve.settings import Root, Settings
from zstore.tools.serve import Listening, serve_command

TOKEN = "secret-of-the-tests"


@pytest.fixture
def drive() -> SmallDrive:
    return SmallDrive()


@pytest.fixture
def clients(tmp_path: Path, http: urllib3.PoolManager, drive: SmallDrive) -> Iterator[list[Client]]:
    """Clients of one service, each with a checkpoint of a run of its own."""
    (tmp_path / "runs").mkdir()
    paths = [save_arrays(tmp_path / name, NAMES, run_id=name) for name in "abc"]
    roots = (Root.parse(str(tmp_path / "runs")),)
    with serving(Settings(roots=roots, port=0, token=TOKEN, allow_actions=True, files=drive)) as base:
        yield [Client(base, tmp_path / "runs", path, http) for path in paths]


def size_of(client: Client) -> int:
    return sum(len(client.data(file)) + 4096 for file in (A, MOMENTS))


def test_a_refused_upload_keeps_no_room(clients: list[Client], drive: SmallDrive) -> None:
    large, small = clients[:2]
    first, second = large.begin(run="large"), small.begin(run="small")
    drive.free = size_of(large) // 2
    assert large.plan(first)[0] == 507
    drive.free = size_of(small) * 3 // 2  # for one, not for two
    assert small.plan(second)[0] == 200


def test_an_upload_whose_client_goes_away_keeps_no_room(clients: list[Client], drive: SmallDrive) -> None:
    gone, next_one = clients[:2]
    first, second = gone.begin(run="gone"), next_one.begin(run="next")
    drive.free = size_of(gone) * 3 // 2
    assert gone.plan(first)[0] == 200
    assert next_one.plan(second)[0] == 507
    place = urlsplit(gone.base)
    with socket.create_connection((place.hostname, place.port)) as connection:
        head = (
            f"PUT /api/uploads{first}/files/{MOMENTS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        )
        connection.sendall(f"{head}Content-Length: {len(gone.data(MOMENTS))}\r\n\r\nabc".encode())
    until(lambda: next_one.ask("POST", f"{second}/plan")[0] == 200)


def test_offers_without_a_plan_give_their_places_to_others(
    clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MOST_UPLOADS", 3)
    for number in range(3):
        clients[0].begin(run=f"idle-{number}")
    assert clients[1].ask("POST", "", clients[1].offer(run="late"))[0] == 400
    later = time.time() + 61
    monkeypatch.setattr(inbox.time, "time", lambda: later)
    assert clients[1].ask("POST", "", clients[1].offer(run="late"))[0] == 200
    assert len(clients[1].ask("GET", "")[1]["uploads"]) == 3


def test_the_loser_of_two_equal_uploads_hears_who_won(clients: list[Client]) -> None:
    winner, loser = clients[0], clients[0]
    upload = winner.begin(run="one")
    assert loser.begin(run="one") == upload
    assert winner.plan(upload)[0] == 200
    for file in (A, MOMENTS):
        winner.put(upload, file)
    assert winner.ask("POST", f"{upload}/commit")[0] == 200
    for method, path, body in (
        ("POST", "/commit", None),
        ("PUT", f"/files/{A}", loser.data(A)),
        ("POST", "/plan", None),
    ):
        status, answer = loser.ask(method, f"{upload}{path}", body)
        assert (status, "committed by another client" in answer["error"]) == (409, True)


def test_uploads_are_listed_and_removed_by_the_command(
    clients: list[Client], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, dropped = clients[0].begin(run="kept"), clients[1].begin(run="dropped")
    assert serve_command([str(tmp_path / "runs")], Listening(uploads=True)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[1] for line in lines) == ["dropped/step-00000001", "kept/step-00000001"]
    assert serve_command([str(tmp_path / "runs")], Listening(remove_upload=[dropped[1:]])) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [kept[1:]]
    assert [one["run"] for one in clients[0].ask("GET", "")[1]["uploads"]] == ["kept"]  # the running service sees it


def test_one_address_leaves_connections_to_others(tmp_path: Path) -> None:
    limits = ConnectionLimits(most_connections=50, most_from_address=5)
    with (
        serving(Settings(roots=(Root.parse(str(tmp_path)),), port=0), limits) as base,
        contextlib.ExitStack() as opened,
    ):
        place = urlsplit(base)

        def connect(source: str) -> socket.socket:
            made = socket.create_connection((place.hostname, place.port), source_address=(source, 0))
            opened.enter_context(made)
            made.sendall(b"GET /api HTTP/1.1\r\nHost: localhost\r\n")
            return made

        greedy = [connect("127.0.0.2") for _ in range(6)]
        assert greedy[-1].recv(100).startswith(b"HTTP/1.1 429 ")
        other = connect("127.0.0.3")
        other.sendall(b"\r\n")
        assert other.recv(100).startswith(b"HTTP/1.1 200 ")
        greedy[0].close()
        until(lambda: _answers(connect("127.0.0.2")))


def _answers(connection: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        connection.sendall(b"\r\n")
    return connection.recv(100).startswith(b"HTTP/1.1 200 ")


def test_the_right_token_is_taken_whatever_others_tried(tmp_path: Path, http: urllib3.PoolManager) -> None:
    with serving(Settings(roots=(Root.parse(str(tmp_path)),), port=0, token=TOKEN)) as base:

        def ask(token: str, **headers: str) -> int:
            return int(
                http.request("GET", f"{base}/api/runs", headers={"Authorization": f"Bearer {token}", **headers}).status
            )

        assert {ask(f"wrong-{number}") for number in range(40)} == {401, 429}
        assert [ask(TOKEN) for _ in range(5)] == [200] * 5
        # A header that anybody can send gives nobody another address.
        assert 429 in {ask(f"again-{n}", **{"X-Forwarded-For": f"203.0.113.{n}"}) for n in range(40)}
    settings = Settings(roots=(Root.parse(str(tmp_path)),), port=0, token=TOKEN, trusted_proxies=("127.0.0.1",))
    with serving(settings) as base:
        assert 429 in {ask(f"wrong-{number}", **{"X-Forwarded-For": "203.0.113.8"}) for number in range(40)}
        assert ask("wrong-again", **{"X-Forwarded-For": "203.0.113.9"}) == 401


@pytest.mark.parametrize(
    ("token", "is_right"), [("secret", False), ("fifteen-letters", False), ("sixteen-letters-", True)]
)
def test_short_tokens_are_refused(token: str, is_right: bool) -> None:
    roots: Any = (Root.parse("runs"),)
    if is_right:
        Settings(roots=roots, token=token)
        return
    with pytest.raises(UsageError, match=r"expected at least 16: make one with"):
        Settings(roots=roots, token=token)


@needs_chromium
def test_uploads_are_listed_and_removed_on_the_page(clients: list[Client]) -> None:
    clients[0].begin(run="kept")
    with open_browser() as browser:
        page = new_context(browser).new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.request.post(f"{clients[0].base}/api/session", data={"token": TOKEN})
        page.goto(f"{clients[0].base}/jobs")
        page.locator("[data-test=uploads]").get_by_text("kept").wait_for()
        page.locator("[data-test=upload-remove]").click()
        page.locator("[data-test=confirm]").click()
        page.locator("[data-test=uploads]").wait_for(state="detached")
    assert clients[0].ask("GET", "")[1]["uploads"] == []
