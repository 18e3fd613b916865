"""A save that fails or is killed at any operation: the checkpoint before it is whole, half of one is never seen."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest

from tests.checkpoint.checkpoints import World, leavings, open_world, save_arrays
from zstore.checkpoint import sweep as sweep_leavings
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import DiskFullError, ZstoreError
from zstore.io.files import Files, Flush
from zstore.store import TierName
from zstore.testing.faults import Fault, FaultyFiles, Kind

Array = npt.NDArray[Any]


def make_arrays(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        "model/w": rng.standard_normal((300, 100)).astype(np.float32),
        "optimizer/exp_avg/w": rng.standard_normal((300, 100)).astype(np.float32),
        "model/b": rng.standard_normal(50).astype(np.float32),
    }


def check_whole(folder: Path, tag: str | None, *allowed: dict[str, Array]) -> None:
    """The checkpoint has no fault and the values of one of `allowed`."""
    with open_checkpoint(folder, tag) as opened:
        assert verify_checkpoint(opened) == []
        found = {name: opened.read_array(name).tobytes() for name in opened.arrays}
    assert found in [{name: array.tobytes() for name, array in arrays.items()} for arrays in allowed]


class FailingFiles(FaultyFiles):
    """Files of which one operation fails, and where `lasting` every later one too."""

    lasting = False

    def __init__(self) -> None:
        super().__init__()
        self.armed = False

    def rearm(self, fail_at: int | None, error_number: int = 0, *, lasting: bool = False) -> None:
        self.heal()
        self.operations.clear()
        self.fail_at, self.error_number, self.lasting, self.armed = fail_at, error_number, lasting, True

    def happen(self, kind: Kind, path: str) -> None:
        if self.lasting:
            for each in get_args(Kind):
                self.inject(Fault(kind=each, times=None, error_number=self.error_number))
        super().happen(kind, path)


class FlushedFiles(FailingFiles):
    """Files of which a save flushes the whole file system, whatever else is in the page cache."""

    flush_fails = False

    def __init__(self) -> None:
        super().__init__()
        self.max_dirty_bytes = 2**60

    def rearm(self, fail_at: int | None, error_number: int = 0, *, lasting: bool = False) -> None:
        super().rearm(fail_at, error_number, lasting=lasting)
        if self.flush_fails:
            self.inject(Fault(kind="syncfs", error_number=error_number))


class Sweep:
    """Saves `after` again and again over a folder with a checkpoint of `before`, each time with another fault."""

    timeout_s = 20.0
    """How long a rank waits for another one that failed without a word."""

    def __init__(self, world: World, doubles: Sequence[FailingFiles], folder: Path) -> None:
        self.before, self.after = make_arrays(1), make_arrays(2)
        self.folder = folder
        self._world = world
        self._doubles = doubles
        save_arrays(folder, self.before, tag="first", world_size=len(doubles))
        self._wait_for_changes()
        self._save("second", overwrite=False)
        self.num_operations = [len(double.operations) for double in doubles]
        self.kinds = [list(double.operations) for double in doubles]
        """What the operations of a save are."""
        self.error: Exception | None = None
        """Of the last save that failed."""

    def _wait_for_changes(self) -> None:
        for double in self._doubles:
            double.rearm(None)

    def _save(self, tag: str, *, overwrite: bool) -> bool:
        few_files = len(self._doubles) > 1
        options = {"overwrite": overwrite, "timeout_s": self.timeout_s, "few_files": few_files}
        try:
            self._world.save(self.folder, tag=tag, **options)
        except ZstoreError as error:
            self.error = error
            return False
        finally:
            for double in self._doubles:
                double.armed = False
        return True

    def run(self, rank: int, operation: int, number: int, *, lasting: bool, overwrite: bool) -> bool:
        """Fail one operation of one rank; return whether the save went well all the same."""
        folder, tag = self.folder, "first" if overwrite else "second"
        if not overwrite:
            for info in tags(folder):
                if info.tag == "second":
                    shutil.rmtree(info.path)
        self._wait_for_changes()
        self._doubles[rank].rearm(operation, number, lasting=lasting)
        saved = self._save(tag, overwrite=overwrite)
        if overwrite:
            check_whole(folder, "first", *([self.after] if saved else [self.before, self.after]))
        else:
            check_whole(folder, "first", self.before)
            present = [info.tag for info in tags(folder)]
            assert present in (["first", "second"], ["first"])
            assert not saved or present == ["first", "second"]
            check_whole(folder, None, *([self.after] if "second" in present else [self.before]))
        return saved


@pytest.fixture(params=["disk", "host"])
def sweep(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sweep]:
    yield from _sweep(request.param, tmp_path, FailingFiles())


@pytest.fixture(params=["disk", "host"])
def flushing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Sweep, FlushedFiles]]:
    double = FlushedFiles()
    if (flush := Flush.of(double, tmp_path)) is None:
        pytest.skip("no file system of Linux's that one flush is known to make durable")
    flush.close()
    for made in _sweep(request.param, tmp_path, double):
        yield made, double


def _sweep(tier: TierName, tmp_path: Path, double: FailingFiles) -> Iterator[Sweep]:
    (tmp_path / "nvme").mkdir()
    with open_world(make_arrays(2), tier=tier, run_path=tmp_path / "nvme", files=[double]) as world:
        yield Sweep(world, [double], tmp_path / "ckpt")


ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_any_operation_of_a_save_may_fail(sweep: Sweep, lasting: bool, overwrite: bool, stride: int) -> None:
    outcomes = [
        sweep.run(0, operation, ERRORS[operation // stride % 3], lasting=lasting, overwrite=overwrite)
        for operation in range((lasting + 2 * overwrite) % stride, sweep.num_operations[0], stride)
    ]
    # Only what comes after the commit, and links, may fail without the save failing.
    assert outcomes.count(False) > 0.6 * len(outcomes)
    assert sweep.run(0, 10**6, errno.EIO, lasting=False, overwrite=overwrite)
    assert leavings(sweep.folder) == []


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_any_operation_of_a_save_with_one_flush_may_fail(flushing: tuple[Sweep, FlushedFiles], overwrite: bool) -> None:
    sweep, double = flushing
    kinds = sweep.kinds[0]
    flush = kinds.index("syncfs")
    # All is written before the one flush; after it names are changed, and the folder of checkpoints is made durable.
    assert kinds.count("syncfs") == 1
    assert "fsync" not in kinds
    assert kinds[flush + 1 :][:3] == ["rename", "rename", "sync_folder"]
    assert "sync_folder" not in kinds[:flush]
    for operation in sorted({*range(2 * overwrite, flush, 5), *range(flush - 4, len(kinds))}):
        sweep.run(0, operation, ERRORS[operation % 3], lasting=False, overwrite=overwrite)
    double.flush_fails = True
    assert not sweep.run(0, 10**6, errno.EIO, lasting=False, overwrite=overwrite)
    double.flush_fails = False
    assert sweep.run(0, 10**6, errno.EIO, lasting=False, overwrite=overwrite)
    assert leavings(sweep.folder) == []


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_called_so(sweep: Sweep, error_number: int) -> None:
    """At every kind of operation that takes room or makes something durable."""
    kinds = sweep.kinds[0]
    assert {"write", "fsync", "sync_folder", "rename", "write_small", "make_folder"} <= set(kinds)
    for kind in sorted(set(kinds) - {"link", "unlink", "remove_tree"}):
        if sweep.run(0, kinds.index(kind), error_number, lasting=True, overwrite=False):
            continue
        assert isinstance(sweep.error, DiskFullError), (kind, sweep.error)
        assert sweep.error.errno == error_number
        assert str(sweep.folder.parent) in str(sweep.error)


def test_any_operation_of_any_rank_may_fail(tmp_path: Path) -> None:
    doubles = [FailingFiles(), FailingFiles()]
    with open_world(make_arrays(2), world_size=2, files=doubles) as world:
        sweep = Sweep(world, doubles, tmp_path / "ckpt")
        sweep.timeout_s = 1.0
        for rank in (0, 1):
            for operation in range(rank, sweep.num_operations[rank], 5):
                sweep.run(rank, operation, errno.EIO, lasting=False, overwrite=False)
        sweep.timeout_s = 20.0
        assert sweep.run(1, 10**6, errno.EIO, lasting=False, overwrite=True)
        assert leavings(sweep.folder) == []


_KILLED = """
import os, pathlib, sys, traceback
from tests.checkpoint.test_save_faults import make_arrays
from tests.checkpoint.checkpoints import open_world
from zstore.testing.faults import DeadlyFiles

def save(folder, point):
    (folder / "nvme").mkdir(exist_ok=True)
    files = DeadlyFiles(**{only!r})
    files.armed = False
    options = dict(tier={tier!r}, run_path=folder / "nvme", files=[files] * {world_size}, world_size={world_size})
    with open_world(make_arrays(2), **options) as world:
        files.operations.clear()
        files.fail_at, files.armed = point // 2 if {only!r} else point, True
        world.save(folder / "ckpt", tag="first" if point % 2 else "second", overwrite=True, few_files={world_size} > 1)

for point in {points!r}:
    pid = os.fork()
    if pid == 0:
        try:
            save(pathlib.Path({base!r}) / str(point), point)
        finally:
            os._exit(0)
    print(point, os.waitpid(pid, 0)[1], flush=True)
"""


def _kill_at(points: list[int], base: Path, *, tier: str, world_size: int, only: tuple[Kind, ...] = ()) -> list[int]:
    """Kill a saving process at each of these operations, and check what it leaves; return those that it came to.

    Of `only` some kinds, each operation with a new tag and with one that is replaced.
    """
    before, after = make_arrays(1), make_arrays(2)
    for point in points:
        save_arrays(base / str(point) / "ckpt", before, tag="first", world_size=world_size)
    kinds = {"only": frozenset(only)} if only else {}
    code = _KILLED.format(tier=tier, world_size=world_size, points=points, base=str(base), only=kinds)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    statuses = dict(map(int, line.split()) for line in done.stdout.splitlines())
    assert set(statuses) == set(points)
    assert [status for status in statuses.values() if status not in (0, signal.SIGKILL)] == []
    killed = [point for point, status in statuses.items() if status == signal.SIGKILL]
    assert len(killed) > len(points) // 2
    stale = 0
    for point in points:
        folder = base / str(point) / "ckpt"
        committed = len(tags(folder)) == 2
        assert committed or point % 2 or point in killed
        stale += committed and (folder / "latest").read_text() == "first\n"
        for _ in range(2):
            if point % 2:
                check_whole(folder, "first", before, after)
            else:
                check_whole(folder, "first", before)
                check_whole(folder, None, *([after] if committed else [before]))
            assert sweep_leavings(Files(), folder) == []
        save_arrays(folder, after, tag="second", overwrite=True)
        assert leavings(folder) == []
        check_whole(folder, None, after)
    # The new state with the old `latest` among them, which a load and the sweep tell from one that somebody edited.
    assert stale or "rename" not in only
    return killed


@pytest.mark.parametrize(("tier", "world_size", "most"), [("disk", 1, 60), ("host", 2, 90)])
def test_a_saving_process_may_be_killed_at_any_operation(tier: str, world_size: int, most: int, tmp_path: Path) -> None:
    points = sorted(random.Random(0).sample(range(most), 10))
    _kill_at(points, tmp_path, tier=tier, world_size=world_size)


def test_a_saving_process_may_be_killed_at_any_rename(tmp_path: Path) -> None:
    _kill_at(list(range(14)), tmp_path, tier="host", world_size=1, only=("rename",))


@pytest.mark.soak
@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_saving_process_may_be_killed_at_every_operation(tier: str, world_size: int, tmp_path: Path) -> None:
    points = list(range(70 * world_size))
    killed = _kill_at(points, tmp_path, tier=tier, world_size=world_size)
    assert max(killed) < points[-1]  # there are no more operations


_RANK = """
import pathlib
import numpy as np
from zstore.checkpoint.save import save_checkpoint
from tests.checkpoint.checkpoints import open_world
from zstore.testing.faults import CallingFiles, DeadlyFiles
files = {files}
with open_world({{"model/w": np.ones((300, 100), np.float32)}}, world_size=2, files=[files, files]) as world:
    request = world.request(pathlib.Path({folder!r}), {rank}, "0123456789abcdef" * 2, timeout_s={timeout_s})
    try:
        save_checkpoint(request).wait(200)
    except Exception as error:
        print(error)
"""
# Rank 0 is killed when it would rename the folder, rank 1 when it would name its manifest; rank 0, which names its own once
# the test knows of that, then waits for the manifest of rank 1.
_KILLED_AT = 'DeadlyFiles({}, only=frozenset({{"rename"}}))'
_TOLD = 'CallingFiles(lambda kind, path: input() if path.name == "rank-00000.json" else None)'


@pytest.mark.parametrize(("killed", "words"), [(0, "rank 0 ended without committing"), (1, "ranks [1] did not finish")])
def test_a_killed_rank_does_not_keep_the_others_waiting(killed: int, words: str, tmp_path: Path) -> None:
    folder, processes = tmp_path / "ckpt", list[subprocess.Popen[str]]()
    for rank, files in enumerate([_TOLD, _KILLED_AT.format(0)] if killed else [_KILLED_AT.format(1), "DeadlyFiles()"]):
        code = _RANK.format(folder=str(folder), rank=rank, files=files, timeout_s=1.5 if rank < killed else 150)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen([sys.executable, "-c", code], **pipes))
    processes[killed].wait(200)
    outputs = [process.communicate("\n", timeout=200)[0] for process in processes]
    assert processes[killed].returncode == -signal.SIGKILL
    assert words in outputs[1 - killed]
    assert tags(folder) == []
