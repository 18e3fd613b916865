"""Names of torch.distributed.checkpoint and ours, there and back."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstore.errors import CheckpointMismatchError, CorruptionError
from zstore.interop.dcp_state import DcpState, NotPlainError, Path, decode_value, encode_value, key_of, name_arrays


def there_and_back(paths: list[Path]) -> dict[str, str]:
    """The arrays by key, once it is sure that the paths come back."""
    names = name_arrays({key_of(path): path for path in paths})
    state = DcpState(paths={names[key_of(path)]: path for path in paths})
    document = json.loads(json.dumps(state.document()))
    assert DcpState.of({"dcp": document}, names.values()) == state
    return names


@pytest.mark.parametrize(
    "arrays",
    [
        {
            ("app", "model", "h.0.weight"): "model/h.0.weight",
            ("app", "optim", "state", "h.0.weight", "exp_avg"): "optimizer/exp_avg/h.0.weight",
            ("app", "optim", "state", "h.0.weight", "step"): "optimizer/step/h.0.weight",
        },
        {
            ("model", "h.0.weight"): "model/h.0.weight",
            ("optimizer", "state.h.0.weight.exp_avg"): "optimizer/exp_avg/h.0.weight",
        },
        {  # weights at the top, as torchtitan has them
            ("layers.0.wq.weight",): "model/layers.0.wq.weight",
            ("optimizer", "state.layers.0.wq.weight.exp_avg"): "optimizer/exp_avg/layers.0.wq.weight",
            ("train_state", "step"): "client/train_state.step",
        },
        {("model", "model.embed_tokens.weight"): "model/model.embed_tokens.weight"},
        {("model.embed_tokens.weight",): "model/model.embed_tokens.weight"},
        {  # several models keep apart
            ("gen", "model", "w"): "model/gen.model.w",
            ("disc", "model", "w"): "model/disc.model.w",
            ("gen", "optim", "state", "w", "exp_avg"): "optimizer/exp_avg/w",
        },
    ],
)
def test_names_of_models_and_optimizers(arrays: dict[Path, str]) -> None:
    assert list(there_and_back(list(arrays)).values()) == list(arrays.values())


@given(
    st.sets(
        st.lists(
            st.one_of(
                st.sampled_from(["model", "optim", "optimizer", "state", "w", "state.w.m", "a/b"]), st.integers(0, 2)
            ),
            min_size=1,
            max_size=4,
        ).map(tuple),
        max_size=8,
    )
)
def test_every_path_comes_back(paths: set[Path]) -> None:
    by_key = {key_of(path): path for path in paths if type(path[0]) is str}
    arrays = there_and_back(list(by_key.values()))
    assert len(set(arrays.values())) == len(arrays)


PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.just("$x")), inner),
    ),
    max_leaves=8,
)


def same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@given(PLAIN)
def test_plain_data_comes_back_with_its_types(value: object) -> None:
    assert same(decode_value(encode_value(value)), value)


def test_what_is_not_plain_is_said() -> None:
    class Odd(dict):  # type: ignore[type-arg]
        pass

    for value in (object(), {1, 2}, Odd(), [1j]):
        with pytest.raises(NotPlainError):
            encode_value(value)
    assert math.isnan(decode_value(encode_value(math.nan)))


def test_what_takes_megabytes_is_no_plain_data() -> None:
    doubled: list[object] = ["x"]
    for _ in range(24):
        doubled = [doubled] * 10
    for value in (doubled, ["x" * 1000] * 2**20, [bytes(2**20)] * 100, 2**1_000_000):
        with pytest.raises(NotPlainError, match="too large"):
            encode_value(value)


def test_a_damaged_record_is_refused() -> None:
    good = DcpState(paths={"model/w": ("w",)}, values=[(("lr",), 0.1)]).document()
    assert DcpState.of({"dcp": good}, ["model/w"]).values == [(("lr",), 0.1)]
    for broken in (
        [],
        good | {"values": [[1]]},
        good | {"values": [["lr", 1]]},
        good | {"paths": {"model/w": [None]}},
        good | {"paths": ["model/w"]},
        good | {"opaque": {"client/x": "exec"}},
    ):
        with pytest.raises(CorruptionError):
            DcpState.of({"dcp": broken}, ["model/w"])
    former = {"version": 1, "model": ["app", "model"], "optimizer": None, "optimizer_form": "nested", "paths": {}}
    for other in (former, {"paths": {}}, good | {"version": 3}):
        with pytest.raises(CheckpointMismatchError, match="convert it again"):
            DcpState.of({"dcp": other}, ["model/w"])
    with pytest.raises(CorruptionError, match="unknown type"):
        decode_value({"$exec": "x"})
