"""Saving: links in place of copies, overwriting, retention, and ranks that tell each other what went wrong."""

import contextlib
import errno
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.checkpoint.checkpoints import World, as_bytes, leavings, open_world, save_arrays, values, wait_all
from tests.waiting import until
from zstore.checkpoint.commit import Committer, SaveLock, owner_has_ended
from zstore.checkpoint.format import Record
from zstore.checkpoint.layout import new_save_id
from zstore.checkpoint.reader import tags
from zstore.checkpoint.retention import Keep
from zstore.checkpoint.save import save_checkpoint
from zstore.errors import CheckpointError, CheckpointExistsError, DiskFullError, RankError, StorageError, UsageError
from zstore.format.arrays import ArraySpec, make_grid
from zstore.io.files import Files, OpenFile
from zstore.testing.faults import CallingFiles, Fault, FaultyFiles

Array = npt.NDArray[Any]


def make_arrays(seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        "model/w": rng.standard_normal((600, 200)).astype(np.float32),
        "optimizer/exp_avg/w": rng.standard_normal((600, 200)).astype(np.float32),
        "model/b": rng.standard_normal(5).astype(np.float32),
    }


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    path = tmp_path / "nvme"
    path.mkdir()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


@pytest.fixture(params=[1, 2], ids="world{}".format)
def on_disk(request: pytest.FixtureRequest, run_path: Path) -> Iterator[World]:
    with open_world(make_arrays(), world_size=request.param, tier="disk", run_path=run_path) as world:
        yield world


def test_state_on_disk_is_linked_and_what_changes_later_is_not_in_the_checkpoint(on_disk: World, folder: Path) -> None:
    before = as_bytes(dict(on_disk.arrays))
    handles = on_disk.begin_save(folder)
    later = make_arrays(1)
    for name, array in on_disk.arrays.items():
        array[...] = later[name]
    on_disk.fill()
    summaries = wait_all(handles)
    assert values(folder) == before
    assert all(summary.num_linked == 2 for summary in summaries)  # the small one rests in memory
    assert sum(s.written_bytes for s in summaries) < 0.05 * sum(s.linked_bytes for s in summaries)
    assert summaries[0].messages == ()
    on_disk.save(folder, step=2)
    assert values(folder) == as_bytes(later)
    assert values(folder, "step-00000001") == before


def test_a_committed_tag_is_replaced_only_when_asked(folder: Path) -> None:
    first, second = make_arrays(1), make_arrays(2)
    save_arrays(folder, first, tag="best")
    with pytest.raises(CheckpointExistsError, match=r"'best' is committed .*overwrite=True"):
        save_arrays(folder, second, tag="best")
    assert values(folder) == as_bytes(first)
    save_arrays(folder, second, tag="best", overwrite=True, world_size=2)
    assert values(folder) == as_bytes(second)
    assert sorted(p.name for p in folder.iterdir()) == ["best", "latest"]


def test_a_damaged_checkpoint_may_be_overwritten_but_a_foreign_folder_never(folder: Path) -> None:
    arrays = make_arrays()
    path = save_arrays(folder, arrays, tag="best")
    (path / "zstore.json").chmod(0o644)
    (path / "zstore.json").write_text("{")
    with pytest.raises(CheckpointExistsError, match="its record is not valid"):
        save_arrays(folder, arrays, tag="best")
    save_arrays(folder, arrays, tag="best", overwrite=True)
    assert values(folder) == as_bytes(arrays)
    (folder / "mine").mkdir()
    (folder / "mine/thesis.txt").write_text("years")
    with pytest.raises(CheckpointError, match="not a zstore checkpoint: move it elsewhere"):
        save_arrays(folder, arrays, tag="mine", overwrite=True)
    assert (folder / "mine/thesis.txt").read_text() == "years"


def test_an_empty_folder_that_is_there_becomes_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    (folder / "best").mkdir(parents=True)
    arrays = make_arrays()
    save_arrays(folder, arrays, tag="best")
    assert values(folder) == as_bytes(arrays)
    assert sorted(p.name for p in folder.iterdir()) == ["best", "latest"]
    (folder / "hidden").mkdir()
    (folder / "hidden/.thesis").write_text("years")
    (tmp_path / "elsewhere").mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    for tag in ("hidden", "link"):
        with pytest.raises(CheckpointError, match="not a zstore checkpoint: move it elsewhere"):
            save_arrays(folder, arrays, tag=tag)


@pytest.mark.parametrize("name", ["config.json", "tokenizer/config.json"])
def test_a_file_that_is_put_into_the_folder_during_the_save_stays(name: str, folder: Path) -> None:
    other = folder / "best" / name

    def put(kind: str, path: Path) -> None:
        if kind == "write_small" and not other.exists():
            other.parent.mkdir(parents=True, exist_ok=True)  # of several threads
            other.write_text("{}")

    arrays = make_arrays()
    with open_world(arrays, files=[CallingFiles(put)]) as world:
        world.save(folder, tag="best")
    assert values(folder) == as_bytes(arrays)
    assert other.read_text() == "{}"
    assert sorted(path.name for path in folder.iterdir()) == ["best", "latest"]


def test_only_the_newest_of_the_own_run_are_kept(folder: Path, run_path: Path) -> None:
    arrays = make_arrays()
    save_arrays(folder, arrays, step=1, run_id="another run")
    with open_world(arrays, tier="disk", run_path=run_path) as world:
        for step in range(2, 7):
            world.save(folder, step=step, run_id="run", keep=Keep(last=2))
    assert [info.record.step for info in tags(folder)] == [1, 5, 6]
    assert values(folder) == values(folder, "step-00000005") == as_bytes(arrays)
    assert leavings(folder) == []


def test_commit_times_grow_though_the_clock_does_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: 1000)
    arrays = make_arrays()
    for step in (5, 3, 4):
        save_arrays(folder, arrays, step=step)
    found = [(info.record.step, info.record.committed_ns) for info in tags(folder)]
    assert found == [(5, 1000), (3, 1001), (4, 1002)]


def test_a_save_reads_few_records_among_many_checkpoints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, decoded, counts = Record.decode, [], []
    monkeypatch.setattr(Record, "decode", lambda data, path: decoded.append(path) or decode(data, path))
    with open_world(make_arrays()) as world:
        for step in range(1, 13):
            decoded.clear()
            world.save(folder, step=step)
            counts.append(len(decoded))
    assert counts[3] == counts[-1] <= 4


def test_no_room_is_an_error_before_anything_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Files, "free_bytes", lambda *_: 100_000)
    with open_world(make_arrays()) as world, pytest.raises(DiskFullError, match=r"about 9\d{5} bytes, but only 100000"):
        world.begin_save(folder)
    assert list(folder.iterdir()) == []


def test_requests_that_make_no_sense_are_refused_and_the_pins_released(folder: Path) -> None:
    with open_world(make_arrays()) as world:
        for options, words in (
            ({"tag": "../up"}, "cannot be a tag"),
            ({"keep": Keep(last=2)}, "a run_id"),
            ({"record": {"client": {"x": object()}}}, r"record\['client'\]\['x'\] is a builtins.object"),
            ({"small": {"client/x": np.zeros(3)}}, "has no spec"),
        ):
            with pytest.raises(UsageError, match=words):
                world.save(folder, **options)
        assert not folder.exists() or list(folder.iterdir()) == []
        world.save(folder)
        world.fill()  # would wait for ever for a pin that was left


def test_an_array_that_no_rank_stores_fails_the_save(folder: Path) -> None:
    with open_world(make_arrays()) as world:
        extra = ArraySpec(name="model/lost", shape=(4,), dtype="float32")
        specs, grids = {**world.specs, extra.name: extra}, {**world.grids, extra.name: make_grid((4,), 1)}
        broken = World(arrays=world.arrays, small={}, specs=specs, grids=grids, stores=world.stores)
        with pytest.raises(CheckpointError, match="'model/lost': no rank stored shard 0"):
            broken.save(folder)
    assert list(folder.iterdir()) == []


class SyncedFiles(Files):
    """Files that know what was made durable when something got its name."""

    def __init__(self) -> None:
        super().__init__()
        self.max_dirty_bytes = -1  # each file by itself
        self.synced: set[str] = set()
        self.synced_at: dict[str, set[str]] = {}

    def sync_data(self, file: OpenFile) -> None:
        super().sync_data(file)
        self.synced.add(file.path)

    def rename(self, source: str | Path, target: str | Path) -> None:
        self.synced_at[Path(target).name] = set(self.synced)
        super().rename(source, target)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_shards_are_durable_before_the_manifest_all_before_the_commit(tier: Any, folder: Path, run_path: Path) -> None:
    files = SyncedFiles()
    small = {"client/x": np.arange(5)}
    with open_world(make_arrays(), tier=tier, run_path=run_path, small=small, files=[files]) as world:
        path = world.save(folder)[0].path
    relative = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
    for name, wanted in (("rank-00000.json", "c.*"), (path.name, "*.json")):
        durable = {str(Path(n).relative_to(folder)).partition("/")[2] for n in files.synced_at[name] if ".tmp-" in n}
        named = {str(file) for file in relative if file.match(wanted)}
        assert named - {"manifest/rank-00000.json"} <= durable  # that one had another name then


def test_ranks_with_different_models_are_refused(folder: Path) -> None:
    with open_world(make_arrays(), world_size=2) as world:
        save_id = new_save_id()
        mine, theirs = (world.request(folder, rank, save_id) for rank in (0, 1))
        # Of an array without elements rank 1 would store nothing, so that nothing is missing.
        extra = ArraySpec(name="model/more", shape=(0, 4), dtype="float32")
        grids = {**theirs.grids, extra.name: make_grid(extra.stored_shape, 2)}
        theirs = replace(theirs, specs={**theirs.specs, extra.name: extra}, grids=grids)
        handles = [save_checkpoint(request) for request in (mine, theirs)]
        with pytest.raises(CheckpointError, match="rank 1 saved different arrays than rank 0"):
            wait_all(handles)
    assert tags(folder) == []


def test_a_rank_that_never_comes_is_named(folder: Path) -> None:
    with open_world(make_arrays(), world_size=3) as world:
        save_id = new_save_id()
        handles = [save_checkpoint(world.request(folder, rank, save_id, timeout_s=0.3)) for rank in (0, 2)]
        with pytest.raises(CheckpointError, match=r"ranks \[1\] did not finish"):
            handles[0].wait(200)
        with pytest.raises(CheckpointError, match=r"aborted the save|did not commit"):
            handles[1].wait(200)
    assert [name for name in leavings(folder) if ".lock-" in name] == []


def test_a_rank_raises_its_own_error_however_soon_rank_0_gives_up(folder: Path) -> None:
    class FullFiles(FaultyFiles):
        def rename(self, old: str | Path, new: str | Path) -> None:
            super().rename(old, new)
            until(Path(new).parents[1].joinpath("abort.json").exists)

    full = FullFiles(faults=(Fault(kind="write", pattern="*/model/*", error_number=errno.ENOSPC),))
    with open_world(make_arrays(), world_size=2, files=[Files(), full]) as world:
        for handle, error in zip(world.begin_save(folder), (RankError, DiskFullError), strict=True):
            with pytest.raises(error, match="No space left"):
                handle.wait(200)


def test_a_folder_that_only_rank_0_sees_is_an_error_that_says_so(tmp_path: Path) -> None:
    with open_world(make_arrays(), world_size=2) as world:
        save_id = new_save_id()
        handles = [save_checkpoint(world.request(tmp_path / f"node{r}", r, save_id, timeout_s=0.3)) for r in (0, 1)]
        with pytest.raises(CheckpointError, match=r"rank 1 does not see .* local to a machine"):
            handles[1].wait(200)
        with pytest.raises(CheckpointError, match=r"ranks \[1\] did not finish"):
            handles[0].wait(200)


def test_a_cancelled_save_leaves_nothing(folder: Path) -> None:
    with open_world(make_arrays(), world_size=2) as world:
        rank_1 = save_checkpoint(world.request(folder, 1, new_save_id()))
        rank_1.cancel()
        with pytest.raises(CheckpointError, match="cancelled"):
            rank_1.wait(200)
    assert not folder.exists()


def test_leavings_of_dead_saves_are_swept_and_living_ones_are_not(folder: Path) -> None:
    arrays = make_arrays()
    folder.mkdir()
    (folder / "step-00000001.tmp-0123456789abcdef0123456789abcdef/model").mkdir(parents=True)
    (folder / "step-00000001.tmp-0123456789abcdef0123456789abcdef/model/c.0").write_text("x")
    (folder / "step-00000001.lock-0123456789abcdef0123456789abcdef").write_text("")
    (folder / "latest.tmp-0123456789abcdef0123456789abcdef").write_text("x")
    living = Committer(Files(), folder, "other", new_save_id())
    living.begin()
    save_arrays(folder, arrays)
    assert leavings(folder) == sorted([living.temporary.name, living.lock_path.name])
    living.abort("the end of the test", is_only_rank=True)
    assert leavings(folder) == []


@pytest.mark.parametrize("moment", ["set aside", "renamed"])
def test_a_checkpoint_that_was_set_aside_is_still_found_and_gets_its_name_back(folder: Path, moment: str) -> None:
    arrays = make_arrays()
    path = save_arrays(folder, arrays, tag="best")
    aside = folder / "best.old-0123456789abcdef0123456789abcdef"
    path.rename(aside)
    assert values(folder) == values(folder, "best") == as_bytes(arrays)
    assert [info.tag for info in tags(folder)] == ["best"]
    if moment == "renamed":
        save_arrays(folder, make_arrays(1), tag="best", overwrite=True)
        assert values(folder, "best") == as_bytes(make_arrays(1))
    else:
        with pytest.raises(CheckpointExistsError):
            save_arrays(folder, arrays, tag="best")
        save_arrays(folder, arrays, tag="next")
        assert values(folder, "best") == as_bytes(arrays)
    assert leavings(folder) == []


def test_a_replaced_checkpoint_is_there_at_every_instant(folder: Path) -> None:
    first, second = make_arrays(1), make_arrays(2)
    save_arrays(folder, first, tag="best")
    seen: list[dict[str, bytes]] = []
    files = CallingFiles(lambda kind, path: seen.append(values(folder, "best")))
    with open_world(second, files=[files]) as world:
        world.save(folder, tag="best", overwrite=True)
    assert len(seen) > 4
    states = [as_bytes(first) == found for found in seen]
    assert states == sorted(states, reverse=True)
    assert all(found in (as_bytes(first), as_bytes(second)) for found in seen)


def test_two_saves_of_one_tag_at_once_leave_one_whole_checkpoint(folder: Path) -> None:
    arrays = make_arrays()
    with open_world(arrays) as one, open_world(arrays) as two:
        both_began = threading.Event()
        handles = one.begin_save(folder, before_commit=lambda _: [str(both_began.wait(200))]) + two.begin_save(folder)
        both_began.set()
        ended: list[Any] = []
        for handle in handles:
            with contextlib.suppress(StorageError):
                ended.append(handle.wait(200))
    assert ended
    assert values(folder) == as_bytes(arrays)
    assert leavings(folder) == []


def test_a_lock_lives_as_long_as_its_process(tmp_path: Path) -> None:
    path = tmp_path / "a.lock-0123456789abcdef0123456789abcdef"
    code = (
        "import pathlib, sys; from zstore.checkpoint.commit import SaveLock\n"
        f"lock = SaveLock(pathlib.Path({str(path)!r})); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        with owner_has_ended(path) as dead:
            assert not dead
        process.send_signal(signal.SIGKILL)
        process.wait()
        with owner_has_ended(path) as dead:
            assert dead
    lock = SaveLock(path)
    with owner_has_ended(path) as dead:
        assert not dead
    lock.release()
    lock.release()
    assert not path.exists()
    with owner_has_ended(path) as dead:
        assert dead


@pytest.mark.endings
@pytest.mark.parametrize("started", [False, True])
def test_ctrl_c_as_a_save_begins_leaves_all_of_it_or_nothing(folder: Path, started: bool) -> None:
    """In `Thread.start`, which waits: the thread runs by then, though its caller never gets a handle of the save."""
    code = (
        "import pathlib, threading, numpy as np\n"
        "from tests.checkpoint.checkpoints import open_world\n"
        "from zstore.testing.faults import CallingFiles\n"
        "start, committing, raised = threading.Thread.start, threading.Event(), threading.Event()\n"
        "def interrupted(thread):\n"
        f"    if thread.name != 'zstore-save' or {started}:\n"
        "        start(thread)\n"
        "    if thread.name == 'zstore-save':\n"
        f"        assert not {started} or committing.wait(100)\n"
        "        raise KeyboardInterrupt\n"
        "def hold(kind, path):\n"
        "    if path.name == 'zstore.json':\n"
        "        committing.set()\n"
        "        raised.wait(100)\n"
        "opened = open_world({'model/w': np.ones(300000, np.float32)}, files=[CallingFiles(hold)])\n"
        "world = opened.__enter__()\n"
        "threading.Thread.start = interrupted\n"
        "try:\n"
        f"    world.begin_save(pathlib.Path({str(folder)!r}))\n"
        "finally:\n"
        "    raised.set()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=200, capture_output=True, text=True)
    assert done.stderr.rstrip().endswith("KeyboardInterrupt"), done.stderr  # and no error of the save after it
    if started:
        assert values(folder) == {"model/w": np.ones(300000, np.float32).tobytes()}
    assert leavings(folder) == []
