"""Weights as safetensors files in the Hugging Face layout, in bounded memory. Imports no torch.

Read in this order: layout, cast, file, writer; then from_checkpoint; and reader.
"""

from .cast import Overflow, cast_into
from .from_checkpoint import DTYPES, list_weights, write_weights
from .layout import MAX_FILE_BYTES, FileLayout, Weight, index_document, natural_key, plan_files
from .reader import StoredWeight, WeightsReader
from .writer import Lost, WeightsWriter, lost_text

__all__ = [
    "DTYPES",
    "MAX_FILE_BYTES",
    "FileLayout",
    "Lost",
    "Overflow",
    "StoredWeight",
    "Weight",
    "WeightsReader",
    "WeightsWriter",
    "cast_into",
    "index_document",
    "list_weights",
    "lost_text",
    "natural_key",
    "plan_files",
    "write_weights",
]
