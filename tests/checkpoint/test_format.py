"""The JSON files of a checkpoint and names on disk: what goes in comes out, and nothing that is not valid is believed."""

import json
import math
import re
from dataclasses import replace
from enum import IntEnum
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zstore.checkpoint.format import Manifest, Record, decode_state, encode_state
from zstore.checkpoint.layout import (
    array_document,
    array_path,
    check_save_id,
    encode_documents,
    encode_name,
    new_save_id,
    parse_root,
    parse_working_name,
    shard_file,
    step_tag,
    tag_folder,
    tag_text,
    working_name,
)
from zstore.errors import CorruptionError, UsageError
from zstore.format.arrays import ArraySpec, make_grid
from zstore.io.shards import ShardSummary

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
RECORD = Record(
    id="0123456789abcdef0123456789abcdef",
    tag="best ü",
    step=60,
    world_size=2,
    training_world_size=3,
    run="run",
    committed_ns=17,
    metadata_sha256="m",
    manifest_sha256=("a", "b"),
    state={"lr": 1e-4, "best": math.inf, "text": "ü", "none": None},
)
MANIFEST = Manifest(
    id="0123456789abcdef0123456789abcdef",
    rank=1,
    world_size=2,
    outcome="complete",
    shards=(ShardSummary(array="model/w", shard=1, file_bytes=8192, crcs=(0, 2**32 - 1), linked=True),),
    rank_state={"cpu": [1, 2, 3]},
)


@settings(max_examples=50)
@given(JSON)
def test_state_comes_back_as_it_was(value: Any) -> None:
    if '"$float"' in json.dumps(value):
        return
    plain = json.loads(json.dumps(encode_state(value, "state"), allow_nan=False))
    assert _same(decode_state(plain), value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)


class _Level(IntEnum):
    HIGH = 3


def test_plain_kinds_of_number_and_tuples_become_json() -> None:
    assert encode_state({"e": _Level.HIGH, "f": np.float64(0.5), "t": (1, 2)}, "x") == {"e": 3, "f": 0.5, "t": [1, 2]}


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"best": [1, {2}]}, r"client_state\['best'\]\[1\] is a builtins.set"),
        ({"a": {1: 2}}, r"client_state\['a'\]: key 1 is a int"),
        ({"$float": "nan"}, "rename the key"),
        ({"b": b"x"}, "builtins.bytes"),
    ],
)
def test_state_that_is_not_json_is_named(value: Any, place: str) -> None:
    with pytest.raises(UsageError, match=place):
        encode_state(value, "client_state")


def test_state_nested_too_deeply_is_refused_both_ways() -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(UsageError, match="levels deep"):
        encode_state(deep, "state")
    with pytest.raises(CorruptionError, match="levels deep"):
        decode_state(deep)


def test_record_and_manifest_come_back_as_they_were() -> None:
    assert Record.decode(RECORD.encode(), "r") == RECORD
    assert Manifest.decode(MANIFEST.encode(), "m") == MANIFEST


def test_bytes_of_a_manifest_are_those_of_its_list_whatever_the_state_says() -> None:
    shards = tuple(ShardSummary(f"model/a{n}", 0, nbytes, (1,), linked=n < 2) for n, nbytes in enumerate((3, 40, 500)))
    data = replace(MANIFEST, shards=shards, rank_state={"x": {"bytes": 7, "linked": True}}).encode()
    assert json.loads(data)["rank_state"]["x"] == {"bytes": 7, "linked": True}
    assert [Manifest.sum_bytes(data, linked=linked) for linked in (True, False)] == [43, 500]


def test_the_head_of_a_manifest_is_all_but_its_shards_whatever_the_state_says() -> None:
    tricky = {"text": ',"shards":[', "shards": [1, {"a": 2, "shards": [3]}], "z": 1}
    for manifest in (MANIFEST, replace(MANIFEST, rank_state=tricky, layout="f" * 64), replace(MANIFEST, shards=())):
        assert Manifest.decode_head(manifest.encode(), "m") == replace(manifest, shards=())
    with pytest.raises(CorruptionError):
        Manifest.decode_head(b'{"rank": 1,"shards":[', "m")


SPECS = [
    ArraySpec(name="model/w", shape=(1000, 300), dtype="float32", aliases=("head.weight",)),
    ArraySpec(name="model/e", shape=(4, 6, 50), dtype="bfloat16"),
    ArraySpec(name="model/none", shape=(0, 5), dtype="float16"),
    ArraySpec(name="model/thin", shape=(5, 0), dtype="float16"),
    ArraySpec(name="buffer/n", shape=(), dtype="int64"),
    ArraySpec(name="model/long", shape=(3, 400_000), dtype="float64"),
    ArraySpec(name="optimizer/exp_avg/w", shape=(77,), dtype="bool"),
]


@pytest.mark.parametrize("world_size", [1, 3])
def test_metadata_gives_specs_and_grids_back(world_size: int) -> None:
    specs = {spec.name: spec for spec in SPECS}
    grids = {spec.name: make_grid(spec.stored_shape, world_size) for spec in SPECS}
    documents = {folder: json.loads(text) for folder, text in encode_documents(specs, grids).items()}
    assert set(documents) == {"", "model", "buffer", "optimizer", "optimizer/exp_avg"} | set(specs)
    parsed = parse_root(documents[""], "zarr.json")
    assert {name: entry[1:] for name, entry in parsed.items()} == {n: (specs[n], grids[n], None) for n in specs}


def test_names_that_would_collide_are_refused() -> None:
    clash = [ArraySpec(name=n, shape=(4,), dtype="float32") for n in ("optimizer/exp_avg", "optimizer/exp_avg/weight")]
    with pytest.raises(UsageError, match="name of a group"):
        encode_documents({s.name: s for s in clash}, {s.name: make_grid((4,), 1) for s in clash})


def test_lost_files_never_read_as_zeros() -> None:
    for name in ("float16", "bfloat16", "float32", "float64"):
        spec = ArraySpec(name="model/w", shape=(4,), dtype=name)
        assert array_document(spec, make_grid((4,), 1))["fill_value"] == "NaN"
    assert np.dtype(ml_dtypes.bfloat16).name == "bfloat16"


TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1)


@pytest.mark.parametrize(
    ("tag", "folder"),
    [
        ("step-00000060", "step-00000060"),
        (2.345, "2.345"),
        (7, "7"),
        ("best model", "best%20model"),
        ("übung", "%C3%BCbung"),
        ("50%", "50%25"),
        (".hidden", "%2Ehidden"),
        ("latest", "%6Catest"),
        ("Latest", "%4Catest"),
        ("zarr.json", "%7Aarr.json"),
        ("x.tmp-0123456789abcdef0123456789abcdef", "x%2Etmp-0123456789abcdef0123456789abcdef"),
        (float("nan"), "nan"),
    ],
)
def test_any_text_or_number_is_a_tag(tag: str | float, folder: str) -> None:
    assert tag_folder(tag_text(tag)) == folder


@pytest.mark.parametrize("tag", ["", "a/b", "..", "a..b", "/abs", "tab\there", "nul\0", "del\x7f", "c1\x85", "\ud800"])
def test_a_tag_that_could_lead_elsewhere_is_refused(tag: str) -> None:
    with pytest.raises(UsageError, match="cannot be a tag"):
        tag_text(tag)


def test_step_tags_sort_as_steps_do() -> None:
    assert step_tag(60) == "step-00000060"
    assert sorted([step_tag(9), step_tag(10), step_tag(100)]) == [step_tag(9), step_tag(10), step_tag(100)]


@given(TEXT)
def test_an_encoded_name_is_one_harmless_path_component(name: str) -> None:
    encoded = encode_name(name)
    assert re.fullmatch(r"[A-Za-z0-9_~=+@,%-][A-Za-z0-9._~=+@,%-]*", encoded)
    assert len(encoded) <= 180
    assert not encoded.startswith("__")
    assert parse_working_name(encoded) is None
    assert encoded.lower() not in {"zarr.json", "zstore.json", "latest", "manifest"}


@given(st.lists(TEXT, unique=True, max_size=20))
def test_different_names_have_different_folders(names: list[str]) -> None:
    assert len({encode_name(name) for name in names}) == len(names)


def test_long_names_are_cut_and_stay_apart() -> None:
    first, second = encode_name("ü" * 400 + "a"), encode_name("ü" * 400 + "b")
    assert first != second
    assert len(first) <= 180
    assert not re.search(r"%[0-9A-F]?~", first)


def test_arrays_stand_one_level_below_their_group_and_optimizer_slots_two() -> None:
    assert array_path("model/transformer.h.0.mlp.weight") == "model/transformer.h.0.mlp.weight"
    assert array_path("model/odd/name") == "model/odd%2Fname"
    assert array_path("optimizer/exp_avg/a/b") == "optimizer/exp_avg/a%2Fb"
    assert array_path("buffer/../../etc") == "buffer/%2E.%2F..%2Fetc"
    with pytest.raises(UsageError, match="belongs to the format"):
        array_path("manifest/x")


def test_shard_files_have_a_coordinate_for_each_extent() -> None:
    assert shard_file(1, 3) == "c.3"
    assert shard_file(2, 3) == "c.3.0"


def test_a_save_knows_its_own_names() -> None:
    save_id = new_save_id()
    assert check_save_id(save_id) == save_id
    assert parse_working_name(working_name("a.tmp-b", "old", save_id)) == ("a.tmp-b", "old", save_id)
    assert parse_working_name("step-00000060") is None
    with pytest.raises(UsageError, match="32 lower-case"):
        check_save_id("../x")
