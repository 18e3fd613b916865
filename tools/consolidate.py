"""`zstore consolidate`: a checkpoint's weights as safetensors in the Hugging Face layout, in bounded memory. No torch.

[Note: the pipeline]
Threads read spans of the arrays in the order of the output; others cast each span straight into 4-MiB blocks of the
output file, and whoever completes a block writes it. In memory are the spans read ahead and a few blocks, whatever the
model's size.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zstore.arrays import FLOATING, numpy_dtype
from zstore.checkpoint import CheckpointReader, ReadAhead, new_folder, open_checkpoint
from zstore.checkpoint.crew import Crew
from zstore.errors import CheckpointError, CheckpointMismatchError, DiskFullError, UsageError

from .companions import copy_companions
from .progress import Progress, format_bytes
from .weights_cast import Overflow, cast_into
from .weights_file import BlockFile, Slabs
from .weights_layout import INDEX_FILE, FileLayout, Weight, index_document, plan_files

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
OVERFLOWS: dict[str, Overflow] = {"error": "error", "inf": "inf", "clamp": "clamp"}
_GROUPS = ("model/", "buffer/")
_MOST_NAMED = 20

Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Values of one weight that its new type cannot hold."""

    name: str
    count: int


def consolidate_command(ckpt: Path, out: Path | None, dtype: str, max_shard_size: int, overflow: str) -> int:
    """Write the weights of `ckpt` into the new folder `out` (default: `ckpt`-`dtype` beside it); return the exit code.

    `dtype` is one of `DTYPES`, `max_shard_size` the bytes of the largest file. Raises CheckpointError, with the tensors
    named and nothing published, for values that `dtype` cannot hold (unless `overflow` says "inf" or "clamp");
    CheckpointExistsError where `out` exists.
    """
    mode = OVERFLOWS.get(overflow)
    if dtype not in DTYPES or mode is None:
        raise UsageError(f"expected a type of {', '.join(DTYPES)} and {', '.join(OVERFLOWS)}, got {dtype}, {overflow}")
    target = out or _beside(ckpt, f"-{dtype}")
    with open_checkpoint(ckpt) as reader:
        files = plan_files(list_weights(reader, DTYPES[dtype]), max_shard_size)
        total = sum(reader.arrays[weight.array].spec.nbytes for file in files for weight in file.weights)
        with Progress(f"consolidate {reader.path}", total) as progress:
            with new_folder(reader.resources.files, target) as folder:
                lost = write_weights(reader, files, folder, overflow=mode, advance=progress.advance)
                if lost and mode == "error":
                    raise CheckpointError(_lost_text(lost, dtype))
                copied = _copy_companions(reader.path, folder)
            size = format_bytes(sum(file.file_bytes for file in files))
            progress.say(f"wrote {size} in {len(files)} file(s) to {target}" + (f", with {copied}" if copied else ""))
            if lost:
                progress.say(f"{sum(each.count for each in lost)} values do not fit {dtype}: written as {mode}")
    return 0


def _beside(ckpt: Path, suffix: str) -> Path:
    path = Path(os.path.abspath(ckpt))
    return path.with_name(path.name + suffix)


def list_weights(reader: CheckpointReader, dtype: str) -> list[Weight]:
    """Return the parameters and buffers of a checkpoint; floating ones are written as `dtype`.

    Tied parameters stand there once, under their first name. Raises CheckpointMismatchError where there is none.
    """
    weights: dict[str, Weight] = {}
    for name, array in reader.arrays.items():
        spec = array.spec
        if not name.startswith(_GROUPS):
            continue
        key = name.partition("/")[2]
        if key in weights:
            raise CheckpointMismatchError(f"{reader.path} has both a parameter and a buffer called {key!r}")
        target = dtype if spec.dtype in FLOATING else spec.dtype
        weights[key] = Weight(name=key, array=name, shape=spec.shape, dtype=target)
    if not weights:
        raise CheckpointMismatchError(f"{reader.path} has no weights: expected arrays under `model/`")
    return list(weights.values())


def write_weights(
    reader: CheckpointReader, files: Sequence[FileLayout], folder: Path, *, overflow: Overflow, advance: Advance
) -> list[Lost]:
    """Write `files` into `folder`, durably; return what could not be held, with "error" also where nothing was kept.

    See [Note: the pipeline].
    """
    needed = sum(file.file_bytes for file in files)
    free = reader.resources.files.free_bytes(folder)
    if needed > free:
        raise DiskFullError(f"the weights need {needed} bytes, but only {free} are free", path=str(folder))
    writer = _Writer(reader, files, folder, overflow=overflow, advance=advance)
    writer.run()
    if len(files) > 1:
        document = json.dumps(index_document(files), indent=2).encode()
        reader.resources.files.write_small(folder / INDEX_FILE, document)
    return writer.lost()


class _Writer:
    """Writes all files of one model."""

    def __init__(
        self,
        reader: CheckpointReader,
        files: Sequence[FileLayout],
        folder: Path,
        *,
        overflow: Overflow,
        advance: Advance,
    ) -> None:
        self._reader = reader
        self._files = files
        self._folder = folder
        self._overflow = overflow
        self._advance = advance
        self._places = {
            weight.array: (file, weight, offset)
            for file in files
            for weight, offset in zip(file.weights, file.offsets, strict=True)
        }
        self._open: dict[str, BlockFile] = {}
        self._slabs = Slabs()
        self._lost: dict[str, int] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def lost(self) -> list[Lost]:
        """Return which weights had values that could not be held."""
        return [Lost(name=name, count=count) for name, count in sorted(self._lost.items())]

    def run(self) -> None:
        """Write everything; raises the first error once all threads stopped."""
        ranges = [
            (weight.array, 0, weight.numel) for file in self._files for weight in file.weights if weight.numel > 0
        ]
        num_threads = max(2, min(4, os.cpu_count() or 2))
        try:
            with Crew(num_threads, "zstore-consolidate") as crew, ReadAhead(self._reader, ranges) as ahead:
                crew.run([partial(self._work, ahead)] * num_threads)
            if not (self._lost and self._overflow == "error"):
                for layout in self._files:
                    self._finish(self._file(layout))
        finally:
            for file in self._open.values():
                file.close()

    def _work(self, ahead: ReadAhead) -> None:
        try:
            while not self._stopped.is_set() and (span := ahead.take()) is not None:
                layout, weight, offset = self._places[span.name]
                source = span.data.view(numpy_dtype(self._reader.arrays[span.name].spec.dtype))
                place = offset + span.first * weight.itemsize
                self._cast(layout, weight, place, source)
                ahead.release(span)
                self._advance(span.nbytes)
        except BaseException:
            self._stopped.set()
            raise

    def _cast(self, layout: FileLayout, weight: Weight, place: int, source: npt.NDArray[np.generic]) -> None:
        dtype = numpy_dtype(weight.dtype)
        lost = 0

        def put(start: int, view: npt.NDArray[np.uint8]) -> None:
            nonlocal lost
            first = start // dtype.itemsize
            piece = source[first : first + view.size // dtype.itemsize]
            lost += cast_into(piece, view.view(dtype), weight.dtype, self._overflow)

        if self._lost and self._overflow == "error":
            # Nothing will be published; the rest is only looked at, to name every tensor at once.
            put(0, np.empty(source.size * dtype.itemsize, np.uint8))
        else:
            file = self._file(layout)
            file.fill(place, source.size * dtype.itemsize, put)
        if lost:
            with self._lock:
                self._lost[weight.name] = self._lost.get(weight.name, 0) + lost

    def _file(self, layout: FileLayout) -> BlockFile:
        with self._lock:
            if layout.name not in self._open:
                file = BlockFile(
                    self._reader.resources.files, self._folder / layout.name, layout.file_bytes, self._slabs
                )
                self._open[layout.name] = file
                header = np.frombuffer(layout.header, np.uint8)
                file.fill(0, header.size, lambda start, view: np.copyto(view, header[start : start + view.size]))
            return self._open[layout.name]

    def _finish(self, file: BlockFile) -> None:
        if not file.is_filled:
            raise CheckpointError(f"{file.path} was not filled; this is a bug")
        file.finish()


def _lost_text(lost: Sequence[Lost], dtype: str) -> str:
    named = [f"\n  {each.name}: {each.count} value(s)" for each in lost[:_MOST_NAMED]]
    more = f"\n  and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else ""
    return (
        f"{len(lost)} tensor(s) have values that {dtype} cannot hold; nothing was written. Choose `--dtype bf16`, or "
        f"`--overflow clamp` (or `inf`) to go on:{''.join(named)}{more}"
    )


def _copy_companions(checkpoint: Path, folder: Path) -> str:
    """Copy config and tokenizer files that lie in the checkpoint or beside it; return their names."""
    return ", ".join(copy_companions([checkpoint.parent, checkpoint], folder))
