"""Fetching the values of units: this rank's rows from the store on a thread, then all rows from all ranks.

[Note: a fetch]
read    rows in the store are read behind the caller; without other ranks straight into `full`, unless the store has them
        there. Those on disk are read by a thread. Those in host memory are sent to the device by one copy, as soon as
        their last update is done, or when the unit is needed; the device waits for them in the order of its work. The
        host waits at the end of the iteration, or before values change, so that their memory may be written.
send    the collectives begin. On every rank in the same order, so only the main thread calls it, at points that every
        rank reaches alike. It waits for this rank's rows.
finish  `full` of every record has its values.

With second copies of the parameters (see `SecondCopy`), the ranks of a group alone take part.

Each fetch begins with a header: which unit it is, and whether this rank has its rows. A rank that failed takes part, so
that nobody waits for it, and all ranks raise. If a rank gathers another unit than the others, all raise. While
an order is recorded the header is waited for before anything else is sent, for collectives of different sizes would end
the process. On CUDA, looking at a header would wait for the device, so headers are copied to the host behind the caller, and
looked at when the iteration ends; an update in the backward looks at those before a gradient first.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
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
from .collectives import Bucket, Gathering, RowGather, Rows, plan_buckets
from .exchanges import Exchanges, SecondCopy

_NOTE = "The parameters of unit {!r} could not be read."
_DIRECT_NUMEL = 512 * 1024
"""Parameters with fewer elements are gathered together; a larger one goes straight to its place."""


@dataclass(eq=False)
class Fetch:
    """The values of some records on their way. See [Note: a fetch]."""

    name: str
    number: int
    """Number of the unit."""
    records: list[ParameterRecord]
    second: SecondCopy | None = None
    """Has the rows, so that its ranks alone take part; None: the shards of all ranks."""
    rows: dict[ParameterRecord, torch.Tensor] = field(default_factory=dict, repr=False)
    """1-D memory for the rows from the store, with padding."""
    start: Event = None
    """When that may be written."""
    unsent: list[ParameterRecord] = field(default_factory=list)
    """Those of `rows` in host memory that are not on their way."""
    copy: Copy | None = None
    """That of these to the device."""
    ticket: Ticket[None] | None = None
    """Of the thread that reads the others; None: there are none."""
    cancelled: bool = False
    """Whether nobody needs the rows any more."""
    sent: bool = False
    header: Work | None = None
    """Until it was found in order. See [Note: a fetch]."""
    mine: torch.Tensor | None = None
    """This rank's header."""
    headers: torch.Tensor | None = None
    """Those of all ranks."""
    late: Copy | None = None
    """These on their way to the host, if they are looked at late."""
    error: BaseException | None = None
    """Why this rank does not have its rows."""
    gathers: list[Gathering] = field(default_factory=list)


class Fetcher:
    """Carries fetches out among the ranks that hold the parameters, whose rows may be in `store`. `pool` has the buffers of
    reads from disk; None: nothing is in the store."""

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
        self.second_copy = exchanges.second_copy
        self._gathers = exchanges.gathers
        self._limit_numel = limit_numel
        self._workers: Workers | None = None
        """The thread that reads from disk, once there is one; it works in `_context`."""
        self._context = transfers.streams.stream_context()
        self._waiting: deque[Fetch] = deque()
        """Those whose rows in host memory may not be those of the last step yet."""
        self._late = world.device.type == "cuda"
        self.unseen: list[Fetch] = []
        """Those of this iteration that are done, and whose headers are looked at late."""
        self._apart = False
        """Whether the ranks were found to gather different units: collectives under way may never complete."""
        self.ready: Callable[[Sequence[ParameterRecord], bool], bool] = lambda records, wait: True
        """Returns whether the rows of records are those of the last step, if asked to wait once they are. Any thread may call
        it."""
        self.last_copy: Copy | None = None
        """The last copy to the device that the host did not wait for."""
        self.read_bytes = 0
        """Bytes of rows read so far."""

    # -- rows in the store ------------------------------------------------------------------------------------------

    def read(self, fetch: Fetch, *, ahead: bool) -> None:
        """Start to read the rows of the fetch's records, which have no memory; `ahead` of their use or for it."""
        if self.second_copy is not None and self.second_copy.has(fetch.records):
            fetch.second = self.second_copy
            return
        alone = self._world.world_size == 1
        for record in fetch.records:
            if alone:
                record.allocate_full()
            if record.stored_array is not None and not record.is_in_place:
                fetch.rows[record] = record.full if alone else record.full.new_zeros(record.state_grid.shard_numel)
        if not fetch.rows:
            return
        fetch.start = self._transfers.streams.record()
        on_disk: list[ParameterRecord] = []
        for record in fetch.rows:
            if record.owned_numel and record.stored_array is not None:
                (fetch.unsent if self._store.tier(record.stored_array).name == "host" else on_disk).append(record)
        if fetch.unsent:
            self._waiting.append(fetch)
        while self._waiting and self._send_up(self._waiting[0], wait=False):
            self._waiting.popleft()
        if on_disk:
            if self._workers is None:
                self._workers, self._context = Workers(1, "zstore-prefetch"), self._transfers.streams.stream_context()
            fetch.ticket = self._workers.submit(partial(self._read_disk, fetch, on_disk, ahead=ahead))

    def _send_up(self, fetch: Fetch, *, wait: bool) -> bool:
        """Send the rows in host memory by one copy, without `wait` if they are those of the last step; return whether none is
        left."""
        records = fetch.unsent
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
        except Exception as error:  # it is this rank's alone until all look at the headers
            error.add_note(_NOTE.format(fetch.name))
            fetch.error = error
        fetch.unsent = []
        return True

    def _read_disk(self, fetch: Fetch, records: Sequence[ParameterRecord], *, ahead: bool) -> None:
        """Read rows from disk (the thread)."""
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
        crossing: list[tuple[torch.Tensor, torch.Tensor]] = []
        groups = [[name] for name, _ in rows]
        with contextlib.closing(self._store.tiles(groups, "read", pool=self._pool, ahead=ahead)) as tiles:
            for tile in tiles:
                target = rows[tile.group][1][tile.first : tile.stop]
                source = as_torch(tile.views[0])
                if self._transfers.link(source, target) is not None:
                    crossing.append((target, source))
                else:
                    # One memcpy, without torch's threads, which the computation has. A numpy array over the target would
                    # make its storage one that cannot be resized.
                    ctypes.memmove(target.data_ptr(), tile.views[0].ctypes.data, target.nbytes)
                self.read_bytes += target.nbytes
                if crossing and tile.ends_buffer:
                    began = time.perf_counter()
                    self._transfers.begin_all(*map(list, zip(*crossing, strict=True)), after=fetch.start).wait()
                    self._store.links.busy("host_to_device", time.perf_counter() - began)
                    crossing.clear()
                if fetch.cancelled:
                    break

    def _wait_for(self, fetch: Fetch) -> None:
        """Wait for the rows from the store, the device alone for those in host memory, and count that; of a cancelled fetch,
        until nothing writes to their memory. `fetch.error` is why they could not be read."""
        if not fetch.rows:
            return
        with self._world.links.waiting("parameter_read", "not read yet"):
            self._send_up(fetch, wait=True)
            if fetch.ticket is not None:
                fetch.error = fetch.error or fetch.ticket.error()
        if fetch.copy is not None:
            fetch.copy.follow()
            self.last_copy, fetch.copy = fetch.copy, None  # they are made in order; `unseen` is not to keep the rows

    # -- all ranks --------------------------------------------------------------------------------------------------

    def send(self, fetch: Fetch, *, expected: bool) -> None:
        """Begin the collectives (all ranks, in one order). `expected`: every rank is known to gather this unit now."""
        if fetch.sent:
            return
        if self._apart:
            raise UsageError("the ranks executed different modules; restart the run")
        fetch.sent = True
        if self._world.world_size == 1:
            return
        self._wait_for(fetch)
        try:
            # The second copy's rows are there since nothing changes the values.
            if fetch.second is None:
                self.ready([record for record in fetch.records if record.stored_array is None], True)
        except BaseException as error:
            fetch.error = fetch.error or error
        world = self._world if fetch.second is None else fetch.second.world
        # Filled there: a copy from host memory would wait for all earlier work of the device.
        mine = fetch.mine = torch.full((2,), fetch.number, dtype=torch.int32, device=world.device)
        mine[1:].fill_(fetch.error is not None)
        fetch.headers = torch.empty(2 * world.world_size, dtype=torch.int32, device=world.device)
        fetch.header = world.start_all_gather(fetch.headers, mine, kind="control")
        if not expected and not self._late:
            fetch.header.wait()
            self._check(fetch)
        self._send_rows(fetch, world)

    def _send_rows(self, fetch: Fetch, world: World) -> None:
        # The values of a second copy were gathered in another form before.
        gathers = self._gathers if fetch.second is None else None
        stored = fetch.rows
        rows = fetch.second.rows if fetch.second else lambda one: stored[one] if one in stored else one.padded_shard()
        for record in fetch.records:
            record.allocate_full()
        others = [] if gathers is None else [record for record in fetch.records if gathers.takes(record)]
        own = [record for record in fetch.records if record not in others] if others else fetch.records
        small = [record for record in own if record.numel < _DIRECT_NUMEL]
        apart = [[record] for record in own if record.numel >= _DIRECT_NUMEL]
        plan = partial(plan_buckets, world_size=world.world_size, limit_numel=self._limit_numel)
        plan = plan if fetch.second is None else partial(plan, grid_of=fetch.second.grid)
        starts: list[tuple[Callable[[World, Bucket, Rows], Gathering], Bucket]] = []
        for together in (*apart, small):
            starts += [(RowGather, bucket) for bucket in plan(together)]
        if gathers is not None:
            starts += [(gathers.start, bucket) for bucket in plan(others, align_numel=gathers.align_numel)]
        for start, bucket in starts:  # a later one that fails leaves those before it in the fetch
            fetch.gathers.append(start(world, bucket, rows))
        stored.clear()

    def finish(self, fetch: Fetch, *, expected: bool) -> None:
        """Wait until every record has its values; raises the error of any rank, on every rank."""
        self.send(fetch, expected=expected)
        if self._world.world_size == 1:
            self.ready([record for record in fetch.records if record.is_in_place], True)
            self._wait_for(fetch)
            if fetch.error is not None:
                raise fetch.error
            return
        if fetch.header is not None and fetch.headers is not None:
            fetch.header.wait()
            if self._late:
                here = self._transfers.empty_host(fetch.headers.numel(), fetch.headers.dtype)
                fetch.late = self._transfers.begin(here, fetch.headers, counted=False)
                self.unseen.append(fetch)
            else:
                self._check(fetch)
        for gather in fetch.gathers:
            gather.work.wait()
            gather.finish()
        fetch.gathers.clear()
        if self.second_copy is not None and fetch.second is None:
            self.second_copy.keep(fetch.records)

    def _check(self, fetch: Fetch) -> None:
        """Look at the headers of all ranks."""
        if fetch.header is None or fetch.headers is None:
            return
        world = self._world if fetch.second is None else fetch.second.world
        headers = (fetch.headers if fetch.late is None else fetch.late.wait()).view(-1, 2).tolist()
        units = [unit for unit, _ in headers]
        if any(unit != fetch.number for unit in units):
            self._apart = True
            raise UsageError(
                f"rank {world.global_rank(world.rank)} needs unit {fetch.name!r} (number {fetch.number}), while the ranks need "
                f"units {units}: every rank must run the same modules in the same order where parameters are sharded; let no "
                "rank skip a module by its data"
            )
        if fetch.error is not None:
            raise fetch.error
        failed = [world.global_rank(rank) for rank, (_, bad) in enumerate(headers) if bad]
        if failed:
            raise RankError(
                f"rank {', '.join(map(str, failed))} of {world.num_ranks} failed to read the parameters of unit "
                f"{fetch.name!r}; rank {world.global_rank(world.rank)} stops with it",
                dict.fromkeys(failed, f"reading the parameters of unit {fetch.name!r} failed"),
            )
        fetch.header = None

    def check_before(self, number: int) -> None:
        """Look at the headers of the first `number` fetches of this iteration that are done; any thread may."""
        for fetch in self.unseen[:number]:
            self._check(fetch)

    def check_arrived(self) -> None:
        """Look at all headers, at the end of the iteration."""
        unseen, self.unseen = self.unseen, []
        for fetch in unseen:
            self._check(fetch)

    def drop(self, fetch: Fetch) -> bool:
        """Wait until nothing writes to the records' memory any more. Collectives under way are completed, on every rank.

        False if that may never be, so that the memory must stay.
        """
        fetch.cancelled = True
        self._wait_for(fetch)
        works = [gather.work for gather in fetch.gathers] + ([] if fetch.header is None else [fetch.header])
        if self._apart and not all(work.is_completed() for work in works):
            return False
        for work in works:
            # A failed fetch does not write either; the caller that needed it has the error.
            with contextlib.suppress(RuntimeError):
                work.wait()
        fetch.gathers.clear()
        return True

    def close(self) -> None:
        """End the reading thread after the pending requests, and destroy the process groups of the second copy."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        if self.second_copy is not None:
            self.second_copy.release()
