"""How many bytes a run and a token may hold: refused before arrays are sent, freed by what is removed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import urllib3
from typer.testing import CliRunner

from tests.checkpoint.checkpoints import save_arrays
from tests.serve.test_upload_refusals import MOMENTS, NAMES, A, Client
from zstore.serve.inbox import inbox
from zstore.serve.inbox.inbox import SILENT_S
from zstore.serve.server import serving
from zstore.serve.settings import Root, Settings
from zstore.serve.tokens import Role, Token, TokenFile, digest_of
from zstore.tools.cli import app

SECRET = "secret-of-the-tests"


def token(quota: int | None) -> Token:
    return Token(name="ci", role=Role.ACT, created=0, quota=quota, sha256=digest_of(SECRET.encode()))


def arrays(number: int) -> dict[str, np.ndarray[Any, Any]]:
    return {name: values + number for name, values in NAMES.items()}


def send(client: Client, run: str, tag_only: bool = False) -> tuple[int, Any]:
    """Send a checkpoint whole; return the answer of the plan, or of the commit."""
    upload = client.begin(run=run)
    planned = client.plan(upload)
    if planned[0] != 200 or tag_only:
        return planned
    for file in [one["path"] for one in planned[1]["files"]]:
        assert client.put(upload, file)[0] == 201
    return client.ask("POST", f"{upload}/commit")


def bytes_of(folder: Path) -> int:
    """As `du` counts: every file once."""
    found = {
        (status.st_dev, status.st_ino): status.st_size
        for path, _, names in os.walk(folder)
        for name in names
        for status in [os.lstat(os.path.join(path, name))]
    }
    return sum(found.values())


@pytest.fixture
def saved(tmp_path: Path) -> list[Path]:
    """Checkpoints of two runs, with other bytes."""
    return [save_arrays(tmp_path / name, arrays(seed), run_id=name) for seed, name in enumerate("ab")]


@pytest.fixture
def services(tmp_path: Path, http: urllib3.PoolManager, saved: list[Path]) -> Callable[..., Any]:
    (tmp_path / "runs").mkdir()
    file = tmp_path / "tokens.json"

    def begin(*, quota: int | None = None, run_quota: int | None = None) -> Any:
        file.write_text(TokenFile(tokens=(token(quota),)).model_dump_json())
        roots = (Root.parse(str(tmp_path / "runs")),)
        return serving(Settings(roots=roots, port=0, tokens=file, allow_actions=True, run_quota=run_quota))

    return begin


def test_a_run_holds_no_more_than_its_quota(
    services: Callable[..., Any], saved: list[Path], tmp_path: Path, http: urllib3.PoolManager
) -> None:
    with services() as base:
        assert send(Client(base, tmp_path / "runs", saved[0], http), "one")[0] == 200
    held = bytes_of(tmp_path / "runs" / "one")
    second = save_arrays(tmp_path / "a2", arrays(9), run_id="a", step=2)
    with services(run_quota=held + 100_000) as base:
        client = Client(base, tmp_path / "runs", second, http)
        status, answer = send(client, "one")
        assert (status, "'one' may hold" in answer["error"]) == (507, True)
        assert not (tmp_path / "runs" / "one" / "step-00000002").exists()
        # The checkpoint that is there is linked by a later save of the same arrays, and counts once.
        same = save_arrays(tmp_path / "a3", arrays(0), run_id="a", step=3)
        assert send(Client(base, tmp_path / "runs", same, http), "two")[0] == 200
        shutil.rmtree(tmp_path / "runs" / "one" / "step-00000001")
        assert send(client, "one")[0] == 200


def test_a_token_holds_no_more_than_its_quota_over_all_runs(
    services: Callable[..., Any], saved: list[Path], tmp_path: Path, http: urllib3.PoolManager
) -> None:
    size = sum(len((saved[0] / file).read_bytes()) for file in (A, MOMENTS))
    with services(quota=2 * size) as base:
        clients = [Client(base, tmp_path / "runs", path, http) for path in saved]
        assert send(clients[0], "one")[0] == 200
        listed = clients[0].ask("GET", "")[1]
        assert size <= listed["held_bytes"] < 2 * size == listed["quota_bytes"]
        status, answer = send(clients[1], "other")
        assert (status, "'ci' may hold" in answer["error"]) == (507, True)
        assert bytes_of(tmp_path / "runs" / "one") > 0
        pruned = tmp_path / "runs" / "one" / "step-00000001"
        shutil.rmtree(pruned)
        assert clients[0].ask("GET", "")[1]["held_bytes"] == 0
        assert send(clients[1], "other")[0] == 200
    # It is known after a restart, and by no other name.
    with services(quota=2 * size) as base:
        client = Client(base, tmp_path / "runs", saved[0], http)
        assert client.ask("GET", "")[1]["held_bytes"] >= size


def test_what_uploads_under_way_need_counts(
    services: Callable[..., Any], saved: list[Path], tmp_path: Path, http: urllib3.PoolManager
) -> None:
    size = sum(len((saved[0] / file).read_bytes()) for file in (A, MOMENTS))
    with services(quota=2 * size - 1) as base:
        first, second = (Client(base, tmp_path / "runs", path, http) for path in saved)
        assert send(first, "one", tag_only=True)[0] == 200
        assert send(second, "other")[0] == 507


def test_an_upload_that_was_silent_does_not_go_past_a_quota(
    services: Callable[..., Any], saved: list[Path], tmp_path: Path, http: urllib3.PoolManager, monkeypatch: Any
) -> None:
    size = sum(len((saved[0] / file).read_bytes()) for file in (A, MOMENTS))
    with services(quota=2 * size - 1) as base:
        first, second = (Client(base, tmp_path / "runs", path, http) for path in saved)
        upload = first.begin(run="one")
        files = [one["path"] for one in first.plan(upload)[1]["files"]]
        for file in files:
            assert first.put(upload, file)[0] == 201
        later = time.time() + SILENT_S + 1
        monkeypatch.setattr(inbox.time, "time", lambda: later)
        assert send(second, "other")[0] == 200
        status, answer = first.ask("POST", f"{upload}/commit")
        assert (status, "may hold" in answer["error"]) == (507, True)


def test_the_command_makes_and_lists_quotas(tmp_path: Path) -> None:
    file = str(tmp_path / "tokens.json")

    def command(*words: str) -> str:
        return CliRunner().invoke(app, ["serve", "token", *words, "--file", file]).output

    command("add", "ci", "--role", "write", "--quota", "200GB")
    assert "quota 200.00 GB" in command("list")
    assert "much" in command("add", "x", "--role", "write", "--quota", "much")
    assert len(command("list").splitlines()) == 1
