"""The page's files: what the service answers for its URLs, and what the files may hold."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import urllib3

from tests.checkpoint.checkpoints import save_arrays
from tests.serve.conftest import Serve
from zstore.serve.app import ASSETS

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
def base(tmp_path: Path, serve: Serve) -> str:
    save_arrays(tmp_path / "runs" / "one two", {"model/a": np.arange(8.0)})
    return serve(tmp_path / "runs")


def test_the_page_is_at_the_root(base: str, http: urllib3.PoolManager) -> None:
    shell = (ASSETS / "index.html").read_bytes()
    answer = http.request("GET", base)
    assert (answer.status, answer.data, answer.headers["content-type"]) == (200, shell, _TYPES[".html"])


def test_every_file_is_served_with_its_type_and_asked_for_anew_only_when_it_changed(
    base: str, http: urllib3.PoolManager
) -> None:
    for name in _FILES:
        answer = http.request("GET", f"{base}/assets/{name}")
        assert (answer.status, answer.data) == (200, (ASSETS / name).read_bytes()), name
        assert answer.headers["content-type"] == _TYPES[Path(name).suffix]
        assert answer.headers["cache-control"] == "no-cache"
        etag = answer.headers["etag"]
        for known in (etag, f'"other", W/{etag}'):
            again = http.request("GET", f"{base}/assets/{name}", headers={"If-None-Match": known})
            assert (again.status, again.data, again.headers["etag"]) == (304, b"", etag), (name, known)
        assert http.request("HEAD", f"{base}/assets/{name}").headers["content-length"] == str(len(answer.data))


def test_what_is_no_file_of_the_page_is_not_found(base: str, http: urllib3.PoolManager) -> None:
    for name in ("none.js", "../page.py", "%2e%2e/page.py", "vendor", "", "/etc/passwd"):
        answer = http.request("GET", f"{base}/assets/{name}")
        assert answer.status == 404, name
        assert b"from __future__" not in answer.data


def test_the_address_of_a_run_leads_to_its_page(base: str, http: urllib3.PoolManager) -> None:
    answer = http.request("GET", f"{base}/one%20two", redirect=False)
    assert (answer.status, answer.headers["location"]) == (307, "./#/run/one%20two")
    missing = http.request("GET", f"{base}/none", redirect=False)
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
