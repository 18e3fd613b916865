"""`optimizer.state` of a run: the optimizer's slots of each parameter, fetched when they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zstore.errors import UsageError

from ..params.record import ParameterRecord
from .access import Access


class StateByParameter(Mapping[Any, Mapping[str, torch.Tensor]]):
    """The state of each parameter that was updated, by the parameter. Reading an entry fetches nothing yet: see
    `StateOfParameter`."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def __getitem__(self, parameter: Any) -> Mapping[str, torch.Tensor]:
        record = self._access.record_of(parameter)
        if record is None or not self._is_updated(record):
            return {}  # as the defaultdict that it replaces
        return StateOfParameter(self._access, record)

    def _is_updated(self, record: ParameterRecord) -> bool:
        return any(self._access.state.scalars.get(record, {}).values())

    def __contains__(self, parameter: object) -> bool:
        return parameter in set(self)

    def __iter__(self) -> Iterator[Any]:
        return iter([record.parameter for record in self._access.state.scalars if self._is_updated(record)])

    def __len__(self) -> int:
        return sum(map(self._is_updated, self._access.state.scalars))


class StateOfParameter(Mapping[str, torch.Tensor]):
    """The optimizer's slots of one parameter: a copy on the CPU, whole and in fp32, each time that a slot is read (all
    ranks). `engine.set_optimizer_state` changes it."""

    def __init__(self, access: Access, record: ParameterRecord) -> None:
        self._access = access
        self._record = record

    def __getitem__(self, slot: str) -> torch.Tensor:
        if slot not in self._slots():
            raise KeyError(slot)
        with self._access.world.calling("access"):
            found = self._access.optimizer_state(self._record.name, slot, rank0_only=False)
        if found is None:
            raise KeyError(slot)
        return found

    def _slots(self) -> list[str]:
        state, record = self._access.state, self._record
        scalars = [name for name in state.scalars[record] if name != "updates"]  # the engine's own
        return [*scalars, *(slot.name for slot in state.kernel_slots(record))]

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots())

    def __len__(self) -> int:
        return len(self._slots())

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are dictionaries of tensors. Raises UsageError on more ranks than one."""
        if self._access.world.world_size > 1:
            raise UsageError(
                "the optimizer's state cannot be copied or pickled, since it is shared out over ranks: save all of it with "
                "engine.save_checkpoint() or accelerator.save_state(), or read single slots, on all ranks"
            )
        return dict, (dict(self),)
