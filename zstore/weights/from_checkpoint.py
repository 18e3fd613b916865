"""The weights of a checkpoint: listed, chosen, read in any precision, written as safetensors.

[Note: the pipeline]
Threads take spans of the arrays in the order of the output, a request each. The thread that reads a span checks it and casts it
straight to its place: into tensors, or into 4-MiB blocks of the output file, each written by the thread that completes it.
Nothing is handed from thread to thread. In memory are a span of each thread and a few blocks, whatever the model's size.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.lookahead import Range, Span, cut_spans, use_spans
from ..checkpoint.reader import ArraySource
from ..errors import CheckpointMismatchError
from ..format.arrays import FLOATING, Array, empty_array, numpy_dtype
from .cast import Overflow, cast_into
from .files import FileLayout, Lost, Weight, WeightsWriter

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Name of a precision -> Zarr's name of its data type."""

_GROUPS = ("model/", "buffer/")
_READ_BYTES = 8 * 1024 * 1024

Advance = Callable[[int], None]
"""Told, from several threads, how many bytes of the arrays were read and put into their places."""
Put = Callable[[str, int, Array], None]
"""`put(array, first, values)`, from several threads: flat elements of an array from `first` on, 1-D."""


def list_weights(reader: ArraySource, dtype: str | None) -> list[Weight]:
    """Return the parameters and buffers of a checkpoint; floating parameters are written as `dtype`, None: as they are.
    Buffers keep their types.

    Tied parameters are there once, under their first name. Raises CheckpointMismatchError if there are no weights.
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
        target = dtype if dtype is not None and casts else spec.dtype
        weights[key] = Weight(name=key, array=name, shape=spec.shape, dtype=target)
    if not weights:
        raise CheckpointMismatchError(f"{reader.location} has no weights: expected arrays under `model/`")
    return list(weights.values())


def choose(names: Iterable[str], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[str]:
    """Return those of `names` that match a pattern of `include` (none: all), and none of `exclude`, in their order.

    A pattern is a name, which means that one alone, or has `*`, `?` and `[...]` as in a shell; `*` matches dots too.
    Raises CheckpointMismatchError for a pattern that matches no name: it is a mistake more often than not.
    """
    known = list(names)
    chosen, left_out = _matched(known, include) if include else set(known), _matched(known, exclude)
    return [name for name in known if name in chosen and name not in left_out]


def _matched(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    known, found = set(names), set[str]()
    for pattern in patterns:
        matched = [pattern] if pattern in known else [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
            hint = f"; close matches: {', '.join(near)}" if near else ""
            raise CheckpointMismatchError(f"{pattern!r} matches none of the {len(names)} names{hint}")
        found.update(matched)
    return found


def frozen_weights(source: ArraySource) -> set[str]:
    """Return the parameters that the optimizer did not train, by the record or by the optimizer's state.

    Raises CheckpointMismatchError if neither is there, so that all would look frozen.
    """
    trained = {name.split("/", 2)[2] for name in source.arrays if name.startswith("optimizer/")}
    trained |= _stepped(source.record.state.get("engine"))
    parameters = {name.partition("/")[2] for name in source.arrays if name.startswith("model/")}
    if parameters and not trained:
        raise CheckpointMismatchError(
            f"{source.location} does not say which parameters were frozen: it has no optimizer state, and its record "
            "no engine state"
        )
    return parameters - trained


def _stepped(engine: Any) -> set[str]:
    """Return the parameters for which the engine's part of a record has step counts."""
    scalars = engine.get("scalars") if isinstance(engine, dict) else None
    return {name for name in scalars if isinstance(name, str)} if isinstance(scalars, dict) else set()


def put_weights(
    reader: ArraySource,
    weights: Sequence[Weight],
    put: Put,
    advance: Advance | None = None,
) -> None:
    """Read `weights` whole and hand their values to `put`, every element once. See [Note: the pipeline]."""
    ranges: list[Range] = [(weight.array, 0, weight.numel) for weight in weights if weight.numel > 0]

    def use(span: Span) -> None:
        put(span.name, span.first, span.data.view(numpy_dtype(reader.arrays[span.name].spec.dtype)))
        if advance is not None:
            advance(span.nbytes)

    use_spans(reader, ranges, use, "zstore-weights")


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
        lost += cast_into(stored, out[span.first - first : span.stop - first], weight.dtype, overflow)
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
