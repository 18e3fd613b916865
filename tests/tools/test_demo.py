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


def test_what_a_former_demo_left_goes_while_the_next_one_trains(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    (folder / "run/step-00000020").mkdir(parents=True)
    (folder / "run/step-00000020/zstore.json").write_text("{}")
    sweeper = Demo(folder, "gpt-tiny", 2 * SAVE_EVERY)._make_folder()
    assert not (folder / "run").exists()
    sweeper.join(200)
    assert [path.name for path in folder.iterdir()] == ["nvme"]
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


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


# -- .ci/pythons --------------------------------------------------------------------------------------------------------

PYTHON_OF_CI = """#!/bin/sh
case "$*" in
  *"{fails}"*) echo "ERROR: {fails} went wrong"; exit 1 ;;
  *version_info*) echo {version} ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pytest "*) echo "$@" >> "{log}"; echo "3 passed in 0.1s" ;;
esac
"""


@pytest.mark.skipif(not shutil.which("bash") or not shutil.which("timeout"), reason="needs bash and coreutils")
@pytest.mark.parametrize(("fails", "code"), [("-m pytest", 1), ("--editable", 1), ("ensurepip", 0), ("nothing", 0)])
def test_pythons_of_ci_are_forgiven_a_failed_download_alone(tmp_path: Path, fails: str, code: int) -> None:
    for name in (".ci/pythons", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("test_ends.py", "test_ends_with_torch.py"):
        (tmp_path / "tests").mkdir(exist_ok=True)
        (tmp_path / "tests" / name).write_text("import torch\n" * ("torch" in name) + "@pytest.mark.endings\n")
    for version, failing in {"3.11": fails, "3.12": "nothing", "3.13": "check download", "3.14": "nothing"}.items():
        python = tmp_path / f"python{version}"
        python.write_text(PYTHON_OF_CI.format(fails=failing, version=version, log=tmp_path / "log"))
        python.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYENV_ROOT": str(tmp_path), "PYTHON": "python3.12"}
    command = [tmp_path / ".ci/pythons", "endings"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == code, done.stderr
    first, main, broken, last = done.stdout.splitlines()
    expected = {"ensurepip": "not run: not found", "nothing": "3 passed"}.get(
        fails, f"failed: ERROR: {fails} went wrong"
    )
    assert first.startswith(f"Python 3.11: {expected}")
    assert main == "Python 3.12: not run: the whole suite runs on it"
    assert broken.startswith("Python 3.13: not run: what the tests need could not be downloaded: ERROR: ")
    assert last == "Python 3.14: 3 passed in 0.1s"
    assert "tests/test_ends.py" in (tmp_path / "log").read_text()
    assert "tests/test_ends_with_torch.py" not in (tmp_path / "log").read_text()
