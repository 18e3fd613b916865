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

from ..errors import CorruptionError
from .dcp_names import STATE, Names, Path, key_of, path_from_json, paths_of

BYTES = "bytes"
"""An opaque array that is the content of a `bytes` object."""
PICKLE = "pickle"
"""An opaque array that is the output of torch.save for an object."""
_MOST_DEPTH = 24
_MOST_ENTRY_BYTES = 1024 * 1024
"""About the most that the JSON of one entry may take."""
_VALUE_BYTES = 4
_MOST_BITS = 10_000
"""Of a whole number: Python writes and reads no more digits than 4300."""


class NotPlainError(Exception):
    """A value that JSON cannot express."""


def encode_value(value: object) -> Any:
    """Return plain data as JSON: None, bool, int, float, text, bytes, lists, tuples and dicts of them, nothing else.

    Tuples, bytes and dicts with other keys than plain text are objects with one key that begins with `$`. Raises
    NotPlainError; subclasses are not plain, since they would come back as something else, nor is what is nested deeply or
    takes megabytes: a small pickle may hold one list a million times.
    """
    return _Encoder().encode(value, 0)


class _Encoder:
    def __init__(self) -> None:
        self._left_bytes = _MOST_ENTRY_BYTES

    def encode(self, value: object, depth: int) -> Any:
        kind = type(value)
        self._left_bytes -= _VALUE_BYTES + (len(value) if isinstance(value, str | bytes) else 0)
        endless = isinstance(value, int) and value.bit_length() > _MOST_BITS
        if self._left_bytes < 0 or depth > _MOST_DEPTH or endless:
            raise NotPlainError("too large, or too deeply nested, for the record")
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, list) and kind is list:
            return [self.encode(item, depth + 1) for item in value]
        if isinstance(value, tuple) and kind is tuple:
            return {"$tuple": [self.encode(item, depth + 1) for item in value]}
        if isinstance(value, bytes) and kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, dict) and kind is dict:
            plain = all(type(key) is str and not key.startswith("$") for key in value)
            pairs = [[self.encode(key, depth + 1), self.encode(item, depth + 1)] for key, item in value.items()]
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
