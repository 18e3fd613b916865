"""Tokens with roles and runs in a file that is edited while the service runs, links to a run, and the audit log."""

from __future__ import annotations

import errno
import hmac
import json
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.checkpoint.checkpoints import save_arrays
from tests.serve.conftest import Serve
from tests.serve.raw import Answer, ask
from tests.serve.test_guard import ROUTES
from tests.serve.test_upload_refusals import Client as Uploads
from tests.waiting import until
from zstore.errors import StorageError, UsageError
from zstore.remote.upload import upload_checkpoint
from zstore.serve import tokens
from zstore.serve.server import serving
from zstore.serve.settings import Root, Settings
from zstore.serve.tokens import (
    Link,
    Role,
    Token,
    TokenFile,
    Tokens,
    digest_of,
    edit_tokens,
    read_link,
    read_tokens,
    sign,
)
from zstore.testing.faults import FaultyFiles
from zstore.tools.cli import app

OWN = "correct-horse-battery-staple"
JSON = "Content-Type: application/json"
TAG = "step-00000001"


def command(*arguments: str | Path, code: int = 0) -> str:
    """Return what `zstore serve token` prints."""
    done = CliRunner().invoke(app, ["serve", "token", *map(str, arguments)], standalone_mode=False)
    if done.exception is not None and code == 0:
        raise done.exception
    return done.stdout.strip()


def add(file: Path, name: str, role: str = "read", *more: str) -> str:
    """Return the header with a new token."""
    return f"Authorization: Bearer {command('add', name, '--role', role, '--file', file, *more)}"


def edit(file: Path, name: str, **fields: Any) -> None:
    """Change a token of a file."""

    def change(content: TokenFile) -> TokenFile:
        changed = [one.model_copy(update=fields) if one.name == name else one for one in content.tokens]
        return content.model_copy(update={"tokens": tuple(changed)})

    edit_tokens(file, change)


def share(file: Path, *arguments: str) -> str:
    """Return the path of a new link."""
    return command("share", *arguments, "--file", file)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.json"
    edit_tokens(path, lambda content: content)
    return path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with the runs `one` and `two`."""
    for name in ("one", "two"):
        save_arrays(tmp_path / "runs" / name, {"model/a": np.arange(8.0)}, run_id=name)
    return tmp_path / "runs"


@pytest.fixture
def base(runs: Path, file: Path, serve: Serve) -> str:
    return serve(runs, tokens=file, allow_actions=True)


# -- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_has_hashes_alone_and_is_for_its_owner(file: Path) -> None:
    token = add(file, "alice", "write", "--runs", "gpt-*, bert", "--expires", "30d").rpartition(" ")[2]
    (found,) = read_tokens(file).tokens
    assert (found.name, found.role, found.runs) == ("alice", "write", ("gpt-*", "bert"))
    assert found.sha256 == digest_of(token.encode())
    assert found.expires == found.created + 30 * 86400
    assert token not in file.read_text()
    assert len(token) >= 43  # 256 bits
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_lists_and_removals(file: Path) -> None:
    add(file, "alice", "act")
    add(file, "bob", "read", "--runs", "one", "--expires", "1h")
    edit(file, "bob", expires=5)
    assert command("list", "--file", file).splitlines() == [
        "alice  act  *  does not expire",
        "bob  read  one  expired 1970-01-01 00:00 UTC",
    ]
    command("remove", "alice", "--file", file)
    assert [token.name for token in read_tokens(file).tokens] == ["bob"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["add", "alice", "--role", "read"], "has a token 'alice': remove it first"),
        (["add", "a b", "--role", "read"], "expected a name of up to 64"),
        (["add", "bob", "--role", "read", "--runs", "a,"], "and runs like"),
        (["add", "bob", "--role", "write all"], "'write all' is not one of"),
        (["add", "bob", "--role", "read", "--expires", "0d"], "expected a time like"),
        (["add", "bob", "--role", "read", "--expires", "soon"], "expected a time like"),
        (["remove", "bob"], "has no token 'bob'; it has: alice"),
        (["share", "one", "--weights", "model.safetensors"], "expected checkpoint and file"),
    ],
)
def test_what_the_command_refuses(file: Path, arguments: list[str], message: str) -> None:
    add(file, "alice")
    before = file.read_bytes()
    with pytest.raises(Exception, match=re.escape(message)):
        command(*arguments, "--file", file)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got the file: Invalid JSON"),
        ('{"zstore_tokens": 2}', "zstore_tokens: Input should be 1"),
        ('{"tokens": [{"name": "x", "role": "root", "created": 1, "sha256": "' + "0" * 64 + '"}]}', "tokens.0.role"),
        ('{"more": 1}', "more: Extra inputs"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_broken_or_missing_says_what_to_do(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "tokens.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message) as refused:
        Settings(roots=(Root.parse("x"),), tokens=path) and Tokens(path)
    assert "zstore serve token add" in str(refused.value)
    if text is not None:
        with pytest.raises(UsageError, match=message):
            command("add", "bob", "--role", "read", "--file", path)
        assert path.read_text() == text


def test_two_that_add_at_the_same_time_lose_nothing(file: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from zstore.serve.tokens import *\n"
        "for n in range(20):\n"
        "    one = Token(name=f'{sys.argv[2]}{n}', role=Role.READ, created=0, sha256='0' * 64)\n"
        "    edit_tokens(Path(sys.argv[1]), lambda old: old.model_copy(update={'tokens': (*old.tokens, one)}))\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", script, file, name]) for name in "abc"]
    assert [process.wait(timeout=120) for process in started] == [0, 0, 0]
    assert {token.name for token in read_tokens(file).tokens} == {f"{name}{n}" for name in "abc" for n in range(20)}


def test_a_failure_at_any_point_leaves_the_former_file_or_the_new_one(file: Path) -> None:
    add(file, "alice")
    before = read_tokens(file)
    after = before.model_copy(update={"link_key": "0" * 64})
    counting = FaultyFiles()
    edit_tokens(file, lambda _: before, counting)
    found = []
    for number in range(len(counting.operations)):
        with pytest.raises(StorageError):
            edit_tokens(file, lambda _: after, FaultyFiles(number, errno.EIO))
        found.append(read_tokens(file))
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(found) >= 4
    assert found[0] == before
    assert all(one in (before, after) for one in found)
    edit_tokens(file, lambda _: after)  # what the failures left is in nobody's way
    assert read_tokens(file) == after


def test_a_process_that_was_killed_is_in_nobodys_way(file: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from zstore.serve.tokens import *\n"
        "Files.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "edit_tokens(Path(sys.argv[1]), lambda old: old)\n"
    )
    add(file, "alice")
    before = file.read_bytes()
    done = subprocess.run([sys.executable, "-c", script, file], check=False, timeout=60)
    assert done.returncode == -9
    assert {path.name for path in file.parent.iterdir()} == {file.name, f".{file.name}.lock", f".{file.name}.part"}
    assert file.read_bytes() == before
    add(file, "bob")
    assert [token.name for token in read_tokens(file).tokens] == ["alice", "bob"]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


# -- who may -----------------------------------------------------------------------------------------------------------


def test_tokens_are_wrong_expired_or_removed(base: str, file: Path) -> None:
    alice, bob = add(file, "alice"), add(file, "bob", "read", "--expires", "1h")
    assert [ask(base, "/api/runs", header).status for header in (alice, bob, f"{alice}x")] == [200, 200, 401]
    edit(file, "bob", expires=int(time.time()))
    assert [ask(base, "/api/runs", header).status for header in (alice, bob)] == [200, 401]
    command("remove", "alice", "--file", file)
    assert ask(base, "/api/runs", alice).status == 401
    assert ask(base, "/api/runs").status == 401  # also once there is none left


def test_roles(base: str, file: Path) -> None:
    headers = {role: add(file, role, role) for role in ("read", "write", "act")}
    verify = f"/api/runs/one/checkpoints/{TAG}/verify"

    def statuses(path: str, method: str = "GET") -> list[int]:
        return [ask(base, path, header, JSON, method=method, body=b"{}").status for header in headers.values()]

    assert statuses("/api/runs") == [200, 200, 200]
    assert statuses("/api/uploads?run=one") == [403, 200, 200]
    assert statuses(verify, "POST") == [403, 403, 202]
    answer = ask(base, verify, headers["write"], method="POST")
    assert answer.error == "this needs a token with the role act: the role of 'write' is write"
    assert "with the role write: the role of 'read' is read" in ask(base, "/api/uploads", headers["read"]).error
    told = [json.loads(ask(base, "/api", header).body) for header in headers.values()]
    assert [(one["role"], one["authorized"], one["needs_token"]) for one in told] == [
        (role, True, False) for role in headers
    ]


def test_every_operation_that_changes_something_needs_more_than_reading(base: str, file: Path) -> None:
    reader = add(file, "reader")
    for method, path in ROUTES:
        if method in ("GET", "HEAD") or path == "/api/session":
            continue
        filled = re.sub(r"\{[^}]*\}", "one", path)
        answer = ask(base, filled, reader, JSON, method=method, body=b"{}")
        assert (answer.status, "needs a token with the role" in answer.error) == (403, True), (method, path)


def test_the_one_token_may_do_all_beside_those_of_the_file(runs: Path, file: Path, serve: Serve) -> None:
    base, alice = serve(runs, token=OWN, tokens=file, allow_actions=True), add(file, "alice")
    assert json.loads(ask(base, "/api", f"Authorization: Bearer {OWN}").body)["role"] == "act"
    assert json.loads(ask(base, "/api", alice).body)["role"] == "read"


def test_a_file_that_breaks_keeps_the_former_tokens_and_one_warning(
    base: str, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alice, whole = add(file, "alice"), file.read_bytes()
    assert ask(base, "/api/runs", alice).status == 200
    for spoil in (lambda: file.write_text(file.read_text()[:-9]), file.unlink):
        caplog.clear()
        spoil()
        assert [ask(base, "/api/runs", alice).status for _ in range(3)] == [200] * 3
        (told,) = [record.getMessage() for record in caplog.records if record.name == "zstore.serve"]
        assert str(file) in told
        file.write_bytes(whole)
    bob = add(file, "bob")
    assert ask(base, "/api/runs", bob).status == 200


def sign_in(base: str, header: str) -> str:
    """Return the header of a browser that has shown a token."""
    body = json.dumps({"token": header.rpartition(" ")[2]}).encode()
    return cookie(ask(base, "/api/session", JSON, method="POST", body=body))


def cookie(answer: Answer) -> str:
    return f"Cookie: {answer.headers['set-cookie'].partition(';')[0]}"


def test_a_session_is_worth_what_its_token_is_worth(base: str, file: Path) -> None:
    header = add(file, "alice", "act", "--runs", "one")
    browser = sign_in(base, header)
    verify = f"/api/runs/one/checkpoints/{TAG}/verify"
    assert [ask(base, f"/api/runs/{run}", browser).status for run in ("one", "two")] == [200, 404]
    assert ask(base, verify, browser, method="POST").status == 202
    edit(file, "alice", role=Role.READ, runs=("two",))
    assert [ask(base, f"/api/runs/{run}", browser).status for run in ("one", "two")] == [404, 200]
    assert ask(base, verify, browser, method="POST").status == 403
    edit(file, "alice", expires=1)
    assert ask(base, "/api/runs", browser).status == 401
    edit(file, "alice", expires=None)
    assert ask(base, "/api/runs", browser).status == 200
    command("remove", "alice", "--file", file)
    assert ask(base, "/api/runs", browser).status == 401
    add(file, "alice", "act")  # another token of that name
    assert ask(base, "/api/runs", browser).status == 401


def test_a_live_page_ends_with_its_token(base: str, file: Path, http: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zstore.serve.routes.events.HEARTBEAT_S", 0.05)
    name, _, value = add(file, "alice").partition(": ")
    events = http.request("GET", f"{base}/api/runs/one/events", headers={name: value}, preload_content=False)
    lines = iter(events)
    assert next(lines).startswith(b"retry:")
    command("remove", "alice", "--file", file)
    assert all(line for line in lines)  # it comes to an end


# -- which runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limited:
    """A service with a run, a job and an upload that a token is not for."""

    base: str
    limited: str
    full: str
    job: str
    upload: str


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    top = tmp_path_factory.mktemp("limited")
    runs, file = top / "runs", top / "tokens.json"
    for name in ("mine-1", "unseen"):
        folder = save_arrays(runs / name, {"model/a": np.arange(8.0)}, run_id=name).parent
        (folder / "config.json").write_text("{}")
    mine, full = add(file, "mine", "act", "--runs", "mine-*"), add(file, "full", "act")
    with serving(Settings(roots=(Root.parse(str(runs)),), port=0, tokens=file, allow_actions=True)) as base:
        job = json.loads(ask(base, f"/api/runs/unseen/checkpoints/{TAG}/verify", full, method="POST").body)["id"]
        checkpoint = save_arrays(top / "sent", {"model/a": np.arange(9.0)}, run_id="unseen", step=2)
        offer = json.dumps(Uploads(base, runs, checkpoint, None).offer(run="unseen")).encode()  # type: ignore[arg-type]
        begun = ask(base, "/api/uploads", full, JSON, method="POST", body=offer)
        refused = ask(base, "/api/uploads", mine, JSON, method="POST", body=offer)
        assert (begun.status, refused.status) == (200, 404), (begun, refused)
        yield Limited(base, mine, full, job, json.loads(begun.body)["id"])


KNOWN = {"checkpoint": TAG, "path": f"{TAG}/zarr.json", "run_id": "0" * 32, "name": "config.json"}
QUERIES = {"/diff": f"?before={TAG}&after={TAG}", "/stats": "?array=model/a", "{run_id}": "?offset=0"}


def _ask(service: Limited, header: str, method: str, path: str, **names: str) -> Answer:
    filled = re.sub(r"\{(\w+)(:\w+)?\}", lambda found: {**KNOWN, **names}[found[1]], path)
    if path.startswith("/weights"):
        filled = filled.replace("zarr.json", "model.safetensors")
    filled += next((query for end, query in QUERIES.items() if path.endswith(end)), "")
    mark = json.dumps({"checkpoint": TAG, "held": True}).encode()
    bodies = {"tags": mark, "marks": b"{}", "prune": b'{"keep_last": 1}', "{run_id}": b"{}\n"}
    body = next((body for end, body in bodies.items() if path.endswith(end) and method != "GET"), b"")
    return ask(service.base, filled, header, JSON, method=method, body=body)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_token_for_some_runs_sees_nothing_of_others_at_any_route(limited: Limited, method: str, path: str) -> None:
    names = {
        name: value
        for name, value in (("run", "unseen"), ("job", limited.job), ("upload", limited.upload))
        if f"{{{name}" in path
    }
    none = {"run": "absent", "job": "0" * 32, "upload": "0" * 32}
    if path in ("/api/session", "/run/{rest:path}", "/assets/{file:path}"):
        return
    found = _ask(limited, limited.limited, method, path, **names)
    if not names:
        assert "unseen" not in found.body.decode("latin-1")
        return
    assert found.status == 404
    text = found.body.decode()
    other = _ask(limited, limited.limited, method, path, **{name: none[name] for name in names})
    for name, value in names.items():
        text = text.replace(value, none[name])
    assert (other.status, other.body.decode()) == (found.status, text)
    assert other.headers == {**found.headers, "content-length": other.headers["content-length"]}
    if method == "GET" and not path.endswith("events"):
        assert _ask(limited, limited.full, method, path, **names).status != 404


@pytest.mark.parametrize("path", ["/zarr/{}@{}/zarr.json", "/zarr/{}@{}", "/weights/{}@{}/model.safetensors"])
def test_a_token_for_some_runs_reaches_no_other_by_a_tag(limited: Limited, path: str) -> None:
    mark = json.dumps({"tag": "best", "checkpoint": TAG}).encode()
    assert ask(limited.base, "/api/runs/unseen/tags", limited.full, JSON, method="POST", body=mark).status == 200
    for tag in ("best", "latest", TAG):
        assert ask(limited.base, path.format("unseen", tag), limited.limited).status == 404
        assert ask(limited.base, path.format("unseen", tag), limited.full).status != 404


def test_a_token_for_some_runs_has_these_in_lists(limited: Limited) -> None:
    def lists(header: str) -> list[Any]:
        answers = [json.loads(ask(limited.base, f"/api/{kind}", header).body) for kind in ("runs", "jobs", "uploads")]
        return [[one.get("name") or one["run"] for one in next(iter(answer.values()))] for answer in answers]

    assert lists(limited.limited) == [["mine-1"], [], []]
    assert lists(limited.full) == [["mine-1", "unseen"], ["unseen"], ["unseen"]]
    assert ask(limited.base, "/metrics", limited.limited).status == 403
    assert ask(limited.base, "/metrics", limited.full).status == 200
    missing = ask(limited.base, "/api/runs/unseen", limited.limited).error
    assert missing == "there is no run 'unseen'; runs that are served: mine-1"


def test_a_token_for_some_runs_uploads_to_these_alone(tmp_path: Path, base: str, file: Path) -> None:
    token = add(file, "alice", "write", "--runs", "new-*").rpartition(" ")[2]
    path = save_arrays(tmp_path / "sent", {"model/a": np.arange(9.0)}, run_id="x")
    upload_checkpoint(path, f"{base}/new-1", {"token": token})
    assert [one.name for one in (tmp_path / "runs/new-1").iterdir() if one.name == path.name]
    for run in ("one", "other"):
        with pytest.raises(Exception, match=f"there is no run '{run}'"):
            upload_checkpoint(path, f"{base}/{run}", {"token": token})
    assert not (tmp_path / "runs/other").exists()


# -- links --------------------------------------------------------------------------------------------------------------


def test_a_link_to_weights_is_for_this_file_alone(base: str, file: Path) -> None:
    place = f"/weights/one/{TAG}/model.safetensors"
    link = share(file, "one", "--weights", f"{TAG}/model.safetensors")
    assert link.startswith(f"{place}?share=")
    query = link.partition("?")[2]
    alice = add(file, "alice")
    whole = ask(base, f"{place}?dtype=fp32", alice)
    shared = ask(base, f"{place}?{query}&dtype=fp32")
    assert (shared.status, shared.body) == (200, whole.body)
    assert "set-cookie" not in shared.headers
    for other in (
        "/run/one", "/api/runs", "/api/runs/one", f"/weights/one/{TAG}/", "/weights/one/latest/model.safetensors",
        f"/weights/one/{TAG}//model.safetensors", f"/weights/two/{TAG}/model.safetensors", f"/zarr/one/{TAG}/zarr.json",
    ):  # fmt: skip
        assert ask(base, f"{other}?{query}").status == 401, other
    port = base.rpartition(":")[2]
    assert ask(base, place, f"Cookie: zstore-session-{port}={query.removeprefix('share=')}").status == 401


@pytest.mark.parametrize("change", ["payload", "mac", "longer", "other run", "other key", "no key", "empty", "token"])
def test_a_link_that_was_changed_is_refused(base: str, file: Path, change: str) -> None:
    alice = add(file, "alice")
    text = share(file, "one").partition("=")[2]
    payload, _, mac = text.partition(".")
    forged = sign("0" * 64, Link(run="one", expires=2**40))
    other = sign(read_tokens(file).link_key, Link(run="two", expires=2**40))
    changed = {
        "payload": f"{'f' if payload[0] != 'f' else 'e'}{payload[1:]}.{mac}",
        "mac": f"{payload}.{'A' if mac[0] != 'A' else 'B'}{mac[1:]}",
        "longer": f"{text}AA",
        "other run": f"{other.partition('.')[0]}.{mac}",
        "other key": forged,
        "no key": f"{forged.partition('.')[0]}.",
        "empty": ".",
        "token": alice.rpartition(" ")[2],
    }[change]
    assert ask(base, f"/run/one?share={text}").status == 303
    answer = ask(base, f"/run/one?share={changed}")
    assert answer.status == 401
    assert "ask whoever sent it" in answer.error
    port = base.rpartition(":")[2]
    assert ask(base, "/api/runs/one", f"Cookie: zstore-session-{port}={changed}").status == 401
    assert ask(base, "/api/runs/one", f"Authorization: Bearer {text}").status == 401  # a link is no token


def test_a_link_expires(base: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = share(file, "one", "--expires", "1h")
    browser = cookie(ask(base, link))
    assert ask(base, "/api/runs/one", browser).status == 200
    later = time.time() + 3601
    monkeypatch.setattr(tokens.time, "time", lambda: later)
    assert ask(base, "/api/runs/one", browser).status == 401
    assert ask(base, link).status == 401


def test_a_link_is_for_the_name_and_not_for_a_pattern(runs: Path, file: Path, serve: Serve) -> None:
    shutil.copytree(runs / "one", runs / "o[mn]e")
    base = serve(runs, tokens=file)
    browser = cookie(ask(base, share(file, "o[mn]e")))
    assert [ask(base, f"/api/runs/{run}", browser).status for run in ("o%5Bmn%5De", "one")] == [200, 404]


def test_links_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    key, link = "1" * 64, Link(run="one", expires=2**40)
    compared: list[tuple[bytes, bytes]] = []
    plain = hmac.compare_digest
    monkeypatch.setattr(tokens.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or plain(a, b))
    token = read_link(key, sign(key, link))
    assert token is not None
    assert token.sees("one")
    assert read_link("", sign("", link)) is None
    assert len(compared) == 1


# -- the audit log --------------------------------------------------------------------------------------------------------


def test_the_audit_log(tmp_path: Path, base: str, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[dict[str, Any]]:
        found = [json.loads(one.getMessage()) for one in caplog.records if one.name == "zstore.serve.audit"]
        for line in found:
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", line.pop("at"))
            assert line.pop("address") == "127.0.0.1"
        return found

    header = add(file, "alice", "act")
    old = add(file, "old")
    edit(file, "old", expires=1)
    link = share(file, "one")
    path = save_arrays(tmp_path / "sent", {"model/a": np.arange(9.0)}, run_id="x")
    with caplog.at_level(logging.INFO, "zstore.serve.audit"):
        sign_in(base, header)
        ask(base, f"/api/runs/one/checkpoints/{TAG}/verify", header, method="POST")
        ask(base, "/api/runs/one/actions/save", header, method="POST")
        ask(base, "/api/runs", header)
        for _ in range(3):  # one line for each that is new from an address
            ask(base, "/api/runs", "Authorization: Bearer wrong")
            ask(base, "/api/runs", old)
        ask(base, link)
        ask(base, f"{link}x")
        upload_checkpoint(path, f"{base}/three", {"token": header.rpartition(" ")[2]})
        plan = json.loads(ask(base, "/api/runs/one/prune", header, JSON, method="POST", body=b'{"keep_last": 1}').body)
        body = json.dumps({"keep_last": 1, "plan": plan["plan"]}).encode()
        ask(base, "/api/runs/one/prune", header, JSON, method="POST", body=body)
        until(lambda: len(lines_of(caplog)) == 10)  # the last is written once its client has the answer
    found = lines()
    upload = next(line for line in found if line["what"] == "upload")
    assert re.fullmatch(r"/api/uploads/[0-9a-f]{32}/commit", upload.pop("path"))
    refused = {"what": "refused token", "run": "", "path": "", "outcome": "refused"}
    expected = [
        {"what": "sign-in", "token": "alice", "run": "", "path": "/api/session", "outcome": 204},
        {
            "what": "verify",
            "token": "alice",
            "run": "one",
            "path": f"/api/runs/one/checkpoints/{TAG}/verify",
            "outcome": 202,
        },
        {"what": "save", "token": "alice", "run": "one", "path": "/api/runs/one/actions/save", "outcome": 409},
        {**refused, "token": ""},
        {**refused, "token": "old"},
        {"what": "link opened", "token": "link", "run": "one", "path": "/run/one", "outcome": 303},
        {**refused, "token": "link"},
        {"what": "upload", "token": "alice", "run": "three", "outcome": 200},
        {"what": "plan of a prune", "token": "alice", "run": "one", "path": "/api/runs/one/prune", "outcome": 200},
        {"what": "prune", "token": "alice", "run": "one", "path": "/api/runs/one/prune", "outcome": 200},
    ]
    assert sorted(found, key=lambda one: sorted(map(str, one.items()))) == sorted(
        expected, key=lambda one: sorted(map(str, one.items()))
    )
    for secret in (header, old, link):
        assert secret.rpartition("=" if "?" in secret else " ")[2] not in caplog.text


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "zstore.serve.audit"]


def test_an_action_that_the_role_forbids_is_in_the_audit_log(
    base: str, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader = add(file, "reader")
    with caplog.at_level(logging.INFO, "zstore.serve.audit"):
        ask(base, "/api/runs/one/actions/stop", reader, method="POST")
        until(lambda: len(lines_of(caplog)) == 1)
    line = json.loads(lines_of(caplog)[0])
    assert (line["what"], line["token"], line["run"], line["outcome"]) == ("stop", "reader", "one", 403)


def test_the_command_serves_with_them_and_appends_to_the_audit_log(tmp_path: Path, runs: Path, file: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    audit.write_text('{"what": "before"}\n')

    def told() -> list[str]:
        return [json.loads(line)["what"] for line in audit.read_text().splitlines()]

    def zstore(*arguments: str | Path) -> str:
        full = [sys.executable, "-m", "zstore", "serve", "token", *arguments, "--file", file]
        return subprocess.run(full, capture_output=True, text=True, check=True, timeout=60, env=env).stdout.strip()

    env = {**os.environ, "ZSTORE_TOKEN": ""}
    zstore("add", "bob", "--role", "read")
    assert told() == ["before"]
    token = zstore("add", "alice", "--role", "read", "--audit", audit)
    env["ZSTORE_AUDIT"] = str(audit)
    zstore("remove", "bob")
    link = zstore("share", "one")
    assert link.startswith("/run/one?share=")
    serve = [sys.executable, "-m", "zstore", "serve", runs, "--port", "0", "--tokens", file]
    with subprocess.Popen(serve, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stderr is not None
            base = process.stderr.readline().split()[-1]
            sign_in(base, f"Bearer {token}")
            until(lambda: len(told()) == 5)
        finally:
            process.terminate()
    zstore("unshare")
    assert told() == ["before", "token added", "token removed", "link made", "sign-in", "links ended"]
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [line["token"] for line in lines[1:4]] == ["alice", "bob", ""]
    assert token not in audit.read_text()
    assert link.partition("=")[2] not in audit.read_text()


def test_a_token_is_not_added_if_the_audit_log_cannot_say_so(tmp_path: Path, file: Path) -> None:
    before = file.read_text()
    told = command("add", "bob", "--role", "read", "--file", file, "--audit", tmp_path / "gone/audit.jsonl", code=1)
    assert told == ""
    assert file.read_text() == before
    command("remove", "nobody", "--file", file, "--audit", tmp_path / "audit.jsonl", code=1)
    assert (tmp_path / "audit.jsonl").read_text() == "", "what failed was not done"


def test_a_token_of_the_file_opens_a_service_to_other_machines(file: Path) -> None:
    assert Settings(roots=(Root.parse("x"),), host="0.0.0.0", tokens=file, allow_actions=True).needs_token
    with pytest.raises(UsageError, match="--tokens"):
        Settings(roots=(Root.parse("x"),), host="0.0.0.0")


def test_a_token_has_a_name_a_role_and_a_hash() -> None:
    with pytest.raises(ValueError, match="sha256"):
        Token(name="x", role=Role.READ, created=0, sha256="none")
