"""Several local folders as one: parts of checkpoints that are on drives of each machine's own, or copies of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import UsageError
from .folder import Entries, Folder, LocalFolder
from .format import MAX_JSON_BYTES
from .names import RECORD_FILE


class UnionFolder(LocalFolder):
    """The folders `paths`, the first being the one that the user named: a file comes from the first folder that has it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(paths[0])
        self._all = [LocalFolder(path) for path in paths]

    @property
    def parent(self) -> Folder:
        return UnionFolder([folder.path.parent for folder in self._all])

    def child(self, name: str) -> Folder:
        return UnionFolder([folder.path / name for folder in self._all])

    def _holder(self, file: str) -> LocalFolder:
        return next((folder for folder in self._all if folder.has(file)), self._all[0])

    def location_of(self, file: str) -> str:
        return self._holder(file).location_of(file)

    def read_small(self, file: str, most_bytes: int = MAX_JSON_BYTES) -> bytes:
        return self._holder(file).read_small(file, most_bytes)

    def read_range(self, file: str, start: int, stop: int) -> bytes:
        return self._holder(file).read_range(file, start, stop)

    def size(self, file: str) -> int:
        return self._holder(file).size(file)

    def check_file(self, file: str) -> None:
        self._holder(file).check_file(file)

    def read_records(self, names: Sequence[str]) -> list[bytes | Exception]:
        return [self._holder(f"{name}/{RECORD_FILE}").read_records([name])[0] for name in names]

    def write_small(self, file: str, data: bytes) -> None:
        raise UsageError(f"{self.location} and others are read as one folder, and not written: name one of them")

    def has(self, file: str) -> bool:
        return any(folder.has(file) for folder in self._all)

    def entries(self) -> Entries:
        return self._all[0].entries()  # the others have parts of the same checkpoints

    def sizes(self, top: str) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for folder in reversed(self._all):
            found |= folder.sizes(top)
        return found

    def sizes_of(self, files: Iterable[str]) -> dict[str, int | None]:
        wanted, found = list(files), dict[str, int | None]()
        for folder in reversed(self._all):
            found |= folder.sizes_of(wanted)
        return found


def with_parts(path: Path, also: Sequence[Path]) -> LocalFolder:
    """Return the folder `path` with further folders that parts of its checkpoints may be in.

    These are folders of checkpoints, or of the same tag; if `path` is a tag's own folder, the tag is looked for in them.
    """
    if not also:
        return LocalFolder(path)
    is_tag = (path / RECORD_FILE).exists()
    tags = {other: (other / RECORD_FILE).exists() for other in also}
    if is_tag:
        others = [other if tags[other] else other / path.name for other in also]
    else:
        others = [other.parent if tags[other] else other for other in also]
    return UnionFolder([path, *others])
