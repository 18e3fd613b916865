"""Optimizers that need whole tensors: the bits of the class in a plain loop, at every stage, tier and world size."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from tests.engine.bits import digest, engine_digests, slot_digests
from tests.engine.models import batch, make_net
from tests.engine.runs import make_config
from tests.reference import Reference
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.reshard import reshard_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine import Engine
from zstore.engine.config.config import load_config
from zstore.engine.config.resolve import ResolveContext
from zstore.engine.report.statistics import placed_arrays
from zstore.errors import CheckpointMismatchError
from zstore.optim import Lamb, MuonWithAdam
from zstore.testing.ranks import run_ranks

PARAMS: dict[str, dict[str, Any]] = {
    "Lamb": {"lr": 1e-2, "weight_decay": 0.01},
    "Adafactor": {"lr": 1e-2, "weight_decay": 0.01},
    "Muon": {"muon_lr": 0.02, "adam_lr": 3e-3, "weight_decay": 0.01},
}
SETTINGS = [
    (3, "nvme", "bf16", 0.25, 2, "nvme"),
    (2, "cpu", "fp32", 0.0, 1, "none"),
    (1, "nvme", "fp32", 0.25, 2, "none"),
    (0, "none", "bf16", 0.0, 1, "none"),
]
"""Stage, tier of the state, precision, clip, micro-batches of a step, tier of the parameters."""


def made(name: str, masters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The class in a plain loop; Muon's groups are written down here."""
    if name == "Lamb":
        return Lamb(masters.values(), **PARAMS[name])
    if name == "Adafactor":
        return torch.optim.Adafactor(masters.values(), **PARAMS[name])
    hidden = [p for n, p in masters.items() if n in MATRICES]
    others = [p for n, p in masters.items() if n not in MATRICES]
    muon = {"params": hidden, "use_muon": True, "lr": 0.02, "weight_decay": 0.01}
    adam = {"params": others, "use_muon": False, "lr": 3e-3, "weight_decay": 0.01, "fused": True}
    return MuonWithAdam([muon, adam])


MATRICES = {"unused.weight", *(f"blocks.{i}.{which}.weight" for i in (0, 1) for which in ("up", "down"))}


def config_of(name: str, folder: str, stage: int, tier: str, **keys: Any) -> dict[str, Any]:
    section = {"type": name.lower(), "params": PARAMS[name]}
    plain = {"gradient_accumulation_steps": 1, "bf16": {"enabled": False}, "scheduler": None, "optimizer": section}
    return make_config(stage, tier, folder, **(plain | keys))


def misplanned(engine: Engine) -> list[str]:
    """Return the slots whose planned bytes are not those that there are."""
    training = engine.training_state
    measured: Counter[tuple[str, str]] = Counter()
    for name, tier, _, nbytes in placed_arrays(training):
        measured[name.split("/")[1], tier] += nbytes
    slots = {slot.name for record in training.state.scalars for slot in training.state.slots_of(record)}
    held = {slot: training.plan.held[slot] for slot in slots}
    planned = {(slot, tier): getattr(held[slot], tier) for slot in slots for tier in ("device", "host", "disk")}
    return [f"{key}: {nbytes}, {measured[key]}" for key, nbytes in planned.items() if nbytes != measured[key]]


def trained(
    rank: int, world_size: int, name: str, settings: tuple[int, str, str, float, int, str], saves: str
) -> list[str]:
    """Return what differs between engine and plain loop over two steps, the last one resumed."""
    stage, tier, precision, clip, accumulation, parameters = settings
    differences: list[str] = []
    reference = Reference(
        make_net(), world_size, stage=stage, precision=precision, accumulation=accumulation, clip=clip, adam={"lr": 0.0}
    )
    reference.optimizer = made(name, reference.masters)
    with tempfile.TemporaryDirectory() as folder:
        keys = {"bf16": {"enabled": precision == "bf16"}, "gradient_clipping": clip}
        keys |= {"gradient_accumulation_steps": accumulation}
        config = config_of(name, folder, stage, tier, **keys)
        if parameters != "none":
            config["zero_optimization"]["offload_param"] = {"device": parameters, "nvme_path": folder}
        for steps in (range(1), range(1, 2)):
            with zstore.initialize(model=make_net(), config=config)[0] as engine:
                assert misplanned(engine) == []
                if steps.start:
                    engine.load_checkpoint(saves)
                for number in steps:
                    batches = [[batch(number, micro, r) for r in range(world_size)] for micro in range(accumulation)]
                    reference.step(batches)
                    for micro in batches:
                        engine.backward(engine(*micro[rank]))
                        engine.step()
                    if engine.get_global_grad_norm() != reference.norm:
                        differences.append(f"step {number}: norm")
                    expected, found = slot_digests(engine, reference), engine_digests(engine)
                    differences += [f"step {number}: {key}" for key in expected if found.get(key) != expected[key]]
                if not steps.start:
                    engine.save_checkpoint(saves)
                for record in engine.training_state.state.scalars:
                    for slot in engine.training_state.state.slots_of(record):
                        whole = engine.get_optimizer_state(record.name, slot.name)
                        own = reference.optimizer.state[reference.masters[record.name]].get(slot.name)
                        if own is not None and not torch.equal(whole, own):
                            differences.append(f"whole {slot.name} of {record.name}")
    return differences


def _trained(rank: int, world_size: int, cases: list[tuple[str, Any]], saves: str) -> list[tuple[str, Any, list[str]]]:
    found = []
    for name, settings in cases:
        one = trained(rank, world_size, name, settings, f"{saves}/{name}-{settings[0]}")
        found += [(name, settings, one)] if one else []
    return found


SHARDED = list(zip(PARAMS, SETTINGS, strict=False))
WHOLE = [("Muon", SETTINGS[3])]
MORE_WHOLE = [("Adafactor", SETTINGS[3])]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        pytest.param(1, WHOLE, marks=pytest.mark.soak),
        (2, SHARDED),
        pytest.param(1, SHARDED + MORE_WHOLE, marks=pytest.mark.soak),
        pytest.param(2, WHOLE + MORE_WHOLE, marks=pytest.mark.soak),
    ],
    ids=["1", "2", "1-more", "2-more"],
)
def test_each_does_what_its_class_does_bit_for_bit_and_resumes(
    world_size: int, cases: list[tuple[str, Any]], tmp_path: Path
) -> None:
    for failed in run_ranks(_trained, world_size, world_size, cases, str(tmp_path), timeout_s=240):
        assert failed == []


# -- elastic ----------------------------------------------------------------------------------------------------------


def make_client(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def contents(engine: Engine) -> dict[str, str]:
    """Return hashes of whole masters and of what the optimizer keeps of each parameter."""
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
    engine, *_ = zstore.initialize(model=net, optimizer=make_client(net), config=config)
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
def test_what_two_ranks_saved_on_disk_is_the_same_at_any_other_size_stage_and_tier(
    everything: bool, tmp_path: Path
) -> None:
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


def test_a_step_mode_that_needs_a_second_exchange_acts_as_none_and_says_so() -> None:
    for name, needs in (("Lamb", True), ("Lion", False)):
        section = {"optimizer": {"type": name}, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
        config = load_config(section | {"train_batch_size": 1, "zstore": {"step_overlap": "forward"}})
        resolved = config.resolve(ResolveContext(world_size=1))
        assert resolved.step_overlap == ("none" if needs else "forward")
        assert [n.key for n in resolved.notices if "whole tensors" in n.message] == ["zstore.step_overlap"] * needs
