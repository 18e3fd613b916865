"""The destination of a save: a folder, or a URL by way of a folder of each rank's own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zstore.checkpoint import SaveHandle, SaveRequest, save_checkpoint
from zstore.io import is_url
from zstore.ranks.rendezvous import StoreBoard
from zstore.remote.service import UploadPlace
from zstore.remote.upload import save_to_url

from ..config.config import Config

_FOLDER = "zstore-uploads"


@dataclass(frozen=True)
class Destination:
    """A folder that a save is committed in; of a URL, the folder that files are in on their way there."""

    folder: Path
    upload: UploadPlace | None = None

    def begin(self, request: SaveRequest) -> SaveHandle:
        """Begin the save; `request.folder` is this folder. See `save_checkpoint`."""
        if self.upload is None:
            return save_checkpoint(request)
        board = StoreBoard(f"/{request.save_id}") if request.world_size > 1 else None
        return save_to_url(request, self.upload, board)


def destination_of(location: str, config: Config, drives: Sequence[Path]) -> Destination:
    """Return the destination of a save to a path or URL; `drives` are the folders of the run's store. Raises as
    `UploadPlace`."""
    if not is_url(location):
        return Destination(Path(location))
    remote = UploadPlace(location, config.storage_options)
    # One folder for each URL: tags of different runs do not meet.
    name = hashlib.sha256(remote.location.encode()).hexdigest()[:16]
    above = config.own.upload_folder or _chosen_folder(drives)
    return Destination(above / name, remote)


def _chosen_folder(drives: Sequence[Path]) -> Path:
    if drives:
        return drives[0] / _FOLDER
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / _FOLDER
