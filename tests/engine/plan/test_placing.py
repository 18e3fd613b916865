"""Room on drives: each has to hold the files that the store gives it, whatever the others have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zstore
from tests.engine.plan.budgets import make_config
from zstore.engine import Engine
from zstore.engine.plan import run as placing
from zstore.errors import DiskFullError
from zstore.tools.sample.models import build_model

Drives = Callable[[dict[Path, int]], None]


@pytest.fixture
def two_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Drives]:
    """Two folders that look like two drives to whoever asks; and what sets the bytes free on each."""
    folders = (tmp_path / "one", tmp_path / "two")
    free: dict[Path, int] = {}

    def folder_of(path: Path) -> Path:
        return next(folder for folder in folders if path.is_relative_to(folder))

    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(placing, "_drive_of", lambda path: folders.index(folder_of(path)))
    monkeypatch.setattr(
        "zstore.engine.plan.run.shutil.disk_usage",
        lambda path: SimpleNamespace(free=free.get(folder_of(path), 1 << 40)),
    )
    return (*folders, free.update)


def started(config: dict[str, Any]) -> Engine:
    torch.manual_seed(0)
    return zstore.initialize(model=build_model("gpt-tiny", 16), config=config)[0]


def sizes(*folders: Path) -> Counter[Path]:
    return Counter({folder: sum(file.stat().st_size for file in folder.rglob("*.shard")) for folder in folders})


@pytest.mark.parametrize("parameters", ["spread", "apart"])
def test_each_drive_has_to_have_room_for_its_share(parameters: str, two_drives: tuple[Path, Path, Drives]) -> None:
    one, two, set_free = two_drives
    spread = {"device": "nvme", "nvme_path": [str(one), str(two)]}
    apart = {"device": "nvme", "nvme_path": str(two)}
    optimizer, own = (spread, spread) if parameters == "spread" else ({**apart, "nvme_path": str(one)}, apart)
    config = make_config(
        "", zero={"offload_optimizer": optimizer, "offload_param": own}, zstore={"host_budget_bytes": 6 << 20}
    )
    with started(config) as engine:
        needed = sizes(one, two)
        assert sum(nbytes for _, nbytes in engine.training_state.plan.files) == needed.total()
    assert min(needed.values()) > 0
    set_free(dict(needed))
    started(config).close()
    for small in (one, two):
        set_free({**needed, small: needed[small] - 1})
        with pytest.raises(DiskFullError, match=f"in {small}, where"):
            started(config)
        set_free({one: 1 << 40, two: 1 << 40, small: needed[small] - 1})
        with pytest.raises(DiskFullError, match="equal share"):
            started(config)
