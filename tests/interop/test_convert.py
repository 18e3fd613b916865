"""`zstore convert`: every kind into every other, each read by the software that it is for."""

import os
import pickle
import re
import shlex
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties, TensorStorageMetadata

import zstore.dcp
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CheckpointExistsError, CheckpointMismatchError, CorruptionError, UsageError
from zstore.io.shards import open_resources
from zstore.open.sources import open_source
from zstore.tools.cli import app
from zstore.tools.convert import convert_command

DOCS = Path(__file__).parents[2] / "docs"
alone = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def convert(src: Path, out: Path, to: str = "zstore", **options: Any) -> None:
    assert convert_command(src, out, to=to, **options) == 0


def values() -> dict[str, Any]:
    return {
        "lr": 0.1,
        "betas": (0.9, 0.95),
        "name": "run",
        "raw": b"\x00\x01",
        "many": [1, 2, None],
        "inf": float("inf"),
    }


def state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    weight = torch.randn(300, 70)
    return {
        "model": {
            "a.weight": weight,
            "a.bias": torch.randn(70).bfloat16(),
            "t.weight": torch.randn(40, 30).t(),
            "scalar": torch.tensor(3, dtype=torch.int64),
            "none": torch.empty(0, 5),
            "flags": torch.rand(17) < 0.5,
            "deep": torch.randn(3, 4, 5, dtype=torch.float64),
        },
        "optim": {"state": {"a.weight": {"exp_avg": torch.randn(300, 70), "step": torch.tensor(4.0)}}},
        "extra": {"count": torch.arange(5), "values": values()},
    }


def blank(like: Any) -> Any:
    if isinstance(like, dict):
        return {key: blank(value) for key, value in like.items()}
    return torch.zeros_like(like) if isinstance(like, torch.Tensor) else None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of torch.distributed.checkpoint, as it writes one."""
    path = tmp_path_factory.mktemp("dcp") / "step-30"
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.save(state(), checkpoint_id=path, no_dist=True)
    return path


def load_dcp(path: Path, **options: Any) -> Any:
    found = blank(state())
    dcp.load(found, no_dist=True, **options)
    return found


# -- torch.distributed.checkpoint -------------------------------------------------------------------------------------


@alone
def test_a_dcp_folder_becomes_ours_and_loads_through_dcp(theirs: Path, tmp_path: Path) -> None:
    convert(theirs, tmp_path / "ours", world_size=2)
    with open_checkpoint(tmp_path / "ours") as reader:
        assert verify_checkpoint(reader) == []
        assert (reader.tag, reader.record.step, reader.record.world_size) == ("step-30", 30, 2)
        assert np.array_equal(reader.read_array("model/a.weight"), state()["model"]["a.weight"].numpy())
        assert np.array_equal(reader.read_array("model/t.weight"), state()["model"]["t.weight"].numpy())
        assert reader.read_array("client/extra.count").tolist() == [0, 1, 2, 3, 4]
    assert same(load_dcp(tmp_path, storage_reader=zstore.dcp.Reader(tmp_path / "ours")), state())


class Trap:
    """What a pickle would call."""

    def __reduce__(self) -> Any:
        return os.system, ("touch trapped",)


def test_hostile_metadata_is_refused(theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a"

    def broken(change: Any) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(theirs, folder)
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        changed = change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata if changed is None else changed))
        return folder

    def elsewhere(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "../a/__0_0.distcp"

    def smaller(metadata: Any) -> None:
        metadata.state_dict_metadata["model.a.weight"].chunks[0].sizes = torch.Size([299, 70])

    def outside(metadata: Any) -> None:
        metadata.state_dict_metadata["model.a.weight"].chunks[0].offsets = torch.Size([1, 0])

    def other(metadata: Any) -> None:
        metadata.state_dict_metadata["model.a.weight"].properties.dtype = torch.int32

    for change, error, words in (
        (lambda _: Trap(), CheckpointMismatchError, "system"),
        (lambda _: {}, CorruptionError, "is not a valid `.metadata` .* or is damaged"),
        (elsewhere, CorruptionError, "not a file of the folder"),
        (smaller, CorruptionError, "do not cover its 21000 elements"),
        (outside, CorruptionError, "is not in a tensor of shape"),
        (other, CorruptionError, "expected int32"),
    ):
        with pytest.raises(error, match=words), open_source(broken(change)) as source:
            source.read_array("model/a.weight")
    (folder / ".metadata").write_bytes(b"garbage")
    with pytest.raises(CorruptionError, match=r"\.metadata"):
        open_source(folder)
    assert not (tmp_path / "trapped").exists()


def test_a_cut_off_file_is_said_and_nothing_is_left(theirs: Path, tmp_path: Path) -> None:
    shutil.copytree(theirs, tmp_path / "a")
    data = tmp_path / "a/__0_0.distcp"
    os.truncate(data, 5000)
    for to in ("zstore", "torch", "safetensors"):
        with pytest.raises(CorruptionError, match=r"__0_0\.distcp"):
            convert(tmp_path / "a", tmp_path / f"out-{to}", to)
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != tmp_path / "a"]
    assert left == []


def save(state: dict[str, Any], path: Path) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def edit(folder: Path, change: Callable[[Any], None]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


@alone
def test_blocks_that_overlap_as_much_as_they_leave_out_are_refused(tmp_path: Path) -> None:
    """Their elements are as many as the tensor has; a read would leave what nobody filled."""
    parts = torch.arange(1024.0).reshape(4, 16, 16)
    save({f"w{number}": part.clone() for number, part in enumerate(parts)}, tmp_path / "blocks")

    def joined(metadata: Any) -> None:
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        blocks = [tensors.pop(f"w{number}").chunks[0] for number in range(4)]
        for number, block in enumerate(blocks):
            (index,) = [index for index in places if index.fqn == f"w{number}"]
            block.offsets = torch.Size([16 * number, 0])
            places[MetadataIndex("w", block.offsets)] = places.pop(index)
        tensors["w"] = TensorStorageMetadata(TensorProperties(), torch.Size([64, 16]), blocks)
        metadata.planner_data = {"w": ("w",)}

    edit(tmp_path / "blocks", joined)
    with open_source(tmp_path / "blocks") as source:
        assert source.read_array("model/w").reshape(-1).tolist() == list(range(1024))

    def twice(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata["w"].chunks
        chunks[2].offsets = chunks[1].offsets

    edit(tmp_path / "blocks", twice)
    with pytest.raises(CorruptionError, match="blocks of 'w' do not cover its 1024 elements exactly once"):
        open_source(tmp_path / "blocks")


@alone
def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path / "a")
    (tmp_path / "a/__0_0.distcp").unlink()
    with open_source(tmp_path / "a") as source, pytest.raises(CorruptionError, match=r"__0_0\.distcp is missing"):
        source.read_array("model/w")
    save({"w": torch.ones(3), "n": 3}, tmp_path / "b")
    (tmp_path / "b/__0_0.distcp").unlink()
    with pytest.raises(CorruptionError, match=r"__0_0\.distcp is missing"):
        open_source(tmp_path / "b")


@alone
def test_bytes_and_pickles_are_read_in_ranges_and_not_held(tmp_path: Path) -> None:
    """Entries of each kind, of which some have a megabyte."""
    raw = np.random.default_rng(0).integers(0, 256, 2**20, np.uint8).tobytes()
    large = [float(n) for n in range(300_000)]
    state = {f"raw{n}": raw for n in range(8)} | {"odd": {raw}, "large": large, "empty": b"", "few": {"a": (1, b"x")}}
    save(state, tmp_path / "a")
    with open_resources(pool_bytes=4096, num_threads=1) as resources:
        open_source(tmp_path / "a", resources=resources).close()
        tracemalloc.start()
        try:
            with open_source(tmp_path / "a", resources=resources) as source:
                held, _ = tracemalloc.get_traced_memory()
                assert source.read_array("client/raw3").tobytes() == raw
                part = np.empty(100, np.uint8)
                source.read("client/raw3", 70_000, 70_100, part)
                assert part.tobytes() == raw[70_000:70_100]
                document = source.record.state["dcp"]
                assert document["values"] == [[["few", "a"], {"$tuple": [1, {"$bytes": "eA=="}]}]]
                kinds = {key.removeprefix("client/"): kind for key, kind in document["opaque"].items()}
                assert kinds == dict.fromkeys([*(f"raw{n}" for n in range(8)), "empty"], "bytes") | {
                    "odd": "pickle",
                    "large": "pickle",
                }
                for name, value in (("odd", {raw}), ("large", large)):
                    path = tmp_path / name
                    path.write_bytes(source.read_array(f"client/{name}").tobytes())
                    assert torch.load(path, weights_only=False) == value
        finally:
            tracemalloc.stop()
    assert held < 2**20


# -- a plain state dict -----------------------------------------------------------------------------------------------


def test_torch_loads_the_weights_with_weights_only(theirs: Path, tmp_path: Path) -> None:
    convert(theirs, tmp_path / "model.pt", "torch")
    assert same(torch.load(tmp_path / "model.pt", weights_only=True), state()["model"])
    assert same(torch.load(tmp_path / "model.pt", weights_only=True, mmap=True), state()["model"])
    convert(theirs, tmp_path / "half.pt", "torch", dtype="fp16")
    half = torch.load(tmp_path / "half.pt", weights_only=True)
    assert torch.equal(half["a.weight"], state()["model"]["a.weight"].half())
    assert half["flags"].dtype == torch.bool
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["half.pt", "model.pt"]


# -- DeepSpeed --------------------------------------------------------------------------------------------------------


@alone
@pytest.mark.parametrize("kind", ["stage1-bf16-3", "stage2-fp16-1", "stage3-fp32-3", "universal-stage3-2"])
def test_a_deepspeed_folder_becomes_all_others(kind: str, tmp_path: Path) -> None:
    theirs = Path(__file__).parents[1] / "data/deepspeed" / kind
    convert(theirs, tmp_path / "ours", world_size=2)
    convert(theirs, tmp_path / "model.pt", "torch")
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    with open_source(theirs) as source, open_checkpoint(tmp_path / "ours") as reader:
        assert verify_checkpoint(reader) == []
        assert source.arrays.keys() == reader.arrays.keys()
        assert dict(reader.record.state) == dict(source.record.state)
        names = {name.partition("/")[2]: name for name in source.arrays if name.startswith(("model/", "buffer/"))}
        assert weights.keys() >= names.keys()
        target = {"model": {name: torch.zeros_like(weights[name]) for name in names}}
        dcp.load(target, storage_reader=zstore.dcp.Reader(tmp_path / "ours"), no_dist=True)
        for name, array in names.items():
            expected = source.read_array(array)
            for found in (weights[name], target["model"][name]):
                assert found.reshape(-1).view(torch.uint8).numpy().tobytes() == expected.tobytes()
        for name in source.arrays:
            assert reader.read_array(name).tobytes() == source.read_array(name).tobytes()


# -- the command ------------------------------------------------------------------------------------------------------


def test_what_is_there_is_never_replaced(theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    for to in ("torch", "safetensors"):
        with pytest.raises(CheckpointExistsError, match="out exists"):
            convert(theirs, tmp_path / "out", to)
    convert(theirs, tmp_path / "ours")
    with pytest.raises(CheckpointExistsError, match="has a checkpoint 'step-30' already"):
        convert(theirs, tmp_path / "ours")
    assert (tmp_path / "out").read_text() == "mine"
    assert [info.tag for info in tags(tmp_path / "ours")] == ["step-30"]


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for options in ({"to": "onnx"}, {"dtype": "fp16"}, {"to": "dcp"}, {"to": "torch", "world_size": 2}):
        with pytest.raises(UsageError, match="--"):
            convert_command(tmp_path, tmp_path / "out", **options)  # type: ignore[arg-type]


# -- the pages --------------------------------------------------------------------------------------------------------


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


def run(line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        app(shlex.split(line)[1:])
    assert ended.value.code in (0, None)


@alone
def test_the_example_of_dcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("dcp.md", "python")
    exec(block, {})
    for line in ("zstore inspect ckpt", "zstore verify ckpt", "zstore consolidate ckpt out"):
        assert f"`{line}`" in (DOCS / "dcp.md").read_text()
        run(line)
    assert load_file("out/model.safetensors")["weight"].shape == (4, 16)


@alone
def test_the_examples_of_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weight = torch.randn(100, 30)
    dcp.save({"model": {"w": weight}, "step": 30}, checkpoint_id="theirs/step-30", no_dist=True)
    (block,) = blocks("convert.md", "bash")
    for line in block.splitlines():
        run(line)
    assert torch.equal(torch.load("model.pt", weights_only=True)["w"], weight)
    assert torch.equal(load_file("hf/model.safetensors")["w"], weight.bfloat16())
    target = {"model": {"w": torch.zeros(100, 30)}, "step": 0}
    dcp.load(target, storage_reader=zstore.dcp.Reader("again"), no_dist=True)
    assert target["step"] == 30
    assert torch.equal(target["model"]["w"], weight)
