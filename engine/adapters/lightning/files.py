"""The places of checkpoints under the names that Lightning gives them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from zstore.checkpoint import discard, scan, tag_folder
from zstore.engine.access.module_state import state_entries
from zstore.engine.api.engine import Engine
from zstore.engine.checkpoint.client_state import join
from zstore.errors import CheckpointMismatchError, UsageError
from zstore.io import Files, is_url
from zstore.open.checkpoint import open_checkpoint
from zstore.open.sources import folder_of

from . import content

STATE = "lightning"
"""Key of Lightning's dict in the client state."""


@dataclass(frozen=True, kw_only=True)
class LightningCheckpoint:
    """A checkpoint of Lightning's: `folder/name`, which is the engine's checkpoint of the tag `name` in `folder`.

    A name with characters that a checkpoint's folder cannot have is a symbolic link to the folder.
    """

    folder: str
    name: str

    @property
    def path(self) -> str:
        """The name that Lightning knows."""
        return f"{self.folder}/{self.name}"

    @property
    def stored(self) -> Path:
        """The checkpoint's own folder, if it is not behind a URL."""
        return Path(self.folder) / tag_folder(self.name)

    @staticmethod
    def of(path: str) -> LightningCheckpoint:
        """Return the place of a path or URL. Raises UsageError for a name that is no tag."""
        folder, _, name = path.rstrip("/").rpartition("/")
        place = LightningCheckpoint(folder=folder or ("/" if path.startswith("/") else "."), name=name)
        if is_url(path) and tag_folder(name) != name:
            raise UsageError(
                f"{path}: {name!r} cannot name a checkpoint behind a URL: use letters, digits and `-_.~=+@,` alone"
            )
        tag_folder(name)
        return place

    def to_load(self) -> tuple[str, str | None]:
        """Return the folder and the tag to load: a link's own folder. Raises CheckpointMismatchError for a file, which is
        Lightning's own."""
        path = Path(self.path)
        if is_url(self.folder) or not (path.is_file() or path.is_symlink()):
            return self.folder, self.name
        if path.is_file():
            raise CheckpointMismatchError(
                f"{path} is a file, and a checkpoint of zstore a folder: load its weights with "
                "MODULE.load_from_checkpoint(PATH) before fit(), or use the strategy that saved it"
            )
        return str(path.resolve(strict=True)), None

    def unlink(self) -> None:
        """Remove a link, or a file of Lightning's own, that a checkpoint is to replace."""
        path = Path(self.path)
        if not is_url(self.folder) and (path.is_symlink() or path.is_file()):
            path.unlink()

    def finish(self) -> None:
        """Give the checkpoint its name if its folder has another; remove `latest`, which nobody asks for here."""
        if is_url(self.folder):
            return
        if self.stored.name != self.name:
            os.symlink(self.stored.name, self.path)
        Path(self.folder, "latest").unlink(missing_ok=True)


def load_checkpoint(path: str | os.PathLike[str], *, load_objects: bool = False) -> dict[str, Any]:
    """Return a checkpoint as the dict of Lightning's own `.ckpt`, with weights under "state_dict", on the CPU.

    The optimizer's state is not in it: `zstore.open_checkpoint` reads that. `load_objects` unpickles objects of hooks, which
    runs code of the checkpoint's author; else those entries are left out. Raises CheckpointNotFoundError, and
    CheckpointMismatchError for a checkpoint that no Trainer saved.
    """
    place = LightningCheckpoint.of(os.fspath(path))
    with open_checkpoint(*place.to_load()) as checkpoint:
        state = join(checkpoint.state.get("client_state", {}), lambda name: checkpoint[name][...])
        if STATE not in state:
            raise CheckpointMismatchError(
                f"{place.path} was not saved by a Trainer: load its weights with zstore.load_state_dict(PATH)"
            )
        found, _ = content.decode(state[STATE], load_objects=load_objects)
        found["state_dict"] = {**found.get("state_dict", {}), **checkpoint.consolidated().load()}
        return found


def loader_of_folders(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return Lightning's function that loads a `.ckpt` as one that loads checkpoints of the engine, which are folders, too."""

    @wraps(load)
    def load_either(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if not (isinstance(path, str | os.PathLike) and Path(path).is_dir()):
            return load(path, map_location=map_location, weights_only=weights_only)
        found = load_checkpoint(path, load_objects=weights_only is False)
        if isinstance(map_location, str | torch.device):
            found["state_dict"] = {
                name: value.to(map_location) if isinstance(value, torch.Tensor) else value
                for name, value in found["state_dict"].items()
            }
        return found

    return load_either


def whole_weights(engine: Engine) -> dict[str, Any]:
    """Return the module's state dict with whole parameters, fp32 masters if they are trained, on rank 0 (all ranks)."""
    found: dict[str, Any] = {}
    known: dict[int, Any] = {}  # tied parameters are one tensor in the file too
    for name, entry in state_entries(engine.access):
        if isinstance(entry, torch.nn.Parameter) and id(entry) not in known:
            known[id(entry)] = engine.get_full_parameter(name, rank0_only=True)
        found[name] = known.get(id(entry), entry)
    return found


def remove(place: LightningCheckpoint, storage_options: Mapping[str, Any]) -> None:
    """Remove a checkpoint so that at no instant half of it looks like one; do nothing if it is not there."""
    if is_url(place.folder):
        from zstore.remote.commit import remover

        folder = folder_of(place.folder, storage_options)
        for info in scan(folder).tags:
            if info.tag == place.name:
                remover(folder)(info)
        return
    place.unlink()
    if place.stored.is_dir():
        discard(Files(), place.stored)
