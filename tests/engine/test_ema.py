"""The average of the weights over the steps: torch's own AveragedModel over a plain loop is the truth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zstore
from zstore.errors import CheckpointMismatchError, ConfigError, UsageError
from zstore.testing.ranks import run_ranks
from zstore.tools.consolidate import Which, consolidate_command

DECAY, STEPS, WIDTH = 0.9, 5, 160


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


def _batches(steps: int = STEPS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield torch.randn(4, 8, generator=made), torch.randn(4, 2, generator=made)


def _plain() -> tuple[nn.Module, AveragedModel]:
    """Train a plain loop with torch's average beside it."""
    model = _model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for x, y in _batches():
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return model, average


def _config(folder: Path, device: str, stage: int = 3, **own: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    tier = {"device": device} | ({"nvme_path": str(folder)} if device == "nvme" else {})
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 200}
    if device != "none":
        zero["offload_optimizer"] = tier
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}},
        "zero_optimization": zero,
        "zstore": {"ema": DECAY, **own},
    }


def _train(engine: Any, first: int = 0, stop: int = STEPS) -> None:
    for x, y in list(_batches())[first:stop]:
        for _ in range(engine.gradient_accumulation_steps()):  # of what other ranks computed before
            engine.backward(nn.functional.mse_loss(engine(x), y))
            engine.step()


def _engine(config: dict[str, Any]) -> Any:
    return zstore.initialize(model=_model(), config=config)[0]


def _averages(engine: Any) -> dict[str, torch.Tensor]:
    return {name: engine.get_optimizer_state(name, "ema") for name, _ in _model().named_parameters()}


def _same(found: dict[str, torch.Tensor], expected: nn.Module) -> None:
    for name, value in expected.named_parameters():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("device", "stage", "own"),
    [
        ("none", 0, {}),
        ("none", 2, {}),
        ("cpu", 3, {"step_overlap": "none"}),
        ("nvme", 3, {"step_overlap": "forward"}),
        ("nvme", 3, {"step_overlap": "backward"}),
    ],
)
def test_the_average_has_the_bits_of_torchs(tmp_path: Path, device: str, stage: int, own: dict[str, Any]) -> None:
    plain, average = _plain()
    with _engine(_config(tmp_path / "run", device, stage, **own)) as engine:
        _train(engine)
        _same(_averages(engine), average.module)
        x = next(_batches())[0]
        with engine.averaged_weights(), torch.no_grad():
            assert torch.equal(engine(x), average.module(x))
        with torch.no_grad():
            assert torch.equal(engine(x), plain(x))
        _same({name: engine.get_full_parameter(name) for name, _ in plain.named_parameters()}, plain)


def test_the_average_is_resumed_and_consolidated(tmp_path: Path) -> None:
    plain, average = _plain()
    config = _config(tmp_path / "run", "nvme")
    with _engine(config) as engine:
        _train(engine, 0, 3)
        engine.save_checkpoint(str(tmp_path / "ckpt"))
    with _engine(config) as engine:
        engine.load_checkpoint(str(tmp_path / "ckpt"))
        _train(engine, 3)
        _same(_averages(engine), average.module)
        engine.save_checkpoint(str(tmp_path / "ckpt"))
        with (
            pytest.raises(UsageError, match=r"save_checkpoint\(\) within .*averaged_weights"),
            engine.averaged_weights(),
        ):
            engine.save_checkpoint(str(tmp_path / "ckpt"))
        with pytest.raises(UsageError, match=r"backward\(\) within"), engine.averaged_weights():
            engine.backward(engine(next(_batches())[0]).sum())
    found = zstore.load_state_dict(tmp_path / "ckpt", ema=True)
    _same(found, average.module)
    _same(zstore.load_state_dict(tmp_path / "ckpt"), plain)
    assert consolidate_command(tmp_path / "ckpt", tmp_path / "out", "fp32", which=Which(ema=True)) == 0
    from safetensors.torch import load_file

    _same(load_file(tmp_path / "out" / "model.safetensors"), average.module)

    # Without averages nothing is read in their place; with them, they begin with the next step.
    without = {**config, "zstore": {}}
    with _engine(without) as engine:
        _train(engine, 0, 1)
        engine.save_checkpoint(str(tmp_path / "none"))
        with pytest.raises(UsageError, match=r'write "ema": 0\.999'), engine.averaged_weights():
            pass
    with pytest.raises(CheckpointMismatchError, match="no averages of parameters"):
        zstore.load_state_dict(tmp_path / "none", ema=True)
    with _engine(config) as engine:
        engine.load_checkpoint(str(tmp_path / "none"))
        _train(engine, 1, 2)
        for name, value in _averages(engine).items():
            assert torch.equal(value, engine.get_full_parameter(name))


def _sharded(rank: int, folder: str, world: int, ckpt: str | None) -> None:
    """Train alike on each rank, whose mean gradient is then that of one; go on from a checkpoint of other ranks."""
    base, (_, average) = Path(folder), _plain()
    first, stop = (0, 3) if ckpt is None else (3, STEPS)
    with _engine(_config(base / f"run-{world}", "nvme", stage=2 + world % 2)) as engine:
        if ckpt is not None:
            engine.load_checkpoint(ckpt)
        _train(engine, first, stop)
        engine.save_checkpoint(str(base / f"ckpt-{world}"))
        found, x = _averages(engine), next(_batches())[0]
        with engine.averaged_weights(), torch.no_grad():
            shown = engine(x)
    if ckpt is not None:
        for name, value in average.module.named_parameters():
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(shown, average.module(x), rtol=1e-5, atol=1e-6)


def test_averages_are_sharded_and_resharded(tmp_path: Path) -> None:
    run_ranks(_sharded, 2, str(tmp_path), 2, None)
    run_ranks(_sharded, 1, str(tmp_path), 1, str(tmp_path / "ckpt-2"))


def test_what_is_not_averaged_is_refused(tmp_path: Path) -> None:
    lamb = _config(tmp_path, "none", 1) | {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}
    with pytest.raises(UsageError, match=r'"ema": 0.9: .* Lamb steps whole tensors'):
        _engine(lamb)
    with pytest.raises(ConfigError, match=r"zstore.ema: expected a number from 0 to below 1"):
        _engine(_config(tmp_path, "none", 1, ema=1))


@pytest.mark.parametrize("own", [{"split_master": True, "moments": "int8"}, {"moments": "bf16"}])
def test_masters_of_bf16_runs_are_averaged_and_resumed(tmp_path: Path, own: dict[str, Any]) -> None:
    config = _config(tmp_path / "run", "nvme", **own) | {"bf16": {"enabled": True}}
    averages: dict[str, torch.Tensor] = {}
    names = [name for name, _ in _model().named_parameters()]
    for first, stop in ((0, 2), (2, STEPS)):
        with _engine(config) as engine:
            if first:
                engine.load_checkpoint(str(tmp_path / "ckpt"))
                assert engine.global_steps == first
            for number in range(first, stop):
                x, y = (part.bfloat16() for part in list(_batches())[number])
                engine.backward(nn.functional.mse_loss(engine(x), y))
                engine.step()
                for name in names:
                    master = engine.get_full_parameter(name)
                    averages[name] = averages[name].lerp_(master, 1 - DECAY) if name in averages else master.clone()
            found = _averages(engine)
            assert all(torch.equal(found[name], average) for name, average in averages.items())
            trained = {name: engine.get_full_parameter(name) for name in names}
            with engine.averaged_weights(), zstore.gather(list(engine.module.parameters())):
                for name, parameter in engine.module.named_parameters():
                    assert torch.equal(parameter, averages[name].bfloat16())
            assert all(torch.equal(engine.get_full_parameter(name), value) for name, value in trained.items())
            engine.save_checkpoint(str(tmp_path / "ckpt"))
