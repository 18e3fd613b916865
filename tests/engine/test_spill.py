"""Gradients that wait on disk: the bits of those in memory, errors at the next call, and bounded memory."""

from __future__ import annotations

import errno
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
from zstore.engine.zero.exchanges import Exchanges, GradientRules
from zstore.engine.zero.spill import GradientSpill
from zstore.engine.zero.unit_gradients import UnitGradients
from zstore.errors import StorageError
from zstore.io.files import Files
from zstore.io.links import LinkCounters
from zstore.ranks.world import World
from zstore.store import StoreOptions, TensorStore
from zstore.testing.faults import Fault, FaultyFiles, GatedFiles

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
