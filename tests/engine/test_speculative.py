"""The step mode `speculative`: updates begin in the backward, before the norm is known; with clipping that bites always,
never, now and then the bits are those of a plain loop."""

from __future__ import annotations

import errno
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.bits import ADAM, SPILLS, Case, compare, engine_digests
from tests.engine.models import batch
from tests.engine.runs import make_config, start, state_of
from tests.engine.step_modes import config, data, expected, make_model, step
from tests.reference import Reference
from tests.waiting import until
from zstore.engine import Engine
from zstore.errors import NonFiniteError, UsageError
from zstore.store import Stream
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.ranks import run_ranks

ALWAYS, NEVER = 1e-3, 1e3
STEPS = 5
DISK = {"stage": 3, "tier": "nvme", "parameters": "nvme"}
RUNS: dict[str, dict[str, Any]] = {
    "disk": DISK,
    "disk, fp32": DISK | {"precision": "fp32"},
    "disk, fp16": DISK | {"precision": "fp16"},
    "disk, split masters": DISK | {"split": True},
    "disk, accumulation": DISK | {"accumulation": 2},
    "disk, block by block": DISK | {"accumulation": 3, "by_block": True},
    "disk, gradients too": DISK | {"accumulation": 2, "budget": SPILLS},
    "disk, ahead of a resume": DISK | {"accumulation": 2, "resumes": (2, 0)},
    "host": {"stage": 2, "tier": "cpu"},
    "host, fp32": {"stage": 2, "tier": "cpu", "precision": "fp32"},
    "host, parameters too": {"stage": 3, "tier": "cpu", "parameters": "cpu"},
    "host, fp32 parameters too": {"stage": 3, "tier": "cpu", "parameters": "cpu", "precision": "fp32"},
    "device": {"stage": 2, "tier": "none"},
    "device, fp16": {"stage": 3, "tier": "none", "precision": "fp16"},
}


def _case(run: str, clip: float) -> Case:
    given = {"precision": "bf16", "accumulation": 1, "clip": clip, "overlap": "speculative", "keys": None}
    return Case(**{**given, **RUNS[run]})


def _compare(rank: int, case: Case, world_size: int, waits: int = 3) -> tuple[list[str], int, int]:
    """Return what differs, and how many parameters and steps were updated in the backward and undone; in the first `waits`
    steps the loop waits until the backward's update came as far as it may, in the others it meets `step()` anywhere."""
    counted: list[tuple[int, int]] = []

    def wait(engine: Engine) -> None:
        if engine.global_steps < waits:
            engine.training_state.pending.updater.join()

    def count(engine: Engine) -> None:
        found = engine.statistics()
        counted.append((found.updated_in_backward, found.undone))

    return compare(case, rank, world_size, STEPS, between=wait, end=count), *counted[0]


@pytest.mark.parametrize("clip", [ALWAYS, NEVER], ids=["always", "never"])
@pytest.mark.parametrize(
    ("run", "world_size"),
    [(run, 1) for run in RUNS]
    + [("disk", 2), ("host", 2)]
    + [pytest.param(run, 2, marks=pytest.mark.soak) for run in RUNS if run not in ("disk", "host")],
)
def test_a_speculative_step_has_the_bits_of_a_plain_loop(run: str, world_size: int, clip: float) -> None:
    for differences, in_backward, undone in run_ranks(_compare, world_size, _case(run, clip), world_size):
        assert differences == []
        assert (in_backward > 0, undone > 0) == (clip == NEVER, clip == ALWAYS)


@pytest.mark.parametrize("run", ["disk", "host"])
def test_clipping_that_bites_now_and_then(run: str) -> None:
    case = _case(run, 0.0)
    loop = Reference(case.make(), 1, stage=case.stage, precision="bf16", accumulation=1, clip=0.0, adam=ADAM)
    norms = []
    for number in range(STEPS):
        loop.step([[batch(number, 0, 0, vocab=case.shape["vocab"])]])
        norms.append(loop.norm)
    differences, in_backward, undone = _compare(0, replace(case, clip=sorted(norms)[STEPS // 2]), 1, STEPS)
    assert differences == []
    assert in_backward > 0
    assert undone > 0


# -- what else a step may turn out to be ------------------------------------------------------------------------------


def _engine(nvme: Path, **keys: Any) -> Engine:
    """Return an engine, a step old, whose clipping never bites."""
    engine = start(config("speculative", nvme, gradient_clipping=NEVER) | keys, make_model())
    step(engine)
    return engine


def _backward(engine: Engine, factor: float = 1.0) -> None:
    """Take the backward, and wait until what it brought is updated, as far as it may be before the norm is known."""
    engine.backward(engine(*data(engine.global_steps)) * factor)
    pending = engine.training_state.pending
    assert pending.speculative is not None
    pending.updater.join()
    assert pending.speculative._admitted


def test_settings_that_change_before_the_step(nvme: Path) -> None:
    def schedule(engine: Engine) -> None:
        engine.optimizer.param_groups[0]["lr"] = 0.5

    def clip(engine: Engine) -> None:
        engine.clip_grad_norm_(0.01)

    def scale(engine: Engine) -> None:
        engine.module.embed.weight.grad.mul_(0.5)

    for change in (schedule, clip, scale):
        with start(config("none", nvme, gradient_clipping=NEVER), make_model()) as engine:
            step(engine)
            engine.backward(engine(*data(1)))
            change(engine)
            engine.step()
            step(engine)
            wanted = state_of(engine)
        with _engine(nvme) as engine:
            _backward(engine)
            change(engine)
            engine.step()
            assert engine.statistics().undone == 1
            step(engine)
            assert state_of(engine) == wanted


def _differs(engine: Engine, wanted: dict[str, Any]) -> list[str]:
    """Return what is not as wanted, but for counts of steps that changed nothing."""
    found = state_of(engine)
    return [key for key in wanted if key != "counters" and found[key] != wanted[key]]


def _skips(rank: int, folder: str) -> None:
    keys = {"zstore": {"step_overlap": "speculative", "non_finite_gradients": "skip"}}
    with _engine(Path(folder), **keys) as engine:
        before = engine_digests(engine)
        # Only rank 0's rows of one parameter are bad, late in the backward.
        handle = engine.module.embed.weight.register_hook(lambda g: g * torch.inf if rank == 0 else g)
        _backward(engine)
        engine.step()
        handle.remove()
        assert not engine.was_step_applied()
        assert engine.statistics().undone == 1
        assert engine_digests(engine) == before
        engine.backward(engine(*data(1)))
        engine.step()
        assert engine.world_size > 1 or _differs(engine, expected(2)) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_that_is_skipped_changes_nothing(world_size: int, nvme: Path) -> None:
    run_ranks(_skips, world_size, str(nvme))


def _fails(rank: int, folder: str) -> None:
    with _engine(Path(folder)) as engine:
        before = engine_digests(engine)
        handle = engine.module.embed.weight.register_hook(lambda g: g * torch.nan if rank == 0 else g)
        _backward(engine)
        with pytest.raises(NonFiniteError, match="no parameter and no optimizer state was changed"):
            engine.step()
        handle.remove()
        assert engine_digests(engine) == before

        def fail(gradient: torch.Tensor) -> None:
            raise ValueError("in the middle")

        loss = engine(*data(1))
        handle = engine.module.blocks[0].register_forward_hook(
            lambda module, args, out: out.register_hook(fail) and None
        )
        loss = engine(*data(1))
        with pytest.raises(ValueError, match="in the middle"):
            engine.backward(loss)
        handle.remove()
        assert engine_digests(engine) == before
        step(engine)
        assert engine.world_size > 1 or _differs(engine, expected(2)) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_or_a_backward_that_fails_leaves_the_state_whole(world_size: int, nvme: Path) -> None:
    run_ranks(_fails, world_size, str(nvme))


def test_an_update_that_fails_tears_the_state(nvme: Path) -> None:
    files = FaultyFiles()
    with start(config("speculative", nvme), make_model(), _files=files) as engine:
        step(engine)
        engine.training_state.pending.complete()
        # No unit is gathered after its gradient: else the backward would find the error, and the state would stay whole.
        files.inject(Fault(kind="write", pattern="*optimizer*blocks.0.up.weight*", error_number=errno.EIO))
        _backward(engine)
        with pytest.raises(OSError, match="Input/output error"):
            engine.step()
        with pytest.raises(UsageError, match="a mixture of two"):
            step(engine)


def test_copies_keep_within_the_host_budget(nvme: Path) -> None:
    counted = []
    for budget_bytes in (5_000_000, 100_000_000):
        own = {"step_overlap": "speculative", "host_budget_bytes": budget_bytes}
        with _engine(nvme, zstore=own) as engine:
            before = engine.statistics().updated_in_backward
            for _ in range(2):
                _backward(engine)
                engine.step()
            budget = engine.training_state.state.store.budget
            assert budget.used_bytes <= budget_bytes
            counted.append(engine.statistics().updated_in_backward - before)
            assert state_of(engine) == expected(3)
    assert 0 < counted[0] < counted[1]


class Layers(nn.Module):
    """Matrices of which few pass at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(400, 400, bias=False) for _ in range(16)])
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def test_a_parameter_that_finds_no_buffer_as_the_step_ends_is_updated_all_the_same(
    nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Stream._save

    def slowly(*args: Any) -> None:
        time.sleep(0.02)  # a slow drive: the step ends while a parameter that was admitted waits for a buffer
        save(*args)

    def run(mode: str) -> list[dict[str, Any]]:
        own = {"step_overlap": mode, "host_budget_bytes": 8_000_000}
        keys = make_config(2, "nvme", nvme, gradient_accumulation_steps=1, gradient_clipping=NEVER, zstore=own)
        torch.manual_seed(0)
        states = []
        with start(keys, Layers()) as engine:
            for number in range(5):
                torch.manual_seed(number)
                engine.backward(engine(torch.randn(4, 400).bfloat16()))
                if number == 1 and (speculative := engine.training_state.pending.speculative) is not None:
                    until(lambda: speculative._admitted, "nothing was updated in the backward")
                engine.step()
                states.append(state_of(engine))
            assert (engine.statistics().updated_in_backward > 0) == (mode == "speculative")
            used.append(engine.training_state.state.store.budget.used_bytes)
        return states

    used: list[int] = []
    wanted = run("none")
    monkeypatch.setattr(Stream, "_save", slowly)
    assert run("speculative") == wanted
    assert used[0] == used[1]  # copies take nothing of the budget between steps


def test_nothing_is_kept_when_the_step_is_over(nvme: Path) -> None:
    with _engine(nvme) as engine:
        store = engine.training_state.state.store
        for bites in (False, True, True, False):
            engine.backward(engine(*data(engine.global_steps)))
            if bites:
                engine.clip_grad_norm_(ALWAYS)
            engine.step()
            engine.training_state.pending.complete()
            for name in store.names():  # raises if something is pinned or under way
                store._at_rest(name)
        assert engine.training_state.gradients.held_bytes() == 0
