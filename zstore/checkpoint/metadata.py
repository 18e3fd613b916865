"""The Zarr v3 documents of a checkpoint: one for every group level and array, the root's with a copy of all. Pure.

[Note: objects of a save]
Python's collector counts the objects that are made, and after so many walks over all that the program holds, modules of
torch and transformers among them: that takes longer than a small save. A document is some thirty objects. So they are
made as text, once for the arrays of a run, and a save makes a few objects for an array in all.

Source: Zarr v3 core specification and the sharding codec, https://zarr-specs.readthedocs.io/en/latest/v3/core/
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from ..errors import CheckpointMismatchError, CorruptionError, UsageError
from ..format.arrays import (
    ALIGN_NUMEL,
    FLOAT8,
    FLOATING,
    MAX_CHUNKS_PER_SHARD,
    ArraySpec,
    Grid,
    extents_of_cols,
    numpy_dtype,
)
from ..format.codecs import Codec, parse_codec
from .format import brief, dump_metadata
from .names import METADATA_FILE, array_path, groups_of

# Bounds on the requests of metadata, before anything is allocated.
MAX_NUMEL = 2**48
MAX_CHUNK_BYTES = 2**31

_PLACE = "the documents of all folders"
_INDENT = "\n   "
"""Of the documents within the root's."""
_GROUP = {"zarr_format": 3, "node_type": "group", "attributes": {}}
_BYTES: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C: dict[str, Any] = {"name": "crc32c"}
_PLAIN_CODECS = [_BYTES, _CRC32C]
_FILL_VALUES = {**dict.fromkeys(FLOATING, "NaN"), "complex64": ["NaN", "NaN"], "bool": False}


def array_document(spec: ArraySpec, grid: Grid, codec: Codec | None = None) -> dict[str, Any]:
    """Return the `zarr.json` of an array that is cut as `grid` says, its chunks compressed with `codec`."""
    width = list(spec.row_extents) if spec.row_numel else [1] * len(spec.row_extents)
    some = bool(spec.stored_shape)
    attributes: dict[str, Any] = {"name": spec.name, "shape": list(spec.shape)}
    if spec.aliases:
        attributes["aliases"] = list(spec.aliases)
    if spec.dtype in FLOAT8:
        attributes["data_type"] = spec.dtype
    sharding = {
        "chunk_shape": [grid.chunk_rows, *extents_of_cols(spec.row_extents, grid.chunk_cols)] if some else [],
        "codecs": _PLAIN_CODECS if codec is None else [_BYTES, codec.document(), _CRC32C],
        "index_codecs": _PLAIN_CODECS,
        "index_location": "start",
    }
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.stored_shape),
        "data_type": "uint8" if spec.dtype in FLOAT8 else spec.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [grid.shard_rows, *width] if some else []}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        # A lost file must never read as zeros, if the type has another value for it.
        "fill_value": _FILL_VALUES.get(spec.dtype, 0),
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {"zstore": attributes},
    }
    return document | ({"dimension_names": list(spec.dims)} if spec.dims else {})


def encode_documents(
    specs: Mapping[str, ArraySpec], grids: Mapping[str, Grid], codec: Codec | None = None
) -> Mapping[str, bytes]:
    """Return the bytes of every `zarr.json` of a checkpoint by its folder inside it; the root's folder is an empty string.

    `codec` compresses the chunks of all arrays. Those of the last arrays are kept: see [Note: objects of a save].

    Raises UsageError if two arrays would share a folder, or an array would be inside another.
    """
    names = sorted(specs)
    return _encode(tuple(specs[name] for name in names), tuple(grids[name] for name in names), codec)


@lru_cache(maxsize=2)
def _encode(specs: Sequence[ArraySpec], grids: Sequence[Grid], codec: Codec | None) -> Mapping[str, bytes]:
    owners: dict[str, str] = {}
    groups: set[str] = set()
    texts: dict[str, str] = {}
    for spec, grid in zip(specs, grids, strict=True):
        path = array_path(spec.name)
        if path in owners:
            raise UsageError(f"arrays {owners[path]!r} and {spec.name!r} would share the folder {path}: rename one")
        owners[path] = spec.name
        texts[path] = dump_metadata(array_document(spec, grid, codec)).decode()
        groups.update(groups_of(path))
    for path in sorted(groups & owners.keys()):
        raise UsageError(f"array {owners[path]!r} has the name of a group of other arrays: rename it")
    texts |= dict.fromkeys(groups, dump_metadata(_GROUP).decode())
    consolidated = {"kind": "inline", "must_understand": False, "metadata": _PLACE}
    outline = dump_metadata(_GROUP | {"consolidated_metadata": consolidated}).decode()
    # Every line break belongs to the indentation: JSON's strings have none.
    inner = [f"{json.dumps(folder)}: {texts[folder]}".replace("\n", _INDENT) for folder in sorted(texts)]
    whole = ",".join(_INDENT + text for text in inner)
    texts[""] = outline.replace(json.dumps(_PLACE), f"{{{whole}{_INDENT[:-1]}}}" if whole else "{}")
    return MappingProxyType({folder: text.encode() for folder, text in texts.items()})


def parse_root(document: Mapping[str, Any], path: str) -> dict[str, tuple[str, ArraySpec, Grid, Codec | None]]:
    """Return (folder, spec, grid, codec) of every array by name, from the root's document read from `path`.

    Raises CorruptionError if the document is not one that a checkpoint has, CheckpointMismatchError for arrays that
    are cut or coded in another way.
    """
    consolidated = document.get("consolidated_metadata")
    inner = consolidated.get("metadata") if isinstance(consolidated, dict) else None
    if document.get("zarr_format") != 3 or document.get("node_type") != "group" or not isinstance(inner, dict):
        raise CorruptionError(f"{path} is not a Zarr v3 group with consolidated metadata: the checkpoint is damaged")
    arrays: dict[str, tuple[str, ArraySpec, Grid, Codec | None]] = {}
    groups: set[str] = set()
    for folder, entry in inner.items():
        where = f"{path}, {brief(folder)}"
        if not isinstance(entry, dict):
            raise CorruptionError(f"{where}: the metadata is not an object: the checkpoint is damaged")
        if entry.get("node_type") == "group":
            groups.add(folder)
            continue
        spec, grid, codec = parse_array(entry, where)
        expected = _folder_of(spec.name, where)
        if expected != folder:
            raise CorruptionError(
                f"{where}: array {brief(spec.name)} must lie in {brief(expected)}: the metadata was changed"
            )
        arrays[spec.name] = (folder, spec, grid, codec)
    _check_groups(groups, {folder for folder, *_ in arrays.values()}, inner, path)
    return arrays


def _folder_of(name: str, where: str) -> str:
    try:
        return array_path(name)
    except UsageError as error:
        raise CorruptionError(f"{where}: {error}") from error


def _check_groups(groups: set[str], folders: set[str], inner: Mapping[str, Any], path: str) -> None:
    """Raise CorruptionError for groups that no array is in: their names would lead anywhere."""
    parents = {folder[:at] for folder in folders for at, letter in enumerate(folder) if letter == "/"}
    unexpected = sorted(groups - parents) or sorted(parents & folders)
    if unexpected:
        raise CorruptionError(f"{path}: {brief(unexpected[0])} is not a group of its arrays: the metadata was changed")
    for folder in groups:
        if inner[folder] != _GROUP:
            raise CorruptionError(
                f"{path}: the group {brief(folder)} is not one of a checkpoint: the metadata was changed"
            )


def parse_array(document: Mapping[str, Any], where: str) -> tuple[ArraySpec, Grid, Codec | None]:
    """Return spec, grid and codec of an array's document; `where` names it in errors (see `parse_root`)."""
    stored = tuple(_extents(document.get("shape"), f"{where}: shape"))
    spec = _parse_spec(document, stored, where)
    if stored != spec.stored_shape:
        raise CorruptionError(f"{where}: shape {stored} does not belong to a tensor of shape {spec.shape}")
    shard_shape, chunk_shape = _parse_cuts(document, where)
    if len(shard_shape) != len(stored) or len(chunk_shape) != len(stored):
        raise CorruptionError(f"{where}: shards {shard_shape} and chunks {chunk_shape} do not fit shape {stored}")
    rows, *width = shard_shape or [1]
    chunk_rows, *chunk_extents = chunk_shape or [1]
    grid = Grid(spec.rows, spec.row_numel, rows, chunk_rows, math.prod(chunk_extents))
    _check_grid(spec, grid, math.prod(width), where)
    codec = _parse_codec(document, where)
    if document != array_document(spec, grid, codec):
        raise CheckpointMismatchError(
            f"{where}: the array is coded in a way that this version does not read (expected shards of "
            "[bytes little, crc32c] chunks, or such with zstd between the two, with the index at the start, keys "
            "with `.`): use a newer version"
        )
    return spec, grid, codec


def _parse_codec(document: Mapping[str, Any], where: str) -> Codec | None:
    codecs = document["codecs"][0]["configuration"].get("codecs")
    if not isinstance(codecs, list) or len(codecs) != 3:
        return None  # the plain ones, or unsupported ones
    try:
        return parse_codec(codecs[1])
    except ValueError as error:
        raise CheckpointMismatchError(
            f"{where}: the array is coded in a way that this version does not read ({error}): use a newer version"
        ) from error


def _parse_spec(document: Mapping[str, Any], stored: tuple[int, ...], where: str) -> ArraySpec:
    attributes = document.get("attributes")
    own = attributes.get("zstore") if isinstance(attributes, dict) else None
    if document.get("node_type") != "array" or not isinstance(own, dict):
        raise CorruptionError(f"{where}: expected an array with `zstore` attributes in {METADATA_FILE}")
    name, dtype, aliases = own.get("name"), document.get("data_type"), own.get("aliases", [])
    if not isinstance(name, str) or not isinstance(dtype, str):
        raise CorruptionError(f"{where}: expected a name and a data type as text, got {brief(name)} and {brief(dtype)}")
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise CorruptionError(f"{where}: expected a list of names as aliases")
    if dtype == "uint8" and own.get("data_type") in FLOAT8:
        dtype = own["data_type"]
    shape, dims = tuple(_extents(own.get("shape"), f"{where}: true shape")), document.get("dimension_names", [])
    if not isinstance(dims, list) or not all(isinstance(dim, str) for dim in dims):
        raise CorruptionError(f"{where}: expected a list of names as dimension_names")
    try:
        numpy_dtype(dtype)
        spec = ArraySpec(
            name=name,
            shape=shape,
            dtype=dtype,
            aliases=tuple(aliases),
            keeps_shape=stored == shape and len(shape) not in (1, 2),
        )
        return replace(spec, dims=tuple(dims))
    except ValueError as error:
        raise CheckpointMismatchError(f"{where}: {error}") from error


def _extents(value: object, what: str) -> list[int]:
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n <= MAX_NUMEL for n in value):
        raise CorruptionError(f"{what}: expected a list of whole numbers from 0 to {MAX_NUMEL}, got {brief(value)}")
    if len(value) > 64 or math.prod(n for n in value if n) > MAX_NUMEL:
        raise CorruptionError(f"{what}: {brief(value)} is larger than any array of a checkpoint")
    return value


def _parse_cuts(document: Mapping[str, Any], where: str) -> tuple[list[int], list[int]]:
    try:
        shard_shape = document["chunk_grid"]["configuration"]["chunk_shape"]
        chunk_shape = document["codecs"][0]["configuration"]["chunk_shape"]
    except (KeyError, IndexError, TypeError) as error:
        raise CheckpointMismatchError(f"{where}: expected a regular grid of shards with inner chunks") from error
    return _extents(shard_shape, f"{where}: shard shape"), _extents(chunk_shape, f"{where}: chunk shape")


def _check_grid(spec: ArraySpec, grid: Grid, width: int, where: str) -> None:
    row_numel = max(grid.row_numel, 1)
    whole = (
        min(grid.shard_rows, grid.chunk_rows, grid.chunk_cols) >= 1
        and width == row_numel
        and grid.shard_rows % grid.chunk_rows == 0
        and row_numel % grid.chunk_cols == 0
        and (grid.chunk_cols == row_numel or grid.chunk_rows == 1)
    )
    if not whole:
        raise CheckpointMismatchError(
            f"{where}: shards of {grid.shard_rows} x {width} in chunks of {grid.chunk_rows} x {grid.chunk_cols} are "
            f"not whole rows of {row_numel} elements in whole chunks"
        )
    if spec.numel and grid.shard_numel > ALIGN_NUMEL * spec.numel:
        raise CorruptionError(
            f"{where}: shards of {grid.shard_numel} elements are more than {ALIGN_NUMEL} times the array's {spec.numel}"
        )
    if grid.chunk_numel * spec.itemsize > MAX_CHUNK_BYTES or grid.chunks_per_shard > MAX_CHUNKS_PER_SHARD:
        raise CorruptionError(
            f"{where}: chunks of {grid.chunk_numel * spec.itemsize} bytes, {grid.chunks_per_shard} a shard, are more "
            f"than any checkpoint has (at most {MAX_CHUNK_BYTES} and {MAX_CHUNKS_PER_SHARD})"
        )
