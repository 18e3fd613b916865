"""Tags that move, holds and notes: where names lead, what retention leaves, and moves that are killed or come together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zstore
from tests.checkpoint.checkpoints import leavings, save_arrays
from tests.engine.runs import make_config, start, step
from zstore.checkpoint.catalog import resolve, scan
from zstore.checkpoint.commit import sweep
from zstore.checkpoint.marks import Marks, change_marks, check_moving_tag, read_marks
from zstore.checkpoint.names import tag_folder
from zstore.checkpoint.retention import Keep, remove_each, retire
from zstore.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptionError,
    UsageError,
)
from zstore.io.files import Files
from zstore.remote.commit import remover
from zstore.remote.folder import open_folder
from zstore.testing.faults import DeadlyFiles
from zstore.testing.ranks import kill_ranks, run_ranks
from zstore.tools import cli

FIRST, SECOND, THIRD = (f"step-{number:08d}" for number in (1, 2, 3))


def save(folder: Path, number: int, **options: Any) -> Path:
    arrays = {"model/w": np.full((40, 30), number, np.float32)}
    return save_arrays(folder, arrays, world_size=2, step=number, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three checkpoints, each of its number."""
    for number in (1, 2, 3):
        save(tmp_path / "run", number)
    return tmp_path / "run"


def value(location: Any, tag: Any = None) -> float:
    with zstore.open_checkpoint(location, tag) as opened:
        assert opened.verify() == []
        return float(opened["model/w"][0, 0])


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_moving_tag_leads_to_one_checkpoint_and_then_to_another(folder: Path) -> None:
    change_marks(folder, FIRST, tag="best")
    assert value(folder, "best") == value(f"{folder}@best") == 1
    assert change_marks(folder, SECOND, tag="best").tags == {"best": SECOND}
    assert value(folder, "best") == value(f"{folder}@best") == 2
    with zstore.open_checkpoint(f"{folder}@best") as opened:
        assert opened.tag == SECOND  # its own name, from here on
    assert change_marks(folder, None, tag="best") == Marks()
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint with the tag 'best'"):
        resolve(folder, "best")


def test_latest_and_steps_are_names_too(folder: Path) -> None:
    assert value(folder, "latest") == value(f"{folder}@latest") == value(f"{folder}@3") == 3
    assert value(folder, "1") == value(folder, 1) == 1
    save(folder, 4, tag="1")
    assert value(folder, "1") == 4
    with pytest.raises(CheckpointNotFoundError, match="the tag '99999"):
        resolve(folder, "9" * 5000)


def test_an_unknown_tag_is_answered_with_those_that_are_there(folder: Path) -> None:
    change_marks(folder, FIRST, tag="prod")
    change_marks(folder, FIRST, tag="best")
    for open_it in (lambda: value(folder, "bets"), lambda: value(f"{folder}@bets")):
        with pytest.raises(CheckpointNotFoundError, match=f"the tags '{FIRST}'.* and the moving tags 'best', 'prod'"):
            open_it()


def test_the_exact_name_comes_first(folder: Path, tmp_path: Path) -> None:
    change_marks(folder, FIRST, tag="best")
    save(folder, 5, tag="best")
    save(folder, 6, tag="a@best")
    save(tmp_path / "run@best", 7)
    assert value(folder, "best") == 5
    assert value(folder / "a@best") == value(folder, "a@best") == 6
    assert value(f"{folder}@best") == 7
    with pytest.raises(CheckpointNotFoundError, match="nobody"):
        value(f"{tmp_path / 'run@best'}", "nobody")
    with pytest.raises(UsageError, match="a checkpoint that is called 'best', which comes first"):
        change_marks(folder, FIRST, tag="best")


def test_a_folder_that_exists_is_never_split(folder: Path, tmp_path: Path) -> None:
    change_marks(folder, FIRST, tag="best")
    (tmp_path / "run@best").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="run@best has no committed checkpoint"):
        value(f"{folder}@best")


def test_a_tag_whose_checkpoint_is_gone_is_told(folder: Path) -> None:
    change_marks(folder, FIRST, tag="best")
    remover(resolve(folder, FIRST).folder.parent)(resolve(folder, FIRST))
    with pytest.raises(CheckpointNotFoundError, match=f"a moving tag that points at '{FIRST}', which is gone"):
        resolve(folder, "best")
    assert read_marks(folder).dangling([info.tag for info in scan(folder).tags]) == {"best": FIRST}
    assert resolve(folder).tag == THIRD


GRAMMAR = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", fullmatch=True)


@given(GRAMMAR)
def test_names_of_the_grammar_can_be_used_in_every_form(name: str) -> None:
    if name.isdigit() or name == "latest" or ".." in name:
        with pytest.raises(UsageError, match="cannot be a tag that moves"):
            check_moving_tag(name)
        return
    assert check_moving_tag(name) == name
    assert not set(name) & set("@:/%? ")
    assert tag_folder(name).removeprefix("%")


@given(st.text(max_size=200))
def test_other_names_are_refused(name: str) -> None:
    try:
        check_moving_tag(name)
    except UsageError:
        return
    assert name.isascii()
    assert 0 < len(name) <= 128


@given(st.dictionaries(GRAMMAR, st.sampled_from([FIRST, "a b@1", "ü"])), st.sets(st.sampled_from([FIRST, "x"])))
def test_marks_come_back_as_they_were_written(tmp_path_factory: pytest.TempPathFactory, tags: Any, held: Any) -> None:
    folder = tmp_path_factory.mktemp("marks")
    names = {name: target for name, target in tags.items() if not (name.isdigit() or name == "latest" or ".." in name)}
    for name, target in names.items():
        change_marks(folder, target, tag=name)
    for name in sorted(held):
        marks = change_marks(folder, name, held=True, note=f"note of {name} 🙂")
        assert marks == read_marks(folder)
    found = read_marks(folder)
    assert (found.tags, set(found.held), set(found.notes)) == (names, held, held)


def test_a_checkpoint_has_no_marks_in_it(folder: Path) -> None:
    with pytest.raises(UsageError, match="is one checkpoint: its tags and holds are in the folder above"):
        change_marks(folder / FIRST, FIRST, held=True)
    assert not (folder / FIRST / "tags.json").exists()


@pytest.mark.parametrize("note", ["a\nb", "\x1b[2J", "x" * 1001, "\u202eabc"])
def test_a_note_is_a_short_line(folder: Path, note: str) -> None:
    with pytest.raises(UsageError, match="a note has up to 1000 characters on one line"):
        change_marks(folder, FIRST, note=note)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", CorruptionError),
        ("[]", CorruptionError),
        ("{}", CorruptionError),
        ('{"format": "zstore tags", "version": 1, "tags": {"a": 1}, "held": [], "notes": {}}', CorruptionError),
        ('{"format": "zstore tags", "version": 1, "tags": {"a": "../x"}, "held": [], "notes": {}}', CorruptionError),
        ('{"format": "zstore tags", "version": 1, "tags": [], "held": 3, "notes": {}}', CorruptionError),
        ('{"format": "zstore tags", "version": 2, "names": {}}', CheckpointMismatchError),
    ],
)
def test_marks_that_are_damaged_are_no_marks_and_nothing_is_removed(folder: Path, text: str, error: type) -> None:
    (folder / "tags.json").write_text(text)
    with pytest.raises(error, match=r"tags\.json"):
        resolve(folder, "best")
    with pytest.raises(error, match=r"tags\.json"):
        change_marks(folder, FIRST, tag="best")
    assert value(folder) == value(folder, THIRD) == 3  # which need no marks
    (message,) = retire(folder, keep=Keep(), run=resolve(folder).record.run, remove=lambda info: pytest.fail("removed"))
    assert "tags.json" in message


def test_a_link_in_place_of_the_file_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text('{"format": "zstore tags", "version": 1, "tags": {}, "held": [], "notes": {}}')
    (folder / "tags.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptionError, match="symbolic link"):
        read_marks(folder)


def test_behind_a_url(folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    try:
        memory.put(str(folder), "/bucket/run", recursive=True)
        change_marks(open_folder("memory://bucket/run"), SECOND, tag="prod", note="good")
        assert value("memory://bucket/run@prod") == value("memory://bucket/run", "prod") == 2
        memory.put(str(folder / FIRST), "/bucket/run@prod", recursive=True)
        assert value("memory://bucket/run@prod") == 1  # the exact name
        with pytest.raises(CheckpointNotFoundError, match="moving tags 'prod'"):
            value("memory://bucket/run@bets")
        with pytest.raises(CheckpointNotFoundError):
            value("memory://bucket/none@bets")
    finally:
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]


# -- retention --------------------------------------------------------------------------------------------------------


def test_retention_leaves_what_is_tagged_or_held(folder: Path) -> None:
    run = resolve(folder).record.run
    change_marks(folder, FIRST, held=True)
    change_marks(folder, SECOND, tag="best")
    remove = remover(resolve(folder).folder.parent)
    assert retire(folder, keep=Keep(), run=run, remove=remove) == []
    assert [info.tag for info in scan(folder).tags] == [FIRST, SECOND, THIRD]
    change_marks(folder, THIRD, tag="best")
    assert retire(folder, keep=Keep(), run=run, remove=remove) == []
    assert [info.tag for info in scan(folder).tags] == [FIRST, THIRD]
    change_marks(folder, FIRST, held=False)
    assert retire(folder, keep=Keep(), run=run, remove=remove) == []
    assert [info.tag for info in scan(folder).tags] == [THIRD]


def test_saves_of_an_engine_leave_them_too(tmp_path: Path) -> None:
    config = make_config(zstore={"keep": 1})
    with start(config) as engine:
        for number in range(4):
            step(engine)
            engine.save_checkpoint(str(tmp_path))
            if number == 0:
                change_marks(tmp_path, FIRST, tag="best")
            if number == 1:
                change_marks(tmp_path, SECOND, held=True, note="before the lr change")
        assert [info.tag for info in scan(tmp_path).tags] == [FIRST, SECOND, "step-00000004"]
    with start(config) as engine:
        assert engine.load_checkpoint(str(tmp_path), tag="best")[0] == str(tmp_path / FIRST)
        assert engine.global_steps == 1
        assert engine.load_checkpoint(f"{tmp_path}@2")[0] == str(tmp_path / SECOND)


def test_one_that_is_marked_after_the_plan_stays(folder: Path) -> None:
    infos = scan(folder).tags
    change_marks(folder, FIRST, tag="prod")
    removed: list[str] = []
    messages = remove_each(infos[:2], lambda info: removed.append(info.tag))
    assert removed == [SECOND]
    assert "it is marked by now: @prod" in messages[0]


def _load_two(rank: int, folder: str) -> str:
    with start(make_config(1)) as engine:
        for _ in range(2):
            step(engine)
            engine.save_checkpoint(folder)
        with pytest.raises(CheckpointNotFoundError, match="a tag moved, or one was saved, meanwhile") as raised:
            engine.load_checkpoint(folder, tag=(FIRST, SECOND)[rank])
        assert engine.load_checkpoint(folder, tag=SECOND)[0] == f"{folder}/{SECOND}"
        return str(raised.value)


def test_ranks_that_find_a_tag_in_two_places_load_nothing(tmp_path: Path) -> None:
    assert len(set(run_ranks(_load_two, 2, str(tmp_path)))) == 1


# -- moves ------------------------------------------------------------------------------------------------------------


def _move(rank: int, folder: str, fail_at: int | None) -> None:
    change_marks(folder, SECOND, tag="best", files=DeadlyFiles(fail_at))


def test_killed_anywhere_in_a_move_the_tag_is_the_old_one_or_the_new(folder: Path) -> None:
    seen, point = [], 0
    while True:
        change_marks(folder, FIRST, tag="best", note="stays")
        (ended,) = kill_ranks(_move, 1, str(folder), point)
        marks = read_marks(folder)
        seen.append(marks.tags["best"])
        assert value(f"{folder}@best") in (1, 2)
        assert marks.notes == {FIRST: "stays"}
        if ended:
            break
        if point % 2:  # else the next move finds what was left
            sweep(Files(), folder)
            assert leavings(folder) == []
        point += 1
    assert (seen[0], seen[-1]) == (FIRST, SECOND)
    assert seen == sorted(seen)
    assert point >= 4
    assert leavings(folder) == []


def _move_often(rank: int, folder: str, rounds: int) -> None:
    mine = (FIRST, SECOND)[rank]
    for number in range(rounds):
        change_marks(folder, mine, tag="best")
        change_marks(folder, mine, tag=f"own-{rank}-{number}", held=number % 2 == 0)
        assert read_marks(folder).tags["best"] in (FIRST, SECOND)


def test_two_processes_that_move_tags_at_once_lose_nothing(folder: Path) -> None:
    run_ranks(_move_often, 2, str(folder), 20)
    marks = read_marks(folder)
    assert marks.tags["best"] in (FIRST, SECOND)
    assert len(marks.tags) == 41
    assert leavings(folder) == []


def test_a_save_beside_a_move_leaves_its_files(folder: Path) -> None:
    """The sweep of a save that begins in the middle of a move takes nothing away from it."""

    class Between(Files):
        def rename(self, source: str | Path, target: str | Path) -> None:
            assert sweep(Files(), folder) == []
            super().rename(source, target)

    change_marks(folder, SECOND, tag="best", files=Between())
    assert read_marks(folder).tags == {"best": SECOND}


# -- the command ------------------------------------------------------------------------------------------------------


def run_cli(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["zstore", *map(str, words)])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: object) -> Any:
        assert run_cli(monkeypatch, *words, "--json") == 0
        return json.loads(capsys.readouterr().out)

    assert told("tag", folder)["tags"] == {}
    assert told("tag", folder, "best", 1)["tags"] == {"best": FIRST}
    assert told("tag", folder, "prod", "best")["tags"] == {"best": FIRST, "prod": FIRST}
    marks = told("tag", folder, "2", "--hold", "--note", "before the crash")
    assert (marks["held"], marks["notes"]) == ([SECOND], {SECOND: "before the crash"})
    listed = {one["tag"]: one for one in told("ls", folder)["checkpoints"]}
    assert listed[FIRST]["moving_tags"] == ["best", "prod"]
    assert (listed[SECOND]["held"], listed[SECOND]["note"]) == (True, "before the crash")
    assert run_cli(monkeypatch, "ls", folder) == 0
    text = capsys.readouterr().out
    assert "@best @prod" in text
    assert "held before the crash" in text
    plan = told("prune", folder, "--keep-last", 1, "--dry-run")
    assert {one["tag"]: one["reasons"] for one in plan["checkpoints"]} == {
        FIRST: ["@best", "@prod"], SECOND: ["held"], THIRD: ["last"],
    }  # fmt: skip
    assert told("tag", folder, SECOND, "--release")["held"] == []
    assert told("tag", folder, "best", "--remove")["tags"] == {"prod": FIRST}
    assert told("prune", folder, "--keep-last", 1)["removed"] == [SECOND]
    assert run_cli(monkeypatch, "tag", folder) == 0
    text = capsys.readouterr().out
    assert f"{SECOND} (gone)" in text
    assert "before the crash" in text


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["best"], 2, "say what NAME shall point at"),
        (["--hold"], 2, "say what NAME shall point at"),
        (["--remove"], 2, "--remove takes the NAME"),
        (["best", "1", "--remove"], 2, "--remove takes the NAME"),
        (["best", "--remove"], 2, "there is no moving tag 'best'"),
        (["best", "nobody"], 1, "no committed checkpoint with the tag 'nobody'"),
        (["60", "1"], 2, "cannot be a tag that moves"),
        (["latest", "1"], 2, "cannot be a tag that moves"),
        (["a@b", "1"], 2, "cannot be a tag that moves"),
        ([FIRST, "2"], 2, "which comes first"),
    ],
)
def test_wrong_words(
    words: list[str], code: int, problem: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert run_cli(monkeypatch, "tag", folder, *words) == code
    assert problem in " ".join(capsys.readouterr().err.split())
    assert read_marks(folder) == Marks()


@pytest.mark.parametrize("command", ["inspect", "verify", "consolidate", "reshard", "diff"])
def test_commands_take_moving_tags(
    command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change_marks(folder, FIRST, tag="best")
    out = tmp_path / "out"
    more = {"consolidate": [out], "reshard": [out, "--world-size", "1"], "diff": [folder / FIRST]}.get(command, [])
    assert run_cli(monkeypatch, command, f"{folder}@best", *more) == 0
    told = capsys.readouterr()
    if command == "consolidate":
        from safetensors.numpy import load_file

        assert load_file(out / "model.safetensors")["w"][0, 0] == 1
    if command == "reshard":
        assert value(out) == 1
    if command in ("inspect", "verify"):
        assert FIRST in told.out + told.err
    assert run_cli(monkeypatch, command, f"{folder}@bets", *more) == 1
    assert "the moving tags 'best'" in capsys.readouterr().err
