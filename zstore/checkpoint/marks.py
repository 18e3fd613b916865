"""Marks on a run and its checkpoints: tags, holds, notes and a group, in one file beside the checkpoints.

[Note: marks]
A checkpoint's tag names its folder for good. A moving tag, as `best`, points at one of them, and at another one later. It is
a name for reading alone: a checkpoint that is called so comes first. `tags.json` has them all, and which checkpoints are held
and what people noted, also of the run itself; other files know nothing of it. A change replaces the file by one rename, under
a lock: whoever reads, or is killed, has the old marks or the new ones. On object stores nothing is locked: of two changes at a
time one may be lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..errors import CheckpointMismatchError, CorruptionError, UsageError
from ..io.files import Files
from .folder import Folder, FolderLike, folder_at
from .format import parse_json
from .lock import SaveLock
from .names import LATEST_FILE, LOCK, MARKS_FILE, RECORD_FILE, TEMPORARY, own_name, tag_folder, tag_text

_FORMAT = "zstore tags"
_VERSION = 1
_MOST_BYTES = 16 * 1024 * 1024
_MOST_NOTE = 1000
_MOST_RUN_TAGS, _MOST_TAG, _MOST_GROUP = 32, 64, 200
_OWNER = "0" * 32
"""In place of a save's id: the lock has one name, and the next save sweeps what a killed change left."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
"""Of moving tags: the grammar of tags in the OCI distribution specification."""


@dataclass(frozen=True, kw_only=True)
class RunMarks:
    """What people say of a run, for lists and their search; nothing else goes by it."""

    tags: list[str] = field(default_factory=list)
    group: str = ""
    """Runs of one group are listed together; empty: it is in none."""
    note: str = ""


@dataclass(kw_only=True)
class Marks:
    """The marks in a folder. Checkpoints are named by their tags, and need not be there any more. See [Note: marks]."""

    tags: dict[str, str] = field(default_factory=dict)
    """Moving tag -> checkpoint."""
    held: list[str] = field(default_factory=list)
    """Checkpoints that stay, whatever the rules."""
    notes: dict[str, str] = field(default_factory=dict)
    """Checkpoint -> text."""
    run: RunMarks = field(default_factory=RunMarks)
    """Those of the run, of which the folder is."""

    def tags_of(self, checkpoint: str) -> list[str]:
        """Return the moving tags that point at a checkpoint."""
        return sorted(name for name, target in self.tags.items() if target == checkpoint)

    def reasons(self, checkpoint: str) -> list[str]:
        """Return why a checkpoint stays: its moving tags, as `@best`, and `held`."""
        return [f"@{name}" for name in self.tags_of(checkpoint)] + ["held"] * (checkpoint in self.held)

    def dangling(self, checkpoints: Collection[str]) -> dict[str, str]:
        """Return the moving tags that point at none of `checkpoints`."""
        return {name: target for name, target in self.tags.items() if target not in checkpoints}


def read_marks(place: FolderLike) -> Marks:
    """Return the marks in the folder of checkpoints `place`.

    Raises CorruptionError if they are damaged, CheckpointMismatchError if a newer version wrote them.
    """
    folder = folder_at(place)
    try:
        document = parse_json(folder.read_small(MARKS_FILE, _MOST_BYTES), folder.location_of(MARKS_FILE))
    except (FileNotFoundError, NotADirectoryError):
        return Marks()
    location = folder.location_of(MARKS_FILE)
    if document.get("format") == _FORMAT and document.get("version") not in (None, _VERSION):
        raise CheckpointMismatchError(f"{location} is of version {document['version']}: update zstore to read it")
    try:
        tags, held, notes = dict(document["tags"]), list(document["held"]), dict(document["notes"])
        run = RunMarks(**document.get("run", {}))
        texts = [*tags, *tags.values(), *held, *notes, *notes.values(), *run.tags, run.group, run.note]
        if document["format"] != _FORMAT or not all(isinstance(text, str) for text in texts):
            raise ValueError
        for checkpoint in (*tags.values(), *held, *notes):
            tag_text(checkpoint)
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise CorruptionError(
            f"{location} does not hold tags, holds and notes: restore it from another copy, or remove it"
        ) from error
    return Marks(tags=tags, held=held, notes=notes, run=run)


def check_moving_tag(name: str) -> str:
    """Return `name`; raises UsageError if no moving tag can be called so."""
    if not _NAME.fullmatch(name) or ".." in name or name.isdigit() or name == LATEST_FILE:
        raise UsageError(
            f"{name!r:.200} cannot be a tag that moves: expected up to 128 letters, digits and `-_.`, not a number, and not "
            f"`{LATEST_FILE}`, which is the newest checkpoint"
        )
    return name


def change_marks(
    place: FolderLike,
    checkpoint: str | None,
    *,
    tag: str | None = None,
    held: bool | None = None,
    note: str | None = None,
    files: Files | None = None,
) -> Marks:
    """Let the moving tag `tag` point at `checkpoint`, a checkpoint's own tag, hold or release it, and note a text on it (an
    empty one: none); None leaves a mark as it is. Without a checkpoint `tag` is removed. Returns all marks of the folder.

    Raises UsageError for a name or note that cannot be one, the name of a checkpoint, or a moving tag to remove that is not
    there.
    """
    folder = folder_at(place)
    if checkpoint is None and (held is not None or note is not None):
        raise UsageError("a hold or a note is one of a checkpoint: name it")
    _check_line("note", note, _MOST_NOTE)
    if tag is not None and checkpoint is not None and folder.child(tag_folder(check_moving_tag(tag))).has(RECORD_FILE):
        raise UsageError(f"{folder} has a checkpoint that is called {tag!r}, which comes first: choose another tag")
    return _edit(folder, lambda marks: _change(marks, checkpoint, tag, held, note), files)


def change_run_marks(
    place: FolderLike,
    *,
    tags: Iterable[str] | None = None,
    group: str | None = None,
    note: str | None = None,
    files: Files | None = None,
) -> Marks:
    """Give the run whose folder is `place` these tags in place of those that it has, a group and a note (empty: none); None
    leaves them as they are. Returns all marks of the folder.

    Raises UsageError for tags that are not up to 32 words of up to 64 characters, a long group, or a long note.
    """
    found = None if tags is None else sorted(set(tags))
    for tag in found or ():
        if not tag or len(tag) > _MOST_TAG or not tag.isprintable() or re.search(r"[\s,]", tag):
            raise UsageError(
                f"a tag of a run is a word of up to {_MOST_TAG} characters without a comma, got {tag!r:.100}"
            )
    if len(found or ()) > _MOST_RUN_TAGS:
        raise UsageError(f"a run has up to {_MOST_RUN_TAGS} tags, got {len(found or ())}")
    _check_line("group", group, _MOST_GROUP)
    _check_line("note", note, _MOST_NOTE)
    given: dict[str, Any] = {
        name: value for name, value in (("tags", found), ("group", group), ("note", note)) if value is not None
    }

    def change(marks: Marks) -> None:
        marks.run = replace(marks.run, **given)

    return _edit(folder_at(place), change, files)


def _check_line(what: str, text: str | None, most: int) -> None:
    if text is not None and (len(text) > most or not text.isprintable()):
        raise UsageError(f"a {what} has up to {most} characters on one line, got {text!r:.100}")


def _edit(folder: Folder, change: Callable[[Marks], None], files: Files | None) -> Marks:
    """Write the marks in a folder as `change` leaves them, and return them. See [Note: marks]."""
    if folder.has(RECORD_FILE):
        raise UsageError(f"{folder} is one checkpoint: its tags and holds are in the folder above, name that")
    files, temporary = files or Files(), own_name(MARKS_FILE, TEMPORARY, _OWNER)
    with SaveLock(folder.path / own_name(MARKS_FILE, LOCK, _OWNER)) if folder.is_local else nullcontext():
        marks = read_marks(folder)
        change(marks)
        data = json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(marks)}, indent=1).encode() + b"\n"
        if not folder.is_local:
            folder.write_small(MARKS_FILE, data)
        else:
            files.write_small(folder.path / temporary, data)
            files.rename(folder.path / temporary, folder.path / MARKS_FILE)
            files.sync_folder(folder.path)
    return marks


def _change(marks: Marks, checkpoint: str | None, tag: str | None, held: bool | None, note: str | None) -> None:
    if checkpoint is None:
        if tag is None or marks.tags.pop(tag, None) is None:
            there = ", ".join(sorted(marks.tags)) or "none"
            raise UsageError(f"there is no moving tag {tag!r}: expected one of {there}")
        return
    if tag is not None:
        marks.tags[tag] = checkpoint
    if held is not None:
        marks.held = [name for name in marks.held if name != checkpoint] + [checkpoint] * held
    if note is not None:
        marks.notes[checkpoint] = note
    if note == "":
        del marks.notes[checkpoint]
