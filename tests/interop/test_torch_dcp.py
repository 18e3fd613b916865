"""Folders of torch.distributed.checkpoint, read without it: blocks that tile, and entries that are no tensors."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties, TensorStorageMetadata

from zstore.errors import CorruptionError
from zstore.interop import dcp_entries
from zstore.interop.dcp_entries import FileRange, Opaque, PickledEntries
from zstore.interop.torch_archive import write_archive
from zstore.io.files import Files
from zstore.io.shards import open_resources
from zstore.open.sources import open_source

alone = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
FILES = Files(direct=False)


def save(state: dict[str, Any], path: Path) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def edit(folder: Path, change: Callable[[Any], None]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


# -- blocks -----------------------------------------------------------------------------------------------------------


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


# -- entries ----------------------------------------------------------------------------------------------------------


def look(path: Path) -> tuple[str, Any]:
    return PickledEntries(FILES).look(FileRange(path=path, offset=0, nbytes=path.stat().st_size))


def read(entry: Opaque, first: int, stop: int) -> bytes:
    out = np.empty(stop - first, np.uint8)
    entry.read(FILES, first, out)
    return out.tobytes()


class FileSink:
    """A file that our own writer of archives writes."""

    def __init__(self) -> None:
        self.data = bytearray()

    @property
    def offset(self) -> int:
        return len(self.data)

    def write(self, data: Any) -> None:
        self.data += bytes(data)

    def patch(self, offset: int, data: bytes) -> None:
        self.data[offset : offset + len(data)] = data


def written(value: bytes, how: int, path: Path) -> Path:
    """A file with pickled bytes: by torch with a protocol, or (0) by us."""
    if how:
        torch.save(value, path, pickle_protocol=how)
        return path
    sink = FileSink()
    write_archive(sink, value)
    path.write_bytes(sink.data)
    return path


@pytest.mark.parametrize("how", [0, 2, 3, 4, 5])
@pytest.mark.parametrize("size", [0, 1, 5, 300, 70_000, 3 * 2**20])
def test_bytes_are_found_and_read_in_ranges(how: int, size: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(size)
    value = rng.integers(0, 256, size, np.uint8).tobytes()
    kind, entry = look(written(value, how, tmp_path / "it"))
    assert (kind, entry.nbytes) == ("bytes", size)
    assert read(entry, 0, size) == value
    for _ in range(20):
        first, stop = sorted(rng.integers(0, size + 1, 2).tolist())
        assert read(entry, first, stop) == value[first:stop]
    assert size < 300 or not isinstance(entry, dcp_entries.LoadedBytes), "nothing is unpickled to read them"


@settings(deadline=None, max_examples=200)
@given(text=st.binary(max_size=40), block=st.integers(1, 9), data=st.data())
def test_text_that_stands_for_bytes_is_decoded_as_pythons(
    text: bytes, block: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if data.draw(st.booleans()):
        text = text.decode("latin1").encode()
    path = tmp_path_factory.getbasetemp() / "text"
    path.write_bytes(b"...." + text + b"....")
    place = FileRange(path=path, offset=4, nbytes=len(text))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dcp_entries, "_BLOCK_BYTES", block)
        try:
            right = text.decode().encode("latin1")
        except UnicodeError:
            with pytest.raises(CorruptionError, match="not the encoding of bytes"):
                dcp_entries.TextBytes(FILES, place)
            return
        entry = dcp_entries.TextBytes(FILES, place)
        assert entry.nbytes == len(right)
        first, stop = sorted(data.draw(st.tuples(st.integers(0, len(right)), st.integers(0, len(right)))))
        assert read(entry, first, stop) == right[first:stop]


def test_plain_data_is_loaded_and_what_is_large_or_endless_is_kept_as_it_is(tmp_path: Path) -> None:
    endless: list[Any] = ["x"]
    for _ in range(20):
        endless = [endless] * 10
    large = [float(n) for n in range(600_000)]
    for value, kind in (
        ({"a": (1, 2.5)}, ""),
        ([b"x"], ""),
        (endless, "pickle"),
        (large, "pickle"),
        ({1, 2}, "pickle"),
    ):
        path = tmp_path / "it"
        torch.save(value, path)
        found, entry = look(path)
        assert found == kind
        assert kind == "" or read(entry, 0, entry.nbytes) == path.read_bytes()


@alone
def test_what_is_no_tensor_is_not_held(tmp_path: Path) -> None:
    """Two kinds of entries, each of a megabyte."""
    raw = np.random.default_rng(0).integers(0, 256, 2**20, np.uint8).tobytes()
    state = {f"raw{n}": raw for n in range(8)} | {f"odd{n}": {raw} for n in range(8)}
    save(state, tmp_path / "a")
    with open_resources(pool_bytes=4096, num_threads=1) as resources:
        open_source(tmp_path / "a", resources=resources).close()
        tracemalloc.start()
        try:
            with open_source(tmp_path / "a", resources=resources) as source:
                held, _ = tracemalloc.get_traced_memory()
                assert source.read_array("client/raw3").tobytes() == raw
                assert source.read_bytes == 2**20
                assert torch.load(_saved(source, "client/odd7", tmp_path), weights_only=False) == {raw}
        finally:
            tracemalloc.stop()
    assert held < 2**20


def _saved(source: Any, name: str, folder: Path) -> Path:
    path = folder / "entry"
    path.write_bytes(source.read_array(name).tobytes())
    return path


@alone
def test_entries_that_lie_over_one_another_are_refused(tmp_path: Path) -> None:
    save({f"raw{n}": bytes(2**16) for n in range(4)}, tmp_path / "a")

    def over(metadata: Any) -> None:
        first, *others = metadata.storage_data.values()
        for info in others:
            info.offset, info.length = first.offset, first.length
        more = {f"x{n}": metadata.state_dict_metadata["raw0"] for n in range(50)}
        metadata.state_dict_metadata |= more
        metadata.storage_data |= {dcp.metadata.MetadataIndex(key): first for key in more}

    edit(tmp_path / "a", over)
    with pytest.raises(CorruptionError, match="they overlap"):
        open_source(tmp_path / "a")
