import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zstore.engine.config.parse import load_jsonc
from zstore.errors import ConfigError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=15
)
SPACE = ["", " ", "\n", "\r\n", "\t"]
NOISE = st.sampled_from([*SPACE, '// , } ] "\n', "# { [ : '\n", '/* " // \n # */', "/**/", "/***/"])


@st.composite
def noisy_json(draw: st.DrawFn) -> tuple[dict[str, Any], str]:
    """Return an object and a text of it with comments, white space and trailing commas at every place for them."""
    value = draw(st.dictionaries(st.text(), VALUES, max_size=4))

    def write(value: Any) -> str:
        def noise() -> str:
            return draw(NOISE)

        if isinstance(value, dict):
            items = [f"{json.dumps(key)}{noise()}:{noise()}{write(item)}" for key, item in value.items()]
            opening, closing = "{}"
        elif isinstance(value, list):
            items = [write(item) for item in value]
            opening, closing = "[]"
        else:
            return json.dumps(value, ensure_ascii=draw(st.booleans()))
        trailing = draw(st.sampled_from(["", ","])) if items else ""
        return opening + noise() + f"{noise()},{noise()}".join(items) + noise() + trailing + noise() + closing

    return value, draw(st.sampled_from(["", "\ufeff"])) + draw(NOISE) + write(value) + draw(NOISE)


@settings(max_examples=40)
@given(noisy_json())
def test_comments_and_trailing_commas_do_not_change_the_value(case: tuple[dict[str, Any], str]) -> None:
    value, text = case
    assert load_jsonc(text, "ds.json") == value


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.data())
def test_a_cut_text_is_an_error_with_line_and_column(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value, indent=1)
    end = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(ConfigError, match=r"^ds\.json:\d+:\d+: "):
        load_jsonc(text[:end], "ds.json")


@given(st.text())
def test_any_text_gives_an_object_or_a_config_error(text: str) -> None:
    try:
        assert isinstance(load_jsonc(text, "ds.json"), dict)
    except ConfigError as error:
        assert str(error).startswith("ds.json:")  # noqa: PT017 - either outcome is right


def test_number_kinds_are_kept() -> None:
    value = load_jsonc('{"a": 1e9, "b": 10, "c": -0.5, "d": 1E-8}', "ds.json")
    assert value == {"a": 1e9, "b": 10, "c": -0.5, "d": 1e-8}
    assert [type(item) for item in value.values()] == [float, int, float, float]


def test_hjson_is_read_by_its_package_where_that_is_installed() -> None:
    pytest.importorskip("hjson")  # comes with DeepSpeed
    assert load_jsonc("{\n device: nvme # which\n betas: [0.9]\n}", "ds.json") == {"device": "nvme", "betas": [0.9]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b": {},\n "a": 2}', r'ds\.json: key "a" is given twice in one object; keep one'),
        ('{"a": 1 "b": 2}', r"ds\.json:1:9: Expecting ',' delimiter, got '\"b\":'"),
        ('{"a": True}', r"ds\.json:1:7: Expecting value, got 'True}'"),
        ("{a: 1}", r"ds\.json:1:2: Expecting property name enclosed in double quotes, got 'a:'"),
        ('{\n/* a\n */"a": 01}', r"ds\.json:3:10: "),
        ('{"a": 1e999}', r"number 1e999 is too large"),
        ('{"a": ' + "9" * 5000 + "}", r"ds\.json: Exceeds the limit .*digits"),
        ('{"a": NaN}', r"expected a number, got NaN"),
        ('{"a": 1 /* x }', r"ds\.json:1:9: "),
        ("[1]", r"ds\.json: expected an object, starting with \"{\", got list"),
        ("", r"ds\.json:1:1: Expecting value, got the end of the text"),
        ('{"a":' * 100_000, r"nested too deep"),
    ],
)
def test_bad_text_is_an_error_that_says_where(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_jsonc(text, "ds.json")
