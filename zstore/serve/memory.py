"""How the service divides its memory.

[Note: memory of the service]
`Settings.memory_bytes` is divided once, here:

    1/4     files on their way to clients
    1/4     weights on their way to clients
    1/8     metadata of open checkpoints
    1/8     the pool of buffers of all requests that read values, 8 to 64 MiB
    1/8     reading ahead by the two of these that run at a time
    2/16    the pools of the two verifications that run at a time, 8 to 32 MiB each

Uploads are bounded by how many bodies are read at a time (`service`), answers of JSON by the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1024 * 1024
_LEAST_POOL_BYTES = 8 * _MIB
_MOST_POOL_BYTES = 64 * _MIB


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of each part of the service. See [Note: memory of the service]."""

    files_bytes: int
    weights_bytes: int
    metadata_bytes: int
    pool_bytes: int
    """Of the pool that requests share."""
    verification_bytes: int
    """Of each verification."""

    @classmethod
    def divide(cls, memory_bytes: int) -> Memory:
        """Return the parts of so much memory."""
        return cls(
            files_bytes=memory_bytes // 4,
            weights_bytes=memory_bytes // 4,
            metadata_bytes=memory_bytes // 8,
            pool_bytes=max(_LEAST_POOL_BYTES, min(_MOST_POOL_BYTES, memory_bytes // 8)),
            verification_bytes=max(_LEAST_POOL_BYTES, min(_MOST_POOL_BYTES // 2, memory_bytes // 16)),
        )
