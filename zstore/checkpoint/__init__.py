"""Checkpoints: the format, saving and committing, reading and verifying, retention. Imports no torch.

Read `docs/format.md` for the bytes, and in this order: layout, format; build, part, save, commit; folder, catalog,
reader, lookahead, verify, retention.

The names below are public, for code built on the store.
"""

from .build import CheckpointBuilder, CheckpointPlan, reshard_checkpoint
from .catalog import LOOPS_FOLDER, Catalog, Refusal, TagInfo, find_tag, list_nested, list_tags, resolve, scan, tags_text
from .commit import Committer, abort_reason, discard, new_folder, sweep, temporary_folder
from .folder import Folder, LocalFolder, StoredFiles, joined_files, shared_bytes, stored_files
from .format import ABSENT_KEY, COMPLETE, LATEST_KEY, Record, encode_state, plain_value
from .layout import (
    MANIFEST_FOLDER,
    METADATA_FILE,
    RECORD_FILE,
    array_path,
    natural_key,
    new_save_id,
    shard_file,
    step_tag,
    tag_folder,
    tag_text,
)
from .lookahead import MEMORY_BYTES, Range, ReadAhead, Span, read_into
from .part import KnownFile, SaveRequest, SaveSummary
from .reader import (
    NUM_THREADS,
    ArraySource,
    CheckpointReader,
    ReadStatistics,
    StoredArray,
    open_checkpoint,
    refused,
    tags,
)
from .retention import (
    Fate,
    Keep,
    plan_lines,
    remove_each,
    retire,
    weigh,
)
from .save import SaveHandle, save_checkpoint
from .verify import VerifyFault, verify_checkpoint

__all__ = [
    "ABSENT_KEY", "COMPLETE", "LATEST_KEY", "LOOPS_FOLDER", "MANIFEST_FOLDER", "MEMORY_BYTES", "METADATA_FILE",
    "NUM_THREADS", "RECORD_FILE", "ArraySource", "Catalog", "CheckpointBuilder", "CheckpointPlan", "CheckpointReader",
    "Committer", "Fate", "Folder", "Keep", "KnownFile", "LocalFolder", "Range", "ReadAhead", "ReadStatistics", "Record",
    "Refusal", "SaveHandle", "SaveRequest", "SaveSummary", "Span", "StoredArray", "StoredFiles", "TagInfo",
    "VerifyFault", "abort_reason", "array_path", "discard", "encode_state", "find_tag", "joined_files", "list_nested",
    "list_tags", "natural_key", "new_folder", "new_save_id", "open_checkpoint", "plain_value", "plan_lines",
    "read_into", "refused", "remove_each", "reshard_checkpoint", "resolve", "retire", "save_checkpoint", "scan",
    "shard_file", "shared_bytes", "step_tag", "stored_files", "sweep", "tag_folder", "tag_text", "tags", "tags_text",
    "temporary_folder", "verify_checkpoint", "weigh",
]  # fmt: skip
