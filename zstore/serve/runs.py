"""The settings of a service, the runs in its roots, and their names.

[Note: names of runs]
A root that has checkpoints or a journal itself is one run, named after the root; the folders in any other root that have some
are a run each, named after their folder. Of two with the same name the second is called `<root>.<name>`, and so on. A name is
one segment of a URL, percent-encoded there. A link in a root that leads out of it is not a run.
"""

from __future__ import annotations

import ipaddress
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.catalog import LOOPS_FOLDER, scan
from ..checkpoint.folder import Folder, LocalFolder, links_elsewhere
from ..checkpoint.layout import RECORD_FILE, tag_folder
from ..errors import CheckpointNotFoundError, UsageError, ZstoreError
from ..io.files import Files, is_url, user_location
from ..journal import run_of
from ..open.sources import folder_of

DEFAULT_PORT = 8700
MIN_TOKEN = 16
"""A shorter one could be guessed."""
UPLOADS_FOLDER = ".uploads"
"""Folder of a run's uploads that are not committed."""
_RESERVED = frozenset({"api", "assets", "healthz"})
"""First parts of the service's own URLs."""
_VALID_S = 2.0
"""How long a list of runs is valid: people look often, folders change seldom."""


@dataclass(frozen=True, kw_only=True)
class Root:
    """A folder or URL that is served: a run's own folder, or a folder of runs."""

    location: str
    name: str
    """The name of its run, if it is itself a run's folder."""

    @classmethod
    def parse(cls, text: str) -> Root:
        """Return the root of `PATH_OR_URL` or `NAME=PATH_OR_URL`. Raises UsageError for an empty name or place."""
        name, equals, location = text.partition("=")
        if not equals or "/" in name or "://" in name:
            name, location = "", text
        name = name or location.rstrip("/").rpartition("/")[2] or "root"
        if not location:
            raise UsageError(f"expected a folder, a URL, or NAME=FOLDER, got {text!r}")
        location = user_location(location)
        if name in (".", ".."):
            name = Path(location).name or "root"
        return cls(location=location, name=name)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a service runs. Raises UsageError for settings that are not safe or make no sense."""

    roots: tuple[Root, ...]
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0: any free one."""
    token: str | None = field(default=None, repr=False)
    """Allows reading and uploads. None: no uploads."""
    read_token: str | None = field(default=None, repr=False)
    """Allows reading."""
    files: Files = field(default_factory=Files, repr=False)
    """Makes uploads durable."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.roots:
            raise UsageError("name at least one folder or URL to serve")
        for token in filter(None, (self.token, self.read_token)):
            if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
                raise UsageError(
                    f"a token has {MIN_TOKEN} or more ASCII characters without blanks: make one with `openssl rand -hex 16`"
                )
        if self.is_open and not self.is_loopback:
            raise UsageError(
                f"everyone who reaches {self.host} could read all runs: set a token (ZSTORE_TOKEN, or ZSTORE_READ_TOKEN for "
                "one that only reads), or leave --host out"
            )

    @property
    def is_open(self) -> bool:
        """Whether reading needs no token."""
        return self.token is None and self.read_token is None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A folder of checkpoints, and its other files."""

    name: str
    folder: Folder


class RunTable:
    """The runs of all roots, scanned again every few seconds. Usable from any thread; calls block on the file systems."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._found: dict[str, Run] = {}
        self._scanned_s: float | None = None
        self._lock = threading.Lock()

    def all(self) -> dict[str, Run]:
        """Return the runs by name, in the order of the roots."""
        with self._lock:
            if self._scanned_s is None or time.monotonic() - self._scanned_s > _VALID_S:
                self._found, self._scanned_s = self._scan(), time.monotonic()
            return self._found

    def invalidate(self) -> None:
        """Make the next call scan again."""
        self._scanned_s = None

    def get(self, name: str) -> Run:
        """Return the run of that name. Raises CheckpointNotFoundError that names existing ones."""
        if name not in self.all():
            self.invalidate()
        if (found := self.all().get(name)) is not None:
            return found
        some = ", ".join(sorted(self.all())[:5]) or "none"
        raise CheckpointNotFoundError(f"there is no run {name!r:.200}; runs that are served: {some}")

    def upload_roots(self) -> list[Path]:
        """Return the roots that are folders of this machine."""
        return [Path(root.location) for root in self._settings.roots if not is_url(root.location)]

    def folder_for_uploads(self, name: str) -> Path:
        """Return the folder of the run of that name; of a new one in the first root that is a folder and not a run.

        Raises UsageError for a run at a URL, and for names that no new run can have.
        """
        run = self.all().get(name)
        if run is None:
            self.invalidate()
            run = self.all().get(name)
        if run is not None:
            if run.folder.is_local:
                return run.folder.path
            raise UsageError(f"the run {name!r} is at {run.folder.location}: save there, this service only reads it")
        if not _is_valid_run_name(name):
            raise UsageError(
                f"{name!r:.200} cannot name a run: expected up to 180 letters, digits and `-_.~=+@,`, no leading dot, and no "
                "name that checkpoints or the service use themselves"
            )
        folder = next((root for root in self.upload_roots() if root.is_dir() and not _is_run(LocalFolder(root))), None)
        if folder is None:
            some = ", ".join(sorted(self.all())[:5]) or "none"
            raise UsageError(
                f"the service has no folder for new runs: save under the name of one that it serves ({some}), or serve the "
                "folder above it"
            )
        if os.path.lexists(folder / name) and ((folder / name).is_symlink() or not (folder / name).is_dir()):
            raise UsageError(f"{name!r} is a file or a link in the folder of runs: choose another name")
        return folder / name

    def _scan(self) -> dict[str, Run]:
        found: dict[str, Run] = {}
        for root in self._settings.roots:
            for name, folder in self._runs_in(root):
                unique = name
                while unique in found:
                    unique = f"{root.name}.{unique}"
                found[unique] = Run(name=unique, folder=folder)
        return found

    def _runs_in(self, root: Root) -> Iterator[tuple[str, Folder]]:
        folder = folder_of(root.location, self._settings.storage_options)
        try:
            entries = folder.entries()
        except (OSError, ZstoreError):
            return
        if _is_run(folder):
            yield root.name, folder
            return
        for name in sorted(entries.folders):
            child = folder.child(name)
            if name != UPLOADS_FOLDER and not (child.is_local and links_elsewhere(child.path)) and _is_run(child):
                yield name, child


def _is_valid_run_name(name: str) -> bool:
    try:
        plain = tag_folder(name) == name
    except UsageError:
        return False
    return plain and name not in _RESERVED and LOOPS_FOLDER.fullmatch(name) is None


def _is_run(folder: Folder) -> bool:
    """Return whether a folder has checkpoints or a journal."""
    try:
        entries = folder.entries()
        if any(run_of(name) is not None for name in entries.files):
            return True
        if RECORD_FILE in entries.files:  # a checkpoint itself
            return False
        return bool(scan(folder).tags) or any(LOOPS_FOLDER.fullmatch(name) for name in entries.folders)
    except (OSError, ZstoreError):
        return False
