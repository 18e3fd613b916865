"""Checkpoints of other software and damaged ones: an error of ours or what is in them, soon, with little memory."""

import contextlib
import json
import os
import pickle
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from tests.checkpoint.checkpoints import save_arrays
from tests.checkpoint.forging import tree_of
from tests.interop import deepspeed_data
from tests.interop.watching import MOST_GROWN_BYTES, grown, sparse
from zstore.errors import CorruptionError, UsageError, ZstoreError
from zstore.io.shards import IoResources, open_resources
from zstore.open.sources import open_source
from zstore.tools.convert import convert_command


def save_dcp(path: Path) -> Path:
    weight = torch.arange(60.0).reshape(12, 5)
    state = {
        "model": {"w": weight, "b": weight[0].bfloat16(), "deep": torch.arange(24).reshape(2, 3, 4)},
        "optim": {"state": {"w": {"exp_avg": weight * 2}}},
        "progress": {"step": 3, "betas": (0.9, 0.95), "raw": bytes(range(256)), "odd": {1, 2}},
    }
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def save_hugging_face(path: Path) -> Path:
    path.mkdir(parents=True)
    weight = np.arange(60, dtype=np.float32).reshape(12, 5)
    save_file({"w": weight, "b": weight[0]}, path / "model-00001-of-00002.safetensors")
    save_file({"v": weight * 2}, path / "model-00002-of-00002.safetensors")
    files = {"w": 1, "b": 1, "v": 2}
    index = {"weight_map": {name: f"model-0000{number}-of-00002.safetensors" for name, number in files.items()}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text("{}")
    return path


def hostile_dcp(folder: Path) -> Iterator[Path]:
    good = save_dcp(folder / "good")
    original = pickle.loads((good / ".metadata").read_bytes())

    def variant(name: str, metadata: Any) -> Path:
        path = folder / name
        shutil.copytree(good, path)
        content = metadata if isinstance(metadata, bytes) else pickle.dumps(metadata)
        (path / ".metadata").write_bytes(content)
        return path

    def forged() -> Any:
        return pickle.loads(pickle.dumps(original))

    path = variant("no end", b"")
    sparse(path / ".metadata", 2**40)
    yield path
    metadata = forged()
    weight = metadata.state_dict_metadata["model.w"]
    place = metadata.storage_data[MetadataIndex("model.w", torch.Size([0, 0]))]
    weight.size = weight.chunks[0].sizes = torch.Size([2**44, 5])
    yield variant("a large tensor", metadata)
    weight.size = torch.Size([2**44, 2])
    weight.chunks[:] = [ChunkStorageMetadata(torch.Size([0, n]), torch.Size([2**44, 1])) for n in range(2)]
    metadata.storage_data |= {MetadataIndex("model.w", chunk.offsets): place for chunk in weight.chunks}
    yield variant("tall columns", metadata)
    metadata = forged()
    raw = metadata.storage_data[MetadataIndex("progress.raw")]
    for number in range(2000):
        metadata.state_dict_metadata[f"x{number}"] = metadata.state_dict_metadata["progress.raw"]
        metadata.storage_data[MetadataIndex(f"x{number}")] = raw
    path = variant("one range many times", metadata)
    with (path / "__0_0.distcp").open("r+b") as file:
        torch.save(os.urandom(2**24), file)
        raw.relative_path, raw.offset, raw.length = "__0_0.distcp", 0, file.tell()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    yield path


def hostile_deepspeed(folder: Path) -> Iterator[Path]:
    deepspeed_data.write(folder / "good")

    def variant(name: str, **model: Any) -> Path:
        return deepspeed_data.write(folder / name, model=model)

    path = variant("no end")
    sparse(path / "mp_rank_00_model_states.pt", 2**40)
    yield path
    yield variant("a large tensor", param_shapes=[{"w": torch.Size([2**46]), "b": torch.Size([3])}])
    yield variant("no end of extents", param_shapes=[{"w": (2**60,) * 20_000, "b": torch.Size([3])}])
    endless: list[Any] = [0]
    for _ in range(100):
        endless = [endless] * 50
    yield variant("endless", client=endless)


def hostile_hugging_face(folder: Path) -> Iterator[Path]:
    save_hugging_face(folder / "good")
    values = b'{"w":[' + b"[]," * 2**23 + b"[]]}"
    for file in ("model-00002-of-00002.safetensors", "model.safetensors.index.json"):
        path = save_hugging_face(folder / f"values-{file}")
        head = len(values).to_bytes(8, "little") if file.endswith(".safetensors") else b""
        (path / file).write_bytes(head + values)
        yield path
        path = save_hugging_face(folder / f"no end-{file}")
        sparse(path / file, 2**40)
        yield path
    path = save_hugging_face(folder / "a large tensor")
    header = json.dumps({"v": {"dtype": "F32", "shape": [2**42], "data_offsets": [0, 2**44]}}).encode()
    file = path / "model-00002-of-00002.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with contextlib.suppress(OSError):  # a file system may not have files so large
        os.truncate(file, 8 + len(header) + 2**44)
    yield path


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("hostile", [hostile_dcp, hostile_deepspeed, hostile_hugging_face])
def test_hostile_files_take_little_memory(hostile: Any, tmp_path: Path) -> None:
    paths = list(hostile(tmp_path / "in"))
    # A pickle of millions of references, which takes seconds until it is refused, as it is opened.
    opened = [path for path in paths if path.relative_to(tmp_path / "in").parts[0] == "endless"]
    growth = grown("tests.interop.watching", tmp_path / "in/good", tmp_path / "out", paths, opened=opened)
    assert len(growth) == len(paths)
    assert max(growth.values()) < MOST_GROWN_BYTES, growth


def test_numbers_that_are_none_are_left_at_their_defaults(tmp_path: Path) -> None:
    scaler = {"cur_scale": 10**400, "cur_hysteresis": float("inf"), "cur_iter": float("nan"), "last_overflow_iter": 3}
    states = [deepspeed_data.states(rank) | {"loss_scaler": scaler} for rank in range(2)]
    deepspeed_data.write(tmp_path, ranks=states)
    with open_source(tmp_path) as source:
        found = source.record.state["engine"]["loss_scale"]
    assert found.pop("rules") is None
    assert found == {"scale": 1.0, "hysteresis_left": 2, "iteration": 9, "last_overflow": 3}


def test_a_tensor_without_a_name_is_refused(tmp_path: Path) -> None:
    save_file({"": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CorruptionError, match="expected `group/name`"):
        open_source(tmp_path)


LIMIT_S = 10.0
"""No example may take longer; one takes some milliseconds."""
FUZZ = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
KINDS = ["zstore", "dcp", "hugging-face", "stage2-fp32-3", "stage3-fp16-2", "universal-stage1-2"]


class Patient:
    """A small checkpoint that is damaged and brought back."""

    def __init__(self, kind: str, root: Path, resources: IoResources) -> None:
        self.root = root
        self.folder = root / "ckpt"
        self.resources = resources
        self.has_checksums = kind == "zstore"
        if self.has_checksums:
            arrays = {"model/w": np.arange(640, dtype=np.float32).reshape(40, 16), "optimizer/m/w": np.ones((40, 16))}
            self.folder = save_arrays(self.folder, arrays, world_size=2, small={"client/n": np.arange(6)})
            for file in self.folder.rglob("*.*"):
                file.chmod(0o644 if file.is_file() else 0o755)
        elif kind == "dcp":
            save_dcp(self.folder)
        elif kind == "hugging-face":
            save_hugging_face(self.folder)
        else:
            source = deepspeed_data.root_of(kind)
            shutil.copytree(source, self.folder, ignore=shutil.ignore_patterns("expected.*", "*.py"))
        self.files = {str(p.relative_to(self.folder)): p.read_bytes() for p in self.folder.rglob("*") if p.is_file()}
        self.right = self.read_all()
        assert len(self.right) >= 3

    def read_all(self) -> dict[str, bytes]:
        """Read what can be read; errors of ours are left out, any other fails."""
        found: dict[str, bytes] = {}
        with contextlib.suppress(ZstoreError), open_source(self.folder, resources=self.resources) as source:
            for name, array in source.arrays.items():
                if array.spec.nbytes <= 2**20:
                    with contextlib.suppress(ZstoreError):
                        found[name] = source.read_array(name).tobytes()
        return found

    def restore(self) -> None:
        for path in list(self.folder.rglob("*")):
            name = str(path.relative_to(self.folder))
            if path.is_file() and name not in self.files:
                path.unlink()
            elif path.is_dir() and name in self.files:
                path.rmdir()
        for name, content in self.files.items():
            path = self.folder / name
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)


@pytest.fixture(scope="module")
def resources() -> Iterator[IoResources]:
    with open_resources(pool_bytes=2**20, num_threads=2) as opened:
        yield opened


@pytest.fixture(scope="module", params=KINDS)
def patient(request: Any, tmp_path_factory: pytest.TempPathFactory, resources: IoResources) -> Patient:
    return Patient(request.param, tmp_path_factory.mktemp(request.param), resources)


@contextlib.contextmanager
def treated(patient: Patient) -> Iterator[None]:
    """The block damages the checkpoint and uses it, within the limit; nothing else is there then."""
    started = time.process_time()
    try:
        yield
        assert time.process_time() - started < LIMIT_S
        assert {path.name for path in patient.root.iterdir()} <= {"ckpt", "out"}
    finally:
        patient.restore()
        shutil.rmtree(patient.root / "out", ignore_errors=True)


@FUZZ
@given(data=st.data())
def test_changed_bytes_give_an_error_or_values(patient: Patient, data: st.DataObject) -> None:
    """The formats of others have no checksums: what is in the files is what is read."""
    with treated(patient):
        for _ in range(data.draw(st.integers(1, 3))):
            file = data.draw(st.sampled_from(sorted(patient.files)))
            content = bytearray(patient.files[file])
            at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, min(400, len(content) - 1)))
            kind = data.draw(st.sampled_from(["flip", "insert", "swap", "replace"]))
            if kind == "flip":
                content[at] = data.draw(st.integers(0, 255))
            elif kind == "insert":
                content[at:at] = data.draw(st.binary(min_size=1, max_size=20))
            elif kind == "swap":
                content = bytearray(patient.files[data.draw(st.sampled_from(sorted(patient.files)))])
            else:
                content = bytearray(data.draw(st.binary(max_size=200)))
            (patient.folder / file).write_bytes(content)
        before = tree_of(patient.folder)
        found = patient.read_all()
        assert not patient.has_checksums or all(content == patient.right[name] for name, content in found.items())
        if data.draw(st.integers(0, 3)) == 0:
            with contextlib.suppress(ZstoreError):
                convert_command(patient.folder, patient.root / "out")
        assert tree_of(patient.folder) == before


@FUZZ
@given(data=st.data())
def test_cut_and_lost_files_give_an_error_or_the_right_values(patient: Patient, data: st.DataObject) -> None:
    with treated(patient):
        name = data.draw(st.sampled_from(sorted(patient.files)))
        file = patient.folder / name
        kind = data.draw(st.sampled_from(["cut", "grow", "remove", "rename", "folder"]))
        if kind == "cut":
            os.truncate(file, data.draw(st.integers(0, len(patient.files[name]) - 1)))
        elif kind == "grow":
            file.write_bytes(patient.files[name] + data.draw(st.binary(min_size=1, max_size=20)))
        elif kind == "rename":
            file.rename(file.with_name(data.draw(st.sampled_from(["x", f"{file.name}.bak"]))))
        else:
            file.unlink()
            if kind == "folder":
                file.mkdir()
        found = patient.read_all()
        assert all(content == patient.right.get(array) for array, content in found.items()), name


def test_a_patient_is_brought_back(patient: Patient) -> None:
    """Else the two tests above would try one damage alone."""
    patient.restore()
    assert patient.read_all() == patient.right


W = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    save_file({"w": W, "b": W[0]}, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


def test_one_file_beside_several_indices_is_not_taken_for_them(tmp_path: Path) -> None:
    save_file({"w": W}, tmp_path / "x.safetensors")
    for variant in ("fp16", "bf16"):
        (tmp_path / f"model.safetensors.index.{variant}.json").write_text("{}")
    with pytest.raises(UsageError, match=r"index\.bf16.*it is unclear which belong together"):
        open_source(tmp_path)
    (tmp_path / "x.safetensors").rename(tmp_path / "model.safetensors")
    with open_source(tmp_path) as source:
        assert list(source.arrays) == ["model/w"]


OTHER_FILES = ["../model.safetensors", "/etc/passwd", "..", ".", "a/b.safetensors", "", "x\0y", 7, None, ["a"], {}]
NO_INDEX = [b"", b"[" * 10**6, b"[]", b'{"weight_map": []}', b'{"weight_map": 1}', b"\xff\xfe", b'{"a":' * 10**5]


@pytest.mark.parametrize(
    "content", [*NO_INDEX, *(json.dumps({"weight_map": {"w": name}}).encode() for name in OTHER_FILES)]
)
def test_an_index_is_valid_and_may_not_lead_elsewhere(content: bytes, folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_bytes(content)
    try:
        with pytest.raises(CorruptionError, match=r"is not a valid index|not a file of that folder|not a regular file"):
            open_source(folder).close()
    finally:
        index.unlink()


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 10**6,
        b'{"w":' * 10**5,
        b'{"w": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}',
        b'{"w": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [1000000, 1000004]}}',
    ],
)
def test_a_header_that_lies_is_refused(header: bytes, tmp_path: Path) -> None:
    content = len(header).to_bytes(8, "little") + header + W.tobytes() + W[0].tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CorruptionError, match="not a valid safetensors file"):
        open_source(tmp_path).close()


def test_a_header_without_end_and_a_pipe_are_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    os.truncate(file, 2**40)
    with pytest.raises(CorruptionError, match="a header of"):
        open_source(tmp_path).close()
    file.unlink()
    if hasattr(os, "mkfifo"):
        os.mkfifo(file)
        with pytest.raises(ZstoreError):
            open_source(tmp_path).close()
