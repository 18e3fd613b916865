"""Independent truth about stored bytes: random values, and readers that share no code with zstore."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..format.arrays import Array, ArraySpec, Grid, numpy_dtype


def random_values(dtype: str, numel: int, seed: int = 0) -> Array:
    """Return `numel` values of random bits, 1-D: NaN, infinities and denormals are among floating ones."""
    kind = numpy_dtype(dtype)
    bits = np.random.default_rng(seed).integers(0, 256, numel * kind.itemsize, dtype=np.uint8)
    return (bits & 1).view(kind) if dtype == "bool" else bits.view(kind)


def same_bits(a: Array, b: Array) -> bool:
    """Return whether both have the same bytes; NaN equals NaN of the same bits."""
    return a.shape == b.shape and a.dtype.itemsize == b.dtype.itemsize and a.tobytes() == b.tobytes()


def zarr_metadata(spec: ArraySpec, grid: Grid) -> dict[str, Any]:
    """Return the `zarr.json` of an array whose shard files `c.0.0 ...` are on `grid`, written down from the format."""
    two_d = len(spec.stored_shape) == 2
    crc = {"name": "crc32c"}
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    inner = [grid.chunk_rows, grid.chunk_cols][: 2 if two_d else 1]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.stored_shape),
        "data_type": spec.dtype,
        "fill_value": False if spec.dtype == "bool" else "NaN" if "float" in spec.dtype else 0,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [grid.shard_rows, max(grid.row_numel, 1)][: 2 if two_d else 1]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": inner,
                    "codecs": [little, crc],
                    "index_codecs": [little, crc],
                    "index_location": "start",
                },
            }
        ],
        "attributes": {},
    }


def write_zarr_json(folder: Path, spec: ArraySpec, grid: Grid) -> None:
    """Make `folder`, with the metadata of the array of its shard files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "zarr.json").write_text(json.dumps(zarr_metadata(spec, grid)))


def shard_name(spec: ArraySpec, shard: int) -> str:
    """Return the file name that Zarr gives a shard."""
    return f"c.{shard}.0" if len(spec.stored_shape) == 2 else f"c.{shard}"


def read_with_zarr(folder: Path) -> Array:
    """Read the whole array with zarr-python alone (and the data type bfloat16 that zstore registers)."""
    import zarr

    from ..format import zarr_dtypes  # noqa: F401  (registers bfloat16 for an array opened by its own path)

    return np.asarray(zarr.open_array(folder, mode="r")[...])


def read_with_tensorstore(folder: Path) -> Array:
    """Read the whole array with tensorstore alone."""
    import tensorstore

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    return np.asarray(tensorstore.open(spec, open=True).result().read().result())
