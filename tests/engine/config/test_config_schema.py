import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from zstore.engine.config.config import Config, load_config
from zstore.engine.config.keys import Section, Status, description, known_keys, section_of, status_of, type_of
from zstore.engine.config.optimizers import OPTIMIZERS
from zstore.engine.config.resolve import ResolveContext
from zstore.engine.config.sections import ConfigSections
from zstore.engine.config.values import expected
from zstore.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))
NAMES = sorted({path.rpartition(".")[2] for path, _ in known_keys(ConfigSections)})
NVME = {"device": "nvme", "nvme_path": "/local_nvme"}
ZERO = "zero_optimization"

# What the configs set beyond what acts, found by reading them.
WITHOUT_EFFECT = {
    "zero3_nvme_everything": {
        "optimizer.params.freeze_step",
        "optimizer.params.cuda_aware",
        "optimizer.params.comm_backend_name",
        "zero_optimization.sub_group_size",
        "zero_optimization.elastic_checkpoint",
        "zero_optimization.round_robin_gradients",
    },
    "zero3_typical": {"zero_optimization.sub_group_size"},
    "gpt_neo_zero2_cpu": {"zero_optimization.offload_optimizer.fast_init"},
}


def sections(section: type[Section] = ConfigSections) -> Iterator[type[Section]]:
    yield section
    for field in section.model_fields.values():
        inner = section_of(field)
        if inner is not None:
            yield from sections(inner)


def subclasses(kind: type[Section]) -> Iterator[type[Section]]:
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


def keys_of(config: Config) -> list[str]:
    return [notice.key for notice in config.notices]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_that_people_have_are_read_and_each_key_without_effect_reported_once(path: Path) -> None:
    config = load_config(path)
    assert load_config(str(path)) == load_config(config) == config
    assert sorted(keys_of(config)) == sorted(WITHOUT_EFFECT.get(path.stem, set()))
    assert all(notice.message.startswith("no effect: ") for notice in config.notices)


def test_every_key_has_a_type_in_words_a_description_and_a_reason() -> None:
    assert all(section.__doc__ for section in sections())
    for path, field in known_keys(ConfigSections):
        if section_of(field) is not None:
            continue
        status, why = status_of(field)
        assert expected(type_of(field)), path
        assert bool(why) == (status is not Status.ACTIVE), path
    for section in subclasses(Section):
        for name, field in section.model_fields.items():
            assert description(section, name) or status_of(field)[1] or section_of(field), (section, name)


def test_every_default_is_what_its_type_makes_of_it() -> None:
    for path, field in known_keys(ConfigSections):
        if section_of(field) is None and not field.is_required() and field.default is not None:
            assert TypeAdapter(type_of(field)).validate_python(field.default) == field.default, path


def test_every_key_that_does_not_act_is_reported_when_set() -> None:
    switches: dict[str, dict[str, Any]] = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}}
    switches |= {key: {"device": "cpu"} for key in ("offload_param", "offload_optimizer")}
    sections = ("fp16", "bf16", "tensorboard", "csv_monitor", "wandb", "throughput")
    switches |= {key: {"enabled": True} for key in sections}
    switches["elasticity"] = {"enabled": True, "max_train_batch_size": 4, "micro_batch_sizes": [1]}
    values: list[Any] = [True, False, 7, 0.5, "fp32", "x", "Ignore", "/x", {"enabled": True}, "cpu", "step", "random"]
    for path, field in known_keys(ConfigSections):
        status, _ = status_of(field)
        if section_of(field) is not None or status not in (Status.NOT_IMPLEMENTED, Status.NO_EFFECT):
            continue
        *outer, name = path.split(".")
        if outer == ["optimizer", "params"]:
            having = (one for one, kind in OPTIMIZERS.items() if kind.model_fields.get(name) is field)
            switches["optimizer"] = {"type": next(having)}
        for value in values:
            config: dict[str, Any] = {name: value}
            for section in reversed(outer):
                config = {section: switches.get(section, {}) | config}
            if ZERO in config:
                config[ZERO]["stage"] = 3
            try:
                reported = keys_of(load_config(config))
            except ConfigError:
                continue
            if value != field.default:
                assert reported.count(path) == 1, (path, value)
                break
        else:
            pytest.fail(f"no value tried suits {path}")


_OVERLAP = "zstore.step_overlap"
_MODE = {"zstore": {"step_overlap": "backward"}}
_CLIPS = {_OVERLAP: 'is treated as "forward": clipping'}
_NO_CLIP = {"gradient_clipping": 0.0}
REPORTED: list[tuple[dict[str, Any], dict[str, str]]] = [
    (  # what asks for what happens anyway
        {
            ZERO: {"reduce_scatter": True, "overlap_comm": False, "offload_param": {"device": "none"}},
            "tensorboard": {"enabled": False, "output_path": "/somewhere"},
            "amp": {"enabled": False, "opt_level": "O1"},
            "tensor_parallel": {"autotp_size": 0},
            "compile": {},
            "wall_clock_breakdown": False,
            "fp16": {"enabled": False, "min_loss_scale": 0},
            "communication_data_type": None,
            "zstore": {"step_overlap": "none"},
        },
        {},
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}},
            ZERO: {"stage": 2, "stage3_param_persistence_threshold": 10, "offload_optimizer": NVME | {"device": "cpu"}},
        },
        {
            "optimizer.params.adam_w_mode": "",
            "zero_optimization.stage3_param_persistence_threshold": "",
            "zero_optimization.offload_optimizer.nvme_path": "",
        },
    ),
    ({"wall_clock_breakdown": True, "memory_breakdown": True}, {}),
    (  # lines that come with those of progress
        {"wall_clock_breakdown": True, "memory_breakdown": True, "steps_per_print": 0},
        {"wall_clock_breakdown": "", "memory_breakdown": ""},
    ),
    ({"seq_parallel_communication_data_type": "fp32"}, {"seq_parallel_communication_data_type": ""}),
    ({"comet": {"enabled": True}}, {"comet": "not implemented: .*use tensorboard, wandb or csv_monitor"}),
    ({"sparse_gradients": True}, {"sparse_gradients": "not implemented: .*sparse=False"}),
    (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        {"bf16.bf16_master_weights_and_grads": "not implemented: .*zstore.moments"},
    ),
    ({"nebula": {"enabled": True}}, {"nebula": r"not implemented: .*save_checkpoint\(\)"}),
    (
        {ZERO: {"stage": 3, "zero_quantized_nontrainable_weights": True}},
        {"zero_optimization.zero_quantized_nontrainable_weights": "not implemented: frozen weights stay"},
    ),
    ({ZERO: {"stage": 2, "cpu_offload_use_pin_memory": True}}, {"zero_optimization.cpu_offload_use_pin_memory": ""}),
    (
        {"fp16": {"enabled": True}, "zstore": {"non_finite_gradients": "apply"}},
        {"zstore.non_finite_gradients": 'is treated as "skip" because of fp16.enabled'},
    ),
    # What the step mode comes to.
    (_MODE | {ZERO: {"stage": 3}, "gradient_clipping": 1.0}, _CLIPS),
    (_MODE | {ZERO: {"stage": 3}, "fp16": {"enabled": True}} | _NO_CLIP, _CLIPS),
    (_MODE | {ZERO: {"stage": 3}, "bf16": {"enabled": True, "check_grad_overflow": True}} | _NO_CLIP, _CLIPS),
    (_MODE | {ZERO: {"stage": 2}, "gradient_clipping": 1.0}, {_OVERLAP: 'is treated as "none": only what is gathered'}),
    (_MODE | {ZERO: {"stage": 1}} | _NO_CLIP, {_OVERLAP: 'is treated as "none": at stages 0 and 1'}),
    (_MODE | {ZERO: {"stage": 3}} | _NO_CLIP, {}),
    *(
        (
            {
                "optimizer": {"type": name},
                ZERO: {"stage": 3, "offload_param": {"device": "cpu"}},
                "zstore": {"step_overlap": "forward"},
            },
            reported,
        )
        for name, reported in (("Lamb", {_OVERLAP: 'is treated as "none": .*whole tensors'}), ("Lion", {}))
    ),
]


@pytest.mark.parametrize(("given", "reported"), REPORTED)
def test_each_key_that_is_treated_otherwise_is_reported_once(given: dict[str, Any], reported: dict[str, str]) -> None:
    config = load_config({"train_micro_batch_size_per_gpu": 1} | given).resolve(ResolveContext(world_size=2))
    assert sorted(keys_of(config)) == sorted(reported)
    for notice in config.notices:
        assert re.search(reported[notice.key], str(notice)), notice


_CPU = {"device": "cpu"}
_STAGE_1, _STAGE_2 = ({"stage": stage, "offload_optimizer": _CPU} for stage in (1, 2))
_STAGE_3 = {"stage": 3, "offload_param": _CPU}


@pytest.mark.parametrize(
    ("zero", "keys", "ranks", "mode"),
    [
        ({"stage": 3}, {}, 1, "none"),
        (_STAGE_3, {}, 2, "backward"),
        (_STAGE_1, {}, 1, "backward"),
        (_STAGE_1, {}, 2, "none"),
        (_STAGE_2, {}, 2, "backward"),
        (_STAGE_3, {"gradient_clipping": 1.0}, 1, "forward"),
        (_STAGE_3, {"fp16": {"enabled": True}}, 1, "forward"),
        (_STAGE_3, {"zstore": {"non_finite_gradients": "skip"}}, 1, "forward"),
        (_STAGE_3, {"optimizer": {"type": "Lamb"}}, 1, "none"),
    ],
)
def test_auto_updates_in_the_backward_where_anything_is_offloaded_and_no_norm_is_awaited(
    zero: dict[str, Any], keys: dict[str, Any], ranks: int, mode: str
) -> None:
    given = {"train_micro_batch_size_per_gpu": 1, ZERO: zero} | _NO_CLIP | keys
    resolved = load_config(given).resolve(ResolveContext(world_size=ranks))
    assert (resolved.step_overlap, keys_of(resolved)) == (mode, [])


def test_report_joins_keys_of_one_reason() -> None:
    lines = load_config({"prescale_gradients": True, "gradient_predivide_factor": 2.0}).report()
    assert len(lines) == 1
    assert lines[0].startswith("prescale_gradients, gradient_predivide_factor: not implemented: ")


def test_other_spellings() -> None:
    settings = load_config(
        {
            "bfloat16": {"enabled": True},
            "aio": {"intra_op_parallelism": 3},
            ZERO: {"stage": 3, "param_persistence_threshold": 5, "cpu_offload": True},
        }
    ).settings
    zero = settings.zero_optimization
    assert (settings.bf16.enabled, settings.aio.thread_count) == (True, 3)
    assert (zero.stage3_param_persistence_threshold, zero.offload_optimizer.device) == (5, "cpu")


@pytest.mark.parametrize(("value", "stage"), [(True, 1), (False, 0), ({"stage": 2.0}, 2), (None, 0)])
def test_the_zero_section_may_be_a_switch_or_a_stage(value: object, stage: int) -> None:
    assert load_config({ZERO: value}).stage == stage


def test_whole_floats_are_whole_numbers_and_endless_steps_never() -> None:
    config = load_config({ZERO: {"reduce_bucket_size": 2e8, "sub_group_size": 1e12}, "seed": 3.0})
    size = config.zero.reduce_bucket_size
    assert (size, type(size), config.settings.seed) == (200_000_000, int, 3)
    assert load_config({"steps_per_print": float("inf")}).settings.steps_per_print == 0


def test_a_dict_is_not_changed_and_not_kept() -> None:
    source: dict[str, Any] = {ZERO: {"cpu_offload": True, "stage": 1}, "optimizer": {"type": "adam", "params": {}}}
    before = copy.deepcopy(source)
    config = load_config(source)
    assert source == before
    source[ZERO]["stage"] = 2
    assert config.stage == 1


def test_a_config_is_frozen() -> None:
    config = load_config({})
    with pytest.raises(ValidationError):
        config.settings.zero_optimization.stage = 3  # type: ignore[misc]


# --- bad input: one config each, and what the error must say

BAD: list[tuple[dict[str, Any], str]] = [
    ({"zero_optimisation": {}}, r"zero_optimisation: unknown key; did you mean zero_optimization\?"),
    (
        {ZERO: {"stage": 1, "offload_optimizer": {"device": "cpu", "devise": "cpu"}}},
        r"offload_optimizer\.devise: unknown key; did you mean zero_optimization\.offload_optimizer\.device\?",
    ),
    ({"stage": 2}, r"stage: unknown key; it belongs in zero_optimization$"),
    ({ZERO: {"seed": 2}}, r"zero_optimization\.seed: unknown key; it belongs at the top of the config$"),
    ({"qqqq": 2}, r"qqqq: unknown key$"),
    ({"nvme_path": "/x"}, r"belongs in zero_optimization\.offload_optimizer or in zero_optimization\.offload_param$"),
    ({"micro_batch_size": 1}, r"did you mean train_micro_batch_size_per_gpu\?"),
    ({ZERO: {"prefetch": 1}}, r"did you mean zero_optimization\.stage3_prefetch_bucket_size\?"),
    ({"wandb": {"enabled": True, "entity": "x"}}, r"unknown key; the keys there are enabled, group, team, project$"),
    ({"optimizer": {"type": "Adam", "params": {"weight_decy": 0}}}, r"did you mean optimizer\.params\.weight_decay\?"),
    (  # a broken key brings no further problems of its own making
        {ZERO: {"stage": 4, "offload_optimizer": {"device": "cpu"}}},
        r"^config: zero_optimization\.stage: choose one of 0, 1, 2, 3; got 4",
    ),
    ({ZERO: {"stage": True}}, r"stage: choose one of 0, 1, 2, 3; got true"),
    ({ZERO: 3}, r"zero_optimization: expected an object .* got 3"),
    ({ZERO: {"stage": 1, "offload_optimizer": {"device": "disk"}}}, r'device: choose one of "none", "cpu", "nvme"'),
    ({ZERO: {"offload_param": {}}}, r"offload_param\.device: the key is missing; expected one of"),
    ({ZERO: {"offload_optimizer": {"device": "cpu"}}}, r'zero_optimization\.stage: "cpu" needs stage 1, 2 or 3'),
    ({ZERO: {"stage": 1, "offload_optimizer": {"device": "nvme"}}}, r"offload_optimizer\.nvme_path .* give the path"),
    ({ZERO: {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": ["/a", "/a"]}}}, "different paths"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, r"fp16\.enabled and bf16\.enabled: both are true"),
    ({"fp16": {"enabled": 1}}, r"fp16\.enabled: expected true or false or \"auto\", got 1"),
    ({"fp16": True}, r"fp16: expected an object with keys such as enabled, loss_scale"),
    ({"fp16": {"enabled": True, "loss_scale": float("nan")}}, r"loss_scale: expected a number of at least 0, got NaN"),
    ({"train_batch_size": 0}, r"train_batch_size: expected a whole number of at least 1 or \"auto\", got 0"),
    ({"train_batch_size": True}, r"train_batch_size: .*got true"),
    ({"train_batch_size": "8"}, r'train_batch_size: .*got "8"'),
    ({"gradient_clipping": -1}, r"gradient_clipping: expected a number of at least 0"),
    ({"optimizer": {"params": {}}}, r"optimizer\.type: the key is missing"),
    ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, r"betas: expected two numbers, each from 0 to below"),
    ({"optimizer": {"type": "FusedLamb", "params": {"amsgrad": True}}}, r"amsgrad: true is not supported: LAMB has no"),
    ({"optimizer": {"type": "fusedlion", "params": {"momentum": 1}}}, r"params\.momentum: unknown key here \(Adam and"),
    ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, r"set gradient_clipping at the top"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}}, r'choose one of "log", "linear"'),
    ({"aio": {"block_size": 1_000_000}}, r"aio\.block_size: expected a positive multiple of 4096, got 1000000"),
    ({"aio": {"num_threads": 2, "thread_count": 3}}, r'"num_threads" and "thread_count" are the same .* 2 and one 3'),
    ({"aio": {"num_threads": 0}}, r"config: aio\.num_threads: expected a whole number"),
    ({"zstore": {"host_budget_bytes": "all"}}, r'host_budget_bytes: expected .* or "auto", got "all"'),
    ({"zstore": {"step_overlap": "sideways"}}, r'step_overlap: choose one of "none", "backward", "forward", "auto"'),
    ({"amp": {"enabled": True}}, r"amp: \{\"enabled\": true\} is not supported: .*use bf16 or fp16"),
    ({"gradient_clipping": 10**400}, r"gradient_clipping: expected a number of at least 0 or"),
    ({"seed": -(10**5000)}, r"seed: expected a whole number of at least 0, got a value of type int"),
    ({"zstore": {"upload_folder": "~nobody-here/nvme"}}, r"no home folder for ~nobody-here: write an absolute path"),
    ({ZERO: {"stage": 1, "cpu_offload": True, "cpu_offload_use_pin_memory": "x"}}, r"offload_optimizer\.pin_memory"),
    ({"elasticity": {"enabled": True, "micro_batch_sizes": [1]}}, r"elasticity\.max_train_batch_size: required"),
    ({"tensor_parallel": {"autotp_size": 4}}, r"tensor_parallel: .* is not supported"),
    ({"gradient_allreduce_op": "sum"}, r'gradient_allreduce_op: "sum" is not supported'),
    ({"checkpoint": {"use_node_local_storage": True}}, r"use_node_local_storage: true is .*pass a shared folder"),
    ({"optimizer": {"type": "Adam", "params": 3}}, r"optimizer\.params: expected an object with keys .* lr, .* got 3"),
    ({"scheduler": {"type": "WarmupDecayLR"}}, r"scheduler\.params\.total_num_steps: the key is missing; expected"),
    ({"bf16": {"enabled": True}, "bfloat16": {}}, r'^config: "bfloat16" and "bf16" are the same setting'),
    ({"fp16": {"enabled": True, "min_loss_scale": 0}}, r"min_loss_scale: expected a number above 0 for a dynamic loss"),
    (
        {"elasticity": {"enabled": True, "max_train_batch_size": 2, "micro_batch_sizes": [4], "min_gpus": 0}},
        r"elasticity\.min_gpus: expected a whole number",
    ),
    *(
        ({"scheduler": {"type": name, "params": params}}, message)
        for name, params, message in (
            ("WarmupLR", {"total_num_steps": 5}, r"unknown key here \(.*have it\); the keys there are"),
            ("WarmupCosineLR", {"total_num_steps": 5, "warmup_min_lr": 0}, r"did you mean .*warmup_min_ratio\?"),
            ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step": 1}, r"mean .*first_step_size\?"),
            ("WarmupLR", {"lr": 1}, r"params\.lr: unknown key; it belongs in optimizer\.params"),
            ("LRRangeTest", {"lr_range_test_min_lr": []}, r"or a list with one per .*got \[\]"),
            ("WarmupLR", {"warmup_min_lr": [0, "auto"]}, r"warmup_min_lr: expected a number of at least 0"),
            ("WarmupLR", {"warmup_num_steps": -1}, r"warmup_num_steps: expected a whole number of at least 0"),
            ("OneCycle", {"cycle_min_lr": "auto", "cycle_max_lr": 1}, r'cycle_min_lr: .*got "auto"'),
            ("WarmupLR", 3, r"scheduler\.params: expected an object .*got 3"),
            ("Cosine", {"anything": 3}, r'choose one of "WarmupLR", .*"LRRangeTest"; got "Cosine"; or pass'),
        )
    ),
    *(
        (
            {"optimizer": {"type": "onebitadam"}} | beside,
            f'{key} and optimizer.type: .*remove [a-z_.]*{key} \\(stage 0 or 1\\), or set type "AdamW"',
        )
        for beside, key in (
            ({ZERO: {"stage": 2}}, r"zero_optimization\.stage"),
            ({ZERO: {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
            ({"zstore": {"moments": "bf16"}}, r"zstore\.moments"),
            ({"gradient_clipping": 1.0}, "gradient_clipping"),
        )
    ),
    ({"optimizer": {"type": "Adam", "params": {"differentiable": True}}}, r"differentiable: .*no gradient passes"),
    *(
        ({"optimizer": {"type": name, "params": {"lr": 1}}}, f'"ZeroOneAdam", "OneBitLamb"; got "{name}"; .*{advice}')
        for name, advice in (("LBFGS", "it calls the model again within"), ("Prodigy", "only at stage 0 without"))
    ),
    ({3: 4}, r"3: .*keys must be"),  # type: ignore[dict-item]
]


@pytest.mark.parametrize(("config", "message"), BAD, ids=lambda value: value[:60] if isinstance(value, str) else "")
def test_a_wrong_config_is_refused_with_the_key_and_the_reason(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(config)
    assert "problems" not in str(caught.value)


def test_all_problems_are_reported_together() -> None:
    config = {
        ZERO: {"stage": 0, "offload_optimizer": {"device": "cpu"}, "ovelap_comm": True},
        "fp16": {"enabled": True, "hysteresis": 0},
        "bf16": {"enabled": True},
        "optimizer": {"type": "Tiger", "params": {"anything": 1}},
        "amp": {"enabled": True},
        "train_batch_size": -1,
    }
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    lines = str(caught.value).splitlines()
    assert lines[0] == "config: 7 problems:"
    for part in ("ovelap", "offload_optimizer.device", "hysteresis", "bf16.enabled", "Tiger", "amp", "train_batch_"):
        assert sum(part in line for line in lines[1:]) == 1, part


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["auto", "nvme", "Adam", "/x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(list(ConfigSections.model_fields)) | st.text(), ANY, max_size=6))
def test_any_object_gives_a_config_or_a_config_error(source: dict[str, Any]) -> None:
    before = repr(source)
    try:
        load_config(source).resolve(ResolveContext(world_size=2))
    except ConfigError as error:
        assert str(error).startswith("config: ")  # noqa: PT017 - either outcome is right
    assert repr(source) == before


# --- sources


def test_a_file_with_comments(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('\ufeff{\n // stage\n "zero_optimization": {"stage": 4,}, # end\n "seed": -1}', encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: 2 problems:")
    path.write_text('\ufeff{\n // stage\n "zero_optimization": {"stage": 3,}, # end\n}', encoding="utf-8")
    assert load_config(path).stage == 3


def test_what_is_no_config_is_named(tmp_path: Path) -> None:
    sources: list[tuple[Any, str]] = [
        (tmp_path / "nothing.json", r"config file .*nothing\.json does not exist"),
        (tmp_path, r"cannot be read: .*directory"),
        ('{"train_batch_size": 1}', "expected the path of a config file, got JSON text"),
        ([1], "got list"),
    ]
    for source, message in sources:
        with pytest.raises(ConfigError, match=message):
            load_config(source)
