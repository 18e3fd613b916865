"""Weights that a script changes in place between steps, beside the plain loop that does the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from tests.engine.runs import placed
from zstore.engine import Engine
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks

APART = [{"stage": stage, "offload_optimizer": {"device": device}} for stage in (1, 2) for device in ("cpu", "nvme")]
Act = Callable[[nn.Sequential, int], None]


def _clamp(model: nn.Sequential, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)


def _initialise(model: nn.Sequential, step: int) -> None:
    if step == 1:
        nn.init.normal_(model[2].weight, std=0.3, generator=torch.Generator().manual_seed(5))
        nn.init.zeros_(model[2].bias)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def _plain(act: Act, world_size: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _net()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True), []
    for step in range(4):
        for rank in range(world_size):
            loss = model(_batch(step, rank)).square().mean()
            (loss / world_size).backward()
            losses += [loss.item()] if rank == 0 else []
        optimizer.step()
        optimizer.zero_grad()
        act(model, step)
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def _engine(zero: dict[str, Any], folder: Path | str, **more: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.0,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.01}},
        "zero_optimization": placed(zero, folder),
        **more,
    }
    return zstore.initialize(model=_net(), config=config)[0]


def _ours(act: Act, engine: Engine, rank: int = 0) -> tuple[list[float], dict[str, Any]]:
    losses = []
    with engine:
        for step in range(4):
            loss = engine(_batch(step, rank)).square().mean()
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
            act(engine.module, step)
        return losses, {name: engine.get_full_parameter(name) for name, _ in engine.module.named_parameters()}


@pytest.mark.parametrize("act", [_clamp, _initialise])
def test_changed_weights_have_the_bits_of_a_plain_loop(act: Act, tmp_path: Path) -> None:
    losses, wanted = _plain(act)
    for zero in ({"stage": 0}, *APART):
        seen, found = _ours(act, _engine(zero, tmp_path))
        assert seen == losses
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def _rank(rank: int, act: Act, folder: str) -> list[Any]:
    zeros = [{"stage": 0}, {"stage": 1}, {"stage": 2}, *APART]
    found = [_ours(act, _engine(zero, folder), rank) for zero in zeros]
    return [(losses, {name: value.numpy() for name, value in state.items()}) for losses, state in found]


@pytest.mark.parametrize("act", [pytest.param(_clamp, marks=pytest.mark.soak), _initialise])
def test_changed_weights_at_two_ranks(act: Act, tmp_path: Path) -> None:
    losses, wanted = _plain(act, 2)
    first, second = run_ranks(_rank, 2, act, str(tmp_path))
    for (seen, found), (_, other) in zip(first, second, strict=True):
        assert seen == pytest.approx(losses, rel=1e-5)
        for name, value in wanted.items():
            torch.testing.assert_close(torch.as_tensor(found[name]), value)
            assert (found[name] == other[name]).all()


def test_unchanged_elements_keep_their_masters(tmp_path: Path) -> None:
    for zero in ({"stage": 0}, *APART):
        with _engine(zero, tmp_path, bf16={"enabled": True}) as engine:
            for step in range(2):
                engine.backward(engine(_batch(step, 0).bfloat16()).float().square().mean())
                engine.step()
            weight = engine.module[0].weight
            master, before = engine.get_full_parameter("0.weight"), weight.detach().clone()
            with torch.no_grad():
                weight.clamp_(-0.1, 0.1)
            changed = weight != before
            assert 0 < int(changed.sum()) < weight.numel()
            wanted = torch.where(changed, weight.detach().float(), master)
            engine.save_checkpoint(str(tmp_path / "saves"), "clamped", overwrite=True)
            saved = zstore.load_state_dict(tmp_path / "saves" / "clamped")
            assert torch.equal(engine.get_full_parameter("0.weight"), wanted)
            assert torch.equal(saved["0.weight"].float(), wanted)


def _zero_bias(module: nn.Linear, _: Any) -> None:
    nn.init.zeros_(module.bias)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_change_of_sharded_weights_is_refused(device: str, tmp_path: Path) -> None:
    offload = {"device": device}
    zero = {"stage": 3, "offload_param": offload, "offload_optimizer": offload, "stage3_param_persistence_threshold": 0}
    with _engine(zero, tmp_path) as engine:
        before = engine.get_full_parameter("2.bias")
        for change in (
            nn.init.zeros_,
            nn.init.normal_,
            lambda bias: bias.detach().mul_(2),
            lambda bias: bias.data.add_(1),
        ):
            with pytest.raises(UsageError, match=r"'2\.bias' outside of a forward.*modifier_rank"):
                change(engine.module[2].bias)
        for call in (
            lambda: engine(_batch(0, 0)),
            lambda: engine.save_checkpoint(str(tmp_path / "saves")),
            lambda: engine.get_full_parameter("0.weight"),
        ):
            with engine.module[0].register_forward_pre_hook(_zero_bias):
                engine(_batch(0, 0))
            with pytest.raises(UsageError, match=r"'0\.bias' changed in place, but is sharded.*modifier_rank"):
                call()
            assert torch.equal(engine.get_full_parameter("2.bias"), before)
        with zstore.gather(engine.module[2].bias, modifier_rank=0):
            nn.init.zeros_(engine.module[2].bias)
        engine.backward(engine(_batch(0, 0)).sum())
        engine.step()


@pytest.mark.parametrize("zero", APART)
def test_writes_through_data_are_told_at_the_step(zero: dict[str, Any], tmp_path: Path) -> None:
    def step(engine: Engine) -> None:
        engine.backward(engine(_batch(0, 0)).square().mean())
        engine.step()

    def swapped(model: nn.Sequential, number: int) -> None:
        """Evaluate with other weights, as with those of an average."""
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        with torch.no_grad():
            model(_batch(0, 0))
        for parameter, values in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(values)

    assert _ours(swapped, _engine(zero, tmp_path))[0] == _plain(swapped)[0]
    with _engine(zero, tmp_path) as engine:
        step(engine)
        engine.set_full_parameter("0.weight", torch.zeros(64, 4))
        step(engine)
        for parameter in engine.module.parameters():
            parameter.data.clamp_(-0.01, 0.01)
        with pytest.raises(UsageError, match=r"was changed through \.data"):
            step(engine)


def _copies(rank: int) -> None:
    with _engine({"stage": 3, "stage3_param_persistence_threshold": 0}, "") as engine:
        for call in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UsageError, match=r"is sharded: make it within `with zstore\.gather"):
                call(engine.module)
        with zstore.gather(engine.module):
            copied, pickled = copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))
        engine.backward(engine(_batch(0, rank)).sum())
        engine.step()
        with pytest.raises(UsageError, match="shared out over ranks"):
            copy.deepcopy(engine.optimizer.state_dict())
        slots = engine.optimizer.state_dict()["state"][0]
        assert torch.equal(slots["exp_avg"], engine.get_optimizer_state("0.weight", "exp_avg"))
    for model in (copied, pickled):
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), _net().parameters(), strict=True))
        assert torch.equal(model(_batch(0, 0)), _net()(_batch(0, 0)))


def test_copies_of_a_sharded_model_are_whole_or_refused() -> None:
    run_ranks(_copies, 2)


def test_a_change_before_a_block_is_not_lost(tmp_path: Path) -> None:
    with _engine(APART[0], tmp_path) as engine:
        weight = engine.module[0].weight
        nn.init.constant_(weight, 0.5)
        with zstore.gather(weight, modifier_rank=0), torch.no_grad():
            weight[0].zero_()
        wanted = torch.full((64, 4), 0.5)
        wanted[0] = 0
        assert torch.equal(engine.get_full_parameter("0.weight"), wanted)
    with _engine({"stage": 0}, tmp_path, zstore={"step_overlap": "backward"}) as engine:
        for _ in range(2):  # its updates write to the weights too
            engine.backward(engine(_batch(0, 0)).sum())
            engine.step()
        engine.backward(engine(_batch(0, 0)).sum())
        nn.init.zeros_(engine.module[0].weight)
        with pytest.raises(UsageError, match="between backward"):
            engine.step()
