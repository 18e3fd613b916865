"""The visible content of a folder of a run: names and sizes, as JSON or as a small HTML index."""

from __future__ import annotations

import html
import json
import os
import stat
from dataclasses import dataclass
from urllib.parse import quote

from ...checkpoint.catalog import LOOPS_FOLDER
from ...checkpoint.folder import Folder
from ...errors import CheckpointNotFoundError, UsageError
from .opened import open_below
from .visible import Place, is_real_folder, is_run_file, tags_in

_MOST_FILES = 500_000


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Folders by name; files by name, or by their path if all below were asked for, with their bytes."""

    folders: tuple[str, ...]
    files: tuple[tuple[str, int], ...]

    def as_json(self) -> str:
        """Return `{"folders": [...], "files": [{"name", "size"}]}`."""
        files = [{"name": name, "size": size} for name, size in self.files]
        return json.dumps({"folders": self.folders, "files": files})

    def as_html(self, title: str, *, sizes: bool = True) -> str:
        """Return an index of relative links, files with their sizes unless told otherwise."""
        rows: list[tuple[str, int | None]] = [(f"{name}/", None) for name in self.folders]
        rows += [(name, size if sizes else None) for name, size in self.files]
        lines = [f"<li>{_link(name)}{'' if size is None else f' {size}'}</li>" for name, size in rows]
        head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title></head>'
        return f"{head}<body><h1>{html.escape(title)}</h1><ul>\n" + "\n".join(lines) + "\n</ul></body></html>\n"


def _link(name: str) -> str:
    return f'<a href="{quote(os.fsencode(name))}">{html.escape(name)}</a>'


def list_place(place: Place, *, recursive: bool) -> Listing:
    """Return the content of the folder `place`; with `recursive` all files below it, and no folders.

    Raises CheckpointNotFoundError if it is not a folder, UsageError for too many files.
    """
    folders: set[str] = set()
    files: dict[str, int] = {}
    if place.is_folder:
        _list_run(place.folder, recursive, folders, files)
    else:
        _list_inside(place.folder, place.path.rstrip("/"), "", recursive, folders, files)
        if not (folders or files) and not place.folder.is_local:
            raise CheckpointNotFoundError(f"{place.folder} has no folder {place.path!r}")
    return Listing(folders=tuple(sorted(folders)), files=tuple(sorted(files.items())))


def _list_run(folder: Folder, recursive: bool, folders: set[str], files: dict[str, int]) -> None:
    entries = folder.entries()
    tags = tags_in(folder)
    loops = [name for name in entries.folders if LOOPS_FOLDER.fullmatch(name) and name not in tags]
    loops = [name for name in loops if is_real_folder(folder, name) and tags_in(folder.child(name))]
    sizes = _run_file_sizes(folder, [name for name in entries.files if is_run_file(name)])
    files.update(sizes)
    if not recursive:
        folders.update(tags, loops)
        return
    for name, info in tags.items():
        _list_inside(info.folder, "", f"{name}/", True, folders, files)
    for name in loops:
        inner: dict[str, int] = {}
        _list_run(folder.child(name), True, folders, inner)
        files.update({f"{name}/{path}": size for path, size in inner.items()})


def _run_file_sizes(folder: Folder, names: list[str]) -> dict[str, int]:
    if folder.is_local:
        found = {name: os.lstat(folder.path / name) for name in names}
        return {name: status.st_size for name, status in found.items() if stat.S_ISREG(status.st_mode)}
    return {name: folder.size(name) for name in names}


def _list_inside(
    folder: Folder, top: str, prefix: str, recursive: bool, folders: set[str], files: dict[str, int]
) -> None:
    """Add the content of the folder `top` of a checkpoint; names get `prefix`."""
    if not folder.is_local:
        start = len(top) + 1 if top else 0
        for path, size in folder.sizes(top).items():
            inner = path[start:]
            if size is None:
                continue
            if recursive or "/" not in inner:
                files[prefix + inner] = size
            else:
                folders.add(inner.partition("/")[0])
        return
    descriptor = open_below(folder, top, is_checkpoint=True)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise CheckpointNotFoundError(f"{folder} has no folder {top!r}")
        for path, names, plain, at in os.fwalk(".", dir_fd=descriptor, follow_symlinks=False):
            inner = "" if path == "." else path.removeprefix("./") + "/"
            for name in plain:
                status = os.stat(name, dir_fd=at, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    files[prefix + inner + name] = status.st_size
            if len(files) > _MOST_FILES:
                raise UsageError(f"more than {_MOST_FILES} files: list the folders of the checkpoint one by one")
            if not recursive:
                folders.update(
                    name for name in names if not stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode)
                )
                break
    finally:
        os.close(descriptor)
