"""The demo's beginning and end, and what `make` says and does, with a stand-in for the Python that makes environments."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.engine.runs import make_config, start, step
from zstore.serve.runs import RunTable
from zstore.serve.settings import Root, Settings
from zstore.tools import cli
from zstore.tools.demo import SAVE_EVERY, Demo, next_commands

ROOT = Path(__file__).parents[2]
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

INTERPRETER = """#!/bin/sh
# Says what it was called with, and makes a copy of itself for an environment.
echo "$@" >> "{log}"
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "--version ") echo "Python 3.11.0" ;;
  "-m zstore.tools.demo") echo "== Train" ;;
  "-c "*version*torch*) echo "torch==1.2.3" ;;
esac
"""


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


# -- make ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    python.write_text(INTERPRETER.format(log=tmp_path / "log"))
    python.chmod(0o755)
    return tmp_path


def make(tree: Path, *words: str) -> list[str]:
    command = ["make", "--no-print-directory", *words, f"PYTHON={tree / 'python'}", "VENV=env"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_make
def test_make_alone_lists_what_there_is_a_line_each(tree: Path) -> None:
    lines = make(tree)
    listed = [match[1] for line in lines if (match := re.match(r"make ([a-z]+) +\S", line))]
    assert {"demo", "test", "lint", "bench", "soak", "clean"} <= set(listed)
    assert not (tree / "log").exists()


@needs_make
def test_make_says_a_line_for_each_step_and_does_each_once(tree: Path) -> None:
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    assert make(tree, "demo") == [
        "Making the environment env with Python 3.11.0",
        f"Installing {torch} into env (up to several GB, unless pip has it)",
        "Installing zstore and what it runs on into env",
        "== Train",
    ]
    (tree / "log").unlink()
    assert make(tree, "demo") == ["== Train"]
    assert (tree / "log").read_text() == "-m zstore.tools.demo\n"
