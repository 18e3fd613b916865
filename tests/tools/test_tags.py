"""Which checkpoint of a folder a command means: `--tag TAG`, `DIR@TAG` and `DIR/TAG` are the same in all of them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import zstore
from tests.checkpoint.checkpoints import save_arrays
from zstore.checkpoint.reader import open_checkpoint
from zstore.errors import UsageError
from zstore.open.sources import split_location
from zstore.tools import cli
from zstore.tools.train.resume import resume_source

URL = "memory://bucket/run"
TAGS = ("step-00000001", "a:b [best]")
COMMANDS = {
    "inspect": ["inspect", "{run}"],
    "verify": ["verify", "{run}"],
    "consolidate": ["consolidate", "{run}", "{out}"],
    "reshard": ["reshard", "{run}", "{out}", "--world-size", "3"],
    "convert": ["convert", "{run}", "{out}"],
}
Run = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints that an older one, which is asked for, is told from by its values; and a newer one of a third tag."""
    for step, tag in enumerate((*TAGS, "newest"), start=1):
        arrays = {"model/w": np.full((40, 30), step, np.float32)}
        save_arrays(tmp_path / "run", arrays, world_size=2, step=step, tag=tag)
    return tmp_path / "run"


@pytest.fixture
def run(memory: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command with `--json`; returns its exit code, what it printed as JSON, and stderr."""

    def run(*words: object) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setattr("sys.argv", ["zstore", *map(str, words), "--json"])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return code, json.loads(printed.out) if printed.out else {}, printed.err

    return run


def meant(command: str, told: dict[str, Any], out: Path, stderr: str) -> str:
    """Return the tag that a command worked on, by what it printed or wrote."""
    if command == "inspect":
        return str(told["checkpoint"]["tag"])
    if command == "verify":
        return next(tag for tag in TAGS if f"/{_folder_of(tag)}: " in stderr)
    if command == "consolidate":
        from safetensors.numpy import load_file

        return TAGS[int(load_file(out / "model.safetensors")["w"][0, 0]) - 1]
    with open_checkpoint(out) as written:
        return written.tag


def _folder_of(tag: str) -> str:
    from zstore.checkpoint.names import tag_folder

    return tag_folder(tag)


FORMS = [
    *((form, tag) for form in ("{run} --tag", "{run}@TAG", "url --tag") for tag in TAGS),
    ("{run}/TAG", TAGS[0]),
    ("url@TAG", TAGS[1]),
]
OTHERS = [command for command in COMMANDS if command != "inspect"]


@pytest.mark.parametrize(
    ("command", "form", "tag"),
    [*(("inspect", *form) for form in FORMS), *((command, "{run}@TAG", TAGS[1]) for command in OTHERS)],
)
def test_a_tag_may_be_named_in_three_ways(
    command: str, form: str, tag: str, folder: Path, tmp_path: Path, run: Run
) -> None:
    place: Path | str = folder
    if form.startswith("url"):
        fsspec.filesystem("memory").put(str(folder), "/bucket/run", recursive=True)
        place = URL
    ckpt = f"{place}@{tag}" if form.endswith("@TAG") else f"{place}/{tag}" if form.endswith("/TAG") else place
    out = tmp_path / "out"
    words = [word.format(run=ckpt, out=out) for word in COMMANDS[command]]
    code, told, stderr = run(*words, *(["--tag", tag] if form.endswith("--tag") else []))
    assert code == 0, stderr
    assert meant(command, told, out, stderr) == tag


@pytest.mark.parametrize(
    ("command", "form"),
    [
        ("inspect", "--tag"),
        *((command, "@TAG") for command in (*COMMANDS, "diff")),
    ],
)
def test_a_tag_that_is_not_there_is_answered_with_those_that_are(
    command: str, form: str, folder: Path, tmp_path: Path, run: Run
) -> None:
    ckpt = folder if form == "--tag" else f"{folder}{form[0]}stp-1"
    words = COMMANDS.get(command, ["diff", "{run}", str(folder)])
    words = [word.format(run=ckpt, out=tmp_path / "out") for word in words]
    code, _, stderr = run(*words, *(["--tag", "stp-1"] if form == "--tag" else []))
    assert code == 1
    assert "stp-1" in stderr
    assert f"{folder} has" in stderr
    assert f"the tags {', '.join(map(repr, [*TAGS, 'newest']))}" in stderr
    assert not (tmp_path / "out").exists()


def test_two_tags_are_one_too_many(folder: Path, run: Run) -> None:
    code, _, stderr = run("inspect", f"{folder}@{TAGS[0]}", "--tag", "newest")
    assert code == 2
    assert f"names the tag {TAGS[0]!r}, and 'newest' is named beside it: name one of them" in stderr
    code, _, stderr = run("inspect", folder / TAGS[0], "--tag", "newest")
    assert code == 1
    assert "name the folder above it to choose by tag" in stderr


def test_a_folder_that_is_there_is_meant_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run@1").mkdir()
    assert split_location(tmp_path / "run@1") == (f"{tmp_path}/run@1", None)
    assert split_location(f"{tmp_path}/run@1@step-2") == (f"{tmp_path}/run@1", "step-2")
    assert split_location(f"{tmp_path}/none@step-2") == (f"{tmp_path}/none@step-2", None)
    assert split_location("s3://bucket/run@1") == ("s3://bucket/run@1", None)
    assert split_location(tmp_path, "x") == (str(tmp_path), "x")
    with pytest.raises(UsageError, match="name one of them"):
        split_location(f"{tmp_path}@x", "x")


@pytest.mark.parametrize("url", [f"{URL}@v2", f"{URL}@v2/best@3"])
def test_an_at_sign_in_a_url_is_taken_literally_if_that_is_there(url: str, tmp_path: Path, run: Run) -> None:
    save_arrays(tmp_path, {"model/w": np.ones((4, 3), np.float32)}, tag="best@3")
    fsspec.filesystem("memory").put(str(tmp_path), "/bucket/run@v2", recursive=True)
    with zstore.open_checkpoint(url) as checkpoint, pickle.loads(pickle.dumps(checkpoint)) as again:
        assert again.location == checkpoint.location
    assert [run(command, url)[0] for command in ("inspect", "verify")] == [0, 0]


def test_resume_means_the_same(folder: Path) -> None:
    assert resume_source(f"{folder}@{TAGS[1]}", None) == (str(folder), TAGS[1])
