"""The weights of a checkpoint: listed, read in any precision, written as safetensors.

[Note: the pipeline]
Threads take spans of the arrays in the order of the output, a request each. The thread that reads a span checks it and casts it
straight to its place: into tensors, or into 4-MiB blocks of the output file, each written by the thread that completes it.
Nothing is handed from thread to thread. In memory are a span of each thread and a few blocks, whatever the model's size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..checkpoint.lookahead import Range, Span, cut_spans, use_spans
from ..checkpoint.moments import scales_of, whole_moment
from ..checkpoint.source import ArraySource
from ..checkpoint.split import complete_master, rest_of_master
from ..errors import CheckpointMismatchError
from ..format.arrays import FLOATING, Array, empty_array, numpy_dtype
from .cast import Overflow, cast_into
from .layout import FileLayout, Weight
from .writer import Lost, WeightsWriter

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Name of a precision -> Zarr's name of its data type."""

_GROUPS = ("model/", "buffer/")
_PIECE_NUMEL = 512 * 1024
"""About how many elements of a split master are put together at a time: each takes fifteen bytes."""
_READ_BYTES = 8 * 1024 * 1024

Advance = Callable[[int], None]
"""Told, from several threads, how many bytes of the arrays were read and put into their places."""
Put = Callable[[str, int, Array], None]
"""`put(array, first, values)`, from several threads: flat elements of an array from `first` on, 1-D."""


def list_weights(reader: ArraySource, dtype: str | None) -> list[Weight]:
    """Return the parameters and buffers of a checkpoint; floating parameters are written as `dtype`, None: as they are.
    Buffers keep their types.

    Tied parameters are there once, under their first name. A split master is written in the precision that it has
    with the arrays that complete it. Raises CheckpointMismatchError if there are no weights.
    """
    weights: dict[str, Weight] = {}
    for name, stored in reader.arrays.items():
        spec = stored.spec
        if not name.startswith(_GROUPS):
            continue
        key = name.partition("/")[2]
        if key in weights:
            raise CheckpointMismatchError(f"{reader.location} has both a parameter and a buffer called {key!r}")
        casts = spec.dtype in FLOATING and name.startswith("model/")
        target = dtype if dtype is not None and casts else whole_dtype(reader, name)
        weights[key] = Weight(name=key, array=name, shape=spec.shape, dtype=target)
    if not weights:
        raise CheckpointMismatchError(f"{reader.location} has no weights: expected arrays under `model/`")
    return list(weights.values())


def put_weights(
    reader: ArraySource,
    weights: Sequence[Weight],
    put: Put,
    advance: Advance | None = None,
) -> None:
    """Read `weights` whole and hand their values to `put`, every element once. See [Note: the pipeline]."""
    dtypes = {weight.array: weight.dtype for weight in weights}
    ranges: list[Range] = [(weight.array, 0, weight.numel) for weight in weights if weight.numel > 0]

    def use(span: Span) -> None:
        stored = span.data.view(numpy_dtype(reader.arrays[span.name].spec.dtype))
        for first, values in whole_values(reader, span.name, span.first, stored, dtypes[span.name]):
            put(span.name, first, values)
        if advance is not None:
            advance(span.nbytes)

    use_spans(reader, ranges, use, "zstore-weights")


def whole_dtype(source: ArraySource, name: str) -> str:
    """Return the data type that an array has with those that complete it: a split master, or a moment in 8 bits, is float32."""
    return "float32" if _is_in_parts(source, name) else source.arrays[name].spec.dtype


def _is_in_parts(source: ArraySource, name: str) -> bool:
    return rest_of_master(source.arrays, name) is not None or scales_of(source.arrays, name) is not None


def whole_values(
    source: ArraySource, name: str, first: int, stored: Array, dtype: str | None = None
) -> Iterator[tuple[int, Array]]:
    """Yield `stored`, elements of an array from `first` on; of a split master, or a moment in 8 bits, the fp32 values, in
    bounded pieces.

    Each piece comes with its first element. For bf16 as the `dtype` wanted, a master's own weight is its nearest
    already, and yielded as it is.
    """
    of_master = rest_of_master(source.arrays, name) is not None
    if (of_master and dtype == DTYPES["bf16"]) or not _is_in_parts(source, name):
        yield first, stored
        return
    chunk_numel = max(1, source.arrays[name].grid.chunk_numel)
    # Pieces end at ends of chunks, so that no chunk of the completing arrays is read twice.
    step = max(1, _PIECE_NUMEL // chunk_numel) * chunk_numel
    low = 0
    while low < stored.size:
        high = min(stored.size, low + step - (first + low) % chunk_numel)
        part = stored[low:high]
        whole = complete_master(source, name, first + low, part) if of_master else None
        yield first + low, whole_moment(source, name, first + low, part) if whole is None else whole
        low = high


def read_weight(reader: ArraySource, weight: Weight, first: int, out: Array, overflow: Overflow) -> int:
    """Read flat elements of a weight from `first` on into `out`, 1-D and of the weight's data type.

    Returns how many finite values it could not hold.
    """
    array = reader.array(weight.array)
    if weight.dtype == array.spec.dtype:
        reader.read(weight.array, first, first + out.size, out)
        return 0
    lost = 0
    for span in cut_spans(array, first, first + out.size, _READ_BYTES):
        stored = np.empty(span.stop - span.first, numpy_dtype(array.spec.dtype))
        reader.read(span.name, span.first, span.stop, stored)
        for low, values in whole_values(reader, span.name, span.first, stored, weight.dtype):
            target = out[low - first : low - first + values.size]
            lost += cast_into(values, target, weight.dtype, overflow)
    return lost


def read_weights(
    reader: ArraySource, weights: Sequence[Weight], overflow: Overflow
) -> tuple[dict[str, Array], list[Lost]]:
    """Return `weights` by name, each in its own shape and data type, and the values that these could not hold."""
    found: dict[str, Array] = {
        weight.name: empty_array(weight.name, weight.shape, numpy_dtype(weight.dtype)) for weight in weights
    }
    by_array: Mapping[str, Weight] = {weight.array: weight for weight in weights}
    counts: dict[str, int] = {}
    lock = threading.Lock()

    def put(array: str, first: int, values: Array) -> None:
        weight = by_array[array]
        target = found[weight.name].reshape(-1)[first : first + values.size]
        if count := cast_into(values, target, weight.dtype, overflow):
            with lock:
                counts[weight.name] = counts.get(weight.name, 0) + count

    put_weights(reader, weights, put)
    return found, [Lost(name=name, count=count) for name, count in sorted(counts.items())]


def write_weights(
    reader: ArraySource,
    layouts: Sequence[FileLayout],
    folder: Path,
    *,
    overflow: Overflow,
    advance: Advance,
) -> list[Lost]:
    """Write `layouts` into `folder`, durably; return the values that could not be held, with "error" also if nothing was kept.

    See [Note: the pipeline].
    """
    weights = [weight for layout in layouts for weight in layout.weights]
    with WeightsWriter(reader.resources.files, layouts, folder, overflow=overflow) as writer:
        put_weights(reader, weights, writer.put, advance)
        lost = writer.lost()
        if not lost or overflow != "error":
            writer.finish()
        return lost
