"""What commands on checkpoints load, and what their start takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.runs import make_config, start, step

LOADED = """
import json, sys
sys.argv = ["zstore", *sys.argv[1:]]
from zstore.tools.cli import app
try:
    app()
except SystemExit as end:
    assert not end.code, end
print(json.dumps(sorted(sys.modules)))
"""
HEAVY = {"torch", "asyncio", "aiofiles", "ssl", "zarr", "fsspec", "tensorstore", "transformers", "rich.progress"}
UNUSED = {
    "zstore.store",
    "zstore.store.tiers",
    "zstore.store.stream",
    "zstore.engine",
    "zstore.checkpoint.save",
    "zstore.remote.service",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with start(make_config()) as engine:
        step(engine)
        engine.save_checkpoint(str(folder))
    return folder


def loaded(*words: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *words], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("command", ["ls", "inspect"])
def test_a_look_at_a_checkpoint_loads_what_reads_it_and_no_more(command: str, saved: Path) -> None:
    modules = loaded(command, str(saved))
    assert modules & (HEAVY | UNUSED) == set()
    assert "zstore.checkpoint.catalog" in modules


NUMBERS = ["--params", "7e9", "--hidden", "4096", "--layers", "32", "--gpus", "1", "--gpu-memory", "24GB"]
CONFIG = {"train_batch_size": 8, "bf16": {"enabled": True}}


def test_what_needs_no_torch_loads_none(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    for words in (
        ["plan", *NUMBERS],
        ["plan", *NUMBERS, "--config", str(tmp_path / "ds.json"), "--memory", "1TB", "--gpu-memory", "1TB"],
        ["config", str(tmp_path / "ds.json")],
        ["verify", str(saved)],
        ["diff", str(saved), str(saved)],
        ["prune", str(saved), "--keep-last", "1"],
        ["consolidate", str(saved), str(tmp_path / "weights")],
    ):
        assert "torch" not in loaded(*words), words


def test_help_loads_no_arrays() -> None:
    modules = loaded("--help")
    assert modules & {"numpy", "pydantic", "zstore.checkpoint", "zstore.format.arrays", "torch"} == set()


@pytest.mark.parametrize("command", ["inspect", "run"])
def test_the_help_of_a_command_loads_nothing_that_draws(command: str) -> None:
    modules = loaded(command, "--help")
    assert modules & (HEAVY | {"rich.console", "rich.table", "rich.markdown"}) == set()
