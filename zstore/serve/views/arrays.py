"""The arrays of a checkpoint, and statistics of their values."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

from ...checkpoint.names import natural_key
from ...errors import CheckpointNotFoundError, CorruptionError
from ...open.stats import collect_stats
from ..models import ArrayEntry, ArrayList, ArrayStatistics
from ..runs import Run
from .library import Library

_NUM_COLUMNS = 64


def list_arrays(service: Library, run: Run, checkpoint: str) -> ArrayList:
    """Return the arrays of a checkpoint in natural order; raises like `checkpoint_detail`."""
    listed = service.timeline(run).find(checkpoint)
    arrays = service.readers.open(listed.info).arrays
    base = f"zarr/{quote(run.name, safe='')}/{quote(listed.entry.checkpoint)}"
    return ArrayList(
        arrays=[
            ArrayEntry(
                name=name,
                dtype=arrays[name].spec.dtype,
                shape=list(arrays[name].spec.shape),
                nbytes=arrays[name].spec.nbytes,
                num_shards=arrays[name].grid.num_shards,
                url=f"{base}/{quote(arrays[name].folder)}",
            )
            for name in sorted(arrays, key=natural_key)
        ]
    )


def array_statistics(
    service: Library, run: Run, checkpoint: str, array: str, advance: Callable[[int], None] = lambda nbytes: None
) -> ArrayStatistics:
    """Return statistics of an array's values, read and verified once, then from the cache.

    `advance` is called with bytes as they are read; its errors end the reading. Raises CheckpointNotFoundError for an array
    that is not there, CorruptionError if its bytes are not those that were written.
    """
    info = service.timeline(run).find(checkpoint).info
    if (kept := service.statistics.get((info.record.id, array))) is not None:
        return kept
    reader = service.readers.open(info)
    if array not in reader.arrays:
        raise CheckpointNotFoundError(f"checkpoint {checkpoint!r} has no array {array!r}: see its list of arrays")
    try:
        stats = collect_stats(reader, [array], advance)[array]
    except CorruptionError:
        service.readers.forget(info)
        raise
    found = ArrayStatistics(array=array, **stats.document(_NUM_COLUMNS))
    return service.statistics.put((info.record.id, array), found)
