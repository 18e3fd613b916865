"""Who may do what: every route of the OpenAPI document without a token, with a wrong one, the reading and the writing one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openapi_spec_validator
import pytest

from tests.checkpoint.checkpoints import save_arrays
from tests.serve.conftest import Serve
from zstore.errors import UsageError
from zstore.serve.app import make_app
from zstore.serve.server import serving
from zstore.serve.settings import Root, Settings

READ, WRITE = "reading-token-of-the-tests", "writing-token-of-the-tests"
TAG = "step-00000001"
DOCUMENT: dict[str, Any] = make_app(Settings(roots=(Root.parse("."),))).openapi()
ROUTES = [(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods]
OPEN = {"/healthz", "/api"}
IN_PATHS = {
    "run": "one",
    "checkpoint": TAG,
    "path": f"{TAG}/zarr.json",
    "upload": "0" * 32,
    "run_id": "abc",
    "file": "config.json",
}


def url_of(path: str) -> str:
    if path.startswith("/weights"):
        path = path.replace("{path}", f"{TAG}/model.safetensors")
    return re.sub(r"\{(\w+)\}", lambda match: IN_PATHS[match[1]], path)


def writes(method: str, path: str) -> bool:
    return path.startswith("/api/uploads") or "/journals/" in path or method == "PUT"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    runs = tmp_path_factory.mktemp("runs")
    save_arrays(runs / "one", {"model/a": np.arange(8.0)}, run_id="abc")
    with serving(Settings(roots=(Root.parse(str(runs)),), port=0, token=WRITE, read_token=READ)) as base:
        yield base


def ask(base: str, method: str, path: str, token: str | None = None, **options: Any) -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with httpx.Client() as client:
        return client.request(method, base + path, headers=headers | options.pop("headers", {}), **options)


def test_the_document_is_one_of_openapi_and_has_its_page(base: str) -> None:
    openapi_spec_validator.validate(DOCUMENT)
    assert len(ROUTES) > 20
    assert json.loads(ask(base, "GET", "/api/openapi.json").text)["paths"].keys() == DOCUMENT["paths"].keys()
    assert "openapi.json" in ask(base, "GET", "/api/docs").text


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_asks_for_its_token(base: str, method: str, path: str) -> None:
    url = url_of(path)
    statuses = {token: ask(base, method, url, token) for token in (None, "wrong-token-of-the-tests", READ, WRITE)}
    none, wrong, read, write = (answer.status_code for answer in statuses.values())
    if path in OPEN:
        assert {none, wrong, read, write} == {200}
        return
    expected = "Bearer" if writes(method, path) else "Basic"
    assert (none, wrong) == (401, 401)
    assert statuses[None].headers["www-authenticate"].startswith(expected)
    assert "token" in statuses[None].json()["error"]
    assert "one" not in statuses[None].text.replace("one that", "")
    if writes(method, path):
        assert (read, write in (200, 204, 400, 404)) == (403, True), write
    else:
        assert (read, write) == (200 if "{run}" not in path or path != "/zarr/{run}" else 307,) * 2


def test_a_service_without_the_writing_token_takes_nothing(tmp_path: Path, serve: Serve) -> None:
    for tokens in ({}, {"read_token": READ}):
        base = serve(tmp_path, **tokens)
        assert ask(base, "GET", "/api").json()["takes_uploads"] is False
        for token in (None, READ, WRITE):
            answer = ask(base, "POST", "/api/uploads", token, json={})
            assert (answer.status_code, "ZSTORE_TOKEN" in answer.json()["error"]) == (403, True)


def test_a_browser_shows_the_token_as_a_password_to_read_and_never_to_write(base: str) -> None:
    for token in (READ, WRITE):
        for path in ("/", "/api/runs", f"/zarr/one/{TAG}/zarr.json"):
            assert httpx.get(base + path, auth=("anybody", token)).status_code == 200, path
        assert httpx.post(f"{base}/api/uploads", auth=("anybody", token), json={}).status_code == 401
    refused = httpx.get(base, auth=("anybody", "wrong"))
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, 'Basic realm="zstore"')
    assert httpx.get(f"{base}/assets/main.js").status_code == 200


def test_without_a_token_only_this_machine_is_answered(tmp_path: Path, serve: Serve) -> None:
    base = serve(tmp_path)
    assert ask(base, "GET", "/api/runs").status_code == 200
    for host, status in (("evil.example", 421), ("127.0.0.1.evil.example", 421), ("[", 421), ("localhost:1", 200)):
        assert ask(base, "GET", "/api/runs", headers={"Host": host}).status_code == status, host
    for host in ("0.0.0.0", "192.0.2.1", "::"):
        with pytest.raises(UsageError, match="set a token"):
            Settings(roots=(Root.parse("."),), host=host)
        Settings(roots=(Root.parse("."),), host=host, read_token=READ)
    for token in ("short", "with a blank in its middle", "ä" * 20):
        with pytest.raises(UsageError, match="openssl rand"):
            Settings(roots=(Root.parse("."),), token=token)
