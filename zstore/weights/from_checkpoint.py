"""The weights of a checkpoint, written as safetensors.

[Note: the pipeline]
Threads read spans of the arrays in the order of the output; others cast each span straight into 4-MiB blocks of the
output file, and whoever completes a block writes it. In memory are the spans read ahead and a few blocks, whatever the
model's size.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..arrays import FLOATING, numpy_dtype
from ..checkpoint import ArraySource, ReadAhead
from ..checkpoint.crew import Crew
from ..checkpoint.split import complete_master
from ..errors import CheckpointMismatchError
from .cast import Overflow
from .layout import FileLayout, Weight
from .writer import Lost, WeightsWriter

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Name of a precision -> Zarr's name of its data type."""

_GROUPS = ("model/", "buffer/")

Advance = Callable[[int], None]
"""Told, from several threads, how many bytes of the arrays were written."""


def list_weights(reader: ArraySource, dtype: str) -> list[Weight]:
    """Return the parameters and buffers of a checkpoint; floating ones are written as `dtype`.

    Tied parameters stand there once, under their first name. A split master is written in the precision that it has
    with what completes it. Raises CheckpointMismatchError where there is none.
    """
    weights: dict[str, Weight] = {}
    for name, array in reader.arrays.items():
        spec = array.spec
        if not name.startswith(_GROUPS):
            continue
        key = name.partition("/")[2]
        if key in weights:
            raise CheckpointMismatchError(f"{reader.location} has both a parameter and a buffer called {key!r}")
        target = dtype if spec.dtype in FLOATING else spec.dtype
        weights[key] = Weight(name=key, array=name, shape=spec.shape, dtype=target)
    if not weights:
        raise CheckpointMismatchError(f"{reader.location} has no weights: expected arrays under `model/`")
    return list(weights.values())


def write_weights(
    reader: ArraySource, layouts: Sequence[FileLayout], folder: Path, *, overflow: Overflow, advance: Advance
) -> list[Lost]:
    """Write `layouts` into `folder`, durably; return what could not be held, with "error" also where nothing was kept.

    See [Note: the pipeline].
    """
    bf16 = {weight.array for layout in layouts for weight in layout.weights if weight.dtype == DTYPES["bf16"]}
    ranges = [(weight.array, 0, weight.numel) for layout in layouts for weight in layout.weights if weight.numel > 0]
    num_threads = max(2, min(4, os.cpu_count() or 2))
    stopped = threading.Event()

    def work(writer: WeightsWriter, ahead: ReadAhead) -> None:
        try:
            while not stopped.is_set() and (span := ahead.take()) is not None:
                values = span.data.view(numpy_dtype(reader.arrays[span.name].spec.dtype))
                # A master's own weight is its nearest bf16 already.
                master = None if span.name in bf16 else complete_master(reader, span.name, span.first, values)
                writer.put(span.name, span.first, values if master is None else master)
                ahead.release(span)
                advance(span.nbytes)
        except BaseException:
            stopped.set()
            raise

    with WeightsWriter(reader.resources.files, layouts, folder, overflow=overflow) as writer:
        with Crew(num_threads, "zstore-weights") as crew, ReadAhead(reader, ranges) as ahead:
            crew.run([partial(work, writer, ahead)] * num_threads)
        writer.finish()
        return writer.lost()
