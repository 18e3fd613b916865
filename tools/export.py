"""The weights of a checkpoint as a plain torch state dict, written in bounded memory without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from zstore.checkpoint import ArraySource, ReadAhead
from zstore.format import Bytes, numpy_dtype
from zstore.interop.torch_archive import Tensor, write_archive
from zstore.io import Files, NewFile
from zstore.weights.cast import cast_into
from zstore.weights.from_checkpoint import list_weights, whole_values
from zstore.weights.layout import Weight
from zstore.weights.writer import Lost

Advance = Callable[[int], None]


def values_of(
    source: ArraySource, ahead: ReadAhead, array: str, numel: int, dtype: str, advance: Advance
) -> Iterator[tuple[Bytes, int]]:
    """Yield the next `numel` elements that are read ahead, all of `array`, as bytes of `dtype`.

    With them comes the number of values that the cast made infinite. The bytes are valid until the next are requested.
    """
    left = numel
    while left and (span := ahead.take()) is not None:
        stored = span.data.view(numpy_dtype(source.arrays[array].spec.dtype))
        for _, values in whole_values(source, array, span.first, stored, dtype):
            cast, lost = values, 0
            if values.dtype != numpy_dtype(dtype):
                cast = np.empty(values.size, numpy_dtype(dtype))
                lost = cast_into(values, cast, dtype, "error")
            yield cast.view(np.uint8), lost
        left -= span.stop - span.first
        advance(span.nbytes)
        ahead.release(span)


def write_state_dict(source: ArraySource, path: Path, dtype: str | None, advance: Advance) -> list[Lost]:
    """Write the new file `path`, of which `torch.load(path, weights_only=True)` gives the weights by name.

    Tied parameters are stored under all their names, and share their memory once loaded. Returns the
    values that `dtype` cannot hold. The file is durable when this returns.
    """
    weights = list_weights(source, dtype)
    tensors = {w.name: Tensor(number, w.shape, w.dtype) for number, w in enumerate(weights)}
    state = dict(tensors)
    for weight in weights:
        for alias in source.arrays[weight.array].spec.aliases:
            state.setdefault(alias, tensors[weight.name])
    files, nbytes = Files(), sum(tensor.nbytes for tensor in tensors.values())
    files.require_room(path.parent, nbytes, f"the weights need {nbytes} bytes")
    lost: dict[str, int] = {}
    with ExitStack() as opened:
        sink = NewFile(files, path, opened)
        ranges = [(weight.array, 0, weight.numel) for weight in weights if weight.numel]
        ahead = opened.enter_context(ReadAhead(source, ranges))

        def parts(weight: Weight) -> Iterator[Bytes]:
            for data, count in values_of(source, ahead, weight.array, weight.numel, weight.dtype, advance):
                if count:
                    lost[weight.name] = lost.get(weight.name, 0) + count
                yield data

        write_archive(sink, state, ((weight.nbytes, parts(weight)) for weight in weights))
        sink.finish()
    return [Lost(name=name, count=count) for name, count in lost.items()]
