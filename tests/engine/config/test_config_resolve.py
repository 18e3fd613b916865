import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstore.checkpoint.retention import Keep
from zstore.engine.config.config import Config, load_config
from zstore.engine.config.keys import auto_value_type, known_keys
from zstore.engine.config.optimizers import WarmupLRParams
from zstore.engine.config.resolve import BatchSizes, ResolveContext, open_keys, read_auto_values, solve_batch
from zstore.engine.config.sections import ConfigSections
from zstore.engine.plan.plan import store_options
from zstore.errors import ConfigError, UsageError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))
_ADAM: dict[str, Any] = {"lr": 2e-4, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
_ANSWERS = {f"optimizer.params.{name}": value for name, value in _ADAM.items()} | {"train_micro_batch_size_per_gpu": 3}
_ANSWERS |= {"scheduler.params.warmup_min_lr": 0.0, "scheduler.params.warmup_num_steps": 7}
CALLER = ResolveContext(world_size=2, hidden_size=64, native=("bf16",), auto_values=_ANSWERS)
SMALL = st.integers(1, 40)
_PLAIN = {"amsgrad": False, "maximize": False}


def resolved(config: dict[str, Any], **context: Any) -> Config:
    settings = {"train_micro_batch_size_per_gpu": 1} | config
    return load_config(settings).resolve(ResolveContext(**{"world_size": 1, **context}))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_that_people_have_become_plain_data(path: Path) -> None:
    config = load_config(path)
    context = CALLER if config.settings.train_batch_size != 1 else ResolveContext(world_size=1)
    plain = config.resolve(context)
    assert list(open_keys(plain.settings)) == []
    assert plain.notices == config.notices
    sizes = plain.batch
    assert sizes.train_batch_size == sizes.micro_batch_size * sizes.accumulation_steps * context.world_size
    # The section of our own keeps "auto" where it is a choice.
    for name in [name for name, value in vars(Config).items() if isinstance(value, property) and name != "zstore"]:
        assert "'auto'" not in repr(getattr(plain, name))
    assert plain.resolve(context) == plain


def test_the_largest_config_in_full() -> None:
    config = load_config(CONFIGS[0].parent / "zero3_nvme_everything.json").resolve(CALLER)
    assert config.batch == BatchSizes(train_batch_size=6, micro_batch_size=3, accumulation_steps=1)
    assert (config.precision, config.loss_scaling) == ("bf16", None)
    arguments = {"lr": 2e-4, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    assert (config.settings.optimizer.kind, config.settings.optimizer.arguments()) == ("AdamW", arguments | _PLAIN)
    assert dict(config.settings.scheduler.params) == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 2e-4,
        "warmup_num_steps": 7,
        "warmup_type": "log",
        "last_batch_iteration": -1,
    }
    assert (config.stage, config.gradient_clipping, config.settings.steps_per_print) == (3, 1.0, 100)
    assert (config.offload_optimizer.device, config.offload_optimizer.nvme_paths) == ("nvme", (Path("/local_nvme"),))
    assert (config.offload_param.device, config.offload_param.nvme_paths) == ("nvme", (Path("/local_nvme"),))
    assert (config.zero.reduce_bucket_size, config.zero.allgather_bucket_size) == (200_000_000, 200_000_000)
    assert config.zero.stage3_param_persistence_threshold == 1_000_000


def test_sizes_are_from_the_hidden_size_or_those_of_keys_that_are_not_set() -> None:
    names = ["reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"]
    names.append("stage3_param_persistence_threshold")
    sections = {"zero_optimization": {"stage": 3} | dict.fromkeys(names, "auto")}
    config = resolved(sections, hidden_size=100)
    assert [getattr(config.settings.zero_optimization, name) for name in names] == [10_000, 10_000, 9_000, 1_000]
    auto, plain = resolved(sections), resolved({"zero_optimization": {"stage": 3}})
    assert auto.settings.zero_optimization == plain.settings.zero_optimization
    assert [notice.key for notice in auto.notices] == ['"auto"']


def test_what_has_no_default_is_named_all_at_once_with_how_to_answer() -> None:
    path = CONFIGS[0].parent / "zero3_nvme_everything.json"
    with pytest.raises(ConfigError) as caught:
        load_config(path).resolve(ResolveContext(world_size=2))
    assert str(caught.value).startswith(f"{path}: no batch size is given: ")
    assert 'initialize(..., auto={"train_micro_batch_size_per_gpu": 1})' in str(caught.value)
    decay = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
    with pytest.raises(ConfigError) as caught:
        load_config(decay).resolve(ResolveContext(world_size=2))
    assert str(caught.value).startswith("config: 2 problems:")
    assert 'total_num_steps: "auto" has no default; set a number, or pass' in str(caught.value)
    assert 'initialize(..., auto={"scheduler.params.total_num_steps": ...})' in str(caught.value)


def test_what_nobody_answers_is_the_default_and_one_line_tells_it() -> None:
    path = CONFIGS[0].parent / "zero3_nvme_everything.json"
    auto_values = read_auto_values({"train_batch_size": 4})
    config = load_config(path).resolve(ResolveContext(world_size=2, auto_values=auto_values))
    assert config.batch == BatchSizes(train_batch_size=4, micro_batch_size=2, accumulation_steps=1)
    arguments = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert (config.settings.optimizer.kind, config.settings.optimizer.arguments()) == ("AdamW", arguments | _PLAIN)
    params = config.settings.scheduler.params
    assert isinstance(params, WarmupLRParams)
    assert (params.warmup_min_lr, params.warmup_max_lr, params.warmup_num_steps) == (0.0, 1e-3, 1000)
    (line,) = [str(notice) for notice in config.notices if notice.key == '"auto"']
    assert (
        "optimizer.params.lr = 0.001, optimizer.params.betas = [0.9, 0.999], optimizer.params.eps = 1e-08, "
        "optimizer.params.weight_decay = 0.0, scheduler.params.warmup_num_steps = 1000, "
        "scheduler.params.warmup_min_lr = 0.0. "
    ) in line
    assert 'initialize(..., auto={"optimizer.params.lr": ...})' in line


def test_answers_may_be_dotted_or_nested_in_any_spelling() -> None:
    nested = {
        "optimizer": {"params": {"lr": 1, "betas": [0.5, 0.6], "eps": None}},
        "bfloat16": {"enabled": True},
        "zero_optimization.prefetch_bucket_size": 1e6,
        "scheduler.params": {"total_num_steps": 5},
    }
    assert read_auto_values(nested) == {
        "optimizer.params.lr": 1.0,
        "optimizer.params.betas": (0.5, 0.6),
        "bf16.enabled": True,
        "zero_optimization.stage3_prefetch_bucket_size": 1_000_000,
        "scheduler.params.total_num_steps": 5,
    }
    assert read_auto_values(None) == {}


def test_every_key_that_may_be_auto_can_be_answered() -> None:
    values: list[Any] = [1, True, [0.5, 0.5]]
    keys = {path for path, field in known_keys(ConfigSections) if auto_value_type(field) is not None}
    assert len(keys) > 15
    for key in keys:
        accepted = []
        for value in values:
            with contextlib.suppress(ConfigError):
                accepted.append(read_auto_values({key: value}))
        assert accepted, key
        assert list(accepted[0]) == [key]


@pytest.mark.parametrize(
    ("auto", "message"),
    [
        ({"optimizer.params.lrr": 1}, r"optimizer\.params\.lrr: unknown key; did you mean optimizer\.params\.lr\?"),
        ({"seed": 1}, r'seed: this key cannot be "auto"'),
        ({"optimizer.params.lr": "fast"}, r'optimizer\.params\.lr: expected a number of at least 0, got "fast"'),
        ({"bf16.enabled": "auto"}, r'bf16\.enabled: expected true or false, got "auto"'),
        ({"train_batch_size": 0}, r"train_batch_size: expected a whole number of at least 1, got 0"),
        ({"optimizer": 3}, r"optimizer: expected an object with keys of that section, got 3"),
        ({3: 4}, r"3: unknown key"),
        (
            {"optimizer.params.lr": 1, "optimizer": {"params": {"lr": 2}}},
            r"optimizer\.params\.lr: given twice, as 1\.0 and as 2\.0",
        ),
        ([1], r"expected a dict of config keys and values, got list"),
    ],
)
def test_wrong_answers_to_auto_are_refused(auto: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^initialize\(auto=\.\.\.\): " + message):
        read_auto_values(auto)


def test_an_answer_that_is_not_asked_for_is_not_used() -> None:
    auto_values = read_auto_values({"optimizer.params.lr": 1.0, "train_batch_size": 9, "bf16.enabled": True})
    config = resolved({"optimizer": {"type": "Adam", "params": {"lr": 0.5}}}, auto_values=auto_values)
    rate = config.settings.optimizer.arguments()["lr"]
    assert (rate, config.precision, config.batch.train_batch_size) == (0.5, "fp32", 1)


def test_answers_that_contradict_are_refused() -> None:
    auto = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    with pytest.raises(ConfigError, match=r"^config: fp16\.enabled and bf16\.enabled: both are true"):
        resolved(auto, auto_values={"fp16.enabled": True, "bf16.enabled": True})
    assert resolved(auto, auto_values={"fp16.enabled": True}).precision == "fp16"
    assert resolved(auto, auto_values={"fp16.enabled": False, "bf16.enabled": False}).precision == "fp32"
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    with pytest.raises(ConfigError, match="train_batch_size 5 is not a multiple of"):
        resolved(sizes, auto_values={"train_batch_size": 5, "train_micro_batch_size_per_gpu": 2})


@pytest.mark.parametrize(
    ("fp16", "bf16", "native", "precision"),
    [
        (True, None, "", "fp16"),
        (None, True, "", "bf16"),
        ("auto", "auto", "bf16 fp16", "bf16"),
        ("auto", "auto", "fp16", "fp16"),
        ("auto", "auto", "", "fp32"),
        (True, "auto", "bf16 fp16", "fp16"),
        ("auto", False, "bf16 fp16", "fp16"),
        ("auto", None, "bf16", "fp32"),
        (None, "auto", "bf16", "bf16"),
    ],
)
def test_precision_follows_the_sections_and_the_device(fp16: object, bf16: object, native: str, precision: str) -> None:
    config = {"fp16": {"enabled": fp16}, "bf16": {"enabled": bf16}}
    assert resolved(config, native=native.split()).precision == precision


@pytest.mark.parametrize(
    ("kind", "params", "decoupled", "decay"),
    [
        ("Adam", {}, True, 0.0),
        ("adam", {"adam_w_mode": False}, False, 0.0),
        ("AdamW", {"adam_w_mode": False}, True, 0.0),
        ("AdamW", {"torch_adam": True}, True, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, False, 0.0),
        ("AdamW", {"torch_adam": True, "weight_decay": 0}, True, 0.0),
    ],
)
def test_adam_is_adamw_unless_told_otherwise(kind: str, params: dict[str, Any], decoupled: bool, decay: float) -> None:
    optimizer = resolved({"optimizer": {"type": kind, "params": params}}).settings.optimizer
    assert (optimizer.kind, optimizer.arguments()["weight_decay"]) == ("AdamW" if decoupled else "Adam", decay)
    assert [optimizer.arguments()[name] for name in ("lr", "betas", "eps")] == [1e-3, (0.9, 0.999), 1e-8]


def test_the_warm_up_ends_at_the_optimizers_lr() -> None:
    """Unset, at that of each group, which may be another."""
    schedule = {"scheduler": {"type": "WarmupLR"}}
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 0.25}}}
    auto = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}
    cases = ((schedule, False, None), (schedule | adam, False, None), (auto | adam, False, 0.25), (auto, True, None))
    for config, passed, highest in cases:
        assert resolved(config, client_optimizer=passed).settings.scheduler.params.warmup_max_lr == highest


def test_what_the_caller_passes_replaces_the_sections() -> None:
    config = load_config(
        {
            "train_batch_size": 2,
            "optimizer": {"type": "Adam", "params": {"lr": "auto", "freeze_step": 3}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        }
    ).resolve(ResolveContext(world_size=1, client_optimizer=True, client_scheduler=True))
    assert (config.settings.optimizer, config.settings.scheduler) == (None, None)
    assert [notice.key for notice in config.notices] == ["optimizer", "scheduler"]


def test_io_and_settings_of_our_own() -> None:
    config = resolved(
        {
            "aio": {"block_size": 1 << 20, "queue_depth": 4, "intra_op_parallelism": 2},
            "zstore": {"host_budget_bytes": 1e9, "keep": 2, "verify_reads": False},
            "seed": 5,
        }
    )
    found = store_options(config, None)
    assert (found.block_bytes, found.queue_depth, found.num_threads, found.verify) == (1 << 20, 4, 2, False)
    assert (config.zstore.host_budget_bytes, config.zstore.keep) == (10**9, Keep(last=2))
    assert (found.max_pool_bytes, config.settings.seed) == (128 << 20, 5)
    assert resolved({"zstore": {"host_budget_bytes": "auto"}}).zstore.host_budget_bytes == "auto"


def test_an_unresolved_config_does_not_hand_out_what_may_be_auto() -> None:
    with pytest.raises(UsageError, match=r"call resolve\(\)"):
        _ = load_config({"train_batch_size": 4}).batch


# --- batch sizes


@given(micro=SMALL, accumulation=SMALL, world_size=SMALL)
def test_any_two_batch_sizes_give_the_third(micro: int, accumulation: int, world_size: int) -> None:
    train = micro * accumulation * world_size
    expected = BatchSizes(train_batch_size=train, micro_batch_size=micro, accumulation_steps=accumulation)
    assert solve_batch(None, micro, accumulation, world_size) == expected
    assert solve_batch(train, None, accumulation, world_size) == expected
    assert solve_batch(train, micro, None, world_size) == expected
    assert solve_batch(train, micro, accumulation, world_size) == expected


@given(st.none() | SMALL, st.none() | SMALL, st.none() | SMALL, SMALL)
def test_any_batch_sizes(train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> None:
    try:
        sizes = solve_batch(train, micro, accumulation, world_size)
    except ValueError:
        return
    assert sizes.train_batch_size == sizes.micro_batch_size * sizes.accumulation_steps * world_size
    assert train in (None, sizes.train_batch_size)
    assert micro in (None, sizes.micro_batch_size)
    assert accumulation in (None, sizes.accumulation_steps)


@given(st.integers(1, 400), SMALL, SMALL)
def test_the_batch_sizes_that_an_error_proposes_work(train: int, micro: int, world_size: int) -> None:
    try:
        solve_batch(train, micro, None, world_size)
    except ValueError as error:
        for proposed in str(error).rpartition(": ")[2].split(" or "):
            solve_batch(int(proposed), micro, None, world_size)
            assert abs(int(proposed) - train) < micro * world_size


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r'add "train_micro_batch_size_per_gpu": 1 .*or "train_batch_size": 4'),
        ({"gradient_accumulation_steps": 3}, r'or "train_batch_size": 12'),
        ({"train_batch_size": 10}, r"train_batch_size 10 is not a multiple of .*world size 4 = 4; .*valid: 8 or 12"),
        ({"train_batch_size": 2}, r"nearest valid: 4$"),
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            r"32 is not train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 2 x world size 4 = 16",
        ),
    ],
)
def test_bad_batch_sizes(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(config).resolve(ResolveContext(world_size=4))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (12, 3, 2)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, (6, 3, 1)),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": 4}, (24, 3, 4)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": "auto"}, (24, 6, 2)),
        ({"train_micro_batch_size_per_gpu": 5}, (10, 5, 1)),
    ],
)
def test_batch_keys_that_are_auto_or_absent(config: dict[str, Any], expected: tuple[int, int, int]) -> None:
    auto_values = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    context = ResolveContext(world_size=2, auto_values=auto_values)
    sizes = load_config(config).resolve(context).batch
    assert (sizes.train_batch_size, sizes.micro_batch_size, sizes.accumulation_steps) == expected
