"""A checkpoint of torch.distributed.checkpoint (`.metadata` and `.distcp` files), read as arrays.

[Note: the folder]
`.metadata` is a pickle of dataclasses: for each key, a tensor's size and the blocks that it was split into, or that it is
something else; and for each block the file, offset and length of the output of torch.save for it, a complete zip archive. A
block's values are located when it is first read. Entries that are not tensors are read when the checkpoint is opened: plain
data goes to the record; for anything else, the pickle becomes an array of bytes.
Source: torch/distributed/checkpoint/metadata.py and filesystem.py of torch 2.
"""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointMismatchError, CorruptionError
from ..format.arrays import ArraySpec, Bytes, client_array
from ..format.boxes import Box, gather, tiles
from ..io.files import Files
from ..io.shards import IoResources
from .dcp_state import BYTES, PICKLE, STATE, DcpState, NotPlainError, encode_value, key_of, name_arrays, step_of
from .dcp_state import Path as KeyPath
from .source import ForeignSource, opened_file, record_of
from .torchfile import Inert, TorchTensor, load_torch_file

METADATA = ".metadata"
_MAX_CACHED = 4096
"""Maximum number of blocks whose location in their file is cached."""
_MAX_LOADED_BYTES = 64 * 1024 * 1024
"""Entries larger than this are not unpickled."""
_MODULE = "torch.distributed.checkpoint"
_CLASSES = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
    *("_MEM_FORMAT_ENCODING", "MetadataIndex", "StorageMeta"),
)
_INERT = (
    *(f"{_MODULE}.metadata.{kind}" for kind in _CLASSES),
    f"{_MODULE}.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
)


@dataclass(frozen=True, kw_only=True)
class FileRange:
    """Bytes `[offset, offset + nbytes)` of a file: a block of a tensor, or an entry."""

    path: Path
    offset: int
    nbytes: int

    def load(self) -> Any:
        """Return the saved object."""
        return load_torch_file(self.path, (self.offset, self.nbytes))

    def read(self, files: Files, first: int, out: Bytes) -> None:
        """Fill `out` with the bytes starting at byte `first`. Raises StorageError if the file has become shorter."""
        with files.opened(self.path) as file:
            files.read_into(file, out, self.offset + first)


@dataclass(frozen=True)
class LoadedBytes:
    """A `bytes` object, which is loaded again for every read."""

    location: FileRange
    nbytes: int

    def read(self, files: Files, first: int, out: Bytes) -> None:
        value = self.location.load()
        if type(value) is not bytes or len(value) != self.nbytes:
            raise CorruptionError(f"{self.location.path} changed while it was read")
        out[:] = np.frombuffer(value, np.uint8)[first : first + out.size]


Blocks = list[tuple[Box, FileRange]]
"""The blocks of a tensor, and their locations."""


class TorchDcpSource(ForeignSource):
    """The checkpoint in `folder`. Names are mapped as described in `docs/dcp.md`.

    Raises CorruptionError if it is damaged, CheckpointMismatchError for unsupported parts: storage formats other than
    `FileSystemWriter`'s, and data types that the format cannot store.
    """

    kind = "torch DCP"

    def __init__(self, folder: Path, resources: IoResources | None = None) -> None:
        metadata = _Metadata(folder)
        self._blocks = {spec.name: blocks for spec, blocks in metadata.tensors}
        self._opaque = metadata.opaque
        self._tensors: dict[FileRange, TorchTensor] = {}
        specs = [spec for spec, _ in metadata.tensors]
        specs += [ArraySpec(name=name, shape=(data.nbytes,), dtype="uint8") for name, data in self._opaque.items()]
        record = record_of(folder, step_of(folder.resolve().name), {STATE: metadata.state.document()})
        super().__init__(folder, record, specs, resources, Files(direct=False))

    def _fill(self, name: str, first: int, stop: int, out: Bytes) -> None:
        if name in self._opaque:
            self._opaque[name].read(self._files, first, out)
            return
        spec = self.array(name).spec
        for box, location in self._blocks[name]:  # the blocks tile the array

            def fetch(start: int, part: Bytes, box: Box = box, location: FileRange = location) -> None:
                tensor = self._tensor(spec, box, location)
                tensor.read(self._files, start, start + part.size // spec.itemsize, part)

            gather(box, first, stop, spec.itemsize, fetch, out)

    def _tensor(self, spec: ArraySpec, box: Box, location: FileRange) -> TorchTensor:
        with self._lock:
            cached = self._tensors.get(location)
        if cached is not None:
            return cached
        tensor = location.load()
        if not isinstance(tensor, TorchTensor) or (tensor.shape, tensor.dtype) != (box.sizes, spec.dtype):
            got = f"{tensor.dtype} of shape {tensor.shape}" if isinstance(tensor, TorchTensor) else "no tensor"
            raise CorruptionError(
                f"array {spec.name!r}: expected {spec.dtype} of shape {box.sizes} at byte {location.offset} of "
                f"{location.path}, got {got}; restore it from another copy"
            )
        with self._lock:
            if len(self._tensors) >= _MAX_CACHED:
                self._tensors.clear()
            self._tensors[location] = tensor
        return tensor


class _Unpickler(pickle.Unpickler):
    """Builds the objects in `.metadata` as `Inert` objects, sizes as tuples and types as their names, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        qualified = f"{module}.{name}"
        if qualified in _INERT:
            return type(name, (Inert,), {})
        if qualified in ("torch.Size", "collections.OrderedDict"):
            return tuple if name == "Size" else dict
        if module == "torch" and name.isidentifier() and name.islower():
            return name
        if qualified == "builtins.getattr":  # for enum members, as written by Python up to 3.11.3; looks up nothing
            return lambda _, member: member
        raise CheckpointMismatchError(
            f"it names {qualified[:200]!r}, which FileSystemWriter's metadata does not: nothing was called"
        )


class _Metadata:
    """The validated content of `.metadata`, and of the entries that are plain data."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.opaque: dict[str, FileRange | LoadedBytes] = {}
        """The location of each array of bytes."""
        with opened_file(folder / METADATA, "`.metadata` of torch.distributed.checkpoint") as (file, _):
            root = _Unpickler(file).load().state
            entries: dict[str, Inert] = root["state_dict_metadata"]
            self._locations = dict(self._locate(index, info) for index, info in root["storage_data"].items())
            planner = root.get("planner_data")
            paths = {key: _key_path(key, planner.get(key) if isinstance(planner, dict) else None) for key in entries}
            tensors = {key: entry.state for key, entry in entries.items() if entry.name == "TensorStorageMetadata"}
            names = name_arrays({key: paths[key] for key in tensors})
            self.tensors = [self._tensor(key, names[key], entry) for key, entry in tensors.items()]
            """The array and the blocks of each tensor."""
            self.state = DcpState(paths={name: paths[key] for key, name in names.items()})
            for key in [key for key in entries if key not in tensors]:
                self._add_entry(key, paths[key])

    def _tensor(self, key: str, name: str, entry: dict[str, Any]) -> tuple[ArraySpec, Blocks]:
        shape = _sizes(entry["size"])
        try:
            spec = ArraySpec(name=name, shape=shape, dtype=entry["properties"].state[0])
        except ValueError as error:
            raise CheckpointMismatchError(f"{key!r}: {error}") from error
        blocks: Blocks = []
        for chunk in entry["chunks"]:
            offsets, sizes = _sizes(chunk.state["offsets"]), _sizes(chunk.state["sizes"])
            box = Box(shape, offsets, sizes)
            if box.numel:
                blocks.append((box, self._locations[key, offsets]))
        if not tiles(shape, (box for box, _ in blocks)):
            raise CorruptionError(f"the blocks of {key!r} do not cover its {spec.numel} elements exactly once")
        return spec, blocks

    def _add_entry(self, key: str, path: KeyPath) -> None:
        """Add an entry that is not a tensor to the state, as JSON if it is plain data, otherwise as an array of bytes."""
        content: FileRange | LoadedBytes = self._locations[key, None]
        kind, name = PICKLE, client_array(key)
        if self._locations[key, None].nbytes <= _MAX_LOADED_BYTES:
            with contextlib.suppress(NotPlainError, CheckpointMismatchError):
                value = self._locations[key, None].load()
                if type(value) is not bytes:
                    self.state.values.append((path, encode_value(value)))
                    return
                kind, content = BYTES, LoadedBytes(self._locations[key, None], len(value))
        if name in self.state.paths:
            raise CheckpointMismatchError(f"{key!r} and a tensor would both be the array {name!r}")
        self.opaque[name], self.state.opaque[name], self.state.paths[name] = content, kind, path

    def _locate(self, index: Inert, info: Inert) -> tuple[tuple[str, tuple[int, ...] | None], FileRange]:
        offset, file = index.state.get("offset"), info.state["relative_path"]
        if Path(file).name != file or file in ("", ".."):
            raise CorruptionError(f"an entry is in {file!r:.100}, which is not a file of the folder")
        if info.state.get("transform_descriptors"):
            raise CheckpointMismatchError("it was written with an extension, which is not supported")
        start, nbytes = _sizes((info.state["offset"], info.state["length"]))
        location = FileRange(path=self._folder / file, offset=start, nbytes=nbytes)
        return (index.state["fqn"], None if offset is None else _sizes(offset)), location


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > 64 or not all(type(n) is int and 0 <= n < 2**48 for n in value):
        raise CorruptionError(f"expected a size, got {value!r:.100}")
    return value


def _key_path(key: str, path: object) -> KeyPath:
    if isinstance(path, tuple | list) and path and all(type(part) in (str, int) for part in path):
        return tuple(path) if key_of(tuple(path)) == key else (key,)
    return (key,)
