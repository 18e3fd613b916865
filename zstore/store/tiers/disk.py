"""The disk tier: shard files in a run folder; a file that a checkpoint has linked is replaced by a new version.

[Note: versions]
Each shard is one file in the run folder, with a number in its name. While the file is neither pinned nor published (linked
by a checkpoint), a pass changes it in place. Otherwise a pass writes another file, which becomes the current one when the
pass ends: a published file is never written again. This state is kept in memory and not derived from link counts. A
superseded published file is unlinked from the run folder (the checkpoint's link keeps the bytes); any other superseded file
is kept as a spare for the next version.

A chunk that was never written has no checksum and reads as zeros without touching the disk. A checkpoint's file of the
same layout can be adopted: a link to it becomes the current version, published, and verified when it is read. Small shards
share files: see [Note: shared files].
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from ...errors import StorageError, UsageError
from ...format.arrays import Array, Bytes, Grid, LocalShard
from ...format.shardfile import finish_slots, layout_of
from ...io.queue import Priority, Ticket, wait_all
from ...io.shards import IoResources, ShardSummary, make_shard_file
from .base import ChunkSpan, Mode, Piece, Tier, View, busy_error, new_version
from .diskfiles import (
    DiskFile,
    DiskShard,
    Pack,
    PackRun,
    checked_views,
    fill_file,
    is_packed,
    merge_runs,
    read_elements,
    read_slots,
    run_file_bytes,
    write_slots,
)

if TYPE_CHECKING:
    import torch


@dataclass
class Drives:
    """Folders on the drives that shards are spread over: a new shard goes to the folder with the fewest bytes."""

    default: tuple[Path, ...]
    groups: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    """Folders to use instead for some arrays, by the first part of the array's name."""
    assigned_bytes: Counter[Path] = field(default_factory=Counter)

    def choose(self, name: str, nbytes: int) -> Path:
        """Return the folder for `nbytes` of array `name`; deterministic for a given order of calls."""
        folders = self.groups.get(name.split("/", 1)[0], self.default)
        chosen = min(folders, key=lambda folder: self.assigned_bytes[folder])
        self.assigned_bytes[chosen] += nbytes
        return chosen


_Part = tuple[DiskShard, DiskFile, Piece]
_Move = Callable[[IoResources, Sequence[_Part], Bytes], None]


class DiskTier(Tier):
    """Shards as files under the folders of `drives`, which this tier owns. See [Note: versions]."""

    name = "disk"

    def __init__(self, drives: Drives, res: IoResources, *, reserves: bool = True) -> None:
        self._drives = drives
        self._res = res
        self._request_bytes = res.request_bytes
        self._shards: dict[str, DiskShard] = {}
        self.packs_small = False
        """Whether small shards created from now on share files."""
        self._reserves = reserves
        """Whether a shard's file is created with the shard, rather than by its first write."""
        self._packs: dict[tuple[Path, str], Pack] = {}
        """Packs by folder and kind of array."""
        self._numbers = count()
        self._lock = threading.RLock()

    def create(self, local: LocalShard, memory: torch.Tensor | None = None) -> None:
        """Create the shard; if the tier `reserves`, a full disk is reported here."""
        if memory is not None:
            raise UsageError(f"array {local.spec.name!r}: the disk tier cannot adopt memory")
        layout = layout_of(local.grid, local.shard, local.spec.dtype)
        packed, kind = self.packs_small and is_packed(local.nbytes), local.spec.name.partition("/")[0]
        with self._lock:  # not held while a file is created, so that files are created concurrently
            folder = self._drives.choose(local.spec.name, run_file_bytes(layout, packed=packed))
            if packed and (folder, kind) not in self._packs:
                self._packs[folder, kind] = Pack(self._res.files, folder, kind)
        crcs: list[int | None] = [None] * layout.num_present
        if packed:
            pack = self._packs[folder, kind]
            part = DiskFile(pack.path(0), crcs, pack.add(layout.num_present * layout.slot_bytes))
            shard = DiskShard(local, layout, folder, part, pack)
        else:
            path = self._new_path(folder, local.spec.name)
            shard = DiskShard(local, layout, folder, DiskFile(path, crcs, layout.data_offset, exists=False))
            if self._reserves:
                self._create_file(shard, shard.current)
        self._shards[local.spec.name] = shard

    def _create_file(self, shard: DiskShard, file: DiskFile) -> None:
        """Create a file unless it exists."""
        if not file.exists and shard.layout.num_present:
            make_shard_file(self._res, file.path, shard.layout)
        file.exists = True

    def folders(self) -> dict[str, Path]:
        """Return the folder of each shard, by array."""
        return {name: shard.folder for name, shard in self._shards.copy().items()}

    def remove(self, name: str) -> None:
        with self._lock:
            shard = self._idle_shard(name)
        if shard.pack is None:  # first: if the file cannot be removed, the shard remains
            self._remove_spare(shard)
            self._res.files.unlink(shard.current.path)
        with self._lock:
            del self._shards[name]
            layout = shard.layout
            self._drives.assigned_bytes[shard.folder] -= run_file_bytes(layout, packed=shard.pack is not None)
        if shard.pack is None:
            with contextlib.suppress(StorageError):  # the shard was removed; `close` removes leftovers
                self._remove_spare(shard)  # a version that was being read in the meantime
        elif len(shard.in_use) == 1:  # otherwise an earlier version is still being read
            shard.pack.free_region(shard.current.base, layout.num_present * layout.slot_bytes)

    def _remove_spare(self, shard: DiskShard) -> None:
        with self._lock:
            spare, shard.spare = shard.spare, None
        if spare is not None:
            self._res.files.unlink(spare.path)

    def rename(self, name: str, local: LocalShard) -> None:
        with self._lock:
            shard = self._idle_shard(name)
            for file in (shard.current, shard.spare):
                if file is not None and file.exists and shard.layout.num_present and shard.pack is None:
                    path = self._new_path(shard.folder, local.spec.name)
                    self._res.files.rename(file.path, path)
                    file.path = path
            shard.local, shard.current.version = local, new_version()
            self._shards[local.spec.name] = self._shards.pop(name)

    def _idle_shard(self, name: str) -> DiskShard:
        shard = self._shards[name]
        if shard.target is not None or shard.current.pins:
            raise busy_error(name)
        return shard

    def adopt(self, name: str, path: Path, crcs: Sequence[int]) -> bool:
        """Make the shard file `path`, which must never be written again, the current version of a shard that no pass is
        changing; return False if it cannot be linked. `crcs` are the checksums of its chunks."""
        shard = self._shards[name]
        if len(crcs) != shard.layout.num_present:
            raise UsageError(f"array {name!r}: expected {shard.layout.num_present} checksums, got {len(crcs)}")
        with self._lock:
            if shard.target is not None:
                raise busy_error(name)
            if shard.pack is not None:
                return False
            link = self._new_path(shard.folder, name)
            try:
                self._res.files.link(path, link)
            except OSError:
                return False
            previous = shard.current
            shard.current = DiskFile(link, list(crcs), shard.layout.data_offset, published=True, origin=path)
            shard.broken = False
            self._release_file(shard, previous)
        return True

    def version(self, name: str) -> int:
        return self._shards[name].current.version

    def begin(self, name: str, mode: Mode) -> None:
        self._begin(name, mode, make=True)

    def _begin(self, name: str, mode: Mode, *, make: bool) -> DiskShard:
        shard = self._shards[name]
        if shard.broken and mode is not Mode.FILL:
            raise UsageError(
                f"array {name!r}: an earlier update failed partway, so its values are lost: load a checkpoint"
            )
        with self._lock:
            if shard.target is shard.current or (shard.target is not None and mode is not Mode.READ):
                raise busy_error(name)
            if mode is not Mode.READ:
                is_immutable = shard.current.pins > 0 or shard.current.published
                target = self._next_file(shard) if is_immutable else shard.current
                if make:
                    self._create_file(shard, target)
                shard.target, shard.has_writes = target, False
                if not is_immutable:
                    shard.current.version = new_version()
        return shard

    def _next_file(self, shard: DiskShard) -> DiskFile:
        """Return a file for the next version: the spare, renamed, or a file yet to be created; in a pack, a region of a
        free generation."""
        if shard.pack is not None:
            free = next(number for number in count() if number not in shard.in_use)
            path = shard.pack.make(free)
            shard.in_use.add(free)
            return DiskFile(path, [None] * shard.layout.num_present, shard.current.base, free)
        path, spare = self._new_path(shard.folder, shard.local.spec.name), shard.spare
        if spare is not None:
            self._res.files.rename(spare.path, path)
            shard.spare = None
        return DiskFile(path, [None] * shard.layout.num_present, shard.layout.data_offset, exists=spare is not None)

    def _new_path(self, folder: Path, name: str) -> Path:
        """Return a path that was never used before: the file of a removed shard of that name may still be pinned."""
        stem = quote(name, safe="")
        if len(stem) > 200:
            stem = f"{stem[:150]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        return folder / f"{stem}.{next(self._numbers)}.shard"

    def span_bytes(self, name: str, num_chunks: int) -> int:
        return num_chunks * self._shards[name].layout.slot_bytes

    def span_chunks(self, name: str) -> int:
        return self._shards[name].layout.chunks_in(self._request_bytes)

    def load(self, pieces: Sequence[Piece], memory: Bytes, priority: Priority, tickets: list[Ticket[None]]) -> None:
        """Start reading pieces into `memory`; each operation's ticket is added to `tickets` as it starts."""
        parts: list[_Part] = []
        for piece in pieces:
            shard = self._shards[piece.name]
            if all(shard.current.crcs[chunk] is None for chunk in piece.span.chunks):
                piece.slice_of(memory)[:] = 0
            else:
                parts.append((shard, shard.current, piece))
        self._submit(_read, parts, memory, priority, tickets)

    def views(self, name: str, span: ChunkSpan, buffer: Bytes, mode: Mode) -> Iterator[View]:
        shard = self._shards[name]
        return checked_views(self._res, shard, shard.current, span, buffer, mode)

    def save(self, pieces: Sequence[Piece], memory: Bytes, tickets: list[Ticket[None]]) -> None:
        """Start writing pieces from `memory`; see `load`."""
        shards = [self._shards[piece.name] for piece in pieces]
        parts = [(shard, self._writable_file(shard), piece) for shard, piece in zip(shards, pieces, strict=True)]
        self._submit(_write, parts, memory, Priority.WRITE_BACK, tickets)

    def _submit(
        self, move: _Move, parts: Sequence[_Part], memory: Bytes, priority: Priority, tickets: list[Ticket[None]]
    ) -> None:
        """Queue one operation per piece, or one for all packed pieces of a kind."""
        by_file: dict[object, list[_Part]] = {}
        for part in parts:
            shard, _, piece = part
            by_file.setdefault(shard if shard.pack is None else piece.kind, []).append(part)
        for group in by_file.values():
            task, nbytes = partial(move, self._res, group, memory), sum(piece.nbytes for _, _, piece in group)
            tickets.append(self._res.queue.submit(task, priority, nbytes, label=group[0][2].kind))

    def replace(self, name: str, data: Array) -> None:
        """Set all values of a shard that has a separate file, directly from `data`, in a pass without a consumer."""
        shard, ok = self._begin(name, Mode.FILL, make=self._reserves), False
        try:
            fill_file(self._res, shard, self._writable_file(shard), data)
            ok = True
        finally:
            self.end(name, ok)

    def read(self, name: str, first: int, stop: int, out: Array) -> bool:
        """Read local elements `[first, stop)` of a shard that has a separate file directly into `out`. Return False if
        parts of the shard were never written or a checksum differs; a pass then reports the details."""
        shard = self._begin(name, Mode.READ, make=False)
        return read_elements(self._res, shard, shard.current, first, stop, out)

    def _writable_file(self, shard: DiskShard) -> DiskFile:
        """Return the file that the running pass writes to."""
        if shard.target is None:
            raise UsageError(
                f"array {shard.local.spec.name!r}: a span can only be saved in a pass that changes the shard"
            )
        shard.has_writes = True
        return shard.target

    def file_position(self, name: str) -> tuple[str, int]:
        shard = self._shards[name]
        return ("", 0) if shard.pack is None else (str(shard.current.path), shard.current.base)

    def is_packed(self, name: str) -> bool:
        return self._shards[name].pack is not None

    def end(self, name: str, ok: bool) -> None:
        shard = self._shards[name]
        with self._lock:
            target, shard.target = shard.target, None
            if target is None:
                return
            if target is shard.current:
                shard.broken = not ok and (shard.has_writes or shard.broken)
            elif ok:
                previous, shard.current, shard.broken = shard.current, target, False
                self._release_file(shard, previous)
            else:
                self._release_file(shard, target)

    def _release_file(self, shard: DiskShard, file: DiskFile) -> None:
        """Release a file that is no longer the current version, once it is unpinned."""
        if file.pins or file is shard.current:
            return
        if shard.pack is not None:
            shard.in_use.discard(file.generation)
            return
        is_free = file.exists and not file.published
        if self._shards.get(shard.local.spec.name) is shard and is_free and shard.spare is None and file.crcs:
            shard.spare = file
        elif file.crcs:
            self._res.files.unlink(file.path)

    def pin(self, name: str) -> DiskPin:
        shard = self._shards[name]
        if shard.broken:
            raise UsageError(f"array {name!r}: an earlier update failed partway: load a checkpoint before saving one")
        with self._lock:
            if shard.target is shard.current:
                raise busy_error(name)
            self._create_file(shard, shard.current)
            shard.current.pins += 1
            return DiskPin(self, shard, shard.current)

    def next_bytes(self, names: Iterable[str]) -> Counter[Path]:
        """Return, by folder, the bytes of the new files needed to change these shards while their current versions are
        pinned."""
        needed: Counter[Path] = Counter()
        packs: dict[Pack, Path] = {}
        for shard in [self._shards[name] for name in names]:
            if shard.pack is not None:
                packs[shard.pack] = shard.folder
            elif shard.layout.num_present and shard.spare is None:
                needed[shard.folder] += shard.layout.file_bytes
        for pack, folder in packs.items():
            needed[folder] += pack.missing_bytes(1)
        return needed

    def unpin(self, shard: DiskShard, file: DiskFile) -> None:
        """Drop one pin of `file`."""
        with self._lock:
            file.pins -= 1
            self._release_file(shard, file)

    def close(self) -> None:
        """Remove the files: nothing in the run folder outlives the run."""
        for pack in self._packs.values():
            pack.close()
        for shard in [shard for shard in self._shards.values() if shard.pack is None]:
            for file in {id(f): f for f in (shard.current, shard.spare, shard.target) if f is not None}.values():
                self._res.files.unlink(file.path)
        self._shards.clear()
        self._packs.clear()


def _runs(parts: Sequence[_Part]) -> list[PackRun]:
    transfers = []
    for shard, file, piece in parts:
        offset = shard.offset(file, piece.span.first_chunk)
        transfers.append(PackRun(path=file.path, offset=offset, memory_offset=piece.memory_offset, nbytes=piece.nbytes))
    return merge_runs(transfers)


def _read(res: IoResources, parts: Sequence[_Part], memory: Bytes) -> None:
    for run in _runs(parts):
        read_slots(res, run.path, run.offset, run.slice_of(memory))


def _write(res: IoResources, parts: Sequence[_Part], memory: Bytes) -> None:
    crcs = [finish_slots(piece.slice_of(memory), shard.layout) for shard, _, piece in parts]
    for run in _runs(parts):
        write_slots(res, run.path, run.offset, run.slice_of(memory))
    for (_, file, piece), piece_crcs in zip(parts, crcs, strict=True):
        file.crcs[piece.span.first_chunk : piece.span.first_chunk + piece.span.num_chunks] = piece_crcs


class DiskPin:
    """A pinned file of the run folder; it is never written again once published."""

    tier = "disk"

    def __init__(self, tier: DiskTier, shard: DiskShard, file: DiskFile) -> None:
        self.local = shard.local
        self._owner: DiskTier | None = tier
        self._shard = shard
        self.file = file
        self.version: int | None = file.version
        self.has_file = shard.pack is None

    def copy_into(self, out: Bytes, grid: Grid, shard: int) -> None:
        raise UsageError(f"array {self.local.spec.name!r}: a shard on disk can only be published as a whole file")

    def checksums(self, res: IoResources, grid: Grid, shard: int) -> tuple[int, ...]:
        """See `PinnedShard`; empty unless the whole shard has been written."""
        self._require_layout(grid, shard)
        return tuple([] if None in self.file.crcs else [crc for crc in self.file.crcs if crc is not None])

    def publish(self, res: IoResources, path: str | Path, grid: Grid, shard: int, priority: Priority) -> ShardSummary:
        """Link the file to `path`, or copy it if links are not supported; see `PinnedShard.publish`."""
        local, file = self.local, self.file
        self._require_layout(grid, shard)
        crcs = [crc for crc in file.crcs if crc is not None]
        if not crcs or len(crcs) < len(file.crcs) or not self.has_file:
            return self._copy(res, path, priority)
        if res.sync:
            res.files.sync_file(file.path)
        if not self._link(res, path):
            return self._copy(res, path, priority)
        return ShardSummary(local.spec.name, shard, self._shard.layout.file_bytes, tuple(crcs), linked=True)

    def _require_layout(self, grid: Grid, shard: int) -> None:
        if (grid, shard) != (self.local.grid, self.local.shard):
            raise UsageError(
                f"array {self.local.spec.name!r}: a shard on disk can only be published with its own layout"
            )

    def _link(self, res: IoResources, path: str | Path) -> bool:
        """Link the file to `path`; return False if links are not supported."""
        with self._shard.lock:
            was_published = self.file.published
            # Set first: once the link exists, the file must not be written again.
            self.file.published = True
            try:
                res.files.link(self.file.path, path)
            except OSError:
                # Another save may have linked it already.
                self.file.published = was_published
                return False
        return True

    def _copy(self, res: IoResources, path: str | Path, priority: Priority) -> ShardSummary:
        shard, file, layout = self._shard, self.file, self._shard.layout
        make_shard_file(res, path, layout)
        step = res.span_chunks(layout)
        tickets: list[Ticket[list[int]]] = []
        for first in range(0, layout.num_present, step):
            span = ChunkSpan(first, min(step, layout.num_present - first))
            buffer = res.pool.acquire(span.num_chunks * layout.slot_bytes)

            def copy(first: int = first, span: ChunkSpan = span, data: Bytes = buffer.bytes) -> list[int]:
                read_slots(res, file.path, shard.offset(file, first), data)
                for _ in checked_views(res, shard, file, span, data, Mode.UPDATE):
                    pass  # iterating verifies and reseals the chunks
                crcs = finish_slots(data, layout)
                write_slots(res, path, layout.slot_offset(first), data)
                return crcs

            tickets.append(res.queue.submit(copy, priority, buffer.bytes.size))
            tickets[-1].when_done(buffer.release)
        crcs = [crc for part in wait_all(tickets) for crc in part]
        if res.sync:
            res.files.sync_file(path)
        return ShardSummary(self.local.spec.name, self.local.shard, layout.file_bytes, tuple(crcs))

    def release(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.unpin(self._shard, self.file)
