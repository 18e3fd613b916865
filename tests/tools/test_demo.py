"""The demo's beginning and end."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from tests.engine.runs import make_config, start, step
from zstore.serve.runs import RunTable
from zstore.serve.settings import Root, Settings
from zstore.tools import cli
from zstore.tools.demo import SAVE_EVERY, Demo, next_commands


def test_the_demo_begins_without_what_takes_long_to_load() -> None:
    code = "import sys, zstore.tools.demo; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'zstore.tools.demo'" in done.stdout
    for name in ("torch", "numpy", "rich", "typer", "pydantic", "zstore.checkpoint", "zstore.engine"):
        assert f"'{name}'" not in done.stdout


def test_what_the_demo_says_to_type_next_works(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "gpt-tiny", 2 * SAVE_EVERY)
    with start(make_config()) as engine:
        for tag in (SAVE_EVERY, 2 * SAVE_EVERY):
            step(engine)
            engine.save_checkpoint(str(tmp_path / "run"), f"step-{tag:08d}")
    config = demo._config("zero1-memory", {"stage": 1})
    first = ["--config", str(config), "--model", "gpt-tiny", "--steps", "1", "--seq-len", "16"]
    made = CliRunner().invoke(cli.app, ["train", *first, "--save", str(tmp_path / "run-1")])
    assert made.exit_code == 0, made.output
    commands = [shlex.split(command) for command, _ in next_commands(str(tmp_path), "gpt-tiny", 2 * SAVE_EVERY)]
    names = []
    for program, *words in commands:
        assert Path(program).name == "zstore"
        names.append(words[0])
        if words[0] == "serve":
            roots = tuple(Root.parse(place) for place in words[1:])
            assert list(RunTable(Settings(roots=roots)).all()) == ["run", "run-1"]
            continue
        if words[0] == "train":
            assert words[words.index("--steps") + 1] == str(3 * SAVE_EVERY)
            words[words.index("--steps") + 1] = "2"
        done = CliRunner().invoke(cli.app, words)
        assert done.exit_code == (1 if words[0] == "diff" else 0), (words, done.output)
    assert names == ["serve", "ls", "inspect", "diff", "train", "doctor", "plan"]
    assert (tmp_path / "run-1/step-00000002").is_dir()
