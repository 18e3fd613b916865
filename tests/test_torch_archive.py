"""Archives written without torch, read by torch.load."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch

from zstore.errors import CheckpointError, UsageError
from zstore.format.arrays import numpy_dtype
from zstore.interop import torch_archive
from zstore.interop.torch_archive import Archive, Tensor, pickle_of

DTYPES = ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
DTYPES += ["float16", "bfloat16", "float32", "float64"]


class Memory:
    """A file in memory that begins with other things."""

    def __init__(self, before: int = 0) -> None:
        self.data = bytearray(before)

    @property
    def offset(self) -> int:
        return len(self.data)

    def write(self, data: Any) -> None:
        self.data += bytes(data)

    def patch(self, offset: int, data: bytes) -> None:
        assert offset + len(data) <= len(self.data)
        self.data[offset : offset + len(data)] = data


def written(value: Any, storages: list[np.ndarray], before: int = 0, step: int = 7) -> io.BytesIO:
    memory = Memory(before)
    archive = Archive(memory)
    archive.begin(value, [storage.nbytes for storage in storages])
    for storage in storages:
        data = storage.reshape(-1).view(np.uint8)
        for first in range(0, data.size, step):
            archive.put(data[first : first + step])
    assert archive.finish() == len(memory.data) - before
    return io.BytesIO(memory.data[before:])


@pytest.mark.parametrize("before", [0, 1000])
def test_torch_reads_every_type_with_weights_only(before: int) -> None:
    arrays = [(np.arange(24) % 2).astype(numpy_dtype(dtype)).reshape(2, 3, 4) for dtype in DTYPES]
    state = {dtype: Tensor(number, (2, 3, 4), dtype) for number, dtype in enumerate(DTYPES)}
    found = torch.load(written(state, arrays, before), weights_only=True)
    assert list(found) == DTYPES
    for dtype, array in zip(DTYPES, arrays, strict=True):
        assert found[dtype].dtype is getattr(torch, dtype)
        assert found[dtype].shape == (2, 3, 4)
        assert found[dtype].reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes()


def test_shapes_and_shared_storages() -> None:
    arrays = [np.array(2.5, np.float32), np.empty((0, 4), np.float32), np.arange(5, dtype=np.float32)]
    scalar, none, row = Tensor(0, (), "float32"), Tensor(1, (0, 4), "float32"), Tensor(2, (5,), "float32")
    found = torch.load(written({"a": scalar, "b": none, "c": row, "d": row}, arrays), weights_only=True)
    assert (found["a"].item(), found["b"].shape, found["c"].tolist()) == (2.5, (0, 4), [0, 1, 2, 3, 4])
    found["c"][0] = 9
    assert found["d"][0] == 9, "one tensor under two names"


def test_plain_data_comes_back() -> None:
    value = {
        "a": [1, -(2**31), 2**70, -(2**70), 0.1, math.inf],
        "b": (None, True, False),
        3: {"ü": b"\x00\xff"},
        "e": [[], (), {}],
    }
    assert torch.load(written(value, []), weights_only=True) == value
    with pytest.raises(UsageError, match="plain data"):
        pickle_of({1, 2})


def test_an_archive_maps_into_memory(tmp_path: Any) -> None:
    path = tmp_path / "a.pt"
    data = np.arange(1000, dtype=np.float64)
    path.write_bytes(written({"x": Tensor(0, (1000,), "float64")}, [data]).getvalue())
    found = torch.load(path, weights_only=True, mmap=True)["x"]
    assert found.data_ptr() % 64 == 0
    assert torch.equal(found, torch.from_numpy(data))


def test_sizes_over_four_gib_are_in_the_wide_fields() -> None:
    header = torch_archive._header(torch_archive._Entry(b"x", 2**33, 2**34))
    assert header[18:26] == b"\xff" * 8
    assert (2**33).to_bytes(8, "little") * 2 in header
    entry = torch_archive._directory_entry(torch_archive._Entry(b"x", 2**33, 2**34))
    assert (2**33).to_bytes(8, "little") * 2 + (2**34).to_bytes(8, "little") in entry
    end = torch_archive._directory_end(3, 2**34, 200)
    assert end[:4] == b"PK\x06\x06"
    assert end[-22:-18] == b"PK\x05\x06"


def test_a_wrong_count_of_bytes_is_refused() -> None:
    archive = Archive(Memory())
    archive.begin(Tensor(0, (2,), "uint8"), [2])
    with pytest.raises(CheckpointError, match="1 bytes too many"):
        archive.put(np.zeros(3, np.uint8))
    with pytest.raises(CheckpointError, match="before all storages"):
        archive.finish()
