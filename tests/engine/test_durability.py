"""Step snapshots without kills: what they hold, which one a resume takes, what they cost, and what is said when one fails."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.runs import make_config, start, state_of, step, whole
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.engine import Engine
from zstore.engine.checkpoint.pending import Pending
from zstore.engine.checkpoint.snapshot_order import SnapshotOrder
from zstore.engine.config.config import load_config
from zstore.errors import ConfigError, DiskFullError, RankError, StorageError, UsageError
from zstore.io.files import Files
from zstore.io.pool import run_in_thread
from zstore.io.queue import Ticket
from zstore.journal.names import run_of
from zstore.testing.faults import Fault, FaultyFiles, GatedFiles
from zstore.testing.ranks import run_ranks
from zstore.tools.inspect import inspect_command

SHM = Path("/dev/shm")
DURABLE = {"zstore": {"durability": "step"}}


def steps_of(nvme: Path) -> Path:
    return nvme / "zstore-run" / "steps"


def abandon(engine: Engine) -> None:
    """Leave an engine as a kill does, but for what it holds locked: its snapshots stay."""
    engine.wait_for_checkpoint()
    engine.steps._folder = None
    engine.close()


def trained(nvme: Path, steps: int, *, tier: str = "nvme", files: Files | None = None, **keys: Any) -> Engine:
    engine = start(make_config(3, tier, nvme, **(DURABLE | keys)), _files=files)
    for _ in range(steps):
        step(engine)
    return engine


# -- what is taken --------------------------------------------------------------------------------------------------


def test_a_snapshot_is_a_checkpoint_of_the_last_step(nvme: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with trained(nvme, 3) as engine:
        assert engine.durable_step in (2, 3)
        engine.wait_for_checkpoint()
        assert engine.durable_step == 3
        expected = state_of(engine)
        (found,) = tags(steps_of(nvme))
        assert (found.record.step, found.record.run) == (3, engine.training_state.run_id)
        abandon(engine)
    assert len(whole(steps_of(nvme))) == 1
    inspect_command(steps_of(nvme))
    assert found.tag in capsys.readouterr().out
    with start(make_config(1, "none")) as other:  # another stage and tier
        path, state = other.load_checkpoint(str(steps_of(nvme)))
        assert (path, state) == (str(found.path), {})
        assert state_of(other)["scalars"] == expected["scalars"]
        assert state_of(other)["model/embed.weight"] == expected["model/embed.weight"]


def test_what_rests_on_disk_is_linked_and_not_written(nvme: Path) -> None:
    with trained(nvme, 1) as engine:
        engine.wait_for_checkpoint()
        before = engine.statistics().links["checkpoint_write"].bytes
        step(engine)
        engine.wait_for_checkpoint()
        written = engine.statistics().links["checkpoint_write"].bytes - before
        with open_checkpoint(steps_of(nvme)) as reader:
            entries = reader.manifest(0).shards
    linked = sum(entry.file_bytes for entry in entries if entry.linked)
    copied = sum(entry.file_bytes for entry in entries if not entry.linked)
    assert linked > 3 * 1203 * 56 * 4
    assert written <= copied
    assert engine.statistics().links["checkpoint_write"].stall_s["step snapshot"] > 0


@pytest.mark.skipif(not SHM.is_dir(), reason="needs a second file system")
def test_on_another_drive_snapshots_are_copies(nvme: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory(dir=SHM) as other:
        with trained(nvme, 3, zstore={"durability": "step", "durability_path": other}) as engine:
            expected = state_of(engine)
            abandon(engine)
        assert caplog.text.count("were copied behind training") == 1  # and not at every step
        with trained(nvme, 0, zstore={"durability": "step", "durability_path": other}) as engine:
            engine.load_checkpoint(other)
            assert state_of(engine) == expected


def test_one_snapshot_is_kept_and_accumulation_is_not_snapshot(nvme: Path) -> None:
    with trained(nvme, 0) as engine:
        for micro in range(4):
            loss = engine(torch.arange(24).view(2, 12) + micro)
            engine.backward(loss)
            engine.step()
            engine.wait_for_checkpoint()
            assert [info.record.step for info in tags(steps_of(nvme))] == [[], [1], [1], [2]][micro]


def test_nothing_is_taken_unless_asked_for(nvme: Path) -> None:
    with start(make_config(3, "nvme", nvme)) as engine:
        step(engine)
        assert engine.durable_step is None
        assert not steps_of(nvme).exists()


def test_a_wait_for_a_snapshot_is_counted_once(nvme: Path) -> None:
    with trained(nvme, 1) as engine:
        engine.wait_for_checkpoint()
        before_s, began_s = engine.saves_s()["step snapshot"], time.perf_counter()
        for _ in range(5):
            engine.steps.take()  # it waits for the one before, as after a step that was skipped
        assert engine.saves_s()["step snapshot"] - before_s <= time.perf_counter() - began_s


def test_a_snapshot_that_ctrl_c_met_at_its_beginning_is_waited_for() -> None:
    order: SnapshotOrder[Ticket[None]] = SnapshotOrder(pending=Pending())

    def start() -> Ticket[None]:
        signal.raise_signal(signal.SIGINT)
        return run_in_thread(lambda: None, "snapshot")

    with pytest.raises(KeyboardInterrupt):
        order.begin(1, start)
    assert order.committed_step is None
    order.complete()
    assert order.committed_step == 1


def test_the_folder_of_the_last_snapshot_but_one_is_used_again(nvme: Path, tmp_path: Path) -> None:
    def written() -> dict[str, Path]:
        (info,) = tags(steps_of(nvme))
        with open_checkpoint(info.path) as reader:
            entries = reader.manifest(0).shards
            return {e.array: info.path / reader.array(e.array).shard_file(e.shard) for e in entries if not e.linked}

    with trained(nvme, 0) as engine:

        def take() -> None:
            step(engine)
            engine.wait_for_checkpoint()
            assert len(whole(steps_of(nvme))) == 1

        inodes: list[dict[str, int]] = []
        for _ in range(5):
            take()
            inodes.append({name: path.stat().st_ino for name, path in written().items()})
        for name in inodes[4]:  # what never changes is linked after the first
            assert inodes[0][name] == inodes[2][name] == inodes[4][name] != inodes[1][name] == inodes[3][name]

        kept = tmp_path / "kept"
        os.link(written()["optimizer/exp_avg/blocks.0.up.weight"], kept)
        before = kept.read_bytes()
        for _ in range(4):
            take()
        assert kept.read_bytes() == before  # what has another name is not written again
        for state in ({"a": torch.ones(3)}, {"a": torch.ones(3)}, {"a": torch.ones(4)}, {}, {}):  # other arrays
            engine.step_client_state = state
            take()
            take()
        engine.save_checkpoint(str(tmp_path / "ckpt"))
    assert [path.name for path in steps_of(nvme).iterdir() if run_of(path.name) is None] == ["latest"]


# -- what a resume takes --------------------------------------------------------------------------------------------


def test_the_newer_of_snapshot_and_checkpoint_is_loaded(nvme: Path, tmp_path: Path) -> None:
    ckpt = str(tmp_path / "ckpt")
    with trained(nvme, 0) as engine:
        assert engine.load_checkpoint(ckpt) == (None, {})
        step(engine)
        abandon(engine)
    with trained(nvme, 0) as engine:  # before the first save
        path, _ = engine.load_checkpoint(ckpt)
        assert path is not None
        assert path.startswith(str(steps_of(nvme)))
        step(engine)
        engine.save_checkpoint(ckpt, client_state={"saved": True})
        abandon(engine)
    with trained(nvme, 0) as engine:  # the checkpoint, of the same step
        assert engine.load_checkpoint(ckpt) == (f"{ckpt}/step-00000002", {"saved": True})
        step(engine)
        expected = state_of(engine)
        abandon(engine)
    with trained(nvme, 0) as engine:
        engine.load_checkpoint(ckpt)
        assert state_of(engine) == expected
        engine.load_checkpoint(ckpt, "step-00000002")  # what is named is loaded
        assert engine.global_steps == 2
        engine.load_checkpoint(ckpt, load_module_only=True)
        assert engine.global_steps == 2
    with trained(nvme, 0) as engine:
        step(engine)
        engine.load_checkpoint(f"{ckpt}/step-00000002")
        assert engine.global_steps == 2


def test_a_later_snapshot_counts_though_an_earlier_save_was_committed_after_it(nvme: Path, tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    files = GatedFiles("rename", pattern=f"{ckpt}/*")
    with trained(nvme, 1, files=files) as engine, files.holding():
        engine.save_checkpoint(str(ckpt), wait=False)
        files.arrived(1)
        for _ in range(2):
            step(engine)
        engine.steps.order.complete()
        files.open_gate()
        engine.wait_for_checkpoint()
        expected = state_of(engine)
        abandon(engine)
    with trained(nvme, 0) as engine:
        path, _ = engine.load_checkpoint(str(ckpt))
        assert path is not None
        assert path.startswith(str(steps_of(nvme)))
        assert engine.global_steps == 3
        assert state_of(engine) == expected


def test_a_run_does_not_take_anothers_snapshot(nvme: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with trained(nvme, 0) as engine:
        engine.load_checkpoint(str(tmp_path / "one"))
        step(engine)
        step(engine)
        abandon(engine)
    caplog.clear()
    with trained(nvme, 0) as engine:
        assert engine.load_checkpoint(str(tmp_path / "two")) == (None, {})
        step(engine)
        assert "holds step 2 of earlier runs" in caplog.text
        engine.save_checkpoint(str(tmp_path / "two"))
    # The run that ended well needs none any more; the other's is all that there is of it.
    assert [info.record.step for info in tags(steps_of(nvme))] == [2]
    with trained(nvme, 0) as engine:
        assert engine.load_checkpoint(str(tmp_path / "one"))[0] is not None
        assert engine.global_steps == 2


def test_what_a_script_remembers_comes_back(nvme: Path, tmp_path: Path) -> None:
    remembered = {"epoch": 0, "best": torch.zeros(2)}
    with trained(nvme, 0) as engine:
        engine.load_checkpoint(str(tmp_path / "ckpt"))
        engine.step_client_state = remembered
        step(engine)
        remembered["epoch"] = 1
        step(engine)
        remembered["epoch"] = 2
        abandon(engine)
    with trained(nvme, 0) as engine:
        _, state = engine.load_checkpoint(str(tmp_path / "ckpt"))
        assert state["epoch"] == 1
        assert state["best"].tolist() == [0, 0]
        engine.step_client_state = lambda: {"epoch": engine.global_steps + 10}
        step(engine)
        abandon(engine)
    with open_checkpoint(steps_of(nvme)) as reader:
        assert reader.record.state["client_state"] == {"epoch": 13}


def test_a_snapshot_of_before_a_power_cut_counts_where_it_is_whole(
    nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = str(tmp_path / "ckpt")
    with trained(nvme, 1) as engine:
        engine.save_checkpoint(ckpt)
        step(engine)
        abandon(engine)
    monkeypatch.setattr("zstore.engine.checkpoint.snapshot_folder.boot_id", lambda: "another")
    with trained(nvme, 0) as engine:
        engine.load_checkpoint(ckpt)
        assert engine.global_steps == 2
        abandon(engine)
    (snapshot,) = tags(steps_of(nvme))
    damaged = next(path for path in snapshot.path.rglob("optimizer/**/c.*") if path.stat().st_size > 4096)
    damaged.chmod(0o644)
    with damaged.open("r+b") as file:  # the size is there, the data is not
        file.seek(4096)
        file.write(bytes(damaged.stat().st_size - 4096))
    with trained(nvme, 0) as engine:
        engine.load_checkpoint(ckpt)
        assert engine.global_steps == 1
    assert "is incomplete, as after a power cut" in caplog.text


def test_a_folder_whose_latest_is_missing_or_wrong(nvme: Path, tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    with trained(nvme, 1, zstore={}) as engine:
        engine.save_checkpoint(str(ckpt))
        step(engine)
        engine.save_checkpoint(str(ckpt))
        for latest in (None, "step-00000001\n", "nonsense\n", ""):
            (ckpt / "latest").unlink(missing_ok=True)
            if latest is not None:
                (ckpt / "latest").write_text(latest)
            assert engine.load_checkpoint(str(ckpt))[0] == str(ckpt / "step-00000002")
        shutil.rmtree(ckpt / "step-00000002")  # half of the newest is none
        (ckpt / "latest").write_text("step-00000002\n")
        assert engine.load_checkpoint(str(ckpt))[0] == str(ckpt / "step-00000001")


def test_a_snapshot_of_two_ranks_loads_on_one(nvme: Path, tmp_path: Path) -> None:
    arguments = (str(nvme), str(tmp_path / "ckpt"))
    before = run_ranks(_two_ranks, 2, *arguments)
    assert before[0] == before[1] == 2
    with trained(nvme, 0, gradient_accumulation_steps=4) as engine:
        _, state = engine.load_checkpoint(str(tmp_path / "ckpt"))
        assert state["best"].tolist() == [1, 1, 1]
        assert engine.global_steps == 2
        assert engine.train_batch_size() == 8
        step(engine)
        engine.wait_for_checkpoint()
        assert [info.record.world_size for info in tags(steps_of(nvme))] == [1]


def _two_ranks(rank: int, nvme: str, ckpt: str) -> int | None:
    engine = start(make_config(3, "nvme", nvme, **DURABLE))
    engine.load_checkpoint(ckpt)
    if rank == 0:  # whose counts
        engine.step_client_state = {"best": torch.ones(3)}
    for _ in range(2):
        step(engine)
    abandon(engine)
    return engine.durable_step


# -- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.fixture
def faults() -> FaultyFiles:
    return FaultyFiles()


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_a_snapshot_that_fails_is_an_error_of_the_next_step_which_changes_nothing(
    nvme: Path, faults: FaultyFiles, overlap: str
) -> None:
    keys = {"zstore": {"durability": "step", "step_overlap": overlap}}
    with trained(nvme, 2, files=faults, **keys) as engine:
        engine.wait_for_checkpoint()
        faults.inject(Fault(kind="link", error_number=errno.ENOSPC, times=None))
        faults.inject(Fault(kind="write", pattern="*/steps/*", error_number=errno.ENOSPC, times=None))
        step(engine)
        expected = state_of(engine)
        with pytest.raises(DiskFullError, match="No space left") as caught:
            step(engine)
        assert "the snapshot of step 3" in "".join(caught.value.__notes__)
        assert [info.record.step for info in tags(steps_of(nvme))] == [2]
        assert {name: value for name, value in state_of(engine).items() if name != "counters"} == {
            name: value for name, value in expected.items() if name != "counters"
        }
        faults.heal()
        engine.load_checkpoint(str(steps_of(nvme)))
        step(engine)
        assert state_of(engine) == expected


def test_a_full_disk_in_an_update_leaves_the_step_before(nvme: Path, faults: FaultyFiles) -> None:
    with trained(nvme, 2, files=faults) as engine:
        engine.wait_for_checkpoint()
        expected = state_of(engine)
        faults.inject(Fault(kind="write", pattern="*/rank-00000/*", error_number=errno.ENOSPC, times=None))
        with pytest.raises(DiskFullError):
            step(engine)
        faults.heal()
        engine.load_checkpoint(str(steps_of(nvme)))
        assert state_of(engine) == expected


def test_client_state_that_cannot_be_stored_is_an_error_of_the_step(nvme: Path) -> None:
    with trained(nvme, 1) as engine:
        engine.step_client_state = {"what": object()}
        with pytest.raises(UsageError, match=r"client_state.*\['what'\] is a builtins.object"):
            step(engine)
        engine.step_client_state = {}
        step(engine)
        engine.wait_for_checkpoint()
        assert engine.durable_step == 3


def test_a_failure_on_one_rank_is_raised_on_both(nvme: Path) -> None:
    first, second = run_ranks(_one_fails, 2, str(nvme), timeout_s=60)
    assert first in (["RankError"], ["CheckpointError"])
    assert second == ["DiskFullError"]
    assert [info.record.step for info in tags(steps_of(nvme))] == [1]


def _one_fails(rank: int, nvme: str) -> list[str]:
    files = FaultyFiles()
    engine = start(
        make_config(1, "cpu", zstore={"durability": "step", "durability_path": str(steps_of(Path(nvme)))}), _files=files
    )
    step(engine)
    engine.wait_for_checkpoint()
    if rank == 1:
        files.inject(Fault(kind="write", error_number=errno.ENOSPC, times=None))
    step(engine)
    found: list[str] = []
    try:
        step(engine)
    except Exception as error:
        found.append(type(error).__name__)
    engine.close()
    return found


@pytest.mark.parametrize("made", [(), (0,), (0, 1)])
@pytest.mark.parametrize("named", [True, False])
def test_a_folder_that_ranks_do_not_share_is_refused(named: bool, made: tuple[int, ...], tmp_path: Path) -> None:
    for rank in made:
        (tmp_path / str(rank)).mkdir()
    for message in run_ranks(_not_shared, 2, str(tmp_path), named, timeout_s=60):
        assert "rank 1 does not see what rank 0 wrote" in message
        assert "durability_path" in message


def _not_shared(rank: int, folder: str, named: bool) -> str:
    own = {"durability": "step"} | ({"durability_path": f"{folder}/{rank}"} if named else {})
    try:
        start(make_config(1, "cpu" if named else "nvme", Path(folder) / str(rank), zstore=own))
    except (ConfigError, RankError) as error:
        return "".join(getattr(error, "failures", {}).values()) or str(error)
    return ""


def test_a_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(StorageError, match="durability_path"):
        start(make_config(1, "cpu", zstore={"durability": "step", "durability_path": "/proc/none"}))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"durability": "step"}, "needs a folder for its snapshots"),
        ({"durability": "step", "durability_path": "steps"}, "expected an absolute path"),
        ({"durability": "step", "durability_path": ["/a", "/b"]}, "expected one folder"),
        ({"durability": "always"}, "durability"),
    ],
)
def test_a_config_that_cannot_be(own: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(make_config(1, "cpu", zstore=own))


def test_a_path_without_snapshots_is_reported() -> None:
    config = load_config(make_config(3, "cpu", zstore={"durability_path": "/steps"}))
    assert [notice.key for notice in config.notices()] == ["zstore.durability_path"]
    assert config.step_folder is None
