"""Lazy arrays select what numpy selects, and read no chunk that has nothing of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zstore.errors import BudgetError
from zstore.format import selection
from zstore.format.arrays import ArraySpec
from zstore.format.selection import select
from zstore.open.lazy import LazyArray

Array = npt.NDArray[Any]


class Stored:
    """An array in memory that counts which of its chunks are read."""

    def __init__(self, values: Array, chunk_numel: int, num_readers: int = 1) -> None:
        self.flat = values.reshape(-1)
        self.chunk_numel = chunk_numel
        self.reads: list[tuple[int, int]] = []
        spec = ArraySpec(name="model/x", shape=values.shape, dtype=values.dtype.name)
        self.lazy = LazyArray(spec, self.read, chunk_numel=chunk_numel, num_readers=num_readers)

    def read(self, first: int, stop: int, out: Array) -> None:
        assert 0 <= first < stop <= self.flat.size
        assert out.flags.c_contiguous
        assert out.shape == (stop - first,)
        self.reads.append((first, stop))
        out[:] = self.flat[first:stop]

    @property
    def chunks_read(self) -> list[int]:
        return [
            c
            for first, stop in self.reads
            for c in range(first // self.chunk_numel, (stop - 1) // self.chunk_numel + 1)
        ]


def keys(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    return hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True)


@settings(max_examples=500)
@given(data=st.data())
def test_every_key_selects_what_numpy_selects(data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9))
    values = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    key = data.draw(keys(shape))
    stored = Stored(values, data.draw(st.integers(1, 50)))
    found, wanted = stored.lazy[key], values[key]
    assert type(found) is type(wanted)
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()


@settings(max_examples=200)
@given(data=st.data())
def test_only_chunks_that_have_something_of_it_are_read(data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=30))
    values = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    key = data.draw(keys(shape))
    stored = Stored(values, data.draw(st.integers(1, 40)))
    wanted = np.asarray(values[key]).reshape(-1)
    assert np.array_equal(np.asarray(stored.lazy[key]).reshape(-1), wanted)
    assert set(stored.chunks_read) == set((wanted // stored.chunk_numel).tolist())


def test_no_chunk_is_read_twice_for_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(100 * 50, dtype=np.int32).reshape(100, 50)
    stored = Stored(values, 500)
    assert np.array_equal(stored.lazy[:, 3:5], values[:, 3:5])
    assert len(stored.reads) == 1
    # In small groups too: they end where chunks do.
    monkeypatch.setattr(selection, "GROUP_NUMEL", 1000)
    stored.reads.clear()
    assert np.array_equal(stored.lazy[:, 3], values[:, 3])
    assert len(stored.reads) == 5
    assert sorted(stored.chunks_read) == list(range(10))


def test_an_error_in_one_of_several_groups_is_raised() -> None:
    class Broken(Stored):
        def read(self, first: int, stop: int, out: Array) -> None:
            if first == 500:
                raise OSError("lost")
            super().read(first, stop, out)

    with pytest.raises(OSError, match="lost"):
        Broken(np.arange(1000, dtype=np.int32), 10, num_readers=3).lazy[::100]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ([0, 1], "got a list: read what is around it"),
        (np.array([True] * 3), "got a ndarray"),
        (True, "got a bool"),
        (1.0, "got a float"),
        ("x", "got a str"),
        (3, "index 3 is out of bounds for axis 0 with extent 3"),
        (-4, "index -4 is out of bounds"),
        ((0, 5), "out of bounds for axis 1 with extent 5"),
        ((0, 0, 0), r"3 indices for an array with 2 extents, \(3, 5\)"),
        ((..., 0, ...), "at most one"),
    ],
)
def test_other_keys_are_refused(key: Any, message: str) -> None:
    with pytest.raises(IndexError, match=message):
        select(key, (3, 5))


def test_a_slice_of_step_zero_is_pythons_error() -> None:
    with pytest.raises(ValueError, match="cannot be zero"):
        select(slice(None, None, 0), (3,))


def test_a_lazy_array_says_what_it_is() -> None:
    lazy = Stored(np.zeros((6, 5), np.float32), 10).lazy
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
        len(Stored(np.zeros((), np.float32), 10).lazy)


def test_rows_are_iterated_without_reading_chunks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(60, dtype=np.int32).reshape(12, 5)
    stored = Stored(values, 10)
    monkeypatch.setattr("zstore.open.lazy._ITER_BYTES", 80)
    assert np.array_equal(np.stack(list(stored.lazy)), values)
    assert len(stored.chunks_read) == 6


def test_numpy_takes_it_as_an_array() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    lazy = Stored(values, 4).lazy
    assert np.array_equal(np.asarray(lazy), values)
    assert np.asarray(lazy, dtype=np.float64).dtype == np.float64
    assert np.sum(lazy) == 15
    with pytest.raises(ValueError, match="without a copy"):
        np.array(lazy, copy=False)


def test_what_no_memory_holds_is_an_error_that_says_so() -> None:
    spec = ArraySpec(name="model/x", shape=(2**45, 2**12), dtype="float32")
    lazy = LazyArray(spec, lambda *_: None, chunk_numel=2**18)
    for read in (lazy.numpy, lambda: lazy[::-1], lambda: lazy[1:]):
        with pytest.raises(BudgetError, match=r"'model/x': no memory for .* read a part of it"):
            read()
    assert lazy[2**44, :3].shape == (3,)
