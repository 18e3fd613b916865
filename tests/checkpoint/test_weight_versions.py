"""Changes of weights by themselves: what is encoded comes back, in whatever ranges and however many versions at a time."""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zstore.checkpoint.folder import LocalFolder
from zstore.errors import CorruptionError
from zstore.weights.delta import Bits, DeltaWriter, Patch, decode, encode, fold, read_delta, spans_of
from zstore.weights.versions import WeightsVersion, chain_from, folder_name, number_of, parse_index

SEEDS = st.integers(0, 2**32 - 1)


def changed(old: Bits, share: float, rng: np.random.Generator) -> Bits:
    new = old.copy()
    at = rng.random(old.size) < share
    new[at] ^= rng.integers(1, 2**16, int(at.sum()), dtype=np.uint16)
    return new


@given(
    hnp.arrays(np.uint16, st.integers(0, 1500), elements=st.integers(0, 3)),
    st.data(),
)
def test_elements_come_back_whatever_they_are(old: Bits, data: st.DataObject) -> None:
    new = data.draw(hnp.arrays(np.uint16, old.size, elements=st.integers(0, 3)))
    values, gaps = encode(old, new)
    at = decode(gaps)
    np.testing.assert_array_equal(at, np.flatnonzero(old != new))
    np.testing.assert_array_equal(values, new[old != new])


@given(SEEDS, st.integers(1, 300_000), st.sampled_from([0.0, 1e-5, 1e-3, 0.02, 0.5, 1.0]))
@settings(max_examples=60, deadline=None)
@example(0, 256, 1e-2)
@example(0, 200_000, 1e-5)
def test_gaps_of_any_length_are_encoded(seed: int, size: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 2**16, size, dtype=np.uint16)
    new = changed(old, share, rng)
    values, gaps = encode(old, new)
    patched = old.copy()
    patched[decode(gaps)] = values
    np.testing.assert_array_equal(patched, new)
    assert values.nbytes + gaps.nbytes <= 4 * (old != new).sum() + 2 * (size / 65535 + 1)


def written(path: Path, name: str, steps: list[tuple[int, Bits, Bits]]) -> list[Patch]:
    """The patches of a file of changes, as they are read: `(first, old, new)` each."""
    with path.open("wb") as file:
        writer = DeltaWriter(file)
        for first, old, new in steps:
            writer.add(name, first, old, new, crc32c(new.tobytes()))
        writer.finish()
    assert writer.nbytes == path.stat().st_size
    return read_delta(path, writer.nbytes, crc32c(path.read_bytes()))[name]


def apply(bits: Bits, patches: list[Patch]) -> Bits:
    for begin, stop, mine in spans_of(patches):
        fold("w", begin, bits[begin:stop], mine)
    return bits


@given(SEEDS, st.integers(1, 4000), st.lists(st.lists(st.integers(0, 4000), max_size=4), min_size=1, max_size=5))
@settings(max_examples=80, deadline=None)
def test_versions_fold_in_one_pass_whatever_their_ranges(
    tmp_path_factory: pytest.TempPathFactory, seed: int, size: int, cuts: list[list[int]]
) -> None:
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("fold")
    first = now = rng.integers(0, 2**16, size, dtype=np.uint16)
    patches: list[Patch] = []
    for number, edges in enumerate(cuts):
        new = changed(now, 0.1, rng)
        bounds = [0, *sorted({edge for edge in edges if 0 < edge < size}), size]
        steps = [(a, now[a:b], new[a:b]) for a, b in itertools.pairwise(bounds)]
        patches += written(folder / f"{number}", "w", [steps[at] for at in rng.permutation(len(steps))])
        now = new
    spans = list(spans_of(patches))
    assert [spans[0][0], *(stop for _, stop, _ in spans)][-1] == size
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    np.testing.assert_array_equal(apply(first.copy(), patches), now)
    wrong = first.copy()
    wrong[size // 2] ^= 1
    if all(size // 2 not in patch.first + decode(patch.gaps) for patch in patches):
        with pytest.raises(CorruptionError, match="not those of its base version"):
            apply(wrong, patches)


def test_a_file_of_changes_is_what_the_page_says(tmp_path: Path) -> None:
    old = np.arange(1000, dtype=np.uint16)
    new = old.copy()
    new[[3, 4, 700]] = [7, 8, 9]
    written(tmp_path / "file", "a.b", [(50, old, new)])
    data = (tmp_path / "file").read_bytes()
    (length,) = struct.unpack("<Q", data[-8:])
    assert data[-8 - length : -8].decode() == f'{{"a.b":[[50,1050,0,3,3,2,{crc32c(new.tobytes())}]]}}'
    assert struct.unpack("<3H", data[:6]) == (7, 8, 9)
    assert struct.unpack("<3H", data[6:12]) == (3, 0, 695)


@given(st.integers(0, 10**6), st.integers(1, 255))
@settings(max_examples=150, deadline=None)
def test_any_other_byte_is_noticed(tmp_path_factory: pytest.TempPathFactory, at: int, flip: int) -> None:
    path = tmp_path_factory.mktemp("flip") / "file"
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 700, dtype=np.uint16)
    new = changed(old, 0.1, rng)
    written(path, "w", [(0, old, new)])
    data = bytearray(path.read_bytes())
    size, crc = len(data), crc32c(bytes(data))
    data[at % size] ^= flip
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="take it again"):
        read_delta(path, size, crc)
    with contextlib.suppress(CorruptionError):  # even if whoever changed it had the checksum agree
        for name, patches in read_delta(path, size, crc32c(bytes(data))).items():
            if name == "w":
                np.testing.assert_array_equal(apply(old, patches), new)


def save(folder: Path, **facts: Any) -> WeightsVersion:
    version = WeightsVersion(step=facts["number"], run="r", **facts)
    (folder / folder_name(version.number)).mkdir(parents=True)
    (folder / folder_name(version.number) / "model.safetensors.index.json").write_bytes(version.index())
    return version


def chain(folder: Path, have: str | None) -> tuple[int | None, list[int]] | None:
    found = chain_from(LocalFolder(folder), have)
    return None if found is None else (found.full and found.full.number, [one.number for one in found.deltas])


def test_the_way_to_the_newest_version_is_the_shortest(tmp_path: Path) -> None:
    full = {"weights": {"w": 1}, "files": {"w": "model.safetensors"}, "full_bytes": 100}
    save(tmp_path, number=1, id="a", **full)
    for number, id_ in enumerate("bcd", start=2):
        save(tmp_path, number=number, id=id_, base=number - 1, base_id=chr(ord(id_) - 1), deltas={"delta-0": [40, 0]})
    assert chain(tmp_path, None) == (1, [2, 3, 4])
    assert chain(tmp_path, "d") is None
    assert chain(tmp_path, "c") == (None, [4])
    assert chain(tmp_path, "a") == (None, [2, 3, 4])
    assert chain(tmp_path, "other") == (1, [2, 3, 4])
    save(tmp_path, number=5, id="e", base=4, base_id="d", deltas={"delta-0": [40, 0]}, **full)
    assert chain(tmp_path, None) == (5, [])
    assert chain(tmp_path, "d") == (None, [5])
    assert chain(tmp_path, "c") == (None, [4, 5])
    assert chain(tmp_path, "b") == (5, []), "three times 40 bytes are more"
    save(tmp_path, number=6, id="f", base=5, base_id="of another run", deltas={"delta-0": [1, 0]})
    with pytest.raises(FileNotFoundError, match="none is a full one or follows"):
        chain(tmp_path, "d")


@pytest.mark.parametrize("name", ["weight_v1", "weight_v0000001", ".weight_v000001", "weight_v000001.gone", "weights"])
def test_other_folders_are_no_versions(name: str) -> None:
    assert number_of(name) is None


def test_numbers_have_six_digits_or_more() -> None:
    assert [number_of(folder_name(number)) for number in (1, 999_999, 1_000_000)] == [1, 999_999, 1_000_000]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"metadata": {"zstore": {}}, "weight_map": {}}',
        b"\xff",
        b"null",
        WeightsVersion(number=2, id="b", base=1, base_id="a", step=1, run="r", deltas={"../x": [1, 1]}).index(),
        WeightsVersion(number=2, id="b", base=1, base_id="a", step=1, run="r").index(),
    ],
)
def test_an_index_of_something_else_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError, match="describes no version of weights"):
        parse_index(data, "it")


def test_what_reads_such_folders_itself_refuses_one_with_changes_alone() -> None:
    """The keys by which receivers of slime and SGLang tell a version with changes, and how these are compressed."""
    version = WeightsVersion(number=2, id="b", base=1, base_id="a", step=1, run="r", deltas={"delta-00000.bin": [1, 1]})
    metadata = json.loads(version.index())["metadata"]
    assert (metadata["version"], metadata["base_version"]) == ("000002", "000001")
    assert metadata["delta_encoding"] == "zstore"
    assert metadata["compression_format"] == "none"
