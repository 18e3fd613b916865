"""Files inside a folder that may come from elsewhere, reached without following a link out of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from ..errors import CorruptionError, storage_error


class PlainFolder:
    """The folder `path`, below which only folders and regular files count.

    `path` itself may be a link: its user named it. Usable from several threads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folders: set[str] = set()
        """Those below it that are known to be no links."""

    def file(self, inside: str) -> Path:
        """Return the path of the file `inside`, its parts apart by `/`.

        Raises FileNotFoundError where it is missing, CorruptionError where it, or a folder on the way, is a symbolic link
        or of another kind.
        """
        parent, _, _ = inside.rpartition("/")
        if parent and parent not in self._folders:
            parts = parent.split("/")
            for depth in range(1, len(parts) + 1):
                self._check("/".join(parts[:depth]), stat.S_ISDIR, "a folder")
            self._folders.add(parent)
        self._check(inside, stat.S_ISREG, "a file")
        return self.path / inside

    def _check(self, inside: str, is_kind: Callable[[int], bool], expected: str) -> None:
        path = self.path / inside
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(f"{path} is missing") from error
        except OSError as error:
            raise storage_error(error, "cannot look at the file", path=str(path)) from error
        if stat.S_ISLNK(mode):
            raise CorruptionError(f"{path} is a symbolic link, expected {expected}: it may lead out of the checkpoint")
        if not is_kind(mode):
            raise CorruptionError(f"{path} is not {expected}: the checkpoint was changed; restore it from another copy")


def leads_out(entry: Path) -> bool:
    """Tell whether `entry` is a symbolic link to something that is not in the same folder as itself."""
    return entry.is_symlink() and os.path.dirname(os.path.realpath(entry)) != os.path.realpath(entry.parent)
