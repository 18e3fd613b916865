"""Saves behind training: what the updater waits for, what is not written again, and where errors come out."""

import errno
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.process import forget_peak, peak_bytes, resident_bytes
from tests.engine.models import batch, make_net
from tests.engine.runs import make_config, start, state_of, step, whole
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.engine import Engine
from zstore.errors import CheckpointError, RankError, StorageError
from zstore.testing.faults import CallingFiles, Fault, FaultyFiles, GatedFiles
from zstore.testing.ranks import run_ranks

MIB = 2**20


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_an_updater_waits_for_unwritten_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str) -> None:
    held = "optimizer/exp_avg/blocks.1.up.weight"
    files = GatedFiles("write", pattern=f"*/{held}/*")
    with start(make_config(1, tier), _files=files) as engine, files.holding():
        step(engine)
        at_save = state_of(engine)
        ticket = engine.save_checkpoint(str(tmp_path), wait=False)
        files.arrived(1)
        memory = engine.training_state.state.store._tiers[held]
        assert memory.name == ("device" if tier == "none" else "host")
        with memory._pin_released:  # type: ignore[attr-defined]
            pins = memory._pins  # type: ignore[attr-defined]
            assert memory._pin_released.wait_for(  # type: ignore[attr-defined]
                lambda: [name for name, count in pins.items() if count] == [held], 30
            )
        waited = []
        wait = memory._wait_for_unpinning  # type: ignore[attr-defined]

        def notice(name: str) -> None:
            waited.append(name)
            files.open_gate()
            wait(name)

        monkeypatch.setattr(memory, "_wait_for_unpinning", notice)
        assert not ticket.done()
        step(engine)  # forward and backward while it is written; the update changes all but one at once
        assert waited == [held]
        ticket.wait()
        after = state_of(engine)
        engine.load_checkpoint(str(tmp_path))
        assert state_of(engine) == at_save
        step(engine)
        assert state_of(engine) == after


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Bytes; a growth is what a process had resident at its peak beyond what it had before."""

    save: int
    load: int
    pool: int
    """The most that the save had of the pool."""
    unused: int
    """What the budget leaves beside the pool and the state."""
    state: int
    largest: int
    """Of the state's arrays."""


def _growth(rank: int, folder: str, tier: str, budget_mib: int) -> Growth | None:
    """Save and load, and return what was found; None where the kernel does not begin a peak anew."""
    config = make_config(1, tier, zstore={"host_budget_bytes": budget_mib * MIB})
    with start(config, make_net(vocab=120_000)) as engine:
        step(engine)
        before = resident_bytes()
        if not forget_peak():
            return None
        engine.save_checkpoint(folder)
        save = peak_bytes() - before
        store = engine.training_state.state.store
        pool = store.statistics().pool_peak_bytes
        before = resident_bytes()
        forget_peak()
        engine.load_checkpoint(folder)
        load = peak_bytes() - before
        sizes = [array.spec.nbytes for array in open_checkpoint(folder).arrays.values()]
        unused = store.budget.free_bytes or 0
        return Growth(save=save, load=load, pool=pool, unused=unused, state=sum(sizes), largest=max(sizes))


@pytest.mark.parametrize(("tier", "budget_mib"), [("none", 16), ("cpu", 176)])
def test_a_process_does_not_grow_by_copies(tmp_path: Path, tier: str, budget_mib: int) -> None:
    (found,) = run_ranks(_growth, 1, str(tmp_path), tier, budget_mib)
    if found is None:
        pytest.skip("the kernel does not begin the peak of a process anew")
    # What is made once comes on top: records, metadata, modules that are imported, huge pages that are used in part.
    assert found.pool <= budget_mib * MIB // 2
    assert found.save <= found.pool + 12 * MIB, found
    assert found.load <= found.unused + 8 * MIB, found
    assert found.state > 3 * found.largest > 72 * MIB


class Adapted(torch.nn.Module):
    """A frozen model with a few parameters that are trained."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.base = make_net(seed)
        self.base.requires_grad_(False)
        self.gain = torch.nn.Parameter(torch.ones(1))

    def forward(self, ids: torch.Tensor) -> Any:
        return self.base(ids) * self.gain


def linked(folder: Path, tag: str, rank: int = 0) -> dict[str, bool]:
    with open_checkpoint(folder, tag) as reader:
        return {entry.array: entry.linked for entry in reader.manifest(rank).shards if "model/" in entry.array}


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_frozen_parameters_are_written_once(tmp_path: Path, nvme: Path, tier: str) -> None:
    ckpt = tmp_path / "ckpt"
    with start(make_config(3, tier, nvme, tier, scheduler=None), Adapted()) as engine:
        step(engine)
        first = engine.save_checkpoint(str(ckpt), "one").wait()
        step(engine)
        second = engine.save_checkpoint(str(ckpt), "two").wait()
        # The trained scalar with two slots, and a buffer: a file of two blocks each.
        assert second.written_bytes == 4 * 8192 < 0.2 * first.written_bytes
        assert second.linked_bytes + second.written_bytes == first.linked_bytes + first.written_bytes
        assert [name for name, is_linked in linked(ckpt, "two").items() if not is_linked] == ["model/gain"]
        step(engine)
        expected = state_of_adapted(engine)
    with start(make_config(3, tier, nvme, tier, scheduler=None), Adapted(seed=3)) as engine:
        engine.load_checkpoint(str(ckpt), "two")
        step(engine)
        assert state_of_adapted(engine) == expected
        # The files of the checkpoint that was loaded are known, too.
        engine.save_checkpoint(str(ckpt), "three")
        assert [name for name, is_linked in linked(ckpt, "three").items() if not is_linked] == ["model/gain"]
    assert whole(ckpt) == ["one", "two", "three"]


def state_of_adapted(engine: Engine) -> dict[str, float]:
    names = [record.name for record in engine.training_state.state.records]
    return {n: float(value.double().sum()) for n in names if (value := engine.get_full_parameter(n)) is not None}


def test_a_frozen_parameter_that_the_script_changes_is_written(tmp_path: Path) -> None:
    with start(make_config(0, scheduler=None), Adapted()) as engine:
        engine.save_checkpoint(str(tmp_path), "one")
        engine.module.base.mix.data[0, 0, 0] = 7.0
        engine.save_checkpoint(str(tmp_path), "two")
    found = linked(tmp_path, "two")
    assert [name for name, is_linked in found.items() if not is_linked] == ["model/base.mix"]
    with open_checkpoint(tmp_path, "two") as reader:
        assert float(reader.read_array("model/base.mix")[0, 0, 0]) == 7.0


def _frozen_on_ranks(rank: int, folder: str, stage: int) -> tuple[set[str], set[str]]:
    """Return the shards of the last save that were linked, and that were written."""
    config = make_config(stage, scheduler=None, zstore={"keep": 1})
    with start(config, Adapted()) as engine:
        for number in range(3):
            step(engine)
            # The former one goes as soon as the new one is committed.
            engine.save_checkpoint(folder, f"at-{number}", wait=False)
        engine.wait_for_checkpoint()
    found = linked(Path(folder), "at-2", rank)
    return {name for name in found if found[name]}, {name for name in found if not found[name]}


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.soak), 3])
def test_ranks_link_their_shards_while_older_checkpoints_go(tmp_path: Path, stage: int) -> None:
    found = run_ranks(_frozen_on_ranks, 2, str(tmp_path), stage)
    with open_checkpoint(tmp_path) as reader:
        shared = {name for name, array in reader.arrays.items() if array.grid.num_shards > 1}
    # Arrays under 64 KiB come in pieces of the ranks, which rank 0 puts together anew.
    for is_linked, is_written in found:
        assert is_linked >= {name for name in shared if name.startswith("model/base.")} != set()
        assert not is_written & shared
    assert whole(tmp_path) == ["at-2"]


def test_another_file_system_is_pinned_at_once_copied_behind_and_read(nvme: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == nvme.stat().st_dev:
        pytest.skip("needs /dev/shm on a file system of its own")
    files = GatedFiles("allocate", pattern="/dev/shm/*")
    with tempfile.TemporaryDirectory(dir=memory) as ckpt:
        config = make_config(3, "nvme", nvme, zstore={"step_overlap": "none"})
        with start(config, _files=files) as engine, files.holding():
            step(engine)
            at_save = state_of(engine)
            ticket = engine.save_checkpoint(ckpt, wait=False)
            files.arrived(1)
            # What rests in memory is copied first, and changed again when it is: the forward needs none of that.
            loss = engine(*batch(engine.global_steps, 0, 0))
            engine.backward(loss)
            engine.step()
            assert not ticket.done()
            files.open_gate()
            engine.backward(engine(*batch(engine.global_steps, 1, 0)))
            engine.step()
            assert ticket.wait().num_linked == 0
            after = state_of(engine)
            engine.load_checkpoint(ckpt)
            assert engine.load_report.linked_bytes == 0
            store = engine.training_state.state.store
            on_disk = sum(store.local(name).nbytes for name in store.names() if store.tier(name).name == "disk")
            assert engine.load_report.read_bytes > on_disk > 0
            assert state_of(engine) == at_save
            step(engine)
            assert state_of(engine) == after


def _fails_behind(rank: int, folder: str) -> list[str]:
    files = FaultyFiles()
    seen: list[str] = []
    engine = start(make_config(1), _files=files)
    with engine:
        for where in ("wait", "save"):
            step(engine)
            if rank == 1:
                files.inject(Fault(kind="fsync", pattern="*.tmp-*/model/*", error_number=errno.EIO))
            engine.save_checkpoint(folder, f"lost-{where}", wait=False)
            step(engine)
            try:
                if where == "wait":
                    engine.wait_for_checkpoint()
                else:
                    engine.save_checkpoint(folder, "next")
            except (StorageError, RankError, CheckpointError) as error:
                seen.append(f"{type(error).__name__}: {error}")
            files.heal()
        step(engine)
        engine.save_checkpoint(folder, "good", wait=False)  # completed by the clean exit
    return seen


def test_errors_of_a_save_behind_come_out_on_every_rank(tmp_path: Path) -> None:
    for errors in run_ranks(_fails_behind, 2, str(tmp_path)):
        assert len(errors) == 2, errors
        assert all("Input/output error" in text for text in errors), errors
    assert [info.tag for info in tags(tmp_path)] == ["good"]


def save_interrupted(engine: Engine, folder: Path) -> None:
    engine.save_checkpoint(str(folder), "under way")
    while True:  # the signal may come a moment later; just before a pause() it would not be seen
        time.sleep(0.1)


@pytest.mark.parametrize("moment", ["rank-00000", "zstore.json", "latest"])
def test_ctrl_c_in_a_save_leaves_the_checkpoint_before_it_or_the_new_one(tmp_path: Path, moment: str) -> None:
    def interrupt(kind: str, path: Path) -> None:
        if armed and moment in path.name:
            armed.clear()
            os.kill(os.getpid(), signal.SIGINT)

    armed: list[int] = []
    with start(make_config(1), _files=CallingFiles(interrupt)) as engine:
        step(engine)
        engine.save_checkpoint(str(tmp_path), "before")
        step(engine)
        armed.append(1)
        with pytest.raises(KeyboardInterrupt):
            save_interrupted(engine, tmp_path)
        # Whoever goes on, does so with whole checkpoints: the save was not given up.
        engine.wait_for_checkpoint()
        step(engine)
        engine.save_checkpoint(str(tmp_path), "after")
    assert whole(tmp_path) == ["before", "under way", "after"]
