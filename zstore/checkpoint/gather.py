"""What rank 0 adds before it commits: the metadata, and the certainty that every rank's part is there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, RankError
from .commit import READ_ONLY
from .crew import Crew
from .format import COMPLETE, Manifest, Record, dump_metadata, read_json, sha256
from .metadata import make_documents
from .names import METADATA_FILE, manifest_file
from .request import SaveRequest


class Gatherer:
    """Completes the temporary folder `folder` of the save `request`."""

    def __init__(self, request: SaveRequest, folder: Path) -> None:
        self._request = request
        self._folder = folder
        self._files = request.resources.files
        self._documents = make_documents(request.specs, {name: request.grid(name) for name in request.specs})
        self._metadata_sha256 = ""
        self._found: dict[int, tuple[Manifest, str]] = {}

    def write_metadata(self, crew: Crew) -> None:
        """Write every `zarr.json`, durably."""
        data = {folder: dump_metadata(document) for folder, document in self._documents.items()}

        def write(folder: str) -> None:
            self._files.make_folder(self._folder / folder)
            path = self._folder / folder / METADATA_FILE
            self._files.write_small(path, data[folder])
            os.chmod(path, READ_ONLY)

        crew.run([partial(write, folder) for folder in data])
        self._metadata_sha256 = sha256(data[""])

    def collect(self) -> bool:
        """Read the manifests that came since the last call; return whether those of all ranks are there.

        Raises RankError as soon as one says that its rank failed.
        """
        for rank in self.missing_ranks():
            path = self._folder / manifest_file(rank)
            try:
                data = read_json(path)
            except FileNotFoundError:
                continue
            manifest = Manifest.decode(data, str(path))
            if manifest.outcome != COMPLETE:
                raise RankError(f"rank {rank} could not save its part of {self._folder}", {rank: manifest.outcome})
            if (manifest.id, manifest.rank) != (self._request.save_id, rank):
                raise CheckpointError(f"{path} belongs to another save or rank; save again")
            self._found[rank] = (manifest, sha256(data))
        return len(self._found) == self._request.world_size

    def missing_ranks(self) -> list[int]:
        """Return the ranks whose manifest is not there yet."""
        return [rank for rank in range(self._request.world_size) if rank not in self._found]

    def check_complete(self) -> None:
        """Raise CheckpointError unless the ranks together stored every shard of every array, once."""
        stored: dict[tuple[str, int], int] = {}
        for manifest, _ in self._found.values():
            for entry in manifest.shards:
                if (entry.array, entry.shard) in stored:
                    raise CheckpointError(
                        f"array {entry.array!r}: two ranks stored shard {entry.shard}; rank r may store shard r alone"
                    )
                stored[entry.array, entry.shard] = entry.file_bytes
        for name in self._request.specs:
            for shard in range(self._request.grid(name).num_shards):
                expected = self._request.file_bytes(name, shard)
                if stored.pop((name, shard), None) != expected:
                    raise CheckpointError(
                        f"array {name!r}: no rank stored shard {shard} with the expected {expected} bytes; every rank "
                        "must pin its shard of every array"
                    )
        if stored:
            raise CheckpointError(f"shards that belong to no array were stored: {sorted(stored)[:5]}")

    def sync_folders(self, crew: Crew) -> None:
        """Make all names in the folder durable."""
        folders = [Path(root) for root, _, _ in os.walk(self._folder)]
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
            metadata_sha256=self._metadata_sha256,
            manifest_sha256=tuple(self._found[rank][1] for rank in range(request.world_size)),
            state=state,
        )
