"""Open checkpoints, shared by the requests that read values: one pool of buffers, and metadata within a bound.

[Note: memory of the service]
`Settings.memory_bytes` is divided once, here:

    1/2     files and weights on their way to clients, see [Note: memory of downloads]
    1/8     metadata of open checkpoints
    1/8     the pool of buffers of all requests that read values, 8 to 64 MiB
    1/8     reading ahead by the two of these that run at a time
    2/16    the pools of the two verifications that run at a time, 8 to 32 MiB each

Uploads are bounded by how many bodies are read at a time (`service`), answers of JSON by the number of threads.

[Note: memory of reading]
All reading shares one pool; each of the `NUM_HEAVY` requests that run at a time reads ahead in half as much beside it, and
computes in blocks of about 1 MiB a thread. A checkpoint whose metadata is larger alone than the cache for all is opened
for its request only.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass

from ...checkpoint.catalog import TagInfo
from ...checkpoint.reader import CheckpointReader
from ...io.closing import Closing
from ...io.shards import IoResources, open_resources
from ..cache import Cache

NUM_HEAVY = 2
"""Requests that read values at a time; others wait."""
_NUM_THREADS = 8
_ARRAY_BYTES = 2_000
"""About the bytes of an array's metadata in memory."""
_MIB = 1024 * 1024
_LEAST_POOL_BYTES = 8 * _MIB
_MOST_POOL_BYTES = 64 * _MIB


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of each part of the service. See [Note: memory of the service]."""

    downloads_bytes: int
    metadata_bytes: int
    pool_bytes: int
    """Of the pool that requests share."""
    verification_bytes: int
    """Of each verification."""

    @classmethod
    def divide(cls, memory_bytes: int) -> Memory:
        """Return the parts of so much memory."""
        return cls(
            downloads_bytes=memory_bytes // 2,
            metadata_bytes=memory_bytes // 8,
            pool_bytes=max(_LEAST_POOL_BYTES, min(_MOST_POOL_BYTES, memory_bytes // 8)),
            verification_bytes=max(_LEAST_POOL_BYTES, min(_MOST_POOL_BYTES // 2, memory_bytes // 16)),
        )


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
