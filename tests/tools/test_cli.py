"""The command line: exit codes, streams, usage errors, and what reaches the commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import zstore
from tests.tools.commands import run
from zstore.tools import options
from zstore.tools.cli import app

COMMANDS = ("train", "plan", "doctor", "ls", "inspect", "verify", "diff", "consolidate", "reshard")


def test_help_lists_the_commands_on_stdout() -> None:
    done = run("--help", anew=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for command in COMMANDS:
        assert command in done.stdout


def test_the_installed_script_is_the_same_command() -> None:
    script = Path(sys.executable).with_name("zstore")
    if not script.exists():
        pytest.skip("zstore is not installed beside this interpreter")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == zstore.__version__


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["trian"],
        ["train"],
        ["train", "--config", "/no/such.json", "--model", "gpt-tiny", "--steps", "1"],
        ["train", "--config", __file__, "--model", "gpt-tiny", "--steps", "1", "--save-every", "1"],
        ["train", "--config", __file__, "--model", "gpt-tiny", "--steps", "1", "--resume", "auto"],
        ["consolidate"],
        ["consolidate", "x", "--dtype", "fp8"],
        ["consolidate", "x", "--max-shard-size", "huge"],
        ["reshard", "x", "y", "--world-size", "0"],
        ["verify", "--no-such-option", "x"],
        ["plan"],
        ["plan", "--model", "gpt-tiny", "--params", "7e9"],
        ["plan", "--params", "seven", "--hidden", "4096", "--layers", "32"],
        ["inspect", "x", "--storage-option", "key"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2_and_talks_on_stderr(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(words)
    assert ended.value.code == 2
    said = capfd.readouterr()
    if words:
        assert said.out == ""
        assert "Usage" in said.err


def test_an_error_is_one_message_and_ends_with_1(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    done = run("doctor", "--path", missing, anew=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"zstore: expected an existing folder, got {missing}: create it, or give another --path\n"


_ABORTING = """
import os, sys
class Aborting:
    def __del__(self):
        os.abort()
kept = Aborting()
import zstore.tools.cli as cli
cli.main()
"""


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["ls", "/no/such/folder"], 1)])
def test_a_rank_ends_as_it_said_whatever_the_end_of_the_interpreter_would_do(words: list[str], code: int) -> None:
    command = [sys.executable, "-c", _ABORTING, *words]
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "2"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == code, done.stderr
    assert done.stdout.strip() == (zstore.__version__ if code == 0 else "")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("5GB", 5 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5G", 15 * 10**8),
        ("1000000", 10**6),
        ("64B", 64),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert options.parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "number"),
    [("7e9", 7 * 10**9), ("7B", 7 * 10**9), ("1.3 b", 13 * 10**8), ("150T", 15 * 10**13), ("12", 12)],
)
def test_numbers(text: str, number: int) -> None:
    assert options.parse_number(text) == number


@pytest.mark.parametrize("text", ["", "GB", "five", "-5GB", "5XB", "0", "0.1", "5 GB 3", "5iB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a size"):
        options.parse_size(text)
