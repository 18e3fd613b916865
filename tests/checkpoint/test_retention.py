"""Which checkpoints stay, what removing the others frees, and `zstore prune`."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.checkpoints import open_world, save_arrays
from tests.checkpoint.object_store import ObjectFileSystem, RequestFault, denied
from tests.engine.runs import make_config, start, step
from zstore.checkpoint.catalog import TagInfo
from zstore.checkpoint.folder import LocalFolder, joined_files, stored_files
from zstore.checkpoint.format import Record
from zstore.checkpoint.part import SaveSummary
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.retention import Keep, metric_of
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine.config.config import load_config
from zstore.errors import CheckpointNotFoundError, ConfigError, UsageError
from zstore.remote.service import open_folder
from zstore.remote.upload import upload_checkpoint
from zstore.tools.options import Common
from zstore.tools.prune import prune_command

ARRAYS = {"model/w": np.arange(100_000, dtype=np.float32)}


def info(number: int, tag: str | None = None, **state: Any) -> TagInfo:
    name = tag or f"step-{number:08d}"
    record = Record(
        id="0" * 32, tag=name, step=number, world_size=1, training_world_size=1, metadata_sha256="", manifest_sha256=("",),
        state=state,
    )  # fmt: skip
    return TagInfo(folder=LocalFolder(Path(name)), record=record)


def loss(value: object) -> dict[str, Any]:
    return {"metrics": {"loss": value}}


@pytest.mark.parametrize(
    ("keep", "stays"),
    [
        (Keep(), [5]),
        (Keep(last=2), [4, 5]),
        (Keep(last=9), [1, 2, 3, 4, 5]),
        (Keep(every=2), [2, 4, 5]),
        (Keep(best="loss:min"), [3, 5]),
        (Keep(best="loss:max"), [4, 5]),
        (Keep(best="absent:max"), [5]),
        (Keep(tags=("step-00000001",)), [1, 5]),
        (Keep(tags=("*2", "*3", "nothing")), [2, 3, 5]),
        (Keep(last=1, every=4, best="loss:min", tags=("*1",)), [1, 3, 4, 5]),
    ],
)
def test_checkpoints_stay_by_any_rule_that_names_them(keep: Keep, stays: list[int]) -> None:
    # The best, 1.0, is there twice: the newer one stays. What is not finite, or no number, is no value.
    values = [1.0, 2.0, 1, 3.5, float("nan")]
    infos = [info(number, **loss(value)) for number, value in enumerate(values, start=1)]
    reasons = keep.reasons(infos)
    assert [number for number, why in enumerate(reasons, start=1) if why] == stays


def test_reasons_are_named() -> None:
    infos = [info(10, **loss(1)), info(20, "release-1", **loss(2)), info(21, **loss(3))]
    keep = Keep(every=10, best="loss:min", tags=("release-*",))
    assert keep.reasons(infos) == [["every", "best"], ["every", "tag"], ["last"]]


@pytest.mark.parametrize(
    ("state", "name", "value"),
    [
        ({"metrics": {"loss": 2}}, "loss", 2.0),
        ({"client_state": {"eval": {"loss": 0.5}}}, "eval.loss", 0.5),
        ({"metrics": {"loss": 1}, "client_state": {"loss": 2}}, "loss", 1.0),
        ({"metrics": {"loss": None}, "client_state": {"loss": 2}}, "loss", 2.0),
        ({"client_state": {"loss": True}}, "loss", None),
        ({"client_state": {"loss": float("inf")}}, "loss", None),
        ({"client_state": {"loss": {"$tensor": "client/loss"}}}, "loss", None),
        ({"metrics": [], "client_state": []}, "loss", None),
    ],
)
def test_metrics_are_found(state: Mapping[str, Any], name: str, value: float | None) -> None:
    assert metric_of(state, name) == value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


@pytest.fixture
def linked(folder: Path) -> list[SaveSummary]:
    """Three checkpoints of one array that never changes, so that the later two link the first one's file, and a fourth
    with a file of its own."""
    found: list[SaveSummary] = []
    with open_world(ARRAYS) as world:
        for number in (1, 2, 3):
            known = found[-1].known if found else {}
            found += world.save(folder, step=number, known=known, record=loss(10 - number))
        found += world.save(folder, step=4, record=loss(20))
    return found


def disk_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def bytes_freed(paths: Sequence[Path]) -> int:
    return joined_files(map(stored_files, paths)).freed_bytes


def test_bytes_freed_are_those_that_nothing_else_links(folder: Path, linked: list[SaveSummary]) -> None:
    paths = [summary.path for summary in linked]

    def stored() -> int:
        return sum({(s := path.lstat()).st_ino: s.st_size for path in folder.rglob("*") if path.is_file()}.values())

    shard = (paths[0] / "model/w/c.0").stat().st_size
    assert bytes_freed([paths[0]]) < disk_bytes(paths[0]) - shard
    for some in (paths[:1], paths[1:3], paths[3:]):
        freed, before = bytes_freed(some), stored()
        for path in some:
            shutil.rmtree(path)
        assert freed == before - stored()


def test_prune_removes_the_rest(folder: Path, linked: list[SaveSummary], capsys: pytest.CaptureFixture[str]) -> None:
    paths = [summary.path for summary in linked]
    before = [disk_bytes(path) for path in paths]
    freed = bytes_freed(paths[:2])
    keep = "loss:min"
    for nothing in (folder.parent, folder.parent / "absent"):
        with pytest.raises(CheckpointNotFoundError):
            prune_command(nothing, keep_best=keep)
    assert prune_command(folder, keep_best=keep, dry_run=True) == 0
    text = capsys.readouterr().out
    assert "would remove 2 of 4 checkpoints" in text
    removed = [line.split()[0] for line in text.splitlines() if line.endswith("on disk  remove")]
    assert removed == ["step-00000001", "step-00000002"]
    assert "keep (best)" in text
    assert "keep (last)" in text
    assert [disk_bytes(path) for path in paths] == before
    assert prune_command(folder, keep_best=keep) == 0
    assert [found.record.step for found in tags(folder)] == [3, 4]
    assert not list(folder.glob("*.tmp-*"))
    assert 0 < freed < before[0] + before[1] - 100_000  # the array's file is still there, in the third
    for number in (3, 4):
        with open_checkpoint(folder, f"step-{number:08d}") as reader:
            assert verify_checkpoint(reader) == []


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[tuple[str, ObjectFileSystem, Common]]:
    options = {"folder": str(tmp_path / "objects")}
    for number in (1, 2, 3):
        path = save_arrays(tmp_path / "local", ARRAYS, step=number, record=loss(number))
        upload_checkpoint(path, "objects://bucket/run", options)
    yield (
        "objects://bucket/run",
        open_folder("objects://bucket/run", options).fs,
        Common(storage_option=[f"folder={options['folder']}"]),
    )
    ObjectFileSystem.clear_instance_cache()


def test_prune_behind_a_url(objects: tuple[str, ObjectFileSystem, Common], capsys: pytest.CaptureFixture[str]) -> None:
    url, fs, common = objects
    sizes = fs.objects()
    goes = {key: size for key, size in sizes.items() if "step-00000002" in key}
    keep, common = "loss:min", replace(common, json=True)
    assert prune_command(url, keep_best=keep, dry_run=True, common=common) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["path"], plan["freed_bytes"], plan["removed"]) == (url, sum(goes.values()), [])
    assert [one["path"] for one in plan["checkpoints"]] == [f"{url}/step-0000000{number}" for number in (1, 2, 3)]
    assert fs.objects() == sizes
    fs.order.clear()
    assert prune_command(url, keep_best=keep, common=common) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["removed"], done["bytes"]) == (["step-00000002"], sum(goes.values()))
    assert fs.objects() == {key: size for key, size in sizes.items() if key not in goes}
    # At no instant half of it looks like a checkpoint.
    removed = [key for kind, key in fs.order if kind == "remove"]
    assert removed[0] == "bucket/run/step-00000002/zstore.json"
    assert [found.tag for found in tags(open_folder(url, common.storage_options))] == ["step-00000001", "step-00000003"]


def test_failed_removals(objects: tuple[str, ObjectFileSystem, Common], capsys: pytest.CaptureFixture[str]) -> None:
    url, fs, common = objects
    fs.faults.append(RequestFault(kind="remove", pattern="*/step-00000001/*", times=None, error=denied))
    assert prune_command(url, keep_last=1, common=common) == 1
    assert "zstore: checkpoint 'step-00000001' could not be removed: " in capsys.readouterr().err
    found = tags(open_folder(url, common.storage_options))
    assert [one.tag for one in found] == ["step-00000001", "step-00000003"]


def test_keep_is_read_from_the_config() -> None:
    rules = {"last": 2, "best": "loss:min", "tags": ["a", "b-*"]}
    for written, expected in (
        (3, Keep(last=3)),
        (1e1, Keep(last=10)),
        ({"every": 100}, Keep(every=100)),
        (rules, Keep(last=2, best="loss:min", tags=("a", "b-*"))),
        (None, None),
    ):
        assert load_config({"zstore": {"keep": written}}).zstore.keep == expected
    for wrong in (0, "3", True, {"lasst": 1}, {"best": "loss"}, {"best": ":min"}, {"tags": "x"}, {"every": 0.5}, [1]):
        with pytest.raises(ConfigError, match=r"zstore\.keep"):
            load_config({"zstore": {"keep": wrong}})


def test_a_run_keeps_what_its_config_says(tmp_path: Path) -> None:
    keep = {"last": 1, "every": 4, "best": "eval.loss:min", "tags": ["named"]}
    with start(make_config(zstore={"keep": keep}, gradient_accumulation_steps=1)) as engine:
        for number, value in enumerate([9.0, 3.0, 5.0, 8.0, 7.0], start=1):
            step(engine)
            if number == 3:
                engine.save_checkpoint(str(tmp_path), "named", {"eval": {"loss": value}})
            else:
                engine.save_checkpoint(str(tmp_path), metrics={"eval.loss": value})
        with pytest.raises(UsageError, match="expected a number for 'loss', got str"):
            engine.save_checkpoint(str(tmp_path), "bad", metrics={"loss": "low"})  # type: ignore[dict-item]
    assert [found.record.step for found in tags(tmp_path)] == [2, 3, 4, 5]
