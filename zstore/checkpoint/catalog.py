"""The committed checkpoints of a folder, and the selection of one by path and tag."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, ZstoreError
from .folder import Entries, Folder, FolderLike, folder_at
from .format import MAX_RECORD_BYTES, Record
from .layout import LATEST_FILE, LOCK, METADATA_FILE, RECORD_FILE, SET_ASIDE, parse_working_name, step_tag, tag_folder

_MAX_LISTED = 10
"""Maximum number of tags listed in a message."""
MAX_LATEST_BYTES = 4096
LOOPS_FOLDER = re.compile(r"checkpoint[-_]\d+")
"""Names of the folders that other training loops create, each with a checkpoint in it."""
_FOREIGN = {
    "latest_checkpointed_iteration.txt": "Megatron, which this version does not read",
    ".metadata": "torch.distributed.checkpoint, which `zstore convert` reads if given the path of its folder",
    "zero_to_fp32.py": "DeepSpeed, but it has no tag folder with *_model_states.pt, so it is incomplete",
}
"""By a file's name: the software whose checkpoints have the file, and why it cannot be opened or what to do."""


@dataclass(frozen=True, kw_only=True)
class TagInfo:
    """A committed checkpoint."""

    folder: Folder
    """The folder of the tag."""
    record: Record

    @property
    def path(self) -> Path:
        """The folder of the tag; raises UsageError if it is at a URL."""
        return self.folder.path

    @property
    def location(self) -> str:
        """Path or URL of the tag's folder."""
        return self.folder.location

    @property
    def tag(self) -> str:
        """The tag; for a renamed folder, the folder's name."""
        parsed = parse_working_name(self.folder.name)
        folder = parsed[0] if parsed else self.folder.name
        return self.record.tag if tag_folder(self.record.tag) == folder else folder


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A folder that looks like a checkpoint but is not a valid one."""

    folder: Folder
    reason: str

    @property
    def location(self) -> str:
        """Path or URL of the folder."""
        return self.folder.location


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """The contents of a folder of checkpoints."""

    tags: tuple[TagInfo, ...]
    """Committed checkpoints, oldest first."""
    refusals: tuple[Refusal, ...]
    unfinished: frozenset[str] = frozenset()
    """Ids of the saves that have a lock file: they are running, or were killed before or after their commit."""
    has_latest: bool = False
    """Whether there is a `latest` file."""


def read_record(place: FolderLike) -> Record:
    """Return the record in a tag's folder. Raises FileNotFoundError if there is no record, CorruptionError or
    CheckpointMismatchError if it is not valid."""
    folder = folder_at(place)
    return Record.decode(folder.read_small(RECORD_FILE, MAX_RECORD_BYTES), folder.location_of(RECORD_FILE))


def is_committed(place: FolderLike) -> bool:
    """Return whether a tag's folder has a valid record."""
    try:
        read_record(place)
    except (ZstoreError, OSError):
        return False
    return True


def with_commit_time(record: Record, place: FolderLike) -> Record:
    """Return `record` with the current time as its commit time, made later than that of the last checkpoint in `place`."""
    folder, newest_ns = folder_at(place), 0
    with contextlib.suppress(OSError, ValueError, ZstoreError):
        last = find_tag(folder, folder.read_small(LATEST_FILE, MAX_LATEST_BYTES).decode().strip())
        newest_ns = last.record.committed_ns if last is not None else 0
    return replace(record, committed_ns=max(time.time_ns(), newest_ns + 1))


@contextlib.contextmanager
def reporting_to(messages: list[str], problem: str) -> Iterator[None]:
    """Run a block whose failure does not harm the checkpoint; on failure, add `problem` and the reason to `messages`."""
    try:
        yield
    except (OSError, ZstoreError) as error:
        messages.append(f"{problem}: {error}")


def scan(place: FolderLike) -> Catalog:
    """Return all checkpoints directly in a folder, including set-aside ones whose tag no other has. Raises
    CheckpointNotFoundError if it is not a folder."""
    folder = folder_at(place)
    committed: dict[str, TagInfo] = {}
    set_aside: dict[str, TagInfo] = {}
    refusals: list[Refusal] = []
    entries = _entries(folder)
    names = [name for name in entries.folders if may_be_checkpoint(name)]
    for name, data in zip(names, folder.read_records(names), strict=True):
        entry = folder.child(name)
        try:
            info = _info(entry, data)
        except (ZstoreError, OSError) as error:
            if not isinstance(error, FileNotFoundError):
                refusals.append(Refusal(folder=entry, reason=str(error)))
            elif entry.has(METADATA_FILE):
                text = f"it has no {RECORD_FILE}: it was never committed, or the file was lost"
                refusals.append(Refusal(folder=entry, reason=text))
            continue
        parsed = parse_working_name(name)
        if parsed is None:
            committed[name] = info
        elif parsed[0] not in set_aside or set_aside[parsed[0]].record.committed_ns < info.record.committed_ns:
            set_aside[parsed[0]] = info
    tags = committed | {name: info for name, info in set_aside.items() if name not in committed}
    ordered = sorted(tags.values(), key=lambda info: (info.record.committed_ns, info.record.step, info.folder.name))
    locks = (parsed for name in entries.files if (parsed := parse_working_name(name)) is not None and parsed[1] == LOCK)
    return Catalog(
        tags=tuple(ordered),
        refusals=tuple(refusals),
        unfinished=frozenset(parsed[2] for parsed in locks),
        has_latest=LATEST_FILE in entries.files,
    )


def may_be_checkpoint(name: str) -> bool:
    """Return whether a folder of that name may be a checkpoint, that is, not a temporary folder."""
    parsed = parse_working_name(name)
    return parsed is None or parsed[1] == SET_ASIDE


def _info(folder: Folder, data: bytes | Exception) -> TagInfo:
    """Return the checkpoint in `folder`, whose record, or the error from reading it, is `data`."""
    if isinstance(data, Exception):
        raise data
    return TagInfo(folder=folder, record=Record.decode(data, folder.location_of(RECORD_FILE)))


def _open_tag(folder: Folder, name: str) -> TagInfo:
    """Return the checkpoint in the tag's folder `name`; raises any error from reading its record."""
    return _info(folder.child(name), folder.read_records([name])[0])


def _entries(folder: Folder) -> Entries:
    try:
        return folder.entries()
    except CheckpointNotFoundError:
        raise  # its message lists the contents
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(f"{folder} does not exist or is not a folder: expected a checkpoint") from error


def find_tag(place: FolderLike, tag: str) -> TagInfo | None:
    """Return the committed checkpoint `tag` in a folder, if necessary a set-aside one; None if it does not exist. Raises
    CorruptionError or CheckpointMismatchError if its record is not valid."""
    folder, name = folder_at(place), tag_folder(tag)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return _open_tag(folder, name)
    return _set_aside(folder, name)


def _set_aside(folder: Folder, name: str) -> TagInfo | None:
    """Return the newest set-aside checkpoint for the tag folder `name`, which has no record itself; None if there is none."""
    try:
        entries = folder.entries()
    except (FileNotFoundError, NotADirectoryError):
        return None
    candidates: list[TagInfo] = []
    for entry in entries.folders:
        parsed = parse_working_name(entry)
        if parsed is not None and parsed[:2] == (name, SET_ASIDE):
            try:
                candidates.append(_open_tag(folder, entry))
            except (ZstoreError, OSError):
                continue
    return max(candidates, key=lambda info: info.record.committed_ns, default=None)


def resolve(place: FolderLike, tag: str | None = None) -> TagInfo:
    """Return the checkpoint that `place` and `tag` select: a tag's folder, or a folder of checkpoints and one of its tags.

    The tag may also be a step number, for `step-<number>`. Without a tag, or with `latest`, this returns the
    `default_tag`. Raises CheckpointNotFoundError, whose message lists the tags.
    """
    folder = folder_at(place)
    parsed = parse_working_name(folder.name)
    if parsed is not None and parsed[1] != SET_ASIDE:
        raise CheckpointNotFoundError(
            f"{folder} belongs to a save that is running or was killed: it was never committed; "
            f"use {folder.parent.child(parsed[0])} or {folder.parent}"
        )
    if (info := _tag_at(folder)) is not None:
        if tag is None or tag in (info.tag, info.record.tag):
            return _with_own_name(info)
        raise CheckpointNotFoundError(
            f"{folder} is the checkpoint {info.tag!r}, not {tag!r}: pass its parent folder to choose by tag"
        )
    if tag is not None:
        found = find_tag(folder, tag)
        if found is None and tag.isdecimal() and len(tag) < 19:
            found = find_tag(folder, step_tag(int(tag)))
        if found is not None:
            return _with_own_name(found)
    try:
        catalog = scan(folder)
    except CheckpointNotFoundError:
        if (info := _set_aside(folder.parent, folder.name)) is not None and tag in (None, info.tag):
            return info
        raise
    if tag in (None, LATEST_FILE) and catalog.tags:
        selected, note = default_tag(folder, catalog)
        if note and os.environ.get("RANK", "0") == "0":
            logging.getLogger("zstore").warning("%s", note)
        return selected
    raise CheckpointNotFoundError(_not_found_text(folder, tag, catalog))


def _with_own_name(info: TagInfo) -> TagInfo:
    """Return a checkpoint under its own tag if a service found it by an alias, such as `latest`, which may change."""
    if info.folder.is_local or info.folder.name == tag_folder(info.record.tag):
        return info
    renamed = find_tag(info.folder.parent, info.record.tag)
    return renamed if renamed is not None and renamed.record.id == info.record.id else info


def default_tag(folder: Folder, catalog: Catalog) -> tuple[TagInfo, str]:
    """Return the checkpoint to open if no tag is given, from a non-empty catalog, and a note for the user if `latest` does not
    name the newest.

    It is the one named by `latest`, which users edit to go back. But if the newest one's save was killed between its commit
    and the update of `latest` (its lock exists, and `latest` is not newer than its record), it is the newest.
    """
    newest = newest_tag(catalog.tags)
    try:
        named = folder.read_small(LATEST_FILE, MAX_LATEST_BYTES).decode().strip() if catalog.has_latest else ""
    except (OSError, ValueError, ZstoreError):
        named = ""
    if named in ("", newest.tag):
        return newest, ""
    selected = next((info for info in catalog.tags if info.tag == named), None)
    text = f"`{LATEST_FILE}` in {folder} names {named!r}, and the newest checkpoint is {newest.tag!r}: "
    if selected is None:
        return newest, text + f"there is no complete checkpoint {named!r}, so the newest is opened"
    if newest.record.id in catalog.unfinished and not _latest_is_newer(folder, newest):
        return newest, text + f"its save ended before it replaced `{LATEST_FILE}`, so the newest is opened"
    return selected, text + f"{named!r} is opened; name a tag, or remove `{LATEST_FILE}`, to open another one"


def _latest_is_newer(folder: Folder, newest: TagInfo) -> bool:
    """Return whether `latest` was written after the record of the newest checkpoint, by their modification times."""
    if not folder.is_local:
        return False
    with contextlib.suppress(OSError):
        latest, record = (folder.path / LATEST_FILE).stat(), (newest.path / RECORD_FILE).stat()
        return latest.st_mtime_ns > record.st_mtime_ns
    return False


def newest_tag(tags: Sequence[TagInfo]) -> TagInfo:
    """Return the newest of `tags` (at least one, oldest first) that may count as the latest."""
    return next((info for info in reversed(tags) if info.record.is_latest), tags[-1])


def list_tags(place: FolderLike) -> Catalog:
    """Return the catalog of a folder of checkpoints, or of a single tag's folder."""
    folder = folder_at(place)
    info = _tag_at(folder)
    return scan(folder) if info is None else Catalog(tags=(info,), refusals=())


def list_nested(place: FolderLike) -> Catalog:
    """Return the catalog of a Trainer's `checkpoint-N` folders, or Accelerate's `checkpoint_N` folders, in a folder."""
    folder = folder_at(place)
    try:
        names = [name for name in folder.entries().folders if LOOPS_FOLDER.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return Catalog(tags=(), refusals=())
    catalogs = [scan(folder.child(name)) for name in names]
    tags = [info for catalog in catalogs for info in catalog.tags]
    return Catalog(
        tags=tuple(sorted(tags, key=lambda info: (info.record.committed_ns, info.record.step))),
        refusals=tuple(refusal for catalog in catalogs for refusal in catalog.refusals),
    )


def _tag_at(folder: Folder) -> TagInfo | None:
    """Return the checkpoint in the tag's folder `folder`; None if it has no record."""
    try:
        return TagInfo(folder=folder, record=read_record(folder))
    except (FileNotFoundError, NotADirectoryError):
        return None


def tags_text(infos: Sequence[TagInfo]) -> str:
    """Return the tags of the newest of `infos`, which are sorted oldest first, for a message."""
    names = [repr(info.tag) for info in infos]
    omitted = f" and {len(names) - _MAX_LISTED} older" if len(names) > _MAX_LISTED else ""
    return f"the tag{'s' * (len(names) > 1)} {', '.join(names[-_MAX_LISTED:])}{omitted}"


def _not_found_text(folder: Folder, tag: str | None, catalog: Catalog) -> str:
    problem = "no committed checkpoint" if tag is None else f"no committed checkpoint with the tag {tag!r}"
    text = f"{folder} has {problem}"
    entries = _entries(folder)
    if catalog.tags:
        text += f"; it has {tags_text(catalog.tags)}"
    elif METADATA_FILE in entries.files:
        text += f": it has a {METADATA_FILE} but no {RECORD_FILE}, so it was never committed, or that file was lost"
    for refusal in catalog.refusals[:5]:
        text += f"; {refusal.folder.name} was rejected: {refusal.reason}"
    with contextlib.suppress(OSError, ZstoreError):  # a nested folder cannot be read, or was just removed
        if nested := list_nested(folder).tags:
            text += f"; use a folder in it that has one, such as {newest_tag(nested).folder.parent}"
    foreign = sorted({software for name, software in _FOREIGN.items() if name in entries.files})
    return text + (f"; it looks like a checkpoint of {foreign[0]}" if foreign else "")


def check_tag_is_free(place: FolderLike, tag: str, *, overwrite: bool, run: str = "") -> TagInfo | None:
    """Return the checkpoint that a save to `tag` replaces: with `overwrite` any checkpoint, otherwise only one of run
    `run`. Raises CheckpointExistsError if it must not be replaced."""
    folder, name = folder_at(place), tag_folder(tag)
    target = folder.location_of(name)
    try:
        existing = find_tag(folder, tag)
    except ZstoreError as error:
        if overwrite:
            return None
        raise CheckpointExistsError(
            f"{target} exists, but its record is not valid ({error}): save under another tag, or pass overwrite=True"
        ) from error
    if existing is None:
        if _name_is_in_use(folder, name):
            raise CheckpointError(
                f"{target} exists and is not a zstore checkpoint: move it elsewhere, or use another tag"
            )
    elif not overwrite and (not run or existing.record.run != run):
        owner_text = " by another run" if run else ""
        resume_text = "load it first to continue that run, " if run else ""
        raise CheckpointExistsError(
            f"Checkpoint already exists: {existing.record.tag!r} is committed in {existing.folder.parent}{owner_text} (step "
            f"{existing.record.step}): {resume_text}save under another tag, or pass overwrite=True to replace it"
        )
    return existing


def replaced_text(info: TagInfo) -> str:
    """Return the message about a checkpoint that its own run replaced."""
    return f"checkpoint {info.tag!r} of this run (step {info.record.step}) was replaced in {info.folder.parent}"


def _name_is_in_use(folder: Folder, name: str) -> bool:
    """Return whether the name is used; an empty local folder counts as free."""
    try:
        entries = folder.entries()
    except (FileNotFoundError, NotADirectoryError):
        return False
    if name not in entries.folders or not folder.is_local:
        return name in entries.folders or name in entries.files
    path = folder.path / name
    return path.is_symlink() or any(path.iterdir())
