"""Entries of a state dict of torch.distributed.checkpoint beside tensors, as JSON. Pure.

[Note: values]
Numbers, text and containers of them are kept in the record, exactly: a tuple comes back as a tuple. `bytes` are an array
of uint8. For anything else torch's pickle is kept in an array of uint8, which zstore never unpickles.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.format import MAX_RECORD_BYTES, MAX_RECORD_VALUES
from ..errors import CorruptionError
from .dcp_names import STATE, Names, Path, key_of, path_from_json, paths_of

BYTES = "bytes"
"""An opaque array that is the content of a `bytes` object."""
PICKLE = "pickle"
"""An opaque array that is the output of torch.save for an object."""
_MOST_DEPTH = 24
_BRACKETS_BYTES = 4
_MOST_LETTER_BYTES = 12


class NotPlainError(Exception):
    """A value that JSON cannot express."""


@dataclass
class RecordRoom:
    """The room for values in a record: their number, and about the bytes of their JSON."""

    values: int = MAX_RECORD_VALUES
    nbytes: int = MAX_RECORD_BYTES

    def take(self, value: object) -> None:
        """Count a value, without its content. Raises NotPlainError if there is no room for it."""
        self.values -= 1
        self.nbytes -= _BRACKETS_BYTES
        if isinstance(value, str):
            self.nbytes -= len(value) if value.isascii() else _MOST_LETTER_BYTES * len(value)
        elif isinstance(value, bytes):
            self.nbytes -= 4 * len(value) // 3
        elif isinstance(value, int):
            self.nbytes -= value.bit_length() // 3
        if self.values < 0 or self.nbytes < 0:
            raise NotPlainError("more values than a record has room for")


def encode_value(value: object, room: RecordRoom | None = None) -> Any:
    """Return plain data as JSON: None, bool, int, float, text, bytes, lists, tuples and dicts of them, nothing else.

    Tuples, bytes and dicts with other keys than plain text are objects with one key that begins with `$`. Raises
    NotPlainError; subclasses are not plain, since they would come back as something else, nor are deeply nested ones, or those
    that take more than there is `room` for (then `room` is as before): a small pickle may hold one list a million times.
    """
    room = RecordRoom() if room is None else room
    before = (room.values, room.nbytes)
    try:
        return _encode(value, room, 0)
    except NotPlainError:
        room.values, room.nbytes = before
        raise


def _encode(value: object, room: RecordRoom, depth: int) -> Any:
    room.take(value)
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if depth > _MOST_DEPTH:
        raise NotPlainError(f"nested more than {_MOST_DEPTH} levels deep")
    if isinstance(value, list) and kind is list:
        return [_encode(item, room, depth + 1) for item in value]
    if isinstance(value, tuple) and kind is tuple:
        return {"$tuple": [_encode(item, room, depth + 1) for item in value]}
    if isinstance(value, bytes) and kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, dict) and kind is dict:
        plain = all(type(key) is str and not key.startswith("$") for key in value)
        pairs = [[_encode(key, room, depth + 1), _encode(item, room, depth + 1)] for key, item in value.items()]
        return dict(pairs) if plain else {"$dict": pairs}
    raise NotPlainError(f"a {kind.__module__}.{kind.__qualname__} is not plain data")


def decode_value(value: Any) -> Any:
    """Return the value that `encode_value` was given; raises CorruptionError for anything else."""
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "")
    if not mark.startswith("$"):
        return {key: decode_value(item) for key, item in value.items()}
    inner = value[mark]
    try:
        if mark == "$tuple":
            return tuple(decode_value(item) for item in inner)
        if mark == "$bytes":
            return base64.b64decode(inner, validate=True)
        if mark == "$dict":
            return {decode_value(key): decode_value(item) for key, item in inner}
    except (TypeError, ValueError, binascii.Error) as error:
        raise CorruptionError(f"a value in the record's `{STATE}` is damaged: {error}") from error
    raise CorruptionError(f"a value in the record's `{STATE}` has the unknown type {mark!r:.50}")


@dataclass(kw_only=True)
class DcpState:
    """The part of the record for torch.distributed.checkpoint, under `state["dcp"]`."""

    paths: dict[str, Path]
    """Array -> path in the nested state dict."""
    values: list[tuple[Path, Any]] = field(default_factory=list)
    """Path and `encode_value` of each entry that is plain data."""
    opaque: dict[str, str] = field(default_factory=dict)
    """Array of uint8 -> `BYTES` or `PICKLE`."""

    @classmethod
    def of(cls, state: Mapping[str, Any], arrays: Iterable[str]) -> DcpState:
        """Return that of a checkpoint with this `record.state`, which DCP need not have written.

        Raises CorruptionError if it is damaged.
        """
        document = state.get(STATE, {})
        if not isinstance(document, dict):
            raise CorruptionError(f"expected an object as the record's `{STATE}`, got {document!r:.100}")
        values, opaque = document.get("values", []), document.get("opaque", {})
        whole = isinstance(values, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in values)
        if not whole or not isinstance(opaque, dict) or not set(opaque.values()) <= {BYTES, PICKLE}:
            raise CorruptionError(f"the values in the record's `{STATE}` are damaged")
        return cls(
            paths=paths_of(document, arrays),
            values=[(path_from_json(path), value) for path, value in values],
            opaque=opaque,
        )


def make_document(names: Names, values: Iterable[tuple[Path, Any]], opaque: Mapping[str, str]) -> dict[str, Any]:
    """Return the JSON from which `DcpState.of` restores the same; the paths of opaque arrays are in `names`."""
    ordered = sorted(([list(path), value] for path, value in values), key=lambda pair: key_of(tuple(pair[0])))
    return names.document() | {"values": ordered, "opaque": dict(sorted(opaque.items()))}
