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
from zstore.testing.oracle import read_with_tensorstore, read_with_zarr, same_bits

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


@pytest.mark.parametrize("sharded", [False, True])
def test_zarr_and_tensorstore_read_each_others_arrays(tmp_path: Path, sharded: bool) -> None:
    data = values()
    write(tmp_path / "a", data, sharded=sharded)
    metadata = json.loads((tmp_path / "a" / "zarr.json").read_text())
    assert (metadata["data_type"], metadata["fill_value"]) == ("bfloat16", "NaN")
    kvstore = {"driver": "file", "path": f"{tmp_path}/b/"}
    facts = {"shape": data.shape, "data_type": "bfloat16", "fill_value": "NaN"}
    ts.open({"driver": "zarr3", "kvstore": kvstore, "metadata": facts}, create=True).result().write(data).result()
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert zarr.open_array(folder, mode="r").dtype == data.dtype
        assert same_bits(read_with_zarr(folder), data)
        assert same_bits(read_with_tensorstore(folder), data)


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


def test_a_fill_value_is_read_to_its_bits_and_written_as_json() -> None:
    for value, bits in (("NaN", 0x7FC0), ("Infinity", 0x7F80), ("-Infinity", 0xFF80), (0.0, 0), (1.5, 0x3FC0),
                        ("0x7fc1", 0x7FC1), ("1.5", 0x3FC0)):  # fmt: skip
        scalar = BFloat16().from_json_scalar(value, zarr_format=3)
        assert int(np.asarray(scalar).view(np.uint16)) == bits
        written = BFloat16().to_json_scalar(scalar, zarr_format=3)
        assert written == ("NaN" if (bits & 0x7FFF) > 0x7F80 else written)
        json.dumps(written, allow_nan=False)


@pytest.mark.parametrize("missing", ["NaN", 3.0])
def test_missing_chunks_read_as_the_fill_value(tmp_path: Path, missing: str | float) -> None:
    write(tmp_path / "a", values(), fill_value=missing)
    for chunk in (path for path in (tmp_path / "a").rglob("0") if path.is_file()):
        chunk.unlink()
    read = zarr.open_array(tmp_path / "a", mode="r")[0:2].astype(np.float32)
    np.testing.assert_array_equal(read, np.full_like(read, float(missing)))


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
