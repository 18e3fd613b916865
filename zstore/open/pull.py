"""Weights that a run publishes, in a folder that `from_pretrained` and inference servers open.

[Note: a folder that is kept current]
New files are written beside the old ones, under names with their version, and made durable; then the index, which names them,
is replaced by a rename. Whoever opens the folder finds one version, whole. A file of weights that did not change
stays. Files of the version before stay until the next one, for readers that are about to open them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.folder import Folder, LocalFolder
from ..errors import CorruptionError, UsageError
from ..interop.huggingface import StoredWeight, WeightsReader
from ..io.files import Files, NewFile
from ..weights.companions import companions
from ..weights.versions import INDEX_FILE, KEY, WeightsVersion
from .arrived import Arrived, arrived
from .sources import folder_of

_NUMBERED = "00001-of-00001.safetensors"
_OURS = re.compile(r"\.?model-v\d{6,}-\d{5}-of-\d{5}\.safetensors(\.part)?")


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """A folder after a pull."""

    version: int
    step: int
    is_new: bool
    """Whether it had another version before."""
    read_bytes: int
    """Bytes of weights and changes that were taken."""


def pull(
    source: str | os.PathLike[str],
    into: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    files: Files | None = None,
) -> Pulled:
    """Bring the folder `into` to the newest version at `source`, a folder or URL as `Receiver` takes. One process at a time
    writes to `into`, which is new, empty or of an earlier pull. See [Note: a folder that is kept current].

    Raises CheckpointNotFoundError if nothing is published, UsageError for a folder with other weights, DiskFullError, and
    CorruptionError for files or weights that differ from the published ones: then the folder has the version that it had.
    """
    folder, target, files = folder_of(source, storage_options), Path(into), files or Files()
    files.make_folder(target)
    former = _former(target)
    with arrived(folder, None if former is None else former["id"]) as found:
        if found is None and former is not None:
            return Pulled(version=former["number"], step=former["step"], is_new=False, read_bytes=0)
        if found is None:
            raise AssertionError("the newest version is known and no index has it")
        _replace(found, folder, target, files)
        newest = found.chain.newest
        return Pulled(version=newest.number, step=newest.step, is_new=True, read_bytes=found.nbytes)


def _former(target: Path) -> dict[str, Any] | None:
    """Return which version a folder has; None if it is new. Raises UsageError if it has weights of somebody else."""
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        found = json.loads((target / INDEX_FILE).read_bytes())["metadata"][KEY]
        return {"id": str(found["id"]), "number": int(found["number"]), "step": int(found["step"])}
    others = [path.name for path in target.glob("*.safetensors*") if not _OURS.fullmatch(path.name)]
    if others:
        raise UsageError(f"{target} has {min(others)}, which is not of a pull: name a new or empty folder")
    return None


def _replace(found: Arrived, source: Folder, target: Path, files: Files) -> None:
    base, version = found.full or target, found.chain.newest
    _sweep(target, _named(target), files)
    with WeightsReader(base) as reader:
        unknown = found.patches.keys() - reader.weights.keys()
        if unknown:
            raise CorruptionError(f"{target} has no {min(unknown)!r}, which was published: remove it, and pull anew")
        groups: dict[Path, list[StoredWeight]] = {}
        for weight in sorted(reader.weights.values(), key=lambda each: each.offset):
            groups.setdefault(weight.path, []).append(weight)
        placed: dict[str, str] = {}
        # A file keeps its number, whichever version it is of.
        for number, path in enumerate(sorted(groups, key=lambda path: path.name[-len(_NUMBERED) :]), start=1):
            name = path.name
            if found.full is not None or any(weight.name in found.patches for weight in groups[path]):
                name = f"model-v{version.number:06d}-{number:05d}-of-{len(groups):05d}.safetensors"
                _write(found, reader, groups[path], target / name, files)
            placed |= dict.fromkeys((weight.name for weight in groups[path]), name)
        size = sum(weight.nbytes for weight in reader.weights.values())
    for place in (source, *(() if found.full is None else (LocalFolder(found.full),))):
        for name in companions(place):
            files.write_small(target / name, place.read_small(name))
    _write_index(target, version, placed, size, files)


def _write(found: Arrived, reader: WeightsReader, weights: Sequence[StoredWeight], target: Path, files: Files) -> None:
    """Write the weights as they are now, in the layout of the file that they were in, and make them durable."""
    part = target.with_name(f".{target.name}.part")
    nbytes = sum(weight.nbytes for weight in weights)
    files.require_room(part.parent, nbytes, f"{target.name} needs {nbytes} bytes")
    with ExitStack() as opened:
        out = NewFile(files, part, opened)
        with weights[0].path.open("rb") as former:
            out.write(former.read(weights[0].offset))
        for weight in weights:
            for _, _, data in found.blocks(reader, weight):
                out.write(data)
        out.finish()
    files.rename(part, target)


def _write_index(target: Path, version: WeightsVersion, placed: Mapping[str, str], nbytes: int, files: Files) -> None:
    """Make the new version the folder's, and remove files of none."""
    keep = {*placed.values(), *_named(target)}
    record = {"id": version.id, "number": version.number, "step": version.step, "run": version.run}
    document = {"metadata": {"total_size": nbytes, KEY: record}, "weight_map": dict(placed)}
    files.sync_folder(target)
    part = target / f".{INDEX_FILE}.part"
    files.write_small(part, json.dumps(document, indent=1).encode())
    files.rename(part, target / INDEX_FILE)
    files.sync_folder(target)
    _sweep(target, keep, files)


def _sweep(target: Path, keep: set[str], files: Files) -> None:
    """Remove the files of weights, and what a killed pull left, except `keep`."""
    for name in os.listdir(target):
        if _OURS.fullmatch(name) and name not in keep:
            files.unlink(target / name)


def _named(target: Path) -> set[str]:
    """Return the files that the index of a folder names."""
    with contextlib.suppress(FileNotFoundError):
        return set(json.loads((target / INDEX_FILE).read_bytes())["weight_map"].values())
    return set()
