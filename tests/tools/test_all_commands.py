"""What all commands on checkpoints have: `--json`, a line with bytes and seconds at the end, a plan first, and `--memory`."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zstore
from tests.checkpoint.checkpoints import save_arrays
from zstore.checkpoint.reader import open_checkpoint
from zstore.errors import CheckpointNotFoundError
from zstore.io.files import Files
from zstore.remote.bucket import BucketFolder
from zstore.remote.service import open_folder
from zstore.tools import cli, options
from zstore.tools.consolidate import consolidate_command
from zstore.tools.convert import convert_command
from zstore.tools.diff import diff_command
from zstore.tools.inspect import inspect_command
from zstore.tools.prune import prune_command
from zstore.tools.reshard import reshard_command
from zstore.tools.verify import verify_command

URL = "memory://bucket/run"
ARRAYS = {"model/w": np.arange(300_000, dtype=np.float32).reshape(1000, 300), "model/b": np.zeros(77, np.float32)}

READING = {"verify": ["verify", "{last}"], "diff": ["diff", "{other}", "{last}"]}
WRITING = {
    "consolidate": ["consolidate", "{last}", "{out}", "--dtype", "fp32"],
    "reshard": ["reshard", "{last}", "{out}", "--world-size", "3"],
    "reshard URL": ["reshard", "{last}", URL],
    "reshard N URL": ["reshard", "{last}", URL, "--world-size", "3", "--compression", "zstd"],
    "convert": ["convert", "{last}", "{out}", "--world-size", "3"],
    "convert --to torch": ["convert", "{last}", "{out}", "--to", "torch"],
    "convert --to safetensors": ["convert", "{last}", "{out}", "--to", "safetensors"],
    "prune": ["prune", "{run}", "--keep-last", "1"],
    "prune URL": ["prune", URL, "--keep-last", "1"],
}
ALL = {"inspect": ["inspect", "{last}"], "ls": ["ls", "{run}"]} | READING | WRITING

CLOSING = re.compile(r": (\d+ bytes|[\d.]+ [kMG]B) in \d+\.\d s")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    save_arrays(tmp_path / "run", ARRAYS, world_size=2, step=1)
    last = save_arrays(tmp_path / "run", ARRAYS | {"model/b": np.ones(77, np.float32)}, world_size=2, step=2)
    other = save_arrays(tmp_path / "other", ARRAYS, world_size=3)  # cut in another way: it is read
    places = {"run": tmp_path / "run", "other": other, "last": last, "out": tmp_path / "out"}

    def run(name: str, *more: str) -> tuple[int, str, str]:
        if name == "prune URL":
            memory.put(str(places["run"]), "/bucket/run", recursive=True)
        words = [word.format(**places) for word in ALL[name]]
        monkeypatch.setattr("sys.argv", ["zstore", *words, *more])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_no_command_is_left_out() -> None:
    others = {"train", "run", "plan", "config", "doctor", "serve"}
    assert {words[0] for words in ALL.values()} == set(cli.COMMANDS) - others


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("name", READING | WRITING)
def test_it_ends_with_bytes_and_the_rate(name: str, more: list[str], run: Run) -> None:
    code, out, err = run(name, *more)
    assert code == (1 if name == "diff" else 0), err
    last = err.splitlines()[-1]
    assert CLOSING.search(last), err
    assert ": 0 bytes" not in last
    if more:
        told = json.loads(out)
        assert told["bytes"] > 0
        assert told["seconds"] > 0
        assert told["gb_per_s"] == pytest.approx(told["bytes"] / told["seconds"] / 1e9, rel=0.01, abs=1e-5)
    assert ("no faults: every chunk of" in err) == (name == "verify")


@pytest.mark.parametrize("name", sorted(set(WRITING) - {"reshard URL"}))
def test_the_plan_is_printed_before_anything_is_written_or_removed(
    name: str, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before: list[str] = []

    def watch(owner: type, method: str, counts: Callable[..., bool] = lambda *args, **options: True) -> None:
        original = getattr(owner, method)

        def watched(self: Any, *args: Any, **options: Any) -> Any:
            if not before and counts(*args, **options):
                before.append(capsys.readouterr().err)
            return original(self, *args, **options)

        monkeypatch.setattr(owner, method, watched)

    watch(Files, "opened", lambda *args, **options: bool(options.get("write")))
    watch(Files, "rename")
    watch(BucketFolder, "write_small")
    code, _, after = run(name, "--json")
    assert code == 0, after
    assert before[0].startswith("plan: "), before
    assert "plan: " not in after


@pytest.mark.parametrize("name", sorted({"inspect"} | set(READING) | set(WRITING) - {"prune", "prune URL"}))
def test_memory_that_was_asked_for_holds_or_is_refused(name: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(name, "--memory", "63MiB")[0] == 2
    monkeypatch.setattr(options, "_ARRAY_BYTES", 200 * 2**20)
    # What is asked for by name does not give way, even where it is the default.
    code, out, err = run(name, "--memory", "256MiB")
    assert (code, out) == (1, "")
    assert re.search(r"use `--memory \d+MiB` or more", err), err
    code, _, err = run(name)
    assert code == (1 if name == "diff" else 0), err


@pytest.mark.parametrize(("name", "world_size"), [("reshard URL", 2), ("reshard N URL", 3)])
def test_a_checkpoint_that_is_uploaded_is_found_where_json_says(name: str, world_size: int, run: Run) -> None:
    code, out, err = run(name, "--json")
    assert code == 0, err
    assert json.loads(out)["url"] == f"{URL}/step-00000002"
    with open_checkpoint(open_folder(URL)) as reader:
        assert reader.record.world_size == world_size
    # Where it was in between is of no use to anybody.
    assert "zstore-reshard-" not in out + err


def test_other_softwares_checkpoints_are_not_read_behind_urls(memory: Any, tmp_path: Path) -> None:
    memory.pipe_file("/bucket/theirs/model.safetensors", b"x")
    theirs, out = "memory://bucket/theirs", tmp_path / "out"
    for call in (
        lambda: inspect_command(theirs),
        lambda: verify_command(theirs),
        lambda: diff_command(theirs, theirs),
        lambda: consolidate_command(theirs, out, "fp32", 10**9),
        lambda: reshard_command(theirs, out),
        lambda: convert_command(theirs, out),
        lambda: zstore.open_checkpoint(theirs),
        lambda: prune_command(theirs, keep_last=1),
    ):
        with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
            call()
