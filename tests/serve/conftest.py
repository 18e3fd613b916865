"""A service that runs in a thread, over folders of small checkpoints."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3

from zstore.serve.server import serving
from zstore.serve.settings import Root, Settings

Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(folder, ..., token="...")` returns the base URL of a service over these folders."""
    with contextlib.ExitStack() as running:

        def start(*places: Path | str, **settings: Any) -> str:
            roots = tuple(Root.parse(str(place)) for place in places)
            return running.enter_context(serving(Settings(roots=roots, port=0, **settings)))

        yield start


@pytest.fixture
def http() -> Iterator[urllib3.PoolManager]:
    """A client without retries."""
    with urllib3.PoolManager(retries=False, timeout=200) as pool:
        yield pool
