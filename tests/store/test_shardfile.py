"""The byte layout of a shard file, held against zarr-python and tensorstore."""

import struct

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import assume, given
from hypothesis import strategies as st

from zstore.errors import CorruptionError
from zstore.format.arrays import Bytes
from zstore.format.shardfile import (
    BLOCK_BYTES,
    MISSING,
    ShardLayout,
    check_index,
    checksum,
    encode_index,
    finish_slots,
    slot_views,
    stored_crcs,
    verify_slots,
)


def seal_slots(slots: Bytes, layout: ShardLayout) -> list[int]:
    """Write crc32c and zeros behind the payload of every slot, as whoever writes a file does; return the checksums."""
    payloads = slot_views(slots, layout)[:, : layout.payload_bytes]
    stored_crcs(slots, layout)[:] = [checksum(payload) for payload in payloads]
    return finish_slots(slots, layout)


layouts = st.builds(
    lambda present, missing, payload: ShardLayout(
        num_chunks=present + missing, num_present=present, payload_bytes=payload
    ),
    st.integers(0, 300),
    st.integers(0, 300),
    st.one_of(st.integers(1, 9000), st.sampled_from([4088, 4092, 4093, 4096, 65532, 65536])),
)


@given(layout=layouts)
def test_everything_lies_in_blocks_and_nothing_overlaps(layout: ShardLayout) -> None:
    assert layout.data_offset % BLOCK_BYTES == layout.slot_bytes % BLOCK_BYTES == layout.file_bytes % BLOCK_BYTES == 0
    assert layout.data_offset - BLOCK_BYTES < layout.index_bytes <= layout.data_offset
    assert layout.slot_bytes - BLOCK_BYTES < layout.payload_bytes + 4 == layout.chunk_bytes <= layout.slot_bytes
    assert layout.slot_offset(0) == layout.data_offset
    assert layout.slot_offset(layout.num_present) == layout.file_bytes


@given(layout=layouts)
def test_the_index_is_what_the_specification_says(layout: ShardLayout) -> None:
    index = encode_index(layout)
    assert len(index) == layout.data_offset
    entries = [struct.unpack_from("<QQ", index, 16 * i) for i in range(layout.num_chunks)]
    for chunk, (offset, nbytes) in enumerate(entries):
        if chunk < layout.num_present:
            assert (offset, nbytes) == (layout.slot_offset(chunk), layout.chunk_bytes)
        else:
            assert (offset, nbytes) == (MISSING, MISSING)
    body = index[: 16 * layout.num_chunks]
    assert struct.unpack_from("<I", index, len(body))[0] == crc32c(body)
    assert not any(index[layout.index_bytes :])
    check_index(layout, index, path="p", array="a/b")


@given(layout=layouts, data=st.data())
def test_a_flipped_bit_of_the_index_is_found(layout: ShardLayout, data: st.DataObject) -> None:
    index = bytearray(encode_index(layout))
    bit = data.draw(st.integers(0, 8 * layout.index_bytes - 1))
    index[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptionError, match=r"array 'a/b': the index of /some/file fails its crc32c \(offset 0, "):
        check_index(layout, bytes(index), path="/some/file", array="a/b")


@given(layout=layouts, other=layouts)
def test_the_index_of_another_layout_is_told_apart_from_damage(layout: ShardLayout, other: ShardLayout) -> None:
    index, found = encode_index(layout), encode_index(other)
    assume(index[: layout.index_bytes] != found[: layout.index_bytes])
    words = "belongs to another layout" if other.num_chunks == layout.num_chunks else "belongs to|fails its crc32c"
    with pytest.raises(CorruptionError, match=words):
        check_index(layout, found, path="p", array="a/b")
    with pytest.raises(CorruptionError, match="fails its crc32c"):
        check_index(layout, index[: layout.index_bytes - 1], path="p", array="a/b")


small_payloads = st.one_of(st.integers(1, 200), st.sampled_from([4091, 4092, 4093, 8188]))


@given(count=st.integers(1, 5), payload=small_payloads, first=st.integers(0, 10), data=st.data())
def test_sealed_slots_verify_and_a_flipped_bit_is_found(
    count: int, payload: int, first: int, data: st.DataObject
) -> None:
    layout = ShardLayout(num_chunks=20, num_present=20, payload_bytes=payload)
    slots = np.random.default_rng(payload).integers(0, 256, count * layout.slot_bytes, dtype=np.uint8)
    before = slot_views(slots, layout)[:, :payload].copy()
    crcs = seal_slots(slots, layout)
    views = slot_views(slots, layout)
    assert (views[:, :payload] == before).all()
    assert not views[:, layout.chunk_bytes :].any()
    assert crcs == [crc32c(part.tobytes()) for part in before]
    assert verify_slots(slots, layout, first, path="p", array="a/b") == crcs

    chunk = data.draw(st.integers(0, count - 1))
    bit = data.draw(st.integers(0, 8 * layout.chunk_bytes - 1))
    views[chunk, bit // 8] ^= 1 << bit % 8
    offset = layout.slot_offset(first + chunk)
    words = rf"array 'a/b': chunk {first + chunk} of /some/file fails its crc32c \(offset {offset}, "
    with pytest.raises(CorruptionError, match=words):
        verify_slots(slots, layout, first, path="/some/file", array="a/b")
