"""Which runs the roots hold, and what each is called.

[Note: names of runs]
A root that has checkpoints or a journal itself is one run, called as the root is; the folders in any other root that have
some are a run each, called as their folder is. Of two with one name the second is called `<root>.<name>`, and so on. A name
is one segment of a URL, percent-encoded there.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..checkpoint.catalog import scan
from ..checkpoint.folder import Folder
from ..checkpoint.names import RECORD_FILE
from ..errors import CheckpointNotFoundError, ZstoreError
from ..open.sources import folder_of
from .settings import Root, Settings

_JOURNAL = re.compile(r"journal-.*\.jsonl")
_LOOPS_FOLDER = re.compile(r"checkpoint[-_]\d+")
_FRESH_S = 2.0
"""How long a list of runs counts: people look again and again, folders change seldom."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A folder of checkpoints, and what is written beside them."""

    name: str
    folder: Folder
    root: Root


class Runs:
    """The runs of all roots, looked for anew every few seconds. Usable from any thread; calls block on the file systems."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._found: dict[str, Run] = {}
        self._looked_s = float("-inf")

    def all(self) -> dict[str, Run]:
        """Return the runs by name, in the order of the roots."""
        if time.monotonic() - self._looked_s > _FRESH_S:
            self._found = self._look()
            self._looked_s = time.monotonic()
        return self._found

    def forget(self) -> None:
        """Look again at the next call."""
        self._looked_s = float("-inf")

    def get(self, name: str) -> Run:
        """Return the run of that name. Raises CheckpointNotFoundError that names some that are there."""
        runs = self.all()
        if name not in runs:
            self.forget()
            runs = self.all()
        try:
            return runs[name]
        except KeyError:
            some = ", ".join(sorted(runs)[:5]) or "none"
            raise CheckpointNotFoundError(f"there is no run {name!r}; runs that are served: {some}") from None

    def _look(self) -> dict[str, Run]:
        found: dict[str, Run] = {}
        for root in self._settings.roots:
            for name, folder in _runs_in(root, folder_of(root.location, self._settings.storage_options)):
                unique = name
                while unique in found:
                    unique = f"{root.name}.{unique}"
                found[unique] = Run(name=unique, folder=folder, root=root)
        return found


def _runs_in(root: Root, folder: Folder) -> Iterator[tuple[str, Folder]]:
    try:
        entries = folder.entries()
    except (OSError, ZstoreError):
        return
    if _is_run(folder):
        yield root.name, folder
        return
    for name in sorted(entries.folders):
        child = folder.child(name)
        if not name.startswith(".") and _is_run(child):
            yield name, child


def _is_run(folder: Folder) -> bool:
    """Return whether a folder has checkpoints or a journal."""
    try:
        entries = folder.entries()
        if any(_JOURNAL.fullmatch(name) for name in entries.files):
            return True
        if RECORD_FILE in entries.files:  # a checkpoint itself
            return False
        return bool(scan(folder).tags) or any(_LOOPS_FOLDER.fullmatch(name) for name in entries.folders)
    except (OSError, ZstoreError):
        return False
