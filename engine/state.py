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

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from zstore.store import ModeName, TensorStore
from zstore.stream import Tile

from .gradients import Gradients
from .kernel import Kernel, ParameterStep, Scalars
from .optimizer import Groups
from .parameters import ParameterRecord
from .placement import Placement
from .tensors import as_torch

TierName = Literal["device", "host", "disk"]
Tiles = Generator[Tile, None, None]


@dataclass(frozen=True, eq=False)
class _Work:
    """What one step does to one parameter."""

    record: ParameterRecord
    gradient: torch.Tensor
    """This rank's rows, 1-D."""
    parameter: torch.Tensor | None
    """This rank's rows, into which the master is cast; None where they are the master."""
    step: ParameterStep


class OptimizerState:
    """This rank's `model/` and `optimizer/` arrays. `kernels` has one entry for each parameter group."""

    def __init__(self, store: TensorStore, kernels: Sequence[Kernel]) -> None:
        self.store = store
        self.kernels = kernels
        self.records: list[ParameterRecord] = []
        """All parameters, in order."""
        self.scalars: dict[ParameterRecord, Scalars] = {}
        """Step counts and the like, of each parameter that the optimizer updates."""
        self._own_master: set[ParameterRecord] = set()

    def add(self, record: ParameterRecord, initial: torch.Tensor, placement: Placement) -> None:
        """Create the arrays of a parameter; `initial` has this rank's rows, 1-D, in the best precision there is.

        Where the parameter is offloaded, its rows rest in `record.rest` from now on.
        """
        self.records.append(record)
        offloaded = placement.parameter != "device"
        if record.group is None:
            self._add_own(record, placement.parameter)
            return
        kernel = self.kernels[record.group]
        if record.dtype == torch.float32 and (offloaded or placement.state == "device"):
            self._add_own(record, placement.parameter)
            self._own_master.add(record)
        else:
            self._create(record, "model", torch.float32, placement.state, fill=initial)
            if offloaded:
                record.rest = self._create(record, "parameter", record.dtype, placement.parameter, fill=initial)
        for slot in kernel.slots:
            self._create(record, f"optimizer/{slot}", torch.float32, placement.state)
        self.scalars[record] = kernel.initial()

    def _add_own(self, record: ParameterRecord, tier: TierName) -> None:
        """Let the parameter's own rows be its `model/` array, on the device or at rest."""
        if tier == "device":
            self._create(record, "model", record.dtype, "device", memory=record.owned())
        else:
            record.rest = self._create(record, "model", record.dtype, tier, fill=record.owned())

    def is_master(self, record: ParameterRecord) -> bool:
        """Return whether the fp32 master is the parameter itself, in its memory or at rest."""
        return record in self._own_master

    def _create(
        self,
        record: ParameterRecord,
        group: str,
        dtype: torch.dtype,
        tier: TierName,
        *,
        memory: torch.Tensor | None = None,
        fill: torch.Tensor | None = None,
    ) -> str:
        spec = record.spec(group, dtype)
        self.store.create(spec, grid=record.state_grid, shard=record.state_shard, tier=tier, memory=memory)
        if fill is not None:
            with self.passing([[spec.name]], "fill") as tiles:
                for tile in tiles:
                    as_torch(tile.views[0]).copy_(fill[tile.first : tile.stop])
        return spec.name

    @contextmanager
    def passing(
        self, groups: Sequence[Sequence[str]], mode: ModeName, *, modes: Mapping[str, ModeName] | None = None
    ) -> Iterator[Tiles]:
        """Give a pass over groups of arrays for the length of a `with` block: what is left of it is ended there.

        Beside a disk, tiles are worked on by one thread: it outruns the disk, while torch's threads, which spin as they
        wait for each other, would take the processors from the I/O threads.
        """
        num_threads = torch.get_num_threads()
        try:
            if any(self.store.tier_of(name) == "disk" for group in groups for name in group):
                torch.set_num_threads(1)
            with closing(self.store.stream(groups, mode, modes=modes)) as tiles:
                yield tiles
        finally:
            torch.set_num_threads(num_threads)

    def arrays_of(self, record: ParameterRecord) -> list[str]:
        """Return the names of master and slots, in the kernel's order."""
        slots = () if record.group is None else self.kernels[record.group].slots
        return [f"model/{record.name}", *(f"optimizer/{slot}/{record.name}" for slot in slots)]

    def step(self, gradients: Gradients, groups: Groups, factor: float) -> None:
        """Take one step with the gradients times `factor`. See [Note: the update]."""
        scale = float(np.float32(factor))
        work: list[_Work] = []
        for record, scalars in self.scalars.items():
            rows = gradients.owned(record)
            if rows is not None and record.group is not None:
                step = self.kernels[record.group].start(groups[record.group], scalars)
                own = None if self.is_master(record) or record.rest is not None else record.owned()
                work.append(_Work(record, rows, own, step))
        groups_of = [self.arrays_of(one.record) for one in work]
        rests: dict[str, ModeName] = {}
        for one, names in zip(work, groups_of, strict=True):
            if one.record.rest is not None and one.record.rest not in names:
                names.append(one.record.rest)
                rests[one.record.rest] = "fill"
        with self.passing(groups_of, "update", modes=rests) as tiles:
            for tile in tiles:
                one, part = work[tile.group], slice(tile.first, tile.stop)
                master, *slots = map(as_torch, tile.views)
                target = slots.pop() if one.record.rest in rests else None
                gradient = one.gradient[part].to(device=master.device, dtype=torch.float32)
                one.step.tile(master, gradient if scale == 1.0 else gradient.mul_(scale), slots)
                if one.parameter is not None:
                    one.parameter[part] = master
                if target is not None:
                    target.copy_(master)
        for one in work:
            if one.gradient.numel() == 0:  # a rank without rows counts like the others
                num_slots = len(self.arrays_of(one.record)) - 1
                master, gradient, *slots = torch.zeros(2 + num_slots, 1, device=one.gradient.device)
                one.step.tile(master, gradient, slots)
            self.scalars[one.record] = one.step.scalars()

    def refresh_parameters(self) -> None:
        """Cast masters into the parameters' own rows, in memory and at rest (after a load)."""
        records = [record for record in self.scalars if not self.is_master(record) and record.owned_numel]
        groups = [[f"model/{r.name}", *([] if r.rest is None else [r.rest])] for r in records]
        rests: dict[str, ModeName] = {r.rest: "fill" for r in records if r.rest is not None}
        with self.passing(groups, "read", modes=rests) as tiles:
            for tile in tiles:
                record = records[tile.group]
                rows = record.owned()[tile.first : tile.stop] if record.rest is None else as_torch(tile.views[1])
                rows.copy_(as_torch(tile.views[0]))
