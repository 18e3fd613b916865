"""Parameters that rest in host memory or on disk: the bits of the plain loop, and no memory of the model's size."""

import errno
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import zstore
import zstore.store.shards
from tests.engine import step_modes
from tests.engine.bits import Case, compare_all, engine_digests
from tests.engine.models import batch, make_net
from tests.engine.runs import make_config, start, state_of
from zstore.engine import Engine
from zstore.engine.params.record import Residency
from zstore.engine.zero import fetch
from zstore.errors import RankError, RunFolderError, StorageError, UsageError
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.ranks import run_ranks


def _compare_direct(rank: int, cases: list[Case]) -> list[tuple[str, list[str]]]:
    fetch._DIRECT_NUMEL = 1
    return compare_all(rank, 3, cases)


def test_large_parameters_are_gathered_in_place() -> None:
    cases = [Case(3, "cpu", "bf16", 1, 0.25, threshold=0, parameters=tier) for tier in ("cpu", "none")]
    # More than a bucket holds goes the other way.
    cases.append(Case(3, "cpu", "fp32", 1, 0.0, 2000, parameters="nvme"))
    for failed in run_ranks(_compare_direct, 3, cases):
        assert failed == []


BLOCK_NUMEL = 6 * 192 * 192 + 3 * 192 + 2 * 192 + 1
"""Elements of a block of the wide net; its matrices are large enough to rest on disk."""


def wide_net() -> torch.nn.Module:
    return make_net(vocab=300, width=192, layers=4)


def offloaded(nvme: str | Path, tier: str = "nvme", **zero: Any) -> dict[str, Any]:
    config = make_config(3, tier, nvme, tier)
    config["zero_optimization"]["offload_param"] |= zero.pop("offload_param", {})
    config["zero_optimization"] |= zero
    return config


def train(engine: Engine, steps: int = 2) -> None:
    for _ in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(*batch(engine.global_steps, micro, engine.global_rank, vocab=300)))
            engine.step()


def statistics_of(nvme: Path, steps: int = 2, **zero: Any) -> Any:
    with start(offloaded(nvme, **zero), wide_net()) as engine:
        train(engine, steps)
        return engine.statistics()


def test_the_bucket_says_how_much_is_gathered_ahead(nvme: Path) -> None:
    off = statistics_of(nvme, stage3_prefetch_bucket_size=0).units
    assert off.gathered_ahead == 0
    assert off.on_demand + off.kept == off.uses
    on = statistics_of(nvme).units
    assert on.uses == off.uses
    # The first of four micro-batches records the order.
    assert on.on_demand == on.uses // 4
    assert on.gathered_ahead + on.kept == on.uses * 3 // 4
    assert on.dropped == 0
    one = statistics_of(nvme, stage3_prefetch_bucket_size=1).units
    assert one.gathered_ahead > 0
    assert off.live_peak_numel <= one.live_peak_numel < on.live_peak_numel


def test_live_elements_stay_within_their_limit(nvme: Path) -> None:
    limit = 300_000
    assert BLOCK_NUMEL < limit < 2 * BLOCK_NUMEL
    assert statistics_of(nvme).units.live_peak_numel > limit
    assert statistics_of(nvme, stage3_max_live_parameters=limit).units.live_peak_numel <= limit


def test_a_block_over_the_limit_is_gathered_part_by_part(nvme: Path) -> None:
    whole = statistics_of(nvme, stage3_prefetch_bucket_size=0)
    parts = statistics_of(nvme, stage3_prefetch_bucket_size=0, stage3_max_live_parameters=BLOCK_NUMEL - 1)
    assert parts.units.uses > whole.units.uses
    # An up projection is half of its block.
    assert parts.units.live_peak_numel < 0.6 * whole.units.live_peak_numel


def test_reuse_saves_reads_for_memory(nvme: Path) -> None:
    near = statistics_of(nvme, stage3_prefetch_bucket_size=1)
    far = statistics_of(nvme, stage3_prefetch_bucket_size=1, stage3_max_reuse_distance=10**9)
    assert near.units.kept == 3  # the head, between forward and backward, in all but the first micro-batch
    assert far.units.kept > near.units.kept
    assert far.units.read_bytes < 0.7 * near.units.read_bytes
    assert far.links["parameter_read"].bytes < 0.7 * near.links["parameter_read"].bytes
    assert far.units.live_peak_numel > near.units.live_peak_numel


def test_what_is_on_disk_is_not_in_memory(nvme: Path) -> None:
    with start(offloaded(nvme), wide_net()) as engine:
        records = engine.training_state.state.records
        small = sum(2 * record.numel for record in records if record.residency is Residency.RESIDENT)
        numel = sum(record.numel for record in records)
        train(engine, 2)
        found = engine.statistics()
        assert found.held.parameters == small < 0.01 * 2 * numel
        assert found.held.resting == 2 * numel - small
        assert sum(record.full.untyped_storage().nbytes() for record in records if not record.is_in_place) == small
        # Shards under 64 KiB are in memory whatever is asked.
        assert found.store.host_bytes < 0.1 * found.store.disk_bytes
        # A block in use, and what the bucket of one block gathers ahead of it.
        assert found.units.live_peak_numel < numel
    bucket = statistics_of(nvme, stage3_prefetch_bucket_size=BLOCK_NUMEL).units
    # The model's own two parameters are in use as long as it is.
    assert bucket.live_peak_numel <= 2 * BLOCK_NUMEL + 7 * 192


def test_a_rank_alone_uses_parameters_where_they_rest_in_host_memory(nvme: Path) -> None:
    with start(offloaded(nvme), wide_net()) as engine:
        train(engine)
        expected = state_of(engine)
    with start(offloaded(nvme, "cpu"), wide_net()) as engine:
        state = engine.training_state.state
        resting = {record.parameter: record.stored_array for record in state.records if record.stored_array is not None}
        seen: dict[str, int] = {}

        def look(module: torch.nn.Module, args: Any) -> None:
            for parameter in module.parameters(recurse=False):
                if parameter in resting:
                    seen[resting[parameter]] = parameter.data_ptr()

        for module in engine.module.modules():
            module.register_forward_pre_hook(look)
        train(engine)
        memory = {name: state.store.memory(name).ctypes.data for name in resting.values()}
        assert {**memory, **seen} == memory  # one parameter is not used
        assert len(seen) == len(memory) - 1
        for parameter in resting:
            with pytest.raises(UsageError, match="outside a forward"):
                parameter.isnan()
        found = engine.statistics()
        assert found.units.read_bytes == 0
        assert "parameter_read" not in found.links
        with zstore.gather(list(resting)):  # values of the caller's own, which outlive the next step
            kept = {name: parameter.detach() for parameter, name in resting.items()}
            assert all(values.data_ptr() != memory[name] for name, values in kept.items())
        assert state_of(engine) == expected


def _peak(rank: int, folder: str) -> tuple[int, int, int]:
    """Return the bytes of a model in fp32, and the peak of memory before and after it was laid out and trained on."""
    start(offloaded(folder), wide_net()).close()  # what is imported and started the first time
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(48)])
    nbytes = sum(p.nbytes for p in model.parameters())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    config = offloaded(folder, stage3_prefetch_bucket_size=1) | {"zstore": {"host_budget_bytes": 24 << 20}}
    engine, *_ = zstore.initialize(model=model, config=config)
    with engine, torch.no_grad():
        for _ in range(2):
            engine(torch.ones(1, 1024, dtype=torch.bfloat16))
    return nbytes, before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_parameters_leave_memory_one_by_one(nvme: Path) -> None:
    ((nbytes, before, after),) = run_ranks(_peak, 1, str(nvme))
    assert nbytes == 192 << 20
    # Buffers, a parameter or two, and what was freed and not given back yet; in 16 bits they would take half of it.
    assert after - before < 0.25 * nbytes


def _read_error(rank: int, folder: str, bad_rank: int, steps_before: int) -> tuple[str, bool]:
    """Return what was raised, and whether the run then went on as one that saw no error."""
    files = FaultyFiles()
    zstore.store.shards.Files = lambda: files  # type: ignore[misc,assignment]
    message = "no error"
    with start(offloaded(folder), wide_net()) as engine:
        train(engine, steps_before)
        if rank == bad_rank:
            files.inject(Fault(kind="read", pattern="*parameter%2Fblocks.2.up*", times=None, error_number=errno.EIO))
        try:
            train(engine, 1)
        except StorageError as error:
            message = "\n".join([str(error), *error.__notes__])
        except RankError as error:
            message = str(error)
        files.heal()
        train(engine, 1)
        found = state_of(engine)
    with start(make_config(3), wide_net()) as engine:
        train(engine, steps_before + 1)
        return message, found == state_of(engine)


@pytest.mark.parametrize(
    ("world_size", "steps_before"),
    [(1, 0), pytest.param(1, 1, marks=pytest.mark.soak), pytest.param(2, 0, marks=pytest.mark.soak), (2, 1)],
)
def test_an_error_of_the_drive_fails_every_rank(nvme: Path, world_size: int, steps_before: int) -> None:
    bad = world_size - 1
    messages, went_on = zip(*run_ranks(_read_error, world_size, str(nvme), bad, steps_before), strict=True)
    assert went_on == (True,) * world_size
    assert "Input/output error" in messages[bad] or "EIO" in messages[bad]
    assert "unit 'blocks.2'" in messages[bad]
    if world_size == 2:
        assert "rank(s) 1 of 2 failed to read the parameters of unit 'blocks.2'" in messages[0]


def _late_read_error(rank: int, folder: str, mode: str, first: int) -> tuple[str, bool, list[str]]:
    """Return what was raised in a step whose headers are looked at late, as on CUDA, whether the state counts as torn, and what
    was changed on this rank."""
    files = FaultyFiles()
    keys = {"zstore": {"step_overlap": mode}, "gradient_accumulation_steps": 1}
    message = "no error"
    with start(offloaded(folder) | keys, wide_net(), _files=files) as engine:
        train(engine, 2)
        hooks, update = engine.training_state.hooks, engine.training_state.update
        hooks.units.fetcher._checks_later = True
        before = engine_digests(engine)
        if rank == 1:
            files.inject(Fault(kind="read", pattern="*parameter%2Fblocks.3.up*", first=first, error_number=errno.EIO))
        try:
            train(engine, 1)
        except (StorageError, RankError) as error:
            message = type(error).__name__
        files.heal()
        torn, update._is_inconsistent = update.torn, False  # the digests are wanted
        after = engine_digests(engine)
    return message, torn, [name for name in after if after[name] != before[name]]


# The step mode, and the read that fails: of the forward, or of the backward.
LATE = [(mode, first) for mode in ("none", "backward") for first in (0, 1)]


def _late_read_errors(rank: int, folder: str) -> list[tuple[str, bool, list[str]]]:
    return [_late_read_error(rank, folder, mode, first) for mode, first in LATE]


def test_nothing_is_updated_from_values_that_could_not_be_read(nvme: Path) -> None:
    for (mode, first), ranks in zip(LATE, zip(*run_ranks(_late_read_errors, 2, str(nvme)), strict=True), strict=True):
        assert [message for message, *_ in ranks] == ["RankError", "StorageError"], (mode, first)
        for _, torn, changed in ranks:
            # Behind the last block there is the norm, whose gradient is final before the block is gathered again; a rank that
            # hears of the failure late may have gone on, and says that its state is a mixture.
            assert not changed or (torn and (mode, first) == ("backward", 1)), (mode, first, changed)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_forward_that_fails_leaves_nothing_old(kind: type[BaseException], nvme: Path, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise kind("in the middle")

    def try_forward() -> None:
        handle = engine.module.blocks[1].register_forward_pre_hook(fail)
        with pytest.raises(kind, match="in the middle"):
            engine(*step_modes.data(0))
        handle.remove()

    def loss() -> float:
        with torch.no_grad():
            return float(engine(*step_modes.data(0)))

    with start(step_modes.config("none", nvme), step_modes.make_model()) as engine:
        step_modes.step(engine)
        engine.save_checkpoint(str(tmp_path))
        before = loss()
        for _ in range(3):
            step_modes.step(engine)
        try_forward()
        engine.load_checkpoint(str(tmp_path))
        assert loss() == before
        engine.backward(engine(*step_modes.data(1)))
        try_forward()
        engine.step()
        step_modes.step(engine)
        assert state_of(engine) == step_modes.expected(3)


def test_shards_spread_over_the_drives(tmp_path: Path) -> None:
    drives = [tmp_path / name for name in ("a", "b", "c")]
    for drive in drives:
        drive.mkdir()
    config = offloaded(drives[0], offload_param={"nvme_path": str(drives[2])})
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = [str(drives[0]), str(drives[1])]
    with start(config, wide_net()) as engine:
        train(engine, 1)
        held = [sum(path.stat().st_size for path in drive.rglob("*.shard")) for drive in drives]
        # State on two drives, as evenly as whole shards allow; parameters on theirs.
        largest = max(path.stat().st_size for path in tmp_path.rglob("*.shard"))
        assert abs(held[0] - held[1]) <= largest
        assert not list(drives[0].rglob("parameter*"))
        assert not list(drives[1].rglob("parameter*"))
        assert {path.name.split("%2F")[0] for path in drives[2].rglob("*.shard")} == {"parameter"}
        spread = {name: at.parent.parent.name for name, at in engine.training_state.state.store.disk_folders().items()}
        engine.save_checkpoint(str(tmp_path / "saved"))
        state = state_of(engine)
    with start(config, wide_net()) as engine:
        again = engine.training_state.state.store.disk_folders()
        assert {name: folder.parent.parent.name for name, folder in again.items()} == spread
        engine.load_checkpoint(str(tmp_path / "saved"))
        assert state_of(engine) == state
    with start(make_config(3), wide_net()) as engine:
        engine.load_checkpoint(str(tmp_path / "saved"))
        assert state_of(engine) == state


def test_an_error_names_the_drive(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    config = offloaded(tmp_path / "good")
    (tmp_path / "file").touch()
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = [str(tmp_path / "good"), str(tmp_path / "file")]
    with pytest.raises(RunFolderError, match=r"one that can be created.*file"):
        start(config, wide_net())
    # The folder on the other drive is free again.
    start(offloaded(tmp_path / "good"), wide_net()).close()
