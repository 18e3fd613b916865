"""URLs for messages, and their storage options. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from ..errors import UsageError

_PASSWORD = re.compile(r"(://[^/@:]*):[^/@]*@")


def shown(url: str) -> str:
    """Return the URL for messages: without a password."""
    return _PASSWORD.sub(r"\1:***@", url)


def parse_options(words: Iterable[str]) -> dict[str, Any]:
    """Return the storage options in words like `key=value`; a value that is JSON, such as `true` or `{"a": 1}`, is
    parsed, anything else is text.

    Raises UsageError for other words.
    """
    options: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not key or not equals:
            # The word may hold a secret: it is not repeated.
            raise UsageError(f"a storage option is written key=value, got one with {key[:20]!r} and no value")
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    return options
