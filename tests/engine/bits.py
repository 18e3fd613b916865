"""Cases of the engine's exactness, and the bits that it and the plain loop hold."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import zstore
from tests.engine.models import batch, draw_shape, make_net
from tests.reference import Reference
from zstore.engine import Engine
from zstore.engine.params.record import ParameterRecord
from zstore.io.tensors import as_torch

STEPS = 3
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STATIC_SCALE = 128.0
SPILLS = 4_000_000
"""A host budget that leaves gradients on disk, where parameters rest there too."""


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

    def reference(self, world_size: int) -> Reference:
        """Return the plain loop of so many ranks."""
        return Reference(
            self.make(),
            world_size,
            stage=self.stage,
            precision=self.precision,
            accumulation=self.accumulation,
            clip=self.clip,
            scale=STATIC_SCALE if self.precision == "fp16" else 1.0,
            accumulate=self.types[0],
            reduce=self.types[1],
            adam=ADAM,
        )

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
            "zstore": {"step_overlap": self.overlap},
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


def digest(values: torch.Tensor) -> str:
    data = bytes(values.detach().cpu().view(torch.uint8).numpy()) if values.numel() else b""
    return hashlib.sha256(data).hexdigest()[:16]


def rows_at_rest(engine: Engine, record: ParameterRecord) -> torch.Tensor:
    """Return this rank's rows of a parameter, wherever they rest."""
    if record.rest is None:
        return record.owned()
    return as_torch(engine.training_state.state.store.read(record.rest).wait())


def engine_digests(engine: Engine) -> dict[str, str]:
    """Return the hash of this rank's rows of every array, and of every parameter's rows."""
    training = engine.training_state
    training.update.wait()
    found: dict[str, str] = {}
    for record in training.state.records:
        found[record.name] = digest(rows_at_rest(engine, record))
        if record.group is not None:
            arrays = [as_torch(training.state.store.read(name).wait()) for name in training.state.arrays_of(record)]
            for name, values in zip(training.state.arrays_of(record), arrays, strict=True):
                found[name] = digest(values)
    return found


def reference_digests(reference: Reference, rows: dict[str, tuple[int, int]]) -> dict[str, str]:
    parameters = {name: p.detach().reshape(-1) for name, p in reference.model.named_parameters()}
    found = {name: digest(values[slice(*rows[name])]) for name, values in parameters.items()}
    for name, values in reference.arrays().items():
        fqn = name.split("/", 1)[1] if name.startswith("model/") else name.split("/", 2)[2]
        found[name] = digest(values[slice(*rows[fqn])])
    return found


def slot_digests(engine: Engine, reference: Reference) -> dict[str, str]:
    """Return the hashes of this rank's rows of what is trained in the plain loop, with all that its optimizer keeps of what it
    updated."""
    state = engine.training_state.state
    found: dict[str, str] = {}
    for record in state.records:
        if record.name not in reference.masters:
            continue
        master = reference.masters[record.name]
        wholes = {record.name: reference.trained[record.name], f"model/{record.name}": master}
        found |= {name: digest(whole.reshape(-1)[slice(*record.owned_range)].clone()) for name, whole in wholes.items()}
        for array in state.arrays_of(record)[1:] if master.grad is not None else ():
            slot = reference.optimizer.state[master][array.split("/")[1]]
            assert tuple(state.store.spec(array).shape) == tuple(slot.shape)
            found[array] = digest(slot.reshape(-1)[slice(*state.owned_range(record, array))].clone())
    return found


def differing_arrays(engine: Engine, reference: Reference, rows: dict[str, tuple[int, int]]) -> list[str]:
    """Return the names of the reference's arrays of which the engine's rows have other bits."""
    expected, mine = reference_digests(reference, rows), engine_digests(engine)
    return [array for array in expected if mine.get(array) != expected[array]]


def compare(
    case: Case,
    rank: int,
    world_size: int,
    steps: int = STEPS,
    *,
    between: Callable[[Engine], object] = lambda engine: None,
    end: Callable[[Engine], object] = lambda engine: None,
    **given: Any,
) -> list[str]:
    """Return what differs between engine and plain loop, after each of so many steps; `between` is called with the engine
    between each backward and `step()`, `end` after all steps, and `given` goes to `initialize`."""
    differences: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        engine, *_ = zstore.initialize(model=case.make(), config=case.config(world_size, folder), **given)
        with engine:
            reference = case.reference(world_size)
            assert bool(engine.training_state.state.spilled) == (case.budget is not None)
            rows = {record.name: record.owned_range for record in engine.training_state.state.records}
            for step in range(steps):
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
                    between(engine)
                    engine.step()
                assert all(p.grad is None for p in engine.parameters())
                assert engine.was_step_applied()
                # Reading the state would wait for the update: let it run into the next forward.
                if case.overlap != "forward" or step == steps - 1:
                    differences += [f"step {step}: {name}" for name in differing_arrays(engine, reference, rows)]
                if engine.get_global_grad_norm() != reference.norm:
                    differences.append(f"step {step}: norm {engine.get_global_grad_norm()} != {reference.norm}")
                if losses != reference_losses(reference, rank, case, world_size, count):
                    differences.append(f"step {step}: losses {losses}")
            end(engine)
    return differences


def reference_losses(
    reference: Reference, rank: int, case: Case, world_size: int, count: int | None = None
) -> list[float]:
    if case.stage < 2 or world_size == 1:
        return reference.losses[rank]
    return [reference.losses[micro * world_size + rank][0] for micro in range(count or case.accumulation)]


def compare_all(
    rank: int, world_size: int, cases: list[dict[str, Any]], steps: int | None = None
) -> list[tuple[str, list[str]]]:
    """Return the cases in which something differs, with it. Where no number of steps is given several ranks take two: the
    second has moments, and units in the order that the first recorded; or those whose ends the case names."""
    usual = STEPS if world_size == 1 else 2
    return [
        (str(case), found)
        for case in (Case(**given) for given in cases)
        if (found := compare(case, rank, world_size, steps or len(case.counts or range(usual))))
    ]


def assert_equal(engine: Engine, expected: Reference) -> None:
    """Every array of an engine has the bits of the plain loop's."""
    rows = {record.name: record.owned_range for record in engine.training_state.state.records}
    found, wanted = engine_digests(engine), reference_digests(expected, rows)
    assert {name: found[name] for name in wanted} == wanted
