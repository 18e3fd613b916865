"""Reading: what was saved comes back, by zarr-python and tensorstore too, nothing damaged is believed; what a load opens."""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import tensorstore
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zstore
from tests.checkpoint.checkpoints import arrays_of_kinds, save_arrays
from tests.pages import blocks, text_of
from zstore.checkpoint import Keep, ReadAhead, sweep, weigh
from zstore.checkpoint.layout import array_path
from zstore.checkpoint.reader import CheckpointReader, open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CheckpointMismatchError, CheckpointNotFoundError, CorruptionError, UsageError
from zstore.io.files import Files
from zstore.tools import cli
from zstore.tools.reshard import reshard_command

Array = npt.NDArray[Any]


SMALL = {"client/history": np.arange(12, dtype=np.float64).reshape(3, 4)}


@pytest.fixture(scope="module")
def arrays() -> dict[str, Array]:
    return arrays_of_kinds()


@pytest.fixture(scope="module", params=["one rank", "three ranks", "few files", "zstd"])
def saved(request: pytest.FixtureRequest, arrays: dict[str, Array], tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, folder = request.param, tmp_path_factory.mktemp("saved")
    options: dict[str, Any] = {"small": SMALL, "record": {"step": 1}, "few_files": kind == "few files"}
    path = save_arrays(folder, arrays, world_size=1 if kind == "one rank" else 3, **options)
    if kind != "zstd":
        return path
    assert reshard_command(path, folder / "archive", compression="zstd") == 0
    return folder / "archive" / path.name


@pytest.fixture(scope="module", params=[1, 3], ids="world{}".format)
def plain(request: pytest.FixtureRequest, arrays: dict[str, Array], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_arrays(tmp_path_factory.mktemp("plain"), arrays, world_size=request.param, small=SMALL)


@pytest.fixture(scope="module")
def reader(saved: Path) -> Iterator[CheckpointReader]:
    with open_checkpoint(saved) as opened:
        yield opened


@pytest.fixture
def copied(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / plain.name))


def test_whole_arrays_come_back_in_their_true_shape(reader: CheckpointReader, arrays: dict[str, Array]) -> None:
    assert set(reader.arrays) == {*arrays, *SMALL}
    for name, expected in {**arrays, **SMALL}.items():
        found = reader.read_array(name)
        assert (found.shape, found.dtype, found.tobytes()) == (expected.shape, expected.dtype, expected.tobytes())


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_range_is_what_numpy_has(reader: CheckpointReader, arrays: dict[str, Array], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(arrays)))
    flat = arrays[name].reshape(-1)
    first = data.draw(st.integers(0, flat.size))
    stop = data.draw(st.integers(first, flat.size))
    out = np.full(stop - first, 1, flat.dtype)
    reader.read(name, first, stop, out)
    assert out.tobytes() == flat[first:stop].tobytes()


def test_many_threads_may_read_at_once(reader: CheckpointReader, arrays: dict[str, Array]) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(reader.read_array, [name for name in arrays for _ in range(4)]))
    expected = [array for array in arrays.values() for _ in range(4)]
    assert [a.tobytes() for a in found] == [a.tobytes() for a in expected]


def test_wrong_requests_are_refused(reader: CheckpointReader) -> None:
    with pytest.raises(CheckpointMismatchError, match="no array 'model/x'"):
        reader.read_array("model/x")
    with pytest.raises(UsageError, match="are not in array"):
        reader.read("model/h.0.bias", 70, 78, np.empty(8, ml_dtypes.bfloat16))
    with pytest.raises(UsageError, match="expected 14 contiguous bytes"):
        reader.read("model/h.0.bias", 70, 77, np.empty(8, ml_dtypes.bfloat16))


def test_a_rank_without_rows_has_no_file_and_every_file_is_read_only(saved: Path, reader: CheckpointReader) -> None:
    files = [path for path in saved.rglob("*") if path.is_file()]
    assert all(path.stat().st_mode & 0o777 == 0o444 for path in files)
    for array in reader.arrays.values():
        found = {path.name for path in (saved / array.folder).glob("c.*")}
        assert found == {Path(array.shard_file(n)).name for n in range(array.grid.num_shards)}


def test_manifests_and_record_say_what_was_saved(reader: CheckpointReader) -> None:
    assert reader.record.state == {"step": 1}
    for rank in range(reader.record.world_size):
        assert reader.manifest(rank).rank_state == {"rank": rank}


def test_zarr_python_alone_reads_every_array(saved: Path, arrays: dict[str, Array]) -> None:
    group = zarr.open_group(saved, mode="r")
    for name, expected in {**arrays, **SMALL}.items():
        array = group[array_path(name)]
        assert isinstance(array, zarr.Array)
        assert np.asarray(array[...]).tobytes() == expected.tobytes()
        assert array.attrs["zstore"]["shape"] == list(expected.shape)
    assert sorted(group.group_keys()) == ["buffer", "client", "model", "optimizer"]
    assert "h.0.weight" in dict(group["model"].arrays())  # type: ignore[union-attr]
    found = zarr.open_group(saved / "optimizer", mode="r", use_consolidated=False)["exp_avg/h.0.weight"]
    assert np.asarray(found[...]).tobytes() == arrays["optimizer/exp_avg/h.0.weight"].tobytes()  # type: ignore[index]


def _open_tensorstore(path: Path) -> Any:
    return tensorstore.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}).result()


def test_tensorstore_alone_reads_every_array(saved: Path, arrays: dict[str, Array]) -> None:
    for name, expected in {**arrays, **SMALL}.items():
        array = _open_tensorstore(saved / array_path(name))
        if expected.size:
            assert array.read().result().tobytes() == expected.tobytes()
        else:
            assert 0 in array.shape


def _writable(path: Path) -> Path:
    path.chmod(0o644)
    return path


def _flip(path: Path, offset: int) -> None:
    with _writable(path).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def _faults(folder: Path) -> list[str]:
    with open_checkpoint(folder) as opened:
        return [str(fault) for fault in verify_checkpoint(opened)]


def test_a_whole_checkpoint_has_no_faults(saved: Path) -> None:
    seen: list[int] = []
    with open_checkpoint(saved) as opened:
        assert verify_checkpoint(opened, seen.append) == []
        assert sum(seen) == sum(array.file_bytes for array in opened.arrays.values())


def test_a_flipped_byte_is_refused_by_every_reader(copied: Path) -> None:
    path = copied / "model/h.0.weight/c.0.0"
    with open_checkpoint(copied) as opened:
        layout = opened.open_shard("model/h.0.weight", 0).layout
    _flip(path, layout.slot_offset(1) + 7)
    with open_checkpoint(copied) as opened:
        with pytest.raises(CorruptionError, match=rf"chunk 1 .* its crc32c check \(offset {layout.slot_offset(1)}"):
            opened.read_array("model/h.0.weight")
        out = np.empty(10, np.float32)
        opened.read("model/h.0.weight", 0, 10, out)  # another chunk
    place = f"model/h.0.weight/c.0.0, offset {layout.slot_offset(1)}"
    assert _faults(copied) == [
        f"{place}: chunk 1 ({layout.chunk_bytes} bytes) fails its crc32c check (array model/h.0.weight)"
    ]
    with pytest.raises(ValueError, match="checksum"):
        zarr.open_array(copied / "model/h.0.weight", mode="r")[...]
    with pytest.raises(ValueError, match="Digest mismatch"):
        _open_tensorstore(copied / "model/h.0.weight").read().result()


def test_a_damaged_index_is_refused(copied: Path) -> None:
    _flip(copied / "model/experts/c.0.0", 3)
    with open_checkpoint(copied) as opened, pytest.raises(CorruptionError, match=r"the index of .* fails its crc32c"):
        opened.read_array("model/experts")
    assert len(_faults(copied)) == 1
    assert "model/experts/c.0.0, offset 0: " in _faults(copied)[0]


def test_missing_truncated_and_extra_files_are_named(copied: Path) -> None:
    (copied / "model/experts/c.0.0").unlink()
    bias = _writable(copied / "model/h.0.bias/c.0")
    os.truncate(bias, 5000)
    (copied / "model/h.0.bias/c.9").write_bytes(b"x")
    (copied / "buffer/flags/zarr.json").unlink()
    (copied / "config.json").write_text("{}")  # the user's own
    assert _faults(copied) == [
        "buffer/flags/zarr.json: is missing",
        "model/experts/c.0.0: is missing (array model/experts)",
        "model/h.0.bias/c.0, offset 5000: has 5000 bytes, expected 8192 (array model/h.0.bias)",
        "model/h.0.bias/c.9: is not part of the checkpoint",
    ]
    with open_checkpoint(copied) as opened:
        with pytest.raises(CorruptionError, match=r"'model/experts'.*c\.0\.0 is missing"):
            opened.read_array("model/experts")
        with pytest.raises(CorruptionError, match=r"'model/h.0.bias'.* has 5000 bytes, expected 8192 .*offset 5000"):
            opened.read_array("model/h.0.bias")


def test_a_whole_file_of_another_array_is_refused(copied: Path) -> None:
    swapped = copied / "model/h.0.weight/c.0.0"
    swapped.unlink()
    shutil.copy(copied / "optimizer/exp_avg/h.0.weight/c.0.0", swapped)
    with open_checkpoint(copied) as opened, pytest.raises(CorruptionError, match="not the one that the manifest names"):
        opened.read_array("model/h.0.weight")
    assert all("not the one that the manifest names" in fault for fault in _faults(copied))


def test_a_damaged_manifest_or_metadata_file_is_refused(copied: Path) -> None:
    _flip(copied / "manifest/rank-00000.json", 60)
    _flip(copied / "model/zarr.json", 4)
    with open_checkpoint(copied) as opened, pytest.raises(CorruptionError, match=r"rank-00000\.json fails the digest"):
        opened.read_array("model/h.0.bias")
    faults = _faults(copied)
    assert any(fault.startswith("manifest/rank-00000.json: ") for fault in faults)
    assert any(fault.startswith("model/zarr.json: ") for fault in faults)
    _flip(copied / "zarr.json", 50)
    with pytest.raises(CorruptionError, match=r"zarr\.json fails the digest"):
        open_checkpoint(copied)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    small = {"model/w": np.arange(20, dtype=np.float32)}
    for step, tag in ((2, "step-00000002"), (1, "1.25"), (9, "again")):
        save_arrays(folder, small, step=step, tag=tag)
    return folder


def _found(path: Path, tag: str | float | None = None) -> tuple[str, int]:
    with open_checkpoint(path, tag) as opened:
        return opened.tag, opened.record.step


def test_a_tag_is_found_by_text_number_or_folder(several: Path) -> None:
    assert _found(several, 1.25) == ("1.25", 1)
    assert _found(several, "1.25") == ("1.25", 1)
    assert _found(several / "1.25") == ("1.25", 1)
    assert _found(several / "1.25", 1.25) == ("1.25", 1)
    assert [info.tag for info in tags(several)] == ["step-00000002", "1.25", "again"]
    assert [info.tag for info in tags(several / "1.25")] == ["1.25"]


def test_a_renamed_folder_is_a_checkpoint_under_its_new_name(several: Path, tmp_path: Path) -> None:
    shutil.copytree(several / "again", tmp_path / "best")
    assert _found(tmp_path) == ("best", 9)
    assert _found(tmp_path, "best") == ("best", 9)


def test_what_is_not_there_is_answered_with_what_is(several: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"tag 'x'; it has the tags 'step-00000002', '1.25', 'again'"):
        open_checkpoint(several, "x")
    with pytest.raises(CheckpointNotFoundError, match="not 'x'"):
        open_checkpoint(several / "again", "x")
    with pytest.raises(CheckpointNotFoundError, match="does not exist or is not a folder"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no committed checkpoint"):
        open_checkpoint(tmp_path)
    shutil.copytree(several / "again", tmp_path / "checkpoint-9/again")  # a Trainer's
    with pytest.raises(CheckpointNotFoundError, match=r"use a folder in it that has one, such as .*/checkpoint-9"):
        open_checkpoint(tmp_path)
    (tmp_path / "zero_to_fp32.py").touch()
    with (
        patch("zstore.checkpoint.catalog.list_nested", side_effect=OSError),
        pytest.raises(FileNotFoundError, match="Deep"),
    ):
        open_checkpoint(tmp_path)


def test_a_folder_without_a_valid_record_is_no_checkpoint(several: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(several, tmp_path / "all"))
    (folder / "again/zstore.json").unlink()
    assert _found(folder) == ("1.25", 1)
    record = _writable(folder / "1.25/zstore.json")
    record.write_text(record.read_text().replace('"step": 1', '"step": 7'))
    assert _found(folder) == ("step-00000002", 2)
    with pytest.raises(CheckpointNotFoundError, match="never committed, or the file was lost"):
        open_checkpoint(folder / "again")
    with pytest.raises(CorruptionError):
        open_checkpoint(folder, "1.25")
    shutil.rmtree(folder / "step-00000002")
    with pytest.raises(CheckpointNotFoundError, match=r"1\.25 was rejected.*digest"):
        open_checkpoint(folder)


def test_a_folder_under_way_is_never_opened(several: Path, tmp_path: Path) -> None:
    shutil.copytree(several / "again", tmp_path / "again.tmp-0123456789abcdef0123456789abcdef")
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="never committed"):
        open_checkpoint(tmp_path / "again.tmp-0123456789abcdef0123456789abcdef")


def test_reading_ahead_loses_nothing(tmp_path: Path) -> None:
    values = np.arange(400_000, dtype=np.float32)
    save_arrays(tmp_path, {"model/w": values}, world_size=1)
    with open_checkpoint(tmp_path) as opened:
        with ReadAhead(opened, [("model/w", 0, values.size)], memory_bytes=2**16) as ahead:
            spans = list(iter(ahead.take, None))  # all of them, and none is released
        assert len(spans) > 6
        assert np.array_equal(np.concatenate([span.data.view(np.float32) for span in spans]), values)
        ahead.release(spans[0])
        with ReadAhead(opened, [("model/w", 5, 900)] * 2) as ahead:
            for out in np.empty((2, 895), np.float32):
                ahead.read("model/w", 5, 900, out)
                assert np.array_equal(out, values[5:900])


NAMES = ("one", "two")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for number, tag in enumerate(NAMES, 1):
        save_arrays(tmp_path, {"model/w": np.full(100, number, np.float32)}, world_size=1, step=number, tag=tag)
    assert (tmp_path / "latest").read_text() == "two\n"
    return tmp_path


def opened(place: Path, tag: str | None = None) -> str:
    with zstore.open_checkpoint(place, tag) as checkpoint:
        assert set(checkpoint["model/w"][:]) == {1 + NAMES.index(checkpoint.tag)}
        return checkpoint.tag


@pytest.mark.parametrize("text", ["one", "one\n", "  one \n\n"])
@pytest.mark.parametrize("tag", [None, "latest"])
def test_an_edited_latest_is_followed(text: str, tag: str | None, run: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    assert "there is no complete checkpoint 'one', so the newest is opened" in caplog.text


def test_a_save_that_was_killed_before_it_replaced_latest_counts(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_checkpoint(run, "two") as reader:
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
    with open_checkpoint(run, "two") as reader:
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
    with zstore.open_checkpoint(url) as checkpoint:
        assert checkpoint.tag == "one"
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(100))
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with zstore.initialize(model=model, config=config)[0] as engine:
        engine.load_checkpoint(str(run), load_module_only=True)
        assert torch.equal(model.w.detach(), torch.ones(100))


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
    for example in blocks("docs/checkpoints.md"):
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
    assert set(re.findall(r"^\| `zstore (\w+) ", text_of("docs/checkpoints.md"), re.MULTILINE)) <= set(cli.COMMANDS)
