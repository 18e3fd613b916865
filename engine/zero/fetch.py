"""Fetching the values of units: this rank's rows from the store in the background, then all rows from all ranks.

[Note: a fetch]
read    rows in the store are read in the background; with a single rank, directly into `full`, unless it is the store's
        memory. A thread reads rows on disk. One copy sends rows in host memory to the device, after their last update;
        the device waits for it in stream order; the host waits at the end of the iteration, or before values change.
send    starts the collectives, in the same order on every rank: only the main thread calls it, at points that every rank
        reaches. It waits for this rank's rows. With a `Replica` of the parameters only the ranks of a group take part.
finish  waits until `full` of every record is filled.

Each fetch begins with a header: the unit, and whether this rank failed to read its rows. A rank that failed takes part
nevertheless, so no other rank waits for it; all ranks raise, as they do if they gather different units. While the execution
order is being recorded, a header is received before anything else is sent: mismatched collectives would abort the process. On
CUDA, headers are copied to the host in the background, and checked at the end of the iteration or before an update in backward.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from zstore.errors import RankError, UsageError
from zstore.io import Pool, Ticket, Workers
from zstore.io.memory import as_torch
from zstore.ranks.world import Work, World
from zstore.store import Store

from ..params.record import ParameterRecord
from ..runtime.device import Copy, Event, Transfers
from .collectives import Bucket, Exchanges, PendingGather, Replica, Rows, bucket_limit, plan_buckets, unpack

_NOTE = "The parameters of unit {!r} could not be read."
_DIRECT_NUMEL = 512 * 1024
"""Parameters with fewer elements are gathered together; a larger one is gathered straight into its buffer."""


@dataclass(eq=False)
class Fetch:
    """A pending transfer of the values of some records. See [Note: a fetch]."""

    name: str
    number: int
    """Number of the unit."""
    records: list[ParameterRecord]
    replica: Replica | None = None
    """Replica to gather from, over its ranks; None: gather the shards of all ranks."""
    rows: dict[ParameterRecord, torch.Tensor] = field(default_factory=dict, repr=False)
    """1-D buffers for the rows from the store, with padding."""
    start: Event = None
    """The memory may be written after this event."""
    uncopied: list[ParameterRecord] = field(default_factory=list)
    """Records of `rows` in host memory whose copy to the device has not been started."""
    copy: Copy | None = None
    """Their copy to the device."""
    ticket: Ticket[None] | None = None
    """The reads from disk."""
    cancelled: bool = False
    """Whether the rows are no longer needed."""
    sent: bool = False
    header: Work | None = None
    """None once it has been checked. See [Note: a fetch]."""
    own_header: torch.Tensor | None = None
    """This rank's header; kept while the collective reads it."""
    headers: torch.Tensor | None = None
    """Headers of all ranks."""
    headers_copy: Copy | None = None
    """Their copy to the host, if they are checked later."""
    error: BaseException | None = None
    """The error raised while reading this rank's rows."""
    gathers: list[PendingGather] = field(default_factory=list)


class RowGather(PendingGather):
    """An all-gather of a bucket's rows; if the bucket is one whole parameter, directly into its buffer."""

    def __init__(self, world: World, bucket: Bucket, rows: Rows) -> None:
        first = bucket.segments[0]
        self._bucket = bucket
        self._matrix: torch.Tensor | None = None
        """Received rows, [world, cols]; None: they are in place."""
        if len(bucket.segments) == 1 and bucket.cols == first.shard_numel:
            self._send = rows(first.record)
            target = first.record.padded_full(world.world_size * bucket.cols)
        else:
            parts = [rows(segment.record)[segment.first : segment.stop] for segment in bucket.segments]
            self._send = torch.cat(parts)
            self._matrix = self._send.new_empty(world.world_size, bucket.cols)
            target = self._matrix.view(-1)
        self.work = world.start_all_gather(target, self._send)

    def finish(self) -> None:
        if self._matrix is not None:
            unpack(self._bucket, self._matrix, lambda record: record.full)


class Fetcher:
    """Executes fetches of parameters whose rows may be in `store`; `pool` has buffers for reads (None: no rows)."""

    def __init__(
        self,
        world: World,
        store: Store,
        pool: Pool | None,
        limit_numel: int,
        exchanges: Exchanges,
        transfers: Transfers,
    ) -> None:
        self._world, self._store, self._pool, self._transfers = world, store, pool, transfers
        self.replica = exchanges.replica
        self._gathers = exchanges.gathers
        self._limit_numel = limit_numel
        self._workers: Workers | None = None
        """The thread that reads from disk in `_context`; started on first use."""
        self._context = transfers.streams.stream_context()
        self._uncopied: deque[Fetch] = deque()
        """Fetches with rows in host memory that may wait for the last step's update before they are copied."""
        self._checks_later = world.device.type == "cuda"
        self.unchecked: list[Fetch] = []
        """Finished fetches of this iteration whose headers have not been checked."""
        self._diverged = False
        """Whether ranks have gathered different units, so that pending collectives may never complete."""
        self.ready: Callable[[Sequence[ParameterRecord], bool], bool] = lambda records, wait: True
        """Returns whether the last step has updated these records' rows; if the flag is set, waits for it (any thread)."""
        self.last_copy: Copy | None = None
        """The last copy to the device that the host has not waited for."""
        self.read_bytes = 0
        """Bytes of rows read since the start."""

    def read(self, fetch: Fetch, *, ahead: bool) -> None:
        """Start reading the rows of the fetch's records, which have no memory allocated yet: `ahead` of use, or on demand."""
        if self.replica is not None and self.replica.has(fetch.records):
            fetch.replica = self.replica
            return
        is_single_rank = self._world.world_size == 1
        for record in fetch.records:
            if is_single_rank:
                record.allocate_full()
            if record.stored_array is not None and not record.is_in_place:
                padded = record.state_grid.shard_numel
                fetch.rows[record] = record.full if is_single_rank else record.full.new_zeros(padded)
        if not fetch.rows:
            return
        fetch.start = self._transfers.streams.record()
        on_disk: list[ParameterRecord] = []
        for record in fetch.rows:
            if record.owned_numel and record.stored_array is not None:
                (fetch.uncopied if self._store.tier(record.stored_array).name == "host" else on_disk).append(record)
        if fetch.uncopied:
            self._uncopied.append(fetch)
        while self._uncopied and self._copy_to_device(self._uncopied[0], wait=False):
            self._uncopied.popleft()
        if on_disk:
            if self._workers is None:
                self._workers, self._context = Workers(1, "zstore-prefetch"), self._transfers.streams.stream_context()
            fetch.ticket = self._workers.submit(partial(self._read_disk, fetch, on_disk, ahead=ahead))

    def _copy_to_device(self, fetch: Fetch, *, wait: bool) -> bool:
        """Start one copy of all rows in host memory; return False if their update is running and `wait` is not set."""
        records = fetch.uncopied
        if not records or fetch.cancelled:
            return True
        try:
            if not self.ready(records, wait):
                return False
            names = [record.stored_array for record in records if record.stored_array is not None]
            self._store.order.wait(names)
            sources = [as_torch(self._store.memory(name)) for name in names]
            targets = [fetch.rows[record][: record.owned_numel] for record in records]
            nbytes = sum(target.nbytes for target in targets)
            with self._store.links.moving("parameter_read", nbytes, None):
                if self._transfers.link(sources[0], targets[0]) is None:
                    torch._foreach_copy_(targets, sources)
                else:
                    fetch.copy = self._transfers.begin_all(targets, sources, after=fetch.start)
            self.read_bytes += nbytes
        except Exception as error:  # on this rank only, until all ranks check the headers
            error.add_note(_NOTE.format(fetch.name))
            fetch.error = error
        fetch.uncopied = []
        return True

    def _read_disk(self, fetch: Fetch, records: Sequence[ParameterRecord], *, ahead: bool) -> None:
        """Read rows from disk (in the reader thread)."""
        if fetch.cancelled:
            return
        rows = [(record.stored_array or "", fetch.rows[record][: record.owned_numel]) for record in records]
        try:
            with self._context():
                self.ready(records, True)
                nbytes = sum(memory.nbytes for _, memory in rows)
                with self._store.links.moving("parameter_read", nbytes, None):
                    self._read_rows(fetch, rows, ahead=ahead)
        except BaseException as error:
            error.add_note(_NOTE.format(fetch.name))
            raise

    def _read_rows(self, fetch: Fetch, rows: Sequence[tuple[str, torch.Tensor]], *, ahead: bool) -> None:
        pending_copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        groups = [[name] for name, _ in rows]
        with contextlib.closing(self._store.tiles(groups, "read", pool=self._pool, ahead=ahead)) as tiles:
            for tile in tiles:
                target = rows[tile.group][1][tile.first : tile.stop]
                source = as_torch(tile.views[0])
                if self._transfers.link(source, target) is not None:
                    pending_copies.append((target, source))
                else:
                    # One memcpy, without torch's threads, which the computation uses. A numpy view of the target would
                    # make its storage impossible to resize.
                    ctypes.memmove(target.data_ptr(), tile.views[0].ctypes.data, target.nbytes)
                self.read_bytes += target.nbytes
                if pending_copies and tile.ends_buffer:
                    began = time.perf_counter()
                    self._transfers.begin_all(*map(list, zip(*pending_copies, strict=True)), after=fetch.start).wait()
                    self._store.links.add_busy("host_to_device", time.perf_counter() - began)
                    pending_copies.clear()
                if fetch.cancelled:
                    break

    def _wait_for(self, fetch: Fetch) -> None:
        """Wait for the rows from the store (for those in host memory only the device waits), or, if the fetch is
        cancelled, until nothing writes to their buffers. An error is stored in `fetch.error`."""
        if not fetch.rows:
            return
        with self._world.links.waiting("parameter_read", "not read yet"):
            self._copy_to_device(fetch, wait=True)
            if fetch.ticket is not None:
                fetch.error = fetch.error or fetch.ticket.error()
        if fetch.copy is not None:
            fetch.copy.follow()
            self.last_copy, fetch.copy = fetch.copy, None  # copies end in order; `unchecked` must not keep the rows

    def send(self, fetch: Fetch, *, expected: bool) -> None:
        """Start the collectives (all ranks, in the same order). `expected`: all ranks are known to gather this unit."""
        if fetch.sent:
            return
        if self._diverged:
            raise UsageError("the ranks executed different modules; restart the run")
        fetch.sent = True
        if self._world.world_size == 1:
            return
        self._wait_for(fetch)
        try:
            # Rows of the replica exist, since nothing changes the values.
            if fetch.replica is None:
                self.ready([record for record in fetch.records if record.stored_array is None], True)
        except BaseException as error:
            fetch.error = fetch.error or error
        world = self._world if fetch.replica is None else fetch.replica.world
        # Filled on the device: a copy from host memory would wait for all earlier work there.
        header = fetch.own_header = torch.full((2,), fetch.number, dtype=torch.int32, device=world.device)
        header[1:].fill_(fetch.error is not None)
        fetch.headers = torch.empty(2 * world.world_size, dtype=torch.int32, device=world.device)
        fetch.header = world.start_all_gather(fetch.headers, header, kind="control")
        if not expected and not self._checks_later:
            fetch.header.wait()
            self._check(fetch)
        self._send_rows(fetch, world)

    def _send_rows(self, fetch: Fetch, world: World) -> None:
        # A replica has the decoded values: its rows are sent unchanged.
        gathers = self._gathers if fetch.replica is None else None
        stored = fetch.rows
        rows = fetch.replica.rows if fetch.replica else lambda r: stored[r] if r in stored else r.padded_shard()
        for record in fetch.records:
            record.allocate_full()
        encoded = [] if gathers is None else [record for record in fetch.records if gathers.takes(record)]
        plain = [record for record in fetch.records if record not in encoded] if encoded else fetch.records
        small = [record for record in plain if record.numel < _DIRECT_NUMEL]
        large = [[record] for record in plain if record.numel >= _DIRECT_NUMEL]
        plan = partial(plan_buckets, world_size=world.world_size, limit_numel=self._limit_numel)
        plan = plan if fetch.replica is None else partial(plan, grid_of=fetch.replica.grid)
        starts: list[tuple[Callable[[World, Bucket, Rows], PendingGather], Bucket]] = []
        for group in (*large, small):
            starts += [(RowGather, bucket) for bucket in plan(group)]
        if gathers is not None:
            starts += [(gathers.start, bucket) for bucket in plan(encoded, align_numel=gathers.align_numel)]
        for start, bucket in starts:  # if one fails, the fetch has those started before it
            fetch.gathers.append(start(world, bucket, rows))
        stored.clear()

    def finish(self, fetch: Fetch, *, expected: bool) -> None:
        """Wait until every record is filled; raise the error of any rank on every rank."""
        self.send(fetch, expected=expected)
        if self._world.world_size == 1:
            self.ready([record for record in fetch.records if record.is_in_place], True)
            self._wait_for(fetch)
            if fetch.error is not None:
                raise fetch.error
            return
        if fetch.header is not None and fetch.headers is not None:
            fetch.header.wait()
            if self._checks_later:
                on_host = self._transfers.empty_host(fetch.headers.numel(), fetch.headers.dtype)
                fetch.headers_copy = self._transfers.begin(on_host, fetch.headers, counted=False)
                self.unchecked.append(fetch)
            else:
                self._check(fetch)
        for gather in fetch.gathers:
            gather.work.wait()
            gather.finish()
        fetch.gathers.clear()
        if self.replica is not None and fetch.replica is None:
            self.replica.keep(fetch.records)

    def _check(self, fetch: Fetch) -> None:
        """Check the headers of all ranks."""
        if fetch.header is None or fetch.headers is None:
            return
        world = self._world if fetch.replica is None else fetch.replica.world
        copy = fetch.headers_copy
        headers = (fetch.headers if copy is None else copy.wait()).view(-1, 2).tolist()
        units = [unit for unit, _ in headers]
        if any(unit != fetch.number for unit in units):
            self._diverged = True
            raise UsageError(
                f"rank {world.global_rank(world.rank)} needs unit {fetch.name!r} (number {fetch.number}), but the ranks need "
                f"units {units}: every rank must run the same modules in the same order where parameters are sharded; no rank "
                "may skip a module based on its data"
            )
        if fetch.error is not None:
            raise fetch.error
        failed = [world.global_rank(rank) for rank, (_, has_failed) in enumerate(headers) if has_failed]
        if failed:
            raise RankError(
                f"rank(s) {', '.join(map(str, failed))} of {world.num_ranks} failed to read the parameters of unit "
                f"{fetch.name!r}; rank {world.global_rank(world.rank)} is stopping too",
                dict.fromkeys(failed, f"reading the parameters of unit {fetch.name!r} failed"),
            )
        fetch.header = None

    def check_first(self, count: int) -> None:
        """Check the headers of the first `count` finished fetches of this iteration. Safe to call from any thread."""
        for fetch in self.unchecked[:count]:
            self._check(fetch)

    def check_all(self) -> None:
        """Check all headers, at the end of the iteration."""
        unchecked, self.unchecked = self.unchecked, []
        for fetch in unchecked:
            self._check(fetch)

    def drop(self, fetch: Fetch) -> bool:
        """Wait until nothing writes to the records' buffers; pending collectives complete on every rank. Return False if
        they may never complete: the buffers must then not be freed."""
        fetch.cancelled = True
        self._wait_for(fetch)
        works = [gather.work for gather in fetch.gathers] + ([] if fetch.header is None else [fetch.header])
        if self._diverged and not all(work.is_completed() for work in works):
            return False
        for work in works:
            # A failed collective does not write either; its caller has the error.
            with contextlib.suppress(RuntimeError):
                work.wait()
        fetch.gathers.clear()
        return True

    def close(self) -> None:
        """Stop the reader thread once its pending requests are done, and destroy the replica's process groups."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        if self.replica is not None:
            self.replica.release()


def all_gather_rows(world: World, records: Iterable[ParameterRecord], limit_numel: int) -> None:
    """Fill `full` of each record with `record.owned()` of every rank."""
    limit = bucket_limit(world, limit_numel)
    for bucket in plan_buckets(records, world.world_size, limit):
        device = bucket.segments[0].record.full.device
        send = torch.zeros(bucket.cols, dtype=bucket.dtype, device=device)
        for segment in bucket.segments:
            rows = segment.record.owned()[segment.first : segment.stop]
            send[segment.offset : segment.offset + rows.numel()] = rows
        matrix = send.new_empty(world.world_size, bucket.cols)
        world.all_gather(matrix.view(-1), send)
        unpack(bucket, matrix, lambda record: record.full)
