"""The examples of `docs/service.md` run against a service, and what it says of commands holds."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from tests.checkpoint.checkpoints import save_arrays
from tests.serve.conftest import Serve
from tests.serve.sample import RUN_ID, JournalWriter
from zstore.journal import read
from zstore.tools.cli import app

TEXT = (Path(__file__).parents[2] / "docs/service.md").read_text()


def test_the_examples_run(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weight = np.arange(32, dtype=np.float32).reshape(8, 4)
    save_arrays(tmp_path / "runs" / "gpt", {"model/0.weight": weight, "model/0.bias": np.ones(8, np.float32)})
    journal = JournalWriter(tmp_path / "runs" / "gpt" / f"journal-{RUN_ID}.jsonl", 1e9)
    journal.start(RUN_ID)
    journal.steps(5)
    base = serve(tmp_path / "runs")
    names: dict[str, Any] = {}
    ran: list[str] = []
    for language, block in re.findall(r"```(python|bash)\n(.*?)```", TEXT, re.DOTALL):
        code = block.replace("http://127.0.0.1:8700", base).replace("/data/runs", str(tmp_path / "runs"))
        if language == "python":
            exec(code, names)
            continue
        for line in code.replace("\\\n", " ").splitlines():
            program, *words = shlex.split(line)
            ran.append(f"{program} {words[0]}" if program == "zstore" else program)
            if program == "curl":
                subprocess.run([program, *words], check=True, timeout=200)
            elif words[0] != "serve":
                done = CliRunner().invoke(app, words)
                assert done.exit_code == 0, done.output
    assert ran == ["zstore serve", "curl", "zstore verify", "zstore consolidate"]
    for values in (names["weight"], names["same"], load_file("weights/model.safetensors")["0.weight"]):
        np.testing.assert_array_equal(values, weight)
    np.testing.assert_array_equal(names["first_rows"], weight[:2])
    downloaded = Path("weights/model.safetensors").read_bytes()
    assert downloaded == Path("consolidated/model.safetensors").read_bytes()
    assert names["losses"] == [line["loss"] for line in read(tmp_path / "runs/gpt") if line["kind"] == "step"]


def test_every_option_of_the_command_is_described() -> None:
    done = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"})
    options = set(re.findall(r"--[a-z-]+", done.output)) - {"--help"}
    table = TEXT[TEXT.index("| option |") : TEXT.index("## Who may do what")]
    assert {option for option in options if f"`{option}" not in table} == set()
