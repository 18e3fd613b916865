"""Blocks of tensors: every run of every block against numpy's own slicing."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstore.format.boxes import Box, BoxRun, flat_ranges, gather, tiles


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    offsets = [draw(st.integers(0, extent)) for extent in shape]
    sizes = [draw(st.integers(0, extent - at)) for extent, at in zip(shape, offsets, strict=True)]
    return Box(tuple(shape), tuple(offsets), tuple(sizes))


def elements(box: Box) -> np.ndarray:
    """The flat elements of the whole that the box has, by numpy."""
    whole = np.arange(math.prod(box.shape)).reshape(box.shape)
    return whole[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))].reshape(-1)


@given(box=boxes(), data=st.data())
def test_runs_are_what_numpy_slices(box: Box, data: st.DataObject) -> None:
    expected = elements(box)
    numel = math.prod(box.shape)
    assert (box.numel, box.num_runs * box.run_numel) == (expected.size, expected.size)
    first = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(first, numel))
    found = [(at + i, in_box + i) for at, in_box, count in box.overlap(first, stop) for i in range(count)]
    assert found == [(e, i) for i, e in enumerate(expected.tolist()) if first <= e < stop]


@given(box=boxes(), data=st.data())
def test_gathering_fills_what_the_box_has(box: Box, data: st.DataObject) -> None:
    numel = math.prod(box.shape)
    first = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(first, numel))
    values = np.arange(numel, dtype=np.int32) + 1
    held = values[elements(box)] if box.numel else np.empty(0, np.int32)
    out = np.zeros(stop - first, np.int32)

    def read(start: int, part: np.ndarray) -> None:
        part[:] = held.view(np.uint8)[start * 4 : start * 4 + part.size]

    filled = gather(box, first, stop, 4, read, out.view(np.uint8))
    inside = np.zeros(numel, bool)
    inside[elements(box)] = True
    assert filled == inside[first:stop].sum()
    assert np.array_equal(out, np.where(inside, values, 0)[first:stop])


@given(box=boxes(), most=st.integers(1, 50), gap=st.integers(0, 20))
def test_ranges_to_read_hold_the_box(box: Box, most: int, gap: int) -> None:
    ranges = flat_ranges(box, most, gap)
    assert all(first < stop <= second for (first, stop), (second, _) in pairwise(ranges))
    covered = {e for first, stop in ranges for e in range(first, stop)}
    assert covered >= set(elements(box).tolist())
    assert all(stop - first <= max(most, box.run_numel) for first, stop in ranges)


@given(shape=st.lists(st.integers(0, 4), max_size=3), data=st.data())
def test_boxes_tile_where_numpy_counts_each_element_once(shape: list[int], data: st.DataObject) -> None:
    def cut(box: Box) -> list[Box]:
        """The box in two, or as it is."""
        dim = data.draw(st.integers(0, max(len(shape) - 1, 0)))
        size = box.sizes[dim] if shape else 0
        at = data.draw(st.integers(0, size))
        if not 0 < at < size:
            return [box]
        low, high = list(box.sizes), list(box.sizes)
        low[dim], high[dim] = at, size - at
        moved = [offset + at * (d == dim) for d, offset in enumerate(box.offsets)]
        return [Box(box.shape, box.offsets, tuple(low)), Box(box.shape, tuple(moved), tuple(high))]

    pieces = [Box.whole(shape)]
    for _ in range(data.draw(st.integers(0, 5))):
        pieces += cut(pieces.pop(data.draw(st.integers(0, len(pieces) - 1))))
    assert tiles(shape, pieces)
    for _ in range(data.draw(st.integers(0, 2))):  # one is lost, one is there twice, or lies elsewhere
        if pieces and data.draw(st.booleans()):
            pieces.pop()
        pieces.append(data.draw(st.sampled_from([*pieces, Box.whole(shape)])))
    held = np.zeros(math.prod(shape), int)
    for piece in pieces:
        held[elements(piece)] += 1
    assert tiles(shape, pieces) == bool((held == 1).all())


def test_a_column_of_a_tall_tensor_takes_no_memory_for_its_rows() -> None:
    column = Box((2**40, 2), (0, 1), (2**40, 1))
    assert list(column.overlap(2**40, 2**40 + 4)) == [
        BoxRun(2**40 + 1, 2**39, 1),
        BoxRun(2**40 + 3, 2**39 + 1, 1),
    ]


def test_a_block_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="is not in a tensor of shape"):
        Box((4, 4), (2, 0), (3, 4))
