"""Names on disk: tags, arrays, shard files, and the names that a save uses on its way. Pure.

[Note: names on disk]
A user's name becomes one path component: its UTF-8 bytes, percent-encoded except for letters, digits and
`-_.~=+@,`. Encoded too, although the characters are plain: a leading `.`, the first of two leading `_` (Zarr reserves
`__`), the first letter of names that the format uses itself, and the `.` of an ending that looks like one of a save's
own. A component over 180 bytes is cut and ends in `~` and the first 32 digits of the SHA-256 of the true name. The true
name is in the metadata, and a reader accepts a folder only if encoding its true name gives the folder's name.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from functools import lru_cache
from urllib.parse import quote

from ..errors import UsageError

RECORD_FILE = "zstore.json"
METADATA_FILE = "zarr.json"
LATEST_FILE = "latest"
MANIFEST_FOLDER = "manifest"
ABORT_FILE = "abort.json"

TEMPORARY = "tmp"
"""A folder on its way in or out: never a checkpoint."""
SET_ASIDE = "old"
"""A committed checkpoint that is being replaced: it counts as long as nothing has its name."""
LOCK = "lock"
"""The file that a running save holds locked."""

_MOST_BYTES = 180
_RESERVED = frozenset({RECORD_FILE, METADATA_FILE, LATEST_FILE, MANIFEST_FOLDER})
_OWN = re.compile(rf"\A(?P<folder>.+)\.(?P<kind>{TEMPORARY}|{SET_ASIDE}|{LOCK})-(?P<id>[0-9a-f]{{32}})\Z", re.DOTALL)
_ID = re.compile(r"\A[0-9a-f]{32}\Z")
_PARTIAL_ESCAPE = re.compile(r"%[0-9A-F]?\Z")
_FORBIDDEN_IN_TAGS = re.compile(r"[/\x00-\x1f\x7f-\x9f]")


def new_save_id() -> str:
    """Return a fresh id for a save: 32 hex digits."""
    return uuid.uuid4().hex


def check_save_id(save_id: str) -> str:
    """Return `save_id`; raises UsageError unless it is 32 hex digits."""
    if not _ID.match(save_id):
        raise UsageError(f"a save's id has 32 lower-case hex digits, got {save_id!r}: use new_save_id()")
    return save_id


def tag_text(tag: str | float) -> str:
    """Return the tag as text; numbers are written as Python prints them.

    Raises UsageError for a tag that is empty or has `/`, `..` or control characters.
    """
    text = tag if isinstance(tag, str) else str(tag)
    if not text or ".." in text or _FORBIDDEN_IN_TAGS.search(text) or not _encodable(text):
        raise UsageError(
            f"{tag!r} cannot be a tag: expected any text or number without `/`, `..` and control characters, not empty"
        )
    return text


def step_tag(step: int) -> str:
    """Return the tag of a checkpoint that was given no tag: `step-00000060`."""
    return f"step-{step:08d}"


def tag_folder(tag: str) -> str:
    """Return the name of the folder that holds the checkpoint `tag`."""
    return encode_name(tag_text(tag))


def encode_name(name: str) -> str:
    """Return the path component of `name`. See [Note: names on disk]."""
    if not name or not _encodable(name):
        raise UsageError(f"{name!r} cannot name a file: expected text that is not empty and has no lone surrogates")
    text = quote(name, safe="=+@,")
    if text.startswith((".", "__")) or text.lower() in _RESERVED:
        text = f"%{ord(text[0]):02X}{text[1:]}"
    if own := _OWN.match(text):
        dot = len(own["folder"])
        text = f"{text[:dot]}%2E{text[dot + 1 :]}"
    if len(text) <= _MOST_BYTES:
        return text
    head = _PARTIAL_ESCAPE.sub("", text[: _MOST_BYTES - 33])
    return f"{head}~{hashlib.sha256(name.encode()).hexdigest()[:32]}"


# A save asks several times for each.
@lru_cache(maxsize=2**15)
def array_path(name: str) -> str:
    """Return the folder of an array inside a checkpoint: `model/<fqn>`, `optimizer/<slot>/<fqn>`, `buffer/<fqn>`."""
    group, _, rest = name.partition("/")
    if group == MANIFEST_FOLDER:
        raise UsageError(f"array {name!r}: the group `{MANIFEST_FOLDER}` belongs to the format; choose another")
    slot, _, fqn = rest.partition("/") if group == "optimizer" else (rest, "", "")
    return "/".join(encode_name(part) for part in (group, slot, fqn) if part)


def groups_of(path: str) -> list[str]:
    """Return the folders of the groups that an array in the folder `path` is in, the outermost first."""
    return [path[:at] for at, letter in enumerate(path) if letter == "/"]


def shard_file(ndim: int, shard: int) -> str:
    """Return the file name of shard number `shard` of an array stored with `ndim` extents: `c`, `c.0` or `c.0.0`."""
    return f"c.{shard}" + ".0" * (ndim - 1) if ndim else "c"


def manifest_file(rank: int) -> str:
    """Return the path of rank `rank`'s manifest inside a checkpoint."""
    return f"{MANIFEST_FOLDER}/rank-{rank:05d}.json"


def own_name(folder: str, kind: str, save_id: str) -> str:
    """Return the name that save `save_id` gives to something of tag folder `folder` that is not a checkpoint."""
    return f"{folder}.{kind}-{save_id}"


def parse_own_name(name: str) -> tuple[str, str, str] | None:
    """Return (tag folder, kind, save id) of a name that a save uses on its way, None for every other name."""
    found = _OWN.match(name)
    return (found["folder"], found["kind"], found["id"]) if found else None


def _encodable(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which `h.2` comes before `h.10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
