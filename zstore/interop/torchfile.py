"""Files of `torch.save`, read by `torch.load(weights_only=True)`: their objects, with tensors that stay in the file.

[Note: foreign pickles]
A pickle is a program that may name any function. torch's unpickler for weights runs it, which calls only functions that build
tensors and plain containers. Classes that it does not know are replaced by `Inert` ones during the load: their objects keep
the content of the pickle, and nothing of the class is imported. Tensors are loaded to the device "meta", without their
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

_loading = threading.Lock()
"""torch's list of classes that are safe to load is shared by all threads."""


class Inert:
    """An object of a class known only by name, which is the subclass's name: its content in the pickle."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> Self:
        """Keep the arguments."""
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def name(self) -> str:
        """Full name of the class."""
        return type(self).__name__


def brief(value: Any) -> str:
    """Return a short text of an object from a pickle, which may be deep or endless."""
    return repr(value)[:80] if isinstance(value, str | int | float) else f"a {type(value).__name__}"


@dataclass(frozen=True, kw_only=True, eq=False)
class TorchTensor(Shaped):
    """A tensor in a file. Its elements are inside the file: that was checked."""

    path: Path
    offset: int
    """Byte of the file at which its storage begins."""
    first: int = 0
    """Offset of the first element in the storage."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    """As Zarr names it; types that the format does not store have torch's name."""
    itemsize: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the tensor itself."""

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are contiguous, in C order."""
        expected = 1
        for extent, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if extent != 1 and step != expected and self.numel:
                return False
            expected *= extent
        return True

    @property
    def identity(self) -> tuple[object, ...]:
        """A value that is equal for two names of one tensor."""
        return self.path, self.offset, self.first, self.shape, self.stride, self.dtype

    def read(self, files: Files, first: int, stop: int, out: Bytes) -> None:
        """Read flat elements `[first, stop)`, in C order, into `out`; raises StorageError if the file is shorter now."""
        if first == stop:
            return
        begin = self.offset + self.first * self.itemsize
        if self.is_contiguous:
            with files.opened(self.path) as file:
                files.read_into(file, out, begin + first * self.itemsize)
            return
        try:
            mapped = np.memmap(self.path, f"V{self.itemsize}", "r", begin, (_span(self.shape, self.stride),))
        except (OSError, ValueError) as error:  # the latter: the file is shorter now
            reason = error if isinstance(error, OSError) else OSError(str(error))
            raise storage_error(reason, "the tensor cannot be mapped into memory", path=str(self.path)) from error
        strides = [step * self.itemsize for step in self.stride]
        view = np.lib.stride_tricks.as_strided(mapped, self.shape, strides, writeable=False)
        out.view(mapped.dtype)[:] = view.flat[first:stop]

    def whole(self, files: Files) -> npt.NDArray[Any]:
        """Return all elements, in the true shape; for small tensors."""
        out = np.empty(self.shape, numpy_dtype(self.dtype))
        self.read(files, 0, self.numel, out.reshape(-1).view(np.uint8))
        return out


def load_torch_file(path: Path, part: tuple[int, int] | None = None) -> Any:
    """Return the object saved in the file, with a `TorchTensor` for each tensor, and `Inert` objects.

    Of a file of many archives, `part` is offset and bytes of one. Raises CorruptionError if the file is missing or
    damaged, CheckpointMismatchError if torch refuses its pickle, StorageError if it cannot be read.
    """
    import torch

    with opened_file(path, "file of torch.save as zip archive (one of before torch 1.6: load and save it again)") as (
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
            with _loading, warnings.catch_warnings(action="ignore"):
                unknown = torch.serialization.get_unsafe_globals_in_checkpoint(view)
                view.seek(0)
                with torch.serialization.safe_globals([(type(name, (Inert,), {}), name) for name in unknown]):
                    found = torch.load(view, map_location="meta", weights_only=True)
        except pickle.UnpicklingError as error:
            lines = [line for line in str(error).splitlines() if line.strip() and "torch.load" not in line]
            raise CheckpointMismatchError(
                f"{path} is not read: torch.load(weights_only=True) refuses its pickle, of which nothing was called "
                f"({lines[-1][:200] if lines else ''}). If you trust the file, load it with the software that wrote it, take "
                "that object out, and save it again"
            ) from error
        return _Located(path, offset, offset + nbytes).of(found)


class _Located:
    """Puts a `TorchTensor` in place of each tensor of an object loaded from a file's bytes `[start, stop)`."""

    def __init__(self, path: Path, start: int, stop: int) -> None:
        self._path, self._start, self._stop = path, start, stop
        self._done: dict[int, Any] = {}
        """Replacements by the identity of an object, which may contain itself."""

    def of(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if not isinstance(value, dict | list | tuple | Inert):
            return value
        if isinstance(value, Inert) and value.name in ("builtins.bytes", "__builtin__.bytes") and not value.args:
            return b""  # as protocol 2 has it
        if id(value) in self._done:
            return self._done[id(value)][1]
        made: Any = value
        if isinstance(value, tuple):
            made = tuple(self.of(item) for item in value)
        self._done[id(value)] = (value, made)
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = self.of(item)
        elif isinstance(value, list):
            value[:] = [self.of(item) for item in value]
        elif isinstance(value, Inert):
            value.args, value.state = self.of(value.args), self.of(value.state)
        return made

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
    """Return how many elements of its storage a tensor spans."""
    return 1 + sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))
