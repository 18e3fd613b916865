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
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties, TensorStorageMetadata

from zstore.errors import CorruptionError
from zstore.io.shards import open_resources
from zstore.open.sources import open_source

alone = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


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
