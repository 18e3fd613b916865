"""What loops of Accelerate do with their ranks, beside Accelerate alone."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

import zstore.accelerate
from zstore.errors import ConfigError, RankError, UsageError
from zstore.testing.ranks import run_ranks


def _prepared(accelerator: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    return accelerator, *accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))


def _steps(accelerator: Any, model: Any, optimizer: Any, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(2 * number + accelerator.process_index))
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


def _save_on_the_main_process(rank: int, folder: str) -> None:
    warnings.simplefilter("default")
    plain = _prepared(accelerate.Accelerator(cpu=True))
    _steps(*plain, range(2))
    if rank == 0:
        plain[0].save_state(os.path.join(folder, "plain"))
    _steps(*plain, range(2, 3))
    ours = _prepared(zstore.accelerate.Accelerator(cpu=True, zstore_config={"zero_optimization": {"stage": 1}}))
    _steps(*ours, range(2))
    said = r"accelerator\.save_state\(\) was called on rank 0 while rank 1 is in .*is_main_process"
    if rank == 0:
        with pytest.raises(UsageError, match=said):
            ours[0].save_state(os.path.join(folder, "ours"))
    else:
        with pytest.raises(RankError, match=said):
            _steps(*ours, range(2, 3))


def test_every_rank_hears_of_a_save_by_the_main_process_alone(tmp_path: Path) -> None:
    run_ranks(_save_on_the_main_process, 2, os.fspath(tmp_path))
    assert os.listdir(tmp_path) == ["plain"]


def _local_sgd(rank: int) -> None:
    warnings.simplefilter("default")
    plain = _prepared(accelerate.Accelerator(cpu=True))
    ours = _prepared(zstore.accelerate.Accelerator(cpu=True, zstore_config={"zero_optimization": {"stage": 0}}))
    before = [p.clone() for p in ours[1].parameters()]
    said = r"^engine\.step\(\) within no_sync\(\): .* LocalSGD .*enabled=False"
    with pytest.raises(UsageError, match=said), LocalSGD(accelerator=ours[0], model=ours[1], local_sgd_steps=4):
        _steps(*ours, range(1))
    torch.testing.assert_close(list(ours[1].parameters()), before, rtol=0, atol=0)
    ours[0].free_memory()
    ours = _prepared(zstore.accelerate.Accelerator(cpu=True, zstore_config={"zero_optimization": {"stage": 0}}))
    losses = []
    for loop in (plain, ours):
        with LocalSGD(accelerator=loop[0], model=loop[1], local_sgd_steps=2, enabled=False) as local:
            for number in range(5):
                losses += _steps(*loop, range(number, number + 1))
                local.step()
    assert losses[5:] == pytest.approx(losses[:5], rel=1e-5)


def test_local_sgd_is_refused_at_its_first_step() -> None:
    run_ranks(_local_sgd, 2)


def _with_hook(hook: str | None, make: Any, **how: Any) -> tuple[list[torch.Tensor], Any]:
    handlers = [] if hook is None else [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType(hook))]
    accelerator = make(cpu=True, kwargs_handlers=handlers, **how)
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 32)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    _steps(accelerator, _Narrow(model), optimizer, range(1))
    return [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()], accelerator


class _Narrow(torch.nn.Module):
    """Repeats its inputs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x.repeat(1, 8))


def _hooks(rank: int) -> None:
    warnings.simplefilter("default")
    exact, _ = _with_hook(None, accelerate.Accelerator)
    sent = {}
    for hook in (None, "fp16", "bf16"):
        found, ours = _with_hook(hook, zstore.accelerate.Accelerator, zstore_config={"zero_optimization": {"stage": 1}})
        # Of bf16 DistributedDataParallel itself has no more on gloo.
        expected = exact if hook == "bf16" else _with_hook(hook, accelerate.Accelerator)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 if hook == "bf16" else 2e-6)
        away = max((one - two).abs().max() for one, two in zip(found, exact, strict=True))
        assert away > 1e-5 if hook else away == 0
        counts = ours.engine.world.sent_bytes
        sent[hook] = counts["reduce_scatter"] + counts["all_reduce"]
        ours.free_memory()
    assert sent["fp16"] == sent["bf16"] == sent[None] // 2 > 0


def test_communication_hooks_of_ddp_act() -> None:
    run_ranks(_hooks, 2)


def test_other_communication_hooks_are_refused() -> None:
    make = zstore.accelerate.Accelerator
    for options in ({"comm_hook": "power_sgd"}, {"comm_hook": "fp16", "comm_wrapper": "bf16"}):
        with pytest.raises(UsageError, match="zero_quantized_gradients"):
            make(cpu=True, zstore_config={}, kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    with pytest.raises(ConfigError, match=r"communication_data_type is 'fp32', .*'bf16'"):
        make(
            cpu=True,
            zstore_config={"communication_data_type": "fp32"},
            kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="bf16")],
        )
