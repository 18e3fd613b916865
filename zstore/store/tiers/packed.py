"""Transfers of shards that share files: neighbours in a file go in one request. See [Note: shared files]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...format.arrays import Bytes
from ...format.shardfile import finish_slots
from ...io.queue import Priority, Ticket
from ...io.shards import IoResources
from .base import Piece
from .disk import DiskTier
from .diskfiles import DiskFile, DiskShard, read_slots, write_slots
from .packs import PackRun, runs_of

_Part = tuple[DiskShard, DiskFile, Piece]
_Move = Callable[[IoResources, Sequence[_Part], Bytes], None]


def load_packed(tier: DiskTier, pieces: Sequence[Piece], memory: Bytes, priority: Priority) -> list[Ticket[None]]:
    """Start to read pieces of small shards into `memory`: those of a kind in one operation."""
    kinds: dict[str, list[_Part]] = {}
    for piece in pieces:
        shard, file = tier.part(piece.name, write=False)
        if all(file.crcs[chunk] is None for chunk in piece.span.chunks):
            piece.of(memory)[:] = 0
        else:
            kinds.setdefault(piece.kind, []).append((shard, file, piece))
    return [_submit(tier.resources, kind, _read, parts, memory, priority) for kind, parts in kinds.items()]


def save_packed(tier: DiskTier, pieces: Sequence[Piece], memory: Bytes) -> list[Ticket[None]]:
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
