"""The examples of `docs/service.md`, and those of `docs/remote.md` that read from a service, run against one."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpoint.checkpoints import save_arrays
from tests.serve.conftest import Serve
from tests.serve.sample import RUN_ID, JournalWriter
from tests.tools.commands import done, here
from zstore.journal import read

_DOCS = Path(__file__).parents[2] / "docs"
TEXT = (_DOCS / "service.md").read_text()


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
                assert here(*words)[0] == 0
    assert ran == ["zstore serve", "curl", "zstore verify", "zstore consolidate"]
    for values in (names["weight"], names["same"], load_file("weights/model.safetensors")["0.weight"]):
        np.testing.assert_array_equal(values, weight)
    np.testing.assert_array_equal(names["first_rows"], weight[:2])
    downloaded = Path("weights/model.safetensors").read_bytes()
    assert downloaded == Path("consolidated/model.safetensors").read_bytes()
    assert names["losses"] == [line["loss"] for line in read(tmp_path / "runs/gpt") if line["kind"] == "step"]


def test_the_examples_of_reading_from_a_service_run(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZSTORE_TOKEN", "open-sesame-open")
    values = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    save_arrays(tmp_path / "run", {"model/0.weight": values}, world_size=2, step=2)
    base = serve(tmp_path / "run", token="open-sesame-open")
    text = (_DOCS / "remote.md").read_text().partition("## Reading from a service\n")[2].partition("\n## ")[0]
    names: dict[str, Any] = {}
    for language, block in re.findall(r"```(python|bash)\n(.*?)```", text, re.DOTALL):
        code = block.replace("http://store:8700", base)
        if language == "python":
            exec(code, names)
            continue
        for line in code.splitlines():
            done(line)
    assert np.array_equal(names["rows"], values[10:20])
    assert np.array_equal(names["first"], values[0])


def test_every_option_of_the_command_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    options = set(re.findall(r"--[a-z-]+", here("serve", "--help")[1])) - {"--help"}
    table = TEXT[TEXT.index("| option |") : TEXT.index("## Authentication")]
    assert {option for option in options if f"`{option}" not in table} == set()
