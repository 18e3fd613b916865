"""The command line: exit codes, streams, usage errors, what reaches the commands, progress, what is loaded, and Ctrl-C."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer

import zstore
from tests.checkpoint.checkpoints import save_arrays
from tests.engine.runs import make_config, start, step
from tests.tools.commands import here, run
from zstore.tools import cli, options
from zstore.tools.cli import app
from zstore.tools.printing import ProgressBar


def test_help_lists_the_commands_on_stdout() -> None:
    done = run("--help", anew=True)
    assert (done.returncode, done.stderr) == (0, "")
    for command, text in cli.COMMANDS.items():
        first = text.partition(". ")[0].removesuffix(".")
        assert f"  {command:<11}  {first}\n" in done.stdout
        assert len(first) <= 62  # a line of 80 columns
        _, out, _ = here(command, "--help")
        assert out.splitlines()[2].strip() == f"{first}."


def test_without_a_command_it_says_what_to_type_first(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        app([])
    assert "Start with:\n    zstore doctor  " in "".join(capfd.readouterr())


def test_the_installed_script_is_the_same_command() -> None:
    script = Path(sys.executable).with_name("zstore")
    if not script.exists():
        pytest.skip("zstore is not installed beside this interpreter")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == zstore.__version__


@pytest.mark.parametrize(
    "words",
    [
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
    assert said.out == ""
    assert "Usage" in said.err


def test_an_error_is_one_message_and_ends_with_1(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    done = run("doctor", "--path", missing, anew=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"zstore: expected an existing folder, got {missing}: create it, or pass another --path\n"


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
    assert (done.returncode, "does not exist" in done.stderr) == (code, code == 1), done.stderr
    assert done.stdout.strip() == (zstore.__version__ if code == 0 else "")


def test_sizes_and_numbers() -> None:
    sizes = {"5GB": 5 * 10**9, "512MiB": 512 * 2**20, "1.5G": 15 * 10**8, "1000000": 10**6, "64B": 64}
    assert {text: options.parse_size(text) for text in sizes} == sizes
    numbers = {"7e9": 7 * 10**9, "7B": 7 * 10**9, "1.3 b": 13 * 10**8, "150T": 15 * 10**13, "12": 12}
    assert {text: options.parse_number(text) for text in numbers} == numbers
    for text in ("", "GB", "five", "-5GB", "5XB", "0", "0.1", "5 GB 3", "5iB"):
        with pytest.raises(typer.BadParameter, match="expected a size"):
            options.parse_size(text)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_come_every_thirty_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressBar("verify", 10**9, stream=stream, clock=clock) as progress:
        for _ in range(100):
            clock.now_s += 1
            progress.advance(10**7)
    with ProgressBar("short", stream=stream, clock=clock):
        clock.now_s += 0.2
    lines = stream.getvalue().splitlines()
    assert lines == [
        "verify: 300.00 MB of 1.00 GB (30 %), 10.00 MB/s",
        "verify: 600.00 MB of 1.00 GB (60 %), 10.00 MB/s",
        "verify: 900.00 MB of 1.00 GB (90 %), 10.00 MB/s",
        "verify: 1.00 GB in 100.0 s, 10.00 MB/s",
        "short: 0 bytes in 0.2 s",  # starting took most of it: no rate
    ]


def test_a_terminal_gets_a_line_that_is_written_anew() -> None:
    stream, clock = Terminal(), Clock()
    with ProgressBar("consolidate", 1000, stream=stream, clock=clock) as progress:
        for _ in range(2):
            clock.now_s += 1
            progress.advance(500)
        progress.print_line("a line above\x1b it")
    clear = "\r\x1b[K"
    assert stream.getvalue().split(clear)[1:] == [
        "consolidate: 500 bytes of 1.00 kB (50 %), 500 bytes/s",
        "consolidate: 1.00 kB of 1.00 kB (100 %), 500 bytes/s",
        "a line above\\x1b it\n",
        "consolidate: 1.00 kB in 2.0 s, 500 bytes/s\n",
    ]


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
    program = [sys.executable, "-c", INTERRUPT, command, str(saved), str(tmp_path / "out"), *options]
    done = subprocess.run(program, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode not in (0, 2), done.stderr
    assert "Traceback" not in done.stderr
    left = [path for path in tmp_path.rglob("*") if path.name != "out"]
    assert left == []
    assert not (tmp_path / "out/model.safetensors").exists()


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
UNUSED = {"zstore.store", "zstore.store.tiers", "zstore.store.stream", "zstore.engine", "zstore.remote.service"}


@pytest.fixture(scope="module")
def saved_startup(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def test_a_look_at_a_checkpoint_loads_what_reads_it_and_no_more(command: str, saved_startup: Path) -> None:
    modules = loaded(command, str(saved_startup))
    assert modules & (HEAVY | UNUSED) == set()
    assert "zstore.checkpoint.catalog" in modules


NUMBERS = ["--params", "7e9", "--hidden", "4096", "--layers", "32", "--gpus", "1", "--gpu-memory", "24GB"]
CONFIG = {"train_batch_size": 8, "bf16": {"enabled": True}}


def test_what_needs_no_torch_loads_none(saved_startup: Path, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    for words in (
        ["plan", *NUMBERS],
        ["plan", *NUMBERS, "--config", str(tmp_path / "ds.json"), "--memory", "1TB", "--gpu-memory", "1TB"],
        ["config", str(tmp_path / "ds.json")],
        ["verify", str(saved_startup)],
        ["diff", str(saved_startup), str(saved_startup)],
        ["prune", str(saved_startup), "--keep-last", "1"],
        ["consolidate", str(saved_startup), str(tmp_path / "weights")],
    ):
        assert "torch" not in loaded(*words), words


def test_help_loads_no_arrays() -> None:
    modules = loaded("--help")
    assert modules & {"numpy", "pydantic", "zstore.checkpoint", "zstore.format.arrays", "torch"} == set()


@pytest.mark.parametrize("command", ["inspect", "run"])
def test_the_help_of_a_command_loads_nothing_that_draws(command: str) -> None:
    modules = loaded(command, "--help")
    assert modules & (HEAVY | {"rich.console", "rich.table", "rich.markdown"}) == set()
