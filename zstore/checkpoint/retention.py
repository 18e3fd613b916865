"""Removing the checkpoints that the rules do not keep, and what that frees."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CheckpointNotFoundError
from ..files import Files
from .catalog import TagInfo, scan
from .commit import discard
from .folder import Folder, Place
from .keep import Keep, metric_of


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What becomes of one checkpoint."""

    info: TagInfo
    reasons: tuple[str, ...]
    """Why it stays; none: it goes."""
    file_bytes: int
    """Bytes on disk of all its files, those that are linked elsewhere too."""


def weigh(folder: Place, keep: Keep) -> list[Fate]:
    """Return what becomes of each checkpoint in `folder`, here or behind a URL, by the rules, the oldest first.

    Raises CheckpointNotFoundError where there is none, or where none has the metric that the rules go by.
    """
    tags = scan(folder).tags
    if not tags:
        raise CheckpointNotFoundError(f"{folder} holds no committed checkpoint")
    if keep.metric is not None and all(metric_of(info.record.state, keep.metric) is None for info in tags):
        raise CheckpointNotFoundError(
            f"no checkpoint in {folder} has the metric {keep.metric!r}: give the name under which it was passed to "
            "save_checkpoint(metrics=...), or of a number in its client_state"
        )
    return [
        Fate(info=info, reasons=tuple(reasons), file_bytes=_file_bytes(info.folder))
        for info, reasons in zip(tags, keep.reasons(tags), strict=True)
    ]


def _file_bytes(folder: Folder) -> int:
    if not folder.is_local:
        return sum(size or 0 for size in folder.sizes("").values())
    return sum(file.num_bytes for file in _files_below(folder.path))


def bytes_freed(folders: Sequence[Path]) -> int:
    """Return the bytes on disk that removing all of `folders` frees: a file that has another name elsewhere stays."""
    found: dict[tuple[int, int], _File] = {}
    for folder in folders:
        for file in _files_below(folder):
            found.setdefault(file.inode, file).names_seen += 1
    return sum(file.num_bytes for file in found.values() if file.names_seen >= file.num_names)


def prune(files: Files, fates: Sequence[Fate], removed: Callable[[Fate], None] = lambda fate: None) -> list[str]:
    """Remove the checkpoints that have no reason to stay, the oldest first; `removed` is told of each.

    Frees only what no other checkpoint links. Returns a message for each that could not be removed.
    """
    messages: list[str] = []
    for fate in fates:
        if not fate.reasons:
            try:
                discard(files, fate.info.path)
                removed(fate)
            except OSError as error:
                messages.append(f"checkpoint {fate.info.tag!r} could not be removed: {error}")
    return messages


def superfluous(infos: Sequence[TagInfo], *, keep: Keep, run: str) -> list[TagInfo]:
    """Return those of `infos` (the oldest first) that run `run` saved and that the rules do not keep."""
    own = [info for info in infos if info.record.run == run]
    return [info for info, reasons in zip(own, keep.reasons(own), strict=True) if not reasons]


def retire(files: Files, folder: Path, *, keep: Keep, run: str) -> list[str]:
    """Remove the checkpoints in `folder` that run `run` saved and that the rules do not keep, as `prune` does."""
    doomed = superfluous(scan(folder).tags, keep=keep, run=run)
    return prune(files, [Fate(info=info, reasons=(), file_bytes=0) for info in doomed])


@dataclass
class _File:
    """A file, and how many of its names were seen."""

    inode: tuple[int, int]
    num_names: int
    num_bytes: int
    names_seen: int = field(default=0)


def _files_below(folder: Path) -> Iterator[_File]:
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(root, name))
            except FileNotFoundError:  # somebody else removes it
                continue
            # What it takes on the disk; not every system tells.
            num_bytes = getattr(found, "st_blocks", -(-found.st_size // 512)) * 512
            yield _File((found.st_dev, found.st_ino), found.st_nlink, num_bytes)
