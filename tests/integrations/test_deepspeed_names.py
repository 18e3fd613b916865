"""Names of DeepSpeed's that scripts import and ask after: values, helpers, classes, views of the engine's state."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import Field, ValidationError
from torch import nn

from zstore.engine.access import safe_access
from zstore.engine.adapters.deepspeed import (
    constants,
    optimizers,
    reshape,
    utils,
    zero,
)
from zstore.engine.adapters.deepspeed.config import (
    DeepSpeedConfig,
    DeepSpeedConfigModel,
    DeepSpeedFP16Config,
    DeepSpeedZeroConfig,
    MonitorMaster,
    TensorBoardMonitor,
    WandbMonitor,
    csvMonitor,
)
from zstore.engine.adapters.deepspeed.initialize import initialize
from zstore.engine.adapters.deepspeed.modules import KNOWN, AnsweredModule, absent, fill
from zstore.engine.adapters.deepspeed.names import ABSENT, MODULES
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks

STEP = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))


@pytest.mark.parametrize("dotted", sorted(f"{module}.{name}" for module, names in ABSENT.items() for name in names))
def test_what_is_not_built_raises_when_it_is_used(dotted: str) -> None:
    kind = absent(dotted)
    derived = type("Derived", (kind,), {})
    assert not isinstance(nn.Linear(1, 1), kind)
    for each in (kind, derived):
        with pytest.raises(UsageError, match=dotted):
            each()


def test_values_have_one_home() -> None:
    for module, values in constants.CONSTANTS.items():
        others = {name for names in MODULES.get(module, {}).values() for name in names} | set(ABSENT.get(module, ()))
        assert not others & set(values)
    assert {module.rpartition(".")[0] for module in KNOWN} - {""} <= KNOWN


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_its_names(module: str) -> None:
    filled = AnsweredModule(module)
    fill(filled)
    assert {name for names in MODULES[module].values() for name in names} <= set(vars(filled))


def test_values_are_deepspeeds() -> None:
    pytest.importorskip("deepspeed")
    for module, values in constants.CONSTANTS.items():
        theirs = importlib.import_module(module)
        for name, value in values.items():
            if isinstance(value, str | int | float | list):
                assert getattr(theirs, name) == value, f"{module}.{name}"


def test_numbers_are_cut_into_parts() -> None:
    assert utils.partition_uniform(10, 4) == [0, 3, 6, 8, 10]
    assert utils.partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    assert utils.partition_balanced([5, 1, 1, 1, 1, 1], 2) == [0, 1, 6]
    assert utils.partition_balanced([1, 1, 1, 1, 0, 1], 4)[-1] == 6
    assert utils.get_global_norm([3.0, 4.0]) == 5.0
    assert utils.call_to_str("f", 1, "a", key=None) == "f(1, 'a', key=None)"
    assert utils.parse_range_list("0,2-4,6") == [0, 2, 3, 4, 6]
    with pytest.raises(ValueError, match="ascending"):
        utils.parse_range_list("0,2-6,5-9")
    assert utils.trim_mean([9.0, 1.0, 2.0, 3.0, -7.0], 0.2) == 2.0


def test_configs_are_read_by_attribute() -> None:
    zero = DeepSpeedZeroConfig(stage=3, cpu_offload_param=True, stage3_max_live_parameters=7)  # type: ignore[call-arg]
    assert (zero.max_live_parameters, zero.offload_optimizer) == (7, None)
    assert zero.offload_param is not None
    assert zero.offload_param.device == "cpu"
    config = DeepSpeedConfig({"train_batch_size": 4, "gradient_accumulation_steps": 2})
    assert (config.train_micro_batch_size_per_gpu, config.zero_optimization_stage) == (2, 0)
    assert config.gradient_clipping == 1.0  # DeepSpeed 0.19.8's default


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_engines_state_is_seen_and_set_by_deepspeeds_names(stage: int) -> None:
    model = _model()
    config: dict[str, Any] = {**STEP, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    engine, optimizer, *_ = initialize(model=model, config=config)
    with engine:
        weight, plain = next(model.parameters()), next(_model().parameters())
        adam = torch.optim.Adam([plain], lr=0.1)
        for factor in (0.25, -1.0):
            engine.backward(engine(torch.ones(1, 8)).sum())
            safe_access.safe_set_full_grad(weight, torch.full((8, 8), factor / 2))
            rows = safe_access.safe_get_local_grad(weight)
            assert rows is not None
            safe_access.safe_set_local_grad(weight, rows * 2)
            plain.grad = torch.full((8, 8), factor)
            engine.step()
            adam.step()
        torch.testing.assert_close(safe_access.safe_get_full_fp32_param(weight), plain.data, rtol=1e-6, atol=1e-6)
        safe_access.safe_set_local_optimizer_state(weight, torch.arange(64.0), "exp_avg")
        safe_access.safe_set_local_fp32_param(weight, torch.arange(64.0))
        assert torch.equal(weight.data.flatten(), torch.arange(64.0))
        for found in (
            safe_access.safe_get_local_optimizer_state(weight, "exp_avg"),
            safe_access.safe_get_local_fp32_param(weight),
        ):
            assert found is not None
            assert torch.equal(found, torch.arange(64.0))
        kinds = {"ZeROOptimizer", "DeepSpeedZeroOptimizer" + ("_Stage3" if stage == 3 else "")} if stage else set()
        named = [
            f"deepspeed.{name}" for name in ("ZeROOptimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")
        ]
        assert {kind.__name__ for kind in map(absent, named) if isinstance(optimizer, kind)} == kinds
        assert isinstance(optimizer, optimizers.FusedAdam)
        assert not isinstance(optimizer, optimizers.FusedLion)
        assert int(optimizer.state[weight]["step"]) == 2
        assert (optimizer.loss_scaler.loss_scale, engine.tput_timer.global_step_count) == (1.0, 2)
        if stage == 3:
            assert weight.ds_tensor.shape == (64,)


def test_a_gradient_is_set_where_there_is_one_and_it_is_complete() -> None:
    config = {**STEP, "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
    engine, *_ = initialize(model=_model(), config=config)
    with engine:
        weight = next(engine.module.parameters())
        values = torch.ones(8, 8)
        with pytest.raises(UsageError, match="no gradient"):
            safe_access.safe_set_full_grad(weight, values)
        engine.backward(engine(torch.ones(1, 8)).sum())
        with pytest.raises(UsageError, match="last backward"):
            safe_access.safe_set_full_grad(weight, values)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_backwards_of_one_step_are_coalesced(stage: int) -> None:
    config = {**STEP, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    batches = [torch.full((1, 8), float(value)) for value in (1, 2, 3)]
    plain = _model()
    adam = torch.optim.Adam(plain.parameters(), lr=0.1)
    engine, *_ = initialize(model=_model(), config=config)
    with engine:
        for _ in range(2):
            with engine.coalesce_grad_reduction():
                for batch in batches:
                    engine.backward(engine(batch).square().sum())
                with pytest.raises(UsageError, match="after the block"):
                    engine.step()
            engine.step()
            adam.zero_grad()
            sum((plain(batch).square().sum() for batch in batches), torch.zeros(())).backward()
            adam.step()
        assert engine.global_steps == 2
        for (name, _), there in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(engine.get_full_parameter(name), there.data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_step_is_one_where_the_script_counts_micro_batches(stage: int) -> None:
    unmanaged = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "managed_gradient_accumulation": False}
    config = {**STEP, **unmanaged, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    plain = _model()
    adam = torch.optim.Adam(plain.parameters(), lr=0.1)
    engine, *_ = initialize(model=_model(), config=config)
    with engine:
        for number in (2, 5, 1):
            adam.zero_grad()
            for value in range(number):
                batch = torch.full((1, 8), float(value + 1))
                engine.backward(engine(batch).square().sum())
                (plain(batch).square().sum() / 4).backward()
            engine.step()
            adam.step()
        assert engine.global_steps == 3
        with pytest.raises(UsageError, match="every step"):
            engine.set_gradient_accumulation_boundary(True)
        for (name, _), there in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(engine.get_full_parameter(name), there.data, rtol=1e-5, atol=1e-5)


def test_a_script_writes_values_of_its_own_by_a_config(tmp_path: Path) -> None:
    """DeepSpeed's page on monitors: "Custom Monitoring", and the file and the rows that its `csvMonitor` writes."""
    csv = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = DeepSpeedConfig({"train_batch_size": 1, "csv_monitor": csv, "wandb": {"group": "g"}})
    assert config.monitor_config.enabled
    for number, made in enumerate(
        (MonitorMaster(config.monitor_config), csvMonitor(config.monitor_config.csv_monitor))
    ):
        assert made.enabled
        made.write_events([("Time per step", torch.tensor(0.5), 8 * number)])
    assert (tmp_path / "job" / "Time_per_step.csv").read_text().split() == [
        "step,Time",
        "per",
        "step",
        "0,0.5",
        "8,0.5",
    ]
    assert csvMonitor(config.monitor_config.csv_monitor).job_name == "job"
    assert not TensorBoardMonitor(config.monitor_config.tensorboard).enabled
    wandb = WandbMonitor(config.monitor_config.wandb)
    assert (wandb.enabled, wandb.group, wandb.project) == (False, "g", "deepspeed")


@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (3, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_in_tiles_is_the_layer(columns: int, rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(13, 11, bias=bias), torch.randn(2, 5, 13, requires_grad=True)
    tiled = zero.TiledLinear(13, 11, bias, columns, rows, init_linear=plain)
    y = tiled(x)
    torch.testing.assert_close(y, plain(x))
    given = zero.TiledLinear(13, 11, bias, columns, rows, True, False, init_linear=plain)
    parts = x.split([5, 4, 4] if columns == 3 else 13, dim=-1)
    torch.testing.assert_close(torch.cat(given(parts if columns > 1 else x), -1), y)
    (tiled_grad,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    torch.testing.assert_close(tiled_grad, torch.autograd.grad(plain(x).square().sum(), x)[0])
    plain(x).square().sum().backward()
    y.square().sum().backward()
    grads = torch.cat([torch.cat([tile.weight.grad for tile in row], 1) for row in tiled.linears])
    torch.testing.assert_close(grads, plain.weight.grad)
    for wrong in ((0, 1), (14, 1), (1, 12)):
        with pytest.raises(RuntimeError, match="expected from 1 to"):
            zero.TiledLinear(13, 11, bias, *wrong)


def test_tiles_are_gathered_one_by_one_at_stage_3() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(32, 32)
    adam, x = torch.optim.Adam(plain.parameters(), lr=0.1), torch.randn(3, 32)
    off = {
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0,
        "offload_param": {"device": "cpu"},
    }
    config = {**STEP, "gradient_clipping": 0.0, "zero_optimization": {"stage": 3, **off}}
    with zero.Init(config_dict_or_path=config):
        model = zero.TiledLinear(32, 32, in_splits=4, init_linear=plain)
    engine, *_ = initialize(model=model, config=config)
    with engine:
        for _ in range(2):
            loss, there = engine(x).square().sum(), plain(x).square().sum()
            torch.testing.assert_close(loss, there)
            engine.backward(loss)
            there.backward()
            engine.step()
            adam.step()
            adam.zero_grad()
        assert engine.statistics().units.live_peak_numel == 32 * 8 + 32


def _kind(call: Callable[..., Any], *arguments: Any) -> type[Exception]:
    """Return which of the errors that DeepSpeed has for it a call raises."""
    with pytest.raises((AssertionError, NotImplementedError)) as caught:
        call(*arguments)
    assert isinstance(caught.value, UsageError)
    return next(kind for kind in (AssertionError, NotImplementedError) if isinstance(caught.value, kind))


def test_calls_at_a_wrong_time_raise_deepspeeds_kinds_of_errors() -> None:
    """See `DeepSpeedEngine.coalesce_grad_reduction` and `set_gradient_accumulation_boundary` of 0.19.8."""
    whole, unmanaged = {**STEP, "zero_optimization": {"stage": 0}}, {**STEP, "managed_gradient_accumulation": False}
    for config, kind in (
        (whole, NotImplementedError),
        (unmanaged | {"zero_optimization": {"stage": 1}}, AssertionError),
    ):
        engine, *_ = initialize(model=_model(), config=config)
        with engine:
            assert _kind(engine.coalesce_grad_reduction().__enter__) is kind
            engine.backward(engine(torch.ones(1, 8)).sum())
            engine.step()  # nothing of the refused block is left
            assert engine.global_steps == 1
            if kind is AssertionError:
                assert _kind(engine.set_gradient_accumulation_boundary, True) is AssertionError
    engine, *_ = initialize(model=_model(), config={**STEP, "zero_optimization": {"stage": 2}})
    with engine:
        with engine.coalesce_grad_reduction():
            assert _kind(engine.step) is AssertionError
            assert _kind(engine.coalesce_grad_reduction().__enter__) is AssertionError
        with engine.no_sync():
            assert _kind(engine.coalesce_grad_reduction().__enter__) is AssertionError


def _own_gradients(rank: int, config: dict[str, Any]) -> list[list[float]]:
    """Return what `.grad` and `safe_get_full_grad` say within a block, then the mean after it and the weight after the step."""
    torch.set_num_threads(1)
    engine, *_ = initialize(model=_model(), config=config)
    with engine:
        weight = next(engine.module.parameters())
        with engine.coalesce_grad_reduction():
            for value in (1, 2):
                engine.backward(engine(torch.full((1, 8), float(value + rank))).square().sum())
            own, full = weight.grad, safe_access.safe_get_full_grad(weight)
            assert own is not None
            assert full is not None
            found = [own.clone(), full]
            assert _kind(engine.save_checkpoint, "unused") is AssertionError
            with pytest.raises(UsageError, match="after the block"):
                engine.clip_grad_norm_(1.0)
        mean = safe_access.safe_get_full_grad(weight)
        engine.step()
        whole = safe_access.safe_get_full_fp32_param(weight)
        assert mean is not None
        assert whole is not None
        return [value.flatten().tolist() for value in (*found, mean, whole)]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(3, marks=pytest.mark.soak)])
def test_gradients_are_each_ranks_own_until_the_block_ends(stage: int) -> None:
    """The truth is a plain loop on each rank's samples."""
    config = {**STEP, "train_batch_size": 2, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    grads = []
    for rank in range(2):
        plain = _model()
        sum((plain(torch.full((1, 8), float(v + rank))).square().sum() for v in (1, 2)), torch.zeros(())).backward()
        grads.append(next(plain.parameters()).grad)
    weight = next(_model().parameters())
    weight.grad = mean = (grads[0] + grads[1]) / 2
    torch.optim.Adam([weight], lr=0.1).step()
    for rank, found in enumerate(run_ranks(_own_gradients, 2, config)):
        for value, expected in zip(found, (grads[rank], grads[rank], mean, weight.data), strict=True):
            torch.testing.assert_close(torch.tensor(value).view(8, 8), expected, rtol=1e-5, atol=1e-6)


def _fail_in_a_block(engine: Any) -> None:
    with engine.coalesce_grad_reduction():
        engine.backward(engine(torch.ones(1, 8)).sum())
        raise KeyError


def test_a_block_that_raises_leaves_no_gradients() -> None:
    engine, *_ = initialize(model=_model(), config={**STEP, "zero_optimization": {"stage": 2}})
    with engine:
        before = engine.get_full_parameter("0.weight")
        with pytest.raises(KeyError):
            _fail_in_a_block(engine)
        engine.set_gradient_accumulation_boundary(None)
        engine.backward(0 * engine(torch.ones(1, 8)).sum())
        engine.step()
        assert torch.equal(engine.get_full_parameter("0.weight"), before)


class SimpleConf(DeepSpeedConfigModel):
    """As in DeepSpeed's tests/unit/runtime/test_ds_config_model.py."""

    param_1: int = 0
    old: str | None = Field(
        None, json_schema_extra={"deprecated": True, "new_param": "new", "new_param_fn": lambda x: [x]}
    )
    new: list[str] | None = None
    param_3: int = Field(0, alias="param_3_alias")


def test_a_scripts_own_config_class_has_old_names_and_aliases() -> None:
    assert SimpleConf(param_1=42, param_3=10).model_dump() == {"param_1": 42, "old": None, "new": None, "param_3": 10}
    assert SimpleConf(old="DS").new == ["DS"]
    assert (SimpleConf(param_1="auto").param_1, SimpleConf(param_3_alias=2).param_3) == (0, 2)
    for wrong in ({"param_1": "DS"}, {"new": "DS"}, {"param_1_typo": 0}, {"strict": True, "param_1": "auto"}):
        with pytest.raises(ValidationError):
            SimpleConf(**wrong)
    with pytest.raises(AssertionError, match="got both"):
        SimpleConf(new=["DS"], old="DS")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ((1, 1, 1), [[[[0, 4, 1, 5, 2, 6, 3, 7]]]]),
        ((1, 2, 1), [[[[0, 4, 2, 6], [1, 5, 3, 7]]]]),
        ((1, 2, 2), [[[[0, 4], [1, 5]]], [[[2, 6], [3, 7]]]]),
        ((2, 1, 1), [[[[0, 4, 1, 5]], [[2, 6, 3, 7]]]]),
    ],
)
def test_fewer_ranks_get_the_parts_that_deepspeed_gives_them(target: tuple[int, ...], expected: Any) -> None:
    """The numbers of DeepSpeed's tests/unit/checkpoint/test_reshape_checkpoint.py."""
    source = reshape.model_3d_desc(2, 2, 2)
    grids = source.reshape(reshape.model_3d_desc(*target))
    found = [[[grid.get_data(p, t) for t in range(target[1])] for p in range(target[0])] for grid in grids]
    assert found == expected
    with pytest.raises(AssertionError, match="PP: 2 ---> 3"):
        source.reshape(reshape.model_3d_desc(pp_degree=3))
    assert source.is_valid(1, 2, 1) == (False, ["TP indexing error: index 2 >= degree 2"])


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = optimizers.WarmupLR(optimizer, warmup_max_lr=0.4, warmup_num_steps=4, warmup_type="linear")
    schedule.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1)


@pytest.mark.parametrize("value", [[], {}, True, "many"])
def test_a_loss_scale_is_a_number(value: Any) -> None:
    """See `DeepSpeedFP16Config._validate_loss_scale` of 0.19.8."""
    assert DeepSpeedFP16Config(loss_scale="3").loss_scale == 3.0  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=r"fp16\.loss_scale must be a number"):
        DeepSpeedFP16Config(loss_scale=value)


@pytest.mark.parametrize("key", ["min_loss_scale", "loss_scale_window"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_dynamic_loss_scale_stays_above_0_and_a_fixed_one_has_no_limits(key: str, value: int) -> None:
    """See `DeepSpeedFP16Config._validate_dynamic_loss_scale_params` of 0.19.8."""
    with pytest.raises(ValueError, match=key):
        initialize(model=_model(), config={**STEP, "fp16": {"enabled": True, key: value}})
    for unused in ({"enabled": False}, {"enabled": True, "loss_scale": 128}):
        assert getattr(DeepSpeedFP16Config(**unused, **{key: value}), key) == value
