"""The Zarr v3 data type `bfloat16` for zarr-python, registered when this module is imported.

Entry points import it (see `pyproject.toml` and `docs/design/0002-format.md`), so that plain `zarr.open_group` reads
our 16-bit arrays wherever zstore is installed; to open a single array by its own path, import this module first.
tensorstore has the type built in, under the same name and with the same fill values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Never, Self, overload

import ml_dtypes
import numpy as np
from zarr.core.buffer.cpu import Buffer  # named by an entry point: see the design note
from zarr.core.dtype.npy.float import BaseFloat
from zarr.dtype import DataTypeValidationError, data_type_registry

if TYPE_CHECKING:
    from zarr.core.common import JSON, ZarrFormat
    from zarr.core.dtype.wrapper import TBaseDType

__all__ = ["BFloat16", "Buffer"]

_NATIVE: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, kw_only=True)
class BFloat16(BaseFloat[Any, Any]):
    """bfloat16, stored little-endian; scalars are `ml_dtypes.bfloat16`.

    Zarr v3 only: v2 has no name for the type. Fill values are as for the other floating types: numbers, "NaN",
    "Infinity", "-Infinity", or the bits in hexadecimal ("0x7fc0").
    """

    dtype_cls: ClassVar[Any] = type(_NATIVE)
    _zarr_v3_name: ClassVar[Literal["bfloat16"]] = "bfloat16"
    _zarr_v2_names: ClassVar[tuple[str, ...]] = ()

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return 2

    @classmethod
    def from_native_dtype(cls, dtype: TBaseDType) -> Self:
        """The data type of a NumPy dtype; `DataTypeValidationError` when that is not `ml_dtypes.bfloat16`."""
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"expected the NumPy dtype {_NATIVE}, got {dtype}")
        return cls()

    def to_native_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype; `ValueError` for big-endian chunks: `newbyteorder` of ml_dtypes' type gives wrong values."""
        if self.endianness != "little":
            raise ValueError(f'expected the bytes codec with endian "little" for bfloat16, got "{self.endianness}"')
        return _NATIVE

    @overload
    def to_json(self, zarr_format: Literal[2]) -> Never: ...

    @overload
    def to_json(self, zarr_format: Literal[3]) -> str: ...

    def to_json(self, zarr_format: ZarrFormat) -> str:
        """The name in `zarr.json`; `ValueError` for Zarr v2."""
        if zarr_format == 2:
            raise ValueError("bfloat16 has no Zarr v2 name: write the array with zarr_format=3")
        return self._zarr_v3_name

    def from_json_scalar(self, data: JSON, *, zarr_format: ZarrFormat) -> Any:
        """A fill value as a scalar; hexadecimal digits are the 16 bits of the value, high byte first."""
        if isinstance(data, str) and data.startswith("0x"):
            if len(data) != 6:
                raise ValueError(f"expected a bfloat16 fill value of four hexadecimal digits, got {data!r}")
            return np.array(int(data, 16), dtype=np.uint16).view(_NATIVE)[()]
        return super().from_json_scalar(data, zarr_format=zarr_format)


data_type_registry.register(BFloat16._zarr_v3_name, BFloat16)
