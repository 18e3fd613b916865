"""A checkpoint of torch.distributed.checkpoint, `.metadata` and `.distcp` files, read as arrays. No torch.

[Note: the folder]
`.metadata` is a pickle of dataclasses: for each key a tensor's size and the blocks that it was cut into, or that it is
something else; and for each block a file, an offset and a length, the place of the output of torch.save for the block: a whole
zip archive. A block is found when it is first read. Entries that are not tensors are read when the checkpoint is opened:
plain data goes to the record, of anything else the pickle is an array of bytes.
Source: torch/distributed/checkpoint/metadata.py and filesystem.py of torch 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointMismatchError, CorruptionError
from ..format.arrays import ArraySpec, Bytes, client_array
from ..format.boxes import Box, gather, tiles
from ..io.files import Files
from ..io.shards import IoResources
from .dcp_entries import FileRange, Opaque, PickledEntries
from .dcp_names import STATE, Names, key_of, name_arrays, step_of
from .dcp_names import Path as KeyPath
from .dcp_values import make_document
from .pickles import Global, PickledObject, Table, Walk, brief, inert, load_pickle
from .source import ForeignSource, record_of
from .torchfile import TORCH, TorchTensor, load_torch_file

METADATA = ".metadata"
_MOST_KEPT = 4096
"""Blocks whose place in their file is remembered."""
_MOST_BLOCK_PICKLE_BYTES = 1024 * 1024
_LEAST_STEPS, _BYTES_A_STEP = 1_000_000, 16
"""A block costs four steps, and has well over a hundred bytes in the metadata."""
_MODULE = "torch.distributed.checkpoint"
_KINDS = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
    *("_MEM_FORMAT_ENCODING", "MetadataIndex", "StorageMeta"),
)
_TABLE: Table = {
    **TORCH,
    **inert(
        *(f"{_MODULE}.metadata.{kind}" for kind in _KINDS),
        f"{_MODULE}.filesystem._StorageInfo",
        "torch.serialization._get_layout",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib.WindowsPath",
        "pathlib._local.PosixPath",
    ),
}


_Blocks = list[tuple[Box, FileRange]]
"""The blocks of a tensor, and their places."""


class TorchDcpSource(ForeignSource):
    """The checkpoint in `folder`. Names are mapped as `docs/dcp.md` says.

    Raises CorruptionError if it is damaged, CheckpointMismatchError for parts that are not read: other storage formats than
    that of `FileSystemWriter`, and data types that the format does not store.
    """

    kind = "torch DCP"

    def __init__(self, folder: Path, resources: IoResources | None = None) -> None:
        files = Files(direct=False)
        tensors, self._opaque, document = _Metadata(folder).described(PickledEntries(files))
        self._blocks = {name: blocks for name, (_, blocks) in tensors.items()}
        self._found: dict[FileRange, TorchTensor] = {}
        specs = [spec for spec, _ in tensors.values()]
        specs += [ArraySpec(name=name, shape=(it.nbytes,), dtype="uint8") for name, it in self._opaque.items()]
        record = record_of(folder, step_of(folder.resolve().name), {STATE: document})
        super().__init__(folder, record, specs, resources, files)

    def _fill(self, name: str, first: int, stop: int, out: Bytes) -> None:
        if name in self._opaque:
            self._opaque[name].read(self._files, first, out)
            return
        spec = self.array(name).spec
        for box, place in self._blocks[name]:  # which tile it

            def fetch(start: int, part: Bytes, box: Box = box, place: FileRange = place) -> None:
                tensor = self._tensor(spec, box, place)
                tensor.read(self._files, start, start + part.size // spec.itemsize, part)

            gather(box, first, stop, spec.itemsize, fetch, out)

    def _tensor(self, spec: ArraySpec, box: Box, place: FileRange) -> TorchTensor:
        with self._lock:
            known = self._found.get(place)
        if known is not None:
            return known
        tensor = load_torch_file(place.path, part=(place.offset, place.nbytes), most_bytes=_MOST_BLOCK_PICKLE_BYTES)
        if not isinstance(tensor, TorchTensor) or (tensor.shape, tensor.dtype) != (box.sizes, spec.dtype):
            got = f"{tensor.dtype} of shape {tensor.shape}" if isinstance(tensor, TorchTensor) else "no tensor"
            raise CorruptionError(
                f"array {spec.name!r}: expected {spec.dtype} of shape {box.sizes} at byte {place.offset} of {place.path}, got "
                f"{got}; restore it from another copy"
            )
        with self._lock:
            if len(self._found) >= _MOST_KEPT:
                self._found.clear()
            self._found[place] = tensor
        return tensor


class _Metadata:
    """The content of `.metadata`, checked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / METADATA
        with self._path.open("rb") as file:
            size = self._path.stat().st_size
            self._walk = Walk(str(self._path), max(_LEAST_STEPS, size // _BYTES_A_STEP))
            root = load_pickle(file, str(self._path), _TABLE, size=size)
        self._entries = self._dict(self._object(root, "Metadata").get("state_dict_metadata"))
        if not all(isinstance(key, str) for key in self._entries):
            raise self._damaged("its entries have no names")
        self._storage = self._index(self._dict(root.get("storage_data")))
        planner = root.get("planner_data")
        kept = planner if isinstance(planner, dict) else {}
        self._paths = {key: self._key_path(key, kept.get(key)) for key in self._entries}

    def described(
        self, looked_into: PickledEntries
    ) -> tuple[dict[str, tuple[ArraySpec, _Blocks]], dict[str, Opaque], dict[str, Any]]:
        """Return tensors by array name, opaque arrays, and the record's `state["dcp"]`."""
        tensors = {key: entry for key, entry in self._entries.items() if self._kind(entry) == "TensorStorageMetadata"}
        names = name_arrays({key: self._paths[key] for key in tensors})
        described = {names.arrays[key]: self._tensor(key, names.arrays[key], entry) for key, entry in tensors.items()}
        values: list[tuple[KeyPath, Any]] = []
        opaque: dict[str, Opaque] = {}
        kinds: dict[str, str] = {}
        for key, entry in self._entries.items():
            if key in tensors:
                continue
            if self._kind(entry) != "BytesStorageMetadata":
                raise self._damaged(f"{key!r} is neither a tensor nor bytes")
            kind, value = looked_into.look(self._place(key, None))
            if kind:
                name = self._opaque_name(key, names, described)
                opaque[name], kinds[name] = value, kind
            else:
                values.append((self._paths[key], value))
        return described, opaque, make_document(names, values, kinds)

    def _opaque_name(self, key: str, names: Names, tensors: Mapping[str, Any]) -> str:
        name = client_array(key)
        if name in tensors:
            raise CheckpointMismatchError(f"{self._path}: {key!r} and a tensor would both be the array {name!r}")
        names.paths[name] = self._paths[key]
        return name

    # -- tensors -----------------------------------------------------------------------------------------------------

    def _tensor(self, key: str, name: str, entry: PickledObject) -> tuple[ArraySpec, _Blocks]:
        shape = self._extents(entry.get("size"))
        properties = self._object(entry.get("properties"), "TensorProperties").state
        dtype = properties[0] if isinstance(properties, tuple) and properties else None
        if not isinstance(dtype, Global):
            raise self._damaged(f"{key!r} has no data type")
        try:
            spec = ArraySpec(name=name, shape=shape, dtype=dtype.name.removeprefix("torch."))
        except ValueError as error:
            raise CheckpointMismatchError(f"{self._path}: {key!r}: {error}") from error
        blocks: _Blocks = []
        chunks = entry.get("chunks")
        if not isinstance(chunks, list):
            raise self._damaged(f"expected a list of blocks, got {brief(chunks)}")
        for chunk in chunks:
            piece = self._object(chunk, "ChunkStorageMetadata")  # which counts a step
            offsets, sizes = self._extents(piece.get("offsets")), self._extents(piece.get("sizes"))
            try:
                box = Box(shape, offsets, sizes)
            except ValueError as error:
                raise self._damaged(f"{key!r}: {error}") from error
            if box.numel:
                blocks.append((box, self._place(key, offsets)))
        if not tiles(shape, (box for box, _ in blocks)):
            raise self._damaged(f"the blocks of {key!r} do not cover its {spec.numel} elements exactly once")
        return spec, blocks

    def _extents(self, value: object) -> tuple[int, ...]:
        if type(value) is not tuple or len(value) > 64 or not all(type(n) is int and 0 <= n < 2**48 for n in value):
            raise self._damaged(f"expected a size, got {brief(value)}")
        return value

    # -- places -----------------------------------------------------------------------------------------------------

    def _index(self, storage: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], FileRange]:
        found: dict[tuple[str, tuple[int, ...] | None], FileRange] = {}
        for key, value in storage.items():
            index, info = self._object(key, "MetadataIndex"), self._object(value, "_StorageInfo")
            fqn, offset, file = index.get("fqn"), index.get("offset"), info.get("relative_path")
            start, nbytes = info.get("offset"), info.get("length")
            if not isinstance(fqn, str) or not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
                raise self._damaged(f"an entry is in {brief(file)}, which is not a file of the folder")
            if type(start) is not int or type(nbytes) is not int or start < 0 or nbytes < 0:
                raise self._damaged(f"{fqn!r} is at {brief(start)}, {brief(nbytes)} bytes")
            if info.get("transform_descriptors"):
                raise CheckpointMismatchError(
                    f"{self._path}: {fqn!r} was written through an extension, which is not supported"
                )
            place = FileRange(path=self._folder / file, offset=start, nbytes=nbytes)
            found[fqn, None if offset is None else self._extents(offset)] = place
        return found

    def _place(self, key: str, offsets: tuple[int, ...] | None) -> FileRange:
        place = self._storage.get((key, offsets))
        if place is None:
            raise self._damaged(f"no file is listed for {key!r} at {offsets}")
        return place

    def _key_path(self, key: str, path: object) -> KeyPath:
        if isinstance(path, tuple | list) and path and all(type(part) in (str, int) for part in path):
            return tuple(path) if key_of(tuple(path)) == key else (key,)
        return (key,)

    # -- objects of a pickle ----------------------------------------------------------------------------------------

    def _object(self, value: object, kind: str) -> PickledObject:
        self._walk.step()
        if not isinstance(value, PickledObject) or self._kind(value) != kind:
            raise self._damaged(f"expected a {kind}, got {brief(value)}")
        return value

    @staticmethod
    def _kind(value: object) -> str:
        return value.name.rpartition(".")[2] if isinstance(value, PickledObject) else ""

    def _dict(self, value: object) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise self._damaged(f"expected a dict, got {brief(value)}")
        return value

    def _damaged(self, what: str) -> CorruptionError:
        return CorruptionError(f"{self._path}: {what}: it is damaged, or was written in an unsupported way")
