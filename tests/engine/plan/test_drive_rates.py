"""What stays in memory where the drive's rates are known."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import hypothesis.strategies as st
from hypothesis import given, settings

from tests.engine.plan.test_placement import ASKED, SLOTS, asked, many_needs, need
from zstore.engine.plan.placement import make_plan
from zstore.engine.plan.plan import DriveRates, Need, PlacementSettings, Traffic
from zstore.errors import BudgetError

RATES = st.builds(DriveRates, read=st.integers(1, 10**10), write=st.integers(1, 10**10))


@settings(max_examples=50)
@given(needs=many_needs(), keys=ASKED, rates=RATES, budgets=st.lists(st.integers(0, 40 << 20), min_size=2, max_size=4))
def test_more_budget_never_keeps_a_measured_drive_busy_for_longer(
    needs: dict[str, Need], keys: PlacementSettings, rates: DriveRates, budgets: list[int]
) -> None:
    last: Fraction | None = None
    for budget in sorted(budgets):
        try:
            plan = make_plan(needs, replace(keys, budget_bytes=budget, drive_rates=rates))
        except BudgetError:
            continue
        seconds = rates.seconds(plan.traffic_total)
        assert last is None or seconds <= last
        last = seconds


@given(
    rates=RATES,
    trained=st.lists(st.booleans(), min_size=1, max_size=8),
    forwards=st.integers(1, 3),
    budget=st.integers(4 << 20, 30 << 20),
)
def test_no_choice_of_pieces_of_one_size_beats_that_by_rates(
    rates: DriveRates, trained: list[bool], forwards: int, budget: int
) -> None:
    """Frozen parameters of 1536 rows take what the state of 256 takes, and are read only."""
    shapes = [(256, 512) if trains else (1536, 512) for trains in trained]
    needs = {
        f"p{i}": need(shape, slots=SLOTS if trains else None, gathered=trains)
        for i, (shape, trains) in enumerate(zip(shapes, trained, strict=True))
    }
    keys = asked(
        optimizer="nvme", parameters="nvme", budget_bytes=budget, buffer_bytes=4 << 20, holds_gradients=False,
        accumulation_steps=forwards, drive_rates=rates,
    )  # fmt: skip
    everything = make_plan(needs, replace(keys, budget_bytes=4 << 20))
    piece = 3 * 4 * 256 * 512
    saved = sorted(
        (rates.seconds(moved_alone(one, replace(keys, budget_bytes=4 << 20))) for one in needs.values()), reverse=True
    )
    left = rates.seconds(everything.traffic_total) - sum(saved[: (budget - (4 << 20)) // piece])
    by_rates, by_bytes = make_plan(needs, keys), make_plan(needs, replace(keys, drive_rates=None))
    assert rates.seconds(by_rates.traffic_total) == left <= rates.seconds(by_bytes.traffic_total)


def moved_alone(one: Need, keys: PlacementSettings) -> Traffic:
    return make_plan({"a": one}, keys).traffic_total


def test_where_writing_is_slow_state_stays_in_memory_before_what_is_only_read() -> None:
    """A byte of either saves two transfers; the state's file has a little less padding."""
    needs = {"frozen": need((1536, 512), slots=None), "trained": need((256, 512), gathered=True)}
    keys = asked(optimizer="nvme", parameters="nvme", budget_bytes=6 << 20, buffer_bytes=4 << 20, holds_gradients=False)
    for write, rests in ((100, ("disk", "host")), (10_000, ("host", "disk"))):
        plan = make_plan(needs, replace(keys, drive_rates=DriveRates(read=1000, write=write)))
        assert (plan.placements["frozen"].parameter, plan.placements["trained"].state) == rests
