"""`Offloaded(ema=...)`: torch's AveragedModel over a plain loop is the truth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from zstore.errors import UsageError
from zstore.optim import Offloaded

DECAY, STEPS = 0.9, 5


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 160), nn.Tanh(), nn.Linear(160, 3)).to(dtype)


def _batches(dtype: torch.dtype = torch.float32) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        yield torch.randn(4, 8, generator=made).to(dtype), torch.randn(4, 3, generator=made).to(dtype)


def _train(model: nn.Module, optimizer: Any, first: int = 0, stop: int = STEPS, after: Any = None) -> None:
    for x, y in list(_batches(next(model.parameters()).dtype))[first:stop]:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(model)


def _plain(kind: Any, **settings: Any) -> tuple[nn.Module, AveragedModel]:
    model = _model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    _train(model, kind(model.parameters(), **settings), after=average.update_parameters)
    return model, average


def _same(model: nn.Module, expected: nn.Module) -> None:
    for (name, value), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [(torch.optim.AdamW, {"lr": 1e-2, "fused": True}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})],
)
def test_the_average_has_the_bits_of_torchs(tmp_path: Path, kind: Any, settings: dict[str, Any], overlap: Any) -> None:
    plain, average = _plain(kind, **settings)
    model = _model()
    with Offloaded(kind, model.parameters(), path=tmp_path, overlap=overlap, ema=DECAY, **settings) as optimizer:
        _train(model, optimizer)
        optimizer.wait()
        _same(model, plain)
        with optimizer.averaged_weights():
            _same(model, average.module)
            with pytest.raises(UsageError, match="end the block"):
                optimizer.step()
            with pytest.raises(UsageError, match="end the block"):
                optimizer.state_dict()
        _same(model, plain)
        for parameter, other in zip(model.parameters(), average.module.parameters(), strict=True):
            assert torch.equal(optimizer.state[parameter]["ema"].read(), other)


def test_the_average_goes_on_after_a_load_and_begins_after_one_without_it() -> None:
    settings: dict[str, Any] = {"lr": 1e-2, "fused": True}
    plain, average = _plain(torch.optim.AdamW, **settings)
    model = _model()
    make = {"device": "cpu", "ema": DECAY, "lr": 1e-2}
    with Offloaded(torch.optim.AdamW, model.parameters(), **make) as first:
        _train(model, first, 0, 3)
        other = _model()
        other.load_state_dict(model.state_dict())
        with Offloaded(torch.optim.AdamW, other.parameters(), **make) as second:
            second.load_state_dict(first.state_dict())
            _train(other, second, 3)
            _same(other, plain)
            with second.averaged_weights():
                _same(other, average.module)

    # torch's own state has none.
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    _train(model, optimizer, 0, 4)
    with Offloaded(torch.optim.AdamW, model.parameters(), **make) as third:
        third.load_state_dict(optimizer.state_dict())
        _train(model, third, 4)
        _same(model, plain)
        with third.averaged_weights():
            _same(model, plain)


def test_masters_of_bf16_parameters_are_averaged() -> None:
    model = _model(torch.bfloat16)
    with Offloaded(torch.optim.AdamW, model.parameters(), device="cpu", ema=DECAY, lr=1e-2) as optimizer:
        averages: dict[torch.Tensor, torch.Tensor] = {}

        def follow(_: nn.Module) -> None:
            for parameter in model.parameters():
                master = optimizer.state[parameter]["master"].read()
                if parameter in averages:
                    averages[parameter].lerp_(master, 1 - DECAY)
                else:
                    averages[parameter] = master.clone()

        _train(model, optimizer, after=follow)
        trained = [parameter.clone() for parameter in model.parameters()]
        with optimizer.averaged_weights():
            for parameter, average in averages.items():
                assert torch.equal(parameter, average.bfloat16())
        assert all(torch.equal(parameter, other) for parameter, other in zip(model.parameters(), trained, strict=True))


def test_what_is_no_decay_or_has_no_average_is_refused() -> None:
    parameters = list(_model().parameters())
    with pytest.raises(UsageError, match="ema: expected the decay of an average, from 0 to below 1"):
        Offloaded(torch.optim.AdamW, parameters, device="cpu", ema=1.0)
    with (
        Offloaded(torch.optim.AdamW, parameters, device="cpu") as optimizer,
        pytest.raises(UsageError, match=r"make the optimizer with ema=0\.999"),
        optimizer.averaged_weights(),
    ):
        pass
