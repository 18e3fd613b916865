"""Checkpoints: the format, saving and committing, reading and verifying, retention. Imports no torch.

Read `docs/format.md` for the bytes, and in this order: names, format, metadata; request, known, publish, gather, commit,
handle, write; folder, catalog, source, read, ahead, verify,
reshard, usage, keep, retention.
"""

from .ahead import ReadAhead
from .catalog import Catalog, Refusal, TagInfo, list_tags, tags_text
from .commit import new_folder, temporary_folder
from .folder import Folder, LocalFolder, Traffic
from .format import Manifest, Record, ShardEntry
from .handle import SaveHandle
from .keep import Keep
from .known import KnownFile
from .names import new_save_id, step_tag, tag_text
from .read import CheckpointReader, Reading, open_checkpoint, refused, tags
from .request import SaveRequest, SaveSummary
from .reshard import reshard_checkpoint
from .retention import Fate, prune, retire, weigh
from .source import ArraySource, StoredArray
from .usage import StoredFile, bytes_freed, count_files, size_bytes, stored_files
from .verify import Fault, verify_checkpoint
from .write import save_checkpoint

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
