"""Optimizers that need whole tensors: the bits of the class in a plain loop, at every stage, tier and world size; a client's
own object at stage 0."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from tests.engine.bits import Case, Rule, Run, compare, digest
from tests.engine.models import batch, make_net
from tests.engine.runs import make_config
from zstore.checkpoint.build import reshard_checkpoint
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine import Engine
from zstore.errors import CheckpointMismatchError, UsageError
from zstore.optim import Lamb, MuonWithAdam
from zstore.testing.ranks import run_ranks

Named = dict[str, nn.Parameter]
PARAMS: dict[str, dict[str, Any]] = {
    "Lamb": {"lr": 1e-2, "weight_decay": 0.01},
    "Adafactor": {"lr": 1e-2, "weight_decay": 0.01},
    "Muon": {"muon_lr": 0.02, "adam_lr": 3e-3, "weight_decay": 0.01},
}
MATRICES = {"unused.weight", *(f"blocks.{i}.{which}.weight" for i in (0, 1) for which in ("up", "down"))}


def _muon(named: Named) -> torch.optim.Optimizer:
    """Muon's groups are written down here."""
    hidden = [p for n, p in named.items() if n in MATRICES]
    others = [p for n, p in named.items() if n not in MATRICES]
    muon = {"params": hidden, "use_muon": True, "lr": 0.02, "weight_decay": 0.01}
    adam = {"params": others, "use_muon": False, "lr": 3e-3, "weight_decay": 0.01, "fused": True}
    return MuonWithAdam([muon, adam])


class OwnLamb(torch.optim.Optimizer):
    """A step as long as the whole weight, along the mean of gradients that are clipped by the norm of all."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in trained]).norm().clamp(min=1.0)
        for p in trained:
            state = self.state[p]
            if not state:
                state |= {"step": 0, "mean": torch.zeros_like(p)}
            state["step"] += 1
            mean = state["mean"].lerp_(p.grad / total, 0.1)
            p.sub_(mean * (self.defaults["lr"] * p.norm() / mean.norm().clamp(min=1e-6)))


CLIENTS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "client's Adafactor": lambda named: torch.optim.Adafactor(named.values(), lr=0.05, weight_decay=0.01),
    "client's Lamb": lambda named: OwnLamb(named.values()),
    "client's Muon": lambda named: torch.optim.Muon([p for p in named.values() if p.ndim == 2], lr=0.05),
}
RULES = {name: Rule(make) for name, make in CLIENTS.items()} | {
    name: Rule(make, {"type": name.lower(), "params": PARAMS[name]})
    for name, make in {
        "Lamb": lambda named: Lamb(named.values(), **PARAMS["Lamb"]),
        "Adafactor": lambda named: torch.optim.Adafactor(named.values(), **PARAMS["Adafactor"]),
        "Muon": _muon,
    }.items()
}


def _check_whole(run: Run) -> None:
    state, reference = run.engine.training_state.state, run.reference
    for record in state.scalars:
        for slot in state.slots_of(record):
            own = reference.optimizer.state[reference.masters[record.name]].get(slot.name)
            assert own is None or torch.equal(run.engine.get_optimizer_state(record.name, slot.name), own)


def _trained(rank: int, world_size: int, cases: list[Case]) -> list[tuple[str, list[str]]]:
    """Return what differs between engine and plain loop, where the second half of the steps is resumed."""
    found = []
    for case in cases:
        end = {"end": _check_whole} if case.optimizer in PARAMS else {}
        found.append((str(case), compare(case, rank, world_size, 2 * case.resume, rule=RULES[case.optimizer], **end)))
    return [one for one in found if one[1]]


# The first three have one of the rules each; the last has all.
PLACES = [
    Case(3, "nvme", "bf16", 2, 0.25, parameters="nvme", resume=1, optimizer="Lamb"),
    Case(2, "cpu", "fp32", 1, 0.0, resume=1, optimizer="Adafactor"),
    Case(1, "nvme", "fp32", 2, 0.25, resume=1, optimizer="Muon"),
]
WHOLE = [Case(0, "none", "bf16", 1, 0.0, resume=1, optimizer=name) for name in ("Muon", "Adafactor")]
OWN = [Case(0, "none", own, 2, 0.3, resume=2, optimizer=name) for name in CLIENTS for own in ("fp32", "bf16")]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (1, OWN),
        (2, PLACES + OWN[1:2]),
        pytest.param(1, PLACES + WHOLE, marks=pytest.mark.soak),
        pytest.param(2, WHOLE + OWN, marks=pytest.mark.soak),
    ],
    ids=["1", "2", "1-more", "2-more"],
)
def test_each_does_what_its_class_does_bit_for_bit_and_resumes(world_size: int, cases: list[Case]) -> None:
    for failed in run_ranks(_trained, world_size, world_size, cases, timeout_s=240):
        assert failed == []


def started(make: Callable[[Any], torch.optim.Optimizer], **keys: Any) -> Engine:
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}, "gradient_clipping": 0.0} | keys
    net = make_net()
    return zstore.initialize(model=net, optimizer=make(net.parameters()), config=config)[0]


@pytest.mark.parametrize("skipped", [True, False])
def test_a_step_that_is_skipped_is_not_taken(skipped: bool) -> None:
    with started(OwnLamb, fp16={"enabled": True, "initial_scale_power": 4}) as engine:
        loss = engine(*batch(0, 0, 0))
        engine.backward(loss * (math.inf if skipped else 1.0))
        engine.step()
        assert engine.skipped_steps == int(skipped)
        assert bool(engine.optimizer.state) is not skipped


def test_what_steps_whole_tensors_is_refused_where_that_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"LBFGS .* closure"):
        started(torch.optim.LBFGS)
    refused = [
        ({"step_overlap": "backward"}, "Lamb .* remove step_overlap"),
        ({"moments": "bf16"}, '"moments": .* OwnLamb, .* remove the key'),
    ]
    for own, message in refused:
        with pytest.raises(UsageError, match=message):
            started(OwnLamb, zstore=own, bf16={"enabled": True})
    message = r"Lamb .* sharded \(stages 1 to 3\) or offloaded .* stage 0 without offload"
    with pytest.raises(UsageError, match=message):
        started(OwnLamb, zero_optimization={"stage": 1})


def test_a_checkpoint_without_the_optimizers_state_is_refused(tmp_path: Path) -> None:
    with started(lambda parameters: torch.optim.SGD(parameters, lr=0.1)) as engine:
        engine.backward(engine(*batch(0, 0, 0)))
        engine.step()
        engine.save_checkpoint(str(tmp_path))
    with started(OwnLamb) as engine:
        before = {name: value.clone() for name, value in engine.module.state_dict().items()}
        with pytest.raises(CheckpointMismatchError, match="as OwnLamb does"):
            engine.load_checkpoint(str(tmp_path))
        assert all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())
        engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)
        with pytest.raises(UsageError, match="is a reserved key"):
            engine.save_checkpoint(str(tmp_path), client_state={"zstore.client_optimizer": json.dumps({})})


def config_of(name: str, folder: str, stage: int, tier: str, **keys: Any) -> dict[str, Any]:
    section = {"type": name.lower(), "params": PARAMS[name]}
    plain = {"gradient_accumulation_steps": 1, "bf16": {"enabled": False}, "scheduler": None, "optimizer": section}
    return make_config(stage, tier, folder, **(plain | keys))


def contents(engine: Engine) -> dict[str, str]:
    found: dict[str, str] = {}
    for record in engine.training_state.state.scalars:
        found[record.name] = digest(engine.get_full_parameter(record.name).reshape(-1))
        for slot in ("row_var", "col_var") if record.parameter.dim() > 1 else ("variance",):
            found[f"{slot} {record.name}"] = digest(engine.get_optimizer_state(record.name, slot).reshape(-1))
        found[f"step {record.name}"] = str(engine.get_optimizer_state(record.name, "step"))
    return found


def _saved(rank: int, folder: str, runs: str) -> dict[str, str]:
    """Train a client's own Adafactor at stage 3 on disk, step modes asked for, over two steps, one of which overflows. The
    budget leaves a gradient on disk on one rank alone."""
    config = config_of("Adafactor", runs, 3, "nvme", fp16={"enabled": True, "loss_scale": 128.0}, optimizer=None)
    config |= {"zstore": {"step_overlap": "forward", "host_budget_bytes": 900_000}}
    config["train_micro_batch_size_per_gpu"] = 3  # a global batch that one rank and three can have too
    net = make_net()
    client = torch.optim.Adafactor([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    engine, *_ = zstore.initialize(model=net, optimizer=client, config=config)
    with engine:
        assert engine.training_state.update.mode.value == "none"
        assert bool(engine.training_state.state.spilled) == (rank == 0)
        for number, factor in enumerate((1.0, float("inf"), 1.0)):
            engine.backward(engine(*batch(number, 0, rank)) * factor)
            engine.step()
        assert engine.skipped_steps == 1
        engine.save_checkpoint(folder)
        return contents(engine)


def _loaded(rank: int, folder: str, stage: int, tier: str, runs: str) -> dict[str, str]:
    config = config_of("Adafactor", runs, stage, tier, fp16={"enabled": True, "loss_scale": 128.0})
    with zstore.initialize(model=make_net(), config=config)[0] as engine:
        engine.load_checkpoint(folder)
        found = contents(engine)
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(*batch(9, 0, rank)))
            engine.step()
        assert engine.was_step_applied()
        return found


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_what_two_ranks_saved_loads_at_any_size_stage_and_tier(everything: bool, tmp_path: Path) -> None:
    folder, runs = str(tmp_path / "saves"), str(tmp_path)
    saved = run_ranks(_saved, 2, folder, runs)[0]
    if everything:
        assert run_ranks(_loaded, 1, folder, 1, "none", runs)[0] == saved
    assert run_ranks(_loaded, 3, folder, 2, "cpu", runs)[0] == saved
    with open_checkpoint(folder) as reader:
        shapes = {name: array.spec.shape for name, array in reader.arrays.items() if name.endswith("_var/embed.weight")}
        assert shapes == {"optimizer/row_var/embed.weight": (1203, 1), "optimizer/col_var/embed.weight": (1, 56)}
        assert verify_checkpoint(reader) == []
        reshard_checkpoint(reader, tmp_path / "three", 3)
    assert run_ranks(_loaded, 1, str(tmp_path / "three"), 0, "none", runs)[0] == saved


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    with zstore.initialize(model=make_net(), config=config_of("Muon", "", 0, "none"))[0] as engine:
        engine.backward(engine(*batch(0, 0, 0)))
        engine.step()
        engine.save_checkpoint(str(tmp_path))
    with (
        zstore.initialize(model=make_net(), config=config_of("Lamb", "", 0, "none"))[0] as engine,
        pytest.raises(CheckpointMismatchError, match=r"missing: optimizer/exp_avg/"),
    ):
        engine.load_checkpoint(str(tmp_path))
