"""A service that runs in a thread, over folders of small checkpoints."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3

from zstore.serve.app import serving
from zstore.serve.runs import Root, Settings

Serve = Callable[..., str]
TOKEN = "secret-of-the-tests"
OPTIONS = {"token": TOKEN}
BEARER = {"Authorization": f"Bearer {TOKEN}"}
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


def serving_of(*places: Path | str, **settings: Any) -> contextlib.AbstractContextManager[str]:
    """A service over these folders for the length of a `with` block, which gets its base URL."""
    return serving(Settings(roots=tuple(Root.parse(str(place)) for place in places), port=0, **settings))


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(folder, ..., token="...")` returns the base URL of a service over these folders."""
    with contextlib.ExitStack() as running:
        yield lambda *places, **settings: running.enter_context(serving_of(*places, **settings))


@pytest.fixture
def url(tmp_path: Path, serve: Serve) -> str:
    """A service over the empty folder `runs`, which takes what has the token."""
    (tmp_path / "runs").mkdir()
    return serve(tmp_path / "runs", token=TOKEN)


@pytest.fixture
def http() -> Iterator[urllib3.PoolManager]:
    with urllib3.PoolManager(retries=False, timeout=200) as pool:
        yield pool
