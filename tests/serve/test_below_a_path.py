"""The service behind a proxy that serves it below a path: page, Zarr readers, and our own client."""

from __future__ import annotations

import contextlib
import http.client
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import numpy as np
import pytest
import urllib3
import zarr

import zstore
from tests.checkpoint.checkpoints import save_arrays
from tests.serve.browser import needs_chromium, new_context, open_browser, watch
from tests.serve.conftest import Serve
from zstore.remote.upload import upload_checkpoint

ABOVE = "/tools/store"
TOKEN = "0123456789abcdef"


class _StripsThePath(BaseHTTPRequestHandler):
    """What `location /tools/store/ { proxy_pass http://host:port/; }` of nginx does; anything else is 404 without our JSON."""

    target: tuple[str, int]
    protocol_version = "HTTP/1.1"

    def forward(self) -> None:
        if not self.path.startswith(f"{ABOVE}/"):
            self.send_error(404)
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        with contextlib.closing(http.client.HTTPConnection(*self.target, timeout=100)) as connection:
            connection.request(self.command, self.path.removeprefix(ABOVE), body=body, headers=headers)
            answer = connection.getresponse()
            data = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server", "content-length"):
                self.send_header(name, value)
        self.send_header(
            "Content-Length", answer.headers["Content-Length"] if self.command == "HEAD" else str(len(data))
        )
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(b"" if self.command == "HEAD" else data)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = forward

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def below(tmp_path: Path, serve: Serve) -> Iterator[str]:
    """The URL of a service of one run, below a path."""
    save_arrays(tmp_path / "runs/one", {"model/a": np.arange(1000.0)})
    base = urlsplit(serve(tmp_path / "runs", token=TOKEN, allow_actions=True))
    handler = type("Handler", (_StripsThePath,), {"target": (base.hostname, base.port)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{proxy.server_port}{ABOVE}"
        proxy.shutdown()
        thread.join()


def test_the_page_finds_all_that_it_loads(below: str, http: urllib3.PoolManager) -> None:
    shell = http.request("GET", f"{below}/").data.decode()
    loaded = re.findall(r'(?:src|href)="([^"#]+)"', shell)
    assert len(loaded) > 3
    for name in loaded:
        assert http.request("GET", urljoin(f"{below}/", name)).status == 200, name
    for path in ("run/one/checkpoints", "one"):
        answer = http.request("GET", f"{below}/{path}", headers={"Authorization": f"Bearer {TOKEN}"}, redirect=False)
        assert urljoin(f"{below}/{path}", answer.headers["location"]).partition("#")[0] == f"{below}/", path


def test_zarr_reads_what_is_there(below: str) -> None:
    options = {"client_kwargs": {"headers": {"Authorization": f"Bearer {TOKEN}"}}}
    group = zarr.open_group(f"{below}/zarr/one/latest", mode="r", storage_options=options)
    np.testing.assert_array_equal(group["model/a"][:], np.arange(1000.0))


def test_our_client_reads_and_uploads(below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZSTORE_TOKEN", TOKEN)
    with zstore.open_checkpoint(f"{below}/one") as checkpoint:
        np.testing.assert_array_equal(checkpoint["model/a"][:], np.arange(1000.0))
    with zstore.open_checkpoint(f"{below}/zarr/one/step-00000001") as checkpoint:
        assert checkpoint.step == 1
    save_arrays(tmp_path / "other", {"model/b": np.ones(3000)}, step=7)
    upload_checkpoint(tmp_path / "other/step-00000007", f"{below}/two")
    shutil.rmtree(tmp_path / "other")
    with zstore.open_checkpoint(tmp_path / "runs/two") as checkpoint:
        np.testing.assert_array_equal(checkpoint["model/b"][:], np.ones(3000))


@needs_chromium
def test_a_browser_shows_it(below: str) -> None:
    with open_browser() as browser:
        watched = watch(new_context(browser), below.removesuffix(ABOVE))
        page = watched.page
        page.goto(f"{below}/run/one/checkpoints")
        page.fill("[data-test=token]", TOKEN)
        page.click("[data-test=sign-in]")
        page.wait_for_selector("[data-test=checkpoint-link]")
        page.locator("[data-test=checkpoint-link]").first.click()
        page.wait_for_selector("[data-test=tree-array], [data-test=tree-group]")
        page.reload()
        page.wait_for_selector("[data-test=tree-array], [data-test=tree-group]")
        assert page.url.startswith(f"{below}/#/run/one/checkpoint/")
