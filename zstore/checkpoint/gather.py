"""What rank 0 adds before it commits: the metadata, and the certainty that every rank's part is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, RankError
from ..io.pool import Crew
from .commit import READ_ONLY
from .format import COMPLETE, Manifest, Record, dump_metadata, read_json, sha256
from .metadata import make_documents
from .names import MANIFEST_FOLDER, METADATA_FILE, manifest_file
from .publish import sync_file
from .request import SaveRequest


class Gatherer:
    """Completes the temporary folder `folder` of the save `request`."""

    def __init__(self, request: SaveRequest, folder: Path) -> None:
        self._request = request
        self._folder = folder
        self._files = request.resources.files
        self._documents = make_documents(
            request.specs, {name: request.grid(name) for name in request.specs}, request.codec
        )
        self.metadata_sha256 = sha256(dump_metadata(self._documents[""]))
        """Of the root's metadata, which names all arrays."""
        self._own_layout = ""
        self._found: dict[int, str] = {}
        """Digests of the manifests that were looked at, by rank."""

    def write_metadata(self, crew: Crew) -> None:
        """Write every `zarr.json`, durably."""
        crew.run(self.metadata_tasks())
        crew.run(self.metadata_syncs())

    def metadata_tasks(self) -> list[Callable[[], None]]:
        """Return a task for each `zarr.json` that writes it."""

        def write(folder: str) -> None:
            self._files.make_folder(self._folder / folder)
            path = self._folder / folder / METADATA_FILE
            self._files.write_small(path, dump_metadata(self._documents[folder]), sync=False)
            os.chmod(path, READ_ONLY)

        return [partial(write, folder) for folder in self._documents]

    def metadata_syncs(self) -> list[Callable[[], None]]:
        """Return a task for each `zarr.json` that makes it durable, once all are written."""
        return [partial(sync_file, self._files, self._folder / folder / METADATA_FILE) for folder in self._documents]

    def collect(self) -> bool:
        """Look at the manifests that came since the last call; return whether those of all ranks are there.

        Raises RankError as soon as one says that its rank failed, CheckpointError for one of another save or model.
        """
        for rank in self._arrived():
            path = self._folder / manifest_file(rank)
            data = read_json(path)
            # Each rank made sure of its own shards: the list of them, of which there are millions, is not looked at.
            manifest = Manifest.decode_head(data, str(path))
            if manifest.outcome != COMPLETE:
                raise RankError(f"rank {rank} could not save its part of {self._folder}", {rank: manifest.outcome})
            if (manifest.id, manifest.rank) != (self._request.save_id, rank):
                raise CheckpointError(f"{path} belongs to another save or rank; save again")
            if manifest.layout != self._layout():
                raise CheckpointError(
                    f"rank {rank} saved other arrays than rank 0, or cut them in another way: every rank needs the same model"
                )
            self._found[rank] = sha256(data)
        return len(self._found) == self._request.world_size

    def _arrived(self) -> list[int]:
        """Return the ranks whose manifest is there and was not looked at."""
        names = set(os.listdir(self._folder / MANIFEST_FOLDER))
        return [rank for rank in self.missing_ranks() if os.path.basename(manifest_file(rank)) in names]

    def _layout(self) -> str:
        self._own_layout = self._own_layout or self._request.layout_digest()
        return self._own_layout

    def missing_ranks(self) -> list[int]:
        """Return the ranks whose manifest is not there yet."""
        return [rank for rank in range(self._request.world_size) if rank not in self._found]

    def check_complete(self) -> None:
        """Raise CheckpointError unless every shard of every array is some rank's, which made sure that it stored it."""
        for name in self._request.specs:
            num_shards = self._request.grid(name).num_shards
            if num_shards > self._request.world_size:
                raise CheckpointError(
                    f"array {name!r}: no rank stored shard {self._request.world_size} of {num_shards}; rank r stores shard "
                    "r, so an array has at most as many as there are ranks"
                )

    def sync_folders(self, crew: Crew) -> None:
        """Make all names in the folder durable."""
        # Not by a walk: a folder has a file for each rank.
        folders = [self._folder, self._folder / MANIFEST_FOLDER]
        folders += [self._folder / folder for folder in self._documents if folder]
        crew.run([partial(self._files.sync_folder, folder) for folder in folders])

    def record(self, state: Mapping[str, Any], *, training_world_size: int | None = None) -> Record:
        """Return the commit record, once all manifests are there."""
        request = self._request
        return Record(
            id=request.save_id,
            tag=request.tag,
            step=request.step,
            world_size=request.world_size,
            training_world_size=training_world_size or request.world_size,
            run=request.run_id,
            metadata_sha256=self.metadata_sha256,
            manifest_sha256=tuple(self._found[rank] for rank in range(request.world_size)),
            state=state,
        )
