"""Checkpoints: the format, saving and committing, reading and verifying, retention. Imports no torch.

Read `docs/format.md` for the bytes, and in this order: names, format, metadata; request, known, publish, pieces, gather,
commit, handle, write; folder, catalog, source, read, ahead, verify,
reshard, usage, keep, retention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..handout import on_first_use

if TYPE_CHECKING:
    from .catalog import Catalog, Refusal, TagInfo, list_tags, tags_text
    from .commit import new_folder, temporary_folder
    from .folder import Folder, LocalFolder, Traffic
    from .format import Manifest, Record, ShardEntry
    from .handle import SaveHandle
    from .keep import Keep
    from .lookahead import ReadAhead
    from .names import new_save_id, step_tag, tag_text
    from .reader import CheckpointReader, open_checkpoint, refused, tags
    from .request import SaveRequest, SaveSummary
    from .reshard import reshard_checkpoint
    from .retention import Fate, prune, retire, weigh
    from .reuse import KnownFile
    from .save import save_checkpoint
    from .source import ArraySource, Reading, StoredArray
    from .usage import StoredFile, bytes_freed, count_files, size_bytes, stored_files
    from .verify import Fault, verify_checkpoint

__all__ = [
    "ArraySource",
    "Catalog",
    "CheckpointReader",
    "Fate",
    "Fault",
    "Folder",
    "Keep",
    "KnownFile",
    "LocalFolder",
    "Manifest",
    "ReadAhead",
    "Reading",
    "Record",
    "Refusal",
    "SaveHandle",
    "SaveRequest",
    "SaveSummary",
    "ShardEntry",
    "StoredArray",
    "StoredFile",
    "TagInfo",
    "Traffic",
    "bytes_freed",
    "count_files",
    "list_tags",
    "new_folder",
    "new_save_id",
    "open_checkpoint",
    "prune",
    "refused",
    "reshard_checkpoint",
    "retire",
    "save_checkpoint",
    "size_bytes",
    "step_tag",
    "stored_files",
    "tag_text",
    "tags",
    "tags_text",
    "temporary_folder",
    "verify_checkpoint",
    "weigh",
]

__getattr__ = on_first_use(
    __name__,
    {
        "ahead": ("ReadAhead",),
        "catalog": (
            "Catalog",
            "Refusal",
            "TagInfo",
            "list_tags",
            "tags_text",
        ),
        "commit": (
            "new_folder",
            "temporary_folder",
        ),
        "folder": (
            "Folder",
            "LocalFolder",
            "Traffic",
        ),
        "format": (
            "Manifest",
            "Record",
            "ShardEntry",
        ),
        "handle": ("SaveHandle",),
        "keep": ("Keep",),
        "known": ("KnownFile",),
        "names": (
            "new_save_id",
            "step_tag",
            "tag_text",
        ),
        "read": (
            "CheckpointReader",
            "Reading",
            "open_checkpoint",
            "refused",
            "tags",
        ),
        "request": (
            "SaveRequest",
            "SaveSummary",
        ),
        "reshard": ("reshard_checkpoint",),
        "retention": (
            "Fate",
            "prune",
            "retire",
            "weigh",
        ),
        "source": (
            "ArraySource",
            "StoredArray",
        ),
        "usage": (
            "StoredFile",
            "bytes_freed",
            "count_files",
            "size_bytes",
            "stored_files",
        ),
        "verify": (
            "Fault",
            "verify_checkpoint",
        ),
        "write": ("save_checkpoint",),
    },
)
