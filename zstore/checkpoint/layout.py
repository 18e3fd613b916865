"""The layout of a checkpoint on disk: names of tags, arrays, shard files and a save's temporary files; and the Zarr v3
documents, one for each group and array, with a copy of all in the root's. Pure.

[Note: names on disk]
A user's name becomes one path component: its UTF-8 bytes, percent-encoded except for letters, digits and
`-_.~=+@,`. Also encoded: a leading `.`, the first of two leading `_` (Zarr reserves `__`), the first letter of names that
the format uses, and the `.` of a suffix like that of a save's temporary files. A component over 180 bytes is truncated and
ends in `~` and the first 32 digits of the SHA-256 of the true name. The true name is in the metadata, and a reader accepts
a folder only if its name is the encoded true name.

[Note: objects of a save]
Python's garbage collector runs after a number of new objects and visits all objects of the program, including torch's and
transformers', which takes longer than a small save. A document is about thirty objects. So documents are created as text,
once for the arrays of a run, and a save creates only a few objects for each array.

Source: Zarr v3 core specification and the sharding codec, https://zarr-specs.readthedocs.io/en/latest/v3/core/
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
import uuid
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from ..errors import CheckpointMismatchError, CorruptionError, UsageError
from ..format.arrays import (
    ALIGN_NUMEL,
    FLOAT8,
    FLOATING,
    MAX_CHUNKS_PER_SHARD,
    ArraySpec,
    Grid,
    shape_of_cols,
)
from ..format.codecs import Codec, CodecError, parse_codec

RECORD_FILE = "zstore.json"
METADATA_FILE = "zarr.json"
LATEST_FILE = "latest"
MANIFEST_FOLDER = "manifest"
ABORT_FILE = "abort.json"

TEMPORARY = "tmp"
"""A folder that is being written or removed: never a checkpoint."""
SET_ASIDE = "old"
"""A committed checkpoint that is being replaced: it is valid while no folder has its tag."""
LOCK = "lock"
"""A file that a save keeps locked while it runs."""

_MAX_COMPONENT_BYTES = 180
_RESERVED = frozenset({RECORD_FILE, METADATA_FILE, LATEST_FILE, MANIFEST_FOLDER})
_WORKING_NAME = re.compile(
    rf"\A(?P<folder>.+)\.(?P<kind>{TEMPORARY}|{SET_ASIDE}|{LOCK})-(?P<id>[0-9a-f]{{32}})\Z", re.DOTALL
)
_ID = re.compile(r"\A[0-9a-f]{32}\Z")
_PARTIAL_ESCAPE = re.compile(r"%[0-9A-F]?\Z")
_FORBIDDEN_IN_TAGS = re.compile(r"[/\x00-\x1f\x7f-\x9f]")

# Bounds on sizes in metadata, checked before anything is allocated.
MAX_NUMEL = 2**48
MAX_CHUNK_BYTES = 2**31

_METADATA_PLACEHOLDER = "the documents of all folders"
_INDENT = "\n   "
"""Indentation of the documents inside the root's."""
_GROUP = {"zarr_format": 3, "node_type": "group", "attributes": {}}
_BYTES: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C: dict[str, Any] = {"name": "crc32c"}
_PLAIN_CODECS = [_BYTES, _CRC32C]
_FILL_VALUES = {**dict.fromkeys(FLOATING, "NaN"), "complex64": ["NaN", "NaN"], "bool": False}
_UNSUPPORTED_ENCODING = "the array has an encoding that this version does not read"
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 100


def new_save_id() -> str:
    """Return a fresh id for a save: 32 hex digits."""
    return uuid.uuid4().hex


def check_save_id(save_id: str) -> str:
    """Return `save_id`; raises UsageError unless it is 32 hex digits."""
    if not _ID.match(save_id):
        raise UsageError(f"a save's id has 32 lower-case hex digits, got {save_id!r}: use new_save_id()")
    return save_id


def tag_text(tag: str | float) -> str:
    """Return the tag as a string; numbers are formatted by `str`. Raises UsageError for a tag that is empty or contains
    `/`, `..` or control characters."""
    text = tag if isinstance(tag, str) else str(tag)
    if not text or ".." in text or _FORBIDDEN_IN_TAGS.search(text) or not _is_encodable(text):
        raise UsageError(
            f"{tag!r} cannot be a tag: expected any text or number without `/`, `..` and control characters, not empty"
        )
    return text


def step_tag(step: int) -> str:
    """Return the default tag of a checkpoint: `step-00000060`."""
    return f"step-{step:08d}"


def tag_folder(tag: str) -> str:
    """Return the name of the checkpoint `tag`'s folder."""
    return encode_name(tag_text(tag))


def encode_name(name: str) -> str:
    """Return the path component of `name`. See [Note: names on disk]."""
    if not name or not _is_encodable(name):
        raise UsageError(f"{name!r} cannot name a file: expected text that is not empty and has no lone surrogates")
    text = quote(name, safe="=+@,")
    if text.startswith((".", "__")) or text.lower() in _RESERVED:
        text = f"%{ord(text[0]):02X}{text[1:]}"
    if reserved := _WORKING_NAME.match(text):
        dot = len(reserved["folder"])
        text = f"{text[:dot]}%2E{text[dot + 1 :]}"
    if len(text) <= _MAX_COMPONENT_BYTES:
        return text
    head = _PARTIAL_ESCAPE.sub("", text[: _MAX_COMPONENT_BYTES - 33])
    return f"{head}~{hashlib.sha256(name.encode()).hexdigest()[:32]}"


# Called several times for each array of a save.
@lru_cache(maxsize=2**15)
def array_path(name: str) -> str:
    """Return the folder of an array inside a checkpoint: `model/<fqn>`, `optimizer/<slot>/<fqn>`, `buffer/<fqn>`."""
    group, _, name_in_group = name.partition("/")
    if group == MANIFEST_FOLDER:
        raise UsageError(f"array {name!r}: the group `{MANIFEST_FOLDER}` belongs to the format; choose another")
    slot, _, fqn = name_in_group.partition("/") if group == "optimizer" else (name_in_group, "", "")
    return "/".join(encode_name(part) for part in (group, slot, fqn) if part)


def groups_of(path: str) -> list[str]:
    """Return the folders of the groups that contain the array in the folder `path`, the outermost first."""
    return [path[:at] for at, letter in enumerate(path) if letter == "/"]


def shard_file(ndim: int, shard: int) -> str:
    """Return the file name of shard number `shard` of an array stored with `ndim` dimensions: `c`, `c.0` or `c.0.0`."""
    return f"c.{shard}" + ".0" * (ndim - 1) if ndim else "c"


def manifest_file(rank: int) -> str:
    """Return the path of rank `rank`'s manifest inside a checkpoint."""
    return f"{MANIFEST_FOLDER}/rank-{rank:05d}.json"


def working_name(folder: str, kind: str, save_id: str) -> str:
    """Return the name of a temporary file or folder of save `save_id` for the tag folder `folder`."""
    return f"{folder}.{kind}-{save_id}"


def parse_working_name(name: str) -> tuple[str, str, str] | None:
    """Return (tag folder, kind, save id) of a name from `working_name`, None for any other name."""
    match = _WORKING_NAME.match(name)
    return (match["folder"], match["kind"], match["id"]) if match else None


def _is_encodable(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders `h.2` before `h.10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def brief(value: object) -> str:
    """Return a short representation of a value from a file, however large or deeply nested it is."""
    return _BRIEF.repr(value)


def dump_json(document: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Return the bytes of a JSON file of a checkpoint."""
    separators = (",", ": ") if indent else (",", ":")
    return json.dumps(document, indent=indent, separators=separators, allow_nan=False).encode()


def dump_metadata(document: Mapping[str, Any]) -> bytes:
    """Return the bytes of a `zarr.json`."""
    return dump_json(document, indent=1)


def array_document(spec: ArraySpec, grid: Grid, codec: Codec | None = None) -> dict[str, Any]:
    """Return the `zarr.json` of an array on `grid`, whose chunks are compressed with `codec`."""
    row_widths = list(spec.row_shape) if spec.row_numel else [1] * len(spec.row_shape)
    has_rows = bool(spec.stored_shape)
    attributes: dict[str, Any] = {"name": spec.name, "shape": list(spec.shape)}
    if spec.aliases:
        attributes["aliases"] = list(spec.aliases)
    if spec.dtype in FLOAT8:
        attributes["data_type"] = spec.dtype
    sharding = {
        "chunk_shape": [grid.chunk_rows, *shape_of_cols(spec.row_shape, grid.chunk_cols)] if has_rows else [],
        "codecs": _PLAIN_CODECS if codec is None else [_BYTES, codec.document(), _CRC32C],
        "index_codecs": _PLAIN_CODECS,
        "index_location": "start",
    }
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.stored_shape),
        "data_type": "uint8" if spec.dtype in FLOAT8 else spec.dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [grid.shard_rows, *row_widths] if has_rows else []},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        # A lost file must not read as zeros, if the data type has a better fill value.
        "fill_value": _FILL_VALUES.get(spec.dtype, 0),
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {"zstore": attributes},
    }
    return document | ({"dimension_names": list(spec.dims)} if spec.dims else {})


def encode_documents(
    specs: Mapping[str, ArraySpec], grids: Mapping[str, Grid], codec: Codec | None = None
) -> Mapping[str, bytes]:
    """Return the bytes of every `zarr.json` of a checkpoint by folder inside it; the root's is the empty string.

    `codec` compresses the chunks of all arrays. The last results are cached: see [Note: objects of a save].

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
    consolidated = {"kind": "inline", "must_understand": False, "metadata": _METADATA_PLACEHOLDER}
    outline = dump_metadata(_GROUP | {"consolidated_metadata": consolidated}).decode()
    # Every line break is part of the indentation, because JSON strings have none.
    entries = [f"{json.dumps(folder)}: {texts[folder]}".replace("\n", _INDENT) for folder in sorted(texts)]
    whole = ",".join(_INDENT + text for text in entries)
    texts[""] = outline.replace(json.dumps(_METADATA_PLACEHOLDER), f"{{{whole}{_INDENT[:-1]}}}" if whole else "{}")
    return MappingProxyType({folder: text.encode() for folder, text in texts.items()})


def parse_root(document: Mapping[str, Any], path: str) -> dict[str, tuple[str, ArraySpec, Grid, Codec | None]]:
    """Return (folder, spec, grid, codec) of every array by name, from the root's document read from `path`.

    Raises CorruptionError if the document cannot belong to a checkpoint, CheckpointMismatchError for arrays with an
    unsupported grid or encoding.
    """
    consolidated = document.get("consolidated_metadata")
    entries = consolidated.get("metadata") if isinstance(consolidated, dict) else None
    if document.get("zarr_format") != 3 or document.get("node_type") != "group" or not isinstance(entries, dict):
        raise CorruptionError(f"{path} is not a Zarr v3 group with consolidated metadata: the checkpoint is damaged")
    arrays: dict[str, tuple[str, ArraySpec, Grid, Codec | None]] = {}
    groups: set[str] = set()
    for folder, entry in entries.items():
        where = f"{path}, {brief(folder)}"
        if not isinstance(entry, dict):
            raise CorruptionError(f"{where}: the metadata is not an object: the checkpoint is damaged")
        if entry.get("node_type") == "group":
            groups.add(folder)
            continue
        spec, grid, codec = parse_array(entry, where)
        try:
            expected = array_path(spec.name)
        except UsageError as error:
            raise CorruptionError(f"{where}: {error}") from error
        if expected != folder:
            raise CorruptionError(
                f"{where}: array {brief(spec.name)} must be in {brief(expected)}: the metadata was changed"
            )
        arrays[spec.name] = (folder, spec, grid, codec)
    _check_groups(groups, {folder for folder, *_ in arrays.values()}, entries, path)
    return arrays


def _check_groups(groups: set[str], folders: set[str], entries: Mapping[str, Any], path: str) -> None:
    """Raise CorruptionError for groups that contain no array: their names could be any path."""
    parents = {group for folder in folders for group in groups_of(folder)}
    unexpected = sorted(groups - parents) or sorted(parents & folders)
    if unexpected:
        raise CorruptionError(f"{path}: {brief(unexpected[0])} is not a group of its arrays: the metadata was changed")
    for folder in groups:
        if entries[folder] != _GROUP:
            raise CorruptionError(
                f"{path}: the group {brief(folder)} is not one of a checkpoint: the metadata was changed"
            )


def parse_array(document: Mapping[str, Any], where: str) -> tuple[ArraySpec, Grid, Codec | None]:
    """Return spec, grid and codec of an array's document; `where` names it in errors (see `parse_root`)."""
    try:
        attributes = document["attributes"]["zstore"]
        name, dtype = attributes["name"], document["data_type"]
        aliases, dims = attributes.get("aliases", []), document.get("dimension_names", [])
        are_strings = all(isinstance(text, str) for text in (name, dtype, *aliases, *dims))
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptionError(f"{where}: expected an array with `zstore` attributes") from error
    try:
        sharding = document["codecs"][0]["configuration"]
        shapes = document["chunk_grid"]["configuration"]["chunk_shape"], sharding["chunk_shape"]
        codecs = sharding["codecs"]
    except (KeyError, IndexError, TypeError) as error:
        raise CheckpointMismatchError(
            f"{where}: {_UNSUPPORTED_ENCODING} (expected a regular grid of shards with inner chunks): use a newer version"
        ) from error
    if not are_strings:
        raise CorruptionError(
            f"{where}: expected strings as name, data type ({brief(dtype)}), aliases and dimension_names"
        )
    if dtype == "uint8" and attributes.get("data_type") in FLOAT8:
        dtype = attributes["data_type"]
    stored, shape = (
        tuple(_parse_shape(document.get("shape"), f"{where}: shape")),
        tuple(_parse_shape(attributes.get("shape"), f"{where}: true shape")),
    )
    shard_shape, chunk_shape = (
        _parse_shape(shapes[0], f"{where}: shard shape"),
        _parse_shape(shapes[1], f"{where}: chunk shape"),
    )
    keeps_shape = stored == shape and len(shape) not in (1, 2)
    try:
        spec = ArraySpec(
            name=name, shape=shape, dtype=dtype, aliases=tuple(aliases), keeps_shape=keeps_shape, dims=tuple(dims)
        )
        codec = parse_codec(codecs[1]) if isinstance(codecs, list) and len(codecs) == 3 else None
    except CodecError as error:
        raise CheckpointMismatchError(f"{where}: {_UNSUPPORTED_ENCODING} ({error}): use a newer version") from error
    except ValueError as error:
        raise CheckpointMismatchError(f"{where}: {error}") from error
    if stored != spec.stored_shape or not len(stored) == len(shard_shape) == len(chunk_shape):
        raise CorruptionError(
            f"{where}: shape {stored}, shards {shard_shape} and chunks {chunk_shape} do not fit a tensor of shape {spec.shape}"
        )
    rows, *row_widths = shard_shape or [1]
    chunk_rows, *chunk_widths = chunk_shape or [1]
    grid = Grid(spec.rows, spec.row_numel, rows, chunk_rows, math.prod(chunk_widths))
    _check_grid(spec, grid, math.prod(row_widths), where)
    if document != array_document(spec, grid, codec):
        raise CheckpointMismatchError(
            f"{where}: {_UNSUPPORTED_ENCODING} (expected shards of [bytes little, crc32c] chunks, or also zstd between "
            "them, with the index at the start, keys with `.`): use a newer version"
        )
    return spec, grid, codec


def _parse_shape(value: object, what: str) -> list[int]:
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n <= MAX_NUMEL for n in value):
        raise CorruptionError(f"{what}: expected a list of whole numbers from 0 to {MAX_NUMEL}, got {brief(value)}")
    if len(value) > 64 or math.prod(n for n in value if n) > MAX_NUMEL:
        raise CorruptionError(f"{what}: {brief(value)} is larger than any array of a checkpoint")
    return value


def _check_grid(spec: ArraySpec, grid: Grid, row_width: int, where: str) -> None:
    row_numel = max(grid.row_numel, 1)
    is_valid = (
        min(grid.shard_rows, grid.chunk_rows, grid.chunk_cols) >= 1
        and row_width == row_numel
        and grid.shard_rows % grid.chunk_rows == 0
        and row_numel % grid.chunk_cols == 0
        and (grid.chunk_cols == row_numel or grid.chunk_rows == 1)
    )
    if not is_valid:
        raise CheckpointMismatchError(
            f"{where}: shards of {grid.shard_rows} x {row_width} in chunks of {grid.chunk_rows} x {grid.chunk_cols} are "
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
