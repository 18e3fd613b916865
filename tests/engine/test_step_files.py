"""How many files of the project one `engine.step()` passes: whoever follows a step reads that many at most."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import zstore

ROOT = Path(__file__).resolve().parents[2]


class _Passed:
    """The project's files in which a function was called while `noting`, by any thread that started in `watching`."""

    def __init__(self) -> None:
        self.noting = False
        self.names: set[str] = set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if self.noting and event == "call":
            self.names.add(frame.f_code.co_filename)

    def files(self) -> list[str]:
        found = {Path(name).resolve() for name in self.names}
        return sorted(str(path.relative_to(ROOT)) for path in found if path.is_relative_to(ROOT) and path.is_file())


@contextmanager
def watching() -> Iterator[_Passed]:
    passed = _Passed()
    threading.setprofile(passed)
    sys.setprofile(passed)
    try:
        yield passed
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _passed_in_a_step(zero: dict[str, Any]) -> list[str]:
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        # What is said of a step is no part of it.
        "steps_per_print": 0,
        "zstore": {"journal": False},
    }
    with watching() as passed, zstore.initialize(model=model, config=config)[0] as engine:
        for step in range(3):
            engine.backward(engine(torch.ones(2, 256, dtype=torch.bfloat16)).float().mean())
            passed.noting = step == 2
            engine.step()
            passed.noting = False
    own = [name for name in passed.files() if not name.startswith(("tests/", ".venv/"))]
    assert {"engine/training/training.py", "zstore/io/files.py"} <= set(own)  # this thread's, and the I/O threads'
    return own


@pytest.mark.parametrize(("stage", "most"), [(1, 26), (2, 26), (3, 28)])  # at stage 3 parameters are on disk too
def test_a_step_with_state_on_disk_passes_few_files(stage: int, most: int, tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    own = {"offload_param": nvme} if stage == 3 else {}
    files = _passed_in_a_step({"stage": stage, "offload_optimizer": nvme} | own)
    assert len(files) <= most, "\n".join(files)
