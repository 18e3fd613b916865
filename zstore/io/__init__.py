"""Bytes between memory and drives: threads, buffers, shard files. The names below are public, for code built on the store."""

from .files import Files, Flush, NewFile, OpenFile, UserPath, is_url, make_read_only, user_location, user_path
from .machine import (
    HostMemory,
    Workers,
    helpful_threads,
    most_resident_bytes,
    num_cores,
    read_host_memory,
    resident_bytes,
    run_in_thread,
)
from .memory import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    PinnedSlabs,
    Pool,
    Rooms,
    advise_huge_pages,
    make_slab,
    map_large_blocks,
    return_free_memory,
)
from .queue import LinkCounters, LinkStatistics, Priority, Ticket, total_of_links
from .shards import (
    Fill,
    FillRuns,
    IoResources,
    ShardReader,
    ShardSummary,
    ShardWriter,
    fill_chunk,
    make_shard_file,
    open_resources,
    write_shard,
)

__all__ = [
    "HUGE_PAGE_BYTES", "PAGE_BYTES", "Files", "Fill", "FillRuns", "Flush", "HostMemory", "IoResources", "LinkCounters",
    "LinkStatistics", "NewFile", "OpenFile", "PinnedSlabs", "Pool", "Priority", "Rooms", "ShardReader", "ShardSummary",
    "ShardWriter", "Ticket", "UserPath", "Workers", "advise_huge_pages", "fill_chunk",
    "helpful_threads", "is_url", "make_read_only", "make_shard_file", "make_slab", "map_large_blocks",
    "most_resident_bytes", "num_cores", "open_resources", "read_host_memory", "resident_bytes", "return_free_memory",
    "run_in_thread", "total_of_links", "user_location", "user_path", "write_shard",
]  # fmt: skip
