"""Bad input to whole runs: the train command, Ctrl-C in a save, a full disk. Real processes, real signals, a real disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.engine.runs import whole
from tests.waiting import until
from zstore.tools import cli

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def write_config(folder: Path, **keys: Any) -> Path:
    path = folder / "ds.json"
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    }
    path.write_text(json.dumps(config | keys))
    return path


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    config = write_config(tmp_path)

    def run(*words: object) -> tuple[int, str]:
        command = ["zstore", "train", "--config", config, "--model", "gpt-tiny", "--seq-len", 32, *words]
        monkeypatch.setattr(sys, "argv", [str(word) for word in command])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert out == ""
        code = ended.value.code
        assert isinstance(code, int) or code is None
        return code or 0, err

    return run


def test_text_that_cannot_serve_is_named_before_anything_is_made(train: Any, tmp_path: Path) -> None:
    empty, short, folder = tmp_path / "empty.txt", tmp_path / "short.txt", tmp_path / "none"
    empty.touch()
    short.write_bytes(b"x" * 31)
    folder.mkdir()
    save = tmp_path / "ckpt"
    for data, message in (
        (empty, f"zstore: {empty} has no text (1 files, 0 bytes)"),
        (short, f"zstore: {short} has 31 bytes, but one sample takes 32"),
        (folder, f"zstore: {folder} has no text (0 files, 0 bytes)"),
        (tmp_path / "missing", "does not exist: check --data"),
    ):
        code, err = train("--steps", 1, "--data", data, "--save", save)
        assert code == 1
        assert message in err
        assert err.count("\n") == 1
    assert not save.exists()


def test_a_resume_that_cannot_be_is_named_and_changes_nothing(train: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 4)
    save = tmp_path / "ckpt"
    # Nothing to resume from is a fresh start only where `auto` was asked for.
    code, err = train("--steps", 1, "--data", text, "--save", save, "--resume", tmp_path / "missing")
    assert (code, save.exists()) == (1, False)
    assert "expected DIR or DIR@TAG of a saved checkpoint" in err
    assert train("--steps", 1, "--data", text, "--save", save, "--resume", "auto")[0] == 0
    assert whole(save) == ["step-00000001"]

    for words, message in (
        (["--resume", f"{save}@best"], "'best'"),
        (["--resume", "auto", "--seed", 5], "--seed 5: the checkpoint's run used 0"),
        (["--resume", "auto", "--seq-len", 16], "--seq-len 16: the checkpoint's run used 32"),
        (["--resume", "auto", "--model", "gpt-small"], "is from a different model or optimizer"),
        (["--save", "/proc/ckpt"], "--save: the folder is not writable; choose one that this user can write to"),
        (["--save", text], "--save: the folder is not writable"),
        (["--save", "/proc/ckpt", "--nproc", 2], "--save: the folder is not writable"),
    ):
        code, err = train("--steps", 2, "--data", text, "--save", save, *words)
        assert code == 1
        assert message in err
        assert err.startswith("zstore: ")
        assert err.count("zstore: ") == 1
    assert whole(save) == ["step-00000001"]
    assert train("--steps", 1, "--data", text, "--save", save, "--resume", "auto") == (
        0,
        "the checkpoint is at step 1 of 1: nothing to do\n",
    )


@pytest.mark.parametrize(
    ("keys", "words", "message"),
    [
        ({"zero_optimization": {"stage": 7}}, [], "ds.json: zero_optimization.stage: choose one of"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/dev/null/x"}}},
            [],
            "nvme_path: expected a folder, or one that can be created",
        ),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e30}}}, ["--steps", "3"], "norm of the gradients is nan"),
    ],
)
def test_a_failed_start(keys: dict[str, Any], words: list[object], message: str, train: Any, tmp_path: Path) -> None:
    write_config(tmp_path, **keys)
    save = tmp_path / "runs" / "first" / "ckpt"
    code, err = train("--steps", 1, "--save", save, *words)
    assert code == 1
    assert message in err
    # Of a run that took steps the journal alone.
    took_steps = "--steps" in words
    assert [path.name.partition("-")[0] for path in save.rglob("*")] == ["journal"] * took_steps
    assert (tmp_path / "runs").exists() == took_steps


def wait_for_save(process: warm.Popen, folder: Path, seconds_more: float) -> None:
    def begun() -> bool:
        assert process.poll() is None
        return folder.is_dir() and any(".tmp-" in path.name for path in folder.iterdir())

    until(begun)
    end = time.perf_counter() + seconds_more
    while time.perf_counter() < end:
        pass


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_ctrl_c_in_a_save_of_the_train_command_resumes(nproc: int, train: Any, tmp_path: Path) -> None:
    save = tmp_path / "ckpt"
    words = ["--config", tmp_path / "ds.json", "--model", "gpt-tiny", "--seq-len", 32, "--save", save]
    command = [sys.executable, "-m", "zstore", "train", *map(str, words), "--steps", "1000", "--save-every", "1"]
    command += ["--nproc", str(nproc)]
    with warm.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True
    ) as process:
        while not (save / "latest").exists():
            assert not warm.ends_within(process, 0.01)
        wait_for_save(process, save, 0.01)
        # As a terminal does it: to the launcher and all ranks.
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert list(warm.without_gloo(out.splitlines())) == []
    assert "Traceback" not in err, err
    last = len(whole(save))
    assert whole(save) == [f"step-{number:08d}" for number in range(1, last + 1)]
    code, err = train("--steps", last + 1, "--save", save, "--resume", "auto")
    assert code == 0, err
    assert f"step {last + 1}: the save stalled" in err


FULL = """
import subprocess, sys
from pathlib import Path
import pytest
from tests.engine.runs import make_config, start, state_of, step, unchanged, whole
from zstore.errors import DiskFullError, UsageError

disk, elsewhere = Path(sys.argv[1]), sys.argv[2]

def size(text):
    verb = ["-o", f"remount,size={text}"] if disk.is_mount() else ["-t", "tmpfs", "-o", f"size={text}", "tmpfs"]
    subprocess.run(["mount", *verb, str(disk)], check=True)

size("600k")
with pytest.raises(DiskFullError, match=str(disk)):
    start(make_config(3, "nvme", disk))
assert not list(disk.rglob("*.shard"))
size("1200k")
with start(make_config(3, "nvme", disk)) as engine:
    step(engine)
    with unchanged(engine):
        with pytest.raises(DiskFullError, match="the next step needs"):
            engine.save_checkpoint(str(disk / "ckpt"))
        assert not (disk / "ckpt").exists() or whole(disk / "ckpt") == []
    engine.save_checkpoint(elsewhere)
    before = state_of(engine)
with start(make_config(3, "nvme", disk)) as engine:
    engine.load_checkpoint(elsewhere)
    assert state_of(engine) == before
    # Room for the checkpoint's own files, and none for the next generation of what it links.
    size("2200k")
    with pytest.raises(DiskFullError, match="the next step .* too"):
        engine.save_checkpoint(str(disk / "ckpt"))
    assert state_of(engine) == before
    size("40m")
    engine.save_checkpoint(str(disk / "ckpt"))
    # Something else takes the room.
    size("2200k")
    with pytest.raises(DiskFullError, match=str(disk)) as caught:
        step(engine)
    assert "applied in part" in caught.value.__notes__[0]
    size("40m")
    for torn in (lambda: step(engine), lambda: engine.save_checkpoint(elsewhere, "torn")):
        with pytest.raises(UsageError, match="the state is inconsistent; load a checkpoint"):
            torn()
    engine.load_checkpoint(str(disk / "ckpt"))
    with unchanged(engine, steps=2):
        pass
    engine.save_checkpoint(str(disk / "ckpt"))
    assert whole(disk / "ckpt") == ["step-00000002", "step-00000003"]
print("done")
"""


def test_a_full_disk_is_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    private = [unshare or "", "--map-root-user", "--mount"]
    if unshare is None or subprocess.run([*private, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False).returncode:
        pytest.skip("may not mount")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [*private, sys.executable, "-c", FULL, str(disk), str(tmp_path / "elsewhere")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=100)
    assert done.stdout == "done\n", done.stderr
