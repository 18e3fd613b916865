"""`zstore diff`: which arrays differ, by checksums and by bytes, whatever the layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from tests.checkpoint.checkpoints import save_arrays
from zstore.tools.diff import diff_command
from zstore.tools.opening import Common

Array = npt.NDArray[Any]

STATUS = {
    "buffer/mask": "dtype",
    "model/b": "removed",
    "model/long.rows": "values",
    "model/new": "added",
    "model/none": "shape",
    "model/w": "values",
}


def make_arrays() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {
        "model/w": rng.standard_normal((3000, 300)).astype(np.float32),
        "model/b": rng.standard_normal(77).astype(ml_dtypes.bfloat16),
        "model/long.rows": rng.standard_normal((3, 900_000)).astype(np.float32),
        "model/none": np.zeros((0, 5), np.float32),
        "model/nan": np.full(9, np.nan, np.float32),
        "buffer/mask": rng.random((5, 5)) < 0.5,
    }


@pytest.fixture(scope="module")
def arrays() -> dict[str, Array]:
    return make_arrays()


@pytest.fixture(scope="module")
def changed(arrays: dict[str, Array]) -> dict[str, Array]:
    other = {name: array.copy() for name, array in arrays.items() if name != "model/b"}
    other["model/w"][1000, 7] += 0.5
    other["model/w"][1000, 8] = np.inf
    other["model/long.rows"][2, 800_000:800_003] -= 0.25
    other["buffer/mask"] = other["buffer/mask"].astype(np.uint8)
    other["model/none"] = np.zeros((0, 6), np.float32)
    other["model/new"] = np.ones(3, np.float32)
    return other


@pytest.fixture(scope="module")
def folders(
    arrays: dict[str, Array], changed: dict[str, Array], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("runs")
    return {
        "old": save_arrays(base / "old", arrays, world_size=2),
        "same": save_arrays(base / "same", arrays, world_size=2),
        "three": save_arrays(base / "three", arrays, world_size=3),
        "new": save_arrays(base / "new", changed, world_size=2),
        "new3": save_arrays(base / "new3", changed, world_size=3),
    }


def compare(before: Path, after: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = diff_command(before, after, common=Common(json=True))
    told = json.loads(capsys.readouterr().out)
    return code, told | {"arrays": {entry.pop("name"): entry for entry in told["arrays"]}}


@pytest.mark.parametrize("other", ["same", "three"])
def test_the_same_arrays_do_not_differ_in_any_layout(
    folders: dict[str, Path], other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = compare(folders["old"], folders[other], capsys)
    assert (code, told["differ"], told["arrays"], told["num_same"]) == (0, False, {}, 6)
    # If both are cut alike, nothing is read.
    assert (told["bytes"] == 0) == (other == "same")


@pytest.mark.parametrize("other", ["new", "new3"])
def test_each_array_that_differs_is_named(
    folders: dict[str, Path], other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = compare(folders["old"], folders[other], capsys)
    assert code == 1
    assert {name: entry["status"] for name, entry in told["arrays"].items()} == STATUS
    assert told["num_same"] == 1  # model/nan: NaN is what it was
    assert told["arrays"]["model/none"]["before"] == "float32 [0, 5]"
    assert (told["bytes"] == 0) == (other == "new")


def test_the_table_is_on_stdout_and_empty_if_nothing_differs(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff_command(folders["old"], folders["same"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "0 of 6 arrays differ" in printed.err
    assert diff_command(folders["old"], folders["new"]) == 1
    printed = capsys.readouterr()
    assert " model/w " in printed.out
    assert "only in the first: bfloat16 [77]" in printed.out
    assert "uint8 [5, 5]" in printed.out
    assert "6 of 7 arrays differ" in printed.err
    assert "GB/s" in printed.err
