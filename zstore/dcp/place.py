"""The folder or URL that a writer was given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zstore.checkpoint import tag_text
from zstore.errors import UsageError
from zstore.io import Files
from zstore.remote.folder import RemoteFolder, open_fsspec_folder
from zstore.remote.retries import PATIENT
from zstore.remote.url import is_url, shown

from .destination import Destination, LocalDestination, RemoteDestination


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a checkpoint, as data that another process may be given."""

    location: str
    """Absolute path, or URL, of the checkpoint's own folder."""
    storage_options: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> Place:
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

    def destination(self, files: Files, save_id: str) -> Destination:
        """Return the destination of a save, for rank 0."""
        if not is_url(self.location):
            return LocalDestination(files, Path(self.location), save_id)
        folder = self.remote(self.location.rpartition("/")[0])
        return RemoteDestination(files, folder, self.tag, save_id)
