"""Opens a checkpoint for a command, from a path or a URL, within a memory limit, and reports the bytes read. No torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from zstore.checkpoint import NUM_THREADS, ArraySource, ReadStatistics, tags, tags_text
from zstore.errors import BudgetError, CheckpointNotFoundError
from zstore.io import IoResources, is_url, map_large_blocks, open_resources
from zstore.open.sources import open_source, split_location
from zstore.remote.url import parse_options

from .options import Json, StorageOption, parse_size
from .printing import print_json
from .progress import ProgressBar

MIB = 1024 * 1024
DEFAULT_MEMORY_BYTES = 256 * MIB
LEAST_MEMORY_BYTES = 64 * MIB
BESIDE_BYTES = 32 * MIB
"""Kept free for blocks of output files, metadata and temporary Python objects."""
_MOST_POOL_BYTES = 64 * MIB
_ARRAY_BYTES, _CHUNK_BYTES = 10_000, 100
"""Bytes of memory for the metadata of an array, and for the checksum of a chunk: measured, and rounded up."""
_REMOTE_THREADS = 12


def parse_memory(text: str | int) -> int:
    """Bytes in a size that is enough for a command; for a smaller one `typer.BadParameter` names the minimum."""
    num_bytes = parse_size(text)
    if num_bytes < LEAST_MEMORY_BYTES:
        raise typer.BadParameter(f"expected at least {LEAST_MEMORY_BYTES // MIB}MiB, got {text!r}")
    return num_bytes


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every command on checkpoints."""

    json: Json = False
    memory_bytes: Annotated[
        int | None,
        typer.Option(
            "--memory",
            help="Limit of the memory used, on top of what Python and its modules take.",
            metavar="SIZE",
            parser=parse_memory,
            show_default=f"{DEFAULT_MEMORY_BYTES // MIB}MiB",
        ),
    ] = None
    """Metadata counts. None: `DEFAULT_MEMORY_BYTES`, which large metadata may exceed; a limit that was given is kept or
    refused."""
    storage_option: StorageOption = None
    num_pools: int = 1
    """Pools that share the memory."""

    def __post_init__(self) -> None:
        """Refuse a storage option that is not `key=value`, before anything is opened."""
        _ = self.storage_options

    @property
    def storage_options(self) -> dict[str, Any]:
        """Return the options for the file system of a URL."""
        return parse_options(self.storage_option or ())

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

    `location` is a checkpoint's folder, a folder of checkpoints (then its newest one, or `tag`), or either's URL; `DIR:TAG`
    and `DIR/TAG` mean the same as `DIR` with `tag`. See `zstore.open.sources.open_source` for more.
    """
    place, tag = split_location(location, tag)
    # Requests over a network take tens of milliseconds each, so more are under way.
    num_threads = _REMOTE_THREADS if is_url(place) else NUM_THREADS
    if is_url(place):
        map_large_blocks()  # an answer's bytes, which each thread would keep
    with (
        open_resources(pool_bytes=common.pool_bytes, num_threads=num_threads) as resources,
        _open(place, tag, resources, common) as source,
    ):
        num_chunks = sum(array.grid.num_shards * array.grid.chunks_per_shard for array in source.arrays.values())
        check_arrays(len(source.arrays), source.location, common, num_chunks if source.record.id else 0)
        yield source


def _open(place: str, tag: str | None, resources: IoResources, common: Common) -> ArraySource:
    """Open a checkpoint; the error for a path that does not exist names the tags in its folder."""
    try:
        return open_source(place, tag, resources=resources, storage_options=common.storage_options)
    except CheckpointNotFoundError as error:
        path = Path(place)
        if is_url(place) or path.exists() or not path.parent.is_dir():
            raise
        infos = tags(path.parent)
        if found := next((info for info in infos if path.name == info.tag), None):
            return open_source(found.path, resources=resources)
        if not infos:
            raise
        raise CheckpointNotFoundError(f"{place} does not exist; {path.parent} has {tags_text(infos)}") from error


def check_arrays(num_arrays: int, location: str, common: Common, num_chunks: int = 0) -> None:
    """Raise BudgetError if a limit that was given is too small for the metadata of so many arrays and checksums of chunks."""
    metadata_bytes = num_arrays * _ARRAY_BYTES + num_chunks * _CHUNK_BYTES
    least = LEAST_MEMORY_BYTES + common.num_pools * max(0, metadata_bytes - BESIDE_BYTES // 4)
    text = f"{location} has {num_arrays} arrays, whose metadata takes about {metadata_bytes} bytes"
    require_memory(common, least, text)


def require_memory(common: Common, least_bytes: int, why: str) -> None:
    """Raise BudgetError, with the reason `why`, if a limit that was given is below `least_bytes`."""
    if common.memory_bytes is not None and common.memory_bytes < least_bytes:
        raise BudgetError(f"{why}: give `--memory {-(-least_bytes // MIB)}MiB` or more")


@contextlib.contextmanager
def reporting(
    title: str, common: Common, *sources: ArraySource, total_bytes: int | None = None
) -> Iterator[ProgressBar]:
    """Show the progress of a block; then report the bytes read from `sources`, and with `json` print `ProgressBar.document`
    with them and `ProgressBar.summary`."""
    with ProgressBar(title, total_bytes) as progress:
        yield progress
        progress.document |= read_of(progress, *sources)
    if common.json:
        print_json(progress.document | progress.summary())


def array_bytes(source: ArraySource) -> int:
    """Return the bytes of all values of a checkpoint, uncompressed."""
    return sum(array.spec.nbytes for array in source.arrays.values())


def read_of(progress: ProgressBar, *sources: ArraySource) -> dict[str, int]:
    """Report the bytes read from zstore's own checkpoints, and how many of them were needed; return both for `--json`."""
    found = [done for source in sources if (done := source.reading()) is not None]
    if not found:
        return {}
    done = _sum(found)
    if done.asked_bytes or done.requests:
        progress.say(done.text())
    return asdict(done)


def _sum(found: Sequence[ReadStatistics]) -> ReadStatistics:
    """Return the sum of these statistics."""
    each = [asdict(one) for one in found]
    return replace(found[0], **{key: sum(one[key] for one in each) for key in each[0]})
