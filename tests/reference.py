"""The reference: a plain training loop over whole, unpadded tensors, for any number of ranks in one process.

What it fixes is DESIGN section 8: the loss divided by the accumulation count before backward; gradients accumulated
in fp32, or in the type that is asked for; the norm of [Note: the order of sums]; one scalar `clip / (norm + 1e-6) / scale`;
torch.optim.AdamW(fused=True) on fp32 masters. Where gradients are sharded (stages 2 and 3) ranks are averaged in
every micro-batch, else once a step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from zstore.format.arrays import make_grid

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Loss = Callable[[nn.Module, Any], torch.Tensor]
Groups = Callable[[dict[str, nn.Parameter]], list[Any]]


def _returned(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(*batch)
    return loss


def _one_group(masters: dict[str, nn.Parameter]) -> list[Any]:
    return list(masters.values())


def _sum_of_squares(shard: torch.Tensor) -> float:
    """Return the sum over rows of 4,096 elements, each row's norm taken in fp32 by itself."""
    if shard.device.type != "cpu":
        (norm,) = torch._foreach_norm([shard], 2, torch.float32)
        return norm.item() ** 2
    total = np.float64(0)
    for row in shard.float().split(4096):
        total += np.square(np.float64(float(torch.linalg.vector_norm(row))))
    return float(total)


def _add(total: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    for name, gradient in gradients.items():
        total[name] = (total[name] + gradient).to(dtype) if name in total else gradient.to(dtype)


def _norm(sums: Sequence[Sequence[float]]) -> float:
    total = 0.0
    for shards in sums:
        parameter = 0.0
        for shard in shards:
            parameter += shard
        total += parameter
    return math.sqrt(total) if total >= 0 else math.nan


@dataclass
class Reference:
    """A run of the plain loop. `step` takes `batches[micro][rank]`."""

    model: nn.Module
    world_size: int
    stage: int = 0
    precision: str = "fp32"
    accumulation: int = 1
    clip: float = 0.0
    scale: float = 1.0
    accumulate: str | None = None
    """Type of what is accumulated; None: fp32 over several micro-batches, else that of the reduction."""
    reduce: str | None = None
    """Type in which ranks are averaged; None: the parameters'."""
    adam: dict[str, Any] = field(default_factory=dict)
    loss: Loss = _returned
    """Of the model and a batch; by default the model returns it."""
    groups: Groups = _one_group
    """The optimizer's groups of the masters by name; by default one of all."""
    norm: float = 0.0
    applied: bool = True
    losses: list[list[float]] = field(default_factory=list)
    """Of the last step, by micro-batch and rank."""
    buffers: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Of each rank: what a forward writes to a buffer stays with the rank that ran it."""

    def __post_init__(self) -> None:
        dtype = DTYPES[self.precision]
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in self.trained.items()}
        self.optimizer = torch.optim.AdamW(self.groups(self.masters), fused=True, **self.adam)
        for tensor in self.model.parameters():
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        own = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.buffers = [{name: buffer.clone() for name, buffer in own.items()} for _ in range(self.world_size)]

    def at_rank(self, rank: int) -> nn.Module:
        for name, buffer in self.model.named_buffers():
            buffer.data = self.buffers[rank][name]
        return self.model

    def step(self, batches: Sequence[Sequence[Any]]) -> None:
        gradients = self._accumulated(batches)
        raw = _norm([self._sums(gradients[name]) for name in sorted(gradients)])
        self.norm = raw / self.scale
        self.applied = math.isfinite(raw)
        if not self.applied:
            return
        factor = 1.0 / self.scale
        if self.clip > 0 and self.norm > self.clip:
            factor = self.clip / (self.norm + 1e-6) / self.scale
        scalar = float(np.float32(factor))
        for name, master in self.masters.items():
            master.grad = gradients[name].float() * scalar if name in gradients else None
        self.optimizer.step()
        for name, parameter in self.trained.items():
            parameter.data.copy_(self.masters[name].data)

    def _accumulated(self, batches: Sequence[Sequence[Any]]) -> dict[str, torch.Tensor]:
        """Return the gradients of a step: averaged over ranks, summed over micro-batches."""
        self.losses = []
        held = self._held_dtype(len(batches))
        if self.stage < 2 or self.world_size == 1:
            ranks = [self._backwards(rank, [micro[rank] for micro in batches]) for rank in range(self.world_size)]
            return {name: mean.to(held) for name, mean in self._mean(ranks).items()}
        total: dict[str, torch.Tensor] = {}
        for micro in batches:
            _add(total, self._mean([self._backwards(r, [batch]) for r, batch in enumerate(micro)]), held)
        return total

    def _held_dtype(self, num_micro_batches: int) -> torch.dtype:
        if self.accumulate is not None:
            return DTYPES[self.accumulate]
        return torch.float32 if num_micro_batches > 1 else self._reduced_dtype

    @property
    def _reduced_dtype(self) -> torch.dtype:
        return DTYPES[self.precision if self.reduce is None or self.world_size == 1 else self.reduce]

    def _backwards(self, rank: int, batches: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return the sum of one rank's gradients of these micro-batches; of a single one where ranks are averaged in each,
        as it came."""
        total: dict[str, torch.Tensor] = {}
        row: list[float] = []
        for batch in batches:
            self.model.zero_grad(set_to_none=True)
            loss = self.loss(self.at_rank(rank), batch).float()
            row.append(float(loss.detach()))
            if self.accumulation > 1:
                loss = loss / self.accumulation
            (loss * self.scale if self.scale != 1.0 else loss).backward()
            gradients = {name: p.grad.clone() for name, p in self.trained.items() if p.grad is not None}
            averaged_each = self.stage >= 2 and self.world_size > 1
            _add(total, gradients, DTYPES[self.precision] if averaged_each else self._held_dtype(len(batches)))
        self.losses.append(row)
        return total

    def _mean(self, ranks: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the mean over ranks: each rounded to the type in which they are sent, summed in rank order in fp32, times
        1/N, rounded once to that type; who has none counts zeros."""
        if self.world_size == 1:
            return ranks[0]
        means: dict[str, torch.Tensor] = {}
        for name in self.trained:
            if not any(name in rank for rank in ranks):
                continue
            shape, dtype = self.trained[name].shape, self._reduced_dtype
            total = torch.zeros(shape)
            for number, rank in enumerate(ranks):
                part = rank[name].to(dtype).float() if name in rank else torch.zeros(shape)
                total = part.clone() if number == 0 else total + part
            means[name] = (total * (1.0 / self.world_size)).to(dtype)
        return means

    def _sums(self, gradient: torch.Tensor) -> list[float]:
        flat = gradient.reshape(-1)
        shape = tuple(gradient.shape)
        stored = shape if len(shape) in (1, 2) else (1,) if not shape else (math.prod(shape[:-1]), shape[-1])
        step = make_grid(stored, self.world_size).shard_numel
        return [_sum_of_squares(flat[first : first + step]) for first in range(0, flat.numel(), max(step, 1))]

    def arrays(self) -> dict[str, torch.Tensor]:
        """Return masters and moments by the name that they have in a checkpoint, each 1-D."""
        found: dict[str, torch.Tensor] = {}
        for name, master in self.masters.items():
            found[f"model/{name}"] = master.detach().reshape(-1)
            for slot in ("exp_avg", "exp_avg_sq"):
                moment = self.optimizer.state[master].get(slot)
                found[f"optimizer/{slot}/{name}"] = (
                    torch.zeros(master.numel()) if moment is None else moment.reshape(-1)
                )
        return found
