"""Files that `from_pretrained` wants beside the weights: the model's config and its tokenizer."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

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


def copy_companions(sources: Iterable[Path], target: Path) -> list[str]:
    """Copy config and tokenizer files that lie in `sources`, folders, the later ones' first; return their names."""
    found = {path.name: path for source in sources for path in _companions(source)}
    for name, path in found.items():
        shutil.copyfile(path, target / name)
    return list(found)


def _companions(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _COMPANIONS):
            yield path
