"""Gradients and weights that a script reads and changes in place, and hooks of its own, beside the plain loop."""

import math
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

WHOLE = {"stage 0": {"stage": 0}, "stage 2, alone": {"stage": 2}}
SHARDED = {
    f"stage 3, {place}": {"stage": 3, "stage3_param_persistence_threshold": 0}
    | {key: {"device": device} for key in ("offload_param", "offload_optimizer")}
    for place, device in (("memory", "cpu"), ("disk", "nvme"))
}
APART = [{"stage": stage, "offload_optimizer": {"device": device}} for stage in (1, 2) for device in ("cpu", "nvme")]
"""Masters are not the parameters."""
Act = Callable[[list[nn.Parameter]], Any]
"""On gradients, before a step."""
Change = Callable[[nn.Sequential, int], object]
"""Of weights, after a step of this number."""
Found = tuple[list[float], dict[str, Any]]
"""Losses with what acts returned, and weights."""


def _leave(_: list[nn.Parameter]) -> float:
    return 0.0


def _keep(_: nn.Sequential, step: int) -> None:
    pass


def _clip(parameters: list[nn.Parameter]) -> float:
    return float(torch.nn.utils.clip_grad_norm_(parameters, 0.5))


def _scale_some(parameters: list[nn.Parameter]) -> float:
    for number, parameter in enumerate(parameters):
        if parameter.grad is not None:
            parameter.grad.mul_(0.1) if number % 2 else parameter.grad.data.div_(2.0)
    return sum(float(p.grad.norm()) for p in parameters if p.grad is not None)


def _edit(parameters: list[nn.Parameter]) -> float:
    parameters[0].grad.clamp_(-0.01, 0.01)  # type: ignore[union-attr]
    parameters[1].grad = None
    parameters[2].grad = torch.full_like(parameters[2], 0.25)
    nn.utils.clip_grad_value_(parameters[3:], 0.02)
    return float(parameters[0].grad.abs().sum())  # type: ignore[union-attr]


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


def _plain(act: Act = _leave, change: Change = _keep, *, world_size: int = 1, rank: int = 0, steps: int = 4) -> Found:
    """Ranks' mean gradients are those of their batches' mean loss."""
    model = _net()
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True), []
    for step in range(steps):
        for one in range(world_size):
            loss = model(_batch(step, one)).square().mean() * 10
            (loss / world_size).backward()
            seen += [loss.item()] if one == rank else []
        seen.append(float(act(list(model.parameters()))))
        optimizer.step()
        optimizer.zero_grad()
        change(model, step)
    return seen, {name: value.detach() for name, value in model.named_parameters()}


def _config(zero: dict[str, Any], folder: Path | str, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.0,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.01}},
        "zero_optimization": placed(zero, folder),
        "zstore": {"step_overlap": "forward"},
        **more,
    }


def _engine(zero: dict[str, Any], folder: Path | str, **more: Any) -> Engine:
    return zstore.initialize(model=_net(), config=_config(zero, folder, **more))[0]


def _ours(engine: Engine, act: Act = _leave, change: Change = _keep, *, rank: int = 0, steps: int = 4) -> Found:
    seen = []
    with engine:
        parameters = list(engine.module.parameters())
        for step in range(steps):
            loss = engine(_batch(step, rank)).square().mean() * 10
            engine.backward(loss)
            seen += [loss.item(), float(act(parameters))]
            engine.step()
            assert all(parameter.grad is None for parameter in parameters)
            change(engine.module, step)
        return seen, {name: engine.get_full_parameter(name) for name, _ in engine.module.named_parameters()}


def _assert_equal(found: Found, wanted: Found) -> None:
    assert found[0] == wanted[0]
    assert all(torch.equal(found[1][name], value) for name, value in wanted[1].items())


def _assert_close(found: Found, wanted: Found) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    torch.testing.assert_close({name: torch.as_tensor(value) for name, value in found[1].items()}, wanted[1])


def _on_rank(rank: int, zeros: list[dict[str, Any]], act: Act, change: Change, folder: str) -> list[Any]:
    found = [_ours(_engine(zero, folder), act, change, rank=rank) for zero in zeros]
    return [(seen, {name: value.numpy() for name, value in state.items()}) for seen, state in found]


@pytest.mark.parametrize("act", [_clip, _scale_some, _edit])
@pytest.mark.parametrize("where", WHOLE)
def test_whole_gradients_are_read_and_changed_as_in_a_plain_loop(act: Act, where: str, tmp_path: Path) -> None:
    _assert_equal(_ours(_engine(WHOLE[where], tmp_path), act), _plain(act))


@pytest.mark.parametrize("act", [_clip, _scale_some])
@pytest.mark.parametrize("where", SHARDED)
def test_sharded_gradients_have_a_norm_and_take_factors(act: Act, where: str, tmp_path: Path) -> None:
    _assert_close(_ours(_engine(SHARDED[where], tmp_path), act), _plain(act))


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_factors_hold_in_each_step_mode_and_with_a_loss_scale(overlap: str, tmp_path: Path) -> None:
    zero = SHARDED["stage 3, disk"]
    _assert_close(_ours(_engine(zero, tmp_path, zstore={"step_overlap": overlap}), _clip), _plain(_clip))
    one, other = (_engine({"stage": stage}, tmp_path, fp16={"enabled": True, "loss_scale": 1024}) for stage in (0, 3))
    for engine in (one, other):
        with engine:
            x = _batch(0, 0).half()
            engine.backward(engine(x).square().mean())
            parameters = list(engine.module.parameters())
            norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
            assert norm == pytest.approx(engine.clip_grad_norm_(math.inf))
            norms = [float(engine.get_gradient(name).norm()) for name, _ in engine.module.named_parameters()]
            assert norm == pytest.approx(math.hypot(*norms))


def test_all_else_on_a_sharded_gradient_is_refused(tmp_path: Path) -> None:
    with _engine(SHARDED["stage 3, memory"], tmp_path) as engine:
        weight = engine.module[0].weight
        for act in (
            lambda: weight.grad.add_(1.0),
            lambda: weight.grad * 2.0,
            lambda: weight.grad.norm(1),
            lambda: weight.grad.norm(dim=0),
            lambda: weight.grad.mul_(torch.ones(64, 4)),
            lambda: weight.grad + 1,
            lambda: nn.utils.clip_grad_value_([weight], 0.1),
            lambda: torch.optim.SGD([weight], lr=0.1).step(),
        ):
            engine.backward(engine(_batch(0, 0)).sum())
            assert weight.grad.shape == weight.shape
            with pytest.raises(UsageError, match=r"get_gradient\('0\.weight'\)|'0\.weight' outside a forward"):
                act()
            engine.step()
        for value in (None, torch.ones(64, 4)):
            engine.backward(engine(_batch(0, 0)).sum())
            weight.grad = value
            with pytest.raises(UsageError, match=r"the \.grad of parameter '0\.weight' was replaced or cleared"):
                engine.step()
        engine.backward(engine(_batch(0, 0)).sum())
        weight.grad.mul_(0.5)
        with pytest.raises(UsageError, match="after the norm"):
            engine.backward(engine(_batch(0, 0)).sum())
    with _engine({"stage": 0}, tmp_path, zstore={"step_overlap": "backward"}) as engine:
        engine.backward(engine(_batch(0, 0)).sum())
        with pytest.raises(UsageError, match='"step_overlap": "backward"'):
            engine.module[0].weight.grad.mul_(0.5)
        engine.step()


def test_gradients_accumulate_in_sight(tmp_path: Path) -> None:
    plain = _net()
    with _engine({"stage": 0}, tmp_path, gradient_accumulation_steps=2) as engine:
        for micro in range(2):
            (plain(_batch(micro, 0)).sum() / 2).backward()
            engine.backward(engine(_batch(micro, 0)).sum())
            for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad)
                ours.grad.mul_(0.5)
                theirs.grad.mul_(0.5)
            engine.step()
        assert engine.module[0].weight.grad is None


@pytest.mark.parametrize("act", [_clip, pytest.param(_scale_some, marks=pytest.mark.soak)])
def test_two_ranks_act_on_the_mean(act: Act, tmp_path: Path) -> None:
    zeros: list[dict[str, Any]] = [{"stage": stage} for stage in range(4)] + [SHARDED["stage 3, disk"]]
    for rank, found in enumerate(run_ranks(_on_rank, 2, zeros, act, _keep, str(tmp_path))):
        for one in found:
            _assert_close(one, _plain(act, world_size=2, rank=rank))
    for rank, (one,) in enumerate(run_ranks(_on_rank, 2, zeros[:1], _edit, _keep, str(tmp_path))):
        _assert_close(one, _plain(_edit, world_size=2, rank=rank))


def _backward(engine: Engine, value: float) -> None:
    engine.backward(engine(torch.full((1, 4), value)).square().mean() * 10)


def test_clipping_by_the_loop_has_the_bits_of_clipping_by_the_config(tmp_path: Path) -> None:
    zero = SHARDED["stage 3, memory"]
    by_config, by_loop = (_engine(zero, tmp_path, gradient_clipping=clip) for clip in (0.1, 0.0))
    with by_config, by_loop:
        for value in (1.0, 2.0):
            _backward(by_config, value)
            by_config.step()
            _backward(by_loop, value)
            norm = by_loop.clip_grad_norm_(0.1)
            assert norm == by_loop.clip_grad_norm_(0.1)  # taken once
            by_loop.step()
            assert norm == by_config.get_global_grad_norm() == by_loop.get_global_grad_norm()
        found, wanted = by_loop.module_state_dict(), by_config.module_state_dict()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        assert by_loop.training_state.clip_norm == 0.1
        _backward(by_loop, 1.0)
        by_loop.clip_grad_norm_(math.inf)
        assert by_loop.training_state.clip_norm == 0.0


def test_clipping_out_of_place_is_refused(tmp_path: Path) -> None:
    with _engine({"stage": 3}, tmp_path) as engine:
        with pytest.raises(UsageError, match="without a backward"):
            engine.clip_grad_norm_(1.0)
        _backward(engine, 1.0)
        with pytest.raises(UsageError, match="at least 0"):
            engine.clip_grad_norm_(-1.0)
        engine.step()
    with _engine({"stage": 3}, tmp_path, zstore={"step_overlap": "backward"}) as engine:
        _backward(engine, 1.0)
        with pytest.raises(UsageError, match='"gradient_clipping"'):
            engine.clip_grad_norm_(1.0)
        assert engine.clip_grad_norm_(math.inf) > 0
        engine.step()


HOOKED: dict[str, tuple[dict[str, Any], str]] = {
    "stage 0": ({"stage": 0}, "none"),
    "stage 0, in the backward": ({"stage": 0}, "backward"),
    "stage 1": ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, "none"),
    "stage 2": ({"stage": 2, "offload_optimizer": {"device": "nvme"}}, "forward"),
    "stage 3, memory": (SHARDED["stage 3, memory"], "none"),
    "stage 3, disk": (SHARDED["stage 3, disk"], "forward"),
    "stage 3, in the backward": (SHARDED["stage 3, disk"], "backward"),
}


def _hook(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    seen: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():

        def arrived(one: nn.Parameter, name: str = name) -> None:
            seen.setdefault(name, []).append(one.grad.clone())
            one.grad.clamp_(-0.05, 0.05).add_(one.detach(), alpha=0.01)

        parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
    return seen


def _plain_hooked(rank: int, steps: int = 4) -> tuple[dict[str, list[torch.Tensor]], dict[str, torch.Tensor]]:
    model = _net()
    seen, optimizer = _hook(model), torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    for step in range(steps):
        (model(_batch(step, rank)).square().mean() * 10).backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen, model.state_dict()


@pytest.mark.parametrize("where", HOOKED)
def test_hooks_see_gradients_before_they_are_taken_and_may_change_them(where: str, tmp_path: Path) -> None:
    zero, overlap = HOOKED[where]
    engine = _engine(zero, tmp_path, zstore={"step_overlap": overlap})
    seen = _hook(engine.module)
    _, weights = _ours(engine)
    wanted, expected = _plain_hooked(0)
    assert seen.keys() == wanted.keys()
    assert all(torch.equal(one, other) for name in wanted for one, other in zip(seen[name], wanted[name], strict=True))
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_hooks_of_before_and_after_initialize_are_called_in_order_and_can_be_removed(tmp_path: Path) -> None:
    model, called = _net(), []
    weight: Any = model[0].weight

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        return lambda one: called.append((name, one.grad is not None))

    first = weight.register_post_accumulate_grad_hook(hook("before"))
    with zstore.initialize(model=model, config=_config(SHARDED["stage 3, memory"], tmp_path))[0] as engine:
        second = weight.register_post_accumulate_grad_hook(hook("after"))
        third = weight.register_post_accumulate_grad_hook(hook("last"))
        for expected in (["before", "after", "last"], ["before", "last"], ["last"], []):
            called.clear()
            engine.backward(engine(_batch(0, 0)).sum())
            engine.step()
            assert called == [(name, True) for name in expected]
            (second if len(expected) == 3 else first if len(expected) == 2 else third).remove()
        before = engine.get_full_parameter("0.weight")
        engine.backward(engine(_batch(0, 0)).sum())
        engine.step()
        assert not torch.equal(engine.get_full_parameter("0.weight"), before)


def _hooked_rank(rank: int, folder: str) -> list[str]:
    """Return the cases whose hooks saw other gradients than a plain loop, or set one that was ignored."""
    faults = []
    for where, (zero, overlap) in HOOKED.items():
        if where != "stage 0, in the backward":
            with _engine(zero, folder, zstore={"step_overlap": overlap}) as engine:
                seen, (wanted, _) = _hook(engine.module), _plain_hooked(rank, 1)
                engine.backward(engine(_batch(0, rank)).square().mean() * 10)
                engine.step()
            if seen.keys() != wanted.keys() or any(not torch.equal(seen[name][0], wanted[name][0]) for name in wanted):
                faults.append(where)
    for stage in range(4):
        net = _net()
        net.unused = nn.Parameter(torch.ones(1))
        with zstore.initialize(model=net, config=_config({"stage": stage}, folder))[0] as engine:
            out = engine(_batch(0, rank))
            out.register_hook(lambda _, at=net.unused: setattr(at, "grad", torch.ones(1)) if rank else None)
            engine.backward(out.square().mean())
            engine.step()
            faults += [f"stage {stage}"] * (float(engine.get_full_parameter("unused")) > 0.96)
    return faults


def test_hooks_of_each_rank_see_its_own_gradients(tmp_path: Path) -> None:
    assert run_ranks(_hooked_rank, 2, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("change", [_clamp, _initialise])
def test_changed_weights_have_the_bits_of_a_plain_loop(change: Change, tmp_path: Path) -> None:
    for zero in ({"stage": 0}, *APART):
        _assert_equal(_ours(_engine(zero, tmp_path), change=change), _plain(change=change))


@pytest.mark.parametrize("change", [pytest.param(_clamp, marks=pytest.mark.soak), _initialise])
def test_changed_weights_at_two_ranks(change: Change, tmp_path: Path) -> None:
    zeros: list[dict[str, Any]] = [{"stage": 0}, {"stage": 1}, {"stage": 2}, *APART]
    first, second = run_ranks(_on_rank, 2, zeros, _leave, change, str(tmp_path))
    for found, (_, other) in zip(first, second, strict=True):
        _assert_close(found, _plain(change=change, world_size=2))
        assert all((found[1][name] == value).all() for name, value in other.items())


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


@pytest.mark.parametrize("place", SHARDED)
def test_a_change_of_sharded_weights_is_refused(place: str, tmp_path: Path) -> None:
    with _engine(SHARDED[place], tmp_path) as engine:
        before = engine.get_full_parameter("2.bias")
        for change in (nn.init.zeros_, nn.init.normal_, lambda b: b.detach().mul_(2), lambda b: b.data.add_(1)):
            with pytest.raises(UsageError, match=r"'2\.bias' outside a forward.*modifier_rank"):
                change(engine.module[2].bias)
        for call in (
            lambda: engine(_batch(0, 0)),
            lambda: engine.save_checkpoint(str(tmp_path / "saves")),
            lambda: engine.get_full_parameter("0.weight"),
        ):
            with engine.module[0].register_forward_pre_hook(_zero_bias):
                engine(_batch(0, 0))
            with pytest.raises(UsageError, match=r"changed in place \('0\.bias'\).*modifier_rank"):
                call()
            assert torch.equal(engine.get_full_parameter("2.bias"), before)
        with zstore.gather(engine.module[2].bias, modifier_rank=0):
            nn.init.zeros_(engine.module[2].bias)
        engine.backward(engine(_batch(0, 0)).sum())
        engine.step()


@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize("zero", APART)
def test_writes_through_data_are_told_at_the_step(zero: dict[str, Any], overlap: str, tmp_path: Path) -> None:
    own = {"step_overlap": overlap}

    def step(engine: Engine) -> None:
        engine.backward(engine(_batch(0, 0)).square().mean())
        engine.step()

    def swapped(model: nn.Sequential, number: int) -> None:
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        with torch.no_grad():
            model(_batch(0, 0))
        for parameter, values in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(values)

    _assert_equal(_ours(_engine(zero, tmp_path, zstore=own), change=swapped), _plain(change=swapped))
    with _engine(zero, tmp_path, zstore=own) as engine:
        step(engine)
        engine.set_full_parameter("0.weight", torch.zeros(64, 4))
        step(engine)
        for parameter in engine.module.parameters():
            parameter.data.clamp_(-0.01, 0.01)
        with pytest.raises(UsageError, match=r"was changed through \.data"):
            step(engine)


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
