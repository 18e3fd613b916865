"""Verifying a shard file that came: index, every chunk and all bytes between, in one pass and a megabyte of memory."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from ...checkpoint.reader import StoredArray
from ...errors import CorruptionError
from ...format.archive import decode_packed_index, packed_file_bytes
from ...format.shardfile import CRC_BYTES, check_index, checksum_error, layout_of

_PIECE_BYTES = 1024 * 1024


def verify_shard(path: Path, array: StoredArray, shard: int, crcs: Sequence[int] | npt.NDArray[np.uint32]) -> None:
    """Raise CorruptionError unless the file is the shard with the checksums `crcs`, by chunk, with zeros in between.

    A file of a chunk is read a piece at a time, however large the chunk is; the index is held whole (16 MiB at most).
    """
    name = array.spec.name
    layout = layout_of(array.grid, shard, array.spec.dtype)
    with path.open("rb") as file:
        head = np.frombuffer(_read(file, layout.data_offset, path, name), np.uint8)
        if head[layout.index_bytes :].any():
            raise _not_zeros(path, name, layout.index_bytes)
        if array.codec is None:
            check_index(layout, head, path=str(path), array=name)
            places = layout.data_offset + np.arange(layout.num_present, dtype=np.int64) * layout.slot_bytes
            ends, file_bytes = places + layout.chunk_bytes, layout.file_bytes
        else:
            offsets = decode_packed_index(layout, head, path=str(path), array=name)
            places, ends, file_bytes = offsets[:-1], offsets[1:], packed_file_bytes(int(offsets[-1]))
        if (found := os.fstat(file.fileno()).st_size) != file_bytes:
            raise CorruptionError(f"array {name!r}: {path} has {found} bytes, expected {file_bytes}")
        follows = [*places[1:].tolist(), file_bytes]
        for chunk, (first, end, after) in enumerate(zip(places.tolist(), ends.tolist(), follows, strict=True)):
            crc = _crc_of(file, end - first - CRC_BYTES, path, name)
            stored: int = struct.unpack("<I", _read(file, CRC_BYTES, path, name))[0]
            if crc != stored:
                raise checksum_error(name, f"chunk {chunk}", str(path), first, end - first)
            if crc != int(crcs[chunk]):
                raise CorruptionError(
                    f"array {name!r}: chunk {chunk} of {path} is whole, but not the one that the manifest names"
                )
            if any(_read(file, after - end, path, name)):
                raise _not_zeros(path, name, end)


def _crc_of(file: BinaryIO, nbytes: int, path: Path, name: str) -> int:
    crc = 0
    while nbytes:
        data = _read(file, min(nbytes, _PIECE_BYTES), path, name)
        crc = crc32c(data, crc)
        nbytes -= len(data)
    return crc


def _read(file: BinaryIO, nbytes: int, path: Path, name: str) -> bytes:
    data = file.read(nbytes)
    if len(data) < nbytes:
        raise CorruptionError(f"array {name!r}: {path} ends early, at byte {file.tell()}")
    return data


def _not_zeros(path: Path, name: str, offset: int) -> CorruptionError:
    return CorruptionError(f"array {name!r}: {path} has other bytes than zeros between its chunks (offset {offset})")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, hex. Raises the errors of opening and reading it; a symbolic link is not followed."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
