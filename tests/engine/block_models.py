"""A model of blocks in which tests change what is between or at its ends, and its training beside the plain loop."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import zstore
from tests.engine.bits import ADAM, Case, differing_arrays, digest, reference_losses
from tests.engine.runs import all_released
from tests.reference import Reference

WIDTH, VOCAB, STEPS = 24, 50, 2


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


class Base(nn.Module):
    """Embedding, blocks, head; tests change what is between or at the ends."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(self.norm(x)), ids)


def ids_of(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def all_of(named: dict[str, nn.Parameter]) -> list[Any]:
    return list(named.values())


@dataclass(frozen=True)
class Mix:
    """A model, and how it is trained."""

    make: Callable[[], nn.Module]
    groups: Callable[[dict[str, nn.Parameter]], list[Any]] = all_of
    precision: str = "bf16"
    accumulation: int = 1
    call: Callable[[Any, torch.Tensor], torch.Tensor] = lambda model, ids: model(ids)

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()


def settings(mix: Mix, stage: int, **zero: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": mix.accumulation,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": stage}
        | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
        | zero,
        "steps_per_print": 0,
    }
    return config | ({mix.precision: {"enabled": True}} if mix.precision != "fp32" else {})


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def train(mix: Mix, rank: int, world_size: int, stage: int, **zero: Any) -> list[str]:
    """Return what differs from the plain loop: bits of state, parameters and buffers; losses in training and in eval."""
    model = mix.build()
    engine, *_ = zstore.initialize(
        model=model, model_parameters=mix.groups(trainable(model)), config=settings(mix, stage, **zero)
    )
    reference = Reference(
        mix.build(),
        world_size,
        stage=stage,
        precision=mix.precision,
        accumulation=mix.accumulation,
        clip=0.5,
        adam=ADAM,
        loss=lambda model, batch: mix.call(model, *batch),
        groups=mix.groups,
    )
    case = Case(stage, "none", mix.precision, mix.accumulation, 0.5)
    found: list[str] = []
    with engine:
        rows = {record.name: record.owned_range for record in engine.training_state.state.records}
        for step in range(STEPS):
            numbers = [[10 * step + 3 * micro + r for r in range(world_size)] for micro in range(mix.accumulation)]
            batches = [[(ids_of(number, 0),) for number in row] for row in numbers]
            reference.model.train()
            reference.step(batches)
            losses = []
            for number, micro in enumerate(batches):
                last = number == mix.accumulation - 1
                with contextlib.nullcontext() if last else engine.no_sync():
                    loss = mix.call(engine, *micro[rank])
                    losses.append(float(loss.detach()))
                    engine.backward(loss)
                if stage == 3 and not all_released(engine):
                    found.append(f"step {step}: still gathered after the backward")
                engine.step()
            found += [f"step {step}: {array}" for array in differing_arrays(engine, reference, rows)]
            if losses != reference_losses(reference, rank, case, world_size):
                found.append(f"step {step}: losses {losses}")
            buffers = dict(reference.at_rank(rank).named_buffers(remove_duplicate=False))
            for buffer, value in engine.module.named_buffers(remove_duplicate=False):
                if value.dtype != buffers[buffer].dtype or digest(value.reshape(-1)) != digest(
                    buffers[buffer].reshape(-1)
                ):
                    found.append(f"step {step}: buffer {buffer}")
            found += evaluated(mix, engine, reference, rank, step)
    return found


def evaluated(mix: Mix, engine: Any, reference: Reference, rank: int, step: int) -> list[str]:
    """Compare losses in eval, without gradients and in inference mode."""
    found = []
    model = reference.at_rank(rank)
    engine.eval()
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a reentrant checkpoint without gradients
            mine, expected = (float(mix.call(one, ids_of(90, rank))) for one in (engine, model))
        if mine != expected:
            found.append(f"step {step}: {mode.__name__} gives {mine} != {expected}")
        if not all_released(engine):
            found.append(f"step {step}: still gathered after {mode.__name__}")
    engine.train()
    return found
