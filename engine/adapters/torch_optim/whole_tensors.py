"""Updates that need whole matrices, as Muon's, of parameters of which a rank may have rows alone.

The ranks that FSDP2 cut a parameter over take turns as owners of matrices (see [Note: owners] of the engine); a parameter
that is whole on this rank, as in one process and under DDP, is stepped here. The memory is that of the largest matrix.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as torch_dist
from torch.distributed.tensor import DTensor, Replicate

from zstore.engine.extras.whole_tensors.kernel import TensorKernel
from zstore.engine.extras.whole_tensors.step import TensorStep
from zstore.engine.optim.state import OptimizerState
from zstore.engine.optim.update import Update
from zstore.errors import UsageError
from zstore.ranks.world import World

from .records import LocalRecord

_ALONE_BYTES, _SHARED_BYTES = 12, 44
"""Bytes for an element of the largest matrix: master, momentum and gradient in fp32; and if ranks exchange them as sent,
received and whole, and the first two on their way back."""


class WholeTensors:
    """Takes the steps of parameters whose kernels are `TensorKernel`s, and counts the memory that takes."""

    def __init__(self, arrays: OptimizerState) -> None:
        self._arrays = arrays
        self._arrays.is_sharded = True  # of the ranks of a step's world
        self._reserved_bytes = 0
        self._steps: dict[torch_dist.ProcessGroup | None, TensorStep] = {}

    def takes(self, record: LocalRecord) -> bool:
        """Return whether a parameter is stepped here."""
        return isinstance(self._arrays.kernel_of(record)[0], TensorKernel)

    def admit(self, record: LocalRecord) -> None:
        """Make room for the steps of a parameter. Raises UsageError for one that is no matrix, or of which ranks have other
        parts than rows, BudgetError if a step's memory is not in the host budget."""
        shape, name = tuple(record.shape), record.name
        if len(shape) != 2:
            raise UsageError(
                f"parameter {name!r} has shape {list(shape)}, and Muon is for matrices: give what has other than "
                "two dimensions to another optimizer, as AdamW"
            )
        if not record.is_of_whole or not record.is_contiguous:
            raise UsageError(
                f"parameter {name!r} is a matrix of which this rank has other parts than rows one after another (strides "
                f"{record.strides}): Muon is for parameters that are whole on each rank, or cut by rows as FSDP2 cuts them"
            )
        shared = self._group_of(record) is not None
        nbytes = (_SHARED_BYTES if shared else _ALONE_BYTES) * record.numel
        more = nbytes - self._reserved_bytes
        if more > 0 and record.full.device.type == "cpu":
            budget = self._arrays.store.budget
            budget.require(more, f"a step over the whole matrix of parameter {name!r} ({nbytes} bytes)")
            budget.take(more)
            self._reserved_bytes = nbytes

    def run(self, update: Update) -> None:
        """Carry an update of such parameters out (all ranks that have rows of them)."""
        by_group: dict[torch_dist.ProcessGroup | None, list[LocalRecord]] = {}
        for record in cast(list[LocalRecord], update.records):
            by_group.setdefault(self._group_of(record), []).append(record)
        errors = []
        for group, records in by_group.items():
            try:  # others wait in the exchanges of the next groups
                self._step_of(group, records[0]).run(Update(self._arrays, records, update.settings, update.rows))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _group_of(self, record: LocalRecord) -> torch_dist.ProcessGroup | None:
        """Return the ranks that have rows of the parameter; None if this one has all."""
        parameter: torch.Tensor = record.parameter
        if not isinstance(parameter, DTensor):
            return None
        cut = [number for number, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate)]
        return parameter.device_mesh.get_group(cut[0]) if cut and parameter.device_mesh.size(cut[0]) > 1 else None

    def _step_of(self, group: torch_dist.ProcessGroup | None, record: LocalRecord) -> TensorStep:
        if group not in self._steps:
            device = record.full.device
            world = World(device=device)
            if group is not None:
                rank, world_size = torch_dist.get_rank(group), torch_dist.get_world_size(group)
                world = World(rank=rank, world_size=world_size, device=device, group=group)
            self._steps[group] = TensorStep(self._arrays, world)
        return self._steps[group]
