"""Checkpoints: the format, saving and committing, reading and verifying, retention. Imports no torch.

Read `docs/format.md` for the bytes, and in this order: names, format, metadata; request, known, publish, gather, commit,
handle, write; folder, catalog, source, read, ahead, verify,
reshard, keep, retention.
"""

from .ahead import ReadAhead
from .catalog import Catalog, Refusal, TagInfo, list_tags
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
from .retention import Fate, bytes_freed, prune, retire, weigh
from .source import ArraySource, StoredArray
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
    "TagInfo",
    "Traffic",
    "bytes_freed",
    "list_tags",
    "new_folder",
    "new_save_id",
    "open_checkpoint",
    "prune",
    "refused",
    "reshard_checkpoint",
    "retire",
    "save_checkpoint",
    "step_tag",
    "tag_text",
    "tags",
    "temporary_folder",
    "verify_checkpoint",
    "weigh",
]
