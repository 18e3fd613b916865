"""A plugin of pytest for DeepSpeed's tests: those that the file CHOSEN names run, with STANDS_IN=1 on zstore's stand-in.

`PYTHONPATH=tests/peers CHOSEN=FILE python -m pytest -p standing_in unit`, since theirs is a package of its own.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from zstore.tools.as_deepspeed.installing import put_in_place

if os.environ.get("STANDS_IN"):
    put_in_place()
# Their ranks are children of the forkserver: what it has imported they need not import, each for each test.
multiprocessing.set_forkserver_preload(["torch", "deepspeed"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the chosen tests."""
    chosen = set(Path(os.environ["CHOSEN"]).read_text().splitlines())
    items[:] = [item for item in items if item.nodeid in chosen]
