"""Names on disk: tags, arrays, and what belongs to a save."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstore.checkpoint.names import (
    array_path,
    check_save_id,
    encode_name,
    new_save_id,
    own_name,
    parse_own_name,
    shard_file,
    step_tag,
    tag_folder,
    tag_text,
)
from zstore.errors import UsageError

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
    assert parse_own_name(encoded) is None
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
    assert parse_own_name(own_name("a.tmp-b", "old", save_id)) == ("a.tmp-b", "old", save_id)
    assert parse_own_name("step-00000060") is None
    with pytest.raises(UsageError, match="32 lower-case"):
        check_save_id("../x")
