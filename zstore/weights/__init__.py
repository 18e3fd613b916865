"""Weights as safetensors files in the Hugging Face layout, in bounded memory. Imports no torch.

Read in this order: layout, cast, file, writer; then choose, from_checkpoint; and reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..handout import on_first_use

if TYPE_CHECKING:
    from .cast import Overflow, cast_into
    from .choose import choose, frozen_weights
    from .from_checkpoint import DTYPES, list_weights, read_weight, read_weights, write_weights
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
    "choose",
    "frozen_weights",
    "index_document",
    "list_weights",
    "lost_text",
    "natural_key",
    "plan_files",
    "read_weight",
    "read_weights",
    "write_weights",
]

__getattr__ = on_first_use(
    __name__,
    {
        "cast": (
            "Overflow",
            "cast_into",
        ),
        "choose": (
            "choose",
            "frozen_weights",
        ),
        "from_checkpoint": (
            "DTYPES",
            "list_weights",
            "read_weight",
            "read_weights",
            "write_weights",
        ),
        "layout": (
            "MAX_FILE_BYTES",
            "FileLayout",
            "Weight",
            "index_document",
            "natural_key",
            "plan_files",
        ),
        "reader": (
            "StoredWeight",
            "WeightsReader",
        ),
        "writer": (
            "Lost",
            "WeightsWriter",
            "lost_text",
        ),
    },
)
