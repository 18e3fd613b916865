"""What people do with DeepSpeed: it works as there, or one line says what to write."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zstore
from tests.engine.linear_runs import linear, settings, start
from zstore.engine.adapters.deepspeed import zero
from zstore.errors import CheckpointExistsError, UsageError
from zstore.testing.ranks import run_ranks
from zstore.tools import zero_to_fp32


def _frozen_later(rank: int, stage: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    frozen = model[0].weight.detach().clone()
    zero_section = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = settings(
        zero_optimization=zero_section, gradient_accumulation_steps=2, bf16={"enabled": True}, optimizer=SGD
    )
    with zstore.initialize(model=model, config=config)[0] as engine:
        model[0].weight.requires_grad_(False)
        for _ in range(4):
            engine.backward(engine(torch.ones(2, 4, dtype=model[1].bias.dtype)).float().sum())
            engine.step()
        with zstore.gather(model):
            assert torch.equal(model[0].weight.float(), frozen.to(model[0].weight.dtype).float())
            return model[1].bias.float().tolist()


SGD = {"type": "SGD", "params": {"lr": 0.25}}


@pytest.mark.parametrize(
    ("world_size", "stage"),
    [(1, 2), (2, 3), *(pytest.param(*case, marks=pytest.mark.soak) for case in ((1, 1), (1, 3), (2, 1), (2, 2)))],
)
def test_a_parameter_is_frozen_before_the_first_backward(world_size: int, stage: int) -> None:
    torch.manual_seed(0)
    bias = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))[1].bias.detach()
    for found in run_ranks(_frozen_later, world_size, stage):
        # Two steps of the mean of equal gradients, each 2, one for each row.
        assert found == pytest.approx((bias.bfloat16().float() - 2 * 0.25 * 2).tolist(), abs=0.01)


def test_a_lazy_module_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match=r"'0\.weight' has no shape before the first batch.*call the model with one"):
        start(nn.Sequential(nn.LazyLinear(4)))
    model = nn.Sequential(nn.LazyLinear(4))
    model(torch.ones(1, 8))
    start(model).close()


def test_backward_returns_the_micro_batchs_part_as_deepspeeds_does() -> None:
    with start(gradient_accumulation_steps=4) as engine:
        loss = engine(torch.ones(2, 8)).square().mean()
        assert engine.backward(loss).item() == pytest.approx(loss.item() / 4)
        engine.step()
        loss = engine(torch.ones(2, 8)).square().mean()
        assert engine.backward(loss, scale_wrt_gas=False).item() == loss.item()


@pytest.mark.parametrize("stage", [1, 3])
def test_the_engines_own_module_is_loaded_from_a_checkpoint(stage: int, tmp_path: Path) -> None:
    zero_section = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    zero_section |= {"offload_param": {"device": "cpu"}} if stage == 3 else {}
    with start(zero_optimization=zero_section) as engine:
        before = engine.module_state_dict()
        engine.save_checkpoint(str(tmp_path))
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        assert zero_to_fp32.load_state_dict_from_zero_checkpoint(engine.module, str(tmp_path)) is engine.module
        found = engine.module_state_dict()
        assert all(torch.equal(found[name], value) for name, value in before.items())


def _convert(rank: int, folder: str) -> list[str]:
    with zstore.initialize(model=linear(), config=settings())[0] as engine:
        engine.save_checkpoint(f"{folder}/ckpt")
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(f"{folder}/ckpt", f"{folder}/out")
        names = sorted(path.name for path in Path(folder, "out").iterdir())
        with pytest.raises(CheckpointExistsError, match="has other content"):
            zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(f"{folder}/ckpt", folder)
    return names


def test_all_ranks_convert_a_checkpoint(tmp_path: Path) -> None:
    one, other = run_ranks(_convert, 2, str(tmp_path))
    assert one == other
    assert one == ["model.safetensors"]
    loaded = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in linear().state_dict().items())


def test_init_under_a_16_bit_config_makes_16_bit_parameters(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("frequencies", torch.ones(3) / 3)

    for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        config = settings(
            zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0},
            **{kind: {"enabled": True}},
        )
        torch.manual_seed(4)
        with zero.Init(config_dict_or_path=config):
            model = Net()
        torch.manual_seed(4)
        plain = nn.Linear(8, 8, dtype=dtype)
        with zstore.gather(model):
            assert model.linear.weight.dtype == dtype
            assert torch.equal(model.linear.weight, plain.weight)
        assert model.frequencies.dtype == torch.float32
        config_of_fp32 = copy.deepcopy(config) | {kind: {"enabled": False}}
        with zero.Init(config_dict_or_path=config_of_fp32):
            assert Net().linear.weight.dtype == torch.float32


def _resume(rank: int, folder: str, config: dict[str, Any]) -> str:
    with zstore.initialize(model=linear(), config=config)[0] as engine:
        try:
            engine.load_checkpoint(folder)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return json.dumps([engine.train_batch_size(), engine.gradient_accumulation_steps()])


@pytest.mark.parametrize(
    ("total", "micro", "advice"),
    [
        (
            6,
            6,
            r'world sizes that can are 1; write "train_micro_batch_size_per_gpu": 3, which keeps it, 1 to a step',
        ),
        (3, 2, r"no micro-batch does among 2 ranks; it divides among 1, 3"),
    ],
)
def test_a_resume_whose_batch_does_not_divide_says_what_keeps_it(
    total: int, micro: int, advice: str, tmp_path: Path
) -> None:
    optimizer = {"type": "AdamW"}
    with zstore.initialize(model=linear(), config={"train_batch_size": total, "optimizer": optimizer})[0] as engine:
        engine.save_checkpoint(str(tmp_path))
    for found in run_ranks(
        _resume, 2, str(tmp_path), {"train_micro_batch_size_per_gpu": micro, "optimizer": optimizer}
    ):
        assert advice in found
    if total == 6:  # what is advised works
        config = {"train_micro_batch_size_per_gpu": 3, "optimizer": optimizer}
        assert run_ranks(_resume, 2, str(tmp_path), config) == ["[6, 1]"] * 2
