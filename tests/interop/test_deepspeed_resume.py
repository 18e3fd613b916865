"""A run that DeepSpeed began goes on here: the losses are those that DeepSpeed itself went on with."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import zstore
from tests.interop.deepspeed_data import CASES, expected, facts, root_of, write
from tests.interop.deepspeed_model import (
    STEPS_AFTER,
    STEPS_BEFORE,
    TRAIN_BATCH_SIZE,
    groups_of,
    make_tiny,
    micro_batches,
)
from zstore.engine import Engine
from zstore.errors import CheckpointMismatchError
from zstore.testing.ranks import run_ranks

CLOSE = {"fp32": 2e-6, "bf16": 1e-2, "fp16": 1e-3}
"""How far losses may be apart: rounding of the precision, in other orders of sums."""


NVME = [case for case in CASES if "nvme" in case]


def config_for(case: str, world_size: int, **zero: Any) -> dict[str, Any]:
    config: dict[str, Any] = copy.deepcopy(facts(case)["config"])
    config["train_micro_batch_size_per_gpu"] = TRAIN_BATCH_SIZE // world_size
    config["gradient_accumulation_steps"] = 1
    config["zero_optimization"] = {"stage": config["zero_optimization"]["stage"], **zero}
    config.pop("aio", None)
    return config


def start(case: str, config: dict[str, Any]) -> Engine:
    model = make_tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)  # nothing of what is loaded may be there before
    groups = groups_of(model, facts(case)["case"].get("groups", "one"))
    return zstore.initialize(model=model, config=config, model_parameters=groups)[0]


def train(engine: Engine, first: int, steps: int, world_size: int) -> list[float]:
    losses = []
    for number in range(first, first + steps):
        total = 0.0
        for ids in micro_batches(number, engine.global_rank, world_size, engine.gradient_accumulation_steps()):
            loss = engine(ids)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach().float()) / engine.gradient_accumulation_steps()
        tensor = torch.tensor(total)
        if world_size > 1:
            torch.distributed.all_reduce(tensor)
        losses.append(float(tensor) / world_size)
    return losses


def go_on(rank: int, case: str, root: str, world_size: int, zero: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    with start(case, config_for(case, world_size, **zero)) as engine:
        path, client = engine.load_checkpoint(root)
        assert path is not None
        assert engine.global_steps == STEPS_BEFORE
        return train(engine, STEPS_BEFORE, STEPS_AFTER, world_size), client


def check(case: str, losses: list[float]) -> None:
    wanted = facts(case)["losses"][STEPS_BEFORE:]
    precision = facts(case)["case"].get("precision", "fp32")
    assert losses == pytest.approx(wanted, rel=CLOSE[precision])


# On NVMe DeepSpeed goes wrong with tensors as small as these, before the save as after it; at stage 0 it unscales fp16
# gradients by the scale of the next step (see the script).
@pytest.mark.parametrize("case", [case for case in CASES if "nvme" not in case and case != "stage0-fp16-1"])
def test_the_losses_go_on_as_deepspeeds_own(case: str, tmp_path: Path) -> None:
    losses, client = go_on(0, case, str(root_of(case)), 1, {})
    check(case, losses)
    assert ("tensor" in client) == bool(facts(case)["case"].get("client"))


@pytest.mark.parametrize(
    ("case", "world_size", "zero"),
    [
        ("stage3-bf16-groups-2", 2, {}),
        ("stage1-fp32-2", 3, {}),
        pytest.param("stage3-fp32-3", 2, {"offload_optimizer": {"device": "cpu"}}, marks=pytest.mark.soak),
    ],
)
def test_they_do_at_any_world_size(case: str, world_size: int, zero: dict[str, Any]) -> None:
    for losses, _ in run_ranks(go_on, world_size, case, str(root_of(case)), world_size, zero, timeout_s=200):
        check(case, losses)


@pytest.mark.parametrize("case", NVME)
def test_offloaded_state_is_loaded_and_trained(case: str) -> None:
    wanted = expected(case)
    with start(case, config_for(case, 1)) as engine:
        path, _ = engine.load_checkpoint(str(root_of(case)))
        assert path is not None
        assert engine.global_steps == STEPS_BEFORE
        found: dict[str, torch.Tensor | None] = {}
        for name, parameter in engine.module.named_parameters():
            found[f"model/{name}"] = engine.get_full_parameter(name)
            if parameter.requires_grad:
                for slot in ("exp_avg", "exp_avg_sq"):
                    found[f"optimizer/{slot}/{name}"] = engine.get_optimizer_state(name, slot)
        assert set(found) == {name for name in wanted if not name.startswith("buffer/")}
        for name, value in found.items():
            assert value is not None, name
            assert torch.equal(value.to(wanted[name].dtype), wanted[name]), name
        plain = make_tiny().bfloat16()
        plain.load_state_dict({n.split("/", 1)[1]: v for n, v in wanted.items() if "optimizer/" not in n}, strict=False)
        loss = plain(micro_batches(STEPS_BEFORE, 0, 1)[0])
        assert train(engine, STEPS_BEFORE, 1, 1) == pytest.approx([loss.item()], rel=CLOSE["bf16"])
        assert engine.was_step_applied()
        after = engine.get_full_parameter("embed.weight")
        assert not torch.equal(after, wanted["model/embed.weight"])


def test_the_loss_scale_goes_on_and_one_warning_says_what_is_not_carried_over(caplog: pytest.LogCaptureFixture) -> None:
    # It begins at 2**8 and doubles after 2 steps without overflow, at the third; then in the middle of a window.
    case = "stage2-fp16-1"
    with start(case, config_for(case, 1)) as engine, caplog.at_level(logging.WARNING, "zstore"):
        engine.load_checkpoint(str(root_of(case)))
        scaler = engine.training_state.scaler
        assert scaler.state() == {"scale": 512.0, "hysteresis_left": 2, "iteration": 3, "last_overflow": -1}
    (warning,) = (text for record in caplog.records if "not carried over" in (text := record.getMessage()))
    assert "random number generators" in warning


def test_a_run_saves_its_own_beside_deepspeeds(tmp_path: Path) -> None:
    import shutil

    case = "stage2-bf16-groups-2"
    shutil.copytree(root_of(case), tmp_path / "run")
    with start(case, config_for(case, 1)) as engine:
        engine.load_checkpoint(str(tmp_path / "run"))
        train(engine, STEPS_BEFORE, 1, 1)
        engine.save_checkpoint(str(tmp_path / "run"))
        train(engine, STEPS_BEFORE + 1, 1, 1)
        path, _ = engine.load_checkpoint(str(tmp_path / "run"))
        assert path is not None
        assert Path(path).name == "step-00000004"
        assert engine.global_steps == 4


def test_weights_alone_are_loaded_where_that_is_asked_for(tmp_path: Path) -> None:
    case = "stage3-bf16-1"
    with start(case, config_for(case, 1)) as engine:
        engine.load_checkpoint(str(root_of(case)), load_module_only=True)
        assert engine.global_steps == 0
        wanted = expected(case)["model/mix"]
        assert torch.equal(engine.module.mix.detach(), wanted.bfloat16())


def test_another_model_or_other_groups_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    case = "stage2-bf16-groups-2"
    with start(case, config_for(case, 1)) as engine:
        with pytest.raises(CheckpointMismatchError, match="missing: model/mix"):
            engine.load_checkpoint(str(tmp_path))
        with pytest.raises(CheckpointMismatchError, match="1 parameter groups, the optimizer has 2"):
            engine.load_checkpoint(str(root_of("stage3-bf16-1")))
