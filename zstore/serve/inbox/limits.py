"""How many bodies the service reads at a time, so that its memory stays within bounds."""

from __future__ import annotations

import asyncio

_MOST_FILES = 32
"""Files of uploads that are read at a time, with about 2 MiB each; others wait with their connections."""


class UploadLimits:
    """Taken by requests with `async with`."""

    def __init__(self) -> None:
        self.files = asyncio.Semaphore(_MOST_FILES)
        self.large = asyncio.Semaphore(1)
        """For JSON of over a megabyte, and the objects that are made of it."""
