"""What a config that asks for something that is not there is answered with: by the file's name, with what is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zstore.engine.build.store import store_key
from zstore.engine.config.config import Config, load_config
from zstore.engine.config.optimizers import ALIASES, OPTIMIZERS
from zstore.engine.config.resolve import ResolveContext
from zstore.engine.extras import register_parts
from zstore.engine.extras.one_bit.step import OneBitStep
from zstore.engine.optim.rules import classes, rule_of
from zstore.engine.plan.plan import placement_settings
from zstore.errors import ConfigError

EVERYTHING = Path(__file__).parents[2] / "configs" / "zero3_nvme_everything.json"


def keys_of(config: Config) -> list[str]:
    return [notice.key for notice in config.notices]


def test_no_effect_is_said_only_where_nothing_is_lost() -> None:
    said = {notice.key.rpartition(".")[2]: notice.message for notice in load_config(EVERYTHING).notices}
    assert all(message.startswith("no effect: ") for message in said.values())
    frozen = load_config({"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}})
    assert "not built: frozen weights keep the type" in frozen.report()[0]


@pytest.mark.parametrize(
    ("config", "instead"),
    [
        ({"comet": {"enabled": True}}, "use tensorboard, wandb or csv_monitor"),
        ({"sparse_gradients": True}, "sparse=False"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "zstore.moments"),
        ({"nebula": {"enabled": True}}, "save_checkpoint()"),
    ],
)
def test_what_is_lost_is_said_with_what_to_use(config: dict[str, Any], instead: str) -> None:
    (line,) = load_config(config).report()
    assert ": not built: " in line
    assert instead in line


def test_a_step_that_cannot_be_differentiated_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"params\.differentiable: true is not supported: no gradient passes through"):
        load_config({"optimizer": {"type": "Adam", "params": {"differentiable": True}}})


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_offload_param_below_stage_3_is_reported_and_ignored(stage: int, device: str) -> None:
    """DeepSpeed-Chat writes it at stage 2. Nothing of the section acts, its missing path included."""
    zero: dict[str, Any] = {"stage": stage, "offload_param": {"device": device, "pin_memory": True}}
    config = load_config({"train_batch_size": 1, "zero_optimization": zero})
    (notice,) = config.notices
    assert str(notice).startswith(
        "zero_optimization.offload_param: not built: parameters are offloaded at stage 3 only"
    )
    assert f"At stage {stage} they stay whole" in notice.message
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
    config = load_config({"zero_optimization": {"stage": 2, "cpu_offload_use_pin_memory": True}})
    assert keys_of(config) == ["zero_optimization.cpu_offload_use_pin_memory"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("LBFGS", "it calls the model again within its step"), ("Prodigy", "stage 0 without offload only")],
)
def test_an_optimizer_that_cannot_be_named_is_answered_with_what_is_true_of_it(name: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"optimizer": {"type": name, "params": {"lr": 1}}})
    assert f'"ZeroOneAdam", "OneBitLamb"; got "{name}"; ' in str(caught.value)
    assert expected in str(caught.value)


def test_every_optimizer_of_the_engine_has_a_name_and_arguments_of_its_own() -> None:
    register_parts()
    rules = {name: rule_of(kind) for name, kind in classes().items() if kind.__module__.startswith(("torch", "zstore"))}
    assert rules.keys() - {"MuonWithAdam"} == OPTIMIZERS.keys()
    for name, params in OPTIMIZERS.items():
        stepper = rules[name].stepper
        assert (params.whole_tensors, params.keeps_whole) == (stepper is not None, stepper is OneBitStep)
    for name, usual in {**ALIASES, **{kind.upper(): kind for kind in OPTIMIZERS}}.items():
        config = load_config({"optimizer": {"type": name}})
        assert config.settings.optimizer is not None
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


def test_a_loaded_config_is_taken_as_it_is() -> None:
    config = load_config({"train_batch_size": 2})
    assert load_config(config) is config
