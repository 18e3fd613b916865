"""`zero_grad()` between a backward and its step, beside a plain loop with torch's own."""

from __future__ import annotations

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
from zstore.errors import RankError, UsageError
from zstore.journal import read, steps
from zstore.testing.ranks import run_ranks

WIDTH = 384
WAYS: dict[str, Callable[[Engine, torch.optim.Optimizer], Any]] = {
    "engine": lambda engine, _: engine.zero_grad(),
    "engine, zeros": lambda engine, _: engine.zero_grad(set_to_none=False),
    "optimizer": lambda engine, _: engine.optimizer.zero_grad(),
    "optimizer, zeros": lambda engine, _: engine.optimizer.zero_grad(set_to_none=False),
    "client": lambda _, client: client.zero_grad(),
    "client, zeros": lambda _, client: client.zero_grad(set_to_none=False),
    "module": lambda engine, _: engine.module.zero_grad(),
    "module, zeros": lambda engine, _: engine.module.zero_grad(set_to_none=False),
}
PLACES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage, "stage3_param_persistence_threshold": 0} for stage in range(4)},
    "cpu": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "nvme": {"stage": 1, "offload_optimizer": {"device": "nvme"}},
    "all on nvme": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_param": {"device": "nvme"},
        "offload_optimizer": {"device": "nvme"},
    },
}
SPILLED = "gradients on disk"
PLACES[SPILLED] = PLACES["all on nvme"]
LOOP = (
    # Micro-batches by number; a bad one's gradients are NaN, and forgotten with those of the step so far.
    [(0, False), (1, False)],
    [(2, True), (3, False)],
    [(4, False), (5, True)],  # with one micro-batch to a step: a step without gradients
    [(6, False), (7, False)],
)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)


def _loss(model: Callable[[torch.Tensor], torch.Tensor], number: int, rank: int, *, bad: bool) -> torch.Tensor:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))
    loss = model(x).float().square().mean()
    return loss * math.nan if bad else loss


def _steps(accumulation: int) -> list[list[tuple[int, bool]]]:
    return list(LOOP) if accumulation == 2 else [[micro] for step in LOOP for micro in step]


def _plain(world_size: int, accumulation: int, *, each: bool = False) -> dict[str, torch.Tensor]:
    """The loop as others write it, on so many replicas, whose gradients are averaged once a step or after `each` backward, as
    DDP does; the mean of two halves exactly."""
    replicas = [_net() for _ in range(1 if each else world_size)]
    optimizers = [_optimizer(replica) for replica in replicas]
    for step in _steps(accumulation):
        for number, bad in step:
            losses = [
                _loss(replicas[rank % len(replicas)], number, rank, bad=bad) / (accumulation * world_size)
                for rank in range(world_size)
            ]
            if each:
                sum(losses).backward()  # type: ignore[union-attr]
            else:
                for loss in losses:
                    loss.backward()
            for optimizer in optimizers if bad else ():
                optimizer.zero_grad()
        for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            for parameter in parameters:
                parameter.grad = torch.stack(gradients).sum(0) if gradients else None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach() for name, value in replicas[0].state_dict().items()}


def _config(place: str, folder: str, accumulation: int = 1, **own: Any) -> dict[str, Any]:
    if place == SPILLED:
        own["host_budget_bytes"] = (1_100_000, 1_600_000)[torch.distributed.is_initialized()]
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "steps_per_print": 0,
        "zero_optimization": placed(PLACES[place], folder),
        "zstore": own,
    }


def _start(config: dict[str, Any]) -> tuple[Engine, torch.optim.Optimizer]:
    model = _net()
    client = _optimizer(model)
    return zstore.initialize(model=model, optimizer=client, config=config)[0], client


def _weights(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: engine.get_full_parameter(name) for name, _ in engine.module.named_parameters()}  # type: ignore[misc]


def _ours(place: str, folder: str, accumulation: int, way: str, rank: int = 0, **own: Any) -> dict[str, torch.Tensor]:
    engine, client = _start(_config(place, folder, accumulation, **own))
    forget = WAYS[way]
    with engine:
        assert bool(engine.training_state.state.spilled) == (place == SPILLED)
        for step in _steps(accumulation):
            forget(engine, client)
            for number, bad in step:
                engine.backward(_loss(engine, number, rank, bad=bad))
                if bad:
                    forget(engine, client)
                engine.step()
                forget(engine, client)  # keeps the gradients of a step that goes on
        return _weights(engine)


def _differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize(
    ("way", "accumulation", "place"),
    [
        *((way, 2, place) for way in WAYS if "zeros" not in way for place in ("stage 0", "all on nvme")),
        ("client", 1, "stage 0"),
        ("engine", 1, "stage 2"),
        ("optimizer", 1, "cpu"),
        ("module", 1, "nvme"),
        ("client", 1, "all on nvme"),
        ("engine", 1, SPILLED),
        ("optimizer", 2, SPILLED),
    ],
)
def test_a_step_forgets_what_a_plain_loop_forgets(way: str, accumulation: int, place: str, tmp_path: Path) -> None:
    assert _differing(_ours(place, str(tmp_path), accumulation, way), _plain(1, accumulation)) == []


@pytest.mark.parametrize("way", [way for way in WAYS if "zeros" in way])
@pytest.mark.parametrize("place", ["stage 0", "cpu", SPILLED])
def test_zeros_are_no_gradients_for_a_good_micro_batch_that_follows(way: str, place: str, tmp_path: Path) -> None:
    plain = _net()
    theirs = _optimizer(plain)
    _loss(plain, 0, 0, bad=False).backward()
    theirs.zero_grad(set_to_none=False)
    _loss(plain, 1, 0, bad=False).backward()
    theirs.step()
    engine, client = _start(_config(place, str(tmp_path)))
    with engine:
        engine.backward(_loss(engine, 0, 0, bad=False))
        WAYS[way](engine, client)
        engine.backward(_loss(engine, 1, 0, bad=False))
        engine.step()
        assert _differing(_weights(engine), plain.state_dict()) == []


def _rank(rank: int, folder: str, accumulation: int) -> list[dict[str, Any]]:
    """Each place with one of the ways, and each way."""
    ways = ["engine", "optimizer", "client", "module"]
    found = []
    for number, place in enumerate(PLACES):
        weights = _ours(place, folder, accumulation, ways[number % 4], rank)
        found.append({name: value.numpy() for name, value in weights.items()})
    return found


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_two_ranks_forget_together(accumulation: int, tmp_path: Path) -> None:
    wanted = {each: _plain(2, accumulation, each=each) for each in (False, True)}
    for ranks in run_ranks(_rank, 2, str(tmp_path), accumulation):
        for place, found in zip(PLACES, ranks, strict=False):
            each = PLACES[place]["stage"] >= 2
            weights = {name: torch.as_tensor(value) for name, value in found.items()}
            assert (place, _differing(weights, wanted[each])) == (place, [])


def _alone(rank: int, way: str) -> str:
    engine, client = _start(_config("stage 2", ""))
    with engine:
        engine.backward(_loss(engine, 0, rank, bad=False))
        try:
            if rank == 0:
                WAYS[way](engine, client)
            engine.step()
        except (UsageError, RankError) as error:
            return str(error)
    return ""


@pytest.mark.parametrize("way", ["engine", "client"])
def test_a_rank_that_forgets_alone_is_told(way: str) -> None:
    assert "zero_grad() was called on rank 0 while rank 1 is in step" in run_ranks(_alone, 2, way)[0]


@pytest.mark.parametrize("place", ["stage 0", "all on nvme"])
def test_a_micro_batch_with_a_loss_scale_is_skipped(place: str, tmp_path: Path) -> None:
    plain = _net().half()
    masters = list(_net().parameters())
    theirs = torch.optim.AdamW(masters, lr=0.01, weight_decay=0.1, fused=True)
    config = _config(place, str(tmp_path)) | {"fp16": {"enabled": True, "loss_scale": 256}}
    engine, client = _start(config)
    with engine:
        for number, bad in ((0, False), (1, True), (2, False), (3, False)):
            engine.backward(_loss(lambda x: engine(x.half()), number, 0, bad=bad))
            if bad:
                client.zero_grad()
                continue
            engine.step()
            plain.zero_grad()
            (_loss(lambda x: plain(x.half()), number, 0, bad=False) * 256).backward()
            for master, parameter in zip(masters, plain.parameters(), strict=True):
                master.grad = parameter.grad.float() / 256  # type: ignore[union-attr]
            theirs.step()
            for master, parameter in zip(masters, plain.parameters(), strict=True):
                parameter.data.copy_(master)
        wanted = dict(zip(_weights(engine), masters, strict=True))
        assert engine.skipped_steps == 0
        assert engine.global_steps == 3
        assert _differing(_weights(engine), wanted) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("way", [*WAYS, "none"])
def test_updates_in_the_backward_cannot_be_taken_back(way: str, tmp_path: Path) -> None:
    engine, client = _start(_config("cpu", str(tmp_path), 2, step_overlap="backward"))
    with engine:
        engine.backward(_loss(engine, 0, 0, bad=True))
        WAYS["engine"](engine, client)  # no update yet: it is not the last micro-batch of its step
        engine.step()
        engine.backward(_loss(engine, 1, 0, bad=False))
        if way == "none":
            engine.step()
            return
        told = r'"backward" the backward has updated .* set "step_overlap" to "forward"'
        if not way.startswith("engine"):
            WAYS[way](engine, client)
            with pytest.raises(UsageError, match=told):
                engine.step()
        else:
            with pytest.raises(UsageError, match=told):
                WAYS[way](engine, client)
        if way.startswith("engine"):
            engine.step()


def test_forgotten_in_mode_forward_and_under_clipping(tmp_path: Path) -> None:
    plain = _net()
    theirs = _optimizer(plain)
    for number in (0, 2):
        _loss(plain, number, 0, bad=False).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        theirs.step()
        theirs.zero_grad()
    for overlap in ("none", "forward", "auto"):
        engine, _ = _start(_config("all on nvme", str(tmp_path), step_overlap=overlap) | {"gradient_clipping": 0.05})
        with engine:
            for number in range(3):
                engine.backward(_loss(engine, number, 0, bad=number == 1))
                if number == 1:
                    engine.zero_grad()
                    assert engine.get_gradient("0.weight") is None
                    continue
                engine.step()
            torch.testing.assert_close(_weights(engine), dict(plain.named_parameters()), check_device=False)


def test_a_micro_batch_that_is_forgotten_needs_no_step(tmp_path: Path) -> None:
    engine, client = _start(_config("stage 0", str(tmp_path)))
    with engine:
        client.zero_grad()
        for way in ("engine", "client"):
            engine.backward(_loss(engine, 0, 0, bad=True))
            WAYS[way](engine, client)
            assert engine.clip_grad_norm_(1.0) == 0.0
            engine.step()
            engine.backward(_loss(engine, 0, 0, bad=True))
            WAYS[way](engine, client)
            engine.save_checkpoint(str(tmp_path / way))  # between two steps
            engine.step()
            with pytest.raises(UsageError, match=r"engine\.step\(\) without engine\.backward"):
                engine.step()
        assert _differing(_weights(engine), dict(_net().named_parameters())) == []


def test_the_reported_loss_is_of_the_micro_batches_that_count(tmp_path: Path) -> None:
    config = _config("stage 0", str(tmp_path), 3)
    config["zstore"] = {**config.get("zstore", {}), "journal": str(tmp_path)}
    engine, _ = _start(config)
    with engine:
        for number in range(3):
            loss = _loss(engine, number, 0, bad=number == 1)
            engine.backward(loss)
            if number == 1:
                engine.zero_grad()
            engine.step()
    assert steps(read(tmp_path))["loss"] == [loss.item()]


def test_a_loss_backward_of_the_script_is_forgotten_too(tmp_path: Path) -> None:
    plain = _net()
    theirs = _optimizer(plain)
    _loss(plain, 1, 0, bad=False).backward()
    theirs.step()
    for place in ("stage 0", "all on nvme"):
        engine, client = _start(_config(place, str(tmp_path)))
        with engine:
            _loss(engine, 0, 0, bad=True).backward()
            client.zero_grad()
            _loss(engine, 1, 0, bad=False).backward()
            engine.step()
            assert _differing(_weights(engine), dict(plain.named_parameters())) == []
