"""How commands open a checkpoint: from a path or a URL, within the memory that they were given. No torch."""

from __future__ import annotations

import contextlib
import json as json_module
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zstore.checkpoint import ArraySource, CheckpointReader

    from .progress import Progress

MIB = 1024 * 1024
DEFAULT_MEMORY_BYTES = 256 * MIB
LEAST_MEMORY_BYTES = 64 * MIB
_BESIDE_BYTES = 32 * MIB
"""Kept free for blocks of output files, metadata and what Python makes on its way."""
_MOST_POOL_BYTES = 64 * MIB
_ARRAY_BYTES, _CHUNK_BYTES = 10_000, 100
"""What the metadata of an array, and the checksum of a chunk, take in memory: measured, and rounded up."""
_REMOTE_THREADS = 12


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every command on checkpoints."""

    json: bool = False
    """Print one JSON object on stdout in place of text."""
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    """What the process may take beside what the interpreter and its modules have. Metadata is counted in, but the default
    gives way to it."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    """For the file system of a URL."""
    num_pools: int = 1
    """Pools that share the memory."""

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool that transfers use; reading ahead takes half of that beside it."""
        return min(_MOST_POOL_BYTES, (self.memory_bytes - _BESIDE_BYTES) // (3 * self.num_pools))

    def shared_by(self, num_pools: int) -> Common:
        """Return the options for each of several checkpoints that are open at once."""
        return replace(self, num_pools=num_pools)


DEFAULTS = Common()


@contextlib.contextmanager
def open_location(
    location: str | os.PathLike[str], common: Common = DEFAULTS, tag: str | None = None
) -> Iterator[ArraySource]:
    """Open whatever `location` means for the length of a `with` block; see `zstore.sources.open_source`."""
    from zstore.checkpoint.source import NUM_THREADS
    from zstore.remote import is_url
    from zstore.shardio import open_resources
    from zstore.sources import open_source

    # Requests over a network take tens of milliseconds each, so more are under way.
    num_threads = _REMOTE_THREADS if is_url(location) else NUM_THREADS
    with (
        open_resources(pool_bytes=common.pool_bytes, num_threads=num_threads) as resources,
        open_source(location, tag, resources=resources, storage_options=common.storage_options) as source,
    ):
        _check_memory(source, common)
        yield source


def _check_memory(source: ArraySource, common: Common) -> None:
    """Raise BudgetError where a limit that was asked for does not hold the metadata; the default one then gives way."""
    from zstore.errors import BudgetError

    num_chunks = sum(array.grid.num_shards * array.grid.chunks_per_shard for array in source.arrays.values())
    metadata_bytes = len(source.arrays) * _ARRAY_BYTES + (num_chunks * _CHUNK_BYTES if source.record.id else 0)
    least = LEAST_MEMORY_BYTES + common.num_pools * max(0, metadata_bytes - _BESIDE_BYTES // 4)
    if common.memory_bytes < least and common.memory_bytes != DEFAULT_MEMORY_BYTES:
        raise BudgetError(
            f"{source.location} has {len(source.arrays)} arrays, whose metadata takes about {metadata_bytes} bytes: give "
            f"`--memory {-(-least // MIB)}MiB` or more"
        )


def own_reader(source: ArraySource, command: str) -> CheckpointReader:
    """Return `source` as a reader of zstore's own checkpoints; raises UsageError that says what `command` misses else."""
    from zstore.checkpoint import CheckpointReader
    from zstore.errors import UsageError

    if isinstance(source, CheckpointReader):
        return source
    raise UsageError(
        f"zstore {command} compares bytes with the checksums of a zstore checkpoint: {source.location} is "
        f"{source.kind}, which has none to compare; `zstore convert` makes a checkpoint that has"
    )


def reading(source: ArraySource, progress: Progress) -> dict[str, int]:
    """Say what was read of a checkpoint of zstore's for what was asked for, and return it for `--json`."""
    from zstore.checkpoint import CheckpointReader

    if not isinstance(source, CheckpointReader):
        return {}
    done = source.reading()
    progress.say(done.text())
    return asdict(done)


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    print(json_module.dumps(document, indent=2))
