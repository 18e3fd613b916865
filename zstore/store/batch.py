"""A pass, and a batch of it in memory: laid out, loaded, given to the consumer tile by tile, and saved.

Small shards that share files (see [Note: shared files]) are transferred together: neighbours in a file go in one request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..format.arrays import Bytes
from ..format.shardfile import finish_slots
from ..io.buffers import Buffer, Pool
from ..io.queue import Priority, Ticket
from ..io.shards import IoResources
from .tiers import ChunkSpan, DiskTier, LocalShard, MemoryTier, Mode, Tier, Tile
from .tiers.base import Piece, View
from .tiers.diskfiles import DiskFile, DiskShard, read_slots, write_slots
from .tiers.packs import PackRun, runs_of

Admit = Callable[[int, bool], bool]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The arrays of a stream, and their modes."""

    groups: Sequence[Sequence[str]]
    """Arrays that are loaded together; those of a group share one layout, or have a bit for each element of it
    or a value for each block (`Grid.packed`). The first has one value an element: tiles count in its elements."""
    mode: Mode
    pool: Pool
    """Source of the buffers."""
    modes: Mapping[str, Mode] = field(default_factory=dict)
    """Other modes for single arrays: a group may update some, only read others, and fill yet others."""
    chunks: tuple[int, int] | None = None
    """Limits a reading pass to chunks `[first, stop)` of each shard."""
    priority: Priority = Priority.READ
    """Of the loads."""
    admit: Admit | None = None
    """Asked before a group is begun, with its number and whether to wait; false: not yet, after a wait: leave it out."""
    on_end: Callable[[int], None] | None = None
    """Told the number of each group whose new version is the present one, in the consumer's thread."""

    def mode_of(self, name: str) -> Mode:
        """Return the mode of an array."""
        return self.modes.get(name, self.mode)

    @property
    def names(self) -> list[str]:
        """All arrays, in order."""
        return [name for group in self.groups for name in group]

    @property
    def reads(self) -> bool:
        """Whether anything is loaded."""
        return any(self.mode_of(name) is not Mode.FILL for name in self.names)

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that get a new version."""
        return [name for name in names if self.mode_of(name) is not Mode.READ]


@dataclass(frozen=True)
class SpanPlan:
    """A span of a group before it has memory."""

    group: int
    span: ChunkSpan
    starts_group: bool
    ends_group: bool


Batch = tuple[SpanPlan, ...]
"""Spans that share a buffer: one of a group, or groups that are small, each of them whole."""

_NO_BYTES: Bytes = np.empty(0, dtype=np.uint8)


class BatchInMemory:
    """The arrays of a batch in a buffer of `nbytes`, which the caller takes and gives back; without bytes there is none.
    Used from one thread."""

    def __init__(
        self, batch: Batch, what: Pass, *, tiers: Mapping[str, Tier], shards: Mapping[str, LocalShard]
    ) -> None:
        self.batch = batch
        self._pass = what
        self._tiers = tiers
        self._shards = shards
        self.buffer: Buffer | None = None
        self.loads: list[Ticket[None]] = []
        """Loads that were begun."""
        self._pieces, self.nbytes = self._lay_out()
        self._on_disk: dict[str, Iterator[View]] = {}
        """Views of data from a disk, by array: of the version that was read, whichever is the present one by then."""

    def _lay_out(self) -> tuple[list[Piece], int]:
        """Return the places of the arrays in the buffer, group by group, and its bytes: shards that share a file are laid
        out as they are there."""
        spans = [(name, plan.span) for plan in self.batch for name in self._pass.groups[plan.group]]
        first, total = [0] * len(spans), 0
        sizes = [self._tiers[name].span_bytes(name, span.num_chunks) for name, span in spans]
        for number in sorted(
            range(len(spans)), key=lambda number: self._tiers[spans[number][0]].place(spans[number][0])
        ):
            first[number] = total
            total += sizes[number]
        pieces = [Piece(name, span, at, size) for (name, span), at, size in zip(spans, first, sizes, strict=True)]
        return pieces, total

    @property
    def _memory(self) -> Bytes:
        return _NO_BYTES if self.buffer is None else self.buffer.bytes

    def load(self, buffer: Buffer | None) -> None:
        """Begin to load the arrays into `buffer`. After an error nothing is read into it any more."""
        self.buffer = buffer
        moved = [piece for piece in self._pieces if self._pass.mode_of(piece.name) is not Mode.FILL]
        try:
            for piece in moved:
                tier, mode = self._tiers[piece.name], self._pass.mode_of(piece.name)
                if isinstance(tier, DiskTier):
                    self._on_disk[piece.name] = tier.views(piece.name, piece.span, piece.of(self._memory), mode)
                if not _is_packed(tier, piece.name):
                    ticket = tier.load(piece.name, piece.span, piece.of(self._memory), mode, self._pass.priority)
                    self.loads += [] if ticket is None else [ticket]
            for tier, packed in self._packed(moved):
                self.loads += _load_packed(tier, packed, self._memory, self._pass.priority)
        except BaseException:
            for under_way in self.loads:
                under_way.error()
            raise

    def tiles(self) -> Iterator[Tile]:
        """Yield the tiles, once the loads are done: the consumer changes one before it asks for the next, or for the end."""
        pieces = iter(self._pieces)
        for plan in self.batch:
            names = self._pass.groups[plan.group]
            parts = [next(pieces).of(self._memory) for _ in names]
            yield from self._tiles_of_group(plan, names, parts)

    def _tiles_of_group(self, plan: SpanPlan, names: Sequence[str], parts: Sequence[Bytes]) -> Iterator[Tile]:
        in_memory = {name: tier for name in names if isinstance(tier := self._tiers[name], MemoryTier)}
        if len(in_memory) == len(names):
            yield tile_in_memory(plan, in_memory, self._shards)
            return
        columns = [
            self._on_disk.get(name) or self._tiers[name].views(name, plan.span, part, self._pass.mode_of(name))
            for name, part in zip(names, parts, strict=True)
        ]
        # Strict: asks each column for one view more than it has, which seals its last chunk.
        for chunk, *views in zip(plan.span.chunks, *columns, strict=True):
            first, stop = self._shards[names[0]].chunk_range(chunk)
            ends = plan is self.batch[-1] and chunk == plan.span.chunks[-1]
            yield Tile(plan.group, first, stop, tuple(views), ends)

    def save(self, saves: list[Ticket[None]]) -> None:
        """Begin to save the changes; each save is added to `saves` as it begins."""
        changed = [piece for piece in self._pieces if self._pass.mode_of(piece.name) is not Mode.READ]
        for piece in changed:
            tier = self._tiers[piece.name]
            if not _is_packed(tier, piece.name):
                ticket = tier.save(piece.name, piece.span, piece.of(self._memory))
                saves += [] if ticket is None else [ticket]
        for tier, packed in self._packed(changed):
            saves += _save_packed(tier, packed, self._memory)

    def _packed(self, pieces: Sequence[Piece]) -> Iterator[tuple[DiskTier, list[Piece]]]:
        """Yield the pieces of shards that share files, with their tier."""
        found: dict[DiskTier, list[Piece]] = {}
        for piece in pieces:
            tier = self._tiers[piece.name]
            if isinstance(tier, DiskTier) and tier.is_packed(piece.name):
                found.setdefault(tier, []).append(piece)
        yield from found.items()


def tile_in_memory(plan: SpanPlan, tiers: Mapping[str, MemoryTier], shards: Mapping[str, LocalShard]) -> Tile:
    """Return a span of a group as one tile; `tiers` has its arrays, which are all in memory, in order."""
    leader = shards[next(iter(tiers))]
    first, stop = leader.span_range(plan.span)
    views = []
    for name, tier in tiers.items():
        # A value of another array may be for several elements of the first.
        numel = leader.grid.numel_per_value(shards[name].grid) or 1
        views.append(tier.view(name, first // numel, -(-stop // numel)))
    return Tile(plan.group, first, stop, tuple(views))


def _is_packed(tier: Tier, name: str) -> bool:
    return isinstance(tier, DiskTier) and tier.is_packed(name)


_Part = tuple[DiskShard, DiskFile, Piece]
_Move = Callable[[IoResources, Sequence[_Part], Bytes], None]


def _load_packed(tier: DiskTier, pieces: Sequence[Piece], memory: Bytes, priority: Priority) -> list[Ticket[None]]:
    """Start to read pieces of small shards into `memory`: those of a kind in one operation."""
    kinds: dict[str, list[_Part]] = {}
    for piece in pieces:
        shard, file = tier.part(piece.name, write=False)
        if all(file.crcs[chunk] is None for chunk in piece.span.chunks):
            piece.of(memory)[:] = 0
        else:
            kinds.setdefault(piece.kind, []).append((shard, file, piece))
    return [_submit(tier.resources, kind, _read, parts, memory, priority) for kind, parts in kinds.items()]


def _save_packed(tier: DiskTier, pieces: Sequence[Piece], memory: Bytes) -> list[Ticket[None]]:
    """Start taking pieces of small shards back; see `load_packed`."""
    kinds: dict[str, list[_Part]] = {}
    for piece in pieces:
        shard, file = tier.part(piece.name, write=True)
        kinds.setdefault(piece.kind, []).append((shard, file, piece))
    return [_submit(tier.resources, kind, _write, parts, memory, Priority.WRITE_BACK) for kind, parts in kinds.items()]


def _submit(
    res: IoResources, kind: str, move: _Move, parts: list[_Part], memory: Bytes, priority: Priority
) -> Ticket[None]:
    nbytes = sum(piece.nbytes for _, _, piece in parts)
    return res.queue.submit(partial(move, res, parts, memory), priority, nbytes, subject=kind)


def _runs(parts: Sequence[_Part]) -> list[PackRun]:
    places = []
    for shard, file, piece in parts:
        offset = shard.offset(file, piece.span.first_chunk)
        places.append(PackRun(path=file.path, offset=offset, first=piece.first, nbytes=piece.nbytes))
    return runs_of(places)


def _read(res: IoResources, parts: Sequence[_Part], memory: Bytes) -> None:
    for run in _runs(parts):
        read_slots(res, run.path, run.offset, run.of(memory))


def _write(res: IoResources, parts: Sequence[_Part], memory: Bytes) -> None:
    crcs = [finish_slots(piece.of(memory), shard.layout) for shard, _, piece in parts]
    for run in _runs(parts):
        write_slots(res, run.path, run.offset, run.of(memory))
    for (_, file, piece), found in zip(parts, crcs, strict=True):
        file.crcs[piece.span.first_chunk : piece.span.first_chunk + piece.span.num_chunks] = found
