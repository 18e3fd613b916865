"""How the chunks of an archive are compressed: Zarr v3's codecs `zstd` and `blosc`, decoded within bounds.

[Note: compressed chunks]
The header of a compressed chunk is not trusted: its frame must name exactly the bytes that a chunk of the array
has, before anything is decoded, and it is decoded into memory of that size. So a bomb is an error, not an allocation.
Sources: https://zarr-specs.readthedocs.io/en/latest/v3/codecs/blosc/, RFC 8878 (the header of a zstd frame), and the README
of c-blosc's format, https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .arrays import Bytes

MAX_BLOSC_BYTES = 2**31 - 17
"""Most bytes of a chunk that blosc compresses."""
_ZSTD_MAGIC = 0xFD2FB528
_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
_COMPRESSORS = ("blosclz", "lz4", "lz4hc", "zlib", "zstd")


class CodecError(ValueError):
    """Bytes that do not decode as they must."""


@dataclass(frozen=True)
class Codec:
    """One of the compressing codecs, with its settings."""

    name: str
    """`zstd` or `blosc`."""
    level: int
    compressor: str = ""
    """blosc only: the compressor of its blocks."""
    shuffle: str = ""
    """blosc only: the shuffle of bytes or bits before."""

    def document(self, itemsize: int) -> dict[str, Any]:
        """Return the codec's metadata for an array with elements of `itemsize` bytes."""
        if self.name == "zstd":
            return {"name": "zstd", "configuration": {"level": self.level, "checksum": False}}
        configuration = {
            "typesize": itemsize,
            "cname": self.compressor,
            "clevel": self.level,
            "shuffle": self.shuffle,
            "blocksize": 0,
        }
        return {"name": "blosc", "configuration": configuration}

    def encode(self, payload: Bytes, itemsize: int) -> bytes:
        """Return the compressed bytes of a chunk of elements of `itemsize` bytes. Not for the main thread."""
        if self.name == "zstd":
            from numcodecs import zstd

            return bytes(zstd.compress(payload, self.level))
        from numcodecs import blosc

        elements = payload.view(f"u{itemsize}")  # blosc takes the size of an element from it
        return bytes(blosc.compress(elements, self.compressor.encode(), self.level, _SHUFFLES.index(self.shuffle)))

    def decode(self, data: Bytes, out: Bytes) -> None:
        """Decode `data` into `out`. See [Note: compressed chunks].

        Raises CodecError unless that gives exactly as many bytes.
        """
        promised = _zstd_bytes(data) if self.name == "zstd" else _blosc_bytes(data)
        if promised != out.size:
            raise CodecError(f"it is not a {self.name} frame of {out.size} bytes (but of {promised})")
        try:
            if self.name == "zstd":
                from numcodecs import zstd

                zstd.decompress(data, out)
            else:
                from numcodecs import blosc

                blosc.decompress(data, out)
        except (RuntimeError, ValueError) as error:
            raise CodecError(f"it does not decode: {error}") from error


CODECS: Mapping[str, Codec | None] = {
    "none": None,
    "zstd": Codec("zstd", 3),
    # It compresses fp32 weights to 88 %, zstd alone to 92 %, at about the same speed.
    "blosc": Codec("blosc", 5, "zstd", "bitshuffle"),
}
"""A writer's choices, by name."""


def parse_codec(document: object, itemsize: int) -> Codec:
    """Return the codec of which `document` is the metadata. Raises ValueError for one that is not read."""
    name = document.get("name") if isinstance(document, dict) else None
    settings = document.get("configuration") if isinstance(document, dict) else None
    if not isinstance(settings, dict) or name not in ("zstd", "blosc"):
        raise ValueError("expected the codec `zstd` or `blosc` with its configuration")
    if name == "zstd":
        found = Codec("zstd", _level(settings.get("level"), 22))
    else:
        compressor, shuffle = settings.get("cname"), settings.get("shuffle")
        if compressor not in _COMPRESSORS or shuffle not in _SHUFFLES:
            raise ValueError(
                f"expected a `cname` of {', '.join(_COMPRESSORS)} and a `shuffle` of {', '.join(_SHUFFLES)}"
            )
        found = Codec("blosc", _level(settings.get("clevel"), 9), compressor, shuffle)
    if document != found.document(itemsize):
        raise ValueError(f"the configuration of `{name}` is not one that is read")
    return found


def _level(value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"expected a level from 0 to {most}")
    return value


def most_stored_bytes(payload_bytes: int) -> int:
    """Return the most bytes of a compressed chunk, without its crc32c, for all codecs here."""
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


def _blosc_bytes(data: Bytes) -> int | None:
    """Return the decoded bytes that a blosc chunk declares; None if `data` is not exactly one."""
    if data.size < 16:
        return None
    nbytes, _, stored = struct.unpack_from("<III", data.data, 4)
    return int(nbytes) if stored == data.size else None
