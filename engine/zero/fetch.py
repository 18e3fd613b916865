"""Fetching the values of units: this rank's rows from the store on a thread, then all rows from all ranks.

[Note: a fetch]
read    rows in the store are read by the thread, behind the caller; without other ranks straight into `full`, unless
        the store has them there. Rows in host memory are sent to the device, which waits for them in the order of its
        work. The host waits at the end of the iteration, or before values change, so that their memory may be written.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from zstore.errors import RankError, UsageError
from zstore.io import Pool, Ticket, Workers
from zstore.io.tensors import as_torch
from zstore.ranks.world import Work, World
from zstore.store import Store

from ..params.record import ParameterRecord
from ..runtime.device import Copy, Event, Transfers
from .collectives import Bucket, Gathering, RowGather, Rows, over_all, plan_buckets
from .exchanges import Exchanges, SecondCopy

StartGather = Callable[[World, Bucket, Rows], Gathering]
Ready = Callable[[Sequence[ParameterRecord]], None]
"""Waits until the records' rows are those of the last step; may be called from the reading thread."""

_DIRECT_NUMEL = 512 * 1024
"""Parameters with fewer elements are gathered together; a larger one goes straight to its place."""


@dataclass(eq=False)
class RowRead:
    """Rows on their way from the store."""

    label: str
    rows: dict[ParameterRecord, torch.Tensor]
    """1-D memory for the rows of each parameter, with padding."""
    ahead: bool
    """Whether nothing waits for it yet."""
    start: Event
    """When the memory may be written."""
    cancelled: bool = False
    copies: list[Copy] = field(default_factory=list)
    """Copies to the device that the host did not wait for."""
    ticket: Ticket[None] = field(init=False)


class RowReader:
    """One thread that reads the rows of records in `store`, in the order of the requests."""

    def __init__(self, store: Store, pool: Pool, transfers: Transfers) -> None:
        self._store = store
        self._pool = pool
        self._transfers = transfers
        self._workers: Workers | None = None
        self._context = transfers.streams.stream_context()
        self.ready: Ready = lambda records: None
        self.read_bytes = 0
        """Bytes of rows read so far."""

    def read(self, label: str, rows: dict[ParameterRecord, torch.Tensor], *, ahead: bool) -> RowRead:
        """Start reading each record's rows into its memory; `label` is named if that fails."""
        reading = RowRead(label, rows, ahead, self._transfers.streams.record())
        if self._workers is None:
            self._workers, self._context = Workers(1, "zstore-prefetch"), self._transfers.streams.stream_context()
        reading.ticket = self._workers.submit(partial(self._serve, reading))
        return reading

    def _serve(self, reading: RowRead) -> None:
        try:
            if not reading.cancelled:
                with self._context():
                    self._carry_out(reading)
        except BaseException as error:
            error.add_note(f"The parameters of unit {reading.label!r} could not be read.")
            raise

    def _carry_out(self, reading: RowRead) -> None:
        rows = [(record, memory) for record, memory in reading.rows.items() if record.owned_numel]
        self.ready([record for record, _ in rows])
        nbytes = sum(record.owned_numel * memory.element_size() for record, memory in rows)
        with self._store.links.moving("parameter_read", nbytes, None):
            self._read_rows([(record.rest, memory) for record, memory in rows if record.rest is not None], reading)

    def _read_rows(self, rows: list[tuple[str, torch.Tensor]], reading: RowRead) -> None:
        crossing, others = [], []
        for name, memory in rows:
            held = as_torch(self._store.memory(name)) if self._store.tier(name).name == "host" else memory
            if self._transfers.link(held, memory) is None:
                others.append((name, memory))
            else:
                crossing.append((memory[: held.numel()], held))
        for target, source in crossing:
            reading.copies.append(self._transfers.begin(target, source, after=reading.start))
            self.read_bytes += target.nbytes
        under_way: list[Copy] = []
        began = 0.0
        groups = [[name] for name, _ in others]
        with contextlib.closing(self._store.tiles(groups, "read", pool=self._pool, ahead=reading.ahead)) as tiles:
            try:
                for tile in tiles:
                    target = others[tile.group][1][tile.first : tile.stop]
                    source = as_torch(tile.views[0])
                    if self._transfers.link(source, target) is not None:
                        began = began if under_way else time.perf_counter()
                        under_way.append(self._transfers.begin(target, source, after=reading.start))
                    else:
                        # One memcpy, without torch's threads, which the computation has. A numpy array over the target
                        # would make its storage one that cannot be resized.
                        ctypes.memmove(target.data_ptr(), tile.views[0].ctypes.data, target.nbytes)
                    self.read_bytes += target.nbytes
                    if tile.ends_buffer:
                        self._finish(under_way, began)
                    if reading.cancelled:
                        break
            finally:
                self._finish(under_way, began)

    def _finish(self, copies: list[Copy], began: float) -> None:
        """Wait for copies to the device, which end in the order in which they began, and count their time."""
        if copies:
            copies[-1].wait()
            self._store.links.busy("host_to_device", time.perf_counter() - began)
            copies.clear()

    def close(self) -> None:
        """End the thread after the pending requests."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None


@dataclass(eq=False)
class Header:
    """The header of a fetch on its way to all ranks. See [Note: a fetch]."""

    work: Work
    mine: torch.Tensor
    everyone: torch.Tensor
    late: Copy | None = None
    """The header on its way to the host, if it is looked at late."""


@dataclass(eq=False)
class Fetch:
    """The values of some records on their way. See [Note: a fetch]."""

    name: str
    number: int
    """Number of the unit."""
    records: list[ParameterRecord]
    second: SecondCopy | None = None
    """Has the rows, so that its ranks alone take part; None: the shards of all ranks."""
    reading: RowRead | None = None
    sent: bool = False
    header: Header | None = None
    """Until it was found in order."""
    error: BaseException | None = None
    gathers: list[Gathering] = field(default_factory=list)

    @property
    def works(self) -> list[Work]:
        """The collectives that may be under way."""
        works = [gather.work for gather in self.gathers]
        return works if self.header is None else [self.header.work, *works]


class Fetcher:
    """Carries fetches out among the ranks that hold the parameters. `reader` is None if nothing is in the
    store."""

    def __init__(
        self, world: World, reader: RowReader | None, limit_numel: int, exchanges: Exchanges, transfers: Transfers
    ) -> None:
        self._world = world
        self._transfers = transfers
        self.second_copy = exchanges.second_copy
        self._gathers = exchanges.gathers
        self.reader = reader
        self._limit_numel = limit_numel
        self._late = world.device.type == "cuda"
        self._unseen: list[Fetch] = []
        self._apart = False
        """Whether the ranks were found to gather different units: collectives under way may never complete."""
        self.ready: Ready = lambda records: None
        self.last_copy: Copy | None = None
        """The last copy to the device that the host did not wait for."""

    def read(self, name: str, number: int, records: Sequence[ParameterRecord], *, ahead: bool) -> Fetch:
        """Start to read the rows of `records`, which have no memory, for unit `number`; `ahead` of its use or for it."""
        if self.second_copy is not None and self.second_copy.has(records):
            return Fetch(name, number, list(records), self.second_copy)
        fetch = Fetch(name, number, list(records))
        alone = self._world.world_size == 1
        stored: dict[ParameterRecord, torch.Tensor] = {}
        for record in records:
            if alone:
                record.allocate_full()
            if record.rest is not None and not record.is_in_place:
                stored[record] = record.full if alone else record.full.new_zeros(record.state_grid.shard_numel)
        if stored and self.reader is not None:
            self.reader.ready = self.ready
            fetch.reading = self.reader.read(name, stored, ahead=ahead)
        return fetch

    def send(self, fetch: Fetch, *, expected: bool) -> None:
        """Begin the collectives (all ranks, in one order). `expected`: every rank is known to gather this unit now."""
        if fetch.sent:
            return
        if self._apart:
            raise UsageError("the ranks executed different modules; restart the run")
        fetch.sent = True
        if self._world.world_size == 1:
            return
        if fetch.reading is not None:
            fetch.error = self._wait_for(fetch.reading)
        try:
            # The second copy's rows are there since nothing changes the values.
            if fetch.second is None:
                self.ready([record for record in fetch.records if record.rest is None])
        except BaseException as error:
            fetch.error = fetch.error or error
        world = self._world if fetch.second is None else fetch.second.world
        # Filled there: a copy from host memory would wait for all earlier work of the device.
        mine = torch.full((2,), fetch.number, dtype=torch.int32, device=world.device)
        mine[1:].fill_(fetch.error is not None)
        everyone = torch.empty(2 * world.world_size, dtype=torch.int32, device=world.device)
        work = world.start_all_gather(everyone, mine, kind="control")
        header = fetch.header = Header(work, mine, everyone)
        if not expected and not self._late:
            header.work.wait()
            self._check(fetch)
        self._send_rows(fetch, world)

    def _wait_for(self, reading: RowRead) -> BaseException | None:
        """Wait for rows, the device alone for those in host memory, and count that; returns the error."""
        with self._world.links.waiting("parameter_read", "not read yet"):
            error = reading.ticket.error()
        if reading.copies:  # they are made in order
            self.last_copy = reading.copies[-1]
            self.last_copy.follow()
        return error

    def _send_rows(self, fetch: Fetch, world: World) -> None:
        # The values of a second copy were gathered in another form before.
        gathers, grid_of = (self._gathers, over_all) if fetch.second is None else (None, fetch.second.grid)
        stored = {} if fetch.reading is None else fetch.reading.rows
        rows = fetch.second.rows if fetch.second else lambda one: stored[one] if one in stored else one.padded_shard()
        apart: list[list[ParameterRecord]] = []
        small: list[ParameterRecord] = []
        others: list[ParameterRecord] = []
        for record in fetch.records:
            record.allocate_full()
            if gathers is not None and gathers.takes(record):
                others.append(record)
            elif record.numel < _DIRECT_NUMEL:
                small.append(record)
            else:
                apart.append([record])
        plan = partial(plan_buckets, world_size=world.world_size, limit_numel=self._limit_numel)
        starts: list[tuple[StartGather, Bucket]] = []
        for together in (*apart, small):
            starts += [(RowGather, bucket) for bucket in plan(together, grid_of=grid_of)]
        if gathers is not None:
            starts += [(gathers.start, bucket) for bucket in plan(others, align_numel=gathers.align_numel)]
        for start, bucket in starts:  # a later one that fails leaves those before it in the fetch
            fetch.gathers.append(start(world, bucket, rows))
        stored.clear()

    def finish(self, fetch: Fetch, *, expected: bool) -> None:
        """Wait until every record has its values; raises the error of any rank, on every rank."""
        self.send(fetch, expected=expected)
        if self._world.world_size == 1:
            self.ready([record for record in fetch.records if record.is_in_place])
            error = None if fetch.reading is None else self._wait_for(fetch.reading)
            if error is not None:
                raise error
            return
        if (header := fetch.header) is not None:
            header.work.wait()
            if self._late:
                here = self._transfers.empty_host(header.everyone.numel(), header.everyone.dtype)
                header.late = self._transfers.begin(here, header.everyone, counted=False)
                self._unseen.append(fetch)
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
        if (header := fetch.header) is None:
            return
        world = self._world if fetch.second is None else fetch.second.world
        headers = (header.everyone if header.late is None else header.late.wait()).view(-1, 2).tolist()
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

    @property
    def num_unseen(self) -> int:
        """Fetches of this iteration that are done so far, and whose headers are looked at late."""
        return len(self._unseen)

    def check_before(self, number: int) -> None:
        """Look at the headers of the first `number` of these; any thread may."""
        for fetch in self._unseen[:number]:
            self._check(fetch)

    def check_arrived(self) -> None:
        """Look at all headers, at the end of the iteration."""
        unseen, self._unseen = self._unseen, []
        for fetch in unseen:
            self._check(fetch)

    def drop(self, fetch: Fetch) -> bool:
        """Wait until nothing writes to the records' memory any more. Collectives under way are completed, on every rank.

        False if that may never be, so that the memory must stay.
        """
        if fetch.reading is not None:
            fetch.reading.cancelled = True
            self._wait_for(fetch.reading)
        if self._apart and not all(work.is_completed() for work in fetch.works):
            return False
        for work in fetch.works:
            # A failed fetch does not write either; the caller that needed it has the error.
            with contextlib.suppress(RuntimeError):
                work.wait()
        fetch.gathers.clear()
        return True

    def close(self) -> None:
        """End the reading thread, and destroy the process groups of the second copy."""
        if self.reader is not None:
            self.reader.close()
        if self.second_copy is not None:
            self.second_copy.release()
