"""How commands open a checkpoint: from a path or a URL, within the memory that they were given. No torch."""

from __future__ import annotations

import contextlib
import json as json_module
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zstore.errors import CheckpointExistsError, CheckpointNotFoundError

if TYPE_CHECKING:
    from zstore.checkpoint.reader import CheckpointReader
    from zstore.checkpoint.source import ArraySource, ReadStatistics
    from zstore.io.shards import IoResources

    from .progress import Progress

MIB = 1024 * 1024
DEFAULT_MEMORY_BYTES = 256 * MIB
LEAST_MEMORY_BYTES = 64 * MIB
_BESIDE_BYTES = 32 * MIB
"""Kept free for blocks of output files, metadata and what Python makes on its way."""
_MOST_POOL_BYTES = 64 * MIB
_ARRAY_BYTES, _CHUNK_BYTES = 10_000, 100
"""What the metadata of an array, and the checksum of a chunk, take in memory: measured, and rounded up."""
_FILE_BYTES, _TIMES_PARSED = 600, 10
"""What a file in a list takes in memory, and how often the bytes of a commit record once it is parsed: rounded up, too."""
_REMOTE_THREADS = 12


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every command on checkpoints."""

    json: bool = False
    """Print one JSON object on stdout in place of text."""
    memory_bytes: int | None = None
    """What the process may take beside what the interpreter and its modules have, metadata counted in. None:
    `DEFAULT_MEMORY_BYTES`, which gives way to metadata, where one that was asked for holds or is refused."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    """For the file system of a URL."""
    num_pools: int = 1
    """Pools that share the memory."""

    @property
    def bound_bytes(self) -> int:
        """What was asked for, or the default."""
        return DEFAULT_MEMORY_BYTES if self.memory_bytes is None else self.memory_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of it that are for what a command moves or keeps."""
        return self.bound_bytes - _BESIDE_BYTES

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool that transfers use; reading ahead takes half of that beside it."""
        return min(_MOST_POOL_BYTES, self.free_bytes // (3 * self.num_pools))

    def shared_by(self, num_pools: int) -> Common:
        """Return the options for each of several checkpoints that are open at once."""
        return replace(self, num_pools=num_pools)


DEFAULTS = Common()


@contextlib.contextmanager
def open_location(
    location: str | os.PathLike[str], common: Common = DEFAULTS, tag: str | None = None
) -> Iterator[ArraySource]:
    """Open what `location` and `tag` mean for the length of a `with` block.

    `location` is a checkpoint's folder, a folder of checkpoints (then its newest one, or `tag`), or either's URL; `DIR:TAG`
    and `DIR/TAG` mean the same as `DIR` with `tag`. See `zstore.open.sources.open_source` for the rest.
    """
    from zstore.checkpoint.source import NUM_THREADS
    from zstore.io.shards import open_resources
    from zstore.open.sources import split_location
    from zstore.remote.url import is_url

    place, tag = split_location(location, tag)
    # Requests over a network take tens of milliseconds each, so more are under way.
    num_threads = _REMOTE_THREADS if is_url(place) else NUM_THREADS
    with (
        open_resources(pool_bytes=common.pool_bytes, num_threads=num_threads) as resources,
        _open(place, tag, resources, common) as source,
    ):
        _check_memory(source, common)
        yield source


def _open(place: str, tag: str | None, resources: IoResources, common: Common) -> ArraySource:
    """Open a checkpoint; the error for a path that is not there names the tags that its folder has."""
    from zstore.checkpoint.catalog import tags_text
    from zstore.checkpoint.reader import tags
    from zstore.open.sources import open_source
    from zstore.remote.url import is_url

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


def _check_memory(source: ArraySource, common: Common) -> None:
    """Raise BudgetError where a limit that was asked for does not hold the metadata; the default one then gives way."""
    num_chunks = sum(array.grid.num_shards * array.grid.chunks_per_shard for array in source.arrays.values())
    metadata_bytes = len(source.arrays) * _ARRAY_BYTES + (num_chunks * _CHUNK_BYTES if source.record.id else 0)
    least = LEAST_MEMORY_BYTES + common.num_pools * max(0, metadata_bytes - _BESIDE_BYTES // 4)
    text = f"{source.location} has {len(source.arrays)} arrays, whose metadata takes about {metadata_bytes} bytes"
    require_memory(common, least, text)


def require_memory(common: Common, least_bytes: int, why: str) -> None:
    """Raise BudgetError that says `why` where a limit that was asked for is below `least_bytes`."""
    from zstore.errors import BudgetError

    if common.memory_bytes is not None and common.memory_bytes < least_bytes:
        raise BudgetError(f"{why}: give `--memory {-(-least_bytes // MIB)}MiB` or more")


def require_listing_memory(common: Common, where: str, *, num_files: int, records_bytes: int) -> None:
    """Raise BudgetError where a limit that was asked for does not hold the commit records and the list of files of the
    checkpoints in `where`."""
    listing_bytes = num_files * _FILE_BYTES + records_bytes * _TIMES_PARSED
    text = f"{where} has checkpoints of {num_files} files, whose records and list take about {listing_bytes} bytes"
    require_memory(common, _BESIDE_BYTES + listing_bytes, text)


def own_reader(source: ArraySource, command: str) -> CheckpointReader:
    """Return `source` as a reader of zstore's own checkpoints; raises UsageError that says what `command` misses else."""
    from zstore.checkpoint.reader import CheckpointReader
    from zstore.errors import UsageError

    if isinstance(source, CheckpointReader):
        return source
    raise UsageError(
        f"zstore {command} compares bytes with the checksums of a zstore checkpoint: {source.location} is "
        f"{source.kind}, which has none to compare; `zstore convert` makes a checkpoint that has"
    )


def opened_bytes(source: ArraySource) -> int:
    """Return the bytes that were read to open it; 0 of other software's, where nobody counts them."""
    from zstore.checkpoint.names import METADATA_FILE, RECORD_FILE
    from zstore.checkpoint.reader import CheckpointReader

    if not isinstance(source, CheckpointReader):
        return source.read_bytes
    if not source.folder.is_local:
        return source.reading().read_bytes
    return sum(os.stat(source.path / file).st_size for file in (METADATA_FILE, RECORD_FILE))


def reading(progress: Progress, *sources: ArraySource) -> dict[str, int]:
    """Say what was read of checkpoints of zstore's for what was asked for, all together, and return it for `--json`."""
    found = [done for source in sources if (done := source.reading()) is not None]
    return told(progress, found) if found else {}


def told(progress: Progress, found: Sequence[ReadStatistics]) -> dict[str, int]:
    """Say what these come to, and return it for `--json`."""
    done = replace(
        found[0],
        read_bytes=sum(each.read_bytes for each in found),
        asked_bytes=sum(each.asked_bytes for each in found),
        requests=sum(each.requests for each in found),
    )
    if done.asked_bytes or done.requests:
        progress.say(done.text())
    return asdict(done)


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    print(json_module.dumps(document, indent=2))


@contextlib.contextmanager
def no_overwriting(folder: os.PathLike[str], tag: str) -> Iterator[None]:
    """Where the checkpoint `tag` is in `folder` already, say what a command can do; it has no option to replace it."""
    try:
        yield
    except CheckpointExistsError as error:
        raise CheckpointExistsError(
            f"{os.fspath(folder)} has a checkpoint {tag!r} already: name another folder, or remove that one first"
        ) from error
