"""Steps of optimizers that need whole tensors, with rows of them on each rank: ranks take turns as owners.

[Note: owners]
Tensors are taken in rounds of as many as there are ranks, the largest first, and rank i of a round owns its i-th tensor for
that time. Each round:
1. every rank reads its rows of master, slots and gradient of all tensors of the round, from any tier, the gradient
   in fp32 and multiplied once (see [Note: the update]);
2. one exchange gives each owner its whole tensor, and the class's own step runs over it, on the device that computes;
3. one exchange returns master and slots, and every rank writes its rows and casts the parameter's own.
So the bits are those of the class over the whole tensor, whatever tier, stage or number of ranks; and memory is bounded by
four copies of one tensor: read, received, whole, and on its way back. If every rank has all rows
nothing is exchanged, and each takes every tensor.

A rank that fails goes on through the exchanges, since the others wait in them, and raises at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from zstore.format import ALIGN_NUMEL, Grid, model_array, optimizer_array, round_up
from zstore.io.tensors import as_torch
from zstore.ranks.world import World

from ...optim.kernel import SlotArray
from ...optim.state import OptimizerState
from ...optim.stepper import Stepper
from ...optim.update import Update
from ...params.record import ParameterRecord
from ...runtime.device import GradientTiles
from .kernel import TensorKernel


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Rows of one array of a tensor, in a row of the exchange."""

    slot: SlotArray | None
    """None: the master, or the gradient."""
    shape: tuple[int, ...]
    """Shape of the whole array."""
    grid: Grid
    """How it is cut over the ranks that exchange."""
    offset: int
    """Offset of its rows."""

    @property
    def stop(self) -> int:
        """End of its rows, padding included."""
        return self.offset + self.grid.shard_numel


class _Tensor:
    """One tensor of a round: master, slots and gradient, in this order."""

    def __init__(self, state: OptimizerState, record: ParameterRecord) -> None:
        self.record = record
        self.slots = state.kernel_slots(record)
        shape = tuple(record.shape)
        arrays = [(None, shape), *((slot, slot.shape or shape) for slot in self.slots), (None, shape)]
        self.parts: list[_Part] = []
        offset = 0
        for slot, whole in arrays:
            grid = state.state_grid_of(record, slot)
            self.parts.append(_Part(slot=slot, shape=whole, grid=grid, offset=offset))
            offset += round_up(grid.shard_numel, ALIGN_NUMEL)  # as aligned as memory of its own
        self.numel = offset
        """Elements of a row with all of them."""
        self.kept_numel = self.parts[-1].offset
        """Elements of a row without the gradient."""


class TensorStep(Stepper):
    """Takes the updates of a run with an optimizer that needs whole tensors (all ranks). See [Note: owners]."""

    def __init__(self, state: OptimizerState, world: World) -> None:
        self._state = state
        self._world = world
        self._parties = world.world_size if state.is_sharded else 1
        self._error: Exception | None = None

    def run(self, update: Update) -> None:
        """Carry out an update: element-wise updates in tiles, and then the whole tensors."""
        whole = [r for r in update.records if r.numel and isinstance(self._state.kernel_of(r)[0], TensorKernel)]
        apart, self._error = set(whole), None
        others = [record for record in update.records if record not in apart]
        with self._keeping_error():
            Update(self._state, others, update.settings, update.rows).run()
        whole.sort(key=lambda record: -record.numel)
        for first in range(0, len(whole), self._parties):
            self._take(update, [_Tensor(self._state, record) for record in whole[first : first + self._parties]])
        if self._error is not None:
            raise self._error

    def _take(self, update: Update, tensors: Sequence[_Tensor]) -> None:
        device, parties = self._world.device, self._parties
        sent = torch.zeros(parties, max(tensor.numel for tensor in tensors), device=device)
        with self._keeping_error():
            self._read_state(tensors, sent)
            for row, tensor in zip(sent, tensors, strict=False):
                self._read_gradient(update, tensor.record, self._rows(tensor.parts[-1], row))
        received = sent
        if parties > 1:
            received = torch.empty_like(sent)
            self._world.all_to_all(received, sent, kind="all_to_all").wait()
        rank, back = self._world.rank if parties > 1 else 0, received
        if parties > 1:
            back = torch.zeros(parties, max(tensor.kept_numel for tensor in tensors), device=device)
        if rank < len(tensors) and self._error is None:
            with self._keeping_error():
                self._step(update, tensors[rank], received, back)
        del received
        if parties > 1:
            rows = sent.view(-1)[: back.numel()].view(back.shape)
            self._world.all_to_all(rows, back, kind="all_to_all").wait()
            back = rows
        if self._error is None:
            with self._keeping_error():
                self._write(tensors, back, update.settings.step)

    @contextmanager
    def _keeping_error(self) -> Iterator[None]:
        """Keep the first error for the end: the other ranks wait in the exchanges to come."""
        try:
            with torch.no_grad():
                yield
        except Exception as error:
            self._error = self._error or error

    # -- 1. ---------------------------------------------------------------------------------------------------------

    def _rows(self, part: _Part, row: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of an array, in a row that it exchanges."""
        rank = self._world.rank if self._parties > 1 else 0
        return row[part.offset : part.offset + part.grid.shard_valid_numel(rank)]

    def _read_state(self, tensors: Sequence[_Tensor], sent: torch.Tensor) -> None:
        state = self._state
        groups = list(self._groups(tensors, sent))
        with state.passing([names for _, names, _ in groups], "read") as tiles:
            for tile in tiles:
                for target, view in zip(groups[tile.group][2], tile.views, strict=True):
                    state.transfers.copy_into(target[tile.first : tile.stop], as_torch(view))

    def _groups(
        self, tensors: Sequence[_Tensor], rows: torch.Tensor
    ) -> Iterator[tuple[ParameterRecord, list[str], list[torch.Tensor]]]:
        """Yield (parameter, arrays that pass together, their rows among `rows`), of this rank's arrays of the tensors: the
        master with the slots that are cut as it is, and each other slot."""
        for row, tensor in zip(rows, tensors, strict=False):
            record, parts = tensor.record, tensor.parts[:-1]
            alike = [part for part in parts[1:] if part.slot is not None and part.slot.shape is None]
            if record.owned_numel:
                kept = [slot for slot in self._state.slots_of(record) if slot.shape is None]
                slots = [optimizer_array(slot.name, record.name) for slot in kept]
                names = [model_array(record.name), *slots]
                yield record, names, [self._rows(part, row) for part in (parts[0], *alike)]
            for part in parts[1:]:
                if part.slot is not None and part.slot.shape is not None and self._rows(part, row).numel():
                    yield record, [optimizer_array(part.slot.name, record.name)], [self._rows(part, row)]

    def _read_gradient(self, update: Update, record: ParameterRecord, target: torch.Tensor) -> None:
        if not record.owned_numel:
            return
        state, rows = self._state, update.rows(record)
        if rows is not None:
            target.copy_(GradientTiles(state.transfers, rows).tile(0, target.numel(), target))
        else:
            with state.passing([[state.spilled[record]]], "read") as tiles:
                for tile in tiles:
                    state.transfers.copy_into(target[tile.first : tile.stop], as_torch(tile.views[0]))
        if (factor := update.settings.factor_of(record)) != 1.0:
            target.mul_(factor)

    # -- 2. ---------------------------------------------------------------------------------------------------------

    def _step(self, update: Update, tensor: _Tensor, received: torch.Tensor, back: torch.Tensor) -> None:
        wholes = [
            received[:, part.offset : part.stop].reshape(-1)[: math.prod(part.shape)].view(part.shape)
            for part in tensor.parts
        ]
        kernel, group = self._state.kernel_of(tensor.record)
        if isinstance(kernel, TensorKernel):
            slots = {slot.name: values for slot, values in zip(tensor.slots, wholes[1:-1], strict=True)}
            scalars = self._state.scalars[tensor.record]
            kernel.update(update.settings.groups[group], scalars, wholes[0], wholes[-1], slots)
        if self._parties == 1:  # they are in place already
            return
        for part, whole in zip(tensor.parts[:-1], wholes[:-1], strict=True):
            flat, step = whole.view(-1), part.grid.shard_numel
            for row, first in zip(back, range(0, flat.numel(), step), strict=False):
                rows = flat[first : first + step]
                row[part.offset : part.offset + rows.numel()] = rows

    # -- 3. ---------------------------------------------------------------------------------------------------------

    def _write(self, tensors: Sequence[_Tensor], back: torch.Tensor, number: int) -> None:
        state = self._state
        groups = list(self._groups(tensors, back))
        arrays: list[list[str]] = []
        for record, names, _ in groups:
            has_rest = names[0] == model_array(record.name) and record.rest not in (None, names[0])
            arrays.append([*names, record.rest] if has_rest and record.rest is not None else names)
        with state.passing(arrays, "fill") as tiles:
            for tile in tiles:
                record, names, sources = groups[tile.group]
                views = [as_torch(view) for view in tile.views]
                values = [source[tile.first : tile.stop] for source in sources]
                state.transfers.copy_into(views[0], values[0])
                if names[0] != model_array(record.name):
                    continue
                if not state.codec.is_plain:
                    there = [one.to(views[1].device) for one in values[1:]]
                    state.slot_tiles(record, number).put(there, views[1 : len(names)], tile.first)
                else:
                    for view, one in zip(views[1 : len(names)], values[1:], strict=True):
                        state.transfers.copy_into(view, one)
                if len(views) > len(names):
                    state.transfers.copy_into(views[-1], values[0])
                elif record.rest is None and not state.is_master(record):
                    state.transfers.copy_into(record.owned()[tile.first : tile.stop], values[0])
