"""Checkpoints behind URLs: read by ranges, uploaded behind training, committed by a record that is written last.

Imports fsspec only where a URL is opened, and no torch. Read in this order: url, retries, send, folder; commit, upload, save.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..handout import on_first_use

if TYPE_CHECKING:
    from .commit import remove_checkpoint, remove_checkpoints, retire
    from .folder import RemoteFolder, open_folder
    from .retries import PATIENT, Retries
    from .save import UploadOptions, save_to_url
    from .upload import upload_checkpoint
    from .url import is_url, parse_options, shown

__all__ = [
    "PATIENT",
    "RemoteFolder",
    "Retries",
    "UploadOptions",
    "is_url",
    "open_folder",
    "parse_options",
    "remove_checkpoint",
    "remove_checkpoints",
    "retire",
    "save_to_url",
    "shown",
    "upload_checkpoint",
]

__getattr__ = on_first_use(
    __name__,
    {
        "commit": (
            "remove_checkpoint",
            "remove_checkpoints",
            "retire",
        ),
        "folder": (
            "RemoteFolder",
            "open_folder",
        ),
        "retries": (
            "PATIENT",
            "Retries",
        ),
        "save": (
            "UploadOptions",
            "save_to_url",
        ),
        "upload": ("upload_checkpoint",),
        "url": (
            "is_url",
            "parse_options",
            "shown",
        ),
    },
)
