"""URLs for messages, their storage options, and requests that are tried again."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import StorageError, UsageError, ZstoreError

T = TypeVar("T")

_PASSWORD = re.compile(r"(://[^/@:]*):[^/@]*@")
MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""Errors of a file that is not there, or is a folder."""
_FINAL = (FileExistsError, PermissionError, NotImplementedError, ImportError, TypeError, AttributeError, MemoryError)
"""Errors that another try would meet again. All others may pass: file systems raise errors of many packages."""


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
            # It may hold a secret.
            raise UsageError(f"a storage option is written key=value, got one with {key[:20]!r} and no value")
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    return options


@dataclass(frozen=True, kw_only=True)
class Retries:
    """How often a request is tried, and the pauses in between, longer each time."""

    attempts: int = 6
    first_pause_s: float = 0.2
    most_pause_s: float = 20.0
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Once set, a failure is final and pauses end."""

    def run(self, operation: Callable[[], T], what: str, url: str) -> T:
        """Return what `operation` returns, tried again if it fails.

        Raises FileNotFoundError, IsADirectoryError, NotADirectoryError and zstore's errors as they come, StorageError with
        `what`, `url` and the last failure for others.
        """
        pause_s = self.first_pause_s
        attempt = 0
        while True:
            attempt += 1
            try:
                return operation()
            except (*MISSING, ZstoreError):
                raise
            except Exception as error:
                if attempt >= self.attempts or isinstance(error, _FINAL) or self.cancelled.is_set():
                    tries = "once" if attempt == 1 else f"{attempt} times"
                    raise StorageError(
                        f"cannot {what} (tried {tries}): {type(error).__name__}: {error}", path=url
                    ) from error
            self.cancelled.wait(pause_s)
            pause_s = min(2 * pause_s, self.most_pause_s)


PATIENT = Retries(attempts=10)
"""For requests that nobody waits for, such as uploads behind training: over a minute."""
