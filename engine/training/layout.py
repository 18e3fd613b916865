"""Makes the records of a model's parameters: each gets its type, its memory and its state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zstore.io import return_free_memory
from zstore.io.tensors import plain_memory

from ..build.model import own_memory
from ..build.store import BuiltModel
from ..config.config import Config
from ..optim.state import OptimizerState
from ..params.record import PRECISIONS, ParameterRecord, RowsInStore, make_record
from ..params.sharding import Sharding
from ..plan.plan import Plan

_TRIM_BYTES = 64 * 1024 * 1024
"""Bytes of parameters laid out between two calls that give freed memory back to the system."""


class Layout:
    """Gives each parameter its type, its memory and its state."""

    def __init__(self, config: Config, sharding: Sharding, built: BuiltModel, plan: Plan) -> None:
        self._plan = plan
        self._dtype = PRECISIONS[config.precision]
        self._sharding = sharding
        self._built = built
        self._world = built.world

    def lay_out_all(
        self, parameters: Sequence[tuple[str, tuple[str, ...], nn.Parameter, int | None]], state: OptimizerState
    ) -> list[ParameterRecord]:
        """Return the records of all parameters, in order (all ranks). One at a time is whole in memory."""
        records: list[ParameterRecord] = []
        error: BaseException | None = None
        freed_bytes = 0
        if self._plan.packs_small:
            state.store.share_files()
        for name, aliases, parameter, group in parameters:
            try:
                # After an error too: the other ranks are in this, one after the other.
                rows = self._place(name, parameter)
                if error is None:
                    records.append(self._lay_out((name, aliases, parameter, group), rows, state))
            except Exception as raised:
                error = error or raised
            freed_bytes += parameter.nbytes
            if freed_bytes >= _TRIM_BYTES:
                freed_bytes = 0
                return_free_memory()
        self._world.raise_together(error)
        return records

    def _is_released(self, name: str) -> bool:
        """Return whether a parameter is gathered only for its uses."""
        return self._sharding.parameters and name not in self._plan.stay_gathered

    def _place(self, name: str, parameter: nn.Parameter) -> torch.Tensor | RowsInStore | None:
        """Move a parameter to its device, with rank 0's values, or return this rank's rows of one that is in shards and stays
        so (all ranks)."""
        if self._is_released(name):
            offloaded = self._plan.placements[name].parameter != "device"
            rows = self._built.rows(parameter, in_memory=not offloaded)
            if rows is not None:
                return rows
        if not self._built.restore(parameter):
            parameter.data = plain_memory(parameter.data.to(self._world.device))
            parameter.grad = None
            self._world.broadcast(parameter.data)
        return None

    def _lay_out(
        self,
        parameter: tuple[str, tuple[str, ...], nn.Parameter, int | None],
        rows: torch.Tensor | RowsInStore | None,
        state: OptimizerState,
    ) -> ParameterRecord:
        """Return the record of a parameter; its arrays are in the store, and its values are gathered or released as between
        steps.

        `rows`: this rank's rows of a parameter that has no values in memory; 1-D tensors if it is not offloaded.
        """
        name, aliases, tensor, group = parameter
        given = tensor.data
        if rows is None:
            tensor.data = own_memory(given, self._dtype)
        else:  # memory that nobody writes to, of the type in which it is trained
            tensor.grad, dtype = None, self._dtype if tensor.is_floating_point() else tensor.dtype
            tensor.data = torch.empty(tensor.shape, dtype=dtype, device=self._world.device)
        record = make_record(name, aliases, tensor, group=group, sharding=self._sharding, rank=self._world.rank)
        placement = self._plan.placements[name]
        offloaded = placement.parameter != "device"
        if not offloaded and self._is_released(name):
            record.shard_memory(rows if isinstance(rows, torch.Tensor) else None)
        elif rows is not None:
            record.release()
        if rows is None:
            first, stop = record.owned_range
            # Of the same type, the parameter's memory may be the given one, which may be released by now.
            rows = record.owned() if given.dtype == record.dtype else given.reshape(-1)[first:stop]
        state.add(record, rows, placement)
        if offloaded:
            record.release()
            state.use_in_place(record)
        self._built.drop(tensor)
        return record
