"""Open checkpoints, shared by the requests that read values: one pool of buffers, and metadata within a bound.

[Note: memory of reading]
All reading shares one pool; each of the `NUM_HEAVY` requests that run at a time reads ahead in half as much beside it, and
computes in blocks of about 1 MiB a thread. A checkpoint whose metadata is larger alone than the cache for all is opened
for its request only. See [Note: memory of the service] in `zstore.serve.memory`.
"""

from __future__ import annotations

import contextlib
import threading

from ...checkpoint.catalog import TagInfo
from ...checkpoint.reader import CheckpointReader
from ...closing import Closing
from ...io.shards import IoResources, open_resources
from ..cache import Cache
from ..memory import Memory

NUM_HEAVY = 2
"""Requests that read values at a time; others wait."""
_NUM_THREADS = 8
_ARRAY_BYTES = 2_000
"""About the bytes of an array's metadata in memory."""


class Readers(Closing):
    """Cached readers of checkpoints. Usable from any thread."""

    def __init__(self, memory: Memory) -> None:
        self._pool_bytes = memory.pool_bytes
        self._readers: Cache[tuple[str, str], CheckpointReader] = Cache(
            memory.metadata_bytes // _ARRAY_BYTES, cost=lambda reader: len(reader.arrays)
        )
        self._ends = contextlib.ExitStack()
        self._resources: IoResources | None = None
        self._lock = threading.Lock()

    def open(self, info: TagInfo) -> CheckpointReader:
        """Return a reader of a checkpoint; it needs no closing. Raises like `CheckpointReader`."""
        key = (info.location, info.record.id)
        if (cached := self._readers.get(key)) is not None:
            return cached
        with self._lock:
            if self._resources is None:
                opening = open_resources(pool_bytes=self._pool_bytes, num_threads=_NUM_THREADS)
                self._resources = self._ends.enter_context(opening)
        reader = CheckpointReader(info, self._resources)
        # Parsed metadata as JSON is most of a reader's memory, and only verifying asks for it.
        reader.documents.clear()
        return self._readers.put(key, reader)

    def forget(self, info: TagInfo) -> None:
        """Open the checkpoint again the next time, for instance after its files were found damaged."""
        self._readers.remove((info.location, info.record.id))

    def close(self) -> None:
        """End the threads; reads under way fail."""
        self._readers.clear()
        with self._lock:
            self._ends.close()
