"""Files that `from_pretrained` expects beside the weights: the model's config and its tokenizer."""

from __future__ import annotations

import contextlib
import fnmatch
from pathlib import Path

from ..checkpoint.folder import Folder, FolderLike, folder_at
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.source import ArraySource
from ..errors import CorruptionError

COMPANIONS = (
    "config.json", "generation_config.json", "*tokenizer*.json", "*.model", "*.tiktoken", "*processor_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.*",
    "configuration_*.py", "modeling_*.py", "tokenization_*.py",
)  # fmt: skip
"""Patterns of their names."""


def copy_companions(source: ArraySource, target: Path, *, beside: bool) -> str:
    """Copy config and tokenizer files that are in the checkpoint or beside it into `target`; return a text that names them,
    or an empty one.

    Files beside other software's checkpoint are copied with `beside` only: they may belong to anything. A file in
    `target` stays as it is. Links are left alone: they may lead to any file that this user can read.
    """
    places: list[FolderLike] = []
    if isinstance(source, CheckpointReader):
        places += [source.folder.parent, source.folder]
    elif (path := Path(source.location)).is_dir():
        places += [path.parent, path] if beside else [path]
    found = {name: folder for folder in map(folder_at, places) for name in companions(folder)}
    copied: list[str] = []
    for name, folder in found.items():
        with contextlib.suppress(CorruptionError):
            if not (target / name).exists():
                (target / name).write_bytes(folder.read_small(name))
                copied.append(name)
    return f", with {', '.join(copied)}" if copied else ""


def companions(folder: Folder) -> list[str]:
    """Return the names of config and tokenizer files in a folder."""
    return sorted(filter(is_companion, folder.entries().files))


def is_companion(name: str) -> bool:
    """Return whether a file of that name is the config or tokenizer of a model."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in COMPANIONS)
