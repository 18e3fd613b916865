"""Where bytes rest: properties of the plan, its figures against a store, and the planner of prefetch against a simulation."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zstore.engine.plan.placement import fill_device, make_plan, spread_key
from zstore.engine.plan.plan import FP32, Need, PlacementSettings, Places, Plan, describe
from zstore.engine.plan.run import check_device
from zstore.engine.plan.schedule import PrefetchLimits, Recorder, Schedule, Use, make_schedule
from zstore.errors import BudgetError, format_bytes
from zstore.format.arrays import ArraySpec, make_grid
from zstore.store import SMALL_SHARD_BYTES, Store, StoreOptions

MB = 2**20
SLOTS = ("exp_avg", "exp_avg_sq")


def need(
    shape: Any, *, world: int = 1, rank: int = 0, dtype: str = "bfloat16", slots: Any = SLOTS, gathered: bool = False
) -> Need:
    types = {"dtype": dtype, "gradient_dtype": dtype}
    return Need(grid=make_grid(shape, world), shard=rank, slots=slots, stays_gathered=gathered, **types)


def rests(plan: Plan) -> list[tuple[str, str, str]]:
    return [(place.state, place.parameter, place.gradient) for place in plan.placements.values()]


EIGHT = {f"{i}.weight": need((512, 512)) for i in range(8)}
"""512 KiB each in 16 bits, 1 MiB for each array of the state."""


@pytest.mark.parametrize(
    ("keys", "places", "gradient_bytes"),
    [
        ({}, ("device", "device", "device"), 2),
        ({"optimizer": "cpu", "parameters": "cpu"}, ("host", "host", "host"), 2),
        ({"optimizer": "nvme", "parameters": "nvme"}, ("disk", "disk", "host"), 2),
        ({"optimizer": "nvme", "stores_gradients": False}, ("disk", "device", "device"), 0),  # nobody waits for them
        ({"optimizer": "nvme", "stores_gradients": None}, ("disk", "device", "host"), 2),
        ({"stores_gradients": None}, ("device", "device", "device"), 0),  # an update in the backward frees them
    ],
)
def test_without_a_budget(keys: dict[str, Any], places: tuple[str, str, str], gradient_bytes: int) -> None:
    plan = make_plan(EIGHT, PlacementSettings(**keys))
    assert set(rests(plan)) == {places}
    assert plan.held_total.total == 8 * 512 * 512 * (2 + gradient_bytes + 12)
    assert (plan.written_bytes > 0) == (plan.file_bytes > 0) == ("disk" in places)


def test_shards_under_64_kib_are_in_host_memory_whatever_was_asked_for() -> None:
    # 40 KB of 16-bit parameter, 80 KB for each array of the state.
    between = need((200, 100))
    small = need((100, 100))
    plan = make_plan(
        {"between": between, "small": small},
        PlacementSettings(optimizer="nvme", parameters="nvme", budget_bytes=16 * MB, buffer_bytes=MB),
    )
    assert rests(plan) == [("host", "host", "host"), ("host", "host", "host")]
    least = plan.budget_used_bytes - 3 * 80_000
    tight = make_plan({"between": between, "small": small}, replace(plan.settings, budget_bytes=least))
    assert rests(tight) == [("disk", "host", "host"), ("host", "host", "host")]
    with pytest.raises(BudgetError):
        make_plan({"between": between, "small": small}, replace(plan.settings, budget_bytes=least - 64 * 20))


def test_a_budget_goes_to_parameters_then_gradients_then_state() -> None:
    both = PlacementSettings(optimizer="nvme", parameters="nvme", buffer_bytes=4 * MB)
    seen = []
    for budget in (4, 6, 8, 10, 12, 31, 36):
        plan = make_plan(EIGHT, replace(both, budget_bytes=budget * MB))
        states, parameters, gradients = zip(*rests(plan), strict=True)
        seen.append((parameters.count("host"), gradients.count("host"), states.count("host")))
        # Evenly among all, so that the drive has the same work in every part of a step.
        assert parameters.count("host") != 4 or parameters[:4].count("host") == 2
    # Half a MiB for each parameter and gradient, 3 for each state.
    assert seen == [(0, 0, 0), (4, 0, 0), (8, 0, 0), (8, 4, 0), (8, 8, 0), (8, 8, 6), (8, 8, 8)]


def test_a_frozen_parameter_has_no_gradient_and_no_state_and_is_only_read() -> None:
    settings = PlacementSettings(optimizer="nvme", parameters="nvme", gathers=1)
    plan = make_plan({"a": need((512, 512), slots=None)}, settings)
    assert plan.held_total.total == plan.held["parameters"].disk == 2 * 512 * 512
    assert plan.written_bytes == 0
    read = f"each forward of this machine's ranks (1) reads about {format_bytes(plan.read_bytes)} from disk"
    assert plan.read_bytes > 0
    assert describe(plan).splitlines()[2] == f"  {read}"


def test_two_units_in_a_row_are_gathered() -> None:
    units = [["0.weight"], ["1.weight", "2.weight"], ["2.weight", "3.weight"], ["4.weight"]]
    plan = make_plan({**EIGHT, "head": need((64, 64), gathered=True)}, PlacementSettings(), [*units, ["head"]])
    assert plan.gathered_bytes == 3 * 2 * 512 * 512


def test_a_device_is_filled_with_as_much_state_as_it_has_room_for() -> None:
    units = [[name] for name in EIGHT]
    none = PlacementSettings(optimizer="cpu", device_is_host=False)
    # 4 MiB of parameters, two units of half a MiB and a unit's gradients are there anyway. Of each parameter there may be
    # the state, 3 MiB, and the gradient, which then waits there too: half a MiB.
    beside = 4 * MB + 3 * MB // 2
    rows = [(2 * MB, 0), (beside, 0), (beside + 7 * MB // 2, 1), (beside + 4 * 7 * MB // 2, 4), (100 * MB, 8)]
    for usable_bytes, wanted in rows:
        plan = make_plan(EIGHT, fill_device(EIGHT, none, units, usable_bytes), units)
        assert [place.state for place in plan.placements.values()].count("device") == wanted
        assert plan.held_total.device + 3 * MB // 2 <= max(usable_bytes, beside)
        share = f"the device updates the other {wanted / 8:.1%}" if wanted else "not counted"
        assert share in describe(plan)


def test_cpu_that_does_not_fit_is_refused_with_numbers_and_advice() -> None:
    with pytest.raises(BudgetError) as caught:
        make_plan(EIGHT, PlacementSettings(optimizer="cpu", budget_bytes=8 * MB, buffer_bytes=MB))
    text = str(caught.value)
    state, gradients = 24 * MB, 4 * MB
    for number in (8 * MB, MB, state, gradients, state + gradients + MB, "offload_optimizer", "nvme"):
        assert str(number) in text
    enough = make_plan(EIGHT, PlacementSettings(optimizer="cpu", budget_bytes=29 * MB, buffer_bytes=MB))
    assert enough.budget_used_bytes == 29 * MB


def test_a_budget_that_cannot_hold_the_buffers_or_a_piece_beside_them_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"2097152 bytes of transfer buffers.*raise `host_budget_bytes` [^,]+$"):
        make_plan(EIGHT, PlacementSettings(optimizer="nvme", budget_bytes=MB, buffer_bytes=2 * MB))
    with pytest.raises(BudgetError, match="a piece larger than the buffers"):
        make_plan(EIGHT, PlacementSettings(optimizer="nvme", budget_bytes=4096, buffer_bytes=4096))


def test_what_a_device_cannot_hold_is_refused() -> None:
    plan = make_plan(EIGHT, PlacementSettings(optimizer="nvme"), [["0.weight"], ["1.weight"]])
    on_device = plan.held_total.device + plan.gathered_bytes
    check_device(plan, on_device)
    with pytest.raises(BudgetError, match="offload_param"):
        check_device(plan, on_device - 1)


def test_the_devices_memory_is_the_hosts_only_if_the_cpu_computes() -> None:
    here = make_plan(EIGHT, PlacementSettings(optimizer="cpu"))
    away = make_plan(EIGHT, PlacementSettings(optimizer="cpu", budget_bytes=100 * MB, device_is_host=False))
    # In 16 bits 4 MiB of parameters and 4 of gradients, and 24 of state.
    assert (here.host_bytes, away.host_bytes) == (32 * MB, 28 * MB)


def test_the_description_is_each_place_the_budget_and_what_a_step_moves() -> None:
    keys: dict[str, Any] = {"optimizer": "nvme", "budget_bytes": 12 * MB, "buffer_bytes": 4 * MB}
    plan = make_plan(EIGHT, PlacementSettings(**keys, device_is_host=False, ratio=0.6))
    text = describe(plan, world_size=2, local_ranks=2).splitlines()
    assert [line.partition(":")[0].strip() for line in text[1:5]] == ["device", "host", "disk", "host budget"]
    assert (
        text[1]
        == "  device: 15.20 MB: parameters 4.19 MB, gradients 1.57 MB, master 3.15 MB, exp_avg 3.15 MB, exp_avg_sq 3.15 MB"
    )
    read, written = (format_bytes(2 * nbytes) for nbytes in (plan.read_bytes, plan.written_bytes))
    assert text[5] == f"  each step of this machine's ranks (2) reads about {read} from disk and writes {written}"
    assert f"their files take {format_bytes(2 * plan.file_bytes)}, " in text[6]
    plain = describe(make_plan(EIGHT, PlacementSettings())).splitlines()
    assert [line.partition(":")[0].strip() for line in plain[1:]] == ["device", "not counted"]
    assert plain[-1] == "  not counted: gradients in transit and activations"
    gathers = describe(make_plan(EIGHT, PlacementSettings(), [list(EIGHT)[:1]])).splitlines()
    assert "not counted: up to 524.29 kB of gathered parameters on the device, gradients" in gathers[-1]


SHAPES = st.one_of(st.tuples(st.integers(0, 300_000)), st.tuples(st.integers(0, 900), st.integers(0, 700)))


@st.composite
def many_needs(draw: st.DrawFn) -> dict[str, Need]:
    world = draw(st.integers(1, 4))
    rank = draw(st.integers(0, world - 1))
    dtype = draw(st.sampled_from(["bfloat16", "float16", FP32]))
    whole = world > 1 and draw(st.booleans())
    needs = {}
    for i, shape in enumerate(draw(st.lists(SHAPES, max_size=9))):
        slots = draw(st.sampled_from([SLOTS, ("momentum_buffer",), (), None]))
        gathered = whole or draw(st.booleans())
        one = need(shape, world=world, rank=rank, dtype=dtype, slots=slots, gathered=gathered)
        gradient_dtype = draw(st.sampled_from([dtype, FP32]))
        needs[f"p{i}"] = replace(one, whole_gradient=whole, gradient_dtype=gradient_dtype)
    return needs


TIERS = st.sampled_from(["none", "cpu", "nvme"])
ASKED = st.builds(
    PlacementSettings,
    optimizer=TIERS,
    parameters=TIERS,
    ratio=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    max_in_cpu_numel=st.none() | st.integers(0, 600_000),
    buffer_bytes=st.sampled_from([0, 1 << 20, 4 << 20]),
    stores_gradients=st.booleans(),
    accumulation_steps=st.integers(1, 3),
)


def expected_total(one: Need, place: Places, holds: bool) -> int:
    itemsize = 4 if one.dtype == FP32 else 2
    total = (one.numel if one.stays_gathered else one.rows_numel) * itemsize
    if one.slots is None:
        return total
    if holds:
        gradient_itemsize = 4 if one.gradient_dtype == FP32 else 2
        total += (one.numel if one.whole_gradient else one.rows_numel) * gradient_itemsize
    separate = itemsize == 2 or (place.parameter == "device" and place.state != "device")
    return total + 4 * one.rows_numel * (len(one.slots) + separate)


@given(needs=many_needs(), keys=ASKED, budget=st.none() | st.integers(0, 40 << 20))
def test_every_byte_is_placed_once(needs: dict[str, Need], keys: PlacementSettings, budget: int | None) -> None:
    keys = replace(keys, budget_bytes=budget)
    try:
        plan = make_plan(needs, keys)
    except BudgetError:
        roomy = make_plan(needs, replace(keys, budget_bytes=None))
        # Where all fits there is nothing to refuse, but for a piece that needs a buffer of its own.
        assert budget < roomy.held_total.total + 64 * 6 * len(needs) + 16 * MB
        return
    assert list(plan.placements) == list(needs)
    expected = sum(expected_total(one, plan.placements[name], keys.stores_gradients) for name, one in needs.items())
    assert plan.held_total.total == expected + keys.buffer_bytes
    assert plan.held_total.host <= plan.budget_used_bytes <= plan.budget_full_bytes
    assert budget is None or plan.budget_used_bytes <= budget
    for name, one in needs.items():
        place = plan.placements[name]
        if one.rows_numel * 4 < SMALL_SHARD_BYTES or "nvme" not in (keys.optimizer, keys.parameters):
            assert "disk" not in (place.state, place.parameter, place.gradient)


@settings(max_examples=200)
@given(needs=many_needs(), keys=ASKED, budgets=st.lists(st.integers(0, 40 << 20), min_size=2, max_size=6))
def test_more_budget_is_less_traffic(needs: dict[str, Need], keys: PlacementSettings, budgets: list[int]) -> None:
    last: int | None = None
    for budget in sorted(budgets):
        try:
            plan = make_plan(needs, replace(keys, budget_bytes=budget))
        except BudgetError:
            assert last is None  # what fits, fits a larger budget too
            continue
        moved = plan.read_bytes + plan.written_bytes
        assert last is None or moved <= last
        last = moved


@given(needs=many_needs(), keys=ASKED, ratio=st.floats(0, 1))
def test_the_ratio_holds_within_one_parameter(needs: dict[str, Need], keys: PlacementSettings, ratio: float) -> None:
    keys = replace(keys, optimizer="nvme", ratio=ratio)
    trained = {name: one.rows_numel for name, one in needs.items() if one.slots is not None}
    placements = make_plan(needs, keys).placements
    on_device = sum(numel for name, numel in trained.items() if placements[name].state == "device")
    total = sum(trained.values())
    largest = max(trained.values(), default=0)
    assert (1 - ratio) * total - largest - 1 <= on_device <= (1 - ratio) * total + 1


@given(count=st.integers(1, 400), first=st.integers(1, 400))
def test_what_comes_first_is_spread_over_the_model(count: int, first: int) -> None:
    taken = sorted(range(count), key=spread_key)[: min(first, count)]
    for half in (range(count // 2), range(count // 2, count)):
        share = len([place for place in taken if place in half]) / len(taken)
        assert abs(share - len(half) / count) <= 0.1 + 2 / len(taken)


@pytest.mark.parametrize(("world", "rank"), [(1, 0), (3, 0), (3, 2)])
@pytest.mark.parametrize("budget", [None, 3 * MB])
def test_planned_bytes_are_those_of_a_store(world: int, rank: int, budget: int | None, nvme: Path) -> None:
    shapes = {"p0": (1203, 56), "p1": (700, 700), "p2": (70,)}
    needs = {name: need(shape, world=world, rank=rank) for name, shape in shapes.items()}
    options = StoreOptions(run_path=nvme, host_budget_bytes=budget)
    keys = PlacementSettings(
        optimizer="nvme", budget_bytes=budget, buffer_bytes=options.pool_bytes, stores_gradients=False
    )
    plan = make_plan(needs, keys)
    groups = []
    with Store(options, rank=rank) as store:
        for parameter, one in needs.items():
            rows, cols = one.grid.rows, one.grid.row_numel
            groups.append([f"{kind}/{parameter}" for kind in ("model", *SLOTS)])
            for name in groups[-1]:
                shape = (rows,) if parameter == "p2" else (rows, cols)
                spec = ArraySpec(name=name, shape=shape, dtype=FP32)
                store.create(spec, grid=one.grid, shard=rank, tier=plan.placements[parameter].state)
        held = store.statistics()
        assert held.host_bytes == plan.held_total.host - plan.held["buffers"].host
        assert (held.disk_bytes, held.pool_bytes) == (plan.held_total.disk, plan.held["buffers"].host)
        files = [path.stat().st_size for path in nvme.rglob("*.shard")]
        assert sum(files) == plan.file_bytes
        for tile in store.tiles(groups, "fill"):
            for view in tile.views:
                view[:] = 1
        before = store.statistics()
        for tile in store.tiles(groups, "update"):
            for view in tile.views:
                view[:] += 1
        after = store.statistics()
    assert after.disk_read_bytes - before.disk_read_bytes == plan.read_bytes
    assert after.disk_write_bytes - before.disk_write_bytes == plan.written_bytes
    assert budget is None or plan.written_bytes > 0


@dataclass(frozen=True)
class Trace:
    uses: list[Use]
    numel: list[int]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Uses in which no unit is needed while it is in use, each of which ends after none to three others began."""
    numel = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    uses: list[Use] = []
    for number in range(draw(st.integers(0, 14))):
        free = [u for u in range(len(numel)) if all(use.unit != u or use.last_started < number for use in uses)]
        if not free:
            break
        uses.append(Use(draw(st.sampled_from(free)), number + draw(st.integers(0, 3))))
    last = len(uses) - 1
    return Trace([Use(use.unit, min(use.last_started, last)) for use in uses], numel)


limits_of = st.builds(
    PrefetchLimits, prefetch_numel=st.integers(0, 20), live_numel=st.integers(0, 40), reuse_numel=st.integers(0, 20)
)


def simulate(trace: Trace, schedule: Schedule, limits: PrefetchLimits) -> list[int]:
    """Do what the schedule says; return the elements gathered while each use is in use."""
    uses, numel = trace.uses, trace.numel
    ahead: dict[int, int] = {}  # use -> unit
    in_use: dict[int, int] = {}
    kept: set[int] = set()
    live: list[int] = []

    def start(slot: int) -> None:
        for use in schedule.start[slot]:
            unit = uses[use].unit
            assert use >= slot
            assert unit not in kept
            assert unit not in in_use.values()
            assert unit not in ahead.values()
            waiting = sum(numel[other] for other in ahead.values())
            assert limits.prefetch_numel > 0
            assert not waiting or waiting + numel[unit] <= limits.prefetch_numel
            ahead[use] = unit

    start(0)
    for number, use in enumerate(uses):
        for done in [other for other in in_use if uses[other].last_started < number]:
            if schedule.keep[done]:
                kept.add(in_use[done])
            del in_use[done]
        ahead.pop(number, None)
        kept.discard(use.unit)
        in_use[number] = use.unit
        start(number + 1)
        live.append(sum(numel[u] for u in [*in_use.values(), *ahead.values(), *kept]))
    assert not ahead
    return live


def in_use_alone(trace: Trace) -> list[int]:
    return [
        sum(trace.numel[use.unit] for first, use in enumerate(trace.uses) if first <= number <= use.last_started)
        for number in range(len(trace.uses))
    ]


@given(traces(), limits_of)
def test_a_schedule_stays_within_its_limits(trace: Trace, limits: PrefetchLimits) -> None:
    schedule = make_schedule(trace.uses, trace.numel, limits)
    live = simulate(trace, schedule, limits)
    for found, least in zip(live, in_use_alone(trace), strict=True):
        assert found <= max(limits.live_numel, least)
    for number, use in enumerate(trace.uses):
        if schedule.keep[number]:
            again = next(n for n in range(number + 1, len(trace.uses)) if trace.uses[n].unit == use.unit)
            assert sum(trace.numel[u.unit] for u in trace.uses[use.last_started + 1 : again]) <= limits.reuse_numel


def layers(count: int) -> list[Use]:
    order = [*range(count), *reversed(range(count))]
    return [Use(unit, number) for number, unit in enumerate(order)]


def test_a_model_of_layers() -> None:
    one_ahead = make_schedule(layers(3), [10, 10, 10], PrefetchLimits(prefetch_numel=1, live_numel=100))
    assert one_ahead.units == (0, 1, 2, 2, 1, 0)
    # The unit in the middle is kept; each slot starts the next one.
    assert one_ahead.keep == (False, False, True, False, False, False)
    assert one_ahead.start == ((0,), (1,), (2,), (4,), (), (5,), ())
    # Nothing fits beside the unit in use.
    tight = make_schedule(layers(3), [10, 10, 10], PrefetchLimits(prefetch_numel=50, live_numel=10))
    assert tight.start == ((0,), (), (), (), (), (), ())
    off = make_schedule(layers(3), [10, 10, 10], PrefetchLimits(prefetch_numel=0))
    assert not any(off.start)
    # All are kept, if there is room for all and the one ahead.
    near = make_schedule(layers(3), [10, 10, 10], PrefetchLimits(prefetch_numel=0, live_numel=30, reuse_numel=40))
    assert near.keep == (True, True, True, False, False, False)
    nearer = make_schedule(layers(3), [10, 10, 10], PrefetchLimits(prefetch_numel=0, live_numel=30, reuse_numel=20))
    assert nearer.keep == (False, True, True, False, False, False)


@given(traces(), limits_of)
def test_a_recorder_tells_a_repetition_from_another_order(trace: Trace, limits: PrefetchLimits) -> None:
    recorder = Recorder()

    def iterate(schedule: Schedule, order: list[Use]) -> tuple[tuple[Use, ...] | None, list[bool]]:
        recorder.begin(schedule)
        followed = []
        open_: list[tuple[int, Use]] = []
        for number, use in enumerate(order):
            for _, done in [(n, u) for n, u in open_ if u.last_started < number]:
                recorder.end_use(done.unit)
            open_ = [(n, u) for n, u in open_ if u.last_started >= number]
            recorder.begin_use(use.unit)
            followed.append(recorder.on_schedule)
            open_.append((number, use))
        return recorder.end(), followed

    found, followed = iterate(Schedule(), trace.uses)
    assert not any(followed)
    if not trace.uses:
        assert found is None
        return
    assert found == tuple(trace.uses)
    schedule = make_schedule(found, trace.numel, limits)
    again, followed = iterate(schedule, trace.uses)
    assert again is None
    assert all(followed)
    shorter, followed = iterate(schedule, trace.uses[:-1])
    assert shorter is not None
    assert all(followed)
