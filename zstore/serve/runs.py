"""The runs in the roots, and their names.

[Note: names of runs]
A root that has checkpoints or a journal itself is one run, called as the root is; the folders in any other root that have
some are a run each, called as their folder is. Of two with one name the second is called `<root>.<name>`, and so on. A name
is one segment of a URL, percent-encoded there. A link in a root that leads out of it is not a run.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.catalog import LOOPS_FOLDER, scan
from ..checkpoint.folder import Folder, LocalFolder, links_elsewhere
from ..checkpoint.names import RECORD_FILE, tag_folder
from ..errors import CheckpointNotFoundError, UsageError, ZstoreError
from ..io.files import is_url
from ..journal.names import run_of
from ..open.sources import folder_of
from .cache import Renewed
from .kept import KeptFiles
from .settings import Root, Settings

if TYPE_CHECKING:
    from .upstream import Upstream

_log = logging.getLogger("zstore.serve")
_OWN_FOLDERS = frozenset({".uploads"})
"""Of a root that is a run, and has none so far."""
_TAKEN = frozenset({"api", "assets", "healthz", "metrics"})
"""First parts of the service's own URLs."""
_FRESH_S = 2.0
"""How long a list of runs is valid: people look often, folders change seldom."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A folder of checkpoints, and the files beside them."""

    name: str
    folder: Folder
    root: Root
    is_pulled: bool = False
    """Whether it is another service's; see [Note: pull-through]."""


class Runs:
    """The runs of all roots, looked for again every few seconds. Usable from any thread; calls block on the file systems."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.kept: KeptFiles | None = None
        """Files of other services, and weights that were cast; None: nothing is kept."""
        if settings.cache is not None:
            self.kept = KeptFiles(settings.cache, settings.cache_bytes, settings.files)
        self._upstreams: list[Upstream] = []
        if settings.upstreams:
            from .upstream import Upstream  # brings the client of a service

            self._upstreams = [Upstream(url, settings.storage_options, self.kept) for url in settings.upstreams]
        self._found = Renewed(self._look, _FRESH_S)
        self._sees: Callable[[str], bool] = lambda _: True
        self.all = self._found.get
        """Returns the runs by name, in the order of the roots."""
        self.forget = self._found.forget
        """Has the next call look again."""

    @property
    def fresh(self) -> dict[str, Run] | None:
        """The runs by name, whoever may see them; None if they would be looked for now."""
        return self._found.fresh

    def limited_to(self, sees: Callable[[str], bool]) -> Runs:
        """Return the runs whose names `sees` accepts, as if there were no others."""
        limited = copy.copy(self)
        limited._sees = sees
        limited.all = lambda: {name: run for name, run in self.all().items() if sees(name)}
        return limited

    def get(self, name: str) -> Run:
        """Return the run of that name. Raises CheckpointNotFoundError that names some that are there."""
        if name not in self._found.get():
            self.forget()
        try:
            if not self._sees(name):
                raise KeyError(name)
            return self._found.get()[name]
        except KeyError:
            some = ", ".join(sorted(self.all())[:5]) or "none"
            raise CheckpointNotFoundError(f"there is no run {name!r}; runs that are served: {some}") from None

    def split(self, name: str) -> tuple[Run, tuple[str, ...]]:
        """Return the run of that name and nothing, or of `RUN@TAG` the run and its tag. Raises CheckpointNotFoundError."""
        run, _, tag = name.rpartition("@")
        if tag:
            runs = self.all()
            if name not in runs and run in runs:
                return runs[run], (tag,)
        return self.get(name), ()

    def local_roots(self) -> list[Path]:
        """Return the roots that are folders of this machine."""
        return [Path(root.location) for root in self._settings.roots if not is_url(root.location)]

    def roots_of_uploads(self) -> list[Path]:
        """Return the folders in which uploads come together: a run's own, or folders of such."""
        own = self._settings.upload_folder
        return [*self.local_roots(), *([own] if own is not None else [])]

    def folder_for_uploads(self, name: str, *, behind_urls: bool = True) -> Path:
        """Return the folder in which uploads to the run of that name come together: the run's own, or of a run behind a URL one
        in the folder for uploads. A new run is made in the first root that is not a run, a folder if there is one.

        Raises UsageError for a run behind a URL, without such a folder or unless `behind_urls`, and for names that no new run
        can have, CheckpointNotFoundError for one that these runs are not limited to.
        """
        place = self.place_for_uploads(name)
        if isinstance(place, Path):
            return place
        if self._settings.upload_folder is None or not behind_urls:
            takes = "uploads there with --upload-folder DIR" if behind_urls else "that into folders of its own machine"
            raise UsageError(f"the run {name!r} is at {place}, behind a URL: this service takes {takes}")
        return self._settings.upload_folder / name

    def room_of(self, run: Run) -> Path | None:
        """Return the folder in which uploads to a run that is there come together; None if it takes none."""
        if run.folder.is_local:
            return run.folder.path
        own = self._settings.upload_folder
        return None if run.is_pulled or own is None else own / run.name

    def place_for_uploads(self, name: str) -> Path | str:
        """Return the run's folder, or its URL; see `folder_for_uploads`."""
        if not self._sees(name):
            raise CheckpointNotFoundError(f"there is no run {name!r:.200}, and the token is for runs of other names")
        run = self.all().get(name)
        if run is None:
            self.forget()
            run = self.all().get(name)
        if run is not None and run.is_pulled:
            raise UsageError(f"the run {name!r} is another service's, at {run.folder}: send it there")
        if run is not None:
            return run.folder.path if run.folder.is_local else run.folder.location
        if not _may_name_a_run(name):
            raise UsageError(
                f"{name!r:.200} cannot name a run: expected up to 180 letters, digits and `-_.~=+@,`, no leading dot, and no "
                "name that checkpoints or the service use themselves"
            )
        folder = next((root for root in self.local_roots() if root.is_dir() and not _is_run(LocalFolder(root))), None)
        if folder is not None:
            if os.path.lexists(folder / name) and ((folder / name).is_symlink() or not (folder / name).is_dir()):
                raise UsageError(f"{name!r} is a file or a link in the folder of runs: choose another name")
            return folder / name
        urls = [root.location for root in self._settings.roots if is_url(root.location)]
        takes = self._settings.upload_folder is not None
        if takes and (url := next((url for url in urls if not _is_run(self._folder(url))), None)) is not None:
            return f"{url.rstrip('/')}/{name}"
        some = ", ".join(sorted(self.all())[:5]) or "none"
        raise UsageError(
            f"the service has no folder for new runs: save under the name of one that it serves ({some}), or serve the "
            "folder above it" + (", or take uploads behind URLs with --upload-folder DIR" if urls and not takes else "")
        )

    def folder_of(self, name: str) -> Folder:
        """Return the folder that uploads of a run are committed to."""
        place = self.place_for_uploads(name)
        return LocalFolder(place) if isinstance(place, Path) else self._folder(place)

    def _folder(self, location: str) -> Folder:
        """Return the folder at a path or URL."""
        return folder_of(location, self._settings.storage_options)

    def _look(self) -> dict[str, Run]:
        found: dict[str, Run] = {}
        for root in self._settings.roots:
            for name, folder in self._runs_in(root):
                unique = name
                while unique in found:
                    unique = f"{root.name}.{unique}"
                found[unique] = Run(name=unique, folder=folder, root=root)
        for upstream in self._upstreams:
            there = Root.parse(f"upstream={upstream.url.base}")
            for name, folder in _runs_of(upstream):
                found.setdefault(name, Run(name=name, folder=folder, root=there, is_pulled=True))
        return found

    def _runs_in(self, root: Root) -> Iterator[tuple[str, Folder]]:
        folder = self._folder(root.location)
        try:
            entries = folder.entries()
        except (OSError, ZstoreError):
            return
        if _is_run(folder):
            yield root.name, folder
            return
        for name in sorted(entries.folders):
            child = folder.child(name)
            if name in _OWN_FOLDERS or (child.is_local and links_elsewhere(child.path)):
                continue
            if not child.is_local:
                child = self._folder(child.location)
            if _is_run(child):
                yield name, child


def _runs_of(upstream: Upstream) -> Iterator[tuple[str, Folder]]:
    root = upstream.root()
    if not root.lists_runs:
        yield root.name, root
        return
    try:
        names = root.entries().folders
    except (OSError, ZstoreError) as error:
        _log.warning("%s", error)
        return
    yield from ((name, root.child(name)) for name in names)


def _may_name_a_run(name: str) -> bool:
    try:
        plain = tag_folder(name) == name
    except UsageError:
        return False
    return plain and name not in _TAKEN and LOOPS_FOLDER.fullmatch(name) is None


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
