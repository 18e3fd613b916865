"""Safetensors folders from elsewhere: any header and index gives an error of ours or weights that lie in the file."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tests.checkpoint.forging import mutate
from zstore.checkpoint.source import ArraySource
from zstore.errors import CorruptionError, ZstoreError
from zstore.open.sources import open_source

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
W = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    save_file({"w": W, "b": W[0]}, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


def read_all(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with contextlib.suppress(ZstoreError):
        source: ArraySource = open_source(folder)
        with source:
            for name in source.arrays:
                with contextlib.suppress(ZstoreError):
                    found[name] = source.read_array(name)
    return found


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + W.tobytes() + W[0].tobytes()


@FUZZ
@given(data=st.data())
def test_any_header_is_refused_or_lies_in_the_file(folder: Path, data: st.DataObject) -> None:
    file = folder / "model.safetensors"
    original = file.read_bytes()
    header = json.loads(original[8 : 8 + int.from_bytes(original[:8], "little")])
    for _ in range(data.draw(st.integers(1, 3))):
        if header:
            mutate(header, data)
    try:
        file.write_bytes(with_header(json.dumps(header).encode()))
        for array in read_all(folder).values():
            assert array.nbytes <= W.nbytes + W[0].nbytes
    finally:
        file.write_bytes(original)


@FUZZ
@given(data=st.data())
def test_any_index_is_refused_or_names_files_beside_it(folder: Path, data: st.DataObject) -> None:
    index = folder / "model.safetensors.index.json"
    document = {"metadata": {}, "weight_map": {"w": "model.safetensors", "b": "model.safetensors"}}
    mutate(document, data)
    try:
        index.write_text(json.dumps(document))
        found = read_all(folder)
        assert all(array.tobytes() in (W.tobytes(), W[0].tobytes()) for array in found.values())
    finally:
        index.unlink()


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
