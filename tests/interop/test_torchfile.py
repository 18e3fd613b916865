"""Files of torch.save are read as torch reads them, in ranges, with every size checked; of other classes nothing is called."""

import argparse
import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from zstore.errors import CheckpointMismatchError, CorruptionError
from zstore.interop.deepspeed.values import JsonConverter, numpy_value
from zstore.interop.torchfile import Inert, TorchTensor, load_torch_file
from zstore.io.files import Files
from zstore.io.memory import as_torch

FILES = Files(direct=False)
TYPES = [
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "bool",
    "float8_e4m3fn",
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.pt"


def values() -> dict[str, Any]:
    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    marked = torch.zeros(4)
    marked.ds_id = "0_3"  # type: ignore[attr-defined]
    return {
        "base": base,
        "view": base[1:, 2],
        "transposed": base.permute(2, 0, 1),
        "every_other": base.reshape(-1)[3::7],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "parameter": nn.Parameter(torch.randn(3, 2)),
        "marked": marked,
        "types": [torch.arange(7).to(getattr(torch, dtype)) for dtype in TYPES],
        "size": base.shape,
        "nested": {"a": [base[0], {"b": (1, "x", None, base)}]},
        "module": nn.Linear(2, 3).state_dict(),
    }


def check(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, TorchTensor)
        assert found.shape == tuple(expected.shape)
        whole = as_torch(found.read_all(FILES))
        assert whole.dtype == expected.dtype
        bits = expected.detach().contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(whole.reshape(-1).view(torch.uint8), bits)
        if found.numel > 3:
            part = np.empty(2 * found.itemsize, np.uint8)
            found.read(FILES, 1, 3, part)
            assert part.tobytes() == bits.numpy()[found.itemsize : 3 * found.itemsize].tobytes()
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            check(found[key], value)
    elif isinstance(expected, list | tuple) and not isinstance(expected, torch.Size):
        assert type(found) is type(expected)
        for one, other in zip(found, expected, strict=True):
            check(one, other)
    else:
        assert found == expected


def test_files_are_read_as_torch_reads_them(path: Path) -> None:
    saved = values()
    torch.save(saved, path)
    found = load_torch_file(path)
    check(found, saved)
    assert found["marked"].attributes == {"ds_id": "0_3"}
    assert found["base"].identity == found["nested"]["a"][1]["b"][3].identity != found["view"].identity
    content = path.read_bytes()
    path.write_bytes(b"before" + content + b"behind")
    check(load_torch_file(path, (6, len(content))), saved)


def test_only_what_is_asked_for_is_read(path: Path) -> None:
    torch.save({"large": torch.zeros(5_000_000)}, path)
    counted: list[int] = []

    class Counting(Files):
        def _preadv(self, file: Any, out: Any, offset: int) -> int:
            counted.append(out.size)
            return super()._preadv(file, out, offset)

    out = np.empty(10, np.float32)
    load_torch_file(path)["large"].read(Counting(direct=False), 4_000_000, 4_000_010, out.view(np.uint8))
    assert sum(counted) == 40


def test_every_cut_is_an_error(path: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.pt"
    torch.save({"a": torch.arange(50.0), "b": [torch.ones(3)]}, path)
    data = path.read_bytes()
    for length in {*range(0, len(data), 97), len(data) - 1}:
        cut.write_bytes(data[:length])
        with pytest.raises(CorruptionError, match=r"cut\.pt"):
            load_torch_file(cut)


def rewrite(path: Path, change: dict[str, bytes], drop: str = "") -> None:
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    root = next(iter(entries)).split("/")[0]
    entries |= {f"{root}/{name}": data for name, data in change.items()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            if not drop or not name.endswith(drop):
                archive.writestr(name, data)


def test_what_is_no_file_of_torch_save_is_refused(path: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    torch.save({"a": torch.arange(8.0)}, whole)
    for drop in ("/data/0", "data.pkl"):
        shutil.copy(whole, path)
        rewrite(path, {}, drop)
        with pytest.raises(CorruptionError, match=r"file\.pt is not a valid zip archive of torch\.save"):
            load_torch_file(path)
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    for content in (path.read_bytes(), b"no archive at all", pickle.dumps({"a": 1}), b""):
        path.write_bytes(content)
        with pytest.raises(CorruptionError, match=r"not a valid zip archive of torch\.save.* save it again"):
            load_torch_file(path)
    path.unlink()
    with pytest.raises(CorruptionError, match="is missing"):
        load_torch_file(path)
    path.mkdir()
    os.mkfifo(tmp_path / "pipe")
    for other in (path, tmp_path / "pipe"):
        with pytest.raises(CorruptionError, match="is not a regular file"):
            load_torch_file(other)


def tensor_pickle(numel: int, first: Any, shape: Any, stride: Any, key: str = "0") -> bytes:
    out = io.BytesIO()
    out.write(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((")

    def put(value: Any) -> None:
        out.write(pickle.dumps(value, 2)[2:-1])

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
        (8, 0, (9000,), (1,)),
        (8, 9000, (8,), (1,)),
        (8, 0, (2, 3), (7000, 1)),
        (8, 0, (2**60,), (1,)),
        (8, 0, (-1,), (1,)),
        (8, -1, (2,), (1,)),
        (8, 0, (2,), (1, 1)),
        (8, 0, (2.0,), (1,)),
        (2**61, 0, (2,), (1,)),
    ],
)
def test_tensors_outside_of_the_file_are_refused(path: Path, numel: int, first: Any, shape: Any, stride: Any) -> None:
    torch.save(torch.arange(8.0), path)
    rewrite(path, {"data.pkl": tensor_pickle(8, 1, (3,), (2,))})
    assert load_torch_file(path).read_all(FILES).tolist() == [1.0, 3.0, 5.0]
    rewrite(path, {"data.pkl": tensor_pickle(numel, first, shape, stride)})
    with pytest.raises(CorruptionError):
        load_torch_file(path)


def test_keys_of_storages_are_no_paths(path: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(32))
    torch.save(torch.arange(8.0), path)
    for key in ("../../secret", str(secret), "nothing"):
        rewrite(path, {"data.pkl": tensor_pickle(8, 0, (8,), (1,), key)})
        with pytest.raises(CorruptionError):
            load_torch_file(path)


class Caller:
    def __init__(self, function: Any, *args: Any) -> None:
        self._call = (function, args)

    def __reduce__(self) -> Any:
        return self._call


def test_functions_are_never_called(path: Path, tmp_path: Path) -> None:
    flag = tmp_path / "called"
    torch.save({"a": torch.ones(3), "b": Caller(os.system, f"touch {flag}")}, path)
    with pytest.raises(CheckpointMismatchError, match=r"posix\.system.*nothing was called|nothing was called.*posix"):
        load_torch_file(path)
    for function, arguments in ((eval, (f"open({str(flag)!r}, 'w')",)), (getattr, (flag, "touch")), (Path, ("/",))):
        torch.save({"deep": [Caller(function, *arguments)]}, path)
        (found,) = load_torch_file(path)["deep"]
        assert isinstance(found, Inert)
        assert function.__name__ in found.name
    assert not flag.exists()
    assert not [one for one in torch.serialization.get_safe_globals() if isinstance(one, tuple)]


def test_objects_of_other_classes_are_data(path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    torch.save([argparse.Namespace(lr=0.1, weight=torch.ones(2)), loop], path)
    space, found = load_torch_file(path)
    assert (space.name, space.state["lr"]) == ("argparse.Namespace", 0.1)
    assert space.state["weight"].read_all(FILES).tolist() == [1, 1]
    assert found[0] is found
    plain = JsonConverter("it")
    assert plain.of(space, "args") == {"lr": 0.1, "weight": {"$tensor": "client/args.weight"}}
    assert isinstance(plain.of(found, "value"), list)
    assert "nested too deeply" in plain.omitted[0]


def test_what_refers_to_one_thing_many_times_is_not_walked_for_ever(path: Path) -> None:
    value: Any = [0]
    for level in range(100):
        value = [value] * 50 if level % 2 else (value,) * 50
    torch.save(value, path)
    with pytest.raises(CorruptionError, match="too many parts"):
        JsonConverter("it").of(load_torch_file(path), "value")


def test_numpy_comes_back(path: Path) -> None:
    arrays = [
        np.random.RandomState(3).get_state()[1],
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.eye(3, 2)),
        np.zeros((0, 3), bool),
    ]
    numbers = [np.float64(0.25), np.int32(-7), np.bool_(True)]
    torch.save([*arrays, *numbers, np.array([{}, []], dtype=object)], path)
    *found, objects = load_torch_file(path)
    for one, array in zip(found, arrays, strict=False):
        value: Any = numpy_value(one)
        np.testing.assert_array_equal(value, array)
        assert value.dtype.byteorder != ">"
    assert [numpy_value(one) for one in found[len(arrays) :]] == numbers
    assert numpy_value(objects) is None
