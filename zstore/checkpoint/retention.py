"""Removing the checkpoints that the rules do not keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointNotFoundError
from ..io.files import Files
from .catalog import TagInfo, scan
from .commit import discard
from .folder import FolderLike
from .keep import Keep, metric_of
from .usage import size_bytes, stored_files


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What becomes of one checkpoint."""

    info: TagInfo
    reasons: tuple[str, ...]
    """Why it stays; none: it goes."""
    size_bytes: int
    """Its size on disk: the bytes of all its files, those that other checkpoints share too. See [Note: sizes]."""


def weigh(folder: FolderLike, keep: Keep) -> list[Fate]:
    """Return what becomes of each checkpoint in `folder`, here or behind a URL, by the rules, the oldest first.

    Raises CheckpointNotFoundError where there is none, or where none has the metric that the rules go by.
    """
    tags = scan(folder).tags
    if not tags:
        raise CheckpointNotFoundError(f"{folder} has no committed checkpoint")
    if keep.metric is not None and all(metric_of(info.record.state, keep.metric) is None for info in tags):
        raise CheckpointNotFoundError(
            f"no checkpoint in {folder} has the metric {keep.metric!r}: give the name under which it was passed to "
            "save_checkpoint(metrics=...), or of a number in its client_state"
        )
    return [
        Fate(info=info, reasons=tuple(reasons), size_bytes=size_bytes(stored_files(info.folder)))
        for info, reasons in zip(tags, keep.reasons(tags), strict=True)
    ]


def remove_each(
    infos: Sequence[TagInfo], remove: Callable[[TagInfo], None], removed: Callable[[TagInfo], None] = lambda info: None
) -> list[str]:
    """Remove checkpoints in this order; `removed` is told of each. Returns a message for each that could not be removed.

    Frees only what no other checkpoint links.
    """
    messages: list[str] = []
    for info in infos:
        try:
            remove(info)
            removed(info)
        except OSError as error:
            messages.append(f"checkpoint {info.tag!r} could not be removed: {error}")
    return messages


def superfluous(infos: Sequence[TagInfo], *, keep: Keep, run: str) -> list[TagInfo]:
    """Return those of `infos` (the oldest first) that run `run` saved and that the rules do not keep."""
    own = [info for info in infos if info.record.run == run]
    return [info for info, reasons in zip(own, keep.reasons(own), strict=True) if not reasons]


def retire(files: Files, folder: Path, *, keep: Keep, run: str) -> list[str]:
    """Remove the checkpoints in `folder` that run `run` saved and that the rules do not keep; see `remove_each`."""
    doomed = superfluous(scan(folder).tags, keep=keep, run=run)
    return remove_each(doomed, lambda info: discard(files, info.path))
