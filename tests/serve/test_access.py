"""Who may do what: every route of the OpenAPI document without a token, with a wrong one, the reading and the writing one; what
a service makes of its places; its page; and all of that below a path of a proxy."""

import json
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import numpy as np
import openapi_spec_validator
import pytest
import urllib3
import zarr

import zstore
from tests.checkpoint.checkpoints import save_arrays
from tests.serve.conftest import BEARER, TOKEN, Serve, serving_of
from tests.serve.proxy import reverse_proxy
from tests.serve.test_browser import needs_chromium, open_browser, watch
from zstore.errors import UsageError
from zstore.remote.upload import upload_checkpoint
from zstore.serve.app import ASSETS, make_app
from zstore.serve.runs import Root, Settings
from zstore.tools.serve import serve_command

READ, WRITE = "reading-token-of-the-tests", "writing-token-of-the-tests"
TAG = "step-00000001"
DOCUMENT: dict[str, Any] = make_app(Settings(roots=(Root.parse("."),))).openapi()
ROUTES = [(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods]
OPEN = {"/healthz", "/api"}
IN_PATHS = {"run": "one", "checkpoint": TAG, "path": f"{TAG}/zarr.json"}
IN_PATHS |= {"upload": "0" * 32, "run_id": "abc", "file": "config.json"}


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
    with serving_of(runs, token=WRITE, read_token=READ) as base:
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


ARRAYS = {"model/a": np.arange(8.0)}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    save_arrays(tmp_path / "runs" / "one", ARRAYS)
    shutil.copytree(tmp_path / "runs/one", tmp_path / "outside/secret")
    return tmp_path / "runs"


def test_links_that_lead_out_are_no_runs(runs: Path, serve: Serve, http: urllib3.PoolManager) -> None:
    (runs / "out").symlink_to(runs.parent / "outside/secret")
    (runs / "newest").symlink_to("one")
    (runs / "empty").symlink_to(runs.parent / "outside")
    base = serve(runs, token=TOKEN)
    listed = http.request("GET", f"{base}/api/runs", headers=BEARER).json()["runs"]
    assert [run["name"] for run in listed] == ["newest", "one"]
    for path in ("zarr/out/", "zarr/out/latest/zarr.json", "weights/out/latest/", "api/runs/out/checkpoints"):
        assert http.request("GET", f"{base}/{path}", headers=BEARER).status == 404, path
    for name in ("out", "empty"):
        answer = http.request("GET", f"{base}/api/uploads?run={name}", headers=BEARER)
        assert (answer.status, "a link in the folder of runs" in answer.json()["error"]) == (400, True)


def test_a_checkpoint_that_a_link_replaces_is_not_followed(runs: Path, serve: Serve, http: urllib3.PoolManager) -> None:
    (runs / "one/alias").symlink_to("step-00000001")
    base = serve(runs)
    for name in ("alias", "step-00000001"):
        assert http.request("GET", f"{base}/zarr/one/{name}/zarr.json").status == 200
    (runs / "one/out").symlink_to(runs.parent / "outside/secret/step-00000001")
    (runs / "one/step-00000001/secret.json").symlink_to(runs.parent / "outside/secret/step-00000001/zarr.json")
    for path in ("out/zarr.json", "out/", "step-00000001/secret.json"):
        assert http.request("GET", f"{base}/zarr/one/{path}").status == 404, path
    shutil.rmtree(runs / "one/step-00000001")
    (runs / "one/step-00000001").symlink_to(runs.parent / "outside/secret/step-00000001")
    for name in ("alias", "step-00000001", "latest"):
        assert http.request("GET", f"{base}/zarr/one/{name}/zarr.json").status == 404, name


def test_https_to_a_service_without_a_certificate_says_so(runs: Path, serve: Serve) -> None:
    url = serve(runs).replace("http://", "https://")
    with pytest.raises(UsageError, match=r"does not speak TLS.*write http://"):
        zstore.open_checkpoint(f"{url}/one")


def test_a_missing_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="cannot listen"):
        serve_command([str(tmp_path), f"{tmp_path}/rusn"], port=taken.getsockname()[1])
    warning = f"warning: folder {tmp_path}/rusn does not exist; runs created in it later will be served\n"
    assert capsys.readouterr().err == warning


_FILES = sorted(path.relative_to(ASSETS).as_posix() for path in ASSETS.rglob("*") if path.is_file())
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_IMPORT = re.compile(r"""(?:from|^import)\s+["']([^"']+)["']""", re.MULTILINE)
_FORBIDDEN = re.compile(
    r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function"
    r"|setTimeout\([\"'`]|javascript:|@import|\burl\(|import\("
)
_COMMENT = re.compile(r"^\s*(?://|/?\*).*$", re.MULTILINE)


@pytest.fixture
def base_page(tmp_path: Path, serve: Serve) -> str:
    save_arrays(tmp_path / "runs" / "one two", {"model/a": np.arange(8.0)})
    return serve(tmp_path / "runs")


def test_the_page_is_at_the_root(base_page: str, http: urllib3.PoolManager) -> None:
    shell = (ASSETS / "index.html").read_bytes()
    answer = http.request("GET", base_page)
    assert (answer.status, answer.data, answer.headers["content-type"]) == (200, shell, _TYPES[".html"])


def test_every_file_is_served_with_its_type_and_cached_by_its_tag(base_page: str, http: urllib3.PoolManager) -> None:
    for name in _FILES:
        answer = http.request("GET", f"{base_page}/assets/{name}")
        assert (answer.status, answer.data) == (200, (ASSETS / name).read_bytes()), name
        assert answer.headers["content-type"] == _TYPES[Path(name).suffix]
        assert answer.headers["cache-control"] == "no-cache"
        etag = answer.headers["etag"]
        for known in (etag, f'"other", W/{etag}'):
            again = http.request("GET", f"{base_page}/assets/{name}", headers={"If-None-Match": known})
            assert (again.status, again.data, again.headers["etag"]) == (304, b"", etag), (name, known)
        assert http.request("HEAD", f"{base_page}/assets/{name}").headers["content-length"] == str(len(answer.data))


def test_what_is_no_file_of_the_page_is_not_found(base_page: str, http: urllib3.PoolManager) -> None:
    for name in ("none.js", "../page.py", "%2e%2e/page.py", "vendor", "", "/etc/passwd"):
        answer = http.request("GET", f"{base_page}/assets/{name}")
        assert answer.status == 404, name
        assert b"from __future__" not in answer.data


def test_the_address_of_a_run_leads_to_its_page(base_page: str, http: urllib3.PoolManager) -> None:
    answer = http.request("GET", f"{base_page}/one%20two", redirect=False)
    assert (answer.status, answer.headers["location"]) == (307, "./#/run/one%20two")
    missing = http.request("GET", f"{base_page}/none", redirect=False)
    assert missing.status == 404
    assert "one two" in missing.json()["error"]


@pytest.mark.parametrize("name", [name for name in _FILES if name.endswith(".js")])
def test_modules_import_files_that_are_there_and_build_nothing_from_text(name: str) -> None:
    text = (ASSETS / name).read_text(encoding="utf-8")
    for source in _IMPORT.findall(text):
        assert source.startswith("."), f"{name} imports {source}"
        assert (ASSETS / name).parent.joinpath(source).resolve().relative_to(ASSETS).as_posix() in _FILES, source
    assert _FORBIDDEN.findall(_COMMENT.sub("", text)) == []
    assert name.startswith("vendor/") or len(text.splitlines()) <= 500


def test_html_and_styles_load_only_files_of_the_page() -> None:
    for name in (name for name in _FILES if not name.endswith(".js")):
        assert _FORBIDDEN.findall((ASSETS / name).read_text(encoding="utf-8")) == [], name
    html = (ASSETS / "index.html").read_text(encoding="utf-8")
    loaded = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert {path for path in loaded if not path.startswith(("assets/", "#"))} == set()
    assert {path.removeprefix("assets/") for path in loaded if path.startswith("assets/")} <= set(_FILES)
    assert re.findall(r"<script(?![^>]* src=)|\sstyle=|\son\w+=|<style", html) == []  # a strict policy forbids them


ABOVE = "/tools/store"


@pytest.fixture
def below(tmp_path: Path, serve: Serve) -> Iterator[str]:
    save_arrays(tmp_path / "runs/one", {"model/a": np.arange(1000.0)})
    base = serve(tmp_path / "runs", token=TOKEN)
    with reverse_proxy(base, above=ABOVE) as url:
        yield url


def test_the_page_finds_all_that_it_loads(below: str, http: urllib3.PoolManager) -> None:
    shell = http.request("GET", f"{below}/", headers=BEARER).data.decode()
    loaded = re.findall(r'(?:src|href)="([^"#]+)"', shell)
    assert len(loaded) > 3
    for name in loaded:
        assert http.request("GET", urljoin(f"{below}/", name), headers=BEARER).status == 200, name
    answer = http.request("GET", f"{below}/one", headers=BEARER, redirect=False)
    assert urljoin(f"{below}/one", answer.headers["location"]).partition("#")[0] == f"{below}/"


def test_zarr_reads_what_is_there(below: str) -> None:
    options = {"client_kwargs": {"headers": BEARER}}
    group = zarr.open_group(f"{below}/zarr/one/latest", mode="r", storage_options=options)
    np.testing.assert_array_equal(group["model/a"][:], np.arange(1000.0))


def test_our_client_reads_and_uploads(below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZSTORE_TOKEN", TOKEN)
    with zstore.open_checkpoint(f"{below}/one") as checkpoint:
        np.testing.assert_array_equal(checkpoint["model/a"][:], np.arange(1000.0))
    with zstore.open_checkpoint(f"{below}/one/step-00000001/") as checkpoint:
        assert checkpoint.step == 1
    save_arrays(tmp_path / "other", {"model/b": np.ones(3000)}, step=7)
    upload_checkpoint(tmp_path / "other/step-00000007", f"{below}/two")
    shutil.rmtree(tmp_path / "other")
    with zstore.open_checkpoint(tmp_path / "runs/two") as checkpoint:
        np.testing.assert_array_equal(checkpoint["model/b"][:], np.ones(3000))


@needs_chromium
def test_a_browser_shows_it(below: str) -> None:
    with open_browser() as browser:
        context = browser.new_context(http_credentials={"username": "me", "password": TOKEN})
        page = watch(context, below.removesuffix(ABOVE)).page
        page.goto(f"{below}/#/run/one/checkpoints")
        page.wait_for_selector("[data-test=checkpoint-link]")
        page.locator("[data-test=checkpoint-link]").first.click()
        page.wait_for_selector("[data-test=array]")
        page.reload()
        page.wait_for_selector("[data-test=array]")
        assert page.url.startswith(f"{below}/#/run/one/checkpoint/")
