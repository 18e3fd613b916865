"""Checkpoints of the store by itself: whole or absent, and errors told once, whatever fails or is killed."""

import errno
import math
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

import zstore
from tests import warm
from tests.open.api import LARGE, values
from zstore.checkpoint.reader import tags
from zstore.errors import CheckpointNotFoundError, CorruptionError, DiskFullError, StorageError, UsageError
from zstore.format import zarr_dtypes  # noqa: F401 - lets zarr read bfloat16
from zstore.store import Store, StoreOptions
from zstore.testing.faults import Fault, FaultyFiles


def test_a_checkpoint_links_what_is_on_disk_and_is_loaded(store: Store, tmp_path: Path) -> None:
    whole = {"a/w": torch.randn(LARGE), "a/s": torch.tensor(2.0)}
    for name, value in whole.items():
        store.put(name, value, dims=("x", "y", "z")[: value.ndim])
    saved = store.checkpoint(tmp_path / "ckpt" / "one", extra={"step": 3}, step=3)
    store.update("a/w", torch.zeros(LARGE))  # behind: not in the checkpoint
    assert saved.wait().num_linked == 1
    second = store.checkpoint(tmp_path / "ckpt" / "two", keep=1)
    store.put("a/w", torch.ones(LARGE))
    second.wait()
    assert [info.tag for info in tags(tmp_path / "ckpt")] == ["two"]
    with zstore.open_checkpoint(tmp_path / "ckpt") as checkpoint:
        assert not checkpoint["a/w"].numpy().any()
    store.checkpoint(tmp_path / "ckpt" / "two", names=["a/s"], overwrite=True).wait()
    for turn in range(3):
        store.checkpoint(tmp_path / "ckpt" / str(turn))
        store.put("a/w", values((1000, 100 + turn)))  # of another shape, which waits for the checkpoint
        store.put("a/s", turn)
    store.flush().wait()
    with zstore.open_store(tmp_path / "run") as other:
        assert other.load(tmp_path / "ckpt", "two").wait() == {}
        assert other.names() == ["a/s"]
        assert other.get("a/s").wait() == whole["a/s"]


def test_what_is_kept_beside_the_arrays_may_be_what_an_engines_client_keeps(store: Store, tmp_path: Path) -> None:
    options = Namespace(lr=np.float32(0.5), out=Path("runs/a"))
    kept = {
        "loss": np.float32(1.5),
        "step": np.int64(7),
        "done": np.bool_(1),
        "best": [np.float64("nan")],
        "options": options,
    }
    store.checkpoint(tmp_path / "ckpt" / "one", extra=kept).wait()
    found = store.load(tmp_path / "ckpt").wait()
    assert math.isnan(found.pop("best")[0])
    assert found == {"loss": 1.5, "step": 7, "done": True, "options": {"lr": 0.5, "out": "runs/a"}}
    assert [type(found[key]) for key in ("loss", "step", "done")] == [float, int, bool]
    with pytest.raises(UsageError, match=r"\['when'\] is a datetime\.date"):
        store.checkpoint(tmp_path / "ckpt" / "two", extra={"when": np.datetime64("2026-01-01")}).wait()


def test_a_load_links_what_is_cut_alike_and_never_writes_it(tmp_path: Path) -> None:
    with zstore.open_store(tmp_path / "run") as store:
        store.put("a/w", values(LARGE))
        store.checkpoint(tmp_path / "ckpt" / "one").wait()
    with zstore.open_store(tmp_path / "run") as store:
        store.load(tmp_path / "ckpt").wait()
        assert store.statistics().disk_write_bytes == 0
        assert (store.get("a/w").wait() == values(LARGE)).all()
        store.update("a/w", values((1, 100, 2)) - 7, rows=slice(5, 6)).wait()
        assert (store.get("a/w", rows=slice(5, 6)).wait() == values((1, 100, 2)) - 7).all()
        with zstore.open_checkpoint(tmp_path / "ckpt") as checkpoint:
            assert checkpoint.verify() == []
            assert (checkpoint["a/w"].numpy() == values(LARGE)).all()


def test_an_error_comes_by_its_ticket_and_by_flush_once(tmp_path: Path) -> None:
    files = FaultyFiles()
    tmp_path.joinpath("run").mkdir()
    store = Store(StoreOptions(run_path=tmp_path / "run"), files=files)
    with store:
        store.put("a/w", values(LARGE)).wait()
        store.put("b/w", values(LARGE)).wait()
        files.inject(Fault(kind="write", error_number=errno.EIO))
        ticket = store.update("a/w", values(LARGE, seed=1))
        with pytest.raises(StorageError):
            store.flush().wait()
        with pytest.raises(StorageError):
            ticket.wait()
        store.flush().wait()
        assert (store.get("b/w").wait() == values(LARGE)).all()
        files.inject(Fault(kind="allocate", error_number=errno.ENOSPC))
        with pytest.raises(DiskFullError):
            store.put("c/w", values(LARGE)).wait()
        with pytest.raises(KeyError, match="no array 'c/w'"):
            store.get("c/w")
        store.put("c/w", values(LARGE))
        store.put("a/w", values(LARGE, seed=2))
        store.flush().wait()
        assert (store.get("a/w").wait() == values(LARGE, seed=2)).all()
        loop = iter(store.stream(["a/w"]))
        next(loop)
        files.inject(Fault(kind="write", error_number=errno.EIO))
        with pytest.raises(StorageError):
            loop.close()  # which Python calls, and drops the error, when the loop is left
        with pytest.raises(StorageError):
            store.flush().wait()
        store.flush().wait()


def test_a_load_that_fails_tells_of_it_once(tmp_path: Path) -> None:
    with zstore.open_store(tmp_path / "run") as store:
        store.put("a/w", np.arange(100_000))
        store.checkpoint(tmp_path / "ckpt" / "one").wait()
    (file,) = (tmp_path / "ckpt" / "one" / "a" / "w").glob("c*")
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-8000] + bytes(8000))
    with zstore.open_store() as store:
        for source, error in ((tmp_path / "ckpt", CorruptionError), (tmp_path / "none", CheckpointNotFoundError)):
            with pytest.raises(error):
                store.load(source).wait()
            store.flush().wait()
            store.load(source)  # its ticket is dropped
            with pytest.raises(error):
                store.flush().wait()
            store.flush().wait()


ENDLESS = """
import sys
import numpy as np
import zstore
folder = sys.argv[1]
with zstore.open_store(folder + "/run") as store:
    for turn in range(10**6):
        for i in range(3):
            store.put(f"b.{i}/w", np.full((300, 100), turn, np.float32))
        saving = store.checkpoint(f"{folder}/ckpt/{turn:06d}", keep=2)
        if turn:
            former.wait()
        former = saving
        print(turn, flush=True)
"""


def test_a_killed_program_leaves_whole_checkpoints(tmp_path: Path) -> None:
    with warm.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        while int(process.stdout.readline()) < 4:
            pass
        process.kill()
    found = tags(tmp_path / "ckpt")
    assert found
    for info in found:
        with zstore.open_checkpoint(tmp_path / "ckpt", info.tag) as checkpoint:
            assert checkpoint.verify() == []
            assert all((checkpoint[f"b.{i}/w"].numpy() == int(info.tag)).all() for i in range(3))
    with zstore.open_store(tmp_path / "run"):  # sweeps what the dead one left
        pass
    assert not list(tmp_path.rglob("*.shard"))


DEADLY = """
import sys
import numpy as np
from zstore.store import Store, StoreOptions
from zstore.testing.faults import DeadlyFiles
from pathlib import Path
folder, tag, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
files = DeadlyFiles()
files.armed = False
folder.joinpath("run").mkdir(parents=True)
store = Store(StoreOptions(run_path=folder / "run"), files=files)
for turn, place in enumerate(["old", tag]):
    for i in range(3):
        store.put(f"b.{i}/w", np.full((300, 100 // (1 + 9 * i)), turn, np.float32)).wait()  # on disk and in memory
    files.armed, files.fail_at = turn == 1, number
    store.checkpoint(folder / "ckpt" / place, overwrite=True).wait()
print(len(files.operations))
"""


@pytest.mark.parametrize("tag", ["new", pytest.param("old", marks=pytest.mark.soak)])
@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.soak)])
def test_a_checkpoint_that_is_killed_is_whole_or_absent(tag: str, stride: int, tmp_path: Path) -> None:
    def saved(number: int) -> str:
        done = warm.run(
            [sys.executable, "-c", DEADLY, str(tmp_path / str(number)), tag, str(number)],
            check=False, timeout=200, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == (0 if number < 0 else -signal.SIGKILL), done.stderr
        return done.stdout

    outcomes = set()
    for number in range(0, int(saved(-1)), stride):
        saved(number)
        place = tmp_path / str(number) / "ckpt"
        found = {info.tag for info in tags(place)}
        assert "old" in found <= {"old", tag}
        for name in found:
            with zstore.open_checkpoint(place, name) as checkpoint:
                assert checkpoint.verify() == []
                (value,) = {float(part) for i in range(3) for part in np.unique(checkpoint[f"b.{i}/w"].numpy())}
            assert value in ((0.0, 1.0) if tag == "old" else (float(name == tag),))
            outcomes.add((name, value))
        shutil.rmtree(tmp_path / str(number))
    assert (tag, 1.0) in outcomes or stride > 1


LEFT = """
import sys
import numpy as np
import zstore
folder = sys.argv[1]
store = zstore.open_store(folder + "/run")
store.put("a/w", np.ones((300, 100), np.float32))
store.checkpoint(folder + "/ckpt/last")
raise SystemExit(3)
"""


def test_a_program_that_ends_completes_its_checkpoint(tmp_path: Path) -> None:
    done = warm.run([sys.executable, "-c", LEFT, str(tmp_path)], check=False, timeout=200)
    assert done.returncode == 3
    with zstore.open_checkpoint(tmp_path / "ckpt") as checkpoint:
        assert (checkpoint["a/w"].numpy() == 1).all()
    assert not list(tmp_path.rglob("*.shard"))
