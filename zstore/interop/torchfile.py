"""Files of `torch.save`, read by `torch.load(weights_only=True)`: their objects, with tensors that stay in the file.

[Note: foreign pickles]
A pickle is a program that may name any function. It is run by torch's weights-only unpickler, which calls only functions that
build tensors and plain containers. Unknown classes are replaced by `Inert` classes during the load: their objects keep the
content of the pickle, and nothing of the original class is imported. Tensors are loaded to the device "meta", without their
values, which `TorchTensor.read` reads from the file by ranges. Source: torch/serialization.py of torch 2.13.
"""

from __future__ import annotations

import pickle
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointMismatchError, CorruptionError, storage_error
from ..format.arrays import Bytes, Shaped, numpy_dtype
from ..io.files import Files
from .source import opened_file

if TYPE_CHECKING:
    import torch

_load_lock = threading.Lock()
"""torch's list of classes that are safe to load is shared by all threads."""


class Inert:
    """The pickled content of an object whose class is known only by name, which is the name of the subclass."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> Self:
        """Store the arguments."""
        instance = super().__new__(cls)
        instance.args = args
        return instance

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def name(self) -> str:
        """Full name of the class."""
        return type(self).__name__


def brief(value: Any) -> str:
    """Return a short text for an object from a pickle, which may be deeply nested or recursive."""
    return repr(value)[:80] if isinstance(value, str | int | float) else f"a {type(value).__name__}"


@dataclass(frozen=True, kw_only=True, eq=False)
class TorchTensor(Shaped):
    """A tensor in a file, which is known to contain all of its elements."""

    path: Path
    offset: int
    """Byte offset of its storage in the file."""
    first: int = 0
    """Offset of the first element in the storage."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    """Zarr's name of the type; torch's name for types that the format cannot store."""
    itemsize: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Attributes set on the tensor object."""

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are contiguous, in C order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected and self.numel:
                return False
            expected *= size
        return True

    @property
    def identity(self) -> tuple[object, ...]:
        """A value that is equal for two names of the same tensor."""
        return self.path, self.offset, self.first, self.shape, self.stride, self.dtype

    def read(self, files: Files, first: int, stop: int, out: Bytes) -> None:
        """Read flat elements `[first, stop)`, in C order, into `out`. Raises StorageError if the file has become shorter."""
        if first == stop:
            return
        begin = self.offset + self.first * self.itemsize
        if self.is_contiguous:
            with files.opened(self.path) as file:
                files.read_into(file, out, begin + first * self.itemsize)
            return
        try:
            mapped = np.memmap(self.path, f"V{self.itemsize}", "r", begin, (_span(self.shape, self.stride),))
        except (OSError, ValueError) as error:  # ValueError: the file has become shorter
            reason = error if isinstance(error, OSError) else OSError(str(error))
            raise storage_error(reason, "the tensor cannot be mapped into memory", path=str(self.path)) from error
        strides = [step * self.itemsize for step in self.stride]
        view = np.lib.stride_tricks.as_strided(mapped, self.shape, strides, writeable=False)
        out.view(mapped.dtype)[:] = view.flat[first:stop]

    def read_all(self, files: Files) -> npt.NDArray[Any]:
        """Return all elements in their shape; for small tensors."""
        out = np.empty(self.shape, numpy_dtype(self.dtype))
        self.read(files, 0, self.numel, out.reshape(-1).view(np.uint8))
        return out


def load_torch_file(path: Path, part: tuple[int, int] | None = None) -> Any:
    """Return the object saved in the file, with a `TorchTensor` for each tensor, and `Inert` objects.

    In a file of several archives, `part` is the offset and length of one. Raises CorruptionError if the file is missing or
    damaged, CheckpointMismatchError if torch rejects its pickle, StorageError if it cannot be read.
    """
    import torch

    with opened_file(path, "zip archive of torch.save (for a file from before torch 1.6: load and save it again)") as (
        file,
        size,
    ):
        offset, nbytes = part or (0, size)
        if offset + nbytes > size:
            raise CorruptionError(
                f"{path} has {size} bytes, expected an archive of {nbytes} at {offset}: it is truncated; copy it again"
            )
        view: Any = file
        if part is not None:
            from torch.distributed.checkpoint.utils import _create_file_view

            view = _create_file_view(file, offset, nbytes)  # type: ignore[arg-type]
        try:
            with _load_lock, warnings.catch_warnings(action="ignore"):
                unknown = torch.serialization.get_unsafe_globals_in_checkpoint(view)
                view.seek(0)
                with torch.serialization.safe_globals([(type(name, (Inert,), {}), name) for name in unknown]):
                    loaded = torch.load(view, map_location="meta", weights_only=True)
        except pickle.UnpicklingError as error:
            lines = [line for line in str(error).splitlines() if line.strip() and "torch.load" not in line]
            raise CheckpointMismatchError(
                f"{path} is not read: torch.load(weights_only=True) rejects its pickle, of which nothing was called "
                f"({lines[-1][:200] if lines else ''}). If you trust the file, load it with the software that wrote it, "
                "remove that object, and save it again"
            ) from error
        return _TensorReplacer(path, offset, offset + nbytes).replace(loaded)


class _TensorReplacer:
    """Replaces each tensor in an object loaded from a file's bytes `[start, stop)` with a `TorchTensor`."""

    def __init__(self, path: Path, start: int, stop: int) -> None:
        self._path, self._start, self._stop = path, start, stop
        self._replaced: dict[int, Any] = {}
        """Replacements by the `id` of objects, which may contain themselves."""

    def replace(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if not isinstance(value, dict | list | tuple | Inert):
            return value
        if isinstance(value, Inert) and value.name in ("builtins.bytes", "__builtin__.bytes") and not value.args:
            return b""  # empty bytes in protocol 2
        if id(value) in self._replaced:
            return self._replaced[id(value)][1]
        result: Any = value
        if isinstance(value, tuple):
            result = tuple(self.replace(item) for item in value)
        self._replaced[id(value)] = (value, result)
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = self.replace(item)
        elif isinstance(value, list):
            value[:] = [self.replace(item) for item in value]
        elif isinstance(value, Inert):
            value.args, value.state = self.replace(value.args), self.replace(value.state)
        return result

    def _tensor(self, tensor: torch.Tensor) -> TorchTensor:
        shape, stride, first = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        itemsize = tensor.element_size()
        offset = self._start + getattr(tensor.untyped_storage(), "_checkpoint_offset", self._stop)
        end = offset + (first + _span(shape, stride)) * itemsize
        if tensor.numel() and (end > self._stop or min((first, *stride)) < 0):
            raise CorruptionError(f"{self._path}: a tensor of shape {shape} has no values in the file: it is damaged")
        return TorchTensor(
            path=self._path,
            offset=offset,
            first=first,
            shape=shape,
            stride=stride,
            dtype=str(tensor.dtype).removeprefix("torch."),
            itemsize=itemsize,
            attributes=dict(vars(tensor)),
        )


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of elements of its storage that a tensor spans."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
