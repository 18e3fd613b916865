"""Requests of people to a running run: save now, or stop after this step.

[Note: requests]
A request is the file `request-<run_id>.json` beside the run's journal, with `id`, `action` ("save" or "stop") and `at`. It is
there whole or not at all. Rank 0 of the run looks for it twice a second, and removes it; once all ranks know of it they
carry it out after the same step, and the journal says so in a line of kind `action` with the same id. A later request takes the
place of one that was not taken up yet. One that is older than the process that finds it was meant for a process that is
gone, and is removed unread.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.folder import FolderLike, folder_at
from ..errors import UsageError, storage_error
from .names import request_file

ACTIONS = ("save", "stop")
_MOST_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to a run."""

    id: str
    action: str
    at: float
    """Seconds since 1970."""


def request(folder: FolderLike, run_id: str, action: str) -> Request:
    """Ask the run whose journal is in a local folder to "save" or to "stop", and return the request.

    Raises UsageError for another action, an invalid id, and a folder behind a URL; StorageError if nothing can be
    written.
    """
    if action not in ACTIONS:
        raise UsageError(f"expected one of the actions {', '.join(ACTIONS)}, got {action!r:.100}")
    place = folder_at(folder)
    if not place.is_local:
        raise UsageError(
            f"{place} is behind a URL, where the run does not look for requests: name the local folder that its journal is in"
        )
    made = Request(id=uuid.uuid4().hex, action=action, at=time.time())
    path = place.path / request_file(run_id)
    temporary = path.with_name(f".{path.name}.{made.id}")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            json.dump(asdict(made), file)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise storage_error(error, "cannot ask the run", path=str(path)) from error
    return made


def read_request(path: Path) -> Request | None:
    """Return the request in a file; None for any other content. Raises OSError if it cannot be read."""
    with open(path, "rb") as file:
        text = file.read(_MOST_BYTES)
    try:
        found: Any = json.loads(text)
        made = Request(id=str(found["id"])[:100], action=str(found["action"]), at=float(found["at"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return made if made.action in ACTIONS else None
