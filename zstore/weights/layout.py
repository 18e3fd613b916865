"""The layout of weights in safetensors files. Pure.

Source of the file format: https://github.com/huggingface/safetensors (8 bytes of header size, JSON header, data without
holes); of the numbering and the index: Hugging Face's sharded checkpoints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoint.names import natural_key
from ..errors import CheckpointMismatchError
from ..format.arrays import SAFETENSORS_DTYPES, STEM, STEM_KEY, STEMS, STEMS_OF_ONE_FILE, SUFFIX, Shaped

MAX_FILE_BYTES = 5 * 1000**3
"""Bytes of weights in one file unless asked otherwise, as in transformers."""

_ALIGN_BYTES = 4096
_METADATA = "__metadata__"
"""The key of a header that is no tensor."""
_MAX_HEADER_BYTES = 100 * 1000**2 - _ALIGN_BYTES
"""No reader takes a larger header than 100 MB; ours are padded."""


@dataclass(frozen=True, kw_only=True)
class Weight(Shaped):
    """A tensor to write."""

    name: str
    """Its key in the state dict."""
    array: str
    """The checkpoint's array."""
    shape: tuple[int, ...]
    dtype: str
    """Data type that it is written in, by its Zarr name."""


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


def plan_model(weights: Iterable[Weight], max_file_bytes: int, state: Mapping[str, Any]) -> list[FileLayout]:
    """Return the files as `plan_files` does, called as those that the checkpoint whose record has `state` was made from."""
    stem = state.get(STEM_KEY)
    stem = stem if stem in STEMS else STEM
    most_bytes = sys.maxsize if stem in STEMS_OF_ONE_FILE else max_file_bytes  # no index of theirs is read
    return plan_files(weights, most_bytes, stem)


def plan_files(weights: Iterable[Weight], max_file_bytes: int, stem: str = STEM) -> list[FileLayout]:
    """Return the files of a model: one, or numbered ones of at most `max_file_bytes` of data each.

    A weight that is larger has a file of its own; there are more files if a header would be larger than readers take. Names
    begin with `stem`. Raises CheckpointMismatchError for names that such a file cannot have.
    """
    groups: list[list[Weight]] = [[]]
    size = header = 0
    for weight in _named(weights):
        entry = _entry_bytes(weight)
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
    """Return `weights` in the order of their names, which are checked."""
    ordered = sorted(weights, key=lambda weight: natural_key(weight.name))
    for weight, following in zip(ordered, [*ordered[1:], None], strict=True):
        name, reason = weight.name, None
        if name == _METADATA:
            reason = "is the key of the file's own metadata"
        elif following is not None and following.name == name:
            reason = "is that of two weights"
        elif name.encode(errors="replace") != name.encode(errors="surrogatepass"):
            reason = "is no Unicode text"
        if reason is not None:
            raise CheckpointMismatchError(
                f"a safetensors file cannot have a weight called {name!r:.200}: the name {reason}. Rename it in the model, "
                "or write a torch state dict (`zstore convert --to torch`)"
            )
    return ordered


def _entry_bytes(weight: Weight) -> int:
    """Return at least the bytes of a weight's entry in the header."""
    return len(json.dumps(weight.name)) + len(str(weight.shape)) + 100


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
