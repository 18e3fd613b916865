"""Which checkpoints a run keeps."""

from __future__ import annotations

from pathlib import Path

from ..errors import UsageError
from ..files import Files
from .catalog import TagInfo, scan
from .commit import discard


def superfluous(tags: tuple[TagInfo, ...], *, keep: int, run: str) -> list[TagInfo]:
    """Return those of `tags` (the oldest first) that run `run` saved, but for its `keep` newest."""
    if keep < 1:
        raise UsageError(f"a run keeps at least one checkpoint, got keep={keep}")
    own = [info for info in tags if info.record.run == run]
    return own[:-keep]


def keep_newest(files: Files, folder: Path, *, keep: int, run: str) -> list[str]:
    """Remove all but the `keep` newest checkpoints that run `run` saved in `folder`.

    Frees only what no other checkpoint links. Returns a message for each that could not be removed.
    """
    messages: list[str] = []
    for info in superfluous(scan(folder).tags, keep=keep, run=run):
        try:
            discard(files, info.path)
        except OSError as error:
            messages.append(f"checkpoint {info.tag!r} is not needed any more, but could not be removed: {error}")
    return messages
