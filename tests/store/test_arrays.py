"""Names, shapes and data types of arrays."""

import math
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstore.format.arrays import FLOATING, ArraySpec, numpy_dtype

NAMES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_data_type_is_the_little_endian_one_of_its_name(name: str) -> None:
    dtype = numpy_dtype(name)
    assert dtype.name == name
    assert dtype.itemsize == np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name).itemsize
    one = np.array([1], dtype=dtype).tobytes()
    expected = {"float16": "003c", "bfloat16": "803f", "float32": "0000803f", "float64": "000000000000f03f"}
    assert one.hex() == expected.get(name, "01".ljust(2 * dtype.itemsize, "0"))
    assert sys.byteorder == "little" or dtype.byteorder in "<|"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(
            ({"dtype": name}, "cannot be stored; expected one of bool, uint8")
            for name in ("complex128", "float", ">f4")
        ),
        *(({"name": name}, "expected `group/name`") for name in ("/weight", "model/", "")),
        ({"shape": (2, -1)}, "negative extent"),
    ],
)
def test_what_is_no_array_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ArraySpec(**{"name": "model/w", "shape": (1,), "dtype": "float32"} | wrong)


def test_floating_names_are_floating() -> None:
    halves = {name: float(np.array([0.5]).astype(numpy_dtype(name))[0]) for name in NAMES}
    assert [name for name, half in halves.items() if half == 0.5] == [*FLOATING]


@pytest.mark.parametrize(
    ("shape", "stored", "rows", "row_numel"),
    [
        ((), (1,), 1, 1),
        ((7,), (7,), 7, 1),
        ((0,), (0,), 0, 1),
        ((3, 5), (3, 5), 3, 5),
        ((3, 0), (3, 0), 3, 0),
        ((0, 5), (0, 5), 0, 5),
        ((8, 2, 3), (16, 3), 16, 3),
        ((4, 3, 2, 5), (24, 5), 24, 5),
        ((4, 0, 5), (0, 5), 0, 5),
    ],
)
def test_stored_shapes(shape: tuple[int, ...], stored: tuple[int, ...], rows: int, row_numel: int) -> None:
    spec = ArraySpec(name="model/w", shape=shape, dtype="bfloat16")
    assert (spec.stored_shape, spec.rows, spec.row_numel) == (stored, rows, row_numel)


@given(shape=st.lists(st.integers(0, 9), max_size=5).map(tuple), dtype=st.sampled_from(NAMES))
def test_storing_keeps_the_elements(shape: tuple[int, ...], dtype: str) -> None:
    spec = ArraySpec(name="model/w", shape=shape, dtype=dtype)
    assert math.prod(spec.stored_shape) == spec.rows * spec.row_numel == spec.numel == np.zeros(shape).size
    assert spec.nbytes == np.zeros(shape, numpy_dtype(dtype)).nbytes
    assert len(spec.stored_shape) in (1, 2)
