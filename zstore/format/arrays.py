"""Named global tensors: an array's name, its shape and its data type. Pure; knows no ranks and no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..errors import BudgetError

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

FLOAT8 = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""Data types that Zarr has no name for, and safetensors' names. Arrays of them are "uint8", with the type in the attributes."""

_NUMPY: dict[str, npt.DTypeLike] = {
    "bool": np.bool_,
    "uint8": np.uint8,
    "int8": np.int8,
    "int16": np.int16,
    "uint16": np.uint16,
    "int32": np.int32,
    "uint32": np.uint32,
    "int64": np.int64,
    "uint64": np.uint64,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
    "complex64": np.complex64,
    **{name: getattr(ml_dtypes, name) for name in FLOAT8},
}

SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    **FLOAT8,
}
"""Zarr's name of a data type -> safetensors'."""

SUFFIX = ".safetensors"
STEM = "model"
"""First part of the names of a model's files, as `from_pretrained` looks for them."""
STEMS_OF_ONE_FILE = ("adapter_model", "pytorch_lora_weights")
STEMS = (STEM, "diffusion_pytorch_model", *STEMS_OF_ONE_FILE)
"""Those that transformers, diffusers and PEFT look for, in this order."""
STEM_KEY = "weights_stem"
"""Key of a record's state: the one of `STEMS` that the weights' files had."""

MAX_NAME = 4096
"""Characters of an array's name, at most."""
FLOATING = ("float16", "bfloat16", "float32", "float64")


@lru_cache(maxsize=64)
def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return the little-endian numpy data type called `name` ("bfloat16" comes from ml_dtypes).

    Raises ValueError for a name that the format does not store.
    """
    if name not in _NUMPY:
        raise ValueError(f"data type {name!r} cannot be stored; expected one of {', '.join(_NUMPY)}")
    return np.dtype(_NUMPY[name]).newbyteorder("<")


class Shaped:
    """Anything with a shape and a data type, by its Zarr name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @cached_property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return numpy_dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, without padding."""
        return self.numel * self.itemsize


@dataclass(frozen=True, kw_only=True)
class ArraySpec(Shaped):
    """One named global tensor."""

    name: str
    """Group and fully qualified name, as `model/transformer.h.0.mlp.c_fc.weight`."""
    shape: tuple[int, ...]
    """True shape of the tensor; `()` for a scalar."""
    dtype: str
    """Data type by its Zarr name, as `float32` or `bfloat16`."""
    aliases: tuple[str, ...] = ()
    """Other fully qualified names of the same tensor (tied parameters), without the group."""
    keeps_shape: bool = False
    """Whether it is stored in its own shape, even if that has no extents or more than two."""
    dims: tuple[str, ...] = ()
    """Names of the extents; empty if they have none."""

    def __post_init__(self) -> None:
        numpy_dtype(self.dtype)
        group, slash, fqn = self.name.partition("/")
        if not group or (slash and not fqn):
            raise ValueError(f"array name {self.name!r:.200}: expected `group/name` or a name alone")
        if len(self.name) > MAX_NAME:
            raise ValueError(f"array name {self.name[:100]!r}... has {len(self.name)} characters, at most {MAX_NAME}")
        if any(n < 0 for n in self.shape):
            raise ValueError(f"array {self.name!r}: shape {self.shape} has a negative extent")
        if self.dims and len(self.dims) != len(self.stored_shape):
            raise ValueError(f"array {self.name!r}: {len(self.dims)} names for the extents {self.stored_shape}")

    @cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape on disk: its own with `keeps_shape`, else as `stored_shape` says."""
        return self.shape if self.keeps_shape else stored_shape(self.shape)

    @cached_property
    def row_extents(self) -> tuple[int, ...]:
        """Shape of a row, of which the stored shape has as many as its first extent."""
        return self.stored_shape[1:]

    @property
    def rows(self) -> int:
        """Number of rows of the stored shape; 1 for a scalar."""
        return self.stored_shape[0] if self.stored_shape else 1

    @property
    def row_numel(self) -> int:
        """Elements in a row: 1 for 1-D arrays; 0 if another extent is 0."""
        return math.prod(self.row_extents)


def empty_array(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return memory for values of the array `name`; raises BudgetError if there is too little."""
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:
        nbytes = math.prod(shape) * dtype.itemsize
        raise BudgetError(
            f"array {name!r}: no memory for {nbytes} bytes, {dtype} {list(shape)}; read a part of it"
        ) from error


def stored_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape on disk of an array: 0-d is `[1]`, 1-D and 2-D are as they are, more dims `[prod(d0..dn-2), d_last]`."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 2 else shape or (1,)


def model_array(name: str) -> str:
    """Return the array of a parameter's weights in their best precision: the fp32 master if there is one."""
    return f"model/{name}"


def optimizer_array(slot: str, name: str) -> str:
    """Return the array of the optimizer's state of a parameter, such as slot "exp_avg"."""
    return f"optimizer/{slot}/{name}"


def buffer_array(name: str) -> str:
    """Return the array of a module's buffer."""
    return f"buffer/{name}"


def client_array(name: str) -> str:
    """Return the array of a tensor in the client's state."""
    return f"client/{name}"
