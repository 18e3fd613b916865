"""Safetensors folders from elsewhere: any header and index gives an error of ours or weights that lie in the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from zstore.errors import CorruptionError, UsageError, ZstoreError
from zstore.open.sources import open_source

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
    with pytest.raises(UsageError, match=r"index\.bf16.*nothing says which belong together"):
        open_source(tmp_path)
    (tmp_path / "x.safetensors").rename(tmp_path / "model.safetensors")
    with open_source(tmp_path) as source:
        assert list(source.arrays) == ["model/w"]


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + W.tobytes() + W[0].tobytes()


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "..", ".", "a/b.safetensors", "", "x\0y", 7, None, ["a"], {}]
)
def test_an_index_may_not_lead_elsewhere(name: Any, folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    try:
        with pytest.raises(ZstoreError):
            open_source(folder).close()
    finally:
        index.unlink()


@pytest.mark.parametrize(
    "content", [b"", b"[" * 10**6, b"[]", b'{"weight_map": []}', b'{"weight_map": 1}', b"\xff\xfe", b'{"a":' * 10**5]
)
def test_an_index_that_is_none_is_refused(content: bytes, folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_bytes(content)
    try:
        with pytest.raises(CorruptionError, match="not a valid index"):
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
    (tmp_path / "model.safetensors").write_bytes(with_header(header))
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
