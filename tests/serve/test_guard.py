"""What stands before every route: tokens, hosts, origins, limits, and what a path may not do."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import urllib3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.checkpoint.checkpoints import save_arrays
from tests.serve.raw import Answer, ask, connect, read_all
from zstore.errors import UsageError
from zstore.serve import auth
from zstore.serve.app import make_app
from zstore.serve.auth import ANYBODY, Permissions, require_role
from zstore.serve.guard.guard import HEADERS, MOST_BODY_BYTES
from zstore.serve.server import make_server, serving
from zstore.serve.settings import Root, Settings
from zstore.serve.tokens import Role, Token

TOKEN = "correct-horse-battery-staple"
BEARER = f"Authorization: Bearer {TOKEN}"
JSON = "Content-Type: application/json"
OPEN = {"/", "/jobs", "/run/{rest:path}", "/assets/{file:path}", "/{run}", "/api", "/api/session", "/healthz"}
"""Routes that need no token."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, beside what must not be read."""
    top = tmp_path_factory.mktemp("top")
    tag = save_arrays(top / "runs" / "one", {"model/a": np.arange(8.0)})
    (top / "outside.txt").write_text("outside")
    (tag / "link").symlink_to(top / "outside.txt")
    (top / "runs" / "away").symlink_to(top)
    return top / "runs"


@pytest.fixture(scope="module")
def base(folder: Path) -> Iterator[str]:
    """A service without a token."""
    with serving(Settings(roots=(Root.parse(str(folder)),), port=0)) as url:
        yield url


@pytest.fixture(scope="module")
def closed(folder: Path) -> Iterator[str]:
    """A service with a token that takes actions."""
    with serving(Settings(roots=(Root.parse(str(folder)),), port=0, token=TOKEN, allow_actions=True)) as url:
        yield url


def _routes() -> list[tuple[str, str]]:
    """Return method and path of every route that there is."""
    app = make_app(Settings(roots=(Root.parse("runs"),)))
    found = []
    for route in app.routes:
        assert isinstance(route, Route), f"{route} is not looked at by these tests"
        found += [(method, route.path) for method in sorted(route.methods or ())]
    return found


ROUTES = _routes()
EVIL = [
    "..", "../..", "../outside.txt", "..%2foutside.txt", "%2e%2e/outside.txt", "%2e%2e%2foutside.txt", "..%5coutside.txt",
    "..\\x",     "/etc/passwd", "%2fetc%2fpasswd", "one/..", "one%2f..%2f..%2foutside.txt", "one%00", "%00",
    "%0d%0aSet-Cookie:x=1", "a%0ab",
    "%c0%ae%c0%ae/outside.txt", "%ff", "%252e%252e%252foutside.txt", "one/step-00000001/link", "step-00000001/link",
    "link", "away", "away/outside.txt", "away/runs", "step-00000001/../../../outside.txt", "-1", "'\"<b>", "%uff0e", "x" * 3000,
    "a/" * 80, "file:///etc/passwd", "memory://x", ".", "./.", "~", "C:/", "latest", "latest/link",
]  # fmt: skip


def _check(answer: Answer) -> None:
    assert 200 <= answer.status < 500, answer
    for name, value in HEADERS.items():
        assert answer.headers[name.lower()] == value
    assert "access-control-allow-origin" not in answer.headers
    if answer.status >= 400:
        assert answer.error
    assert answer.body != b"outside"
    assert "root:" not in answer.body.decode("latin-1")


@pytest.mark.parametrize(("method", "path"), [(m, p) for m, p in ROUTES if "{" in p and m != "HEAD"])
def test_no_parameter_of_a_path_leads_out(closed: str, method: str, path: str) -> None:
    names = re.findall(r"\{([a-z_]+)(?::[a-z]+)?\}", path)
    for name in names:
        known = {"run": "one", "checkpoint": "step-00000001", "path": "step-00000001", "array": "model/a"}
        for value in EVIL:
            filled = path
            for each in names:
                text = value if each == name else known.get(each, "x")
                filled = re.sub(rf"\{{{each}(:[a-z]+)?\}}", lambda _, text=text: text, filled)
            extra = [JSON] if method != "GET" else []
            _check(ask(closed, filled, BEARER, *extra, method=method, body=b"{}" if extra else b""))


def test_every_route_needs_the_token_but_for_the_shell(closed: str) -> None:
    assert {path for _, path in ROUTES} >= OPEN
    for method, path in ROUTES:
        if method == "HEAD" or path in OPEN:
            continue
        filled = re.sub(r"\{[^}]*\}", "one", path)
        for header in (
            "X: y",
            "Authorization: Basic b25lOnR3bw==",
            f"Cookie: zstore-session-{closed.rpartition(':')[2]}=x",
        ):
            answer = ask(closed, filled, header, *([JSON] if method == "POST" else []), method=method)
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer"), (method, path)
            assert "token" in answer.error


def test_the_shell_is_open_and_tells_nothing_of_runs(closed: str) -> None:
    assert json.loads(ask(closed, "/api").body)["authorized"] is False
    assert json.loads(ask(closed, "/api", BEARER).body)["authorized"] is True
    assert ask(closed, "/").status == 200
    assert {ask(closed, path).status for path in ("/run/one", "/run/none", "/jobs", "/one", "/none")} == {307}
    assert [ask(closed, path, BEARER).status for path in ("/one", "/none")] == [307, 404]


def test_a_browser_signs_in_for_a_cookie_that_is_not_the_token(closed: str) -> None:
    port = closed.rpartition(":")[2]
    sign_in = ask(closed, "/api/session", JSON, method="POST", body=json.dumps({"token": TOKEN}).encode())
    assert sign_in.status == 204
    cookie, *attributes = sign_in.headers["set-cookie"].split("; ")
    assert cookie.startswith(f"zstore-session-{port}=")
    assert TOKEN not in cookie
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(attributes)
    assert "Secure" not in attributes  # no TLS
    assert json.loads(ask(closed, "/api", f"Cookie: a=b; {cookie}").body)["authorized"] is True
    assert ask(closed, "/api/runs", f"Cookie: {cookie}").status == 200
    assert ask(closed, "/api/runs", f"Cookie: {cookie}x").status == 401
    assert ask(closed, "/api/session", f"Cookie: {cookie}", method="DELETE").status == 204
    assert ask(closed, "/api/runs", f"Cookie: {cookie}").status == 401


@pytest.mark.parametrize(
    ("body", "status"),
    [(b'{"token": "wrong"}', 401), (b"{}", 400), (b"[]", 400), (b"[" * 100_000, 400), (b'{"token": 1}', 400), (b"\xff", 400),
     (b'{"token": "a", "b": 1}', 400), (b'{"token": "\\ud800"}', 400)],
)  # fmt: skip
def test_a_sign_in_that_is_wrong_is_refused(closed: str, body: bytes, status: int) -> None:
    answer = ask(closed, "/api/session", JSON, method="POST", body=body)
    assert answer.status == status
    assert answer.error


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    plain = hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or plain(a, b))
    access = Permissions(Settings(roots=(Root.parse("x"),), token=TOKEN))
    assert access.of_token(TOKEN.encode(), "10.0.0.1")
    assert not access.of_token(b"", "10.0.0.1")
    assert not access.of_token(TOKEN.encode() + b"x", "10.0.0.1")
    assert [(len(a), len(b)) for a, b in compared] == [(32, 32)] * 3  # digests, whatever the length of the token


def test_wrong_tokens_are_limited_by_address_and_old_ones_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    access = Permissions(Settings(roots=(Root.parse("x"),), token=TOKEN))
    now = [1000.0]
    monkeypatch.setattr(auth.time, "monotonic", lambda: now[0])
    for _ in range(100):
        assert not access.of_token(b"old", "10.0.0.1")
    for number in range(19):
        assert not access.of_token(f"guess {number}".encode(), "10.0.0.1")
    with pytest.raises(auth.HTTPException) as refused:
        access.of_token(b"another guess", "10.0.0.1")
    assert refused.value.status_code == 429
    assert not access.of_token(b"another guess", "10.0.0.2")
    assert access.of_token(TOKEN.encode(), "10.0.0.1")
    for number in range(20):
        access.of_token(f"guess {number}".encode(), f"2001:db8::{number}")
    with pytest.raises(auth.HTTPException):
        access.of_token(b"another guess", "2001:db8::ffff")


def test_a_session_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    access = Permissions(Settings(roots=(Root.parse("x"),), token=TOKEN))
    now = [1000.0]
    monkeypatch.setattr(auth.time, "monotonic", lambda: now[0])
    token = access.of_token(TOKEN.encode(), "10.0.0.1")
    assert token is not None
    value = access.begin_session(token)
    assert access.of_cookie(value) == token
    now[0] += auth.SESSION_S
    assert access.of_cookie(value) is None


def test_the_token_is_in_no_log_and_no_answer(
    closed: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = []
    with caplog.at_level(logging.DEBUG):
        for path in ("/api", "/api/runs", "/zarr/one/nothing", "/nothing/at/all", "/api/runs?x=1", "/\x01"):
            answers.append(ask(closed, path, BEARER))
            answers.append(ask(closed, path, f"{BEARER}x"))
        answers.append(
            ask(closed, "/api/session", JSON, method="POST", body=f'{{"token": "{TOKEN}", "x": 1}}'.encode())
        )
        answers.append(ask(closed, "/api/session", JSON, method="POST", body=f'{{"token": "{TOKEN}"'.encode()))
    out, err = capfd.readouterr()
    for text in (caplog.text, out, err, *(f"{answer.headers}{answer.body!r}" for answer in answers)):
        assert TOKEN not in text
    assert TOKEN not in repr(Settings(roots=(Root.parse("x"),), token=TOKEN))


def test_an_error_that_nobody_foresaw_is_logged_and_told_without_detail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(request: Request) -> Response:
        raise KeyError("the detail")

    server = make_server(Settings(roots=(Root.parse(str(tmp_path)),), port=0))
    app: Any = server.config.app
    assert isinstance(app, Starlette)
    app.router.routes.insert(0, Route("/fail", fail))
    messages = _call(app, "/fail", b"secret=1")
    assert messages[0]["status"] == 500
    assert b"detail" not in messages[1]["body"]
    assert {"content-security-policy", "content-type"} <= {name.decode() for name, _ in messages[0]["headers"]}
    assert "the detail" in caplog.text
    assert "secret" not in caplog.text


def _call(app: Starlette, path: str, query: bytes) -> list[dict[str, Any]]:
    """Return what an application answers, without a server."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": query, "scheme": "http",
        "headers": [(b"host", b"localhost")], "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2), "state": {},
        "http_version": "1.1", "root_path": "",
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    return sent


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("localhost:9999", 200), ("LOCALHOST", 200), ("localhost.", 200), ("127.0.0.1:1", 200),
        ("[::1]:8", 200),         ("store.example", 200), ("a.localhost", 200),
        ("evil.example", 421), ("localhost.evil.example", 421), ("10.1.2.3", 421),
        ("", 421), ("a@localhost", 421), ("localhost:x", 421), ("localhost/x", 421), ("[::1", 421), (None, 400),
        ("localhost\r\nHost: localhost", 400),
    ],
)  # fmt: skip
def test_only_names_of_this_service_are_answered(folder: Path, host: str | None, status: int) -> None:
    options = Settings(roots=(Root.parse(str(folder)),), port=0, hosts=("store.example",))
    app = make_app(options)
    names = [] if host is None else host.split("\r\nHost: ")
    scope_headers = [(b"host", name.encode()) for name in names]
    assert _status(app, headers=scope_headers) == status


def test_every_address_and_the_machines_name_reach_a_service_that_others_reach(folder: Path) -> None:
    app = make_app(Settings(roots=(Root.parse(str(folder)),), host="0.0.0.0", token=TOKEN))
    for name, status in (("10.1.2.3", 200), (socket.gethostname(), 200), ("localhost", 200), ("evil.example", 421)):
        assert _status(app, headers=[(b"host", name.encode())]) == status


def _status(app: Starlette, headers: list[tuple[bytes, bytes]], method: str = "GET", path: str = "/api") -> int:
    found: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "scheme": "http",
        "headers": headers, "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2), "http_version": "1.1", "root_path": "",
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    return found[0]


@pytest.mark.parametrize(
    ("headers", "reads", "acts"),
    [
        ([], 200, 204), (["Origin: http://localhost"], 200, 204), (["Origin: http://evil.example"], 200, 403),
        (["Origin: http://localhost:1"], 200, 403), (["Origin: null"], 200, 403), (["Sec-Fetch-Site: same-origin"], 200, 204),
        (["Sec-Fetch-Site: cross-site"], 403, 403), (["Sec-Fetch-Site: same-site"], 403, 403),
        (["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate"], 200, 403),
        (["Sec-Fetch-Site: none", "Sec-Fetch-Mode: navigate"], 200, 204), (["Origin: https://localhost"], 200, 204),
    ],
)  # fmt: skip
def test_pages_of_other_sites_reach_nothing(base: str, headers: list[str], reads: int, acts: int) -> None:
    assert ask(base, "/api/runs", *headers).status == reads
    assert ask(base, "/api/session", *headers, method="DELETE").status == acts
    _check(ask(base, "/api/runs", *headers))
    assert ask(base, "/api/runs", *headers, method="OPTIONS").status in (403, 405)


def test_actions_are_refused_without_the_token_and_where_none_are_allowed(folder: Path) -> None:
    def status(shown: Token | None, **options: Any) -> int:
        app = make_app(Settings(roots=(Root.parse(str(folder)),), **options))
        request = Request({"type": "http", "app": app, "headers": [], "state": {"token": shown}})
        try:
            require_role(request, Role.ACT)
        except auth.HTTPException as error:
            return error.status_code
        return 200

    tokens = [Token(name="x", role=role, created=0, sha256="1" * 64) for role in Role]
    assert status(ANYBODY) == 403
    assert status(tokens[-1], token=TOKEN) == 403
    assert status(None, token=TOKEN, allow_actions=True) == 401
    statuses = [status(one, token=TOKEN, allow_actions=True) for one in tokens]
    assert statuses == [403, 403, 200]


@pytest.mark.parametrize("token", ["", "two words", "new\nline", "zażółć", " x"])
def test_a_token_that_no_header_can_hold_is_refused(token: str) -> None:
    with pytest.raises(UsageError, match="token"):
        Settings(roots=(Root.parse("x"),), token=token)


def test_requests_that_are_too_large_or_no_json_are_refused(base: str) -> None:
    def post(*headers: str, body: bytes = b"") -> int:
        return ask(base, "/api/session", *headers, method="POST", body=body).status

    assert post(JSON, body=b"{}") == 400
    assert post(body=b"{}") == post("Content-Type: text/plain", body=b"{}") == 415
    assert post("Content-Type: application/x-www-form-urlencoded", body=b"a=1") == 415
    assert post("Content-Type: Application/JSON; charset=utf-8", body=b"{}") == 400
    assert post(JSON, body=b" " * (MOST_BODY_BYTES + 1)) == 413
    chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    with connect(base) as connection:
        connection.sendall(
            f"POST /api/session HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\nTransfer-Encoding: chunked\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        for _ in range(MOST_BODY_BYTES // 0x8000 + 2):
            connection.sendall(chunk)
        assert Answer.of(read_all(connection)).status == 413
    assert ask(base, "/api/runs?" + "x" * 9000).status == 414
    assert ask(base, "/" + "x" * 9000).status == 414
    assert ask(base, "/api/runs?" + "&".join("a=1" for _ in range(100))).status == 400
    assert ask(base, "/api/runs?" + "a[b]" * 200 + "=1").status == 400
    assert ask(base, "/zarr/one/" + "a/" * 100).status == 400


_HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            ["Range", "If-Range", "If-None-Match", "If-Match", "Accept", "Origin", "Cookie", "Authorization",
             "Content-Type", "Host", "Sec-Fetch-Site",
             "Expect", "X-Forwarded-Host", "Accept-Encoding", "Last-Event-ID", "Upgrade", "Connection"]
        ),
        st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=40),
    ),
    max_size=4,
)  # fmt: skip
_PARTS = st.one_of(
    st.sampled_from(
        ["api", "runs", "zarr", "xarray", "weights", "one", "step-00000001", "latest", "model", "a", "zarr.json", "c.0", "..",
         ".", "", "uploads", "model.safetensors", "checkpoints", "arrays", "stats", "diff", "steps", "jobs", "session",
         "assets", "run", "events", "%2e%2e", "openapi.json", "actions", "save", "prune", "checkpoint-1"]
    ),
    st.text(max_size=8).map(lambda text: urllib3.util.url._encode_invalid_chars(text, set()) or ""),
    st.binary(max_size=4).map(lambda data: "".join(f"%{byte:02x}" for byte in data)),
)  # fmt: skip
_QUERIES = st.one_of(
    st.just(""),
    st.lists(
        st.tuples(
            st.sampled_from(["recursive", "dtype", "array", "before", "after", "points", "x", "max_shard_size"]),
            st.one_of(
                st.sampled_from(["1", "-1", "nan", "bf16", "model/a", "step-00000001", "%00", "9" * 30, ""]), _PARTS
            ),
        ),
        max_size=4,
    ).map(lambda pairs: "?" + "&".join(f"{name}={value}" for name, value in pairs)),
)
_METHODS = st.sampled_from(["GET", "GET", "GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
_BODIES = st.one_of(
    st.just(b""), st.sampled_from([b"{}", b"[]", b"null", b'{"token": "x"}', b"{", b"\xff"]), st.binary(max_size=20)
)


def _fuzz(base: str, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> None:
    lines = [f"{name}: {value}" for name, value in headers]
    answer = ask(base, path, BEARER, JSON, *lines, method=method, body=body)
    if answer.status == 100:
        answer = Answer.of(answer.body)
    assert 200 <= answer.status < 500, answer
    for name in HEADERS:
        assert name.lower() in answer.headers
    if answer.status >= 400 and method != "HEAD":
        assert answer.error
    if answer.headers.get("content-type") == "application/json" and answer.status == 200 and answer.body:
        json.loads(answer.body)


_REQUESTS = given(
    _METHODS, st.lists(_PARTS, max_size=7).map(lambda parts: "/" + "/".join(parts)), _QUERIES, _HEADERS, _BODIES
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@_REQUESTS
def test_no_request_makes_the_service_fail(
    closed: str, method: str, path: str, query: str, headers: list[tuple[str, str]], body: bytes
) -> None:
    _fuzz(closed, method, path + query, headers, body)


@pytest.mark.soak
@settings(max_examples=5_000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@_REQUESTS
def test_no_request_of_many_makes_the_service_fail(
    closed: str, method: str, path: str, query: str, headers: list[tuple[str, str]], body: bytes
) -> None:
    _fuzz(closed, method, path + query, headers, body)
