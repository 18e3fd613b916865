"""What a training loop, or a script written for DeepSpeed, may ask of the engine, and how wrong calls are answered."""

import copy
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zstore
from tests.engine.bits import engine_digests
from tests.engine.models import make_net
from tests.engine.runs import linear, linear_config, one_step, start_linear
from zstore.engine.adapters.deepspeed import zero
from zstore.errors import CheckpointExistsError, UsageError
from zstore.testing.ranks import run_ranks
from zstore.tools import zero_to_fp32


def test_it_is_a_module_and_hands_out_the_models_attributes() -> None:
    model = linear()
    model.extra = "mine"
    with start_linear(model) as engine:
        assert isinstance(engine, nn.Module)
        assert engine.module is model
        assert engine.extra == "mine"
        assert engine.in_features == 8
        assert set(engine.parameters()) == set(model.parameters())
        engine.eval()
        assert not model.training
        engine.train()
        assert model.training
        with pytest.raises(AttributeError, match="nothing_of_that_name"):
            _ = engine.nothing_of_that_name


def test_leftovers_of_a_plain_loop_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with start_linear() as plain, start_linear() as other:
        one_step(plain)
        one_step(plain)
        for _ in range(2):
            other.optimizer.zero_grad()
            other.zero_grad()
            loss = other(torch.ones(2, 8)).square().mean()
            other.backward(loss)
            with other.no_sync():
                other.step()
            other.zero_grad()
            other.optimizer.step()
        assert engine_digests(plain) == engine_digests(other)
    assert [r.message for r in caplog.records if "remove optimizer.step()" in r.message] != []
    assert len([r for r in caplog.records if "remove optimizer.step()" in r.message]) == 1


def test_parameters_that_are_float64_are_named_with_the_type_that_they_get(caplog: pytest.LogCaptureFixture) -> None:
    with start_linear(linear().double()) as engine:
        assert {p.dtype for p in engine.parameters()} == {torch.float32}
    assert "float64 parameters are cast to fp32, the config's dtype: weight" in caplog.text
    caplog.clear()
    start_linear(linear()).close()
    assert "float64" not in caplog.text


def test_sparse_gradients_are_answered() -> None:
    with start_linear(nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1))) as engine:
        loss = engine(torch.tensor([1, 2])).mean()
        with pytest.raises(UsageError, match="sparse=False"):
            engine.backward(loss)


def test_a_dropped_engine_gives_its_run_folder_back(tmp_path: Path) -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    engine = start_linear(nn.Linear(256, 256), zero_optimization=zero)
    engine.backward(engine(torch.ones(1, 256)).mean())
    engine.step()
    assert list(tmp_path.rglob("*.shard")) != []
    del engine
    assert list(tmp_path.rglob("*.shard")) == []
    start_linear(zero_optimization=zero).close()


def test_buffers_have_the_type_that_a_config_names() -> None:
    with start_linear(make_net(), bf16={"enabled": True}, data_types={"buffer_dtype": "bf16"}) as engine:
        assert engine.module.shift.dtype == torch.bfloat16


@pytest.mark.parametrize("stage", [0, 3])
def test_running_statistics_are_those_of_autocast(stage: int) -> None:
    """In 16 bits a statistic that grows by small steps would stop short."""
    plain = nn.Sequential(nn.BatchNorm1d(8), nn.Flatten())
    net = copy.deepcopy(plain)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    with start_linear(net, bf16={"enabled": True}, zero_optimization=zero) as engine:
        for number in range(40):
            x = (3.9 + 0.1 * torch.randn(4, 8, 5, generator=torch.Generator().manual_seed(number))).bfloat16()
            with torch.autocast("cpu", torch.bfloat16):
                expected = plain(x)
            loss = engine(x)
            assert torch.equal(loss, expected)
        assert torch.equal(net[0].running_mean, plain[0].running_mean)
        assert torch.equal(net[0].running_var, plain[0].running_var)
        engine.backward(loss.float().square().sum())
        engine.step()
        assert net[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("seed", [1, 2])
def test_dropout_follows_torchs_seed_and_not_the_configs(seed: int) -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout())
    plain = copy.deepcopy(model)
    with start_linear(model, seed=seed) as engine:
        torch.manual_seed(7)
        found = engine(torch.ones(2, 4))
    torch.manual_seed(7)
    assert torch.equal(found, plain(torch.ones(2, 4)))


def test_a_config_that_says_nothing_clips_to_1_as_deepspeed_does(caplog: pytest.LogCaptureFixture) -> None:
    plain = linear()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with caplog.at_level(logging.INFO, "zstore"):
        engine, *_ = zstore.initialize(model=linear(), config=config)
    text = "gradient_clipping is not set: gradients are clipped to a norm of 1, DeepSpeed's default"
    assert caplog.text.count(text) == 1
    with engine:
        for value in (4.0, 5.0):
            x = torch.full((1, 8), value)
            engine.backward(engine(x).square().mean() * 10)
            engine.step()
            (plain(x).square().mean() * 10).backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
            assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-6)
            assert norm > 1.0
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(engine.module_state_dict().values(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def _copies(rank: int) -> None:
    with start_linear(zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0}) as engine:
        for call in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UsageError, match=r"is sharded: copy it within `with zstore\.gather"):
                call(engine.module)
        with zstore.gather(engine.module):
            copied, pickled = copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))
        one_step(engine)
        with pytest.raises(UsageError, match="sharded over ranks"):
            copy.deepcopy(engine.optimizer.state_dict())
        slots = engine.optimizer.state_dict()["state"][0]
        assert torch.equal(slots["exp_avg"], engine.get_optimizer_state("weight", "exp_avg"))
    for model in (copied, pickled):
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), linear().parameters(), strict=True))
        assert torch.equal(model(torch.ones(2, 8)), linear()(torch.ones(2, 8)))


def test_copies_of_a_sharded_model_are_whole_or_refused() -> None:
    run_ranks(_copies, 2)


def _frozen_later(rank: int, stage: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    frozen = model[0].weight.detach().clone()
    zero_section = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = linear_config(
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
    with pytest.raises(
        UsageError, match=r"'0\.weight' has no shape before the first batch.*call the model with a batch"
    ):
        start_linear(nn.Sequential(nn.LazyLinear(4)))
    model = nn.Sequential(nn.LazyLinear(4))
    model(torch.ones(1, 8))
    start_linear(model).close()


def test_backward_returns_the_micro_batchs_part_as_deepspeeds_does() -> None:
    with start_linear(gradient_accumulation_steps=4) as engine:
        loss = engine(torch.ones(2, 8)).square().mean()
        assert engine.backward(loss).item() == pytest.approx(loss.item() / 4)
        engine.step()
        loss = engine(torch.ones(2, 8)).square().mean()
        assert engine.backward(loss, scale_wrt_gas=False).item() == loss.item()


@pytest.mark.parametrize("stage", [1, 3])
def test_the_engines_own_module_is_loaded_from_a_checkpoint(stage: int, tmp_path: Path) -> None:
    zero_section = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    zero_section |= {"offload_param": {"device": "cpu"}} if stage == 3 else {}
    with start_linear(zero_optimization=zero_section) as engine:
        before = engine.module_state_dict()
        engine.save_checkpoint(str(tmp_path))
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        assert zero_to_fp32.load_state_dict_from_zero_checkpoint(engine.module, str(tmp_path)) is engine.module
        found = engine.module_state_dict()
        assert all(torch.equal(found[name], value) for name, value in before.items())


def _convert(rank: int, folder: str) -> list[str]:
    with zstore.initialize(model=linear(), config=linear_config())[0] as engine:
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
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("frequencies", torch.ones(3) / 3)

    for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        config = linear_config(
            zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0},
            **{kind: {"enabled": True}},
        )
        torch.manual_seed(4)
        with zero.Init(config_dict_or_path=config):
            model = Buffered()
        torch.manual_seed(4)
        plain = nn.Linear(8, 8, dtype=dtype)
        with zstore.gather(model):
            assert model.linear.weight.dtype == dtype
            assert torch.equal(model.linear.weight, plain.weight)
        assert model.frequencies.dtype == torch.float32
        config_of_fp32 = copy.deepcopy(config) | {kind: {"enabled": False}}
        with zero.Init(config_dict_or_path=config_of_fp32):
            assert Buffered().linear.weight.dtype == torch.float32


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
        (6, 6, r'world sizes that work are 1; set "train_micro_batch_size_per_gpu": 3 (1 per step) to keep it'),
        (3, 2, r"no micro-batch size works with 2 ranks; the batch can be divided among 1, 3"),
    ],
)
def test_a_resume_whose_batch_does_not_divide(total: int, micro: int, advice: str, tmp_path: Path) -> None:
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
