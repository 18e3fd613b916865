"""Opens a checkpoint for a command, from a path or a URL, within a memory limit, and reports the bytes read. No torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from zstore.checkpoint import NUM_THREADS, ArraySource
from zstore.errors import BudgetError, listed
from zstore.io import is_url, map_large_blocks, open_resources
from zstore.open.sources import open_source
from zstore.weights.companions import Companions

from .options import Json, StorageOption, parse_options, parse_size
from .printing import ProgressBar, print_json

MIB = 1024 * 1024
DEFAULT_MEMORY_BYTES = 256 * MIB
LEAST_MEMORY_BYTES = 64 * MIB
BESIDE_BYTES = 32 * MIB
"""Kept free for blocks of output files, metadata and temporary Python objects."""
_MOST_POOL_BYTES = 64 * MIB
_ARRAY_BYTES, _CHUNK_BYTES = 10_000, 100
"""Bytes of memory for the metadata of an array, and for the checksum of a chunk: measured, and rounded up."""
_REMOTE_THREADS = 12
_MOST_NAMED = 12


def parse_memory(text: str | int) -> int:
    """Bytes in a size that is enough for a command; for a smaller one `typer.BadParameter` names the minimum."""
    num_bytes = parse_size(text)
    if num_bytes < LEAST_MEMORY_BYTES:
        raise typer.BadParameter(f"expected at least {LEAST_MEMORY_BYTES // MIB}MiB, got {text!r}")
    return num_bytes


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Options of commands that list checkpoints."""

    json: Json = False
    storage_option: StorageOption = None

    def __post_init__(self) -> None:
        """Refuse a storage option that is not `key=value`, before anything is opened."""
        _ = self.storage_options

    @property
    def storage_options(self) -> dict[str, Any]:
        """Return the options for the file system of a URL."""
        return parse_options(self.storage_option or ())


@dataclass(frozen=True, kw_only=True)
class Common(Listing):
    """Options of commands that read checkpoints."""

    memory_bytes: Annotated[
        int | None,
        typer.Option(
            "--memory",
            help="Limit on memory, in addition to that of Python and its modules.",
            metavar="SIZE",
            parser=parse_memory,
            show_default=f"{DEFAULT_MEMORY_BYTES // MIB}MiB",
        ),
    ] = None
    """Metadata counts. None: `DEFAULT_MEMORY_BYTES`, which large metadata may exceed; a limit that was given is kept or
    refused."""
    num_pools: int = 1
    """Pools that share the memory."""

    @property
    def free_bytes(self) -> int:
        """Bytes of the memory that are left for the data of a command."""
        return (self.memory_bytes or DEFAULT_MEMORY_BYTES) - BESIDE_BYTES

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool that transfers use; reading ahead takes half of that beside it."""
        return min(_MOST_POOL_BYTES, self.free_bytes // (3 * self.num_pools))


DEFAULTS = Common()


@contextlib.contextmanager
def open_location(
    location: str | os.PathLike[str], common: Common = DEFAULTS, tag: str | None = None
) -> Iterator[ArraySource]:
    """Open the checkpoint that `location` and `tag` name for the length of a `with` block.

    `location` is a checkpoint's folder, a folder of checkpoints (then its newest one, or `tag`), or either's URL; `DIR@TAG`
    and `DIR/TAG` mean the same as `DIR` with `tag`. See `zstore.open.sources.open_source` for more. Raises BudgetError if
    a memory limit that was given is too small for the metadata.
    """
    # Requests over a network take tens of milliseconds each, so more are under way.
    num_threads = _REMOTE_THREADS if is_url(location) else NUM_THREADS
    if is_url(location):
        map_large_blocks()  # an answer's bytes, which each thread would keep
    with (
        open_resources(pool_bytes=common.pool_bytes, num_threads=num_threads) as resources,
        open_source(location, tag, resources=resources, storage_options=common.storage_options) as source,
    ):
        num_chunks = sum(array.grid.num_shards * array.grid.chunks_per_shard for array in source.arrays.values())
        metadata_bytes = len(source.arrays) * _ARRAY_BYTES + (num_chunks if source.record.id else 0) * _CHUNK_BYTES
        least_bytes = LEAST_MEMORY_BYTES + common.num_pools * max(0, metadata_bytes - BESIDE_BYTES // 4)
        if common.memory_bytes is not None and common.memory_bytes < least_bytes:
            raise BudgetError(
                f"{source.location} has {len(source.arrays)} arrays, whose metadata takes about {metadata_bytes} bytes: give "
                f"`--memory {-(-least_bytes // MIB)}MiB` or more"
            )
        yield source


@contextlib.contextmanager
def reporting(
    title: str, common: Listing, *sources: ArraySource, total_bytes: int | None = None
) -> Iterator[ProgressBar]:
    """Show the progress of a block; then report the bytes read from zstore's `sources`, and with `json` print
    `ProgressBar.document` with those of the first one and `ProgressBar.summary`."""
    with ProgressBar(title, total_bytes) as progress:
        yield progress
        for done in [done for source in reversed(sources) if (done := source.reading()) is not None]:
            if done.asked_bytes or done.requests:
                progress.say(done.text())
            progress.document |= asdict(done)
    if common.json:
        print_json(progress.document | progress.summary())


def array_bytes(source: ArraySource) -> int:
    """Return the bytes of all values of a checkpoint, uncompressed."""
    return sum(array.spec.nbytes for array in source.arrays.values())


def say_left(progress: ProgressBar, beside: Companions) -> None:
    """Say which files of a model were not copied beside its weights, and note for `--json` which were."""
    progress.document |= {"companions": beside.copied, "left_behind": beside.left}
    if beside.left:
        progress.say(f"left behind: {listed(beside.left, _MOST_NAMED)}")
