"""The reader printed in `docs/format.md`, and the checkpoints kept from each version of it: every value, by every reader."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr

import zstore
import zstore.dcp
from tests.checkpoint.checkpoints import arrays_of_kinds, save_arrays
from tests.data.golden import make
from zstore.checkpoint.names import METADATA_FILE, array_path, encode_name
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.format.arrays import numpy_dtype
from zstore.io.tensors import bytes_of
from zstore.testing.ranks import run_ranks

Array = npt.NDArray[Any]
FORMAT = Path(__file__).parents[2] / "docs/format.md"


def printed_reader() -> Callable[[Path, str], Array]:
    """The function `read_array` that the document prints."""
    blocks = re.findall(r"```python\n(.*?)```", FORMAT.read_text(), re.DOTALL)
    (block,) = (block for block in blocks if "def read_array" in block)
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
    """Every array, and what else the checkpoint holds."""
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


@pytest.fixture(scope="module")
def read_array() -> Callable[[Path, str], Array]:
    return printed_reader()


@pytest.fixture(scope="module")
def arrays() -> dict[str, Array]:
    return arrays_of_kinds()


def test_the_printed_reader_reads_arrays_that_keep_their_shape(
    read_array: Callable[[Path, str], Array], arrays: dict[str, Array], tmp_path: Path
) -> None:
    with zstore.open_store() as store:
        for name, value in arrays.items():
            store.put(name, value)
        store.put("model/rows of two", np.arange(3 * 5 * 70_000, dtype=np.float32).reshape(3, 5, 70_000))
        path = store.checkpoint(tmp_path / "one").wait().path
        for name in store.names():
            expected = np.asarray(store.get(name).wait())
            found = read_array(path, name)
            assert (found.shape, found.dtype, found.tobytes()) == (expected.shape, expected.dtype, expected.tobytes())


def test_the_printed_reader_refuses_a_flipped_byte(
    read_array: Callable[[Path, str], Array], arrays: dict[str, Array], tmp_path: Path
) -> None:
    shard = save_arrays(tmp_path, arrays) / "model/h.0.weight/c.0.0"
    shard.chmod(0o644)
    data = bytearray(shard.read_bytes())
    for place, words in ((5000, "offset 4096 is damaged"), (3, "index is damaged")):
        data[place] ^= 1
        shard.write_bytes(data)
        with pytest.raises(ValueError, match=words):
            read_array(tmp_path / "step-00000001", "model/h.0.weight")


def test_the_rules_for_names_are_as_written() -> None:
    text = " ".join(FORMAT.read_text().split())
    assert "letters, digits and `-_.~=+@,`" in text
    assert encode_name("aZ9-_.~=+@,") == "aZ9-_.~=+@,"
    assert encode_name("a b") == "a%20b"
    long = encode_name("x" * 181)
    assert re.fullmatch(r"x{147}~[0-9a-f]{32}", long)
    assert "cut to 147" in text
    for name in (METADATA_FILE, "zstore.json", "latest", "manifest"):
        assert encode_name(name).startswith("%")
        assert f"`{name}`" in text
