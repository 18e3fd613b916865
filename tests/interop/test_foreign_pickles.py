"""Pickles are data: what a plain one holds comes back, what another asks for is refused by name, and nothing is called."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pickle
import pickletools
import tracemalloc
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zstore.errors import CheckpointMismatchError, CorruptionError
from zstore.interop import pickles
from zstore.interop.deepspeed.values import Plain
from zstore.interop.pickled_numpy import NUMPY, numpy_value
from zstore.interop.pickles import Global, PickledObject, Table, inert, load_pickle

PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)


def load(data: bytes, table: Table | None = None) -> Any:
    return load_pickle(io.BytesIO(data), "it", table or {}, size=len(data))


keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.binary(max_size=5), st.tuples(st.integers()))
plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(),
        st.binary(),
        st.integers(-(2**900), 2**900),
    ),
    lambda inner: st.one_of(
        st.lists(inner), st.dictionaries(keys, inner), st.tuples(inner, inner), st.tuples(inner, inner, inner, inner)
    ),
    max_leaves=20,
)


@given(plain, st.sampled_from(PROTOCOLS))
@settings(max_examples=150, deadline=None)
def test_plain_values_come_back(value: Any, protocol: int) -> None:
    assert load(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_containers_become_plain_ones(protocol: int) -> None:
    shared = [1, 2]
    value = {
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "default": defaultdict(list, {"x": [3]}),
        "set": {1, 2},
        "frozen": frozenset("a"),
        "twice": [shared, shared],
    }
    found = load(pickle.dumps(value, protocol))
    assert found == {**value, "ordered": {"b": 1, "a": 2}, "default": {"x": [3]}}
    assert type(found["ordered"]) is dict
    assert list(found["ordered"]) == ["b", "a"]
    assert found["twice"][0] is found["twice"][1]


def test_a_value_may_hold_itself() -> None:
    value: list[Any] = []
    value.append(value)
    found = load(pickle.dumps(value))
    assert found[0] is found
    plain = Plain("it")
    assert isinstance(plain.of(found, "value"), list)
    assert "nested too deeply" in plain.left_out[0]


def test_what_refers_to_one_thing_many_times_is_not_walked_for_ever() -> None:
    value: list[Any] = [0]
    for _ in range(200):
        value = [value] * 50
    found = load(pickle.dumps(value))
    with pytest.raises(CorruptionError, match="too many parts"):
        Plain("it").of(found, "value")


class Caller:
    """Has a function called as it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = (function, args)

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_calls_of_functions_are_refused_by_name(protocol: int, tmp_path: Path) -> None:
    flag = tmp_path / "called"
    for caller, name in [
        (Caller(os.system, f"touch {flag}"), "posix.system"),
        (Caller(eval, f"open({str(flag)!r}, 'w')"), "eval"),
        (Caller(getattr, flag, "touch"), "getattr"),
        (Caller(Path, "/"), "pathlib"),
    ]:
        with pytest.raises(CheckpointMismatchError, match=name) as refused:
            load(pickle.dumps({"deep": [caller]}, protocol))
        assert "nothing was called" in str(refused.value)
    assert not flag.exists()


def test_a_global_of_the_table_may_not_be_turned_into_a_way_out() -> None:
    # A dotted name would lead from a module that is known to one that is not.
    for module, name in [
        ("collections", "OrderedDict.__init__"),
        ("collections", "abc.sys"),
        ("numpy", "dtype.__class__"),
    ]:
        data = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name)) + b"\x93."
        with pytest.raises(CheckpointMismatchError, match="nor a plain container"):
            load(data, NUMPY)


def test_what_may_be_named_may_not_be_called() -> None:
    with pytest.raises(CheckpointMismatchError, match=r"builtins\.int"):
        load(b"\x80\x02cbuiltins\nint\n)R.")
    for data in (b"\x80\x02K\x01)R.", b"\x80\x02X\x01\x00\x00\x00a)R.", b"\x80\x02]K\x01b.", b"\x80\x02)K\x01b."):
        with pytest.raises(CorruptionError):
            load(data)


def test_objects_of_known_classes_are_data() -> None:
    space = argparse.Namespace(lr=0.1, names=["a"])
    found = load(pickle.dumps(space), inert("argparse.Namespace"))
    assert isinstance(found, PickledObject)
    assert (found.name, found.get("lr"), found.get("names")) == ("argparse.Namespace", 0.1, ["a"])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numpy_comes_back(protocol: int) -> None:
    state = np.random.RandomState(3).get_state()
    arrays = [
        state[1],
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.eye(3, 2)),
        np.zeros((0, 3), bool),
    ]
    for array in arrays:
        found = load(pickle.dumps(array, protocol), NUMPY)
        if isinstance(found, PickledObject):
            value = numpy_value(found)
            assert isinstance(value, np.ndarray)
            np.testing.assert_array_equal(value, array)
        else:
            pytest.fail(f"{type(found)}")
    for number in (np.float64(0.25), np.int32(-7), np.bool_(True)):
        assert numpy_value(load(pickle.dumps(number, protocol), NUMPY)) == number


def test_numpy_of_another_byte_order_has_the_bytes_of_this_one() -> None:
    found = numpy_value(load(pickle.dumps(np.arange(3, dtype=">i4")), NUMPY))
    assert isinstance(found, np.ndarray)
    assert found.tobytes() == np.arange(3, dtype="<i4").tobytes()


def test_numpy_arrays_of_the_same_bytes_share_them() -> None:
    array = load(pickle.dumps(np.arange(1000), 2), NUMPY)
    plain = Plain("it")
    plain.of([array] * 50, "value")
    held = [value.__array_interface__["data"][0] for value in plain.tensors.values()]
    assert len(held) == 50
    assert len(set(held)) == 1
    turned = load(pickle.dumps(np.asfortranarray(np.ones((1000, 1000)))), NUMPY)
    plain.of([turned] * 20, "turned")
    assert any("too large to convert" in what for what in plain.left_out)


def test_a_text_that_is_there_a_million_times_is_left_out() -> None:
    plain = Plain("it")
    plain.of(["x" * 2**20] * 100, "value")
    assert 0 < len(plain.left_out) < 50
    assert "more text than a record has room for" in plain.left_out[0]


def test_numpy_arrays_of_objects_or_wrong_sizes_are_none() -> None:
    assert numpy_value(load(pickle.dumps(np.array([{}, []], dtype=object)), NUMPY)) is None
    short = PickledObject("numpy._core.multiarray._reconstruct")
    short.state = (1, (2**40,), PickledObject("numpy.dtype", ("f8",)), False, b"12345678")
    assert numpy_value(short) is None


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04r\xff\xff\xff\xff.",  # a place in the memo far away: nothing on the stack
        b"\x80\x04Nr\xff\xff\xff\x7f0N.",  # ... with something: costs an entry, not an array of that length
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # bytes of 8 EiB
        b"\x80\x05\x96\x00\x00\x00\x00\x10\x00\x00\x00.",  # a bytearray of 64 GiB
        b"\x80\x04X\xff\xff\xff\xff.",  # text of 4 GiB
        b"\x80\x04\x8b\x00\x00\x00\x40.",  # a number of a billion digits
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xffN.",  # a frame of 16 EiB: frames are not believed
    ],
)
def test_sizes_are_not_believed(data: bytes) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(CorruptionError):
            assert load(data) is None
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("call", [b"cbuiltins\nlist\n", b"cbuiltins\nset\n", b"ccollections\nOrderedDict\n"])
def test_a_long_list_is_not_copied_for_ever(call: bytes) -> None:
    items = b"](" + b"N" * 100_000 + b"e" if b"dict" not in call.lower() else b"](" + b"NN\x86" * 50_000 + b"e"
    many = call + b"q\x00" + items + b"q\x01" + b"h\x00h\x01\x85R" * 10_000
    with pytest.raises(CorruptionError, match="copies its parts to more than its own size"):
        load(b"\x80\x02" + many + b".")


def test_keys_are_hashed_without_depth() -> None:
    deep = b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"Ns."
    with pytest.raises(CorruptionError, match="cannot be a key"):
        load(deep)
    with pytest.raises(CorruptionError, match="cannot be a key"):
        load(b"\x80\x02}]Ns.")


def test_keys_of_many_parts_are_refused_at_once() -> None:
    wide = b"\x80\x02Nq\x00"
    for level in range(3):
        wide += b"(" + b"h" + bytes([level]) + (b"h" + bytes([level])) * 900 + b"tq" + bytes([level + 1])
    with pytest.raises(CorruptionError, match="cannot be a key"):
        load(wide + b"0}h\x03Ns.")


def test_more_lists_than_a_checkpoint_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a byte here, and 64 in memory."""
    assert len(load(pickle.dumps([[] for _ in range(30_000)]))) == 30_000
    monkeypatch.setattr(pickles, "_MOST_CONTAINERS", 1000)
    for one in (b"]", b"}", b"\x8f", b"("):
        with pytest.raises(CorruptionError, match="too many lists and dicts"):
            load(b"\x80\x04(" + one * 2000 + b".")


def test_the_memo_is_in_order() -> None:
    with pytest.raises(CorruptionError, match="memo entries are out of order"):
        load(b"\x80\x02Nq\x05.")
    assert load(b"\x80\x02K\x01q\x000K\x02q\x000h\x00.") == 2


def test_every_cut_is_an_error() -> None:
    data = pickle.dumps({"a": [1, 2.5, "text", b"bytes", (1, 2, 3), {4}], "b": OrderedDict(x=1)}, 4)
    for length in range(len(data)):
        with pytest.raises(CorruptionError):
            load(data[:length])


PLAIN = {type(None), bool, int, float, str, bytes, list, tuple, dict, set, PickledObject, Global}


def check_plain(value: Any) -> None:
    """Fail where something else than plain data is anywhere in `value`, which may hold itself."""
    due, seen = [value], set()
    while due:
        one = due.pop()
        assert type(one) in PLAIN
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, PickledObject):
            due += [*one.args, one.state]
        elif isinstance(one, dict):
            due += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set):
            due += one


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_noise_is_refused_or_plain(noise: bytes) -> None:
    with contextlib.suppress(CorruptionError, CheckpointMismatchError):
        check_plain(load(b"\x80\x04" + noise + b"."))


@given(st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_a_changed_byte_is_refused_or_plain(position: int, value: int) -> None:
    whole = bytearray(pickle.dumps({"a": list(range(40)), "b": OrderedDict(x=(1, "y")), "c": np.arange(5)}, 2))
    check_plain(load(bytes(whole), NUMPY))
    whole[position % len(whole)] = value
    with contextlib.suppress(CorruptionError, CheckpointMismatchError):
        check_plain(load(bytes(whole), NUMPY))


def test_opcodes_of_old_protocols_and_extensions_are_refused() -> None:
    for data in (b"I1\n.", b"\x80\x02\x82\x01.", b"(i__main__\nX\n.", b"\x80\x05\x97.", b"\x80\x09N."):
        with pytest.raises((CorruptionError, CheckpointMismatchError)):
            load(data)
    assert pickletools.code2op["I"].name == "INT"
