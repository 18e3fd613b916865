"""One rank's part of a save by DCP to a URL: each shard file is uploaded as soon as it is whole, and removed from disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from zstore.checkpoint import StoredArray, array_path
from zstore.errors import CheckpointError
from zstore.format import ArrayLayout, ArraySpec, Box, Bytes, Grid, make_grid
from zstore.io import ShardSummary, Workers
from zstore.remote.fsspec_folder import RemoteFolder
from zstore.remote.send import PART_BYTES
from zstore.remote.version_target import VersionTarget
from zstore.store import PinnedShard

from .work import PIECES_FOLDER, RankWriter, Wrote

_PAUSE_S = 0.5
"""Pause between two looks for a piece: each is a request."""


@dataclass
class UploadingRankWriter(RankWriter):
    """Writes one rank's part of a save in the folder `scratch` of its own, and uploads it to `remote` a file at a time.

    The disk holds at most one shard file for each thread, and the pieces that it is put together from.
    """

    remote: RemoteFolder = field(kw_only=True)
    scratch: Path = field(kw_only=True)

    @cached_property
    def folder(self) -> Path:
        return self.scratch

    def check_folder(self) -> None:
        """Do nothing: nothing is shared but the URL."""

    def deliver(self, path: Path) -> None:
        """Upload a file, and remove it here."""
        self._upload(path)

    def _upload(self, path: Path) -> None:
        self.remote.send(path, path.relative_to(self.scratch).as_posix(), lambda _: None)
        self.resources.files.unlink(path)

    def publish(self, spec: ArraySpec, grid: Grid, box: Box, pin: PinnedShard) -> Wrote | None:
        if (wrote := super().publish(spec, grid, box, pin)) is None:
            return None
        self.deliver(self.shard_path(spec, wrote.shard))
        return replace(wrote, linked=False)

    def require_room(self, layouts: Iterable[tuple[ArrayLayout, Box]]) -> None:
        """Require room for the largest file: one is there at a time."""

    def write_piece(self, layout: ArrayLayout, box: Box, data: Bytes) -> None:
        super().write_piece(layout, box, data)
        self._upload(self.piece_path(layout, box))

    @contextlib.contextmanager
    def piece(self, path: Path) -> Iterator[Path]:
        name = path.relative_to(self.scratch).as_posix()
        self.wait_for(lambda: self.remote.has(name), self.remote.location_of(name))
        copy = path.with_suffix(f".for-{self.share.rank}")
        copy.parent.mkdir(parents=True, exist_ok=True)
        with copy.open("wb") as file:
            while data := self.remote.read_range(name, file.tell(), file.tell() + PART_BYTES):
                file.write(data)
                if len(data) < PART_BYTES:
                    break
        yield copy
        copy.unlink()

    def check_others(self) -> None:
        folder = self.remote.child(PIECES_FOLDER)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in folder.entries().files:
                if name.startswith("failed-"):
                    raise CheckpointError(f"another rank gave up the save: {folder.read_small(name).decode()}")

    def give_up(self, error: BaseException) -> None:
        with contextlib.suppress(OSError):
            reason = f"rank {self.share.rank}: {type(error).__name__}: {error}"
            self.remote.child(PIECES_FOLDER).write_small(f"failed-{self.share.rank}.txt", reason.encode())


@dataclass
class VersionRankWriter(UploadingRankWriter):
    """Writes one rank's part of a version: all its shard files in `scratch`, then the packs of those that changed."""

    target: VersionTarget = field(kw_only=True)

    def deliver(self, path: Path) -> None:
        """Do nothing: it goes with the others."""

    def require_room(self, layouts: Iterable[tuple[ArrayLayout, Box]]) -> None:
        RankWriter.require_room(self, layouts)

    def complete(self, wrote: Sequence[Wrote], opaque: Iterable[ArraySpec], workers: Workers) -> list[Wrote]:
        """Send the shard files: each part is one."""
        cuts = {layout.spec.name: (layout.spec, layout.grid) for layout in self.share.arrays.values()}
        cuts |= {spec.name: (spec, make_grid(spec.stored_shape, 1)) for spec in opaque}
        arrays = {name: StoredArray(spec=cut[0], grid=cut[1], folder=array_path(name)) for name, cut in cuts.items()}
        shards = [
            (array, ShardSummary(each.array, each.shard, array.shard_file_bytes(each.shard), each.crcs))
            for each in wrote
            for array in [arrays[each.array]]
        ]
        places = self.target.send_files(workers, self.scratch, shards, lambda _: None)
        return [replace(each, place=places[arrays[each.array].shard_file(each.shard)]) for each in wrote]
