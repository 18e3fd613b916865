"""Which committed checkpoints a folder holds, and which one a caller means."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, ZstoreError
from .format import Record, read_json
from .names import METADATA_FILE, RECORD_FILE, SET_ASIDE, parse_own_name, tag_folder

_FOREIGN = {
    "latest_checkpointed_iteration.txt": "Megatron, which this version does not read",
    ".metadata": "torch.distributed.checkpoint, which this version does not read",
    "zero_to_fp32.py": "DeepSpeed, but no folder of a tag with *_model_states.pt is in it: it is incomplete",
}
"""A file's name -> whose checkpoint has it, and why it is not read here."""


@dataclass(frozen=True, kw_only=True)
class TagInfo:
    """A committed checkpoint."""

    path: Path
    """The folder of the tag."""
    record: Record

    @property
    def tag(self) -> str:
        """The tag; for a folder that was renamed, the folder's name."""
        own = parse_own_name(self.path.name)
        folder = own[0] if own else self.path.name
        return self.record.tag if tag_folder(self.record.tag) == folder else folder


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A folder that looks like a checkpoint and is none."""

    path: Path
    reason: str


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """What a folder of checkpoints holds."""

    tags: tuple[TagInfo, ...]
    """Committed checkpoints, the oldest first."""
    refusals: tuple[Refusal, ...]


def read_record(folder: Path) -> Record:
    """Return the record in a tag's folder.

    Raises FileNotFoundError where there is none, CorruptionError or CheckpointMismatchError where it is not valid.
    """
    path = folder / RECORD_FILE
    return Record.decode(read_json(path), str(path))


def scan(folder: Path) -> Catalog:
    """Return all checkpoints right below `folder`; the set-aside ones count where nothing else has their name.

    Raises CheckpointNotFoundError where `folder` is no folder.
    """
    found: dict[str, TagInfo] = {}
    aside: dict[str, TagInfo] = {}
    refusals: list[Refusal] = []
    for entry in _folders(folder):
        own = parse_own_name(entry.name)
        if own is not None and own[1] != SET_ASIDE:
            continue
        try:
            info = TagInfo(path=entry, record=read_record(entry))
        except (ZstoreError, OSError) as error:
            if not isinstance(error, FileNotFoundError) or (entry / METADATA_FILE).exists():
                refusals.append(Refusal(path=entry, reason=_reason(error)))
            continue
        if own is None:
            found[entry.name] = info
        elif own[0] not in aside or aside[own[0]].record.committed_ns < info.record.committed_ns:
            aside[own[0]] = info
    tags = found | {name: info for name, info in aside.items() if name not in found}
    ordered = sorted(tags.values(), key=lambda info: (info.record.committed_ns, info.record.step, info.path.name))
    return Catalog(tags=tuple(ordered), refusals=tuple(refusals))


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(f"{folder} is not there, or is no folder: expected a checkpoint") from error


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"it has no {RECORD_FILE}: it was never committed, or the file was lost"
    return str(error)


def find_tag(folder: Path, tag: str) -> TagInfo | None:
    """Return the committed checkpoint `tag` below `folder`, also where it is set aside; None where there is none.

    Raises CorruptionError or CheckpointMismatchError where it is there, but its record is not valid.
    """
    name = tag_folder(tag)
    try:
        return TagInfo(path=folder / name, record=read_record(folder / name))
    except (FileNotFoundError, NotADirectoryError):
        pass
    if not folder.is_dir():
        return None
    for entry in _folders(folder):
        own = parse_own_name(entry.name)
        if own is not None and own[:2] == (name, SET_ASIDE):
            try:
                return TagInfo(path=entry, record=read_record(entry))
            except (ZstoreError, OSError):
                continue
    return None


def resolve(path: Path, tag: str | None = None) -> TagInfo:
    """Return the checkpoint that `path` and `tag` mean: a tag's folder, or a folder of checkpoints and one of its tags.

    Without a tag it is the newest committed one, by the records, whatever `latest` says.
    Raises CheckpointNotFoundError that says what is there instead.
    """
    own = parse_own_name(path.name)
    if own is not None and own[1] != SET_ASIDE:
        raise CheckpointNotFoundError(
            f"{path} is what a save has under way, or left when it was killed: it was never committed; "
            f"name {path.with_name(own[0])} or {path.parent}"
        )
    if (path / RECORD_FILE).exists():
        info = TagInfo(path=path, record=read_record(path))
        if tag is None or tag in (info.tag, info.record.tag):
            return info
        raise CheckpointNotFoundError(f"{path} holds the checkpoint {info.tag!r}, not {tag!r}")
    if tag is not None and (named := find_tag(path, tag)) is not None:
        return named
    catalog = scan(path)
    if tag is None and catalog.tags:
        return catalog.tags[-1]
    raise CheckpointNotFoundError(_nothing(path, tag, catalog))


def _nothing(path: Path, tag: str | None, catalog: Catalog) -> str:
    what = "no committed checkpoint" if tag is None else f"no committed checkpoint {tag!r}"
    text = f"{path} holds {what}"
    if catalog.tags:
        names = [repr(info.tag) for info in catalog.tags]
        text += f"; it has {', '.join(names[-10:])}" + (f" and {len(names) - 10} older" if len(names) > 10 else "")
    elif (path / METADATA_FILE).exists():
        text += f": there is a {METADATA_FILE} but no {RECORD_FILE}, so it was never committed, or the file was lost"
    for refusal in catalog.refusals[:5]:
        text += f"; {refusal.path.name} was refused: {refusal.reason}"
    foreign = sorted({maker for name, maker in _FOREIGN.items() if (path / name).exists()})
    return text + (f"; it looks like a checkpoint of {foreign[0]}" if foreign else "")


def check_tag_is_free(folder: Path, tag: str, *, overwrite: bool) -> None:
    """Raise CheckpointExistsError where a save to `tag` would replace something that it may not."""
    target = folder / tag_folder(tag)
    try:
        existing = find_tag(folder, tag)
    except ZstoreError as error:
        if overwrite:
            return
        raise CheckpointExistsError(
            f"{target} is there and its record is not valid ({error}): save under another tag, or pass overwrite=True"
        ) from error
    if existing is not None and not overwrite:
        raise CheckpointExistsError(
            f"checkpoint {tag!r} is committed in {folder} (step {existing.record.step}): save under another tag, or "
            "pass overwrite=True to replace it"
        )
    if existing is None and (target.exists() or target.is_symlink()):
        raise CheckpointError(f"{target} is there and is no checkpoint of zstore: move it away, or use another tag")
