"""The destination of a save: a folder, or a URL by way of a local one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zstore.checkpoint import SaveHandle, SaveRequest, save_checkpoint
from zstore.io import is_url
from zstore.remote.save import UploadOptions, save_to_url
from zstore.remote.upload import place_of
from zstore.remote.versions import VersionsFolder

from ..config.config import Config

_FOLDER = "zstore-uploads"


@dataclass(frozen=True)
class Destination:
    """A folder that a save is committed in, and its upload from there, if any."""

    folder: Path
    upload: UploadOptions | None = None

    @property
    def needs_shared(self) -> bool:
        """Whether all ranks have to see `folder`, however they were told to save."""
        return self.upload is not None and not isinstance(self.upload.folder, VersionsFolder)

    def location_of(self, name: str) -> str:
        """Return path or URL of a folder in it."""
        return str(self.folder / name) if self.upload is None else self.upload.folder.location_of(name)

    def begin(self, request: SaveRequest) -> SaveHandle:
        """Begin the save; `request.folder` is this folder. See `save_checkpoint`."""
        return save_checkpoint(request) if self.upload is None else save_to_url(request, self.upload)


def destination_of(location: str, config: Config, drives: Sequence[Path]) -> Destination:
    """Return the destination of a save to a path or URL; `drives` are the folders of the run's store. See `place_of` for
    the requests that are made, and the errors."""
    if not is_url(location):
        return Destination(Path(location))
    remote = place_of(location, config.storage_options, versions=config.own.versions)
    # One folder for each URL: tags of different runs do not meet.
    name = hashlib.sha256(remote.location.encode()).hexdigest()[:16]
    above = config.own.upload_folder or _chosen_folder(drives)
    return Destination(above / name, UploadOptions(folder=remote, keep_local=config.own.keep_local))


def _chosen_folder(drives: Sequence[Path]) -> Path:
    if drives:
        return drives[0] / _FOLDER
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / _FOLDER
