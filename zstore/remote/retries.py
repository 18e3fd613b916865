"""Trying a request again: networks fail for a while, with many kinds of errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import StorageError, ZstoreError

T = TypeVar("T")

_FINAL = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    NotImplementedError,
    ImportError,
    TypeError,
    AttributeError,
    MemoryError,
    ZstoreError,
)
"""Errors that another try would meet again. All others may pass: file systems raise errors of many packages."""
_MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


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

        Raises FileNotFoundError, IsADirectoryError or NotADirectoryError as they come, StorageError with `what`, `url` and the
        last failure for others.
        """
        pause_s = self.first_pause_s
        for attempt in range(1, self.attempts + 1):
            try:
                return operation()
            except (*_MISSING, ZstoreError):
                raise
            except Exception as error:
                if attempt == self.attempts or isinstance(error, _FINAL) or self.cancelled.is_set():
                    tries = "once" if attempt == 1 else f"{attempt} times"
                    raise StorageError(
                        f"cannot {what} (tried {tries}): {type(error).__name__}: {error}", path=url
                    ) from error
            self.cancelled.wait(pause_s)
            pause_s = min(2 * pause_s, self.most_pause_s)
        raise StorageError(f"cannot {what}: no attempts are allowed", path=url)


PATIENT = Retries(attempts=10)
"""For requests that nobody waits for, such as uploads behind training: over a minute."""
