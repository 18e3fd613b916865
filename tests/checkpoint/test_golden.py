"""The reader that `docs/format.md` prints, the checkpoints kept from each version of the format, and compressed ones."""

import contextlib
import json
import math
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import zstd

import zstore
import zstore.dcp
from tests.checkpoint.checkpoints import arrays_of_kinds, save_arrays
from tests.checkpoint.forging import Forge, data_start, index_of
from tests.data.golden import make
from tests.pages import blocks, text_of
from zstore.checkpoint.layout import METADATA_FILE, array_document, array_path, encode_name, parse_array
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CheckpointMismatchError, CorruptionError
from zstore.format.arrays import ArraySpec, make_grid, numpy_dtype
from zstore.format.codecs import Codec, CodecError, decode_packed_index, encode_packed_index, parse_codec
from zstore.format.shardfile import ShardLayout
from zstore.io.memory import bytes_of
from zstore.testing.ranks import run_ranks
from zstore.tools.reshard import reshard_command

Array = npt.NDArray[Any]


def printed_reader() -> Callable[[Path, str], Array]:
    """The function `read_array` that the document prints."""
    (block,) = blocks("docs/format.md")
    assert len([line for line in block.splitlines() if line.strip()]) <= 45
    names: dict[str, Any] = {}
    exec(block, names)
    reader: Callable[[Path, str], Array] = names["read_array"]
    return reader


GOLDEN = Path(__file__).parents[1] / "data/golden"
VERSIONS = sorted(path for path in GOLDEN.glob("format-*"))
ALL = [path for version in VERSIONS for path in sorted(version.iterdir()) if path.is_dir()]
MOST_BYTES = 400_000


def expected(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    facts = json.loads(path.with_suffix(".json").read_text())
    with np.load(path.with_suffix(".npz")) as raw:
        arrays = {
            name: raw[name.replace("/", "|")].view(numpy_dtype(dtype)).reshape(shape)
            for name, (dtype, shape) in facts.pop("arrays").items()
        }
    return arrays, facts


def test_each_kind_is_kept_and_all_are_small() -> None:
    assert {path.name for path in ALL if path.parent.name == "format-1"} == {"arrays", "archive-zstd", make.ENGINE}
    for version in VERSIONS:
        assert sum(path.stat().st_size for path in version.rglob("*") if path.is_file()) < MOST_BYTES


@pytest.mark.parametrize("path", ALL, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_value_of_a_golden_is_read(path: Path) -> None:
    arrays, facts = expected(path)
    group = zarr.open_group(path, mode="r")
    read_printed = printed_reader()
    with open_checkpoint(path) as reader:
        assert verify_checkpoint(reader) == []
        assert set(reader.arrays) == set(arrays)
        for name, wanted in arrays.items():
            found = reader.read_array(name)
            assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes()), name
            assert read_printed(path, name).tobytes() == wanted.tobytes()
            stored = group[array_path(name)]
            assert isinstance(stored, zarr.Array)
            assert np.asarray(stored[...]).tobytes() == wanted.tobytes()
        with zstore.open_store() as store:
            store.load(path).wait()
            assert sorted(store.names()) == sorted(arrays)
            for name, wanted in arrays.items():
                values = store.get(name).wait()
                assert tuple(values.shape) == wanted.shape
                assert bytes(bytes_of(values)) == wanted.tobytes(), name
        assert reader.record.step == facts["step"]
        assert reader.record.world_size == facts["world_size"]
        aliases = {name: list(array.spec.aliases) for name, array in reader.arrays.items() if array.spec.aliases}
        assert aliases == facts["aliases"]
        if "state" in facts:
            assert reader.record.state == facts["state"]


def _resume(rank: int, path: str, folder: str) -> dict[str, Any]:
    with make.start() as engine:
        loaded, state = engine.load_checkpoint(path)
        assert loaded == path
        assert engine.global_steps == 2
        assert str(state) == str(make.CLIENT)
        engine.save_checkpoint(f"{folder}/again", "again", state)
        return {"loss": make.step(engine)}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_an_engine_goes_on_from_a_golden(version: Path, world_size: int, tmp_path: Path) -> None:
    arrays, facts = expected(version / make.ENGINE)
    path = tmp_path / make.ENGINE
    shutil.copytree(version / make.ENGINE, path)
    results = run_ranks(_resume, world_size, str(path), str(tmp_path))
    # Another version of torch may round otherwise.
    assert math.isclose(np.mean([result["loss"] for result in results]), facts["loss"], rel_tol=1e-3)
    with open_checkpoint(tmp_path / "again") as reader:
        assert all(reader.read_array(each).tobytes() == wanted.tobytes() for each, wanted in arrays.items())


def test_the_printed_reader_reads_arrays_that_keep_their_shape(tmp_path: Path) -> None:
    with zstore.open_store() as store:
        for name, value in arrays_of_kinds().items():
            store.put(name, value)
        store.put("model/rows of two", np.arange(3 * 5 * 70_000, dtype=np.float32).reshape(3, 5, 70_000))
        path = store.checkpoint(tmp_path / "one").wait().path
        for name in store.names():
            expected = np.asarray(store.get(name).wait())
            found = printed_reader()(path, name)
            assert (found.shape, found.dtype, found.tobytes()) == (expected.shape, expected.dtype, expected.tobytes())


def test_the_printed_reader_refuses_a_flipped_byte(tmp_path: Path) -> None:
    shard = save_arrays(tmp_path, arrays_of_kinds()) / "model/h.0.weight/c.0.0"
    shard.chmod(0o644)
    data = bytearray(shard.read_bytes())
    for place, words in ((5000, "offset 4096 is damaged"), (3, "index is damaged")):
        data[place] ^= 1
        shard.write_bytes(data)
        with pytest.raises(ValueError, match=words):
            printed_reader()(tmp_path / "step-00000001", "model/h.0.weight")


def test_the_rules_for_names_are_as_written() -> None:
    text = " ".join(text_of("docs/format.md").split())
    assert "letters, digits and `-_.~=+@,`" in text
    assert encode_name("aZ9-_.~=+@,") == "aZ9-_.~=+@,"
    assert encode_name("a b") == "a%20b"
    long = encode_name("x" * 181)
    assert re.fullmatch(r"x{147}~[0-9a-f]{32}", long)
    assert "cut to 147" in text
    for name in (METADATA_FILE, "zstore.json", "latest", "manifest"):
        assert encode_name(name).startswith("%")
        assert f"`{name}`" in text


CODEC = Codec()
ARRAYS = arrays_of_kinds() | {"model/zeros": np.zeros((700, 300), np.float32)}
SMALL = {"client/history": np.arange(12, dtype=np.float64).reshape(3, 4)}


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
    return Path(shutil.copytree(archive, tmp_path / archive.name))


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
        told = r"chunk 0 of .* it is not a zstd frame of" if lie in bombs else r"chunk 0 of|does not describe"
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
            with pytest.raises(CorruptionError, match=r"does not describe|expected"):
                reader.read_array("model/h.0.weight")
            assert verify_checkpoint(reader)


def test_every_flipped_byte_of_an_archive_is_noticed_or_carries_nothing(copied: Path) -> None:
    forge = Forge(copied)
    old = forge.read(W)
    rng = np.random.default_rng(0)
    for at in [0, 8, 9, data_start(old) - 1, 4096, len(old) - 1, *rng.integers(0, len(old), 20).tolist()]:
        forge.put(W, old[:at] + bytes([old[at] ^ 0x10]) + old[at + 1 :])
        with open_checkpoint(copied) as reader, contextlib.suppress(CorruptionError):
            assert reader.read_array("model/h.0.weight").tobytes() == ARRAYS["model/h.0.weight"].tobytes()
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
    CHANGES[change](document["codecs"][0]["configuration"]["codecs"][1])
    with pytest.raises(CheckpointMismatchError, match="here"):
        parse_array(document, "here")
    document["chunk_grid"]["configuration"] = {"chunk_shapes": [[10, 30]]}  # the grid of a later version
    with pytest.raises(CheckpointMismatchError, match="use a newer version"):
        parse_array(document, "here")


@pytest.mark.parametrize("level", [0, 22])
def test_other_settings_than_ours_are_read(level: int) -> None:
    codec = Codec(level=level)
    assert parse_codec(codec.document()) == codec
    payload = np.arange(4096, dtype=np.uint8)
    out = np.empty_like(payload)
    codec.decode(np.frombuffer(codec.encode(payload), np.uint8), out)
    assert out.tobytes() == payload.tobytes()
