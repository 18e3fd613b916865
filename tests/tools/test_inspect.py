"""`zstore inspect`, `verify`, `ls` and `diff`: what they print, their exit codes, and which checkpoint of a folder is meant."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import zstore
from tests.checkpoint.checkpoints import save_arrays
from tests.tools.commands import here
from zstore.checkpoint.layout import tag_folder
from zstore.checkpoint.reader import open_checkpoint
from zstore.errors import UsageError
from zstore.open.sources import split_location
from zstore.tools.diff import diff_command
from zstore.tools.inspect import inspect_command
from zstore.tools.ls import ls_command
from zstore.tools.options import Common
from zstore.tools.prune import prune_command
from zstore.tools.train import resume_source
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
    assert [array["name"] for array in told["arrays"]] == ["buffer/[red]odd[/]", *list(ARRAYS)[:3]]
    weight = told["arrays"][1]
    assert (weight["shape"], weight["dtype"], weight["bytes"], weight["shards"]) == ([100, 30], "float32", 12_000, 2)


def test_names_that_rich_would_replace_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert lines[1].endswith("fails its crc32c check (array model/h.2.weight)")
    assert verify_command(copied / "step-00000001") == 0


def test_a_damaged_newest_record_is_a_fault(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    run.append(lambda path: prune_command(path, keep_last=1, dry_run=True))
    for command in run:
        assert command(tmp_path) == 0
    save_arrays(tmp_path / "other", {"model/w": np.ones(3, np.float32)}, world_size=2)
    assert diff_command(tmp_path, tmp_path / "other") == 1
    printed = capsys.readouterr()
    assert "\\x1b]0;title\\x07.w\\u202e" in printed.out
    for text in (printed.out, printed.err):
        assert not {"\x1b", "\x07", "\u202e"} & set(text)


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


Array = npt.NDArray[Any]

STATUS = {"buffer/mask": "dtype", "model/b": "removed", "model/long.rows": "values", "model/new": "added"}
STATUS |= {"model/none": "shape", "model/w": "values"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    rng = np.random.default_rng(0)
    arrays: dict[str, Array] = {
        "model/w": rng.standard_normal((3000, 300)).astype(np.float32),
        "model/b": rng.standard_normal(77).astype(ml_dtypes.bfloat16),
        "model/long.rows": rng.standard_normal((3, 900_000)).astype(np.float32),
        "model/none": np.zeros((0, 5), np.float32),
        "model/nan": np.full(9, np.nan, np.float32),
        "buffer/mask": rng.random((5, 5)) < 0.5,
    }
    other = {name: array.copy() for name, array in arrays.items() if name != "model/b"}
    other["model/w"][1000, 7] += 0.5
    other["model/w"][1000, 8] = np.inf
    other["model/long.rows"][2, 800_000:800_003] -= 0.25
    other["buffer/mask"] = other["buffer/mask"].astype(np.uint8)
    other["model/none"] = np.zeros((0, 6), np.float32)
    other["model/new"] = np.ones(3, np.float32)
    base = tmp_path_factory.mktemp("runs")
    made = {"old": (arrays, 2), "same": (arrays, 2), "three": (arrays, 3), "new": (other, 2), "new3": (other, 3)}
    return {name: save_arrays(base / name, given, world_size=ranks) for name, (given, ranks) in made.items()}


def compare(before: Path, after: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = diff_command(before, after, common=Common(json=True))
    told = json.loads(capsys.readouterr().out)
    return code, told | {"arrays": {entry.pop("name"): entry for entry in told["arrays"]}}


@pytest.mark.parametrize(
    ("other", "differs", "is_read"),
    [("same", False, False), ("three", False, True), ("new", True, False), ("new3", True, True)],
)
def test_each_array_that_differs_is_named_in_any_layout(
    folders: dict[str, Path], other: str, differs: bool, is_read: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = compare(folders["old"], folders[other], capsys)
    assert (code, told["differ"]) == (int(differs), differs)
    assert {name: entry["status"] for name, entry in told["arrays"].items()} == (STATUS if differs else {})
    assert told["num_same"] == (1 if differs else 6)  # model/nan: NaN is what it was
    assert not differs or told["arrays"]["model/none"]["before"] == "float32 [0, 5]"
    assert (told["bytes"] > 0) == is_read  # if both are cut alike, nothing is read


def test_the_table_is_empty_if_nothing_differs(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert diff_command(folders["old"], folders["same"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "0 of 6 arrays differ" in printed.err
    assert diff_command(folders["old"], folders["new"]) == 1
    printed = capsys.readouterr()
    assert " model/w " in printed.out
    assert "only in the first: bfloat16 [77]" in printed.out
    assert "uint8 [5, 5]" in printed.out
    assert "6 of 7 arrays differ" in printed.err


URL = "memory://bucket/run"
TAGS = ("step-00000001", "a:b [best]")
COMMANDS = {
    "inspect": ["inspect", "{run}"],
    "verify": ["verify", "{run}"],
    "consolidate": ["consolidate", "{run}", "{out}"],
    "reshard": ["reshard", "{run}", "{out}", "--world-size", "3"],
    "convert": ["convert", "{run}", "{out}"],
}


@pytest.fixture
def folder_tags(tmp_path: Path) -> Path:
    """Two checkpoints that an older one, which is asked for, is told from by its values; and a newer one of a third tag."""
    for step, tag in enumerate((*TAGS, "newest"), start=1):
        arrays = {"model/w": np.full((40, 30), step, np.float32)}
        save_arrays(tmp_path / "run", arrays, world_size=2, step=step, tag=tag)
    return tmp_path / "run"


def run(*words: object) -> tuple[int, dict[str, Any], str]:
    code, out, err = here(*words, "--json")
    return code, json.loads(out) if out else {}, err


def meant(command: str, told: dict[str, Any], out: Path, stderr: str) -> str:
    if command == "inspect":
        return str(told["checkpoint"]["tag"])
    if command == "verify":
        return next(tag for tag in TAGS if f"/{tag_folder(tag)}: " in stderr)
    if command == "consolidate":
        from safetensors.numpy import load_file

        return TAGS[int(load_file(out / "model.safetensors")["w"][0, 0]) - 1]
    with open_checkpoint(out) as written:
        return written.tag


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
def test_forms_of_a_tag(command: str, form: str, tag: str, folder_tags: Path, tmp_path: Path, memory: Any) -> None:
    place: Path | str = folder_tags
    if form.startswith("url"):
        memory.put(str(folder_tags), "/bucket/run", recursive=True)
        place = URL
    ckpt = f"{place}@{tag}" if form.endswith("@TAG") else f"{place}/{tag}" if form.endswith("/TAG") else place
    out = tmp_path / "out"
    words = [word.format(run=ckpt, out=out) for word in COMMANDS[command]]
    code, told, stderr = run(*words, *(["--tag", tag] if form.endswith("--tag") else []))
    assert code == 0, stderr
    assert meant(command, told, out, stderr) == tag


@pytest.mark.parametrize(("command", "form"), [("inspect", "--tag"), *((one, "@TAG") for one in (*COMMANDS, "diff"))])
def test_a_missing_tag_is_answered_with_those_there(command: str, form: str, folder_tags: Path, tmp_path: Path) -> None:
    ckpt = folder_tags if form == "--tag" else f"{folder_tags}{form[0]}stp-1"
    words = COMMANDS.get(command, ["diff", "{run}", str(folder_tags)])
    words = [word.format(run=ckpt, out=tmp_path / "out") for word in words]
    code, _, stderr = run(*words, *(["--tag", "stp-1"] if form == "--tag" else []))
    assert code == 1
    assert "stp-1" in stderr
    assert f"{folder_tags} has" in stderr
    assert f"the tags {', '.join(map(repr, [*TAGS, 'newest']))}" in stderr
    assert not (tmp_path / "out").exists()


def test_two_tags_are_one_too_many(folder_tags: Path) -> None:
    code, _, stderr = run("inspect", f"{folder_tags}@{TAGS[0]}", "--tag", "newest")
    assert code == 2
    assert f"names the tag {TAGS[0]!r}, and the tag 'newest' was given: name one of them" in stderr
    code, _, stderr = run("inspect", folder_tags / TAGS[0], "--tag", "newest")
    assert code == 1
    assert "pass its parent folder to choose by tag" in stderr


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
def test_an_at_sign_in_a_url_is_taken_literally_if_that_is_there(url: str, tmp_path: Path, memory: Any) -> None:
    save_arrays(tmp_path, {"model/w": np.ones((4, 3), np.float32)}, tag="best@3")
    memory.put(str(tmp_path), "/bucket/run@v2", recursive=True)
    with zstore.open_checkpoint(url) as checkpoint, pickle.loads(pickle.dumps(checkpoint)) as again:
        assert again.location == checkpoint.location
    assert [run(command, url)[0] for command in ("inspect", "verify")] == [0, 0]


def test_resume_means_the_same(folder_tags: Path) -> None:
    assert resume_source(f"{folder_tags}@{TAGS[1]}", None) == (str(folder_tags), TAGS[1])
