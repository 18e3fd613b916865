"""The weights of a checkpoint as a plain torch state dict, written in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from zstore.checkpoint import ArraySource, ReadAhead
from zstore.format import Bytes, numpy_dtype
from zstore.io import Files
from zstore.weights.cast import cast_into
from zstore.weights.from_checkpoint import list_weights
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
        cast, lost = stored, 0
        if stored.dtype != numpy_dtype(dtype):
            cast = np.empty(stored.size, numpy_dtype(dtype))
            lost = cast_into(stored, cast, dtype, "error")
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
    names = {weight.name: weight for weight in weights}
    for weight in weights:
        names = dict.fromkeys(source.arrays[weight.array].spec.aliases, weight) | names
    files, nbytes = Files(direct=False), sum(weight.nbytes for weight in weights)
    files.require_room(path.parent, nbytes, f"the weights need {nbytes} bytes")
    offsets = _save_without_values(path, names)
    lost: dict[str, int] = {}
    with (
        files.opened(path, write=True) as file,
        ReadAhead(source, [(weight.array, 0, weight.numel) for weight in weights if weight.numel]) as ahead,
    ):
        for weight in weights:
            at = offsets[weight.name]
            for data, count in values_of(source, ahead, weight.array, weight.numel, weight.dtype, advance):
                files.write_from(file, data, at)
                at += data.size
                if count:
                    lost[weight.name] = lost.get(weight.name, 0) + count
        files.sync_data(file)
    return [Lost(name=name, count=count) for name, count in lost.items()]


def _save_without_values(path: Path, names: Mapping[str, Weight]) -> dict[str, int]:
    """Save tensors of these names, as files with holes in place of the values; return the offset of each in the file."""
    import torch
    from torch._subclasses import FakeTensorMode

    from zstore.io.tensors import torch_dtype

    with FakeTensorMode():
        tensors = {w.name: torch.empty(w.shape, dtype=torch_dtype(w.dtype)) for w in names.values()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({name: tensors[weight.name] for name, weight in names.items()}, path)
    saved = torch.load(path, map_location="meta", weights_only=True)
    return {name: int(tensor.untyped_storage()._checkpoint_offset) for name, tensor in saved.items()}
