"""An order of which any first part lies evenly among all."""

from hypothesis import given
from hypothesis import strategies as st

from zstore.engine.plan.placement import spread_turns


@given(st.integers(1, 400), st.integers(1, 400))
def test_any_first_part_lies_evenly(count: int, first: int) -> None:
    turns = spread_turns([7] * count)
    taken = sorted(range(count), key=turns.__getitem__)[: min(first, count)]
    for half in (range(count // 2), range(count // 2, count)):
        share = len([place for place in taken if place in half]) / len(taken)
        assert abs(share - len(half) / count) <= 0.1 + 2 / len(taken)


@given(st.lists(st.integers(0, 2**48), max_size=50))
def test_sizes_may_be_anything(sizes: list[int]) -> None:
    assert all(turn >= 0 for turn in spread_turns(sizes))
    assert len(spread_turns(sizes)) == len(sizes)
