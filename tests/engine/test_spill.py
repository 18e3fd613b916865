"""Gradients that wait on disk: the bits of those in memory, errors at the next call, and bounded memory."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from zstore.engine.params.record import ParameterRecord, make_record
from zstore.engine.params.sharding import Sharding
from zstore.engine.params.units import Unit
from zstore.engine.runtime.device import Streams, Transfers
from zstore.engine.zero import spill as spill_module
from zstore.engine.zero import unit_gradients
from zstore.engine.zero.collectives import Reduction
from zstore.engine.zero.exchanges import Exchanges, GradientRules
from zstore.engine.zero.norm import SumOfSquares, sum_of_squares
from zstore.engine.zero.spill import GradientSpill
from zstore.engine.zero.unit_gradients import UnitGradients
from zstore.errors import StorageError
from zstore.io.files import Files
from zstore.io.links import LinkCounters
from zstore.ranks.world import World
from zstore.store import StoreOptions, TensorStore
from zstore.testing.faults import Fault, FaultyFiles, GatedFiles
from zstore.testing.ranks import run_ranks

ROWS, COLS = 300, 257
"""150 KB of bf16, so that a gradient rests on disk, in chunks of which the last is not full."""


@contextmanager
def opened(
    folder: Path, files: Files | None = None, count: int = 3, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[GradientSpill, list[ParameterRecord]]]:
    """Give a spill of so many parameters, and their records."""
    with TensorStore(StoreOptions(run_path=folder), files=files) as store:
        arrays: dict[ParameterRecord, str] = {}
        for number in range(count):
            parameter = torch.nn.Parameter(torch.zeros(ROWS, COLS, dtype=torch.bfloat16))
            sharding = Sharding.of_stage(3, world_size, offloads_parameters=True)
            record = make_record(f"p{number}", (), parameter, group=0, sharding=sharding, rank=rank)
            spec = record.spec("gradient", torch.bfloat16)
            store.create(spec, grid=record.state_grid, shard=rank, tier="disk")
            assert store.tier_of(spec.name) == "disk"
            arrays[record] = spec.name
        spill = GradientSpill(store, arrays, Transfers(Streams(), store.links))
        try:
            yield spill, list(arrays)
        finally:
            spill.close()


def rows(seed: int) -> torch.Tensor:
    return torch.randn(ROWS * COLS, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def kept(spill: GradientSpill, record: ParameterRecord) -> torch.Tensor:
    found = spill.owned(record)
    assert found is not None
    return found


def test_what_is_kept_has_the_bits_of_a_sum_in_memory(nvme: Path) -> None:
    with opened(nvme) as (spill, records):
        wanted = [rows(number) for number in range(len(records))]
        for record, values in zip(records, wanted, strict=True):
            assert record in spill
            assert spill.owned(record) is None
            assert spill.squares(record) is None
            spill.add(record, values.clone(), torch.bfloat16)
        for turn in (10, 20):
            for number in (2, 0):
                spill.add(records[number], rows(turn + number), torch.bfloat16)
                wanted[number].add_(rows(turn + number))  # in bf16, as autograd accumulates
        for record, values in zip(records, wanted, strict=True):
            assert torch.equal(kept(spill, record), values)
            assert spill.squares(record) == sum_of_squares(values)


def test_a_sum_in_a_wider_type_gets_a_wider_array_for_good(nvme: Path) -> None:
    with opened(nvme, count=2) as (spill, (one, other)):
        wanted = torch.zeros(ROWS * COLS)
        for turn in range(3):
            spill.add(one, rows(turn), torch.bfloat16 if turn == 0 else torch.float32)
            wanted += rows(turn)
        assert torch.equal(kept(spill, one), wanted)
        assert spill.squares(one) == sum_of_squares(wanted)
        arrays, store = spill._arrays, spill._store
        assert [store.spec(arrays[record]).dtype for record in (one, other)] == ["float32", "bfloat16"]
        assert sorted(store.names()) == sorted(arrays.values())
        # In it the narrower sum of the next step has the bits of its own type.
        spill.drop()
        spill.add(one, rows(5), torch.bfloat16)
        spill.add(one, rows(6), torch.bfloat16)
        assert torch.equal(kept(spill, one).to(torch.bfloat16), rows(5).add_(rows(6)))
        assert spill.squares(one) == sum_of_squares(rows(5).add_(rows(6)))
        # And rows of a wider type are rounded to the one that is asked for.
        spill.drop()
        spill.add(other, rows(7).float() * 1.001, torch.bfloat16)
        assert torch.equal(kept(spill, other), (rows(7).float() * 1.001).to(torch.bfloat16))


@pytest.mark.parametrize("call", ["drain", "owned", "add again"])
def test_the_error_of_a_write_is_raised_by_the_next_call(call: str, nvme: Path) -> None:
    files = FaultyFiles()
    with opened(nvme, files) as (spill, (one, other, _)):
        files.inject(Fault(kind="write", pattern="*gradient*", error_number=errno.ENOSPC))
        spill.add(one, rows(1), torch.bfloat16)
        if call == "add again":
            spill.add(one, rows(2), torch.bfloat16)
        with pytest.raises(StorageError, match="No space left"):
            (spill.owned(one) if call == "owned" else spill.drain())
        spill.drop()
        spill.add(one, rows(3), torch.bfloat16)
        spill.add(other, rows(4), torch.bfloat16)
        assert torch.equal(kept(spill, one), rows(3))
        assert torch.equal(kept(spill, other), rows(4))


def test_what_is_on_its_way_is_bounded(monkeypatch: pytest.MonkeyPatch, nvme: Path) -> None:
    nbytes = ROWS * COLS * 2
    monkeypatch.setattr(spill_module, "_MOST_UNDER_WAY_BYTES", 2 * nbytes)
    files = GatedFiles("write", pattern="*gradient*")
    files.open_gate()
    with opened(nvme, files) as (spill, records), files.holding():
        files.close_gate()
        for record in records[:2]:  # these need not wait
            spill.add(record, rows(1), torch.bfloat16)
        wait = spill._under_way[0][0].wait
        waited = []

        def opening() -> None:
            waited.append(True)
            files.open_gate()
            wait()

        spill._under_way[0][0].wait = opening  # type: ignore[method-assign, assignment]
        spill.add(records[2], rows(1), torch.bfloat16)  # without the gate's opening this would not return
        assert waited == [True]
        for record in records:
            assert torch.equal(kept(spill, record), rows(1))


def test_sums_and_their_squares_are_taken_behind_the_backward(monkeypatch: pytest.MonkeyPatch, nvme: Path) -> None:
    threads = set()

    def squares(values: torch.Tensor) -> float:
        threads.add(threading.current_thread())
        return sum_of_squares(values)

    monkeypatch.setattr(spill_module, "sum_of_squares", squares)
    files = GatedFiles("write", pattern="*gradient*")
    files.open_gate()
    with opened(nvme, files) as (spill, (one, *_)), files.holding():
        files.close_gate()
        for seed in (1, 2):  # neither waits for the disk
            spill.add(one, rows(seed), torch.bfloat16)
        files.open_gate()
        assert torch.equal(kept(spill, one), rows(1).add_(rows(2)))
        assert spill.squares(one) == sum_of_squares(rows(1).add_(rows(2)))
    assert threads
    assert threading.current_thread() not in threads


def test_an_error_within_the_backward_waits_for_the_step(nvme: Path) -> None:
    """One rank's full disk must not leave the others alone in their backward."""
    files = FaultyFiles()
    with opened(nvme, files) as (spill, records):
        unit = Unit("all", (torch.nn.Module(),), tuple(records), tuple(records))
        rules = GradientRules(bucket_numel=10**9, spills=True, exchanges=Exchanges(world=World()))
        gradients = UnitGradients([unit], [], World(), rules, Transfers(Streams(), LinkCounters()), spill=spill)
        for faulty in (True, False):
            if faulty:
                files.inject(Fault(kind="write", pattern="*gradient*", error_number=errno.ENOSPC))
            for _ in range(2):
                gradients.start_backward(last=True)
                loss = sum((record.parameter.float() * (n + 1)).sum() for n, record in enumerate(records))
                loss.backward()  # type: ignore[union-attr]
                gradients.end_backward()
            if faulty:
                with pytest.raises(StorageError, match="No space left") as caught:
                    gradients.reduce()
                assert "a gradient that waits on disk" in str(caught.value.__notes__)
            else:
                gradients.reduce()
                for number, record in enumerate(records):
                    assert torch.equal(kept(spill, record), torch.full((ROWS * COLS,), 2.0 * (number + 1)).bfloat16())
            gradients.drop()


class LastingReduction(Reduction):
    """One that is under way until somebody waits for it."""

    def done(self) -> bool:
        return False


class DeviceSquares(SumOfSquares):
    """Takes the sum when it is begun, as a device does."""

    def __init__(self, values: torch.Tensor, transfers: Transfers, *, one_by_one: bool) -> None:
        super().__init__(values, transfers, one_by_one=one_by_one)
        self.value()


def _in_two_parts(rank: int, folder: str, spills: bool) -> None:
    unit_gradients.SumOfSquares = DeviceSquares  # type: ignore[misc]
    with opened(Path(folder) / str(rank), count=1, rank=rank, world_size=2) as (spill, (record,)):
        world = World.current()
        unit = Unit("all", (torch.nn.Module(),), (record,), (record,))
        exchanges = Exchanges(world=world, reduce=LastingReduction)
        rules = GradientRules(bucket_numel=10**9, spills=spills, squares_at_once=True, exchanges=exchanges)
        transfers, kept_by = Transfers(Streams(), LinkCounters()), spill if spills else None
        gradients = UnitGradients([unit], [], world, rules, transfers, spill=kept_by)
        gradients.comes_in_parts = False  # so that its first part is taken for all of it
        factors = torch.arange(ROWS * COLS).remainder(7).view(ROWS, COLS)
        gradients.start_backward(last=True)
        for part in (1, 2):
            (record.parameter * factors * part).sum().backward()
            if part == 1 and not spills and gradients._reductions is not None:
                gradients._reductions.drain()
                gradients._d2h.drain()
        gradients.end_backward()
        gradients.reduce()
        owned = gradients.owned(record)
        assert owned is not None
        assert torch.equal(owned, (3 * factors.view(-1)[slice(*record.owned_range)]).bfloat16())
        assert gradients.squares(record) in (None, sum_of_squares(owned))
        gradients.close()


@pytest.mark.parametrize("spills", [True, False])
def test_a_late_part_is_added_to_one_that_is_still_being_reduced(spills: bool, tmp_path: Path) -> None:
    run_ranks(_in_two_parts, 2, str(tmp_path), spills)
