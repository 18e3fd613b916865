"""The model's state dict, whole: given out, and loaded with the masters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from zstore.errors import UsageError, listed, shortened

from ..build.init import Init
from ..build.model import broadcast_bytes
from ..params.record import Residency
from .gather import gather

if TYPE_CHECKING:
    from .access import Access

CustomLoad = Callable[..., Any]
"""Called as `custom(src=state_dict, dst=model)`."""


_MOST_LISTED = 10
_ENGINES = "module."
"""Prefix of the names of `engine.state_dict()`."""


def module_state_dict(access: Access, *, exclude_frozen: bool) -> dict[str, Any]:
    """Return the model's state dict; see `Engine.module_state_dict` (all ranks)."""
    found: dict[str, Any] = access.model.state_dict() if access.units is None else _whole_state_dict(access)
    if exclude_frozen:
        for name in list(found):
            record = access.find(name)
            if record is not None and record.group is None:
                del found[name]
    return found


def _whole_state_dict(access: Access) -> dict[str, Any]:
    """Return copies on the CPU of all that is in the state dict, on rank 0, and nothing on others (all ranks)."""
    access.finished("module_state_dict()", lambda: None)
    leader = access.world.rank == 0
    sharded = [record for record in access.state.records if record.residency is not Residency.RESIDENT]
    values = {record: torch.empty(record.numel if leader else 0, dtype=record.dtype) for record in sharded}
    access.read_into(values, [access.source(record, "model") for record in sharded], rank0_only=True)
    if not leader:
        return {}
    with access.guard.suspended():
        found: dict[str, Any] = access.model.state_dict(keep_vars=True)  # of sharded ones the names
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            record = access.find(name)
            whole = None if record is None else values.get(record)
            found[name] = value.detach().to("cpu", copy=True) if whole is None else whole.view(value.shape)
    return found


def hand_back(access: Access, config: Any, end: Callable[[], None]) -> None:
    """Give every parameter its value, the fp32 master if it is trained, in memory of its own or as a `config` shards it (all
    ranks). `end` takes the engine's hooks off, once only reading can fail."""
    state, device, init = access.state, access.world.device, Init(config=config, enabled=config is not None)
    records = access.finished("hand_back()", lambda: state.records, changes=True)
    end()
    with init:
        for record in records:
            parameter = record.parameter
            if not (record.residency is Residency.RESIDENT and state.is_master(record)):
                record.point_at(access.whole(access.source(record, "model")).to(device))
            parameter.grad = None
            path, _, name = record.name.rpartition(".")
            init.enter(access.model.get_submodule(path), name)


def load_module_state(
    access: Access, state: Mapping[str, Any], *, strict: bool, custom: CustomLoad | None = None
) -> _IncompatibleKeys:
    """Load a state dict of rank 0 into parameters, masters and buffers of all ranks; return the names that were missing in
    it, and those that the model does not have (all ranks).

    Raises UsageError on every rank, before anything was changed, that lists the keys that do not fit. `custom` loads it in
    its own way, with all parameters gathered.
    """
    world, model = access.world, access.model
    if custom is not None:
        with gather(model, modifier_rank=0):
            if world.rank == 0:
                custom(src=state, dst=model)
        _share_buffers(access, (value for _, value in state_entries(access) if isinstance(value, torch.Tensor)))
        return _IncompatibleKeys([], [])
    entries = dict(state_entries(access))
    given = dict(state) if world.rank == 0 else {}

    def check() -> None:
        if world.rank == 0:
            _check(entries, given, strict=strict)

    access.finished("load_module_state_dict()", check, changes=True)
    names: list[str] = world.broadcast_object([name for name in entries if name in given])
    unexpected: list[str] = world.broadcast_object([name for name in given if name not in entries])
    loaded: set[torch.Tensor] = set()
    for name in names:
        target = entries[name]
        if not isinstance(target, torch.Tensor) or target in loaded:
            continue
        loaded.add(target)
        record = access.record_of(target) if isinstance(target, nn.Parameter) else None
        if record is not None:
            access.set_from_rank0(record, given.get(name))
        elif world.rank == 0:
            target.copy_(given[name])
    _share_buffers(access, loaded)
    return _IncompatibleKeys([name for name in entries if name not in names], unexpected)


def state_entries(access: Access) -> Iterable[tuple[str, Any]]:
    """Return the model's parameters and buffers themselves, by their names in its state dict."""
    with access.guard.suspended():
        found: dict[str, Any] = access.model.state_dict(keep_vars=True)
    return found.items()


def _share_buffers(access: Access, tensors: Iterable[torch.Tensor]) -> None:
    """Give all ranks rank 0's values of the buffers among `tensors` (all ranks)."""
    for tensor in tensors:
        if not isinstance(tensor, nn.Parameter):
            broadcast_bytes(access.world, tensor)


def _check(entries: Mapping[str, Any], given: Mapping[str, Any], *, strict: bool) -> None:
    faults: list[str] = []
    missing, unexpected = [n for n in entries if n not in given], [n for n in given if n not in entries]
    for what, names in (("missing", missing), ("not in the model", unexpected)) if strict else ():
        if names:
            faults.append(f"{what}: {listed(names, _MOST_LISTED)}")
    for name, target in entries.items():
        if name not in given:
            continue
        if not isinstance(target, torch.Tensor):
            faults.append(f"{name}: extra state of a module, which is not loaded while the model is in training")
        elif not isinstance(given[name], torch.Tensor) or given[name].shape != target.shape:
            got = tuple(given[name].shape) if isinstance(given[name], torch.Tensor) else type(given[name]).__name__
            faults.append(f"{name}: expected a tensor of shape {tuple(target.shape)}, got {got}")
    if faults:
        lines = shortened(faults, _MOST_LISTED)
        raise UsageError("the state dict does not fit the model:" + "".join(f"\n  {line}" for line in lines))


def without_prefix(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict with the model's own names, if all of its keys have the prefix of `engine.state_dict()`."""
    if state and all(name.startswith(_ENGINES) for name in state):
        return {name.removeprefix(_ENGINES): value for name, value in state.items()}
    return state
