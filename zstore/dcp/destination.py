"""The destination of a save by DCP, which rank 0 begins and commits: a folder that all ranks share, or a URL.

Calls: `check`, `begin`, then `commit`; `abandon` at any time, and at the end.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zstore.checkpoint import (
    MANIFEST_FOLDER,
    METADATA_FILE,
    CheckpointReader,
    Committer,
    LocalFolder,
    Record,
    TagInfo,
    scan,
    sweep,
    tag_text,
    temporary_folder,
)
from zstore.errors import CheckpointError, UsageError, ZstoreError
from zstore.io import Files, Flush, IoResources, UserPath, Workers, is_url, make_read_only, user_location
from zstore.remote.commit import RemoteCommitter
from zstore.remote.fsspec_folder import RemoteFolder, open_fsspec_folder
from zstore.remote.packs import Places
from zstore.remote.retries import PATIENT
from zstore.remote.target import NUM_THREADS, send_all
from zstore.remote.url import shown
from zstore.remote.version_target import VersionTarget
from zstore.remote.versions import VersionsFolder, folder_for

from .upload import UploadingRankWriter, VersionRankWriter
from .work import PIECES_FOLDER, RankWork, Wrote

SCRATCH_NAME = "zstore-dcp"
"""The name of temporary folders for files on their way to a URL."""


class LocalDestination:
    """The folder of checkpoints that holds `path`."""

    url = ""
    version: Mapping[str, Any] | None = None

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

    def take(self, name: str, file: str, file_bytes: int, parts: Sequence[Wrote]) -> None:
        """Check the shard file `file` of array `name`, of which ranks report the parts."""
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
        if not all(each.linked for each in parts):
            make_read_only(path)

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


class _UrlDestination:
    """A tag in a folder of checkpoints behind a URL; rank 0's documents pass through a temporary folder."""

    flushes = False

    def __init__(self, files: Files, tag: str) -> None:
        self.tag = tag
        self._files = files
        self._overwrite = False
        self.folder = Path()

    @property
    def version(self) -> Mapping[str, Any] | None:
        """The facts by which ranks join the upload of a version; None if it is none."""
        return None

    def check(self, *, overwrite: bool) -> None:
        """Keep `overwrite` for `begin`, which asks."""
        self._overwrite = overwrite

    def newest(self) -> TagInfo | None:
        """Behind a URL nothing can be linked."""
        return None

    @contextlib.contextmanager
    def documents(self) -> Iterator[Path]:
        with temporary_folder(self._files, Path(tempfile.gettempdir()), SCRATCH_NAME) as self.folder:
            self._files.make_folder(self.folder / MANIFEST_FOLDER)
            yield self.folder


class RemoteDestination(_UrlDestination):
    """The tag `tag` in the folder `folder`."""

    def __init__(self, files: Files, folder: RemoteFolder, tag: str, save_id: str) -> None:
        super().__init__(files, tag)
        self._committer = RemoteCommitter(folder, tag, save_id, "")
        self._sizes: dict[str, int] = {}

    @property
    def url(self) -> str:
        """The folder that the files go to."""
        return self._committer.target.location

    def begin(self) -> None:
        """Lock the tag, and remove files that dead uploads left."""
        self._committer.begin(overwrite=self._overwrite)

    def take(self, name: str, file: str, file_bytes: int, parts: Sequence[Wrote]) -> None:
        """Note its size, which one listing checks with the others."""
        self._sizes[file] = file_bytes

    def remove_pieces(self) -> None:
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


class VersionDestination(_UrlDestination):
    """A version in a repository of them; pieces that pass between ranks are beside its packs."""

    def __init__(self, files: Files, folder: VersionsFolder, tag: str, save_id: str) -> None:
        super().__init__(files, tag)
        self._target = VersionTarget(folder, tag, save_id, "")
        self._pieces = folder.pieces(save_id)
        self._places: Places = {}

    @property
    def url(self) -> str:
        """The folder of the pieces."""
        return self._pieces.location

    @property
    def version(self) -> Mapping[str, Any]:
        return self._target.ticket()

    def begin(self) -> None:
        """Look for the version before."""
        self._target.begin(overwrite=self._overwrite)

    def take(self, name: str, file: str, file_bytes: int, parts: Sequence[Wrote]) -> None:
        """Note its place: a rank sent it as a whole."""
        [place] = [part.place for part in parts if part.place is not None]
        self._places[file] = place

    def remove_pieces(self) -> None:
        self._pieces.remove_tree(PIECES_FOLDER)

    def commit(self, record: Record) -> None:
        """Send rank 0's files, and publish the version."""
        info = TagInfo(folder=LocalFolder(self.folder), record=record)
        with CheckpointReader(info) as reader:
            self._target.describe(reader, range(record.world_size), self._places)
            self._target.commit(reader)

    def abandon(self) -> None:
        """Remove the pieces. Never raises."""
        with contextlib.suppress(OSError, ZstoreError):
            self.remove_pieces()


@dataclass(frozen=True, kw_only=True)
class CheckpointPlace:
    """The place of a checkpoint, as data that another process may be given."""

    location: str
    """Absolute path, or URL, of the checkpoint's own folder."""
    storage_options: Mapping[str, Any] | None = None
    versions: bool = False
    """Whether a URL without checkpoints becomes a repository of versions."""

    @classmethod
    def of(
        cls, path: UserPath, storage_options: Mapping[str, Any] | None, *, versions: bool = False
    ) -> CheckpointPlace:
        """Return the place that `path` names. Raises UsageError if it is no checkpoint's own folder."""
        if not is_url(path) and "://" in os.fspath(path):
            raise UsageError(f"expected a path or URL, as s3://bucket/run/step-100, got {os.fspath(path)}")
        text = user_location(path).rstrip("/")
        place = cls(location=text, storage_options=storage_options, versions=versions)
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

    def destination(self, files: Files, save_id: str) -> LocalDestination | RemoteDestination | VersionDestination:
        """Return the destination of a save, for rank 0."""
        if not is_url(self.location):
            return LocalDestination(files, Path(self.location), save_id)
        place = folder_for(self.location.rpartition("/")[0], self.storage_options, versions=self.versions)
        if isinstance(place, VersionsFolder):
            return VersionDestination(files, place.with_retries(PATIENT), self.tag, save_id)
        return RemoteDestination(files, place.with_retries(PATIENT), self.tag, save_id)

    def rank_writer(self, share: RankWork, resources: IoResources, scratch: Path) -> UploadingRankWriter:
        """Return the writer of a rank's part of a save to this URL, through the folder `scratch`."""
        remote = open_fsspec_folder(share.url, self.storage_options, retries=PATIENT)
        if share.version is None:
            return UploadingRankWriter(share, resources, remote=remote, scratch=scratch)
        above = open_fsspec_folder(self.location.rpartition("/")[0], self.storage_options, retries=PATIENT)
        target = VersionTarget(VersionsFolder(above, self.storage_options or {}), self.tag, share.save_id, "")
        target.join(share.version)
        return VersionRankWriter(share, resources, remote=remote, scratch=scratch, target=target)
