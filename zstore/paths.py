"""Paths and URLs as a user writes them. Pure, but for the working folder and the home folders.

A relative path means the folder that the program is in as the call is made, not the one that it is in when, behind the
caller or later, the file is opened: every public function takes its paths through `user_path` or `user_location`, once.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from .errors import UsageError

UserPath = str | os.PathLike[str]
"""A path, or where they are taken a URL."""

_URL = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*(::|://)")


def is_url(location: UserPath) -> bool:
    """Return whether it is a URL, such as `s3://bucket/run`, rather than a path."""
    return isinstance(location, str) and _URL.match(location) is not None


def user_path(path: UserPath) -> Path:
    """Return a path absolute, from the present working folder, with `~` and `~USER` for home folders and without `..`.

    Symbolic links stay, except those before a `..`. Raises UsageError for what is no path, or if there is no such home folder.
    """
    given: object = path
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str):
        raise UsageError(f"expected a path as text or pathlib.Path, got {path!r}")
    found = Path(os.path.expanduser(text))
    if text.startswith("~") and found == Path(text):
        home = Path(text).parts[0]
        raise UsageError(
            f"{text}: there is no home folder for {home}: write an absolute path, for a folder of that name {Path.cwd() / text}"
        )
    found = found.absolute()
    if ".." in found.parts:
        above = len(found.parts) - found.parts[::-1].index("..")
        found = Path(*found.parts[:above]).resolve().joinpath(*found.parts[above:])
    return found


def user_location(location: UserPath) -> str:
    """Return a URL as it is, and a path as `user_path` does."""
    return str(location) if is_url(location) else str(user_path(location))
