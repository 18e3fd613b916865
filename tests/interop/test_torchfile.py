"""Files of torch.save are read as torch reads them, without torch, in ranges, and with every size checked."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from zstore.errors import CheckpointMismatchError, CorruptionError
from zstore.interop.torchfile import TorchTensor, load_torch_file
from zstore.io.files import Files
from zstore.io.tensors import as_torch

FILES = Files(direct=False)


def values() -> dict[str, Any]:
    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    marked = torch.zeros(4)
    marked.ds_id = "0_3"  # type: ignore[attr-defined]
    types = [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    ]
    return {
        "base": base,
        "view": base[1:, 2],
        "transposed": base.permute(2, 0, 1),
        "every_other": base.reshape(-1)[3::7],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "parameter": nn.Parameter(torch.randn(3, 2)),
        "frozen": nn.Parameter(torch.randn(2), requires_grad=False),
        "marked": marked,
        "bool": torch.tensor([True, False, True]),
        "unsigned": torch.arange(5, dtype=torch.int16).view(torch.uint16),
        "types": [torch.arange(7).to(dtype) for dtype in types],
        "size": base.shape,
        "nested": {"a": [base[0], {"b": (1, "x", None)}]},
        "module": nn.Linear(2, 3).state_dict(),
    }


def check(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, TorchTensor)
        assert found.shape == tuple(expected.shape)
        whole = as_torch(found.whole(FILES))
        assert whole.dtype == expected.dtype
        assert torch.equal(whole, expected.detach())
        if found.numel > 3:
            part = np.empty(2, found.whole(FILES).dtype)
            found.read(FILES, 1, 3, part.view(np.uint8))
            assert torch.equal(as_torch(part), expected.detach().reshape(-1)[1:3])
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            check(found[key], value)
    elif isinstance(expected, list | tuple) and not isinstance(expected, torch.Size):
        assert type(found) is type(expected)
        for one, other in zip(found, expected, strict=True):
            check(one, other)
    else:
        assert found == (tuple(expected) if isinstance(expected, torch.Size) else expected)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", [2, 4])
def test_files_are_read_as_torch_reads_them(tmp_path: Path, zipped: bool, protocol: int) -> None:
    path = tmp_path / "file.pt"
    saved = values()
    torch.save(saved, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    found = load_torch_file(path)
    check(found, saved)
    assert found["marked"].attributes == {"ds_id": "0_3"}
    assert found["view"].storage is found["base"].storage


def test_torch_is_not_imported(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": torch.ones(3)}, path)
    code = (
        "import sys, pathlib; from zstore.interop.torchfile import load_torch_file; import zstore.interop.deepspeed\n"
        f"print(load_torch_file(pathlib.Path({str(path)!r}))['a'].shape, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(3,) False"


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"large": torch.zeros(5_000_000)}, path)
    os.truncate(path, path.stat().st_size)
    counted: list[int] = []

    class Counting(Files):
        def _preadv(self, file: Any, out: Any, offset: int) -> int:
            counted.append(out.size)
            return super()._preadv(file, out, offset)

    out = np.empty(10, np.float32)
    load_torch_file(path)["large"].read(Counting(direct=False), 4_000_000, 4_000_010, out.view(np.uint8))
    assert sum(counted) == 40


@pytest.mark.parametrize("zipped", [True, False])
def test_every_cut_is_an_error(tmp_path: Path, zipped: bool) -> None:
    path, cut = tmp_path / "file.pt", tmp_path / "cut.pt"
    torch.save({"a": torch.arange(50.0), "b": [torch.ones(3)]}, path, _use_new_zipfile_serialization=zipped)
    data = path.read_bytes()
    for length in {*range(0, len(data), 97), len(data) - 1}:
        cut.write_bytes(data[:length])
        with pytest.raises(CorruptionError, match=r"cut\.pt"):
            load_torch_file(cut)


def rewrite(path: Path, change: dict[str, bytes], drop: str = "", compress: bool = False) -> None:
    """Write the archive anew with other contents of entries."""
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    root = next(iter(entries)).split("/")[0]
    entries |= {f"{root}/{name}": data for name, data in change.items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            if not drop or not name.endswith(drop):
                archive.writestr(name, data)


def test_archives_that_are_not_torchs_are_refused(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.pt", tmp_path / "file.pt"
    torch.save({"a": torch.arange(8.0)}, whole)
    for change, drop, compress, message in [
        ({}, "/data/0", False, "lacks 'data/0'"),
        ({}, "data.pkl", False, "not one of torch.save"),
        ({"data/0": b"1234"}, "", False, "has 4 bytes, expected 8 elements"),
        ({"byteorder": b"big"}, "", False, "byte order"),
        ({}, "", True, "compressed"),
        ({"sub/data.pkl": b"N."}, "", False, "not one of torch.save"),
    ]:
        shutil.copy(whole, path)
        rewrite(path, change, drop, compress)
        with pytest.raises((CorruptionError, CheckpointMismatchError), match=message):
            load_torch_file(path)
    path.write_bytes(b"no archive at all")
    with pytest.raises(CorruptionError, match=r"not a file of torch\.save"):
        load_torch_file(path)
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CorruptionError, match=r"not a file of torch\.save"):
        load_torch_file(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(CorruptionError, match="is not a regular file"):
        load_torch_file(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorruptionError, match="is not a regular file"):
        load_torch_file(tmp_path / "pipe")


def tensor_pickle(numel: int, first: Any, shape: Any, stride: Any, key: str = "0") -> bytes:
    """A pickle of one fp32 tensor with these facts."""
    out = io.BytesIO()
    out.write(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((")

    def put(value: Any) -> None:
        body = pickle.dumps(value, 2)[2:-1]
        out.write(body)

    put("storage")
    out.write(b"ctorch\nFloatStorage\n")
    for value in (key, "cpu", numel):
        put(value)
    out.write(b"tQ")
    for value in (first, shape, stride, False, None):
        put(value)
    out.write(b"tR.")
    return out.getvalue()


@pytest.mark.parametrize(
    ("numel", "first", "shape", "stride"),
    [
        (8, 0, (9,), (1,)),
        (8, 1, (8,), (1,)),
        (8, 0, (2, 3), (7, 1)),
        (8, 0, (2**60,), (1,)),
        (8, 0, (2**40,), (0,)),
        (8, 0, (-1,), (1,)),
        (8, -1, (2,), (1,)),
        (8, 0, (2,), (-1,)),
        (8, 0, (2,), (1, 1)),
        (8, 0, (1,) * 65, (1,) * 65),
        (8, 0, (2.0,), (1,)),
        (8, 0, [2], [1]),
        (2**50, 0, (2,), (1,)),
        (-1, 0, (2,), (1,)),
    ],
)
def test_tensors_lie_in_their_storages(tmp_path: Path, numel: int, first: Any, shape: Any, stride: Any) -> None:
    path = tmp_path / "file.pt"
    torch.save(torch.arange(8.0), path)
    rewrite(path, {"data.pkl": tensor_pickle(8, 1, (3,), (2,))})
    assert load_torch_file(path).whole(FILES).tolist() == [1.0, 3.0, 5.0]
    rewrite(path, {"data.pkl": tensor_pickle(numel, first, shape, stride)})
    with pytest.raises(CorruptionError):
        load_torch_file(path)


def test_keys_of_storages_are_no_paths(tmp_path: Path) -> None:
    path, secret = tmp_path / "file.pt", tmp_path / "secret"
    secret.write_bytes(bytes(32))
    torch.save(torch.arange(8.0), path)
    for key in ("../../secret", str(secret), "../data.pkl"):
        rewrite(path, {"data.pkl": tensor_pickle(8, 0, (8,), (1,), key)})
        with pytest.raises(CorruptionError):
            load_torch_file(path)


def test_a_directory_that_lies_about_its_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save(torch.arange(8.0), path)
    data = bytearray(path.read_bytes())
    end, wide = data.rindex(b"PK\x05\x06"), data.rindex(b"PK\x06\x06")
    struct.pack_into("<I", data, end + 12, 2**31)
    for size in (2**31, 2**62, 2**64 - 1):
        struct.pack_into("<Q", data, wide + 40, size)
        path.write_bytes(data)
        with pytest.raises(CorruptionError):
            load_torch_file(path)


def test_pickles_that_call_functions_are_refused(tmp_path: Path) -> None:
    flag = tmp_path / "called"

    class Caller:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {flag}",)

    for zipped in (True, False):
        path = tmp_path / "file.pt"
        torch.save({"a": torch.ones(3), "b": Caller()}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(CheckpointMismatchError, match=r"posix\.system"):
            load_torch_file(path)
    assert not flag.exists()
