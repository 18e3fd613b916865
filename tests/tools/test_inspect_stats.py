"""`zstore inspect --stats`: numbers as numpy has them, whatever the order of the parts, and a histogram that counts all."""

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
from zstore.errors import CorruptionError
from zstore.open.stats import NUM_BINS, ArrayStats, Histogram, stats_of
from zstore.tools.inspect import inspect_command
from zstore.tools.opening import Common

Array = npt.NDArray[Any]


def make_arrays() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    odd = rng.standard_normal((50, 30)).astype(np.float32)
    odd[3, 4], odd[5], odd[0, 0] = np.nan, np.inf, -np.inf
    return {
        "model/w": (rng.standard_normal((1000, 700)) * 0.02 + 1).astype(np.float32),
        "model/b": rng.standard_normal(77).astype(ml_dtypes.bfloat16),
        "model/odd": odd,
        "model/lost": np.full(5, np.nan, np.float16),
        "model/none": np.zeros((0, 5), np.float32),
        "model/constant": np.full(10, 3.25),
        "buffer/mask": rng.random((5, 5)) < 0.5,
        "buffer/steps": np.array(-(2**40), np.int64),
    }


@pytest.fixture(scope="module")
def arrays() -> dict[str, Array]:
    return make_arrays()


@pytest.fixture(scope="module")
def saved(arrays: dict[str, Array], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_arrays(tmp_path_factory.mktemp("run"), arrays, world_size=3, step=60)


def check(found: dict[str, Any], values: Array) -> None:
    numbers = values.astype(np.float64).reshape(-1)
    finite = numbers[np.isfinite(numbers)]
    assert (found["nan"], found["inf"]) == (np.isnan(numbers).sum(), np.isinf(numbers).sum())
    if not finite.size:
        assert {found[key] for key in ("min", "max", "mean", "norm")} == {None}
        assert found["histogram"] == {"edges": [], "counts": []}
        return
    assert (found["min"], found["max"]) == (finite.min(), finite.max())
    assert found["mean"] == pytest.approx(finite.mean(), rel=1e-9, abs=1e-12)
    assert found["norm"] == pytest.approx(np.linalg.norm(finite), rel=1e-9)
    edges, counts = found["histogram"]["edges"], found["histogram"]["counts"]
    # numpy counts the last edge in, which no value can reach here.
    assert edges[-1] > finite.max()
    assert counts == np.histogram(finite, edges)[0].tolist()


def test_json_has_the_numbers_of_each_array(
    saved: Path, arrays: dict[str, Array], capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect_command(saved, Common(json=True), stats=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bytes"] == sum(array.nbytes for array in arrays.values())
    assert told["gb_per_s"] > 0
    for entry in told["arrays"]:
        check(entry["stats"], arrays[entry["name"]])
    inspect_command(saved, Common(json=True))
    assert "stats" not in capsys.readouterr().out


def test_the_table_shows_them_and_the_rate_stands_on_stderr(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_command(saved, stats=True) == 0
    printed = capsys.readouterr()
    (row,) = [line for line in printed.out.splitlines() if " odd " in line]
    assert "│   1 │  31 │" in row
    (row,) = [line for line in printed.out.splitlines() if " constant " in line]
    assert "█" in row
    assert "3.25" in row
    assert "GB/s" in printed.err


def test_what_is_damaged_has_no_statistics(arrays: dict[str, Array], tmp_path: Path) -> None:
    path = save_arrays(tmp_path, arrays)
    shard = path / "model/w/c.0.0"
    shard.chmod(0o644)
    with shard.open("r+b") as file:
        file.seek(8000)
        file.write(b"x")
    with pytest.raises(CorruptionError, match="'model/w'"):
        inspect_command(path, stats=True)


FLOATS = hnp.arrays(
    np.float64,
    st.integers(1, 60),
    elements=st.one_of(st.floats(), st.floats(-2, 2), st.sampled_from([0.0, 1.0, 1e300, -1e300, 5e-324])),
)


@settings(max_examples=100)
@given(values=FLOATS, cuts=st.lists(st.integers(0, 60), max_size=4))
def test_parts_in_any_order_give_the_same(values: Array, cuts: list[int]) -> None:
    parts = [part for part in np.split(values, sorted(min(cut, values.size) for cut in cuts)) if part.size]
    merged = ArrayStats()
    for part in reversed(parts):
        merged.merge(stats_of(part))
    whole = stats_of(values)
    assert (merged.finite, merged.nan, merged.inf, merged.low, merged.high) == (
        whole.finite,
        whole.nan,
        whole.inf,
        whole.low,
        whole.high,
    )
    if whole.histogram is None:
        assert merged.histogram is None
        return
    assert merged.histogram is not None
    assert (merged.histogram.exponent, merged.histogram.first) == (whole.histogram.exponent, whole.histogram.first)
    assert merged.histogram.counts.tolist() == whole.histogram.counts.tolist()
    assert whole.histogram.counts.sum() == whole.finite
    assert 1 <= whole.histogram.counts.size <= NUM_BINS


@settings(max_examples=200)
@given(values=hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(width=32, allow_nan=True)))
def test_numbers_are_numpys(values: Array) -> None:
    stats = stats_of(values)
    if stats.finite:
        edges, counts = stats.histogram.columns(32) if stats.histogram else ([], [])
        finite = values[np.isfinite(values)].astype(np.float64)
        assert counts == np.histogram(finite, edges)[0].tolist()
        assert len(counts) <= 32
        assert (stats.low, stats.high) == (finite.min(), finite.max())


def test_a_histogram_of_ordinary_weights_is_fine_enough() -> None:
    values = np.random.default_rng(0).standard_normal(10_000) * 0.02 + 1
    histogram = stats_of(values).histogram
    assert histogram is not None
    assert histogram.counts.size >= NUM_BINS // 4
    bars = histogram.bars()
    assert 8 <= len(bars) <= 24
    assert "█" in bars
    assert bars[0] == bars[-1] == "▁"


def test_a_column_with_one_value_is_not_empty() -> None:
    histogram = Histogram(0, 0, np.array([10_000, 0, 1]))
    assert histogram.bars() == "█ ▁"
