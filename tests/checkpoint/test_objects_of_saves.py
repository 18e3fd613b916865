"""How many objects a save makes: after so many, Python's collector walks over all that the program holds."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.checkpoints import open_world


@contextmanager
def collections_after(objects: int) -> Iterator[list[int]]:
    """Let the collector work when there are so many objects more; yield what gets a number for each time it does."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    before, was_enabled = gc.get_threshold(), gc.isenabled()
    gc.collect()
    gc.enable()
    gc.set_threshold(objects, *before[1:])
    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
        if not was_enabled:
            gc.disable()


@pytest.mark.parametrize(
    ("num_arrays", "num_objects"), [(1_000, 5_000), pytest.param(10_000, 50_000, marks=pytest.mark.soak)]
)
def test_a_save_makes_few_objects_an_array(tmp_path: Path, num_arrays: int, num_objects: int) -> None:
    arrays = {f"model/layer.{i // 8}.w{i % 8}": np.full(4, i, np.float32) for i in range(num_arrays)}
    with open_world(arrays) as world:
        world.fill()
        world.save(tmp_path, step=1)
        with collections_after(num_objects) as found:
            world.save(tmp_path, step=2)
    assert not found
