"""A folder of many checkpoints: what a save into it reads of them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.checkpoints import open_world, save_arrays
from zstore.checkpoint.catalog import resolve
from zstore.checkpoint.format import Record
from zstore.checkpoint.names import RECORD_FILE, new_save_id

ARRAYS = {"model/w": np.arange(600, dtype=np.float32).reshape(20, 30)}
_opened: list[str] = []
"""Files that were opened, as the interpreter tells it."""


def _note(event: str, given: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(given[0], str | os.PathLike):
        _opened.append(os.fspath(given[0]))


@pytest.fixture(scope="module", autouse=True)
def _noting() -> None:
    sys.addaudithook(_note)


def records_opened(work: Callable[[], Any]) -> int:
    _opened.clear()
    work()
    return sum(os.path.basename(path) == RECORD_FILE for path in _opened)


def copied(source: Path, tag: str) -> Path:
    """Another checkpoint beside `source`."""
    target = source.with_name(tag)
    shutil.copytree(source, target)
    path = target / RECORD_FILE
    record = Record.decode(path.read_bytes(), str(path))
    path.chmod(0o644)
    own = replace(record, tag=tag, id=new_save_id())
    path.write_bytes(own.encode())
    return target


def test_a_save_reads_no_more_records_where_there_are_more_checkpoints(tmp_path: Path) -> None:
    first = save_arrays(tmp_path, ARRAYS)
    opened = []
    with open_world(ARRAYS) as world:
        for count in (10, 40):
            for number in range(count):
                copied(first, f"copy-{count}-{number}")
            world.save(tmp_path, step=count)
            opened.append(records_opened(lambda count=count: world.save(tmp_path, step=count + 1)))
    assert opened[0] == opened[1] <= 4
    assert resolve(tmp_path).record.step == 41
