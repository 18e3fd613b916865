"""The checkpoint that a load without a tag opens: the whole one that `latest` names, else the newest; the page."""

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

import zstore
from tests.checkpoint.checkpoints import save_arrays
from zstore import open_checkpoint
from zstore.checkpoint import Keep, sweep, weigh
from zstore.checkpoint.reader import open_checkpoint as open_reader
from zstore.io.files import Files
from zstore.tools import cli

NAMES = ("one", "two")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for number, tag in enumerate(NAMES, 1):
        save_arrays(tmp_path, {"model/w": np.full(100, number, np.float32)}, world_size=1, step=number, tag=tag)
    assert (tmp_path / "latest").read_text() == "two\n"
    return tmp_path


def opened(place: Path, tag: str | None = None) -> str:
    with open_checkpoint(place, tag) as checkpoint:
        assert set(checkpoint["model/w"][:]) == {1 + NAMES.index(checkpoint.tag)}
        return checkpoint.tag


@pytest.mark.parametrize("text", ["one", "one\n", "  one \n\n"])
@pytest.mark.parametrize("tag", [None, "latest"])
def test_an_edited_latest_is_followed_and_a_line_names_both(
    text: str, tag: str | None, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run / "latest").write_text(text)
    with caplog.at_level(logging.WARNING, "zstore"):
        assert opened(run, tag) == "one"
    assert "names 'one', and the newest checkpoint is 'two': 'one' is opened" in caplog.text


def test_a_copy_that_loses_all_times_is_read_alike(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (run / "latest").write_text("one\n")
    copy = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(run, copy, copy_function=shutil.copyfile)
    for path in copy.rglob("*"):
        os.utime(path, (0, 0))
    assert opened(copy) == "one"


@pytest.mark.parametrize("text", ["three\n", "", "../one", "nonsense \0", "one/../two"])
def test_a_latest_that_names_no_whole_checkpoint_is_the_newest(text: str, run: Path) -> None:
    (run / "latest").write_text(text)
    assert opened(run) == "two"


def test_a_name_without_a_record_is_not_whole(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run / "latest").write_text("one\n")
    (run / "one" / "zstore.json").unlink()
    with caplog.at_level(logging.WARNING, "zstore"):
        assert opened(run) == "two"
    assert "there is no whole checkpoint 'one', so the newest is opened" in caplog.text


def test_a_save_that_was_killed_before_it_replaced_latest_counts(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_reader(run, "two") as reader:
        save_id = reader.record.id
    record = (run / "two" / "zstore.json").stat()
    (run / "latest").write_text("one\n")
    os.utime(run / "latest", ns=(record.st_mtime_ns - 1, record.st_mtime_ns - 1))
    (run / f"two.lock-{save_id}").write_text("{}")
    with caplog.at_level(logging.WARNING, "zstore"):
        assert opened(run) == "two"
    assert "its save ended before it replaced `latest`" in caplog.text
    os.utime(run / "latest", ns=(record.st_mtime_ns + 1, record.st_mtime_ns + 1))  # edited after the crash
    assert opened(run) == "one"


@pytest.mark.parametrize("edited", [False, True])
def test_the_next_save_knows_an_old_latest_from_an_edited_one(edited: bool, run: Path) -> None:
    with open_reader(run, "two") as reader:
        save_id = reader.record.id
    record = (run / "two" / "zstore.json").stat()
    (run / "latest").write_text("one\n")
    os.utime(run / "latest", ns=(record.st_mtime_ns + 2 * edited - 1,) * 2)
    (run / f"two.lock-{save_id}").write_text("{}")
    assert sweep(Files(), run) == []
    assert not (run / f"two.lock-{save_id}").exists()
    assert opened(run) == ("one" if edited else "two")


def test_what_latest_names_is_not_removed(run: Path) -> None:
    assert [fate.reasons for fate in weigh(run, Keep(last=1))] == [(), ("last",)]
    (run / "latest").write_text("one\n")
    assert [fate.reasons for fate in weigh(run, Keep(last=1))] == [("latest",), ("last",)]


def test_a_bucket_and_the_engine_follow_it_too(run: Path) -> None:
    (run / "latest").write_text("one\n")
    url = f"memory://latest/{run.name}"
    fsspec.filesystem("memory").put(str(run), f"/latest/{run.name}", recursive=True)
    with open_checkpoint(url) as checkpoint:
        assert checkpoint.tag == "one"
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(100))
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with zstore.initialize(model=model, config=config)[0] as engine:
        engine.load_checkpoint(str(run), load_module_only=True)
        assert torch.equal(model.w.detach(), torch.ones(100))


PAGE = Path(__file__).parents[2] / "docs/checkpoints.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "model/embed.weight": rng.standard_normal((50, 16)).astype(np.float32),
        "model/head.bias": rng.standard_normal(50).astype(np.float32),
        "optimizer/exp_avg/embed.weight": rng.standard_normal((50, 16)).astype(np.float32),
    }
    save_arrays(tmp_path / "run", arrays, world_size=2, record={"engine": {"groups": [{"lr": 0.1}]}})
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    assert len(blocks()) == 4
    for example in blocks():
        exec(example, names)
    embedding = arrays["model/embed.weight"]
    assert (names["lr"], names["faults"]) == (0.1, [])
    assert np.array_equal(names["rows"], embedding[10:20])
    assert np.array_equal(names["corner"], embedding[-1, ::2])
    assert np.array_equal(names["whole"], embedding)
    assert np.array_equal(names["tensor"].numpy(), embedding)
    assert np.array_equal(names["momentum"], arrays["optimizer/exp_avg/embed.weight"][:4])
    assert torch.equal(names["bias"], torch.from_numpy(arrays["model/head.bias"]).bfloat16())
    assert sorted(names["state"]) == ["embed.weight", "head.bias"]
    assert list(names["heads"]) == ["head.bias"]
    assert names["shape"] == (50, 16)


def test_the_commands_of_the_page_are_there() -> None:
    assert set(re.findall(r"^\| `zstore (\w+) ", PAGE.read_text(), re.MULTILINE)) <= set(cli.COMMANDS)
