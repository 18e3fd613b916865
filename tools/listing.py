"""Memory for a list of a folder's checkpoints: their records, and the inodes of their files. No torch.

A local folder is scanned before anything is kept. Behind a URL, whose sizes are not known beforehand, the records are
counted once they are read, and the listing of one checkpoint's files at a time is added.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from zstore.checkpoint import RECORD_FILE, Folder, Refusal, TagInfo

from .opening import BESIDE_BYTES, Common, require_memory
from .printing import printable

_FILE_BYTES, _TIMES_PARSED = 600, 10
"""Bytes of memory for a file in a list, and for a parsed commit record as a multiple of its size; both rounded up."""


def check_listing(place: Folder, common: Common) -> None:
    """Raise BudgetError if a requested memory limit is too small for a list of the local folder `place`.

    Does nothing for a URL, or without such a limit.
    """
    if common.memory_bytes is None or not place.is_local:
        return
    folders: list[Path] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        folders = [Path(entry.path) for entry in os.scandir(place.path) if entry.is_dir()]
        folders += [Path(inner) for one in folders for inner in one.glob("*") if one.name.startswith("checkpoint")]
    paths = [path for path in (place.path, *folders) if (path / RECORD_FILE).is_file()]
    num_files = sum(len(names) for path in paths for _, _, names in os.walk(path))
    _require(common, place, num_files, _bytes_of_records(paths))


def check_records(place: Folder, infos: Iterable[TagInfo], common: Common) -> int:
    """Return the bytes of the records of `infos`, which were read from `place`; behind a URL all bytes read from it.

    Raises BudgetError if a requested memory limit is too small for them.
    """
    nbytes = _bytes_of_records([info.path for info in infos]) if place.traffic is None else place.traffic.read_bytes
    _require(common, place, 0, nbytes)
    return nbytes


def describe_refusals(refusals: Iterable[Refusal]) -> list[dict[str, str]]:
    """Return the folders that look like checkpoints and are not, as JSON."""
    return [{"path": refusal.location, "reason": refusal.reason} for refusal in refusals]


def print_refusals(refusals: Iterable[Refusal]) -> None:
    """Print the folders that look like checkpoints and are not, on stderr."""
    for refusal in refusals:
        print(printable(f"{refusal.location} is not a checkpoint: {refusal.reason}"), file=sys.stderr)


def _require(common: Common, place: Folder, num_files: int, records_bytes: int) -> None:
    listing_bytes = num_files * _FILE_BYTES + records_bytes * _TIMES_PARSED
    text = f"{place.location} has checkpoints of {num_files} files, whose records and list take about {listing_bytes} bytes"
    require_memory(common, BESIDE_BYTES + listing_bytes, text)


def _bytes_of_records(paths: Iterable[Path]) -> int:
    return sum(os.stat(path / RECORD_FILE).st_size for path in paths)
