"""The commands and the Python face on arrays that other software stored: no record, no checksums, no Zarr."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

import zstore
from tests.checkpoint.checkpoints import describe, save_arrays
from zstore.checkpoint.format import Record
from zstore.checkpoint.source import ArraySource, StoredArray
from zstore.errors import CheckpointMismatchError, UsageError
from zstore.format.partition import make_grid
from zstore.io.queue import Priority
from zstore.io.shards import IoResources
from zstore.tools import opening
from zstore.tools.consolidate import consolidate_command
from zstore.tools.diff import diff_command
from zstore.tools.inspect import inspect_command
from zstore.tools.opening import Common
from zstore.tools.reshard import reshard_command
from zstore.tools.verify import verify_command

Array = npt.NDArray[Any]

ARRAYS = {
    "model/w": np.arange(3000, dtype=np.float32).reshape(100, 30),
    "model/frozen": np.ones(5, np.float16),
    "optimizer/exp_avg/w": np.ones((100, 30), np.float32),
}


class Others(ArraySource):
    """Arrays in memory, as a reader of another format gives them."""

    kind = "Somebody's, stage 2"

    def __init__(self, location: str, resources: IoResources | None) -> None:
        record = Record(
            id="",
            tag="global_step7",
            step=7,
            world_size=2,
            training_world_size=2,
            run="",
            metadata_sha256="",
            manifest_sha256=(),
            state={},
        )
        super().__init__(location, "global_step7", record, resources)
        self.arrays = {
            name: StoredArray(spec=spec, grid=make_grid(spec.stored_shape, 1), folder=name)
            for name, spec in describe(ARRAYS).items()
        }
        self._done = 0

    @property
    def read_bytes(self) -> int:
        return self._done

    def read(self, name: str, first: int, stop: int, out: Array, priority: Priority = Priority.READ) -> None:
        values = ARRAYS[name].reshape(-1)[first:stop]
        out.reshape(-1).view(np.uint8)[:] = values.view(np.uint8)
        self._done += values.nbytes

    def rank_state(self, rank: int) -> Mapping[str, Any]:
        return {}


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder that opens as `Others`; all other places open as ever."""
    from zstore.open import checkpoint as opened
    from zstore.open import sources

    folder = tmp_path / "others"
    folder.mkdir()
    ours = sources.open_source

    def open_source(location: Any, tag: Any = None, *, resources: Any = None, **options: Any) -> ArraySource:
        if str(location) == str(folder):
            return Others(str(folder), resources)
        return ours(location, tag, resources=resources, **options)

    for module in (sources, opened, opening):
        monkeypatch.setattr(module, "open_source", open_source)
    return folder


def test_inspect_names_its_kind_and_arrays(others: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_command(others, Common(json=True)) == 0
    told = json.loads(capsys.readouterr().out)
    checkpoint = told["checkpoint"]
    assert (checkpoint["kind"], checkpoint["step"], checkpoint["num_arrays"]) == ("Somebody's, stage 2", 7, 3)
    assert {checkpoint[key] for key in ("num_files", "num_shard_files", "file_bytes", "committed")} == {None}
    (w,) = [entry for entry in told["arrays"] if entry["name"] == "model/w"]
    assert w["shape"] == [100, 30]
    assert inspect_command(others) == 0
    assert "Somebody's, stage 2, step 7" in capsys.readouterr().out


def test_verify_says_what_is_missing(others: Path) -> None:
    with pytest.raises(UsageError, match="Somebody's, stage 2, which has no checksums"):
        verify_command(others)
    with zstore.open_checkpoint(others) as ckpt, pytest.raises(CheckpointMismatchError, match="has no checksums"):
        ckpt.verify()


def test_its_weights_and_arrays_are_read_alike(others: Path, tmp_path: Path) -> None:
    consolidate_command(others, tmp_path / "out", "fp32", 10**9, exclude_frozen=True)
    found = load_file(tmp_path / "out/model.safetensors")
    assert list(found) == ["w"]
    assert np.array_equal(found["w"], ARRAYS["model/w"])
    with zstore.open_checkpoint(others) as ckpt:
        assert np.array_equal(ckpt["model/w"][::-7, 3], ARRAYS["model/w"][::-7, 3])
        assert ckpt.consolidated("fp32")["frozen"].sum() == 5
        with pytest.raises(CheckpointMismatchError, match="is not Zarr"):
            ckpt.zarr()


def test_it_is_compared_by_values(others: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reshard_command(others, tmp_path / "ours", 3) == 0
    capsys.readouterr()
    assert diff_command(others, tmp_path / "ours") == 0
    save_arrays(tmp_path / "changed", ARRAYS | {"model/frozen": np.zeros(5, np.float16)})
    assert diff_command(others, tmp_path / "changed") == 1
    assert "model/frozen" in capsys.readouterr().out
