"""State by parameter: DeepSpeed's names for reading and changing it, as `deepspeed.utils` has them, and `optimizer.state`.

All are collectives: every rank calls them for the same parameters, in the same order. For a parameter that is not trained,
or that no open engine has, getters return None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zstore.errors import UsageError

from ..params.record import ParameterRecord
from .access import Access, RankArray, find_run, rows_source


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the fp32 master of a parameter, whole, on the CPU."""
    found = _find(param)
    return None if found is None else found[0].parameter(found[1].name)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return an optimizer slot of a parameter, as "exp_avg", whole, on the CPU."""
    found = _find(param)
    return None if found is None else found[0].optimizer_state(found[1].name, optim_state_key)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return a parameter's gradient in the step under way, averaged over ranks and unscaled, fp32, on the CPU."""
    found = _find(param)
    return None if found is None else found[0].gradient(found[1].name)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace a parameter and its fp32 master; rank 0's values count."""
    access, record = _required(param)
    access.set_parameter(record.name, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace an optimizer slot of a parameter; rank 0's values count."""
    access, record = _required(param)
    access.set_optimizer_state(record.name, optim_state_key, value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace a parameter's averaged, unscaled gradient, after the last backward of a step; rank 0's values count.

    Raises UsageError if there is none, or if it waits on disk.
    """
    access, record = _required(param)

    def check() -> None:
        if not access.gradients.has(record):
            raise UsageError(
                f"parameter {record.name!r} has no gradient to be replaced: set it between backward() and step()"
            )
        access.check_values(record, value)

    access.finished(f"safe_set_full_grad({record.name!r})", check)
    full = access.from_rank0(record, value, torch.float32)
    access.gradients.replace(record, full.mul_(access.scaler.scale))


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace the gradient of each parameter that has one by the result of `update_func(gradient, parameter)`."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


# -- this rank's rows: see `ParameterRecord.owned_range` ---------------------------------------------------------------


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's rows of the fp32 master of a parameter, 1-D, a copy."""
    if (found := _find(param)) is None:
        return None
    access, record = found
    call = f"get_full_parameter({record.name!r})"
    return _rows(access.finished(call, lambda: access.source(record, "model")))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's rows of an optimizer slot of a parameter, 1-D, a copy."""
    if (found := _find(param)) is None:
        return None
    access, record = found
    source = access.slot(record.name, optim_state_key)
    return _rows(source) if isinstance(source, RankArray) else torch.tensor(source)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's rows of a parameter's gradient as `safe_get_full_grad` has it, 1-D."""
    gradient, found = safe_get_full_grad(param), _find(param)
    return None if gradient is None or found is None else gradient.flatten()[slice(*found[1].owned_range)].clone()


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's rows of a parameter and its fp32 master."""
    safe_set_full_fp32_param(param, _joined(param, value))


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace this rank's rows of an optimizer slot of a parameter."""
    safe_set_full_optimizer_state(param, _joined(param, value), optim_state_key)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's rows of a parameter's gradient, as `safe_set_full_grad` does."""
    safe_set_full_grad(param, _joined(param, value))


def _rows(source: RankArray) -> torch.Tensor:
    return source.begin(0, source.record.owned_numel)().clone()


def _joined(param: nn.Parameter, rows: torch.Tensor) -> torch.Tensor:
    """Return a parameter whose rows each rank gives (all ranks). Raises UsageError on every rank if one gives other than
    its own."""
    access, record = _required(param)
    with access.world.agreeing():
        if rows.numel() != record.owned_numel:
            raise UsageError(
                f"parameter {record.name!r}: expected {record.owned_numel} values, this rank's, got {rows.numel()}"
            )
    full = torch.empty(record.shape, dtype=torch.float32)
    access.read_into({record: full.view(-1)}, [rows_source(record, rows.detach().flatten(), torch.float32)])
    return full


def _find(param: nn.Parameter) -> tuple[Access, ParameterRecord] | None:
    found = find_run(param)
    return None if found is None or found[1].group is None else found


def _required(param: nn.Parameter) -> tuple[Access, ParameterRecord]:
    found = _find(param)
    if found is None:
        raise UsageError(f"a parameter of shape {tuple(param.shape)} is trained by no open engine")
    return found


# -- `optimizer.state` --------------------------------------------------------------------------------------------------


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
            found = self._access.optimizer_state(self._record.name, slot)
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
