"""Which files of a local checkpoint are uploaded."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..checkpoint.names import METADATA_FILE, RECORD_FILE, manifest_file
from ..checkpoint.reader import CheckpointReader


def shard_files(reader: CheckpointReader, ranks: Iterable[int]) -> dict[str, int]:
    """Return path and bytes of the shard files that `ranks` of the saving run wrote."""
    entries = (entry for rank in ranks for entry in reader.manifest(rank).shards)
    return {reader.array(entry.array).shard_file(entry.shard): entry.file_bytes for entry in entries}


def document_files(reader: CheckpointReader) -> dict[str, int]:
    """Return path and bytes of the root's metadata and of the manifests."""
    files = [METADATA_FILE, *(manifest_file(rank) for rank in range(reader.record.world_size))]
    return {file: os.stat(reader.path / file).st_size for file in files}


def extra_files(reader: CheckpointReader) -> dict[str, int]:
    """Return name and bytes of the files at the top that a program left there."""
    names = [name for name in reader.folder.entries().files if name not in (METADATA_FILE, RECORD_FILE)]
    return {name: os.stat(reader.path / name).st_size for name in names}


def common_files(reader: CheckpointReader) -> dict[str, int]:
    """Return path and bytes of all files of a local checkpoint except shard files, and the two that are written last."""
    folders = reader.documents["consolidated_metadata"]["metadata"]
    files = [f"{folder}/{METADATA_FILE}" for folder in folders]
    files += [manifest_file(rank) for rank in range(reader.record.world_size)]
    return {file: os.stat(reader.path / file).st_size for file in files} | extra_files(reader)
