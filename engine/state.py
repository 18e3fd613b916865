"""Masters and optimizer slots in the store, and the update that streams them.

[Note: the update]
Goals: the state passes once, in tiles that stay in cache; nothing of the size of the model is allocated; the bits are
the same on every tier. Phases, for each parameter that had a gradient on any rank, in order:
1. the store brings a tile of master and slots (read ahead, from disk), unpadded, ending at a multiple of 16 elements;
2. the gradient's rows are cast to fp32 and multiplied once with one fp32 scalar (1 / loss scale, and the clip);
3. the kernel changes master and slots in place; the store takes them back (written behind);
4. the master is cast into the parameter's own rows.
In fp32 without offload the master is the parameter's memory, and phase 4 has nothing to do.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Literal, cast

import numpy as np
import torch

from zstore.store import TensorStore
from zstore.stream import Tile

from .gradients import Gradients
from .kernel import Kernel, Scalars, TileUpdate
from .optimizer import Groups
from .parameters import ParameterRecord
from .tensors import as_torch

TierName = Literal["device", "host", "disk"]
Tiles = Generator[Tile, None, None]


class OptimizerState:
    """This rank's `model/` and `optimizer/` arrays. `kernels` has one entry for each parameter group."""

    def __init__(self, store: TensorStore, tier: TierName, kernels: Sequence[Kernel]) -> None:
        self.store = store
        self.tier = tier
        self.kernels = kernels
        self.records: list[ParameterRecord] = []
        """All parameters, in order."""
        self.scalars: dict[ParameterRecord, Scalars] = {}
        """Step counts and the like, of each parameter that the optimizer updates."""

    def add(self, record: ParameterRecord, initial: torch.Tensor) -> None:
        """Create the arrays of a parameter; `initial` has this rank's rows, 1-D, in the best precision there is."""
        self.records.append(record)
        name = f"model/{record.name}"
        if record.group is None:
            self._create(record, name, record.dtype, memory=record.owned())
            return
        kernel = self.kernels[record.group]
        if self.is_master(record):
            self._create(record, name, torch.float32, memory=record.owned())
        else:
            self._create(record, name, torch.float32)
            self._fill(name, initial)
        for slot in kernel.slots:
            self._create(record, f"optimizer/{slot}/{record.name}", torch.float32)
        self.scalars[record] = kernel.initial()

    def is_master(self, record: ParameterRecord) -> bool:
        """Return whether the parameter's own memory is the fp32 master."""
        return self.tier == "device" and record.dtype == torch.float32

    def _create(
        self, record: ParameterRecord, name: str, dtype: torch.dtype, memory: torch.Tensor | None = None
    ) -> None:
        spec = record.spec(name.removesuffix(f"/{record.name}"), dtype)
        tier = "device" if memory is not None else self.tier
        self.store.create(spec, grid=record.state_grid, shard=record.state_shard, tier=tier, memory=memory)

    def passing(self, groups: Sequence[Sequence[str]], mode: Literal["read", "update", "fill"]) -> closing[Tiles]:
        """Return a pass over groups of arrays, to use in a `with` block: what is left of it is ended there."""
        return closing(cast("Tiles", self.store.stream(groups, mode)))

    def _fill(self, name: str, values: torch.Tensor) -> None:
        with self.passing([[name]], "fill") as tiles:
            for tile in tiles:
                as_torch(tile.views[0]).copy_(values[tile.first : tile.stop])

    def arrays_of(self, record: ParameterRecord) -> list[str]:
        """Return the names of master and slots, in the kernel's order."""
        slots = () if record.group is None else self.kernels[record.group].slots
        return [f"model/{record.name}", *(f"optimizer/{slot}/{record.name}" for slot in slots)]

    def step(self, gradients: Gradients, groups: Groups, factor: float) -> None:
        """Take one step with the gradients times `factor`. See [Note: the update]."""
        scale = float(np.float32(factor))
        records = [record for record in self.scalars if gradients.owned(record) is not None]
        after: dict[ParameterRecord, Scalars] = {}
        with self.passing([self.arrays_of(record) for record in records], "update") as tiles:
            for tile in tiles:
                record = records[tile.group]
                rows = gradients.owned(record)
                if rows is None or record.group is None:
                    continue
                master, *slots = (as_torch(view) for view in tile.views)
                gradient = rows[tile.first : tile.stop].to(device=master.device, dtype=torch.float32)
                if scale != 1.0:
                    gradient = gradient.mul_(scale)
                update = TileUpdate(master, gradient, slots, groups[record.group], self.scalars[record])
                after[record] = self.kernels[record.group].update(update)
                if not self.is_master(record):
                    record.owned()[tile.first : tile.stop].copy_(master)
        for record in records:
            self.scalars[record] = after.get(record) or self._advanced(record, groups)

    def _advanced(self, record: ParameterRecord, groups: Groups) -> Scalars:
        """Return the scalars after a step of a parameter of which this rank has no rows: it counts as the others'
        do."""
        number = record.group or 0
        kernel = self.kernels[number]
        master, gradient, *slots = torch.zeros(2 + len(kernel.slots), 1, device=record.full.device)
        return kernel.update(TileUpdate(master, gradient, slots, groups[number], self.scalars[record]))

    def refresh_parameters(self) -> None:
        """Cast masters into the parameters' own rows (after a load)."""
        records = [record for record in self.scalars if not self.is_master(record)]
        with self.passing([[f"model/{record.name}"] for record in records], "read") as tiles:
            for tile in tiles:
                rows = records[tile.group].owned()[tile.first : tile.stop]
                rows.copy_(as_torch(tile.views[0]))
