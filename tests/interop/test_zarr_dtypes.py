"""bfloat16 in zarr-python, with zstore merely installed; tensorstore is the second opinion."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zarr

from zstore.format.zarr_dtypes import BFloat16

SPECIAL = [0.0, -0.0, 1.5, np.inf, -np.inf, np.nan, 2.0**-133]


def values(rows: int = 10, columns: int = 7) -> np.ndarray:
    """Random bf16 bits, special values among them. # [rows, columns], bf16"""
    data = np.random.default_rng(0).standard_normal((rows, columns)).astype(ml_dtypes.bfloat16)
    data.flat[: len(SPECIAL)] = SPECIAL
    return data


def write(path: Path, data: np.ndarray, *, fill_value: object = "NaN", sharded: bool = False) -> None:
    array = zarr.create_array(
        path,
        shape=data.shape,
        dtype=data.dtype,
        chunks=(2, data.shape[1]),
        shards=(4, data.shape[1]) if sharded else None,
        compressors=None,
        fill_value=fill_value,
        zarr_format=3,
    )
    array[...] = data


def bits(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view(np.uint16)


def open_tensorstore(path: Path) -> np.ndarray:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    return np.asarray(ts.open(spec, open=True).result().read().result())


@pytest.mark.parametrize("sharded", [False, True])
def test_written_by_zarr_read_by_zarr_and_tensorstore(tmp_path: Path, sharded: bool) -> None:
    data = values()
    write(tmp_path / "a", data, sharded=sharded)
    metadata = json.loads((tmp_path / "a" / "zarr.json").read_text())
    assert metadata["data_type"] == "bfloat16"
    assert metadata["fill_value"] == "NaN"
    again = zarr.open_array(tmp_path / "a", mode="r")
    assert again.dtype == data.dtype
    assert (bits(again[...]) == bits(data)).all()
    assert (bits(open_tensorstore(tmp_path / "a")) == bits(data)).all()


def test_written_by_tensorstore_read_by_zarr(tmp_path: Path) -> None:
    data = values()
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/a/"},
        "metadata": {"shape": data.shape, "data_type": "bfloat16", "fill_value": "NaN"},
    }
    ts.open(spec, create=True).result().write(data).result()
    assert (bits(zarr.open_array(tmp_path / "a", mode="r")[...]) == bits(data)).all()


@pytest.mark.parametrize(
    "code",
    [
        "import zarr; array = zarr.open_group(root, mode='r')['x/a']",
        "import zarr; array = zarr.open(root, mode='r')['x']['a']",
        "import zarr, zstore.format.zarr_dtypes; array = zarr.open_array(root + '/x/a', mode='r')",
    ],
)
def test_a_fresh_process_opens_it(tmp_path: Path, code: str) -> None:
    data = values()
    zarr.create_group(tmp_path / "root", zarr_format=3).create_group("x")
    write(tmp_path / "root" / "x" / "a", data)
    code = f"import sys; root = sys.argv[1]; {code}; print(array[...].tobytes().hex())"
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "root")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == data.tobytes().hex()


@pytest.mark.parametrize(
    ("fill_value", "expected_bits"),
    [
        ("NaN", 0x7FC0),
        ("Infinity", 0x7F80),
        ("-Infinity", 0xFF80),
        (0.0, 0),
        (1.5, 0x3FC0),
        ("0x7fc1", 0x7FC1),
        ("1.5", 0x3FC0),
    ],
)
def test_a_fill_value_is_read_to_its_bits_and_written_as_json(fill_value: str | float, expected_bits: int) -> None:
    scalar = BFloat16().from_json_scalar(fill_value, zarr_format=3)
    assert int(np.asarray(scalar).view(np.uint16)) == expected_bits
    written = BFloat16().to_json_scalar(scalar, zarr_format=3)
    assert written == ("NaN" if (expected_bits & 0x7FFF) > 0x7F80 else written)
    json.dumps(written, allow_nan=False)


@pytest.mark.parametrize("missing", ["NaN", 3.0])
def test_missing_chunks_read_as_the_fill_value(tmp_path: Path, missing: str | float) -> None:
    write(tmp_path / "a", values(), fill_value=missing)
    for chunk in (tmp_path / "a").rglob("0"):
        if chunk.is_file():
            chunk.unlink()
    read = zarr.open_array(tmp_path / "a", mode="r")[0:2].astype(np.float32)
    expected = np.full_like(read, float(missing))
    np.testing.assert_array_equal(read, expected)


def test_what_it_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="zarr_format=3"):
        zarr.create_array(tmp_path / "v2", shape=(2,), dtype=ml_dtypes.bfloat16, zarr_format=2)
    with pytest.raises(ValueError, match="hexadecimal"):
        BFloat16().from_json_scalar("0x7fc00000", zarr_format=3)
    write(tmp_path / "a", values())
    file = tmp_path / "a" / "zarr.json"
    file.write_text(file.read_text().replace('"little"', '"big"'))
    with pytest.raises(ValueError, match="little"):
        zarr.open_array(tmp_path / "a", mode="r")[...]
