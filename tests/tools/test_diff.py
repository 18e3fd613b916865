"""`zstore diff`: which arrays differ, by checksums and by values, whatever the layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.checkpoint.checkpoints import save_arrays
from zstore.checkpoint.reader import open_checkpoint
from zstore.open.compare import difference_of, plan_comparison
from zstore.tools.diff import diff_command
from zstore.tools.opening import Common

Array = npt.NDArray[Any]


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


def compare(
    before: Path, after: Path, capsys: pytest.CaptureFixture[str], **options: Any
) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = diff_command(before, after, common=Common(json=True), **options)
    told = json.loads(capsys.readouterr().out)
    return code, told | {"arrays": {entry.pop("name"): entry for entry in told["arrays"]}}


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("other", ["same", "three"])
def test_the_same_arrays_do_not_differ_in_any_layout(
    folders: dict[str, Path], other: str, values: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = compare(folders["old"], folders[other], capsys, values=values)
    assert (code, told["differ"], told["arrays"], told["num_same"]) == (0, False, {}, 6)
    # Where both are cut alike, nothing is read.
    assert (told["bytes"] == 0) == (other == "same")


def test_checksums_name_what_differs_without_reading(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = compare(folders["old"], folders["new"], capsys)
    assert code == 1
    assert told["bytes"] == 0
    assert {name: entry["status"] for name, entry in told["arrays"].items()} == {
        "buffer/mask": "dtype",
        "model/b": "removed",
        "model/long.rows": "values",
        "model/new": "added",
        "model/none": "shape",
        "model/w": "values",
    }
    assert told["num_same"] == 1  # model/nan: NaN is what it was
    assert told["arrays"]["model/w"]["chunks_changed"] == 1
    assert "changed" not in told["arrays"]["model/w"]
    assert told["arrays"]["model/none"]["before"] == "float32 [0, 5]"


@pytest.mark.parametrize("new", ["new", "new3"])
def test_values_say_how_much(
    folders: dict[str, Path],
    arrays: dict[str, Array],
    changed: dict[str, Array],
    new: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, told = compare(folders["old"], folders[new], capsys, values=True)
    assert code == 1
    w = told["arrays"]["model/w"]
    gap = abs(float(changed["model/w"][1000, 7]) - float(arrays["model/w"][1000, 7]))
    assert (w["changed"], w["nonfinite"], w["numel"]) == (2, 1, 900_000)
    assert w["max_abs"] == gap
    assert w["rms"] == pytest.approx(gap / 900_000**0.5)
    long = told["arrays"]["model/long.rows"]
    gaps = (arrays["model/long.rows"].astype(np.float64) - changed["model/long.rows"]).reshape(-1)
    assert (long["changed"], long["max_abs"]) == (3, np.abs(gaps).max())
    assert long["rms"] == pytest.approx(np.sqrt(np.mean(gaps**2)))
    mask = told["arrays"]["buffer/mask"]
    assert (mask["status"], mask["changed"]) == ("dtype", 0)
    if new == "new":
        # Of both checkpoints the chunks that differ, and the mask.
        assert told["bytes"] < 2 * 4 * 1024 * 1024


def test_a_layout_that_differs_is_read_though_nobody_asked(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = compare(folders["old"], folders["new3"], capsys)
    assert code == 1
    assert told["arrays"]["model/w"]["status"] == "values"
    assert told["arrays"]["model/w"]["changed"] == 2
    assert told["bytes"] > 0


def test_the_table_is_on_stdout_and_empty_where_nothing_differs(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff_command(folders["old"], folders["same"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "0 of 6 arrays differ" in printed.err
    assert diff_command(folders["old"], folders["new"], values=True) == 1
    printed = capsys.readouterr()
    (row,) = [line for line in printed.out.splitlines() if " model/w " in line]
    assert "2 of 900000 (1 not finite)" in row
    assert "only in the first: bfloat16 [77]" in printed.out
    assert "6 of 7 arrays differ" in printed.err
    assert "GB/s" in printed.err


def test_neighbouring_chunks_are_read_together(
    folders: dict[str, Path], arrays: dict[str, Array], tmp_path: Path
) -> None:
    other = arrays | {"model/w": arrays["model/w"] + 1}
    path = save_arrays(tmp_path, other, world_size=2)
    with open_checkpoint(folders["old"]) as before, open_checkpoint(path) as after:
        plan = plan_comparison(before, after, values=True)
        shard = before.arrays["model/w"].grid.shard_numel
        assert plan.ranges == [("model/w", 0, 900_000)]
        assert shard < 900_000
        assert plan.read_bytes(before, after) == 2 * 900_000 * 4


KINDS = st.sampled_from([np.float32, np.float16, np.int8, np.bool_, np.float64])


@settings(max_examples=200)
@given(data=st.data())
def test_differences_are_those_of_numpy(data: st.DataObject) -> None:
    kind = data.draw(KINDS)
    old = data.draw(hnp.arrays(kind, st.integers(1, 30)))
    new = data.draw(hnp.arrays(kind, old.size))
    found = difference_of(old, new)
    unequal = [i for i in range(old.size) if old[i].tobytes() != new[i].tobytes()]
    assert found.changed == len(unequal)
    pairs = [(float(old[i]), float(new[i])) for i in unequal]
    gaps = [abs(a - b) for a, b in pairs if np.isfinite(a) and np.isfinite(b)]
    assert found.nonfinite == len(pairs) - len(gaps)
    assert found.max_abs == max(gaps, default=0.0)
    assert found.squares == pytest.approx(sum(gap * gap for gap in gaps)) or not np.isfinite(found.squares)


def test_of_other_types_values_are_compared() -> None:
    old = np.array([1.0, np.nan, 2.5, np.inf, 3.0], np.float32)
    new = np.array([1.0, np.nan, 2.0, 7.0, 3.0], ml_dtypes.bfloat16)
    found = difference_of(old, new)
    assert (found.changed, found.nonfinite, found.max_abs, found.squares) == (2, 1, 0.5, 0.25)
