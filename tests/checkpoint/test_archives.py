"""Compressed checkpoints: the same values, smaller, for every reader; and no bomb goes off."""

import contextlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import zstd

from tests.checkpoint.checkpoints import arrays_of_kinds, save_arrays
from tests.checkpoint.forging import Forge, data_start, index_of
from zstore.checkpoint.metadata import array_document, parse_array
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CheckpointMismatchError, CorruptionError
from zstore.format.arrays import ArraySpec, make_grid
from zstore.format.codecs import Codec, CodecError, decode_packed_index, encode_packed_index, parse_codec
from zstore.format.shardfile import ShardLayout
from zstore.tools.reshard import reshard_command

Array = npt.NDArray[Any]
CODEC = Codec()
ARRAYS = arrays_of_kinds() | {"model/zeros": np.zeros((700, 300), np.float32)}
SMALL = {"client/history": np.arange(12, dtype=np.float64).reshape(3, 4)}
ALL = ARRAYS | SMALL


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return save_arrays(folder, ARRAYS, world_size=3, step=60, small=SMALL, record={"counters": [1, 2]})


@pytest.fixture(scope="module")
def archive(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    assert reshard_command(saved, folder, compression="zstd") == 0
    return folder / saved.name


@pytest.fixture
def copied(archive: Path, tmp_path: Path) -> Path:
    path = Path(shutil.copytree(archive, tmp_path / archive.name))
    for file in path.rglob("*"):
        if file.is_file():
            file.chmod(0o644)
    return path


def shards_of(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("c.*")) if p.is_file()}


def test_an_archive_is_smaller_and_has_the_same_grids_and_state(archive: Path, saved: Path) -> None:
    with open_checkpoint(archive) as reader, open_checkpoint(saved) as plain:
        for name, array in reader.arrays.items():
            assert array.grid == plain.arrays[name].grid
            assert array.file_bytes == sum(
                (archive / array.shard_file(n)).stat().st_size for n in range(array.grid.num_shards)
            )
        assert reader.record.state == plain.record.state
        assert reader.record.world_size == reader.record.training_world_size == 3
    assert sum(map(len, shards_of(archive).values())) < 0.85 * sum(map(len, shards_of(saved).values()))


# -- what is not believed -------------------------------------------------------------------------------------------

W = "model/h.0.weight/c.0.0"


def _pack(old: bytes, chunks: list[bytes], sizes: list[int] | None = None) -> bytes:
    """A shard file with these compressed chunks, in the format's own words."""
    start = data_start(old)
    at, body, index = -(-start // 4096) * 4096, b"", b""
    for i, chunk in enumerate(chunks):
        size = sizes[i] if sizes else len(chunk) + 4
        index += struct.pack("<QQ", at + len(body), size)
        body += chunk + struct.pack("<I", crc32c(chunk))
    index = index.ljust(start - 4, b"\xff")
    head = (index + struct.pack("<I", crc32c(index))).ljust(at, b"\0")
    return head + body + b"\0" * (-len(body) % 4096)


def _forge(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Replace the compressed chunks of a shard; all checksums, the manifest and the digests fit."""
    forge = Forge(path)
    old = forge.read(W)
    chunks = change([old[at : at + n - 4] for at, n in index_of(old)])
    forge.put(W, _pack(old, chunks))
    forge.name_crcs(W, [crc32c(chunk) for chunk in chunks], 0)

    def resize(manifest: Any) -> None:
        for entry in manifest["shards"]:
            if entry["array"] == "model/h.0.weight":
                entry["bytes"] = len(forge.read(W))

    forge.edit("manifest/rank-00000.json", resize)


def test_decompression_bombs_and_frames_that_lie_are_refused_before_they_are_decoded(copied: Path) -> None:
    with open_checkpoint(copied) as reader:
        payload_bytes = reader.open_shard("model/h.0.weight", 0).layout.payload_bytes
    whole = bytes(zstd.compress(bytes(payload_bytes), 1))
    lies = [whole + whole, whole + b"x", whole[:-1], whole[: len(whole) // 2], b"\0" * 64, b"\xff" * 64, b"x"]
    lies.append(b"\x28\xb5\x2f\xfd\x00\x58" + whole[6:])  # of unknown size
    bombs = [bytes(zstd.compress(bomb, 1)) for bomb in (np.zeros(2**28, np.uint8), b"short", b"")]
    for lie in (*bombs, *lies):
        _forge(copied, lambda chunks, lie=lie: [lie, *chunks[1:]])  # type: ignore[misc]
        told = r"chunk 0 of .* it is not a zstd frame of" if lie in bombs else r"chunk 0 of|not that of"
        with open_checkpoint(copied) as reader:
            with pytest.raises(CorruptionError, match=told):
                reader.read_array("model/h.0.weight")
            assert verify_checkpoint(reader) or lie not in bombs


def test_an_index_that_leads_elsewhere_is_refused(copied: Path) -> None:
    forge = Forge(copied)
    old = forge.read(W)
    chunks = [old[at : at + n - 4] for at, n in index_of(old)]
    sizes = [len(chunk) + 4 for chunk in chunks]
    for change in ({0: 2**40}, {0: 4}, {0: 0}, {0: 2**64 - 1}, {0: sizes[0] - 1}, {len(sizes) - 1: sizes[-1] + 4096}):
        forge.put(W, _pack(old, chunks, [change.get(i, size) for i, size in enumerate(sizes)]))
        with open_checkpoint(copied) as reader:
            with pytest.raises(CorruptionError, match=r"not that of|expected"):
                reader.read_array("model/h.0.weight")
            assert verify_checkpoint(reader)


def test_every_flipped_byte_of_an_archive_is_noticed_or_carries_nothing(copied: Path) -> None:
    forge = Forge(copied)
    old = forge.read(W)
    rng = np.random.default_rng(0)
    for at in [0, 8, 9, data_start(old) - 1, 4096, len(old) - 1, *rng.integers(0, len(old), 20).tolist()]:
        forge.put(W, old[:at] + bytes([old[at] ^ 0x10]) + old[at + 1 :])
        with open_checkpoint(copied) as reader, contextlib.suppress(CorruptionError):
            assert reader.read_array("model/h.0.weight").tobytes() == ALL["model/h.0.weight"].tobytes()
    forge.put(W, old[:-4096])
    with open_checkpoint(copied) as reader:
        faults = verify_checkpoint(reader)
        assert [str(fault) for fault in faults if f"has {len(old) - 4096} bytes, expected {len(old)}" in str(fault)]


@settings(max_examples=200)
@given(data=st.data())
def test_any_bytes_decode_to_a_chunk_or_are_an_error(data: st.DataObject) -> None:
    payload = np.frombuffer(data.draw(st.binary(min_size=64, max_size=64)) * 64, np.uint8)
    stored = bytearray(CODEC.encode(payload))
    for _ in range(data.draw(st.integers(0, 6))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(1, len(stored)) | st.just(len(stored)))
    room = np.full(payload.size + 64, 7, np.uint8)
    try:
        CODEC.decode(np.frombuffer(bytes(stored[:cut]), np.uint8), room[: payload.size])
    except CodecError:
        pass
    else:
        assert bytes(stored[:cut]) != CODEC.encode(payload) or room[:-64].tobytes() == payload.tobytes()
    assert (room[payload.size :] == 7).all()


@given(st.lists(st.integers(5, 5000), max_size=20), st.integers(0, 5))
def test_an_index_comes_back_as_it_was(sizes: list[int], missing: int) -> None:
    if not sizes and not missing:
        return
    layout = ShardLayout(num_chunks=len(sizes) + missing, num_present=len(sizes), payload_bytes=4096)
    data = np.frombuffer(encode_packed_index(layout, sizes), np.uint8)
    assert data.size == layout.data_offset
    offsets = decode_packed_index(layout, data, path="p", array="a")
    assert offsets.tolist() == [layout.data_offset + sum(sizes[:n]) for n in range(len(sizes) + 1)]


def _settings(document: Any) -> Any:
    return document["codecs"][0]["configuration"]["codecs"][1]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "level": lambda codec: codec["configuration"].update(level=99),
    "text for a level": lambda codec: codec["configuration"].update(level="3"),
    "another name": lambda codec: codec.update(name="blosc"),
    "no settings": lambda codec: codec.pop("configuration"),
    "a list": lambda codec: codec.update(configuration=[]),
    "more settings": lambda codec: codec["configuration"].update(window=2**31),
}


@pytest.mark.parametrize("change", CHANGES)
def test_settings_that_are_not_read_are_refused(change: str) -> None:
    spec = ArraySpec(name="model/w", shape=(40,), dtype="float32")
    document = json.loads(json.dumps(array_document(spec, make_grid((40,), 1), CODEC)))
    assert parse_array(document, "here") == (spec, make_grid((40,), 1), CODEC)
    CHANGES[change](_settings(document))
    with pytest.raises(CheckpointMismatchError, match="here"):
        parse_array(document, "here")


@pytest.mark.parametrize("level", [0, 22])
def test_other_settings_than_ours_are_read(level: int) -> None:
    codec = Codec(level=level)
    assert parse_codec(codec.document()) == codec
    payload = np.arange(4096, dtype=np.uint8)
    out = np.empty_like(payload)
    codec.decode(np.frombuffer(codec.encode(payload), np.uint8), out)
    assert out.tobytes() == payload.tobytes()
