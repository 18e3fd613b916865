"""Ctrl-C in the middle of a command that writes: it ends with an error code, and nothing half written is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.checkpoints import save_arrays

INTERRUPT = """
import os, signal, sys
from zstore.io.files import Files
from zstore.tools import cli

write = Files.write_from

def write_and_interrupt(self, file, data, offset):
    # Once, in a thread of the pipeline, when a whole block of 1 MiB or more goes out.
    if data.nbytes >= 2**20 and Files.write_from is write_and_interrupt:
        Files.write_from = write
        os.kill(os.getpid(), signal.SIGINT)
    return write(self, file, data, offset)

Files.write_from = write_and_interrupt
sys.argv = ["zstore", *sys.argv[1:]]
cli.main()
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = np.ones((1000, 4000), np.float32)
    return save_arrays(tmp_path_factory.mktemp("run"), {f"model/h.{i}.w": rows for i in range(4)}, world_size=2)


@pytest.mark.parametrize("words", [["consolidate"], ["reshard", "--world-size", "3"]], ids=lambda words: words[0])
def test_nothing_is_left(words: list[str], saved: Path, tmp_path: Path) -> None:
    command, *options = words
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT, command, str(saved), str(tmp_path / "out"), *options],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode not in (0, 2), done.stderr
    assert "Traceback" not in done.stderr
    left = [path for path in tmp_path.rglob("*") if path.name != "out"]
    assert left == []
    assert not (tmp_path / "out/model.safetensors").exists()
