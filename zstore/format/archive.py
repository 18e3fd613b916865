"""Byte layout of a compressed shard file: chunks of any size, one directly behind the other. Pure.

[Note: the layout of a packed shard]
As a plain shard (`zstore.format.shardfile`), except that sizes vary: the index is at the start, with zeros up to a multiple of
4096; behind it every present chunk, its bytes and their crc32c, without a gap and in order; at the end zeros up to a multiple
of 4096. So the index determines all offsets, and the file's size.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from ..errors import CorruptionError
from .arrays import Bytes
from .codecs import most_stored_bytes
from .partition import round_up
from .shardfile import BLOCK_BYTES, CRC_BYTES, ShardLayout, checksum_error, encode_entries


def encode_packed_index(layout: ShardLayout, sizes: Sequence[int]) -> bytes:
    """Return the first `layout.data_offset` bytes of the file, for present chunks of `sizes` bytes, crc32c included."""
    lengths = np.asarray(sizes, np.uint64)
    return encode_entries(layout, layout.data_offset + np.cumsum(lengths, dtype=np.uint64) - lengths, lengths)


def decode_packed_index(layout: ShardLayout, data: Bytes, *, path: str, array: str) -> npt.NDArray[np.int64]:
    """Return the places of the present chunks in the file, `[num_present + 1]` offsets: chunk i from offset i to offset i + 1.

    `data` are the first bytes of the file. Raises CorruptionError if the checksum is wrong, or if chunks are not one behind
    the other or are of sizes that no chunk has.
    """
    body = bytes(data[: layout.index_bytes - CRC_BYTES])
    if crc32c(body) != struct.unpack_from("<I", data.data, layout.index_bytes - CRC_BYTES)[0]:
        raise checksum_error(array, "the index", path, 0, layout.index_bytes)
    sizes = np.frombuffer(body, "<u8").reshape(-1, 2)[: layout.num_present, 1]
    most = most_stored_bytes(layout.payload_bytes) + CRC_BYTES
    if ((sizes <= CRC_BYTES) | (sizes > most)).any() or not encode_packed_index(layout, sizes.tolist()).startswith(
        body
    ):
        raise CorruptionError(
            f"array {array!r}: the index of {path} is not that of {layout.num_present} compressed chunks of up to {most} "
            "bytes, one behind the other; the file was replaced or the metadata changed: restore it from another copy"
        )
    offsets = np.empty(layout.num_present + 1, np.int64)
    offsets[0] = layout.data_offset
    np.cumsum(sizes, out=offsets[1:])
    offsets[1:] += layout.data_offset
    return offsets


def packed_file_bytes(end: int) -> int:
    """Return the bytes of a file whose last chunk ends at offset `end`."""
    return round_up(end, BLOCK_BYTES)
