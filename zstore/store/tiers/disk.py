"""The disk tier: shard files in a run folder, replaced by new versions once published.

[Note: versions]
Each shard is one file in the run folder, with a number in its name. While that file is neither pinned nor published, a pass
changes it in place. Once it is pinned, a pass writes another file and makes it the current one when it ends: a published file
is never written again. A table in memory decides, never link counts. A superseded published file loses its name in the run
folder (the checkpoint's link keeps the bytes); any other is kept for the next version.

A chunk that was never written has no checksum in the table and reads as zeros without touching the disk. A checkpoint's
file with the same layout can be adopted: a link to it becomes the current version, published, and verified when it is
read. Small shards share files: see [Note: shared files].
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
from .base import ChunkSpan, Mode, Piece, Tier, View, being_changed, new_version
from .diskfiles import (
    DiskFile,
    DiskShard,
    Pack,
    PackRun,
    checked_views,
    fill_file,
    is_packed,
    read_elements,
    read_slots,
    run_file_bytes,
    runs_of,
    write_slots,
)

if TYPE_CHECKING:
    import torch


@dataclass
class Drives:
    """Folders on the drives that shards are spread over: a new shard goes to the folder with the fewest bytes."""

    usual: tuple[Path, ...]
    groups: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    """Other folders by the first part of an array's name."""
    assigned_bytes: Counter[Path] = field(default_factory=Counter)

    def choose(self, name: str, nbytes: int) -> Path:
        """Return the folder for `nbytes` of array `name`; deterministic for a given order of calls."""
        folders = self.groups.get(name.split("/", 1)[0], self.usual)
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
        """Whether a shard's file is created with the shard, rather than on the first write."""
        self._packs: dict[tuple[Path, str], Pack] = {}
        """Packs by folder and kind of arrays."""
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
            shard = DiskShard(local, layout, folder, DiskFile(path, crcs, layout.data_offset, made=False))
            if self._reserves:
                self._make(shard, shard.current)
        self._shards[local.spec.name] = shard

    def _make(self, shard: DiskShard, file: DiskFile) -> None:
        """Create a file unless it exists."""
        if not file.made and shard.layout.num_present:
            make_shard_file(self._res, file.path, shard.layout)
        file.made = True

    def folders(self) -> dict[str, Path]:
        """Return the folder of each shard, by array."""
        return {name: shard.folder for name, shard in self._shards.copy().items()}

    def remove(self, name: str) -> None:
        with self._lock:
            shard = self._at_rest(name)
        if shard.pack is None:  # a shard whose file cannot be removed stays as it was
            self._drop_spare(shard)
            self._res.files.unlink(shard.current.path)
        with self._lock:
            del self._shards[name]
            layout = shard.layout
            self._drives.assigned_bytes[shard.folder] -= run_file_bytes(layout, packed=shard.pack is not None)
        if shard.pack is None:
            with contextlib.suppress(StorageError):  # the shard was removed; `close` removes the rest
                self._drop_spare(shard)  # a version that was being read in the meantime
        elif len(shard.in_use) == 1:  # else an earlier version is read there
            shard.pack.give_back(shard.current.base, layout.num_present * layout.slot_bytes)

    def _drop_spare(self, shard: DiskShard) -> None:
        with self._lock:
            spare, shard.spare = shard.spare, None
        if spare is not None:
            self._res.files.unlink(spare.path)

    def rename(self, name: str, local: LocalShard) -> None:
        with self._lock:
            shard = self._at_rest(name)
            for file in (shard.current, shard.spare):
                if file is not None and file.made and shard.layout.num_present and shard.pack is None:
                    path = self._new_path(shard.folder, local.spec.name)
                    self._res.files.rename(file.path, path)
                    file.path = path
            shard.local, shard.current.version = local, new_version()
            self._shards[local.spec.name] = self._shards.pop(name)

    def _at_rest(self, name: str) -> DiskShard:
        shard = self._shards[name]
        if shard.target is not None or shard.current.pins:
            raise being_changed(name)
        return shard

    def adopt(self, name: str, path: Path, crcs: Sequence[int]) -> bool:
        """Let the shard file `path`, which is never written again, become the current version of a shard with no pass
        in progress; return False if it cannot be linked. `crcs` are the checksums of its chunks."""
        shard = self._shards[name]
        if len(crcs) != shard.layout.num_present:
            raise UsageError(f"array {name!r}: expected {shard.layout.num_present} checksums, got {len(crcs)}")
        with self._lock:
            if shard.target is not None:
                raise being_changed(name)
            if shard.pack is not None:
                return False
            link = self._new_path(shard.folder, name)
            try:
                self._res.files.link(path, link)
            except OSError:
                return False
            former = shard.current
            shard.current = DiskFile(link, list(crcs), shard.layout.data_offset, published=True, origin=path)
            shard.broken = False
            self._retire(shard, former)
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
                raise being_changed(name)
            if mode is not Mode.READ:
                frozen = shard.current.pins > 0 or shard.current.published
                target = self._next_file(shard) if frozen else shard.current
                if make:
                    self._make(shard, target)
                shard.target, shard.touched = target, False
                if not frozen:
                    shard.current.version = new_version()
        return shard

    def _next_file(self, shard: DiskShard) -> DiskFile:
        """Return a file for the next version: the spare renamed, or one yet to be created; for a pack, a free region."""
        if shard.pack is not None:
            free = next(number for number in count() if number not in shard.in_use)
            path = shard.pack.make(free)
            shard.in_use.add(free)
            return DiskFile(path, [None] * shard.layout.num_present, shard.current.base, free)
        path, spare = self._new_path(shard.folder, shard.local.spec.name), shard.spare
        if spare is not None:
            self._res.files.rename(spare.path, path)
            shard.spare = None
        return DiskFile(path, [None] * shard.layout.num_present, shard.layout.data_offset, made=spare is not None)

    def _new_path(self, folder: Path, name: str) -> Path:
        """Return a path that was never used before: a file of a removed shard of that name may still be pinned."""
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
                piece.of(memory)[:] = 0
            else:
                parts.append((shard, shard.current, piece))
        self._submit(_read, parts, memory, priority, tickets)

    def views(self, name: str, span: ChunkSpan, buffer: Bytes, mode: Mode) -> Iterator[View]:
        shard = self._shards[name]
        return checked_views(self._res, shard, shard.current, span, buffer, mode)

    def save(self, pieces: Sequence[Piece], memory: Bytes, tickets: list[Ticket[None]]) -> None:
        """Start writing pieces from `memory`; see `load`."""
        shards = [self._shards[piece.name] for piece in pieces]
        parts = [(shard, self._touch(shard), piece) for shard, piece in zip(shards, pieces, strict=True)]
        self._submit(_write, parts, memory, Priority.WRITE_BACK, tickets)

    def _submit(
        self, move: _Move, parts: Sequence[_Part], memory: Bytes, priority: Priority, tickets: list[Ticket[None]]
    ) -> None:
        """Queue one operation per piece, or one for all pieces of a kind that share files."""
        together: dict[object, list[_Part]] = {}
        for part in parts:
            shard, _, piece = part
            together.setdefault(shard if shard.pack is None else piece.kind, []).append(part)
        for some in together.values():
            task, nbytes = partial(move, self._res, some, memory), sum(piece.nbytes for _, _, piece in some)
            tickets.append(self._res.queue.submit(task, priority, nbytes, subject=some[0][2].kind))

    def replace(self, name: str, data: Array) -> None:
        """Set all values of a shard that has a separate file, from `data` itself: a pass without a consumer."""
        shard, ok = self._begin(name, Mode.FILL, make=self._reserves), False
        try:
            fill_file(self._res, shard, self._touch(shard), data)
            ok = True
        finally:
            self.end(name, ok)

    def read(self, name: str, first: int, stop: int, out: Array) -> bool:
        """Read local elements `[first, stop)` of a shard that has a separate file into `out` itself. False if part was
        never written or a checksum differs; a pass then reports the details."""
        shard = self._begin(name, Mode.READ, make=False)
        return read_elements(self._res, shard, shard.current, first, stop, out)

    def _touch(self, shard: DiskShard) -> DiskFile:
        """Return the file that the running pass writes."""
        if shard.target is None:
            raise UsageError(
                f"array {shard.local.spec.name!r}: a span can only be saved in a pass that changes the shard"
            )
        shard.touched = True
        return shard.target

    def place(self, name: str) -> tuple[str, int]:
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
                shard.broken = not ok and (shard.touched or shard.broken)
            elif ok:
                former, shard.current, shard.broken = shard.current, target, False
                self._retire(shard, former)
            else:
                self._retire(shard, target)

    def _retire(self, shard: DiskShard, file: DiskFile) -> None:
        """Release a file that is no longer the current version, once it is unpinned."""
        if file.pins or file is shard.current:
            return
        if shard.pack is not None:
            shard.in_use.discard(file.generation)
            return
        is_free = file.made and not file.published
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
                raise being_changed(name)
            self._make(shard, shard.current)
            shard.current.pins += 1
            return DiskPin(self, shard, shard.current)

    def next_bytes(self, names: Iterable[str]) -> Counter[Path]:
        """Return, by folder, the bytes of new files needed to change these shards while their current versions are
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
            self._retire(shard, file)

    def close(self) -> None:
        """Removes the files, since nothing in the run folder outlives the run."""
        for pack in self._packs.values():
            pack.close()
        for shard in [shard for shard in self._shards.values() if shard.pack is None]:
            for file in {id(f): f for f in (shard.current, shard.spare, shard.target) if f is not None}.values():
                self._res.files.unlink(file.path)
        self._shards.clear()
        self._packs.clear()


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
        """See PinnedShard; empty unless the whole shard has been written."""
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
        """Link the file to `path`; false if links are not supported."""
        with self._shard.lock:
            before = self.file.published
            # Marked first: once the link exists, the file must not be written again.
            self.file.published = True
            try:
                res.files.link(self.file.path, path)
            except OSError:
                # Another save may have linked it already.
                self.file.published = before
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

            ticket = res.queue.submit(copy, priority, buffer.bytes.size)
            ticket.when_done(buffer.release)
            tickets.append(ticket)
        crcs = [crc for part in wait_all(tickets) for crc in part]
        if res.sync:
            res.files.sync_file(path)
        return ShardSummary(self.local.spec.name, self.local.shard, layout.file_bytes, tuple(crcs))

    def release(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.unpin(self._shard, self.file)
