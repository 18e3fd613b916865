"""`zstore train` and what starts it: signals reach every rank, and the exit codes say what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import warm
from tests.tools.train_runs import config_file, rows
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.tools.train.command import launch

PYTHON = [sys.executable, "-c"]


@contextmanager
def training(command: list[str], tmp_path: Path, text: Path, *more: object) -> Iterator[warm.Popen]:
    """A run of very many steps that saves often; the block begins when it has saved."""
    words = ["train", "--config", config_file(tmp_path), "--data", text, "--model", "gpt-tiny", "--seq-len", 16]
    words += ["--steps", 10**6, "--save", tmp_path / "run", "--save-every", 10, *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with warm.Popen(
        [*command, *map(str, words)],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            assert process.stderr is not None
            seen = []
            for line in process.stderr:
                seen.append(line)
                if "save stall" in line:
                    break
            else:
                raise AssertionError("".join(seen))
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def saved_step(tmp_path: Path) -> int:
    with open_checkpoint(tmp_path / "run") as reader:
        assert verify_checkpoint(reader) == []
        return reader.record.step


def finish(process: warm.Popen) -> tuple[int, str]:
    assert process.stderr is not None
    rest = process.stderr.read()
    return process.wait(200), rest


ZSTORE = [sys.executable, "-m", "zstore"]


def test_a_signal_saves_and_ends_with_75(tmp_path: Path, text: Path) -> None:
    with training(ZSTORE, tmp_path, text, "--nproc", 2, "--metrics", tmp_path / "m.jsonl") as process:
        process.send_signal(signal.SIGTERM)
        code, rest = finish(process)
    assert code == 75, rest
    assert "Traceback" not in rest, rest
    assert saved_step(tmp_path) == rows(tmp_path / "m.jsonl")[-1]["step"]


def test_no_rank_outlives_its_launcher(tmp_path: Path, text: Path) -> None:
    with training(ZSTORE, tmp_path, text, "--nproc", 2) as process:
        process.kill()
        code, rest = finish(process)  # the pipe ends when the last rank did
    assert code == -signal.SIGKILL
    assert "SIGTERM: will stop after this step" in rest, rest


# -- the launcher alone -----------------------------------------------------------------------------------------------


def test_ranks_that_stopped_are_no_failure() -> None:
    with pytest.raises(SystemExit) as caught:
        launch([*PYTHON, "import os, sys; sys.exit(75 * int(os.environ['RANK']))"], 2)
    assert caught.value.code == 75


def test_a_second_signal_reaches_the_ranks_too(tmp_path: Path) -> None:
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (signal.signal(signal.SIGUSR1, signal.SIG_DFL),\n"
        "    os.kill(os.getppid(), signal.SIGUSR1)))\n"
        "os.kill(os.getppid(), signal.SIGUSR1)\n"
        "while True: time.sleep(0.1)"
    )
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(SystemExit) as caught:
        launch([*PYTHON, code], 1)
    assert caught.value.code == 128 + signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) == before
