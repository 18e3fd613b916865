"""The service behind a proxy that serves it below a path: page, Zarr readers, and our own client."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import numpy as np
import pytest
import urllib3
import zarr

import zstore
from tests.checkpoint.checkpoints import save_arrays
from tests.serve.browser import needs_chromium, open_browser, watch
from tests.serve.conftest import Serve
from tests.serve.proxy import reverse_proxy
from zstore.remote.upload import upload_checkpoint

ABOVE = "/tools/store"
TOKEN = "0123456789abcdef"


@pytest.fixture
def below(tmp_path: Path, serve: Serve) -> Iterator[str]:
    """The URL of a service of one run, below a path."""
    save_arrays(tmp_path / "runs/one", {"model/a": np.arange(1000.0)})
    base = serve(tmp_path / "runs", token=TOKEN)
    with reverse_proxy(base, above=ABOVE) as url:
        yield url


def test_the_page_finds_all_that_it_loads(below: str, http: urllib3.PoolManager) -> None:
    shown = {"Authorization": f"Bearer {TOKEN}"}
    shell = http.request("GET", f"{below}/", headers=shown).data.decode()
    loaded = re.findall(r'(?:src|href)="([^"#]+)"', shell)
    assert len(loaded) > 3
    for name in loaded:
        assert http.request("GET", urljoin(f"{below}/", name), headers=shown).status == 200, name
    answer = http.request("GET", f"{below}/one", headers=shown, redirect=False)
    assert urljoin(f"{below}/one", answer.headers["location"]).partition("#")[0] == f"{below}/"


def test_zarr_reads_what_is_there(below: str) -> None:
    options = {"client_kwargs": {"headers": {"Authorization": f"Bearer {TOKEN}"}}}
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
