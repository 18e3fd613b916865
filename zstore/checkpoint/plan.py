"""The plan of a checkpoint: its arrays, how they are cut, and whose state it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy.typing as npt

from ..format.arrays import ArraySpec
from ..format.codecs import Codec
from ..format.partition import Grid, make_grid
from ..format.shardfile import layout_of
from ..io.files import Files
from .format import sha256
from .names import array_path, shard_file


# See [Note: objects of a save].
@lru_cache(maxsize=2)
def _layout_digest(specs: Sequence[ArraySpec], grids: Sequence[Grid], pieces: Sequence[Grid | None]) -> str:
    described: list[str] = []
    for spec, grid, held in zip(specs, grids, pieces, strict=True):
        cut = [grid.shard_rows, grid.chunk_rows, grid.chunk_cols, *([] if held is None else [held.shard_rows])]
        described.append(json.dumps([spec.name, spec.shape, spec.dtype, *cut], separators=(",", ":")))
    return sha256(f"[{','.join(described)}]".encode())


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """A checkpoint as every rank plans it alike. Rank r stores shard r of each array's grid."""

    tag: str
    step: int
    world_size: int
    save_id: str
    """From `new_save_id()` of rank 0, the same on every rank."""
    run_id: str = ""
    """The training run, kept across resumes: the save replaces a checkpoint of the same run and tag. Needed for `keep`."""
    specs: Mapping[str, ArraySpec]
    """All arrays of the checkpoint, on every rank alike."""
    grids: Mapping[str, Grid]
    """How each array is cut in the checkpoint; those of `small` may be left out (one shard)."""
    pieces: Mapping[str, Grid] = field(default_factory=dict)
    """How the ranks hold those arrays that `grids` has in one shard: each rank gives its rows to rank 0."""
    small: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Arrays that rank 0 stores whole: module buffers, the client's tensors. Every rank names them, rank 0's count."""
    codec: Codec | None = None
    """The codec of the chunks of an archive, with no arrays in `small`."""

    def grid(self, name: str) -> Grid:
        """Return how the array is cut in the checkpoint."""
        return self.grids[name] if name in self.grids else make_grid(self.specs[name].stored_shape, 1)

    def file_bytes(self, name: str, shard: int) -> int:
        """Return the bytes of a shard's file, not compressed; 0 if the shard has no rows and so no file."""
        layout = layout_of(self.grid(name), shard, self.specs[name].dtype)
        return layout.file_bytes if layout.num_present else 0

    def layout_digest(self) -> str:
        """Return the SHA-256, hex, of all arrays and how they are cut: ranks with the same one agree on every shard.

        Arrays that rank 0 stores whole do not concern the others.
        """
        names = sorted(self.specs.keys() - self.small.keys())
        grids, pieces = (tuple(map(of, names)) for of in (self.grid, self.pieces.get))
        return _layout_digest(tuple(self.specs[name] for name in names), grids, pieces)

    def shard_path(self, name: str, shard: int) -> str:
        """Return the path of a shard's file inside the checkpoint."""
        return f"{array_path(name)}/{shard_file(len(self.specs[name].stored_shape), shard)}"

    def require_room(self, files: Files, folder: Path, extra_bytes: int = 0) -> None:
        """Raise DiskFullError if `folder` has no room for all shard files, and `extra_bytes` on the way."""
        shards = [(name, shard) for name in self.specs for shard in range(self.grid(name).num_shards)]
        needed = extra_bytes + sum(self.file_bytes(name, shard) for name, shard in shards)
        files.require_room(folder, needed, f"the checkpoint needs {needed} bytes")
