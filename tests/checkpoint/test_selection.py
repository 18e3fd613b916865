"""Lazy arrays select what numpy selects, and read no chunk that has nothing of it."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zstore.errors import BudgetError
from zstore.format.arrays import ArraySpec
from zstore.open.lazy import LazyArray

Array = npt.NDArray[Any]


class Stored:
    """An array in memory that notes what is read of it."""

    def __init__(self, values: Array) -> None:
        self.flat = values.reshape(-1)
        self.reads: list[tuple[int, int]] = []
        spec = ArraySpec(name="model/x", shape=values.shape, dtype=values.dtype.name)
        self.lazy = LazyArray(spec, self.read)

    def read(self, first: int, stop: int, out: Array) -> None:
        assert 0 <= first < stop <= self.flat.size
        assert out.flags.c_contiguous
        assert out.shape == (stop - first,)
        self.reads.append((first, stop))
        out[:] = self.flat[first:stop]


def keys(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    return hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True)


@settings(max_examples=200)
@given(data=st.data())
def test_every_key_selects_what_numpy_selects(data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9))
    values = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    key = data.draw(keys(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zstore.open.lazy._BLOCK_BYTES", data.draw(st.integers(1, 2000)))
        found, wanted = Stored(values).lazy[key], values[key]
    assert type(found) is type(wanted)
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("key", "numel"), [(np.s_[10:20], 10 * 80), (np.s_[::50], 2 * 80), (np.s_[3, 2], 20), (np.s_[::30, 1, ::7], 4 * 15)]
)
def test_rows_that_are_apart_are_read_apart(key: Any, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zstore.open.lazy._BLOCK_BYTES", 2000)
    values = np.arange(100 * 4 * 20, dtype=np.int32).reshape(100, 4, 20)
    stored = Stored(values)
    assert np.array_equal(stored.lazy[key], values[key])
    assert sum(stop - first for first, stop in stored.reads) == numel


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ([0, 1], "got a list: read what is around it"),
        (np.array([True] * 3), "got a ndarray"),
        (True, "got a bool"),
        (1.0, "got a float"),
        ("x", "got a str"),
        (3, "index 3 is out of bounds for axis 0 with size 3"),
        (-4, "index -4 is out of bounds"),
        ((0, 5), "out of bounds for axis 1 with size 5"),
        ((0, 0, 0), "too many indices"),
        ((..., 0, ...), "single ellipsis"),
    ],
)
def test_other_keys_are_refused(key: Any, message: str) -> None:
    with pytest.raises(IndexError, match=message):
        Stored(np.zeros((3, 5))).lazy[key]


def test_a_lazy_array_says_what_it_is() -> None:
    lazy = Stored(np.zeros((6, 5), np.float32)).lazy
    assert (lazy.shape, lazy.ndim, lazy.size, lazy.nbytes, lazy.dtype, len(lazy)) == (
        (6, 5),
        2,
        30,
        120,
        np.dtype(np.float32),
        6,
    )
    assert repr(lazy) == "<LazyArray 'model/x' [6, 5] float32>"
    with pytest.raises(TypeError, match="no length"):
        len(Stored(np.zeros((), np.float32)).lazy)


def test_rows_are_iterated_without_reading_chunks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(60, dtype=np.int32).reshape(12, 5)
    stored = Stored(values)
    monkeypatch.setattr("zstore.open.lazy._BLOCK_BYTES", 80)
    assert np.array_equal(np.stack(list(stored.lazy)), values)
    assert len(stored.reads) == 3


def test_what_no_memory_holds_is_an_error_that_says_so() -> None:
    spec = ArraySpec(name="model/x", shape=(2**45, 2**12), dtype="float32")
    lazy = LazyArray(spec, lambda *_: None)
    for read in (lazy.numpy, lambda: lazy[::-1], lambda: lazy[1:]):
        with pytest.raises(BudgetError, match=r"'model/x': no memory for .* read a part of it"):
            read()
    assert lazy[2**44, :3].shape == (3,)
