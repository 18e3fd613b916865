"""How the chunks of an archive are compressed: Zarr v3's codec `zstd`, decoded within bounds.

[Note: compressed chunks]
The header of a compressed chunk is not trusted: its frame must name exactly the bytes that a chunk of the array
has, before anything is decoded, and it is decoded into memory of that size. So a bomb is an error, not an allocation.
Source: RFC 8878 (the header of a zstd frame).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .arrays import Bytes

_ZSTD_MAGIC = 0xFD2FB528
_MOST_LEVEL = 22


class CodecError(ValueError):
    """Bytes that do not decode as they must."""


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

        Raises CodecError unless that gives exactly as many bytes.
        """
        promised = _zstd_bytes(data)
        if promised != out.size:
            raise CodecError(f"it is not a {self.name} frame of {out.size} bytes (but of {promised})")
        from numcodecs import zstd

        try:
            zstd.decompress(data, out)
        except (RuntimeError, ValueError) as error:
            raise CodecError(f"it does not decode: {error}") from error


CODECS: Mapping[str, Codec | None] = {"none": None, "zstd": Codec()}
"""A writer's choices, by name."""


def parse_codec(document: object) -> Codec:
    """Return the codec of which `document` is the metadata. Raises ValueError for one that is not read."""
    settings = document.get("configuration") if isinstance(document, dict) else None
    level = settings.get("level") if isinstance(settings, dict) else None
    if type(level) is not int or not 0 <= level <= _MOST_LEVEL or document != Codec(level=level).document():
        raise ValueError(f"expected the codec `zstd` with a level from 0 to {_MOST_LEVEL} and without checksum")
    return Codec(level=level)


def most_stored_bytes(payload_bytes: int) -> int:
    """Return the most bytes of a compressed chunk, without its crc32c."""
    return payload_bytes + payload_bytes // 128 + 1024


def _zstd_bytes(data: Bytes) -> int | None:
    """Return the decoded bytes that the zstd frame at the start of `data` declares; None if it declares none."""
    if data.size < 6 or struct.unpack_from("<I", data.data)[0] != _ZSTD_MAGIC:
        return None
    descriptor = int(data[4])
    single = descriptor >> 5 & 1
    start = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3]
    nbytes = (single, 2, 4, 8)[descriptor >> 6]
    field = bytes(data[start : start + nbytes])
    if not nbytes or len(field) < nbytes:
        return None
    return int.from_bytes(field, "little") + (256 if nbytes == 2 else 0)
