"""Lines of a journal: an object of JSON each."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

Record = dict[str, Any]


def _other(value: Any) -> Any:
    return value() if callable(value) else str(value)


_STRICT = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False, default=_other)


def encode(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of JSON, its newline included.

    Values that are functions are called for theirs. Numbers that are not finite become null, and values of no JSON type their
    text.
    """
    try:
        text = _STRICT.encode(record)
    except ValueError:
        text = _STRICT.encode(_finite(record))
    return text.encode() + b"\n"


def decode(line: bytes | str) -> Record | None:
    """Return the record in a line; None for any other line, as when something else wrote into the file."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("kind"), str) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return _finite(value()) if callable(value) else value
