"""Files that `from_pretrained` wants beside the weights: the model's config and its tokenizer."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterable
from pathlib import Path

from zstore.checkpoint.folder import Folder, FolderLike, folder_at
from zstore.errors import CorruptionError

_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "*tokenizer*.json",
    "*.model",
    "*.tiktoken",
    "*processor_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.*",
    "configuration_*.py",
    "modeling_*.py",
    "tokenization_*.py",
)


def copy_companions(sources: Iterable[FolderLike], target: Path) -> list[str]:
    """Copy config and tokenizer files that lie in `sources`, folders, the later ones' first; return their names.

    What is in `target` already stays as it is. Links are left alone: they may lead to anything that this user can read.
    """
    found = {name: folder for folder in map(folder_at, sources) for name in companions(folder)}
    copied: list[str] = []
    for name, folder in found.items():
        with contextlib.suppress(CorruptionError):
            if not (target / name).exists():
                (target / name).write_bytes(folder.read_small(name))
                copied.append(name)
    return copied


def companions(folder: Folder) -> list[str]:
    """Return the names of config and tokenizer files in a folder."""
    return sorted(
        name for name in folder.entries().files if any(fnmatch.fnmatchcase(name, pattern) for pattern in _COMPANIONS)
    )
