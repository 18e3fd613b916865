"""What a config that asks for something that is not there is answered with; each key at each stage; the page of keys."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zstore
from docs.config_docs import END, all_keys, mark, missing_keys, updated
from zstore.engine.build.store import store_key
from zstore.engine.config.config import add_config_arguments, load_config
from zstore.engine.config.keys import Status, known_keys, section_of, status_of
from zstore.engine.config.optimizers import ALIASES, OPTIMIZERS
from zstore.engine.config.parse import explain, load_jsonc
from zstore.engine.config.resolve import ResolveContext
from zstore.engine.config.sections import ConfigSections
from zstore.engine.extras import register_parts
from zstore.engine.extras.one_bit import OneBitStep
from zstore.engine.optim.rules import classes, rule_of
from zstore.engine.plan.plan import placement_settings
from zstore.errors import ConfigError


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_offload_param_below_stage_3_is_reported_and_ignored(stage: int, device: str) -> None:
    """DeepSpeed-Chat writes it at stage 2. Nothing of the section acts, its missing path included."""
    zero: dict[str, Any] = {"stage": stage, "offload_param": {"device": device, "pin_memory": True}}
    config = load_config({"train_batch_size": 1, "zero_optimization": zero})
    (notice,) = config.notices
    assert str(notice).startswith(
        "zero_optimization.offload_param: not implemented: parameters are offloaded at stage 3 only"
    )
    assert f"At stage {stage} they stay unsharded" in notice.message
    zero["offload_param"]["nvme_path"] = "/local_nvme"
    for loaded in (config, load_config({"train_batch_size": 1, "zero_optimization": zero})):
        resolved = loaded.resolve(ResolveContext(world_size=1))
        assert (resolved.offload_param.device, resolved.offload_param.nvme_paths) == ("none", ())
        assert (resolved.pin_memory, resolved.step_overlap) == (False, "none")
        settings = placement_settings(resolved, budget_bytes=None, device_is_host=False)
        assert settings.parameters == "none"
        assert store_key(resolved) == store_key(load_config({"zero_optimization": {"stage": stage}}))
    zero["stage"] = 3
    config = load_config({"train_batch_size": 1, "zero_optimization": zero})
    assert (config.notices, config.offload_param.device, config.pin_memory) == ((), device, True)


def test_the_old_form_of_pinned_offload_pins() -> None:
    old = {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": True}
    config = load_config({"zero_optimization": old})
    assert (config.notices, config.offload_optimizer.device, config.pin_memory) == ((), "cpu", True)


def test_every_optimizer_of_the_engine_has_a_name_and_arguments_of_its_own() -> None:
    register_parts()
    rules = {name: rule_of(kind) for name, kind in classes().items() if kind.__module__.startswith(("torch", "zstore"))}
    assert rules.keys() - {"MuonWithAdam"} == OPTIMIZERS.keys()
    for name, params in OPTIMIZERS.items():
        stepper = rules[name].stepper
        assert (params.whole_tensors, params.replicates_state) == (stepper is not None, stepper is OneBitStep)
    for name, usual in {**ALIASES, **{kind.upper(): kind for kind in OPTIMIZERS}}.items():
        config = load_config({"optimizer": {"type": name}})
        assert config.settings.optimizer.type == usual
        assert type(config.settings.optimizer.params) is OPTIMIZERS[usual]


def test_errors_and_notices_name_the_file_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"train_batch_size": "auto", "zero_optimization": {"stage": 1, "qqq": 3}}')
    with pytest.raises(ConfigError, match=r"^ds\.json: zero_optimization\.qqq: unknown key$"):
        load_config("ds.json")
    Path("ds.json").write_text('{"train_batch_size": "auto"}')
    with pytest.raises(ConfigError, match=r"^ds\.json: no batch size is given"):
        load_config("ds.json").resolve(ResolveContext(world_size=1))
    with pytest.raises(ConfigError, match=r"^ds\.json: nope: unknown key$"):
        load_config({"nope": 1}, name="ds.json")


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON_VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=15
)
SPACE = ["", " ", "\n", "\r\n", "\t"]
NOISE = st.sampled_from([*SPACE, '// , } ] "\n', "# { [ : '\n", '/* " // \n # */', "/**/", "/***/"])


@st.composite
def noisy_json(draw: st.DrawFn) -> tuple[dict[str, Any], str]:
    value = draw(st.dictionaries(st.text(), JSON_VALUES, max_size=4))

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


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4), st.data())
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


# By DeepSpeed's documentation of ZeRO: stage 1 shards optimizer state, 2 gradients, 3 parameters. Of all other keys the stages
# are 0 to 3.
STAGES: dict[str, tuple[int, ...]] = {
    "allgather_bucket_size": (1, 2, 3),
    "leaf_module.classes": (3,),
    "leaf_module.name_suffixes": (3,),
    "leaf_module.names": (3,),
    "offload_optimizer": (1, 2, 3),
    "offload_param": (3,),
    "reduce_scatter": (1, 2),
    "stage3_max_live_parameters": (3,),
    "stage3_max_reuse_distance": (3,),
    "stage3_model_persistence_threshold": (3,),
    "stage3_param_persistence_threshold": (3,),
    "stage3_prefetch_bucket_size": (3,),
    "zero_hpz_partition_size": (3,),
    "zero_quantized_gradients": (2, 3),
    "zero_quantized_weights": (3,),
}
VALUES: dict[str, Any] = {
    "leaf_module.classes": ["Moe"],
    "leaf_module.name_suffixes": ["moe"],
    "leaf_module.names": ["moe"],
    "offload_optimizer.device": "cpu",
    "offload_optimizer.ratio": 0.5,
    "offload_param.device": "cpu",
}
"""Values of keys that are neither true or false nor numbers."""
SECTIONS: dict[str, dict[str, Any]] = {
    "offload_optimizer": {"device": "nvme", "nvme_path": "/drive"},
    "offload_param": {"device": "nvme", "nvme_path": "/drive"},
}
KEYS = [
    key.partition(".")[2]
    for key, field in known_keys(ConfigSections)
    if key.startswith("zero_optimization.") and section_of(field) is None and status_of(field)[0] is Status.ACTIVE
]
ACTING = [key for key in KEYS if key != "stage"]


def _section(key: str) -> dict[str, Any]:
    fields = {name.partition(".")[2]: field for name, field in known_keys(ConfigSections)}
    default = fields[key].default
    value = VALUES.get(key, not default if isinstance(default, bool) else 3)
    if key.endswith("nvme_path"):
        value = "/drive"
    section, _, name = key.rpartition(".")
    return {section: SECTIONS.get(section, {}) | {name: value}} if section else {key: value}


@pytest.mark.parametrize("key", ACTING)
@pytest.mark.parametrize("stage", range(4))
def test_a_key_acts_at_its_stages_alone_and_is_told_of_at_others(key: str, stage: int) -> None:
    config = {"train_batch_size": 1, "zero_optimization": _section(key) | {"stage": stage}}
    acts = stage in STAGES.get(key, STAGES.get(key.partition(".")[0], range(4)))
    facts, problems = explain(config)
    (status,) = {fact.status for fact in facts if fact.key == f"zero_optimization.{key}"}
    if problems:  # of the config, which no run takes
        with pytest.raises(ConfigError) as raised:
            load_config(config)
        told = str(raised.value)
    else:
        assert (status == "active") is acts, status
        told = " ".join(load_config(config).report())
    if acts:
        assert not problems
        return
    assert key.partition(".")[0] in told
    assert f"stage is {stage}" in told or f"stage {stage}" in told


def test_a_key_in_an_older_spelling_has_the_status_of_todays() -> None:
    config = {"zero_optimization": {"stage": 1, "prefetch_bucket_size": 5}}
    (fact,) = (fact for fact in explain(config)[0] if fact.key.endswith("prefetch_bucket_size"))
    assert (fact.status, fact.key) == ("no effect", "zero_optimization.prefetch_bucket_size")


DOCUMENT = Path(__file__).parents[3] / "docs" / "config.md"
SOURCES = Path(zstore.__file__).parent
GIVEN_WHOLE = ("optimizer.params.", "scheduler.params.", "sparse_attention.")
"""Arguments that are looked up by name; their own tests say what they do."""


def test_the_document_is_up_to_date() -> None:
    page = DOCUMENT.read_text(encoding="utf-8")
    assert all_keys() in page
    assert page == updated(page), "run: python docs/config_docs.py"


def test_every_key_is_in_a_table_of_those_that_act_or_of_those_that_do_not() -> None:
    rows = [line for line in all_keys().splitlines() if line.startswith("| `")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {5}
    active_values, others = re.findall(r"^(?:## |\| `)(?:[\w.]+\.)?(\w+)", all_keys(), re.MULTILINE), missing_keys()
    for path, _ in known_keys(ConfigSections):
        assert path.rpartition(".")[2] in active_values or f"`{path}`" in others, path


def test_the_command_writes_it(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("config.md", "deepspeed.md"):
        (tmp_path / "docs" / name).write_text(f"before\n{mark('keys')}old\n{END}after\n")
    subprocess.run([sys.executable, DOCUMENT.with_name("config_docs.py")], check=True, cwd=tmp_path)
    assert (tmp_path / "docs/config.md").read_text() == f"before\n{mark('keys')}{all_keys()}{END}after\n"


def test_arguments_of_deepspeed_scripts() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    assert add_config_arguments(parser) is parser
    none = parser.parse_args([])
    assert (none.deepspeed, none.deepspeed_config, none.deepscale, none.deepscale_config) == (False, None, False, None)
    given = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json", "--local_rank", "1"])
    assert (given.deepspeed, given.deepspeed_config) == (True, "ds.json")
    assert "--deepspeed_config PATH" in parser.format_help()
    assert "deepscale" not in parser.format_help()


def test_every_key_that_acts_is_read() -> None:
    """No key acts in its documentation alone: each that is said to act is read somewhere in the product."""
    paths = [*SOURCES.rglob("*.py"), *(SOURCES / "engine").rglob("*.py"), *(SOURCES / "tools").rglob("*.py")]
    read = set(re.findall(r"\.([a-z]\w+)\b", "\n".join(path.read_text(encoding="utf-8") for path in paths)))
    active_values = [
        path
        for path, field in known_keys(ConfigSections)
        if section_of(field) is None and status_of(field)[0] is Status.ACTIVE and not path.startswith(GIVEN_WHOLE)
    ]
    assert len(active_values) > 50
    assert {path for path in active_values if path.rpartition(".")[2] not in read} == set()
