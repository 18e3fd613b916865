"""The part of a run's folder that is visible from outside: committed checkpoints, and a few files beside them.

[Note: visible paths]
A path in a run's folder begins with the folder of a checkpoint (`step-00000060`), with the folder that a loop makes and one of
a checkpoint in it (`checkpoint-60/step-00000060`), with `latest`, which is the newest, or with a moving tag; the last two are
looked up for each request. `RUN@TAG/...` means `RUN/TAG/...`, unless there is a run of that name. Files that a save has under
way or left behind are not there; a checkpoint that is being replaced is found by its tag, as readers find it on disk. Beside
checkpoints, `latest`, `tags.json`, journals, and config and tokenizer files are visible. Links are not,
except for one to another checkpoint in the same folder, which readers follow too.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import time
from dataclasses import dataclass
from typing import Any

from ...checkpoint.catalog import LOOPS_FOLDER, Catalog, TagInfo, find_folder, list_nested, newest_of, scan
from ...checkpoint.folder import Folder
from ...checkpoint.marks import read_marks
from ...checkpoint.names import LATEST_FILE, MARKS_FILE, RECORD_FILE, parse_own_name, tag_folder
from ...errors import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError, CorruptionError
from ...weights.companions import COMPANIONS
from ..cache import Cache

_RUN_FILES = (LATEST_FILE, MARKS_FILE, "journal-*.jsonl", *COMPANIONS)
_FRESH_S = 2.0
"""How long a checkpoint behind a URL is taken to be unchanged."""
_MOST_CACHED, _MOST_RUNS = 256, 4096
Signature = tuple[Any, ...]
_TICK_NS = 50_000_000
"""Two changes within this time may have the same time in a file system."""
_NOT_PLAIN = re.compile(r"[/\\\x00-\x1f\x7f]")


def is_plain(name: str) -> bool:
    """Return whether `name` can be a single component of a path."""
    return name not in ("", ".", "..") and len(os.fsencode(name)) <= 255 and _NOT_PLAIN.search(name) is None


def is_run_file(name: str) -> bool:
    """Return whether a file of that name beside checkpoints is visible."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _RUN_FILES)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Something visible: the file or folder `path` in `folder`; an empty one is the folder itself."""

    folder: Folder
    path: str
    info: TagInfo | None
    """The checkpoint that it belongs to, None for a file beside checkpoints."""
    is_folder: bool
    """Whether it is a folder of checkpoints. The kind of a path inside a checkpoint is found out on reading."""


class VisibleCheckpoints:
    """Finds committed checkpoints by their folders, and remembers them. Usable from any thread; calls block on the file
    systems."""

    def __init__(self) -> None:
        self._known: Cache[tuple[Folder, str], tuple[object, TagInfo]] = Cache(_MOST_CACHED)
        self._newest: Cache[str, tuple[Signature, tuple[int, TagInfo | None]]] = Cache(_MOST_RUNS)

    def find(self, folder: Folder, checkpoint: str) -> TagInfo:
        """Return the checkpoint that `checkpoint` names in a run's folder: `step-00000060`, `checkpoint-60/step-00000060`,
        `latest` or a moving tag. Raises CheckpointNotFoundError if there is none."""
        head, slash, name = checkpoint.rpartition("/")
        if slash and LOOPS_FOLDER.fullmatch(head):
            folder = folder.child(head)
        elif slash:
            raise _nothing(folder, checkpoint)
        if (info := self._named(folder, name)) is None:
            raise _nothing(folder, checkpoint)
        return info

    def _named(self, folder: Folder, name: str) -> TagInfo | None:
        """Return the checkpoint in the tag's folder `name`, or what `latest` or a moving tag means; None if there is none."""
        if name == LATEST_FILE:
            return self.latest(folder)
        if (info := self.at(folder, name)) is not None:
            return info
        target = read_marks(folder).tags.get(name)
        return None if target is None else self.at(folder, tag_folder(target))

    def at(self, folder: Folder, name: str) -> TagInfo | None:
        """Return the checkpoint in the tag's folder `name`, None if there is none."""
        if not is_plain(name) or parse_own_name(name) is not None:
            return None
        key, state = (folder, name), file_state(folder, f"{name}/{RECORD_FILE}")
        cached = self._known.get(key)
        if cached is not None and cached[0] == state:
            return cached[1]
        try:
            found = find_folder(folder, name)
        except (CorruptionError, CheckpointMismatchError) as error:
            raise CheckpointNotFoundError(
                f"{folder} has no readable checkpoint {name!r}: its record is not valid"
            ) from error
        if found is not None and found.folder.name == name and state is not None:
            self._known.put(key, (state, found))
        return found

    def is_near(self, folder: Folder, name: str) -> bool:
        """Return whether the checkpoint in the tag's folder `name` was found before, on a drive of this machine."""
        return folder.is_local and self._known.get((folder, name)) is not None and _is_on_drive(folder)

    def latest(self, folder: Folder) -> TagInfo:
        """Return the newest checkpoint of a run; raises CheckpointNotFoundError if it has none."""
        _, newest = self.newest(folder)
        if newest is None:
            raise CheckpointNotFoundError(f"{folder} has no committed checkpoint")
        return newest

    def newest(self, folder: Folder) -> tuple[int, TagInfo | None]:
        """Return the number of checkpoints of a run, and the newest. Raises CheckpointNotFoundError if its folder is gone."""
        began_ns = time.time_ns()
        signature = signature_of(folder) if folder.is_local else (int(time.monotonic() / _FRESH_S),)
        cached = self._newest.get(folder.location)
        if cached is not None and cached[0] == signature:
            return cached[1]
        tags = read_catalog(folder).tags
        found = (len(tags), newest_of(tags) if tags else None)
        if not folder.is_local or all(at < began_ns - _TICK_NS for _, _, at in signature):
            self._newest.put(folder.location, (signature, found))
        return found

    def place(self, folder: Folder, parts: tuple[str, ...]) -> Place:
        """Return the place that a run's path names; `parts` are its components, an empty last one if it ends in `/`.

        Raises CheckpointNotFoundError if nothing visible has that name.
        """
        if parts in ((), ("",)):
            return Place(folder=folder, path="", info=None, is_folder=True)
        head, rest = parts[0], parts[1:]
        if not is_plain(head):
            raise _nothing(folder, head)
        if not rest and is_run_file(head):
            return Place(folder=folder, path=head, info=None, is_folder=False)
        info = self._named(folder, head)
        if info is not None:
            return Place(folder=info.folder, path=_inside(folder, rest), info=info, is_folder=False)
        if LOOPS_FOLDER.fullmatch(head) and is_real_folder(folder, head):
            below = folder.child(head)
            if rest and LOOPS_FOLDER.fullmatch(rest[0]):
                raise _nothing(folder, "/".join(parts))
            return self.place(below, rest)
        raise _nothing(folder, head)


def _is_on_drive(folder: Folder) -> bool:
    """Return whether a local folder is on a drive: memory and networks have the major number 0."""
    with contextlib.suppress(OSError):
        return os.major(os.stat(folder.path).st_dev) != 0
    return False


def tags_in(folder: Folder) -> dict[str, TagInfo]:
    """Return the committed checkpoints right in a folder by the names that their folders have in URLs."""
    found = {}
    for info in scan(folder).tags:
        own = parse_own_name(info.folder.name)
        found[own[0] if own else info.folder.name] = info
    return found


def is_real_folder(folder: Folder, name: str) -> bool:
    """Return whether a folder has a folder of that name, and no link; behind a URL it is found out later."""
    return not folder.is_local or (not os.path.islink(folder.path / name) and os.path.isdir(folder.path / name))


def _inside(folder: Folder, parts: tuple[str, ...]) -> str:
    """Return the path inside a checkpoint; one that ends in `/` if a folder is meant."""
    if not all(is_plain(part) for part in parts[:-1]) or not (parts[-1:] in ((), ("",)) or is_plain(parts[-1])):
        raise _nothing(folder, "/".join(parts))
    return "/".join(parts)


def file_state(folder: Folder, path: str) -> object | None:
    """Return a value that changes when another file takes the place of the one at `path`; None if there is none."""
    if not folder.is_local:
        return int(time.monotonic() / _FRESH_S)
    try:
        status = os.stat(folder.path / path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _nothing(folder: Folder, name: str) -> CheckpointError:
    return CheckpointNotFoundError(f"{folder} has nothing visible that is called {name!r}")


def read_catalog(folder: Folder) -> Catalog:
    """Return the checkpoints in a run's folder and in those that loops make, the oldest first."""
    catalog = scan(folder) if not folder.has(RECORD_FILE) else Catalog(tags=(), refusals=())
    nested = list_nested(folder)
    tags = sorted(catalog.tags + nested.tags, key=lambda info: (info.record.committed_ns, info.record.step))
    return Catalog(tags=tuple(tags), refusals=catalog.refusals + nested.refusals)


def signature_of(folder: Folder) -> Signature:
    """Return the folders below a run's, and below those that loops make, each with its inode and time."""
    try:
        found = _subfolders(str(folder.path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(f"{folder} is gone: its folder was removed or renamed") from error
    for name, _, _ in list(found):
        if name.startswith(("checkpoint-", "checkpoint_")):
            with contextlib.suppress(OSError):
                inner = _subfolders(os.path.join(folder.path, name))
                found += [(f"{name}/{each}", ino, at) for each, ino, at in inner]
    return tuple(found)


def _subfolders(path: str) -> list[tuple[str, int, int]]:
    """Return name, inode and time of the folders in a folder, by name; those that are removed meanwhile are left out."""
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_dir():
                    status = entry.stat()
                    found.append((entry.name, status.st_ino, status.st_mtime_ns))
    return sorted(found)
