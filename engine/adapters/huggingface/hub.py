"""A Trainer's uploads to the Hugging Face hub, without its run's journal.

The journal is in a folder `checkpoint-N`, which `push_to_hub` uploads, and has the name of the machine and all of the
config. Trainer takes no patterns of files to leave out, so its module has another uploader while it is asked to push.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import transformers.trainer

_FILES = ("journal-*.jsonl",)
PRIVATE = (*_FILES, *(f"*/{name}" for name in _FILES))
"""Files of a run, beside its checkpoints, that stay where they are."""
_NAMES = ("hf_api", "upload_folder")
"""The module's means of upload, by the version of transformers: a function that returns the hub, or the upload itself."""


@contextlib.contextmanager
def journals_stay() -> Iterator[None]:
    """Leave journals and requests out of the uploads that a Trainer begins in the block."""
    module: Any = transformers.trainer
    name = next(name for name in _NAMES if hasattr(module, name))
    before = getattr(module, name)
    setattr(module, name, _without(before) if name == "upload_folder" else lambda: _Hub(before()))
    try:
        yield
    finally:
        setattr(module, name, before)


class _Hub:
    """The hub, whose uploads of folders leave files out."""

    def __init__(self, hub: Any) -> None:
        self._hub = hub
        self.upload_folder = _without(hub.upload_folder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hub, name)


def _without(upload: Any) -> Any:
    """Return an upload of a folder that leaves `PRIVATE` out too."""

    def upload_folder(*args: Any, ignore_patterns: list[str] | str | None = None, **options: Any) -> Any:
        others = [ignore_patterns] if isinstance(ignore_patterns, str) else ignore_patterns or ()
        return upload(*args, ignore_patterns=[*others, *PRIVATE], **options)

    return upload_folder
