"""The safetensors files of a model: their layout, which is pure, and their writing: values are cast, piece by piece, into
blocks of the files, which are written bypassing the page cache.

Source of the file format: https://github.com/huggingface/safetensors (8 bytes of header size, JSON header, data without
holes); of the numbering and the index: Hugging Face's sharded checkpoints.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checkpoint.layout import natural_key
from ..errors import CheckpointError, CheckpointMismatchError
from ..format.arrays import (
    ADAPTER_STEM,
    SAFETENSORS_DTYPES,
    STEM,
    STEM_KEY,
    STEMS,
    STEMS_OF_ONE_FILE,
    SUFFIX,
    Bytes,
    Shaped,
    numpy_dtype,
    round_up,
)
from ..io.closing import Closing
from ..io.files import Files, OpenFile
from ..io.memory import PAGE_BYTES, Slabs
from .cast import Overflow, cast_into

MAX_FILE_BYTES = 5 * 1000**3
"""Bytes of weights in one file unless asked otherwise, as in transformers."""

_LORA = re.compile(
    r"(?s)(base_model\.model\..+)(?:(\.lora_[AB])\.([^.]+)(\.weight|\.bias)|(\.lora_embedding_[AB])\.([^.]+)|"
    r"(\.lora_magnitude_vector)\.([^.]+)\.weight|\.modules_to_save\.([^.]+)(\..+))"
)
"""Parameters that LoRA trains. Groups 3, 6, 8 and 9: the adapter's name; the others, joined: the name in PEFT's files."""

_BLOCK_BYTES = 4 * 1024 * 1024
_ALIGN_BYTES = 4096
_MAX_NAMED = 20
_METADATA = "__metadata__"
"""The key of a header that is no tensor."""
_MAX_HEADER_BYTES = 100 * 1000**2 - _ALIGN_BYTES
"""No reader accepts a larger header than 100 MB; ours are padded."""


@dataclass(frozen=True, kw_only=True)
class Weight(Shaped):
    """A tensor to write."""

    name: str
    """Its key in the state dict."""
    array: str
    """The checkpoint's array."""
    shape: tuple[int, ...]
    dtype: str
    """Data type of the file, by its Zarr name."""


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """One safetensors file: header, then the weights' data at `offsets` (bytes in the file), without holes."""

    name: str
    header: bytes
    """Size and JSON, padded with spaces so that the data begin at a multiple of 4096."""
    weights: tuple[Weight, ...]
    offsets: tuple[int, ...]

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(weight.nbytes for weight in self.weights)

    @property
    def conflicting_files(self) -> frozenset[str]:
        """Files of the model that must not be next to it: with config.json next to PEFT's file, transformers would expect the
        whole model."""
        has_peft_names = any(weight.name != weight.array.partition("/")[2] for weight in self.weights)
        return frozenset({"config.json"} if has_peft_names else ())


def plan_model(
    weights: Iterable[Weight], max_file_bytes: int, state: Mapping[str, Any], *, uses_peft_names: bool = True
) -> list[FileLayout]:
    """Return the files as `plan_files` does, named as the source of the checkpoint was, or by PEFT if all are of a LoRA."""
    weights, stem = list(weights), state.get(STEM_KEY)
    stem = stem if stem in STEMS else STEM
    if uses_peft_names and (lora := _named_by_peft(weights)):
        weights, stem = lora, ADAPTER_STEM
    return plan_files(weights, sys.maxsize if stem in STEMS_OF_ONE_FILE else max_file_bytes, stem)  # without an index


def _named_by_peft(weights: Sequence[Weight]) -> list[Weight]:
    """Return `weights` with the names of PEFT's files, which omit the adapter's; empty unless they are one LoRA adapter."""
    found = {weight.name: _LORA.fullmatch(weight.name) for weight in weights}
    names = {name: match.expand(r"\1\2\4\5\7\g<10>") for name, match in found.items() if match}
    adapters = {match.expand(r"\3\6\8\9") for match in found.values() if match}
    is_lora = len(set(names.values())) == len(weights) and any(".lora_" in name for name in names)
    return [replace(weight, name=names[weight.name]) for weight in weights] if is_lora and len(adapters) == 1 else []


def plan_files(weights: Iterable[Weight], max_file_bytes: int, stem: str = STEM) -> list[FileLayout]:
    """Return the files of a model: one, or numbered ones of at most `max_file_bytes` of data each.

    A larger weight has a separate file; there are more files if a header would be larger than readers accept. Names begin
    with `stem`. Raises CheckpointMismatchError for names that such a file cannot have.
    """
    groups: list[list[Weight]] = [[]]
    size = header = 0
    for weight in _named(weights):
        entry = len(json.dumps(weight.name)) + len(str(weight.shape)) + 100  # its bytes in the header, at most
        if groups[-1] and (size + weight.nbytes > max_file_bytes or header + entry > _MAX_HEADER_BYTES):
            groups.append([])
            size = header = 0
        groups[-1].append(weight)
        size, header = size + weight.nbytes, header + entry
    if len(groups) == 1:
        return [_lay_out(f"{stem}{SUFFIX}", groups[0])]
    return [
        _lay_out(f"{stem}-{number:05d}-of-{len(groups):05d}{SUFFIX}", group)
        for number, group in enumerate(groups, start=1)
    ]


def _named(weights: Iterable[Weight]) -> list[Weight]:
    """Return `weights` in natural order of their names; raises CheckpointMismatchError for an invalid name."""
    ordered = sorted(weights, key=lambda weight: natural_key(weight.name))
    for weight, following in zip(ordered, [*ordered[1:], None], strict=True):
        name, reason = weight.name, None
        if name == _METADATA:
            reason = "is the key of the file's metadata"
        elif following is not None and following.name == name:
            reason = "is used by two weights"
        elif name.encode(errors="replace") != name.encode(errors="surrogatepass"):
            reason = "is no Unicode text"
        if reason is not None:
            raise CheckpointMismatchError(
                f"a safetensors file cannot have a weight called {name!r:.200}: the name {reason}. Rename it in the model, "
                "or write a torch state dict (`zstore convert --to torch`)"
            )
    return ordered


def _lay_out(name: str, weights: Sequence[Weight]) -> FileLayout:
    # The widest types first, as safetensors itself does: every tensor is then aligned to its elements.
    ordered = sorted(weights, key=lambda weight: -weight.itemsize)
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
    starts: list[int] = []
    position = 0
    for weight in ordered:
        stop = position + weight.nbytes
        entries[weight.name] = {
            "dtype": SAFETENSORS_DTYPES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [position, stop],
        }
        starts.append(position)
        position = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-(len(text) + 8) // _ALIGN_BYTES) * _ALIGN_BYTES - 8)
    header = len(text).to_bytes(8, "little") + text
    offsets = tuple(len(header) + start for start in starts)
    return FileLayout(name=name, header=header, weights=tuple(ordered), offsets=offsets)


def index_file(files: Sequence[FileLayout]) -> str:
    """Return the name of the index of several files: `model.safetensors.index.json`."""
    return f"{files[0].name.rsplit('-', 3)[0]}{SUFFIX}.index.json"


def index_document(files: Sequence[FileLayout]) -> dict[str, Any]:
    """Return the content of `model.safetensors.index.json`."""
    names = {weight.name: file.name for file in files for weight in file.weights}
    return {
        "metadata": {
            "total_parameters": sum(weight.numel for file in files for weight in file.weights),
            "total_size": sum(weight.nbytes for file in files for weight in file.weights),
        },
        "weight_map": {name: names[name] for name in sorted(names, key=natural_key)},
    }


@dataclass(eq=False)
class _Block:
    """A block of the file that is not complete."""

    slab: Bytes
    missing_bytes: int


class BlockFile:
    """The file `path` of `nbytes`, which exists. Every byte is filled once; a complete block is written at once, so
    that filling roughly in order takes memory for a few blocks. After its last byte the file is made durable and
    closed: a model may have more files than a process may open."""

    def __init__(self, files: Files, path: Path, nbytes: int, slabs: Slabs) -> None:
        self.path = path
        self.nbytes = nbytes
        self._files = files
        self._slabs = slabs
        self._blocks: dict[int, _Block] = {}
        self._lock = threading.Lock()
        self._missing_bytes = nbytes
        self._is_durable = False
        self._cleanup = ExitStack()
        self._file: OpenFile = self._cleanup.enter_context(files.opened(path, write=True))

    @property
    def is_filled(self) -> bool:
        """Whether every byte was filled, and is durable."""
        with self._lock:
            return self._is_durable

    def fill(self, offset: int, nbytes: int, put: Callable[[int, Bytes], None]) -> None:
        """Fill bytes `[offset, offset + nbytes)`: `put(start, view)` sets the bytes from `offset + start` on, view by
        view. Returns when the blocks that this completed are written."""
        done = 0
        while done < nbytes:
            number, start = divmod(offset + done, _BLOCK_BYTES)
            size = min(_BLOCK_BYTES - start, nbytes - done)
            block = self._block(number)
            put(done, block.slab[start : start + size])
            with self._lock:
                block.missing_bytes -= size
                complete = block.missing_bytes == 0
            if complete:
                self._write(number, block)
            done += size

    def _block(self, number: int) -> _Block:
        with self._lock:
            if number not in self._blocks:
                size = min(_BLOCK_BYTES, self.nbytes - number * _BLOCK_BYTES)
                self._blocks[number] = _Block(self._slabs.acquire(), size)
            return self._blocks[number]

    def _write(self, number: int, block: _Block) -> None:
        size = min(_BLOCK_BYTES, self.nbytes - number * _BLOCK_BYTES)
        padded = round_up(size, PAGE_BYTES)
        block.slab[size:padded] = 0
        self._files.write_from(self._file, block.slab[:padded], number * _BLOCK_BYTES)
        with self._lock:
            del self._blocks[number]
            self._missing_bytes -= size
            is_last = self._missing_bytes == 0
        self._slabs.release(block.slab)
        if is_last:
            self._finish()

    def _finish(self) -> None:
        """Cut off the last block's padding, make the file durable and close it."""
        with self._cleanup:
            os.truncate(self.path, self.nbytes)
            self._files.sync_data(self._file)
        with self._lock:
            self._is_durable = True

    def close(self) -> None:
        """Close the file, complete or not; a second call does nothing."""
        self._cleanup.close()


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Values of one weight that its new type cannot hold."""

    name: str
    count: int


class WeightsWriter(Closing):
    """Writes the files `layouts` into `folder`; usable from several threads. Close it, or use it in a `with` block.

    Every element of every weight is put once, roughly in the order of the layouts; then `finish`. Raises DiskFullError
    if the folder's file system lacks room.
    """

    def __init__(self, files: Files, layouts: Sequence[FileLayout], folder: Path, *, overflow: Overflow) -> None:
        needed = sum(layout.file_bytes for layout in layouts)
        files.require_room(folder, needed, f"the weights need {needed} bytes")
        for layout in layouts:
            with files.opened(folder / layout.name, write=True, create=True) as file:
                files.allocate(file, round_up(layout.file_bytes, PAGE_BYTES))
        self._files = files
        self._layouts = layouts
        self._folder = folder
        self._overflow = overflow
        self._places = {
            weight.array: (layout, weight, offset)
            for layout in layouts
            for weight, offset in zip(layout.weights, layout.offsets, strict=True)
        }
        self._open: dict[str, BlockFile] = {}
        self._slabs = Slabs(_BLOCK_BYTES)
        self._lost: dict[str, int] = {}
        self._lock = threading.Lock()

    def lost(self) -> list[Lost]:
        """Return which weights had values that could not be held."""
        return [Lost(name=name, count=count) for name, count in sorted(self._lost.items())]

    def put(self, array: str, first: int, values: npt.NDArray[Any]) -> None:
        """Write `values`, 1-D, as the flat elements from `first` on of the weight read from `array`.

        With overflow "error", nothing more is written after the first value that could not be held; later values are only
        checked, so that every such weight can be named.
        """
        layout, weight, offset = self._places[array]
        itemsize = weight.itemsize
        lost = 0

        def put(start: int, view: npt.NDArray[np.uint8]) -> None:
            nonlocal lost
            piece = values[start // itemsize : (start + view.size) // itemsize]
            lost += cast_into(piece, view.view(numpy_dtype(weight.dtype)), weight.dtype, self._overflow)

        if self._is_refused:
            put(0, np.empty(values.size * itemsize, np.uint8))
        else:
            self._file(layout).fill(offset + first * itemsize, values.size * itemsize, put)
        if lost:
            with self._lock:
                self._lost[weight.name] = self._lost.get(weight.name, 0) + lost

    @property
    def _is_refused(self) -> bool:
        return bool(self._lost) and self._overflow == "error"

    def _file(self, layout: FileLayout) -> BlockFile:
        with self._lock:
            if layout.name not in self._open:
                file = BlockFile(self._files, self._folder / layout.name, layout.file_bytes, self._slabs)
                self._open[layout.name] = file
                header = np.frombuffer(layout.header, np.uint8)
                file.fill(0, header.size, lambda start, view: np.copyto(view, header[start : start + view.size]))
            return self._open[layout.name]

    def finish(self) -> list[str]:
        """Complete the files; return their names, with an index's if there are several. Does nothing and returns no
        name if values could not be held and overflow is "error"."""
        if self._is_refused:
            return []
        for layout in self._layouts:
            file = self._file(layout)
            if not file.is_filled:
                raise CheckpointError(f"{file.path} was not filled; this is a bug")
        names = [layout.name for layout in self._layouts]
        if len(names) > 1:
            names.append(index_file(self._layouts))
            document = json.dumps(index_document(self._layouts), indent=2).encode()
            self._files.write_small(self._folder / names[-1], document)
        return names

    def close(self) -> None:
        """Close the files, complete or not; a second call does nothing."""
        for file in self._open.values():
            file.close()


def lost_text(lost: Sequence[Lost], dtype: str, advice: str) -> str:
    """Return the message for values that `dtype` cannot hold, with `advice`."""
    named = [f"\n  {each.name}: {each.count} value(s)" for each in lost[:_MAX_NAMED]]
    more = f"\n  and {len(lost) - _MAX_NAMED} more" if len(lost) > _MAX_NAMED else ""
    return f"{len(lost)} tensor(s) have values that {dtype} cannot hold; nothing was written. {advice}:{''.join(named)}{more}"
