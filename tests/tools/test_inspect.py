"""`zstore inspect`, `zstore verify` and `zstore ls`: what they print, and their exit codes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.checkpoints import save_arrays
from zstore.checkpoint.retention import Keep
from zstore.tools.diff import diff_command
from zstore.tools.inspect import inspect_command
from zstore.tools.ls import ls_command
from zstore.tools.opening import Common
from zstore.tools.prune import prune_folder
from zstore.tools.verify import verify_command

ARRAYS = {
    "model/h.2.weight": np.ones((100, 30), np.float32),
    "model/h.10.weight": np.ones((100, 30), np.float32),
    "optimizer/exp_avg/h.2.weight": np.ones((100, 30), np.float32),
    "buffer/[red]odd[/]": np.array(True),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "ckpt"
    save_arrays(folder, ARRAYS, world_size=2, step=1)
    save_arrays(folder, ARRAYS, world_size=2, step=2, tag="[best]")
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "ckpt"))


def test_json_tells_everything(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_command(saved, Common(json=True)) == 0
    told = json.loads(capsys.readouterr().out)
    checkpoint = told["checkpoint"]
    assert (checkpoint["tag"], checkpoint["step"], checkpoint["num_arrays"]) == ("[best]", 2, 4)
    assert checkpoint["array_bytes"] == 3 * 12_000 + 1
    path = Path(checkpoint["path"])
    files = [p for p in path.rglob("*") if p.is_file()]
    assert checkpoint["num_files"] == len(files)
    assert checkpoint["size_bytes"] == sum(p.stat().st_size for p in files)
    assert checkpoint["num_shard_files"] == len([p for p in files if p.name.startswith("c.")])
    assert checkpoint["file_bytes"] == sum(p.stat().st_size for p in files if p.name.startswith("c."))
    assert [array["name"] for array in told["arrays"]] == [
        "buffer/[red]odd[/]",
        "model/h.2.weight",
        "model/h.10.weight",
        "optimizer/exp_avg/h.2.weight",
    ]
    weight = told["arrays"][1]
    assert (weight["shape"], weight["dtype"], weight["bytes"], weight["shards"]) == ([100, 30], "float32", 12_000, 2)


def test_names_that_rich_would_replace_are_printed_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, tag = "model/:smile:.[red]w[/]", ":heart:"
    for folder, values in (("a", np.ones(3, np.float32)), ("b", np.zeros(3, np.float32))):
        save_arrays(tmp_path / folder, {name: values}, world_size=1, step=1, tag=tag)
    assert inspect_command(str(tmp_path / "a")) == 0
    out = capsys.readouterr().out
    assert name.removeprefix("model/") in out
    assert ls_command(str(tmp_path / "a")) == 0
    assert tag in capsys.readouterr().out
    assert diff_command(str(tmp_path / "a"), str(tmp_path / "b")) == 1
    assert name in capsys.readouterr().out


def test_verify_names_array_file_and_offset_of_each_fault(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tag = copied / "%5Bbest%5D"
    for name in ("model/h.2.weight", "model/h.10.weight"):
        shard = tag / name / "c.0.0"
        shard.chmod(0o644)
        with shard.open("r+b") as file:
            file.seek(5000)
            file.write(b"\xff")
    os.truncate(shard, 100)
    assert verify_command(copied) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("model/h.10.weight/c.0.0, offset 100: has 100 bytes, expected ")
    assert lines[1].startswith("model/h.2.weight/c.0.0, offset 4096: chunk 0 (")
    assert lines[1].endswith("fails its crc32c (array model/h.2.weight)")
    assert verify_command(copied / "step-00000001") == 0


def test_a_newest_checkpoint_with_a_damaged_record_is_a_fault_though_an_older_one_is_whole(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = copied / "%5Bbest%5D/zstore.json"
    record.chmod(0o644)
    record.write_text("{}")
    assert verify_command(copied) == 1
    assert "%5Bbest%5D: " in capsys.readouterr().out
    assert verify_command(copied / "%5Bbest%5D") == 1
    assert inspect_command(copied) == 0


def test_names_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "model/\x1b]0;title\x07.w\u202e"
    save_arrays(tmp_path, {name: np.ones(3, np.float32)}, tag="\u202etag")
    run = [inspect_command, verify_command, ls_command, lambda path: diff_command(path, path)]
    run.append(lambda path: prune_folder(path, Keep(last=1), dry_run=True))
    for command in run:
        assert command(tmp_path) == 0
    save_arrays(tmp_path / "other", {"model/w": np.ones(3, np.float32)}, world_size=2)
    assert diff_command(tmp_path, tmp_path / "other") == 1
    printed = capsys.readouterr()
    assert "\\x1b]0;title\\x07.w\\u202e" in printed.out
    for text in (printed.out, printed.err):
        assert not {"\x1b", "\x07", "\u202e"} & set(text)


# -- ls ---------------------------------------------------------------------------------------------------------------

LISTED = {"model/w": np.ones((1000, 300), np.float32), "model/b": np.zeros(77, np.float32)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints that have the files of `model/w` together, and one of them also with another folder."""
    run = tmp_path / "run"
    first = save_arrays(run, LISTED, world_size=2, step=1)
    second = save_arrays(run, LISTED, world_size=2, step=2, tag="[best]")
    for shard in ("c.0.0", "c.1.0"):
        (second / "model/w" / shard).unlink()
        os.link(first / "model/w" / shard, second / "model/w" / shard)
    os.link(first / "model/b/c.0", tmp_path / "elsewhere")
    return run


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert ls_command(folder, Common(json=True)) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["checkpoints"]
    return found


def test_json_tells_sizes_and_what_is_shared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = listed(folder, capsys)
    assert [(e["tag"], e["step"], e["world_size"], e["newest"]) for e in (first, second)] == [
        ("step-00000001", 1, 2, False),
        ("[best]", 2, 2, True),
    ]
    for entry in (first, second):
        files = [path for path in Path(entry["path"]).rglob("*") if path.is_file()]
        weights = sum(path.stat().st_size for path in files if path.parent.name == "w" and path.name.startswith("c."))
        assert entry["size_bytes"] == sum(path.stat().st_size for path in files)
        assert entry["shared_bytes"] == weights
        linked = os.stat(Path(entry["path"]) / "model/b/c.0").st_size if entry is first else 0
        assert entry["freed_bytes"] == entry["size_bytes"] - weights - linked
        assert 0 <= entry["age_s"] < 3600


def test_the_table_marks_the_newest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ls_command(folder) == 0
    lines = capsys.readouterr().out.splitlines()
    (newest,) = [line for line in lines if "newest" in line]
    assert "[best]" in newest
    assert "MB" in newest


def test_what_is_no_checkpoint_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = folder / "%5Bbest%5D/zstore.json"
    record.chmod(0o644)
    record.write_text("{}")
    assert ls_command(folder) == 0
    printed = capsys.readouterr()
    assert "%5Bbest%5D is not a checkpoint" in printed.err
    assert "step-00000001" in printed.out
