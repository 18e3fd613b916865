"""The checkpoint that a load without a tag opens: the whole one that `latest` names, else the newest."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

import zstore
from tests.checkpoint.checkpoints import save_arrays
from zstore import open_checkpoint
from zstore.checkpoint import Keep, sweep, weigh
from zstore.checkpoint.reader import open_checkpoint as open_reader
from zstore.io.files import Files

ROOT = Path(__file__).parents[2]
NAMES = ("one", "two")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for number, tag in enumerate(NAMES, 1):
        save_arrays(tmp_path, {"model/w": np.full(100, number, np.float32)}, world_size=1, step=number, tag=tag)
    assert (tmp_path / "latest").read_text() == "two\n"
    return tmp_path


def opened(place: Path, tag: str | None = None) -> str:
    with open_checkpoint(place, tag) as checkpoint:
        assert set(checkpoint["model/w"][:]) == {1 + NAMES.index(checkpoint.tag)}
        return checkpoint.tag


@pytest.mark.parametrize("text", ["one", "one\n", "  one \n\n"])
@pytest.mark.parametrize("tag", [None, "latest"])
def test_an_edited_latest_is_followed_and_a_line_names_both(
    text: str, tag: str | None, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run / "latest").write_text(text)
    with caplog.at_level(logging.WARNING, "zstore"):
        assert opened(run, tag) == "one"
    assert "names 'one', and the newest checkpoint is 'two': 'one' is opened" in caplog.text


def test_a_copy_that_loses_all_times_is_read_alike(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (run / "latest").write_text("one\n")
    copy = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(run, copy, copy_function=shutil.copyfile)
    for path in copy.rglob("*"):
        os.utime(path, (0, 0))
    assert opened(copy) == "one"


@pytest.mark.parametrize("text", ["three\n", "", "../one", "nonsense \0", "one/../two"])
def test_a_latest_that_names_no_whole_checkpoint_is_the_newest(text: str, run: Path) -> None:
    (run / "latest").write_text(text)
    assert opened(run) == "two"


def test_a_name_without_a_record_is_not_whole(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run / "latest").write_text("one\n")
    (run / "one" / "zstore.json").unlink()
    with caplog.at_level(logging.WARNING, "zstore"):
        assert opened(run) == "two"
    assert "there is no whole checkpoint 'one', so the newest is opened" in caplog.text


def test_a_save_that_was_killed_before_it_replaced_latest_counts(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_reader(run, "two") as reader:
        save_id = reader.record.id
    record = (run / "two" / "zstore.json").stat()
    (run / "latest").write_text("one\n")
    os.utime(run / "latest", ns=(record.st_mtime_ns - 1, record.st_mtime_ns - 1))
    (run / f"two.lock-{save_id}").write_text("{}")
    with caplog.at_level(logging.WARNING, "zstore"):
        assert opened(run) == "two"
    assert "its save ended before it replaced `latest`" in caplog.text
    os.utime(run / "latest", ns=(record.st_mtime_ns + 1, record.st_mtime_ns + 1))  # edited after the crash
    assert opened(run) == "one"


@pytest.mark.parametrize("edited", [False, True])
def test_the_next_save_knows_an_old_latest_from_an_edited_one(edited: bool, run: Path) -> None:
    with open_reader(run, "two") as reader:
        save_id = reader.record.id
    record = (run / "two" / "zstore.json").stat()
    (run / "latest").write_text("one\n")
    os.utime(run / "latest", ns=(record.st_mtime_ns + 2 * edited - 1,) * 2)
    (run / f"two.lock-{save_id}").write_text("{}")
    assert sweep(Files(), run) == []
    assert not (run / f"two.lock-{save_id}").exists()
    assert opened(run) == ("one" if edited else "two")


def test_what_latest_names_is_not_removed(run: Path) -> None:
    assert [fate.reasons for fate in weigh(run, Keep(last=1))] == [(), ("last",)]
    (run / "latest").write_text("one\n")
    assert [fate.reasons for fate in weigh(run, Keep(last=1))] == [("latest",), ("last",)]


def test_a_bucket_and_the_engine_follow_it_too(run: Path) -> None:
    (run / "latest").write_text("one\n")
    url = f"memory://latest/{run.name}"
    fsspec.filesystem("memory").put(str(run), f"/latest/{run.name}", recursive=True)
    with open_checkpoint(url) as checkpoint:
        assert checkpoint.tag == "one"
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(100))
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with zstore.initialize(model=model, config=config)[0] as engine:
        engine.load_checkpoint(str(run), load_module_only=True)
        assert torch.equal(model.w.detach(), torch.ones(100))


KILLED = """
import os, pathlib, sys
import numpy as np
from tests.checkpoint.checkpoints import open_world
from zstore.testing.faults import DeadlyFiles

def save(folder, fail_at):
    for number, tag in enumerate(("one", "two"), 1):
        files = DeadlyFiles(fail_at if number == 2 else None, only=frozenset({"rename"}))
        with open_world({"model/w": np.full(100, number, np.float32)}, files=[files]) as world:
            world.save(folder, step=number, tag=tag)

for fail_at in range(10):
    pid = os.fork()
    if pid == 0:
        try:
            save(pathlib.Path(sys.argv[1]) / str(fail_at), fail_at)
        finally:
            os._exit(0)
    print(os.waitpid(pid, 0)[1])
"""


def test_a_save_that_is_killed_anywhere_leaves_the_old_or_the_new_state(tmp_path: Path) -> None:
    """One with the new state and the old `latest` among them, which a load and the next save tell from an edited one."""
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    statuses = list(map(int, done.stdout.split()))
    assert set(statuses) == {0, signal.SIGKILL}
    stale = 0
    for fail_at in range(10):
        folder = tmp_path / str(fail_at)
        committed = (folder / "two" / "zstore.json").exists()
        assert opened(folder) == ("two" if committed else "one")
        stale += committed and (folder / "latest").read_text() == "one\n"
        assert sweep(Files(), folder) == []
        assert opened(folder) == ("two" if committed else "one")
        assert committed or statuses[fail_at]
    assert stale
