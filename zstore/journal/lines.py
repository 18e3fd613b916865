"""Lines of a journal: an object of JSON each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

Record = dict[str, Any]


def _other(value: Any) -> Any:
    return value() if callable(value) else str(value)


_STRICT = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False, default=_other)


def encode(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of JSON, its newline included.

    Values that are functions are called for theirs. Numbers that are not finite become null and `not_finite` says by the
    names of their keys what they were (nan, inf, -inf), and values of no JSON type become their text.
    """
    try:
        text = _STRICT.encode(record)
    except ValueError:
        other: dict[str, str] = {}
        text = _STRICT.encode({**_finite(record, other), "not_finite": other})
    return text.encode() + b"\n"


def decode(line: bytes | str) -> Record | None:
    """Return the record in a line; None for any other line, as when something else wrote into the file."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("kind"), str) else None


def decode_lines(data: bytes) -> Iterator[Record]:
    """Yield the lines of a part of a journal that are records."""
    for text in data.decode("utf-8", "replace").split("\n"):
        if text and (line := decode(text)) is not None:
            yield line


def _finite(value: Any, other: dict[str, str], key: str = "") -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        other[key] = str(value)
        return None
    if isinstance(value, Mapping):
        return {str(name): _finite(item, other, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, other, key) for item in value]
    return _finite(value(), other, key) if callable(value) else value
