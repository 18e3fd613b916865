"""Compressed shard files: Zarr v3's codec `zstd`, decoded within bounds, and the layout of a file. Pure.

[Note: compressed chunks]
The header of a compressed chunk is not trusted: its frame must name exactly the bytes that a chunk of the array
has, before anything is decoded, and it is decoded into memory of that size. So a bomb is an error, not an allocation.
Source: RFC 8878 (the header of a zstd frame).

[Note: the layout of a packed shard]
As a plain shard (`zstore.format.shardfile`), except that sizes vary: the index is at the start, with zeros up to a multiple of
4096; after it every present chunk, its bytes and their crc32c, without a gap and in order; at the end zeros up to a multiple
of 4096. So the index determines all offsets, and the file's size.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from ..errors import CorruptionError
from .arrays import Bytes, round_up
from .shardfile import BLOCK_BYTES, CRC_BYTES, ShardLayout, checksum_error, encode_entries

_ZSTD_MAGIC = 0xFD2FB528
_MAX_LEVEL = 22


class CodecError(ValueError):
    """Bytes that do not decode as they must, or a codec that is not read."""


@dataclass(frozen=True)
class Codec:
    """The compressing codec, with its setting."""

    name: str = "zstd"
    level: int = 3

    def document(self) -> dict[str, Any]:
        """Return the codec's metadata."""
        return {"name": self.name, "configuration": {"level": self.level, "checksum": False}}

    def encode(self, payload: Bytes) -> bytes:
        """Return the compressed bytes of a chunk. Not for the main thread."""
        from numcodecs import zstd

        return bytes(zstd.compress(payload, self.level))

    def decode(self, data: Bytes, out: Bytes) -> None:
        """Decode `data` into `out`. See [Note: compressed chunks].

        Raises CodecError unless the result has exactly that size.
        """
        declared_bytes = _zstd_bytes(data)
        if declared_bytes != out.size:
            raise CodecError(f"it is not a {self.name} frame of {out.size} bytes (but of {declared_bytes})")
        from numcodecs import zstd

        try:
            zstd.decompress(data, out)
        except (RuntimeError, ValueError) as error:
            raise CodecError(f"it does not decode: {error}") from error


CODECS: Mapping[str, Codec | None] = {"none": None, "zstd": Codec()}
"""A writer's choices, by name."""


def parse_codec(document: object) -> Codec:
    """Return the codec that the metadata `document` describes. Raises CodecError if it is not supported."""
    settings = document.get("configuration") if isinstance(document, dict) else None
    level = settings.get("level") if isinstance(settings, dict) else None
    if type(level) is not int or not 0 <= level <= _MAX_LEVEL or document != Codec(level=level).document():
        raise CodecError(f"expected the codec `zstd` with a level from 0 to {_MAX_LEVEL} and without checksum")
    return Codec(level=level)


def max_stored_bytes(payload_bytes: int) -> int:
    """Return the maximum size of a compressed chunk, without its crc32c."""
    return payload_bytes + payload_bytes // 128 + 1024


def _zstd_bytes(data: Bytes) -> int | None:
    """Return the decoded bytes that the zstd frame at the start of `data` declares; None if it declares none."""
    if data.size < 6 or struct.unpack_from("<I", data.data)[0] != _ZSTD_MAGIC:
        return None
    descriptor = int(data[4])
    is_single_segment = descriptor >> 5 & 1
    start = 5 + (1 - is_single_segment) + (0, 1, 2, 4)[descriptor & 3]
    nbytes = (is_single_segment, 2, 4, 8)[descriptor >> 6]
    field = bytes(data[start : start + nbytes])
    if not nbytes or len(field) < nbytes:
        return None
    return int.from_bytes(field, "little") + (256 if nbytes == 2 else 0)


def encode_packed_index(layout: ShardLayout, sizes: Sequence[int]) -> bytes:
    """Return the first `layout.data_offset` bytes of the file, for present chunks of `sizes` bytes, crc32c included."""
    lengths = np.asarray(sizes, np.uint64)
    return encode_entries(layout, layout.data_offset + np.cumsum(lengths, dtype=np.uint64) - lengths, lengths)


def decode_packed_index(layout: ShardLayout, data: Bytes, *, path: str, array: str) -> npt.NDArray[np.int64]:
    """Return the places of the present chunks in the file, `[num_present + 1]` offsets: chunk i from offset i to offset i + 1.

    `data` are the first bytes of the file. Raises CorruptionError if the checksum is wrong, or if chunks are not one after
    the other or are of sizes that no chunk has.
    """
    body = bytes(data[: layout.index_bytes - CRC_BYTES])
    if crc32c(body) != struct.unpack_from("<I", data.data, layout.index_bytes - CRC_BYTES)[0]:
        raise checksum_error(array, "the index", path, 0, layout.index_bytes)
    sizes = np.frombuffer(body, "<u8").reshape(-1, 2)[: layout.num_present, 1]
    max_bytes = max_stored_bytes(layout.payload_bytes) + CRC_BYTES
    if ((sizes <= CRC_BYTES) | (sizes > max_bytes)).any() or not encode_packed_index(layout, sizes.tolist()).startswith(
        body
    ):
        raise CorruptionError(
            f"array {array!r}: the index of {path} does not describe {layout.num_present} compressed chunks of up to "
            f"{max_bytes} bytes, one after another; the file was replaced or the metadata changed: restore it from another copy"
        )
    offsets = np.empty(layout.num_present + 1, np.int64)
    offsets[0] = layout.data_offset
    np.cumsum(sizes, out=offsets[1:])
    offsets[1:] += layout.data_offset
    return offsets


def packed_file_bytes(end: int) -> int:
    """Return the bytes of a file whose last chunk ends at offset `end`."""
    return round_up(end, BLOCK_BYTES)
