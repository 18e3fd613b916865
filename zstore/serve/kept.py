"""Files that were fetched or made once and are kept in a folder, as many as a budget of bytes takes.

<folder>/files/<group>/<name>   a file; those that were used least recently go
<folder>/parts/                 files that are being written
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..io.files import Files


class KeptFiles:
    """The files that are kept in `folder`, of `most_bytes` together (None: any number). Usable from any thread."""

    def __init__(self, folder: Path, most_bytes: int | None, files: Files) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        self._files = files
        self._lock = threading.Lock()
        self._making: dict[Path, threading.Lock] = {}
        for part in (folder / "parts").glob("*"):
            part.unlink(missing_ok=True)  # of a process that was killed

    def place(self, *key: str) -> Path:
        """Return the path that a file has, or would have: `key` are its group and its name."""
        return self.folder.joinpath("files", *map(short_digest, key))

    def get(self, place: Path) -> Path | None:
        """Return the file at a place, which counts as used now; None if it is not there."""
        try:
            os.utime(place)
        except OSError:
            return None
        return place

    def part(self, place: Path) -> Path:
        """Return a new path, to write a file to that `keep` then puts in its place."""
        part = self.folder / "parts" / f"{place.name}.{uuid.uuid4().hex}"
        self._files.make_folder(part.parent)
        return part

    def keep(self, part: Path, place: Path) -> None:
        """Put a part in its place, and remove other files that no longer fit."""
        self._files.make_folder(place.parent)
        os.replace(part, place)
        if place.is_relative_to(self.folder / "files"):
            self._make_room(place)

    def write(self, place: Path, blocks: Iterable[bytes], check: Callable[[Path], None] = lambda _: None) -> None:
        """Write a file, which `check` may refuse by an error."""
        part = self.part(place)
        try:
            with part.open("wb") as file:
                for block in blocks:
                    file.write(block)
            check(part)
            self.keep(part, place)
        finally:
            part.unlink(missing_ok=True)

    @contextmanager
    def only_one(self, place: Path) -> Iterator[None]:
        """Let one thread at a time make the file at a place."""
        with self._lock:
            lock = self._making.setdefault(place, threading.Lock())
        with lock:
            yield
        with self._lock:
            self._making.pop(place, None)

    def _make_room(self, kept: Path) -> None:
        """Remove the files that were used least recently, but not `kept`, until the others fit."""
        if self.most_bytes is None:
            return
        with self._lock:
            found = []
            for path in (self.folder / "files").glob("*/*"):
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    found.append((status.st_mtime_ns, status.st_size, path))
            over = sum(size for _, size, _ in found) - self.most_bytes
            for _, size, path in sorted(found):
                if over <= 0:
                    break
                if path != kept:
                    path.unlink(missing_ok=True)
                    over -= size


def short_digest(*parts: str) -> str:
    """Return 32 hex digits that stand for texts together."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
