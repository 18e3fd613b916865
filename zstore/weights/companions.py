"""Files that `from_pretrained` expects beside the weights: the model's config, its tokenizer, and what else belongs to it.

[Note: which files]
    a model's folder         all that belongs to it: its files except other weights, the modules that `modules.json` names
                             with their weights, and other folders without weights, as far as they are small
    a checkpoint's folder    all that is not the checkpoint's own, except weights
    a folder above one, or   what has a name of `COMPANIONS`: it has other things too
    other software's
Links are followed if a user named the folder, as in the hub's cache, whose files are links: the copies are files. In a
checkpoint of ours there are none, and one that is there may lead anywhere: it stays behind.
"""

from __future__ import annotations

import errno
import fnmatch
import io
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ..checkpoint.folder import Folder
from ..checkpoint.layout import ABORT_FILE, MANIFEST_FOLDER, METADATA_FILE, RECORD_FILE
from ..checkpoint.reader import ArraySource, CheckpointReader
from ..errors import CorruptionError
from ..io.files import Files

COMPANIONS = (
    "config.json", "generation_config.json", "adapter_config.json", "*tokenizer*.json", "*.model", "*.tiktoken", "*.spm",
    "*processor_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "normalizer.json", "tekken.json", "chat_template.*", "modules.json", "config_sentence_transformers.json",
    "sentence_bert_config.json", "configuration_*.py", "modeling_*.py", "tokenization_*.py", "processing_*.py",
    "image_processing_*.py", "feature_extraction_*.py",
)  # fmt: skip
"""Patterns of their names."""
_FOLDERS = ("additional_chat_templates",)
"""Folders of them, by name."""
_WEIGHTS = (
    "*.safetensors", "*.safetensors.index*.json", "*.bin", "*.bin.index*.json", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5",
    "*.msgpack", "*.onnx", "*.onnx_data", "*.gguf", "*.npz", "*.distcp",
)  # fmt: skip
_MOST_BYTES = 64 * 1024 * 1024
"""Of a file, or folder, that only lies in the model's folder."""
_MOST_ENTRIES = 10_000
_BLOB = re.compile(r"(\.\./)+blobs/[0-9a-f]+")
"""Links of the hub's cache."""

_Open = Callable[[], BinaryIO]


@dataclass
class Companions:
    """Files beside a checkpoint's weights, by path inside the target."""

    files: dict[str, _Open] = field(default_factory=dict)
    copied: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """What stays behind, with the reason if it is not plain."""

    @classmethod
    def of(cls, source: ArraySource, *, beside: bool) -> Companions:
        """Return the files of `source`, with `beside` those beside other software's checkpoint too. See [Note: which files]."""
        found = cls()
        if isinstance(source, CheckpointReader):
            if source.folder.is_local:
                found.add_named(source.folder.path.parent)
            else:
                found.add_folder(source.folder.parent, is_companion)
            own = {METADATA_FILE, RECORD_FILE, MANIFEST_FOLDER, *(name.partition("/")[0] for name in source.arrays)}
            own |= {folder.partition("/")[0] for folder in source.documents["consolidated_metadata"]["metadata"]}
            found.add_folder(source.folder, lambda name: name not in own)
        elif (path := Path(source.location)).is_dir():
            if source.weight_files:
                found.add_model(path, source.weight_files)
            else:
                for place in (path.parent, path) if beside else (path,):
                    found.add_named(place)
        return found

    def add_named(self, folder: Path) -> None:
        """Add the files of a local folder that have names of `COMPANIONS`."""
        for entry in _entries(folder):
            if is_companion(entry.name):
                self.files[entry.name] = partial(_opened, entry)
            elif entry.name in _FOLDERS and entry.is_dir():
                self._add_all(entry.name, _walk(entry))

    def add_model(self, folder: Path, weight_files: Collection[str]) -> None:
        """Add what belongs to a model, whose weights are in `weight_files`."""
        modules = _modules(folder)
        for entry in _entries(folder):
            name = entry.name
            if name in weight_files:
                continue
            if entry.is_dir():
                inside = {} if name.startswith(".") else _walk(entry)
                is_plain = inside and not any(map(_is_weights, inside)) and _bytes_of(inside.values()) <= _MOST_BYTES
                if name in modules or name in _FOLDERS or is_plain:
                    self._add_all(name, inside)
                else:
                    self.left.append(f"{name}/")
            elif is_companion(name) or not (
                name.startswith(".") or _is_weights(name) or _bytes_of([entry]) > _MOST_BYTES
            ):
                self.files[name] = partial(_opened, entry)
            else:
                self.left.append(name)

    def add_folder(self, folder: Folder, chosen: Callable[[str], bool], inside: str = "") -> None:
        """Add the files of a folder of checkpoints, or of one in it, whose names are `chosen`; links stay behind."""
        entries = folder.entries()
        for name in filter(chosen, sorted(entries.files)):
            if not inside and _is_weights(name):  # the arrays again; those of a module are in its folder
                self.left.append(name)
            else:
                self.files[inside + name] = partial(_read, folder, name)
        for name in filter(chosen, sorted(entries.folders)) if chosen is not is_companion else ():
            if folder.is_local and (folder.path / name).is_symlink():
                self.left.append(f"{inside}{name}/ (a link)")
            else:
                self.add_folder(folder.child(name), lambda _: True, f"{inside}{name}/")

    def _add_all(self, name: str, inside: dict[str, Path]) -> None:
        self.files |= {f"{name}/{path}": partial(_opened, file) for path, file in inside.items()}

    def copy(self, target: Path, files: Files, reserved: Collection[str] = ()) -> Companions:
        """Copy them into `target`, durably, and return this; a file that is there stays. Names of `reserved` are not taken.

        A file that cannot be read stays behind. Raises StorageError if one cannot be written.
        """
        folders: set[Path] = set()
        for name, opened in self.files.items():
            place = target / name
            if name.partition("/")[0] in reserved:
                self.left.append(f"{name} (a checkpoint has its own of that name)")
            elif not place.exists():
                try:
                    content = opened()
                except (OSError, CorruptionError) as error:
                    self.left.append(f"{name} ({_reason(error)})")
                    continue
                with content:
                    place.parent.mkdir(parents=True, exist_ok=True)
                    with place.open("xb") as out:
                        shutil.copyfileobj(content, out, 1024 * 1024)
                files.sync_file(place)
                folders |= {place.parent} - {target}
                self.copied.append(_shown(name, opened))
        for folder in sorted(folders):
            files.sync_folder(folder)
        return self

    def copy_into_checkpoint(self, folder: Path, files: Files) -> None:
        """Copy them as `copy` does into the folder of a tag that is not committed yet, and has all else."""
        self.copy(folder, files, {RECORD_FILE, ABORT_FILE, *os.listdir(folder)})

    @property
    def text(self) -> str:
        """What was copied, for the end of a line; empty if nothing was."""
        return f", with {', '.join(self.copied)}" if self.copied else ""


def companions(folder: Folder) -> list[str]:
    """Return the names of config and tokenizer files in a folder."""
    return sorted(filter(is_companion, folder.entries().files))


def is_companion(name: str) -> bool:
    """Return whether a file of that name is the config or tokenizer of a model."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in COMPANIONS)


def _is_weights(path: str) -> bool:
    return any(fnmatch.fnmatchcase(path.rpartition("/")[2], pattern) for pattern in _WEIGHTS)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _walk(folder: Path) -> dict[str, Path]:
    """Return the files anywhere below a folder by path inside it; links are followed, but to no folder twice."""
    found: dict[str, Path] = {}
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen or len(found) > _MOST_ENTRIES:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        found |= {os.path.relpath(os.path.join(place, name), folder): Path(place, name) for name in sorted(names)}
    return found


def _bytes_of(files: Iterable[Path]) -> int:
    total = 0
    for file in files:
        try:
            total += file.stat().st_size
        except OSError:
            continue  # it is named when it cannot be opened
    return total


def _modules(folder: Path) -> set[str]:
    """Return the folders that the model's `modules.json` names, as sentence-transformers has it."""
    try:
        listed = json.loads((folder / "modules.json").read_bytes())
        return {str(module["path"]).partition("/")[0] for module in listed} - {""}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _opened(path: Path) -> BinaryIO:
    """Open a file, or the one that a link leads to."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would keep us waiting
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CorruptionError("not a file")
    return os.fdopen(file, "rb")


def _read(folder: Folder, name: str) -> BinaryIO:
    if folder.is_local and (folder.path / name).is_symlink():
        raise CorruptionError("a link, which may lead out of the checkpoint")
    return io.BytesIO(folder.read_small(name))


def _reason(error: OSError | CorruptionError) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOENT:
        return "a link to a file that is not there"
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


def _shown(name: str, opened: _Open) -> str:
    """Return the name of a file, and the target of a link that the hub's cache does not have."""
    path = opened.args[0] if isinstance(opened, partial) and isinstance(opened.args[0], Path) else None
    if path is None or not path.is_symlink() or _BLOB.fullmatch(os.readlink(path)):
        return name
    return f"{name} (a link to {os.readlink(path)})"
