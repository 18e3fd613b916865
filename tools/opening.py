"""How commands open a checkpoint: from a path or a URL, within the memory that they were given. No torch."""

from __future__ import annotations

import contextlib
import json as json_module
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zstore.checkpoint import ArraySource, CheckpointReader

MIB = 1024 * 1024
DEFAULT_MEMORY_BYTES = 256 * MIB
LEAST_MEMORY_BYTES = 64 * MIB
_BESIDE_BYTES = 32 * MIB
"""Kept free for blocks of output files, metadata and what Python makes on its way."""
_MOST_POOL_BYTES = 64 * MIB


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every command on checkpoints."""

    json: bool = False
    """Print one JSON object on stdout in place of text."""
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    """What the process may take beside what the interpreter and its modules have."""
    storage_options: Mapping[str, str] = field(default_factory=dict)
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
    from zstore.shardio import open_resources
    from zstore.sources import open_source

    options: dict[str, Any] = {"storage_options": common.storage_options} if common.storage_options else {}
    with (
        open_resources(pool_bytes=common.pool_bytes) as resources,
        open_source(location, tag, resources=resources, **options) as source,
    ):
        yield source


def own_reader(source: ArraySource, command: str) -> CheckpointReader:
    """Return `source` as a reader of zstore's own checkpoints; raises UsageError that says what `command` misses else."""
    from zstore.checkpoint import CheckpointReader
    from zstore.errors import UsageError

    if isinstance(source, CheckpointReader):
        return source
    raise UsageError(
        f"zstore {command} compares bytes with the checksums of a zstore checkpoint on a local disk: {source.location} is "
        f"{source.kind}, which has none to compare; `zstore convert` makes a checkpoint that has"
    )


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    print(json_module.dumps(document, indent=2))
