"""The weights of a checkpoint as a plain torch state dict, written in bounded memory without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zstore.checkpoint.lookahead import ReadAhead
from zstore.checkpoint.source import ArraySource
from zstore.checkpoint.split import complete_master, rest_of_master
from zstore.errors import DiskFullError
from zstore.format.arrays import numpy_dtype
from zstore.interop.torch_archive import Archive, Tensor
from zstore.io.files import Files, OpenFile
from zstore.weights.cast import cast_into
from zstore.weights.from_checkpoint import list_weights
from zstore.weights.writer import Lost

Bytes = npt.NDArray[np.uint8]
Advance = Callable[[int], None]


class FileSink:
    """A new file that is written from its beginning to its end. Durable once `finish` returned."""

    def __init__(self, path: Path, opened: ExitStack) -> None:
        self._files = Files(direct=False)
        self._file: OpenFile = opened.enter_context(self._files.opened(path, write=True, create=True))
        self.offset = 0

    def write(self, data: bytes | Bytes) -> None:
        """Write at the end."""
        part = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
        self._files.write_from(self._file, part, self.offset)
        self.offset += part.size

    def patch(self, offset: int, data: bytes) -> None:
        """Replace bytes that were written."""
        self._files.write_from(self._file, np.frombuffer(data, np.uint8), offset)

    def finish(self) -> None:
        """Make the file durable."""
        self._files.sync_data(self._file)


def stored_dtype(source: ArraySource, array: str) -> str:
    """Return the data type that an array has with what completes it: a split master is float32."""
    return "float32" if rest_of_master(source.arrays, array) is not None else source.arrays[array].spec.dtype


def check_room(path: Path, nbytes: int) -> None:
    """Raise DiskFullError where the folder `path` lacks room for so many bytes."""
    free = Files().free_bytes(path)
    if nbytes > free:
        raise DiskFullError(f"{nbytes} bytes are needed, but only {free} are free", path=str(path), nbytes=nbytes)


def values_of(
    source: ArraySource, ahead: ReadAhead, array: str, numel: int, dtype: str, advance: Advance
) -> Iterator[tuple[Bytes, int]]:
    """Yield the next `numel` elements of what is read ahead, all of `array`, as bytes of `dtype`.

    Beside them comes how many values became infinite by the cast. The bytes are valid until the next are asked for.
    """
    left = numel
    while left and (span := ahead.take()) is not None:
        spec = source.arrays[array].spec
        values = span.data.view(numpy_dtype(spec.dtype))
        master = complete_master(source, array, span.first, values) if dtype != spec.dtype else None
        values = values if master is None else master
        lost = 0
        if values.dtype != numpy_dtype(dtype):
            cast = np.empty(values.size, numpy_dtype(dtype))
            lost = cast_into(values, cast, dtype, "error")
            values = cast
        yield values.view(np.uint8), lost
        left -= span.stop - span.first
        advance(span.nbytes)
        ahead.release(span)


def write_state_dict(source: ArraySource, path: Path, dtype: str | None, advance: Advance) -> list[Lost]:
    """Write the new file `path`, of which `torch.load(path, weights_only=True)` gives the weights by name.

    Tied parameters are there under all their names, and share their memory once loaded. Returns what `dtype` cannot
    hold. Durable when this returns.
    """
    weights = list_weights(source, dtype)
    tensors = {w.name: Tensor(number, w.shape, w.dtype) for number, w in enumerate(weights)}
    state = dict(tensors)
    for weight in weights:
        for alias in source.arrays[weight.array].spec.aliases:
            state.setdefault(alias, tensors[weight.name])
    check_room(path.parent, sum(tensor.nbytes for tensor in tensors.values()))
    lost: dict[str, int] = {}
    with ExitStack() as opened:
        sink = FileSink(path, opened)
        archive = Archive(sink)
        archive.begin(state, [tensor.nbytes for tensor in tensors.values()])
        ranges = [(weight.array, 0, weight.numel) for weight in weights if weight.numel]
        ahead = opened.enter_context(ReadAhead(source, ranges))
        for weight in weights:
            for data, count in values_of(source, ahead, weight.array, weight.numel, weight.dtype, advance):
                archive.put(data)
                if count:
                    lost[weight.name] = lost.get(weight.name, 0) + count
        archive.finish()
        sink.finish()
    return [Lost(name=name, count=count) for name, count in lost.items()]
