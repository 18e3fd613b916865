"""The reader printed in `docs/format.md` reads what zstore writes, and refuses what is damaged."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import zstore
from tests.checkpoint.checkpoints import arrays_of_kinds, save_arrays
from tests.checkpoint.printed_reader import FORMAT, Array, printed_reader
from zstore.checkpoint.names import METADATA_FILE, encode_name


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
