"""Exactness: after every step, every master, moment, parameter and loss has the bits of the plain loop."""

from __future__ import annotations

import hashlib
import itertools
import random
import tempfile
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from tests.engine_models import batch, draw_shape, make_net
from tests.reference import Reference
from zstore.engine import Engine
from zstore.engine.params.record import ParameterRecord
from zstore.tensors import as_torch
from zstore.testing.ranks import run_ranks

STEPS = 3
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STATIC_SCALE = 128.0
TIERS = ("none", "cpu", "nvme")
PRECISIONS = ("bf16", "fp16", "fp32")
MODES = ("none", "backward", "forward")


@dataclass(frozen=True)
class Case:
    stage: int
    tier: str
    precision: str
    accumulation: int
    clip: float
    bucket: int = 500_000_000
    threshold: int = 100
    parameters: str = "none"
    """Tier of the parameters."""
    overlap: str = "none"
    """Step mode."""
    keys: dict[str, Any] | None = None
    """Further keys of the ZeRO section."""
    split: bool = False
    """Whether masters are split."""
    seed: int | None = None
    """Of the model's shape and values; None: the usual small model."""
    types: tuple[str | None, str | None] = (None, None)
    """Types in which gradients accumulate and in which they are reduced; None: not said."""
    budget: int | None = None
    """Bytes of the host budget, so small that gradients wait on disk."""
    counts: tuple[int, ...] | None = None
    """Micro-batches of each step, whose ends the caller names; None: what the config says."""

    @property
    def shape(self) -> dict[str, Any]:
        """Arguments of the model."""
        return {"vocab": 1203} if self.seed is None else draw_shape(self.seed)

    def make(self) -> nn.Module:
        """Return a new model, alike each time."""
        return make_net(self.seed or 0, **self.shape)

    def config(self, world_size: int, nvme_path: str) -> dict[str, Any]:
        zero: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": self.bucket,
            "allgather_bucket_size": self.bucket,
            "stage3_param_persistence_threshold": self.threshold,
        }
        if self.tier != "none":
            zero["offload_optimizer"] = {"device": self.tier}
            if self.tier == "nvme":
                zero["offload_optimizer"]["nvme_path"] = nvme_path
        if self.parameters != "none":
            zero["offload_param"] = {"device": self.parameters}
            if self.parameters == "nvme":
                zero["offload_param"]["nvme_path"] = nvme_path
        for name, value in (self.keys or {}).items():
            zero[name] = {**zero[name], **value} if isinstance(value, dict) else value
        config: dict[str, Any] = {
            "train_batch_size": 2 * world_size * self.accumulation,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "optimizer": {"type": "AdamW", "params": ADAM},
            "zero_optimization": zero,
            "steps_per_print": 0,
            "zstore": {"step_overlap": self.overlap, "split_master": self.split},
        }
        if self.types[0] is not None:
            config["data_types"] = {"grad_accum_dtype": self.types[0]}
        if self.types[1] is not None:
            config["communication_data_type"] = self.types[1]
        if self.budget is not None:
            config["zstore"]["host_budget_bytes"] = self.budget
        if self.precision == "bf16":
            config["bf16"] = {"enabled": True}
        if self.precision == "fp16":
            config["fp16"] = {"enabled": True, "loss_scale": STATIC_SCALE}
        return config


def sample_cases(world_size: int, count: int) -> list[Case]:
    """Return `count` of the ten stages and tiers, with the other choices and the model drawn from a fixed seed."""
    rng = random.Random(world_size)
    pairs = [(0, "none"), *((stage, tier) for stage in (1, 2, 3) for tier in TIERS)]
    rng.shuffle(pairs)
    cases = [
        Case(
            stage,
            tier,
            rng.choice(PRECISIONS),
            rng.choice((1, 3)),
            rng.choice((0.0, 0.25)),
            rng.choice((500_000_000, 40_000)),
            rng.choice((0, 100, 100_000)),
            parameters=rng.choice(TIERS) if stage == 3 else "none",
            overlap=rng.choice(MODES),
            seed=rng.randrange(10**6),
        )
        for stage, tier in pairs
    ]
    return cases[:count]


def digest(values: torch.Tensor) -> str:
    data = bytes(values.detach().view(torch.uint8).numpy()) if values.numel() else b""
    return hashlib.sha256(data).hexdigest()[:16]


def rows_at_rest(engine: Engine, record: ParameterRecord) -> torch.Tensor:
    """Return this rank's rows of a parameter, wherever they rest."""
    if record.rest is None:
        return record.owned()
    return as_torch(engine.training_state.state.store.read(record.rest).wait())


def engine_digests(engine: Engine) -> dict[str, str]:
    """Return the hash of this rank's rows of every array, and of every parameter's rows."""
    training = engine.training_state
    training.complete()
    found: dict[str, str] = {}
    for record in training.state.records:
        found[record.name] = digest(rows_at_rest(engine, record))
        if record.group is not None:
            arrays = [as_torch(training.state.store.read(name).wait()) for name in training.state.arrays_of(record)]
            num_master = len(training.state.master_arrays(record))
            found[f"model/{record.name}"] = digest(training.state.take_master(arrays[:num_master]))
            for name, values in zip(training.state.arrays_of(record)[num_master:], arrays[num_master:], strict=True):
                found[name] = digest(values)
    return found


def reference_digests(reference: Reference, rows: dict[str, tuple[int, int]]) -> dict[str, str]:
    parameters = {name: p.detach().reshape(-1) for name, p in reference.model.named_parameters()}
    found = {name: digest(values[slice(*rows[name])]) for name, values in parameters.items()}
    for name, values in reference.arrays().items():
        fqn = name.split("/", 1)[1] if name.startswith("model/") else name.split("/", 2)[2]
        found[name] = digest(values[slice(*rows[fqn])])
    return found


def compare(case: Case, rank: int, world_size: int) -> list[str]:
    """Return what differs between engine and plain loop, over all steps."""
    differences: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        engine, *_ = zstore.initialize(model=case.make(), config=case.config(world_size, folder))
        with engine:
            reference = Reference(
                case.make(),
                world_size,
                stage=case.stage,
                precision=case.precision,
                accumulation=case.accumulation,
                clip=case.clip,
                scale=STATIC_SCALE if case.precision == "fp16" else 1.0,
                accumulate=case.types[0],
                reduce=case.types[1],
                adam=ADAM,
            )
            assert bool(engine.training_state.state.spilled) == (case.budget is not None)
            rows = {record.name: record.owned_range for record in engine.training_state.state.records}
            for step in range(STEPS):
                vocab = case.shape["vocab"]
                count = case.accumulation if case.counts is None else case.counts[step]
                batches = [[batch(step, m, r, vocab=vocab) for r in range(world_size)] for m in range(count)]
                reference.step(batches)
                losses = []
                for number, micro in enumerate(batches):
                    if case.counts is not None:
                        engine.set_gradient_accumulation_boundary(number == count - 1)
                    loss = engine(*micro[rank])
                    losses.append(float(loss.detach()))
                    engine.backward(loss)
                    assert all(p.grad is None for p in engine.parameters())
                    engine.step()
                assert engine.was_step_applied()
                expected = reference_digests(reference, rows)
                # Reading the state would wait for the update: let it run into the next forward.
                found = engine_digests(engine) if case.overlap != "forward" or step == STEPS - 1 else expected
                differences += [f"step {step}: {name}" for name in expected if found.get(name) != expected[name]]
                if engine.get_global_grad_norm() != reference.norm:
                    differences.append(f"step {step}: norm {engine.get_global_grad_norm()} != {reference.norm}")
                if losses != reference_losses(reference, rank, case, world_size, count):
                    differences.append(f"step {step}: losses {losses}")
    return differences


def reference_losses(
    reference: Reference, rank: int, case: Case, world_size: int, count: int | None = None
) -> list[float]:
    if case.stage < 2 or world_size == 1:
        return reference.losses[rank]
    return [reference.losses[micro * world_size + rank][0] for micro in range(count or case.accumulation)]


def _compare_all(rank: int, world_size: int, cases: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    return [(str(case), found) for case in cases if (found := compare(Case(**case), rank, world_size))]


@pytest.mark.parametrize(("world_size", "count"), [(1, 10), (2, 10), (3, 6), (4, 4)])
def test_bits_equal_the_plain_loop(world_size: int, count: int) -> None:
    cases = [asdict(case) for case in sample_cases(world_size, count)]
    for failed in run_ranks(_compare_all, world_size, world_size, cases, timeout_s=120):
        assert failed == []


def all_cases() -> list[Case]:
    """Return every combination, and split masters in every place and step mode; each with a model of its own."""
    places = [(0, "none", "none"), *((stage, tier, "none") for stage in (1, 2) for tier in TIERS)]
    places += [(3, tier, parameters) for tier in TIERS for parameters in TIERS]
    choices = itertools.product(places, PRECISIONS, (1, 3), (0.0, 0.25), (500_000_000, 40_000), MODES)
    rng = random.Random(0)

    def drawn() -> dict[str, Any]:
        types = rng.choice((None, *PRECISIONS)), rng.choice((None, *PRECISIONS))
        return {"threshold": rng.choice((0, 100, 1000)), "seed": rng.randrange(10**6), "types": types}

    cases = [
        Case(stage, tier, *rest, parameters=parameters, overlap=overlap, **drawn())
        for (stage, tier, parameters), *rest, overlap in choices
    ]
    for (stage, tier, parameters), overlap in itertools.product(places, MODES):
        accumulation, clip, bucket = rng.choice((1, 3)), rng.choice((0.0, 0.25)), rng.choice((500_000_000, 40_000))
        one = Case(stage, tier, "bf16", accumulation, clip, bucket, parameters=parameters, overlap=overlap, **drawn())
        cases.append(replace(one, split=True))
    return cases


def test_an_update_within_the_backward_of_what_is_not_offloaded_takes_gradients_that_wait_in_place() -> None:
    cases = [asdict(Case(stage, "none", "bf16", 1, 0.0, 500_000_000, 100, overlap="backward")) for stage in (2, 3)]
    for failed in run_ranks(_compare_all, 2, 2, cases, timeout_s=120):
        assert failed == []


CASES_A_PROCESS = 64
"""An engine's process groups live as long as its process: hundreds of them slow it down."""


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bits_equal_the_plain_loop_in_every_combination(world_size: int) -> None:
    cases = [asdict(case) for case in all_cases()]
    for first in range(0, len(cases), CASES_A_PROCESS):
        chunk = cases[first : first + CASES_A_PROCESS]
        for failed in run_ranks(_compare_all, world_size, world_size, chunk, timeout_s=900):
            assert failed == []
