"""`zstore.optim.Offloaded` in a plain PyTorch loop beside torch's own optimizer: the same bits, whatever a loop does."""

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from tests.engine.fake_device import FakeDevice
from zstore.errors import BudgetError, RunFolderError, UsageError
from zstore.optim import Offloaded

AdamW = torch.optim.AdamW


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Its two weights are too large to stay in memory where state is on disk."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 301), nn.Tanh(), nn.Linear(301, 70)).to(dtype)


def inputs(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).to(dtype)


def backward(model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(inputs(step, next(model.parameters()).dtype)).float().square().mean()
    loss.backward()
    return loss


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def same_state(ours: dict[Any, Any], theirs: dict[Any, Any]) -> bool:
    assert ours.keys() == theirs.keys()
    for key, entry in theirs.items():
        assert ours[key].keys() == entry.keys()
        for name, value in entry.items():
            assert torch.equal(torch.as_tensor(ours[key][name]), torch.as_tensor(value)), (key, name)
    return True


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(4)) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_all_that_a_loop_does_has_the_bits_of_torch(device: Any, tmp_path: Path) -> None:
    def run(make: Callable[..., torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer, list[Any]]:
        model = make_model()
        decayed, plain = [m.weight for m in model if isinstance(m, nn.Linear)], [model[0].bias]
        optimizer = make([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-2)
        schedule = OneCycleLR(optimizer, max_lr=0.02, total_steps=20)
        seen: list[Any] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        for step in range(5):
            if step == 2:
                optimizer.add_param_group({"params": [model[2].bias], "lr": 3e-3, "betas": (0.8, 0.9)})
                groups = optimizer.param_groups
                groups[2] = groups[0] | groups[2]  # what the schedule has there
            seen.append(optimizer.step(lambda step=step: backward(model, step).item()))
            schedule.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return model, optimizer, seen + [group["betas"] for group in optimizer.param_groups]

    theirs, torchs, expected = run(lambda params, **settings: AdamW(params, fused=True, **settings))
    kept: dict[str, Any] = {"device": device, "path": tmp_path}
    ours, optimizer, seen = run(lambda params, **settings: Offloaded(AdamW, params, **kept, **settings))
    assert isinstance(optimizer, Offloaded)
    with optimizer:
        assert seen == expected
        assert same(ours, theirs)
        assert same_state(optimizer.state_dict()["state"], torchs.state_dict()["state"])
        assert (optimizer.statistics().disk_bytes > 300_000) == (device == "nvme")
    assert not list(tmp_path.rglob("*.shard"))


def test_state_goes_to_torchs_class_and_back(tmp_path: Path) -> None:
    first, second, third = make_model(), make_model(), make_model()
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    torchs = AdamW(first.named_parameters(), fused=True, **settings)
    schedule = CosineAnnealingLR(torchs, 10)
    train(first, torchs)
    schedule.step()
    with Offloaded(AdamW, second.named_parameters(), path=tmp_path, lr=1.0) as ours:
        second.load_state_dict(first.state_dict())
        ours.load_state_dict(torchs.state_dict())
        group = ours.state_dict()["param_groups"][0]
        assert (group["lr"], group["fused"]) == (torchs.param_groups[0]["lr"], True)
        train(first, torchs, range(4, 7))
        train(second, ours, range(4, 7))
        assert same(second, first)
        assert same_state(ours.state_dict()["state"], torchs.state_dict()["state"])
        saved = io.BytesIO()
        torch.save(ours.state_dict(), saved)
        whole = copy.deepcopy(ours.state_dict())
    third.load_state_dict(second.state_dict())
    again = AdamW(third.named_parameters(), fused=True)
    saved.seek(0)
    again.load_state_dict(torch.load(saved, weights_only=True))
    assert same_state(again.state_dict()["state"], whole["state"])
    train(first, torchs, range(7, 9))
    train(third, again, range(7, 9))
    assert same(third, first)


def test_a_grad_scaler_unscales_and_skips(tmp_path: Path) -> None:
    def run(make: Callable[..., torch.optim.Optimizer], unscales: bool) -> tuple[nn.Module, list[float]]:
        model = make_model()
        optimizer, scaler = make(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scales: list[float] = []
        for step in range(4):
            scaler.scale(model(inputs(step)).square().mean()).backward()
            if step == 1:
                model[0].weight.grad[0, 0] = torch.inf
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return model, scales

    for unscales in (False, True):
        theirs, expected = run(lambda params, **settings: AdamW(params, fused=True, **settings), unscales)
        ours, scales = run(lambda params, **settings: Offloaded(AdamW, params, device="cpu", **settings), unscales)
        assert scales == expected == [2.0**10, 2.0**9, 2.0**9, 2.0**9]
        assert same(ours, theirs)


def test_bf16_parameters_have_fp32_masters_and_take_over_new_values(tmp_path: Path) -> None:
    ours, theirs = make_model(torch.bfloat16), make_model(torch.bfloat16)
    masters = [p.detach().float() for p in theirs.parameters()]
    torchs = AdamW(masters, lr=1e-2, fused=True)
    with Offloaded(AdamW, ours.parameters(), path=tmp_path, lr=1e-2) as optimizer:
        for step in range(5):
            for model in (ours, theirs):
                backward(model, step)
            if step == 1:  # another memory of one, and no gradient of another
                former = weakref.ref(optimizer._local.records[ours[0].bias].full)
                ours[0].bias.data = ours[0].bias.data.clone()
                ours[2].bias.grad = theirs[2].bias.grad = None
            for master, p in zip(masters, theirs.parameters(), strict=True):
                master.grad = p.grad.float() if p.grad is not None else None
                p.grad = None
            optimizer.step()
            assert step != 1 or former() is None
            optimizer.zero_grad()
            torchs.step()
            with torch.no_grad():
                for master, p in zip(masters, theirs.parameters(), strict=True):
                    p.copy_(master)
                if step == 2:  # as a load of weights: the masters of what changed follow
                    ours[0].weight[3] = theirs[0].weight[3] = masters[0][3] = 0.25
            assert same(ours, theirs)
        entry = optimizer.state[ours[0].weight]
        assert list(entry) == ["step", "exp_avg", "exp_avg_sq", "master"]
        assert torch.equal(entry["master"], masters[0])
        assert optimizer.statistics().disk_bytes == 12 * sum(ours[i].weight.numel() for i in (0, 2))


def test_parameters_of_any_shape_and_memory(tmp_path: Path) -> None:
    def run(make: Callable[..., torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        conv = nn.Conv2d(16, 40, 3)
        named = {**dict(conv.named_parameters()), "scale": nn.Parameter(torch.tensor(2.0))}
        named |= {"none": nn.Parameter(torch.empty(0, 3)), "frozen": nn.Parameter(torch.ones(3), requires_grad=False)}
        optimizer = make(list(named.values()), lr=1e-2)
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in range(4):
            if step == 1:  # another memory, as a swap of weights gives
                conv.weight.data = conv.weight.data.clone()
            if step == 2:  # thawed
                named["frozen"].requires_grad_(True)
            x = torch.randn(1, 16, 5, 5, generator=torch.Generator().manual_seed(step))
            ((conv(x) * named["scale"]).square().mean() + named["frozen"].sum() + named["none"].sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        state = {f"{name}.avg": optimizer.state[p]["exp_avg"] for name, p in named.items()}
        return {n: t.detach().clone() for n, t in (named | state).items()}

    ours = run(lambda params, **settings: Offloaded(AdamW, params, path=tmp_path, **settings))
    theirs = run(lambda params, **settings: AdamW(params, fused=True, **settings))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_of_its_own_memory_gives_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    def run(**given: Any) -> list[torch.Tensor]:
        model = make_model(dtype)
        settings: dict[str, Any] = {"path": tmp_path, "lr": 1e-2, **given}
        with Offloaded(AdamW, model.parameters(), **settings) as optimizer:
            for step in range(3):
                for micro in range(2):
                    backward(model, 2 * step + micro)
                optimizer.step()
                optimizer.zero_grad()
            return [p.detach().clone() for p in model.parameters()]

    expected = run()
    for given in ({}, {"device": "cpu"}):
        with FakeDevice() as device:
            found = run(_streams=device, **given)
        assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True)), given


KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    "SGD, fused": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
    "SGD, no state": (torch.optim.SGD, {}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "NAdam": (torch.optim.NAdam, {}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1, "fused": True}),
    "AdamW, foreach": (AdamW, {"foreach": True}),
    "AdamW, neither": (AdamW, {"fused": False, "foreach": False}),
    "AdamW, amsgrad": (AdamW, {"amsgrad": True, "maximize": True, "fused": True}),
    "Adamax": (torch.optim.Adamax, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Rprop": (torch.optim.Rprop, {}),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_element_wise_optimizer_has_its_bits(name: str, tmp_path: Path) -> None:
    kind, settings = KINDS[name]
    ours, theirs = make_model(), make_model()
    torchs = kind(theirs.parameters(), lr=0.01, **settings)
    with Offloaded(kind, ours.parameters(), path=tmp_path, lr=0.01, **settings) as optimizer:
        train(theirs, torchs, range(2))
        train(ours, optimizer, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict({**saved, "state": {}})
        assert not any(torch.as_tensor(entry.get("exp_avg", 0)).any() for entry in optimizer.state.values())
        optimizer.load_state_dict(saved)
        train(theirs, torchs, range(2, 4))
        train(ours, optimizer, range(2, 4))
        assert same(ours, theirs)
        state = torchs.state_dict()["state"]
        expected = {key: {n: v for n, v in entry.items() if v is not None} for key, entry in state.items()}
        if any(expected.values()):
            assert same_state(optimizer.state_dict()["state"], expected)
        again = kind(make_model().parameters(), lr=0.01, **settings)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_what_cannot_be_offloaded_is_refused(tmp_path: Path) -> None:
    weights = list(make_model().parameters())

    def refused(match: str, kind: Any = AdamW, params: Any = weights, error: Any = UsageError, **given: Any) -> None:
        with pytest.raises(error, match=match):
            Offloaded(kind, params, **{"device": "cpu", "lr": 0.1, **given})

    refused("not known to be element-wise", kind=torch.optim.LBFGS)
    refused("not known to be element-wise", kind=torch.optim.Muon)
    refused("expected a subclass of .*, got 'AdamW'", kind="AdamW")
    refused("got an optimizer of class AdamW", kind=AdamW(weights))
    refused("pass model.parameters", params=make_model())
    refused("expected a positive number of bytes", host_budget_bytes="4GiB")
    refused("expected a positive number of bytes", host_budget_bytes=-1)
    refused("needs a path", device="nvme")
    refused("expected an existing folder", device="nvme", path=tmp_path / "none")
    refused('expected "nvme" or "cpu"', device="disk")
    refused("capturable=True", capturable=True)
    refused("float64", params=[nn.Parameter(torch.zeros(3, dtype=torch.float64))])
    refused("meta device", params=[nn.Parameter(torch.zeros(3, device="meta"))])
    refused("all on one device", params=[*weights, nn.Parameter(torch.zeros(3, device="meta"))])
    refused("make it contiguous", params=[nn.Parameter(torch.zeros(4, 4)[:, :2])])
    refused("at least one parameter", params=[])
    refused("single tensor", params=weights[0])
    refused("state of .* does not fit|host_budget_bytes", host_budget_bytes=200_000, error=BudgetError)
    with Offloaded(AdamW, weights, path=tmp_path) as optimizer:
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UsageError, match="cannot be copied or pickled"):
                copied(optimizer)
        refused("another run holds this folder", device="nvme", path=tmp_path, error=RunFolderError)
        state = optimizer.state_dict()
        with pytest.raises(UsageError, match="from another model"):
            optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}]})
        entry = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
        with pytest.raises(UsageError, match="expected shape"):
            optimizer.load_state_dict({**state, "state": {0: entry}})
    group = {"params": [nn.Parameter(torch.zeros(2))]}
    for closed in (optimizer.step, optimizer.state_dict, lambda: optimizer.add_param_group(group)):
        with pytest.raises(UsageError, match="is closed"):
            closed()


def test_a_budget_spills_to_disk_and_leftovers_are_swept(tmp_path: Path) -> None:
    left = tmp_path / "zstore-run" / "rank-00000" / "killed.shard"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(4096))
    ours, theirs = make_model(), make_model()
    train(theirs, AdamW(theirs.parameters(), lr=1e-2, fused=True))
    kept: dict[str, Any] = {"device": "cpu", "path": tmp_path, "host_budget_bytes": 400_000}
    with Offloaded(AdamW, ours.parameters(), **kept, lr=1e-2) as optimizer:
        assert not left.exists()
        train(ours, optimizer)
        assert same(ours, theirs)
        held = optimizer.statistics()
        assert held.disk_bytes > 0
        assert held.host_bytes + held.pool_bytes <= 400_000


def test_a_failed_step_is_told_until_a_state_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = make_model(), make_model()
    train(theirs, AdamW(theirs.parameters(), fused=True))
    with Offloaded(AdamW, ours.parameters(), path=tmp_path) as optimizer:
        train(ours, optimizer, range(2))
        saved = copy.deepcopy([ours.state_dict(), optimizer.state_dict()])
        optimizer._local.arrays.host = None  # torch's kernel takes the tiles
        tiles = iter([None, None, OSError("the drive is gone")])

        def fails(self: Any, *args: Any) -> None:
            if (error := next(tiles)) is not None:
                raise error
            tile(self, *args)

        step = type(optimizer._local.kernels[0].start(optimizer.param_groups[0], {"step": 0.0}))
        tile = step.tiles
        monkeypatch.setattr(step, "tiles", fails)
        with pytest.raises(OSError, match="the drive is gone"):
            train(ours, optimizer, range(2, 4))
        monkeypatch.setattr(step, "tiles", tile)
        optimizer.zero_grad()
        with pytest.raises(UsageError, match="inconsistent: load both before"):
            train(ours, optimizer, range(2, 3))
        optimizer.zero_grad()
        ours.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(ours, optimizer, range(2, 4))
        assert same(ours, theirs)
