"""zstore's own JSON files of a checkpoint: the commit record and the ranks' manifests.

[Note: JSON state]
The engine's state in the record and in a manifest is JSON: objects with string keys, lists, strings, integers, floats,
true, false, null. JSON has no NaN or infinity: such a float is the object `{"$float": "nan" | "inf" | "-inf"}`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from ..errors import CheckpointMismatchError, CorruptionError, UsageError, storage_error
from ..io.shards import ShardSummary
from .layout import METADATA_FILE, brief, check_save_id, dump_json, manifest_file, tag_folder

FORMAT_VERSION = 1
RECORD_FORMAT = "zstore checkpoint"
MANIFEST_FORMAT = "zstore manifest"
COMPLETE = "complete"
ABSENT_KEY = "frozen_left_out"
"""Key of a record's state: names of the model's parameters that the checkpoint omits."""
LATEST_KEY = "latest"
"""Key of a record's state: false in a checkpoint that is loaded only by its tag."""

MAX_JSON_BYTES = 256 * 1024 * 1024
"""Larger JSON files are not read."""
MAX_JSON_VALUES = 2**24
"""JSON files with more values are not parsed, because even a small file could take much memory."""
MAX_RECORD_BYTES = 64 * 1024 * 1024
MAX_RECORD_VALUES = 2**20
MAX_RANKS = 2**20
_MAX_DEPTH = 100
_SHARDS = b',"shards":['
"""The beginning of a manifest's list of shards, its last key. Inside a JSON string the quotes would be escaped."""
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One rank's part of a checkpoint, in the order of the file. The rank writes it last."""

    id: str
    rank: int
    world_size: int
    outcome: str
    """`complete`, or `failed: ` and the reason."""
    layout: str = ""
    """SHA-256, hex, of the arrays and grids of which the rank stored all its shards."""
    rank_state: Mapping[str, Any] = field(default_factory=dict)
    """JSON state of this rank, such as the states of its random number generators."""
    shards: tuple[ShardSummary, ...] = ()

    def encode(self) -> bytes:
        """Return the file's bytes."""
        head = {"format": MANIFEST_FORMAT, "version": FORMAT_VERSION, **vars(self)}
        document = head | {"rank_state": encode_state(self.rank_state, "rank_state"), "shards": []}
        # Entry by entry: see [Note: objects of a save].
        return dump_json(document)[:-2] + b",".join(_encode_entry(entry) for entry in self.shards) + b"]}"

    @classmethod
    def decode_head(cls, data: bytes, path: str) -> Manifest:
        """Return a manifest from `encode` without its shards, which are most of it; see `decode`."""
        head, found, _ = data.rpartition(_SHARDS)
        return cls.decode(head + _SHARDS + b"]}" if found else data, path)

    @staticmethod
    def sum_bytes(data: bytes, *, linked: bool) -> int:
        """Return the bytes of the linked shard files, or of the others, without decoding the manifest."""
        sizes = rb'"bytes":(\d+),"linked":' + (b"true" if linked else b"false")
        return sum(map(int, re.findall(sizes, data.rpartition(_SHARDS)[2])))

    @classmethod
    def decode(cls, data: bytes, path: str, max_values: int = MAX_JSON_VALUES) -> Manifest:
        """Return the manifest in `data`, which was read from `path`. Raises CorruptionError for anything else."""
        document = parse_json(data, path, max_values)
        _check_kind(document, MANIFEST_FORMAT, path)
        shards = _get(document, "shards", list, path)
        return cls(
            id=_get(document, "id", str, path),
            rank=_get_count(document, "rank", MAX_RANKS, path),
            world_size=_get_count(document, "world_size", MAX_RANKS, path),
            outcome=_get(document, "outcome", str, path),
            shards=tuple(_decode_entry(entry, path) for entry in shards),
            rank_state=decode_state(_get(document, "rank_state", dict, path)),
            layout=_get({"layout": "", **document}, "layout", str, path),
        )


def _encode_entry(entry: ShardSummary) -> bytes:
    return dump_json(
        {
            "array": entry.array,
            "shard": entry.shard,
            "bytes": entry.file_bytes,
            "linked": entry.linked,
            "crc32c": "".join(f"{crc:08x}" for crc in entry.crcs),
        }
    )


def _decode_entry(entry: object, path: str) -> ShardSummary:
    if not isinstance(entry, dict):
        raise CorruptionError(f"{path}: expected an object for every shard")
    text = _get(entry, "crc32c", str, path)
    try:
        raw = bytes.fromhex(text)
    except ValueError as error:
        raise CorruptionError(f"{path}: crc32c is not a string of hexadecimal digits") from error
    if len(raw) % 4 or len(raw) * 2 != len(text):
        raise CorruptionError(f"{path}: crc32c is not a string of 8-digit checksums")
    return ShardSummary(
        array=_get(entry, "array", str, path),
        shard=_get_count(entry, "shard", MAX_RANKS, path),
        file_bytes=_get_count(entry, "bytes", 2**63, path),
        crcs=tuple(int.from_bytes(raw[i : i + 4], "big") for i in range(0, len(raw), 4)),
        linked=_get(entry, "linked", bool, path),
    )


@dataclass(frozen=True, kw_only=True)
class Record:
    """The commit record, `zstore.json`, in the order of the file: a folder without a valid one is not a checkpoint."""

    id: str
    """Id of the save that wrote the checkpoint."""
    tag: str
    step: int
    world_size: int
    """Ranks that the arrays are laid out for; each has a manifest."""
    training_world_size: int
    """Ranks of the run that saved the state; if it has been resharded, `world_size` differs, and ranks have no states."""
    run: str = ""
    """Id of the training run, kept across resumes; retention deletes only checkpoints of its own run."""
    committed_ns: int = 0
    """Time of the commit, nanoseconds since 1970; later than the checkpoint that `latest` named before."""
    metadata_sha256: str
    """SHA-256 of the root's `zarr.json`, hex."""
    manifest_sha256: tuple[str, ...]
    """SHA-256 of each rank's manifest, hex, by rank."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """JSON state of the whole run: counters, scheduler, loss scale, position in the data, client state."""

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of the root's metadata and of each rank's manifest, hex, by file."""
        ranks = enumerate(self.manifest_sha256)
        return {METADATA_FILE: self.metadata_sha256} | {manifest_file(rank): digest for rank, digest in ranks}

    @property
    def absent_parameters(self) -> list[str]:
        """Frozen parameters that the save omitted on request."""
        names = self.state.get(ABSENT_KEY)
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    @property
    def is_latest(self) -> bool:
        """Whether the checkpoint may count as the newest in its folder; its save can exclude that."""
        return self.state.get(LATEST_KEY) is not False

    def encode(self) -> bytes:
        """Return the file's bytes. Raises UsageError that names the key of a state that is not JSON."""
        head = {"format": RECORD_FORMAT, "version": FORMAT_VERSION, **vars(self)}
        document = head | {"state": encode_state(self.state, "state")}
        data = dump_json(document | {"digest": _digest(document)}, indent=1)
        if len(data) > MAX_RECORD_BYTES or _num_values(data) > MAX_RECORD_VALUES:
            raise UsageError(
                f"the state of a checkpoint is at most {MAX_RECORD_BYTES} bytes and about {MAX_RECORD_VALUES} values of JSON, "
                f"this has {len(data)} and about {_num_values(data)}: store long lists as tensors"
            )
        return data

    @classmethod
    def decode(cls, data: bytes, path: str) -> Record:
        """Return the record in `data`, which was read from `path`. Raises CorruptionError if it is damaged,
        CheckpointMismatchError if a newer version wrote it."""
        document = parse_json(data, path, max_values=MAX_RECORD_VALUES)
        _check_kind(document, RECORD_FORMAT, path)
        if document.pop("digest", None) != _digest(document):
            raise CorruptionError(f"{path} fails its digest: the record is damaged; restore it from another copy")
        world_size = _get_count(document, "world_size", MAX_RANKS, path)
        digests = _get(document, "manifest_sha256", list, path)
        if len(digests) != world_size or not all(isinstance(d, str) for d in digests):
            raise CorruptionError(f"{path}: expected the digests of {world_size} manifests, got {len(digests)}")
        tag, save_id = _get(document, "tag", str, path), _get(document, "id", str, path)
        try:
            tag_folder(tag)
            check_save_id(save_id)
        except UsageError as error:
            raise CorruptionError(f"{path}: {error}") from error
        return cls(
            id=save_id,
            tag=tag,
            step=_get_count(document, "step", 2**63, path),
            world_size=world_size,
            training_world_size=_get_count(document, "training_world_size", MAX_RANKS, path),
            run=_get(document, "run", str, path),
            committed_ns=_get_count(document, "committed_ns", 2**63, path),
            metadata_sha256=_get(document, "metadata_sha256", str, path),
            manifest_sha256=tuple(digests),
            state=decode_state(_get(document, "state", dict, path)),
        )


def sha256(data: bytes) -> str:
    """Return the SHA-256 of `data`, hex."""
    return hashlib.sha256(data).hexdigest()


def encode_state(value: Any, where: str) -> Any:
    """Return `value` as plain JSON. See [Note: JSON state]. Raises UsageError that names the place, such as
    `client_state['best'][0]`, of a value that JSON cannot hold."""
    return _encode(value, where, 0)


def plain_value(value: Any) -> Any:
    """Return values that are common in training loops as JSON values: a numpy scalar as a number, a path as a string, an
    `argparse.Namespace` as a dict; any other value unchanged."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Namespace):
        return vars(value)
    return str(value) if isinstance(value, PurePath) else value


def _encode(value: Any, where: str, depth: int) -> Any:
    value = plain_value(value)
    if depth > _MAX_DEPTH:
        raise UsageError(f"{where[:200]}: nested more than {_MAX_DEPTH} levels deep; flatten it")
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float, str)):  # subclasses, such as enums and numpy's float64, become the plain type
        return int(value) if isinstance(value, int) else float(value) if isinstance(value, float) else str(value)
    if isinstance(value, (list, tuple)):
        return [_encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        raise UsageError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored: expected JSON "
            "(text, numbers, true, false, null, lists, objects with text keys); convert it or leave it out"
        )
    if list(value) == ["$float"]:
        raise UsageError(f"{where}: an object whose only key is `$float` cannot be stored; rename the key")
    for key in value:
        if not isinstance(key, str):
            raise UsageError(f"{where}: key {key!r} is a {type(key).__name__}; JSON objects have text keys: convert it")
    return {str(key): _encode(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}


def decode_state(value: Any, depth: int = 0) -> Any:
    """Return the value that `encode_state` encoded; tuples become lists. Raises CorruptionError if it is too deep."""
    if depth > _MAX_DEPTH + 2:
        raise CorruptionError(f"state is nested more than {_MAX_DEPTH} levels deep: the file is damaged")
    if isinstance(value, dict):
        if list(value) == ["$float"] and isinstance(value["$float"], str) and value["$float"] in _FLOATS:
            return _FLOATS[value["$float"]]
        return {key: decode_state(item, depth + 1) for key, item in value.items()}
    return [decode_state(item, depth + 1) for item in value] if isinstance(value, list) else value


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the bytes of a JSON file of a checkpoint.

    Raises FileNotFoundError or NotADirectoryError if it is missing, CorruptionError if it has more than `max_bytes` or is
    not a regular file, StorageError if it cannot be read.
    """
    # A pipe would block its reader forever; a link could point anywhere.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        if path.is_symlink():
            raise CorruptionError(f"{path} is a symbolic link, expected a file: it is not part of a checkpoint")
        with os.fdopen(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CorruptionError(f"{path} is not a regular file: it is not part of a checkpoint")
            # By the file's size: reading up to the limit would reserve that much memory in each of many threads.
            data = file.read(status.st_size + 1) if status.st_size <= max_bytes else None
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise storage_error(error, "cannot read the file", path=str(path)) from error
    if data is None or len(data) > max_bytes:
        raise CorruptionError(f"{path} has more than {max_bytes} bytes: it is not a checkpoint file")
    return data


def parse_json(data: bytes, path: str, max_values: int = MAX_JSON_VALUES) -> dict[str, Any]:
    """Return the JSON object in `data`, which was read from `path`; raises CorruptionError for anything else."""
    if _num_values(data) > max_values:
        raise CorruptionError(f"{path} has more than {max_values} values: it is not a checkpoint file")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{path} is not JSON ({error}): it is damaged; restore it from another copy") from error
    if not isinstance(document, dict):
        raise CorruptionError(f"{path}: expected a JSON object, got a {type(document).__name__}")
    return document


def _num_values(data: bytes) -> int:
    """Return an upper bound of the number of values in JSON."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def _digest(document: Mapping[str, Any]) -> str:
    # JSON of the other keys, sorted, without spaces, non-ASCII escaped.
    try:
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    except (ValueError, RecursionError) as error:
        raise CorruptionError("the record is nested too deeply") from error
    return f"sha256:{sha256(text.encode())}"


def _check_kind(document: Mapping[str, Any], kind: str, path: str) -> None:
    if document.get("format") != kind:
        raise CorruptionError(f"{path}: expected format {kind!r}, got {brief(document.get('format'))}")
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise CorruptionError(f"{path}: expected a format version, got {brief(version)}")
    if version > FORMAT_VERSION:
        raise CheckpointMismatchError(
            f"{path} has format version {brief(version)}; this zstore reads up to {FORMAT_VERSION}: install a newer one"
        )


def _get(document: Mapping[str, Any], key: str, kind: type, path: str) -> Any:
    value = document.get(key)
    if type(value) is not kind:
        raise CorruptionError(f"{path}: expected {key!r} to be a {kind.__name__}, got {brief(value)}")
    return value


def _get_count(document: Mapping[str, Any], key: str, maximum: int, path: str) -> int:
    value: int = _get(document, key, int, path)
    if not 0 <= value <= maximum:
        raise CorruptionError(f"{path}: expected {key!r} to be from 0 to {maximum}, got {brief(value)}")
    return value
