"""The destination of a save by DCP, which rank 0 begins and commits: a folder that all ranks share, or a URL.

Calls: `check`, `begin`, then `commit`; `abandon` at any time, and at the end.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zstore.checkpoint import (
    MANIFEST_FOLDER,
    METADATA_FILE,
    READ_ONLY,
    Committer,
    Record,
    TagInfo,
    scan,
    sweep,
    tag_text,
    temporary_folder,
)
from zstore.errors import CheckpointError, UsageError
from zstore.io import Files, Flush, Workers
from zstore.remote.commit import RemoteCommitter
from zstore.remote.fsspec_folder import RemoteFolder, open_fsspec_folder
from zstore.remote.retries import PATIENT
from zstore.remote.target import NUM_THREADS, send_all
from zstore.remote.url import is_url, shown
from zstore.remote.versions import has_versions, protocol_of

from .work import PIECES_FOLDER

SCRATCH_NAME = "zstore-dcp"
"""The name of temporary folders for files on their way to a URL."""


class LocalDestination:
    """The folder of checkpoints that holds `path`."""

    url = ""

    def __init__(self, files: Files, path: Path, save_id: str) -> None:
        self._files = files
        self._committer = Committer(files, path.parent, path.name, save_id)
        self._flush: Flush | None = None
        self.tag = path.name

    @property
    def folder(self) -> Path:
        """The temporary folder that ranks write to."""
        return self._committer.temporary

    def check(self, *, overwrite: bool) -> None:
        """Raise CheckpointExistsError if the save may not begin; makes the folder of checkpoints."""
        self._committer.check(overwrite=overwrite)

    def newest(self) -> TagInfo | None:
        """Return the newest checkpoint, whose files may be linked; None if there is none."""
        tags = scan(self._committer.folder).tags
        return max(tags, key=lambda info: info.record.committed_ns, default=None)

    def begin(self) -> None:
        """Make the temporary folder, and remove files that dead saves left."""
        self._committer.begin()
        sweep(self._files, self._committer.folder)
        self._flush = Flush.of(self._files, self.folder)

    @property
    def flushes(self) -> bool:
        """Whether `commit` makes all durable that ranks write, so that they do not."""
        return self._flush is not None

    def take(self, name: str, file: str, file_bytes: int, *, linked: bool) -> None:
        """Check the shard file `file` of array `name`, which a rank reports."""
        path = os.path.join(self.folder, file)
        try:
            found = self._files.size(path)
        except FileNotFoundError:
            found = -1
        if found != file_bytes:
            folder, file = os.path.split(path)
            raise CheckpointError(
                f"array {name!r}: a rank wrote {file} of {file_bytes} bytes, but rank 0 finds "
                + (f"{found}" if found >= 0 else "no such file")
                + f" in {folder}: the folder is not the same one for all ranks"
            )
        if not linked:
            os.chmod(path, READ_ONLY)

    @contextlib.contextmanager
    def documents(self) -> Iterator[Path]:
        """Give the folder for manifests and metadata, for the length of the commit."""
        yield self.folder

    def remove_pieces(self) -> None:
        """Remove the pieces that passed between ranks."""
        self._files.remove_tree(self.folder / PIECES_FOLDER)

    def commit(self, record: Record) -> None:
        """Publish the checkpoint."""
        self._committer.commit(record, self._flush)

    def abandon(self) -> None:
        """Remove all files written, unless they were committed. Never raises."""
        self._committer.abort("the save was given up", alone=True)
        if self._flush is not None:
            self._flush.close()


class RemoteDestination:
    """The tag `tag` in a folder of checkpoints behind a URL; rank 0's documents pass through a temporary folder."""

    def __init__(self, files: Files, folder: RemoteFolder, tag: str, save_id: str) -> None:
        self.tag = tag
        self._files = files
        self._committer = RemoteCommitter(folder, tag, save_id, "")
        self._sizes: dict[str, int] = {}
        self._overwrite = False
        self.folder = Path()

    flushes = False

    @property
    def url(self) -> str:
        """The folder that the files go to."""
        return self._committer.target.location

    def check(self, *, overwrite: bool) -> None:
        """See `LocalDestination`; asked as it begins."""
        self._overwrite = overwrite

    def newest(self) -> TagInfo | None:
        """See `LocalDestination`; behind a URL nothing can be linked."""
        return None

    def begin(self) -> None:
        """Lock the tag, and remove files that dead uploads left."""
        self._committer.begin(overwrite=self._overwrite)

    def take(self, name: str, file: str, file_bytes: int, *, linked: bool) -> None:
        """See `LocalDestination`; its size is looked at in one listing with the others."""
        self._sizes[file] = file_bytes

    @contextlib.contextmanager
    def documents(self) -> Iterator[Path]:
        """See `LocalDestination`."""
        with temporary_folder(self._files, Path(tempfile.gettempdir()), SCRATCH_NAME) as self.folder:
            self._files.make_folder(self.folder / MANIFEST_FOLDER)
            yield self.folder

    def remove_pieces(self) -> None:
        """See `LocalDestination`."""
        self._committer.target.remove_tree(PIECES_FOLDER)

    def commit(self, record: Record) -> None:
        """Upload rank 0's files, and publish the checkpoint."""
        documents = [path for path in self.folder.rglob("*") if path.is_file()]
        files = {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in documents}
        del files[METADATA_FILE]  # which is written last
        with Workers(NUM_THREADS, "zstore-dcp-upload") as workers:
            send_all(workers, self.folder, self._committer.target, files, lambda _: None)
        metadata = (self.folder / METADATA_FILE).read_bytes()
        self._committer.commit(record, metadata, self._sizes | files)

    def abandon(self) -> None:
        """Remove all files uploaded, unless they were committed. Never raises."""
        self._committer.abort()


@dataclass(frozen=True, kw_only=True)
class CheckpointPlace:
    """The place of a checkpoint, as data that another process may be given."""

    location: str
    """Absolute path, or URL, of the checkpoint's own folder."""
    storage_options: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> CheckpointPlace:
        """Return the place that `path` names. Raises UsageError if it is no checkpoint's own folder."""
        text = os.fspath(path)
        if not is_url(text):
            if "://" in text:
                raise UsageError(f"expected a path or URL, as s3://bucket/run/step-100, got {text}")
            text = os.path.abspath(text)
        text = text.rstrip("/")
        place = cls(location=text, storage_options=storage_options)
        tag_text(place.tag)
        if text.startswith(("http://", "https://")):
            raise UsageError(
                f"{shown(text)}: DCP saves to folders and storages like s3://bucket/run/step-100; to a service of zstore "
                "upload what it saved in a folder, with `zstore reshard FOLDER --to URL`"
            )
        if is_url(text):
            open_fsspec_folder(text.rpartition("/")[0], storage_options)
        return place

    @property
    def tag(self) -> str:
        """The checkpoint's tag."""
        return self.location.rpartition("/")[2]

    @property
    def shown(self) -> str:
        """The location as messages may have it."""
        return shown(self.location)

    def remote(self, url: str) -> RemoteFolder:
        """Return the folder `url`, of the same file system."""
        return open_fsspec_folder(url, self.storage_options, retries=PATIENT)

    def destination(self, files: Files, save_id: str) -> LocalDestination | RemoteDestination:
        """Return the destination of a save, for rank 0."""
        if not is_url(self.location):
            return LocalDestination(files, Path(self.location), save_id)
        folder = self.remote(self.location.rpartition("/")[0])
        if protocol_of(folder) is not None and has_versions(folder):
            raise UsageError(
                f"{folder} has versions, to which DCP does not save: save to a folder, and upload that with `zstore reshard "
                f"FOLDER --to {folder}`, or name another URL"
            )
        return RemoteDestination(files, folder, self.tag, save_id)
