"""A pass over shards: chunks are loaded ahead of use and stored in the background, in bounded memory.

[Note: the pipeline]
Phases of a span, for all arrays of a group together:
1. one buffer for the whole span is acquired from the pool;
2. the loads are queued; later spans are loaded while earlier ones are used;
3. the consumer receives one `Tile` per chunk and changes its views in place;
4. the saves are queued; the last of them releases the buffer.
A stream waits for the pool only while it has no loaded span, so it cannot deadlock with itself, and it never acquires
the last quarter of the pool ahead of use. New versions become current at the end, when every save is done; with
`on_end`, each group's becomes current as soon as that group's saves are done.

The first spans may be loaded before it is known whether the pass will run (`Stream.read_ahead`), without beginning a
pass. They are used if it runs and no shard's version has changed by then; otherwise their memory is freed.

A tile of a shard on disk is one chunk, because checksums lie between chunks; a tile of memory is many chunks, for fewer
steps in Python. A pass over memory alone skips the pipeline, whose bookkeeping costs more than the work on a small array.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..format.arrays import Bytes, LocalShard
from ..io.memory import Buffer, Pool
from ..io.queue import Priority, Ticket, when_all_done
from .tiers import DiskTier, MemoryTier, Mode, Tier, Tile
from .tiers.base import Batch, Piece, SpanPlan, View, plan_batches

_MAX_LOADED_SPANS = 64
_MAX_LOADS_AHEAD = 32
"""Loads queued before a pass; the queue has room for them, so the caller does not block."""

Admit = Callable[[int, bool], bool]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The arrays of a stream, and their modes."""

    groups: Sequence[Sequence[str]]
    """Groups of arrays that are loaded together. Arrays of a group have the same layout, or one bit for each element of the
    first array, or one value for each block of its elements. Tiles count elements of the first array."""
    mode: Mode
    pool: Pool
    """Source of the buffers."""
    modes: Mapping[str, Mode] = field(default_factory=dict)
    """Modes of individual arrays, overriding `mode`."""
    chunks: tuple[int, int] | None = None
    """Limits a reading pass to chunks `[first, stop)` of each shard."""
    priority: Priority = Priority.READ
    """Priority of the loads."""
    admit: Admit | None = None
    """Called before a group is begun, with its index and whether to wait. False means "not yet" or, after a wait, "skip it"."""
    on_end: Callable[[int], None] | None = None
    """Called in the consumer's thread with the number of each group whose new version has become current."""

    def mode_of(self, name: str) -> Mode:
        """Return the mode of an array."""
        return self.modes.get(name, self.mode)

    @property
    def names(self) -> list[str]:
        """All arrays, in order."""
        return [name for group in self.groups for name in group]


@dataclass
class StreamCounters:
    """Seconds that consumers waited, by cause."""

    read_wait_s: float = 0.0
    write_wait_s: float = 0.0
    pool_wait_s: float = 0.0
    pin_wait_s: float = 0.0


_NO_BYTES: Bytes = np.empty(0, dtype=np.uint8)


class _LoadedBatch:
    """A batch of a pass in memory: laid out in a buffer of `nbytes`, loaded, yielded tile by tile, and saved. The caller
    acquires and releases the buffer; for 0 bytes there is none."""

    def __init__(
        self, batch: Batch, pass_: Pass, *, tiers: Mapping[str, Tier], shards: Mapping[str, LocalShard]
    ) -> None:
        self.batch = batch
        self._pass = pass_
        self._tiers = tiers
        self._shards = shards
        self.buffer: Buffer | None = None
        self.loads: list[Ticket[None]] = []
        """Tickets of the loads that were queued."""
        self._pieces, self.nbytes = self._lay_out()
        self._on_disk: dict[str, Iterator[View]] = {}
        """Views of data read from disk, by array. They stay views of the version that was read."""

    def _lay_out(self) -> tuple[list[Piece], int]:
        """Return the pieces of the buffer by group, and its size; shards in a pack are laid out as in its file."""
        spans = [(name, plan.span) for plan in self.batch for name in self._pass.groups[plan.group]]
        offsets, total = [0] * len(spans), 0
        sizes = [self._tiers[name].span_bytes(name, span.num_chunks) for name, span in spans]
        for index in sorted(
            range(len(spans)), key=lambda index: self._tiers[spans[index][0]].file_position(spans[index][0])
        ):
            offsets[index] = total
            total += sizes[index]
        pieces = [
            Piece(name, span, offset, size) for (name, span), offset, size in zip(spans, offsets, sizes, strict=True)
        ]
        return pieces, total

    @property
    def _memory(self) -> Bytes:
        return _NO_BYTES if self.buffer is None else self.buffer.bytes

    def load(self, buffer: Buffer | None) -> None:
        """Start loading the arrays into `buffer`. On an error, waits until no load is writing to it."""
        self.buffer = buffer
        try:
            for tier, pieces in self._disk_pieces(excluded=Mode.FILL):
                for piece in pieces:
                    mode = self._pass.mode_of(piece.name)
                    self._on_disk[piece.name] = tier.views(piece.name, piece.span, piece.slice_of(self._memory), mode)
                tier.load(pieces, self._memory, self._pass.priority, self.loads)
        except BaseException:
            for ticket in self.loads:
                ticket.error()
            raise

    def tiles(self) -> Iterator[Tile]:
        """Yield the tiles, once the loads are done. The consumer changes each tile before it requests the next."""
        pieces = iter(self._pieces)
        for plan in self.batch:
            names = self._pass.groups[plan.group]
            parts = [next(pieces).slice_of(self._memory) for _ in names]
            yield from self._tiles_of_group(plan, names, parts)

    def _tiles_of_group(self, plan: SpanPlan, names: Sequence[str], parts: Sequence[Bytes]) -> Iterator[Tile]:
        in_memory = {name: tier for name in names if isinstance(tier := self._tiers[name], MemoryTier)}
        if len(in_memory) == len(names):
            yield _tile_in_memory(plan, in_memory, self._shards)
            return
        columns = [
            self._on_disk.get(name) or self._tiers[name].views(name, plan.span, part, self._pass.mode_of(name))
            for name, part in zip(names, parts, strict=True)
        ]
        # Strict: requests one view beyond the last from each column, which seals its last chunk.
        for chunk, *views in zip(plan.span.chunks, *columns, strict=True):
            first, stop = self._shards[names[0]].chunk_range(chunk)
            ends = plan is self.batch[-1] and chunk == plan.span.chunks[-1]
            yield Tile(plan.group, first, stop, tuple(views), ends)

    def save(self, saves: list[Ticket[None]]) -> None:
        """Start saving the changes; each save is added to `saves` as it starts."""
        for tier, pieces in self._disk_pieces(excluded=Mode.READ):
            tier.save(pieces, self._memory, saves)

    def _disk_pieces(self, *, excluded: Mode) -> Iterator[tuple[DiskTier, list[Piece]]]:
        """Yield the pieces on disk, except those of the `excluded` mode, with their tier."""
        by_tier: dict[DiskTier, list[Piece]] = {}
        for piece in self._pieces:
            tier = self._tiers[piece.name]
            if isinstance(tier, DiskTier) and self._pass.mode_of(piece.name) is not excluded:
                by_tier.setdefault(tier, []).append(piece)
        yield from by_tier.items()


def _tile_in_memory(plan: SpanPlan, tiers: Mapping[str, MemoryTier], shards: Mapping[str, LocalShard]) -> Tile:
    """Return a span of a group as one tile; `tiers` has the group's arrays in order, all of them in memory."""
    first, stop = shards[next(iter(tiers))].chunk_range(plan.span.first_chunk, plan.span.num_chunks)
    return Tile(plan.group, first, stop, tuple(tier.view(name, first, stop) for name, tier in tiers.items()))


class Stream:
    """Drives one pass over `batches`, by default from `plan_batches`; `tiers` and `shards` say where each array is."""

    def __init__(
        self,
        pass_: Pass,
        *,
        tiers: Mapping[str, Tier],
        shards: Mapping[str, LocalShard],
        counters: StreamCounters,
        batches: Sequence[Batch] | None = None,
    ) -> None:
        self._pass = pass_
        self._groups = [tuple(group) for group in pass_.groups]
        self._pool = pass_.pool
        self._reads = any(pass_.mode_of(name) is not Mode.FILL for name in pass_.names)
        self._tiers = tiers
        self._shards = shards
        self._counters = counters
        self._loaded: deque[_LoadedBatch] = deque()
        names = pass_.names
        in_memory = {name: tier for name in names if isinstance(tier := tiers[name], MemoryTier)}
        self._in_memory = in_memory if len(in_memory) == len(names) else {}
        """The tier of each array if all are in memory, else empty."""
        if batches is None:
            batches = plan_batches(
                self._groups, tiers=tiers, shards=shards, pool_bytes=pass_.pool.nbytes, chunks=pass_.chunks
            )
        self.batches = batches
        self._plans = deque([] if self._in_memory else batches)
        self._active: dict[str, Tier] = {}
        """Arrays whose pass has begun and not ended, and their tiers."""
        self._saves: deque[Ticket[None]] = deque()
        """Saves of the current group."""
        self._ending: deque[tuple[int, deque[Ticket[None]]]] = deque()
        """Numbers of the groups whose last span is being saved, and their saves."""
        self._versions_ahead: dict[str, int] = {}
        """Versions of the arrays that were read ahead."""

    def read_ahead(self) -> None:
        """Queue the loads of the first spans, as far as free memory allows; call `resume` or `drop` next.

        Raises UsageError while another pass changes one of their shards in place.
        """
        try:
            while self._plans and sum(len(loaded.loads) for loaded in self._loaded) < _MAX_LOADS_AHEAD:
                for name in self._names(self._plans[0]):
                    if name not in self._versions_ahead and self._pass.mode_of(name) is not Mode.FILL:
                        self._tiers[name].begin(name, Mode.READ)
                        self._versions_ahead[name] = self._tiers[name].version(name)
                if not self._load_next(wait=False):
                    break
        except BaseException:
            self.drop()
            raise

    def resume(self, admit: Admit | None = None, on_end: Callable[[int], None] | None = None) -> bool:
        """Return whether the spans read ahead are still current, so that `tiles` uses them; otherwise drop them.

        See `Pass` for `admit` and `on_end`.
        """
        if any(self._tiers[name].version(name) != version for name, version in self._versions_ahead.items()):
            self.drop()
            return False
        self._pass = replace(self._pass, admit=admit, on_end=on_end)
        return True

    def _names(self, batch: Batch) -> list[str]:
        """Return the arrays of a batch."""
        return [name for plan in batch for name in self._groups[plan.group]]

    def drop(self) -> None:
        """Free the memory of the spans read ahead, as soon as their loads have ended."""
        while self._loaded:
            loaded = self._loaded.pop()
            if loaded.buffer is not None:
                when_all_done(loaded.loads, loaded.buffer.release)

    def _begin_ahead(self) -> None:
        """Begin the groups that have been read ahead; if one cannot begin without waiting, drop them and start over."""
        for group in dict.fromkeys(plan.group for loaded in self._loaded for plan in loaded.batch):
            if not (self._admit(group) and self._begin(self._groups[group])):
                self.drop()
                self._plans = deque(self.batches)
                return

    def tiles(self) -> Generator[Tile, None, None]:
        """Yield the tiles; see [Note: the pipeline]. A failed or abandoned pass keeps the previous versions if possible."""
        return self._tiles_in_memory() if self._in_memory else self._tiles_pipelined()

    def _tiles_in_memory(self) -> Generator[Tile, None, None]:
        """Yield the tiles of a pass over memory alone, whose groups begin and end one after another."""
        on_end, skipped = self._pass.on_end, set[int]()
        ok = False
        try:
            for (plan,) in self.batches:
                names = self._groups[plan.group]
                if plan.starts_group and self._admit(plan.group) is None:
                    skipped.add(plan.group)
                if plan.group in skipped:
                    continue
                self._begin(names)
                yield _tile_in_memory(plan, {name: self._in_memory[name] for name in names}, self._shards)
                if plan.ends_group and on_end is not None:
                    self._end(names, True)
                    on_end(plan.group)
            ok = True
        finally:
            self._end(list(self._active), ok)

    def _tiles_pipelined(self) -> Generator[Tile, None, None]:
        ok = False
        current: _LoadedBatch | None = None
        try:
            self._begin_ahead()
            while True:
                self._load_ahead()
                if not self._loaded:
                    break
                current = self._loaded.popleft()
                self._counters.read_wait_s += _wait_all(current.loads)
                yield from current.tiles()
                done, current = current, None
                self._save(done)
                self._end_groups(wait=False)
            self._end_groups(wait=True)
            ok = True
        finally:
            self._finish(current, ok)

    def _load_ahead(self) -> None:
        while self._plans and len(self._loaded) < _MAX_LOADED_SPANS:
            batch = self._plans[0]
            if batch[0].starts_group:
                admitted = {plan.group: self._admit(plan.group) for plan in batch}
                if None in admitted.values():
                    self._skip_groups({group for group, is_admitted in admitted.items() if is_admitted is None})
                    continue
                if not (all(admitted.values()) and self._begin(self._names(batch))):
                    return
            if not self._load_next(wait=not self._loaded):
                return

    def _skip_groups(self, groups: set[int]) -> None:
        """Skip groups that have not been started."""
        while self._plans and any(plan.group in groups for plan in self._plans[0]):
            remaining = tuple(plan for plan in self._plans.popleft() if plan.group not in groups)
            if remaining:
                self._plans.appendleft(remaining)
                return

    def _load_next(self, *, wait: bool) -> bool:
        """Queue the loads of the next batch; return False if there is no memory for it."""
        loaded = _LoadedBatch(self._plans[0], self._pass, tiers=self._tiers, shards=self._shards)
        buffer = self._acquire(loaded.nbytes, wait=wait)
        if buffer is None and loaded.nbytes:
            return False
        self._plans.popleft()
        try:
            loaded.load(buffer)
        except BaseException:
            if buffer is not None:
                buffer.release()
            raise
        self._loaded.append(loaded)
        return True

    def _admit(self, group: int) -> bool | None:
        """Return whether the group may begin, or None if it must be skipped. If nothing is loaded, wait for the decision."""
        if self._pass.admit is None or self._pass.admit(group, False):
            return True
        if self._loaded:
            return False
        self._end_groups(wait=True)  # finished groups must not wait for later ones
        return True if self._pass.admit(group, True) else None

    def _begin(self, names: Sequence[str]) -> bool:
        """Begin the pass over a group, before any memory is acquired for it: the holder of a pin may need that memory.

        Returns False instead of waiting for a pin while spans are loaded.
        """
        names = [name for name in names if name not in self._active]
        changed = (name for name in names if self._pass.mode_of(name) is not Mode.READ)
        if self._loaded and any(self._tiers[name].is_pinned_in_place(name) for name in changed):
            return False
        started = time.perf_counter()
        for name in names:
            tier = self._tiers[name]
            tier.begin(name, self._pass.mode_of(name))
            self._active[name] = tier
        self._counters.pin_wait_s += time.perf_counter() - started
        return True

    def _acquire(self, nbytes: int, *, wait: bool) -> Buffer | None:
        if nbytes == 0:
            return None
        if wait:
            started = time.perf_counter()
            buffer = self._pool.acquire(nbytes)
            self._counters.pool_wait_s += time.perf_counter() - started
            return buffer
        # A pass that reads nothing gains nothing from memory acquired ahead of use.
        if not self._reads or self._pool.used_bytes + nbytes > self._pool.nbytes * 3 // 4:
            return None
        return self._pool.try_acquire(nbytes)

    def _save(self, loaded: _LoadedBatch) -> None:
        saves: list[Ticket[None]] = []
        try:
            loaded.save(saves)
        finally:
            if loaded.buffer is not None:
                when_all_done(saves, loaded.buffer.release)
            self._saves.extend(saves)
        while self._saves and self._saves[0].done():
            self._saves.popleft().wait()
        ended_groups = [plan.group for plan in loaded.batch if plan.ends_group]
        for group in ended_groups:
            self._ending.append((group, self._saves))
        if ended_groups:
            self._saves = deque()

    def _end_groups(self, *, wait: bool) -> None:
        """End the groups whose saves are done, in order; with `wait`, wait for all of them."""
        while self._ending and (wait or all(ticket.done() for ticket in self._ending[0][1])):
            # Waits even if they are done, to raise their errors. `_finish` waits for the other groups.
            group, saves = self._ending[0]
            self._counters.write_wait_s += _wait_all(saves)
            self._ending.popleft()
            if self._pass.on_end is not None:
                self._end(self._groups[group], True)
                self._pass.on_end(group)

    def _finish(self, current: _LoadedBatch | None, ok: bool) -> None:
        for loaded in [*([current] if current is not None else []), *self._loaded]:
            for ticket in loaded.loads:
                ticket.error()
            if loaded.buffer is not None:
                loaded.buffer.release()
        for ticket in [*self._saves, *(ticket for _, saves in self._ending for ticket in saves)]:
            ticket.error()
        self._end(list(self._active), ok)

    def _end(self, names: Sequence[str], ok: bool) -> None:
        errors: list[Exception] = []
        for name in names:
            tier = self._active.pop(name, None)
            if tier is None or self._pass.mode_of(name) is Mode.READ:
                continue
            try:
                tier.end(name, ok)
            except Exception as error:
                errors.append(error)
        if errors and ok:
            raise errors[0]


def _wait_all(tickets: Iterable[Ticket[None]]) -> float:
    """Wait for all `tickets`, and return how many seconds that took; raises the first error."""
    started = time.perf_counter()
    for ticket in tickets:
        ticket.wait()
    return time.perf_counter() - started
