"""`Offloaded`: an optimizer of torch whose state is on disk or in host memory."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, Literal, NoReturn, cast

import torch
import torch.distributed as torch_dist

from zstore.engine.optim.changes import Changes
from zstore.engine.optim.kernel import ELEMENT_WISE, StepSettings, TorchKernel, call_closure, kernel_for
from zstore.engine.optim.state import OptimizerState
from zstore.engine.runtime.device import Streams, Transfers, streams_for
from zstore.errors import UsageError
from zstore.io import map_large_blocks, user_path
from zstore.io.closing import Closing, closing_with
from zstore.store import Store, StoreOptions, StoreStatistics

from .local_state import LocalState, OffloadedKernel, StateView
from .stored_tensor import LocalRecord, rows_of

OptimizerClass = type[torch.optim.Optimizer]
_ADAMS = (torch.optim.Adam, torch.optim.AdamW)


class Offloaded(torch.optim.Optimizer, Closing):
    """An optimizer of class `kind` over `params`, as `kind(params, **settings)` is, whose state is off the device.

    `device` "nvme" keeps the state in files under `path`, an existing folder that no other optimizer uses at the same time;
    "cpu" keeps it in host memory, and the excess over `host_budget_bytes` under `path`, if given. The budget counts
    transfer buffers and state in host memory.

    fp32 parameters are updated in place, with the bits of torch's class. bf16 and fp16 parameters have an fp32 master among
    the state, and are the rounded master.

    Each rank keeps the state of its part of each parameter; no rank waits for another.

    `close()` it, or use it in a `with` block. Raises UsageError for a class or a parameter that cannot be offloaded,
    RunFolderError for a folder that cannot be used, BudgetError if the state does not fit.
    """

    def __init__(
        self,
        kind: OptimizerClass,
        params: Any,
        *,
        device: Literal["nvme", "cpu"] = "nvme",
        path: str | os.PathLike[str] | None = None,
        host_budget_bytes: int | None = None,
        _streams: Streams | None = None,
        **settings: Any,
    ) -> None:
        _check(kind, device, path, host_budget_bytes)
        self.kind = kind
        """The class of the update."""
        self._settings = settings
        params, first = _groups_of(params)
        streams = _streams or streams_for(first.device)
        if path is not None:
            map_large_blocks()
        options = StoreOptions(
            run_path=None if path is None else user_path(path),
            host_budget_bytes=host_budget_bytes,
            device=str(first.device),
            pin_buffers=not streams.device_is_host,
        )
        rank = torch_dist.get_rank() if torch_dist.is_available() and torch_dist.is_initialized() else 0
        ending = ExitStack()  # references the store, but not the optimizer
        self._end = closing_with(self, ending.close)
        try:
            store = Store(options, rank=rank, cuda=streams.cuda_runtime)
            ending.callback(store.close)
            transfers = Transfers(streams, store.links, store.rooms)
            arrays = OptimizerState(store, [], transfers, host_ranks=int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
            self._local = state = LocalState(arrays, "disk" if device == "nvme" else "host")
            self._torn: BaseException | None = None
            self._steps = 0
            self._view = StateView(state)
            if kind in _ADAMS and not any(
                settings.get(key) is not None for key in ("fused", "foreach", "differentiable")
            ):
                settings = {**settings, "fused": True}  # the kernel's default bits
            super().__init__(params, kind([torch.nn.Parameter(torch.zeros(1, 1))], **settings).defaults)
        except BaseException:
            self._end()
            raise

    @property
    def state(self) -> Any:
        """Each parameter's state, read from the store on request. Setting an entry loads it."""
        return self._view

    @state.setter
    def state(self, entries: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        if entries and entries is not self._view:
            raise UsageError("optimizer.state: expected an entry to be set, or load_state_dict(), got another mapping")

    @property
    def store(self) -> Store:
        """The store that holds the state."""
        return self._local.arrays.store

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; the state of its trained parameters is created immediately."""
        self._require_open()
        number = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            self._local.kernels.append(_kernel(self.kind, self._settings | self.param_groups[number]))
            self._add_records(number, [p for p in self.param_groups[number]["params"] if p.requires_grad])
        except BaseException:
            del self.param_groups[number]
            self._local.remove_group(number)
            raise

    def _add_records(self, number: int, parameters: Iterable[torch.Tensor]) -> None:
        group = self.param_groups[number]
        names = dict(zip(group["params"], group.get("param_names", ()), strict=False))
        for parameter in parameters:
            self._local.add(parameter, number, names.get(parameter))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the result of `closure`.

        Raises UsageError if an earlier update failed partway, and any error of a drive.
        """
        loss = call_closure(closure)
        self._require_open()
        if self._torn is not None:
            raise UsageError(
                "a previous step failed partway, so that parameters and optimizer state are inconsistent: load both before "
                "continuing"
            ) from self._torn
        for number, group in enumerate(self.param_groups):
            known = self._local.records
            self._add_records(number, [p for p in group["params"] if p.grad is not None and p not in known])
        records = self._local.records.items()
        rows = {record: rows_of(record, p.grad) for p, record in records if p.grad is not None}
        self._update(rows)
        return loss

    def _update(self, rows: dict[LocalRecord, torch.Tensor]) -> None:
        """Update the parameters by the rows of their gradients."""
        records = list(rows)
        self._local.watch_memory(records)
        self._steps += 1
        settings = StepSettings.of(self.param_groups, step=self._steps, factor=1.0)
        changes = Changes(self._local.arrays, records, settings, partial(map, cast(Any, rows.pop)))
        try:
            changes.run()
        except BaseException as error:
            self._torn = error
            raise
        changes.note_scalars(records)
        for record in records:  # autograd must refuse a backward across the change
            torch.autograd.graph.increment_version(record.parameter)
            record.note_version()

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state as torch's class does; tensors of the state are `StoredTensor`s, or DTensors of them."""
        self._require_open()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace groups' settings and state with the contents of `state_dict`, from this class or torch's.

        This optimizer's own `StoredTensor`s are skipped, as they were loaded in place. Raises UsageError if shapes differ.
        """
        self._require_open()
        loaded = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = before(self, loaded) or loaded
        self._torn = None
        self.__setstate__({"param_groups": _merged(self.param_groups, loaded["param_groups"])})
        self._local.replace_kernels([_kernel(self.kind, self._settings | group) for group in self.param_groups])
        saved = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(saved, own, strict=True):
            entry = loaded["state"].get(key)
            if parameter in self._local.records:
                self.state[parameter] = {} if entry is None else entry
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "an offloaded optimizer has files and threads, and cannot be copied or pickled: use its state_dict()"
        )

    def statistics(self) -> StoreStatistics:
        """Return the store's counters: bytes moved, and bytes on disk, in host memory and in buffers."""
        return self.store.statistics()

    def close(self) -> None:
        """Remove the state's files; a second call does nothing."""
        self._end()

    def _require_open(self) -> None:
        if not self._end.alive:
            raise UsageError(
                "the optimizer is closed and its state is deleted: make another one, and load a state_dict()"
            )


def _check(kind: Any, device: str, path: Any, budget: Any) -> None:
    """Raise UsageError for a class that cannot be offloaded, or for invalid settings."""
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        got = f"an optimizer of class {type(kind).__name__}" if isinstance(kind, torch.optim.Optimizer) else repr(kind)
        raise UsageError(f"kind: expected a class derived from torch.optim.Optimizer, as torch.optim.AdamW, got {got}")
    if kind not in ELEMENT_WISE:
        raise UsageError(
            f"optimizer {kind.__name__} is not known to be element-wise, but offloaded state is updated in tiles; "
            f"use one of {', '.join(each.__name__ for each in ELEMENT_WISE)}"
        )
    if device not in ("nvme", "cpu"):
        raise UsageError(f'device: expected "nvme" or "cpu", the tier of the state, got {device!r}')
    if device == "nvme" and path is None:
        raise UsageError('device="nvme" needs a path: give an existing folder on the drive to use')
    if path is not None and not user_path(path).is_dir():
        raise UsageError(f"path: expected an existing folder, got {os.fspath(path)!r}; create it on the drive to use")
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget <= 0):
        raise UsageError(
            f"host_budget_bytes: expected a positive number of bytes, or None for no limit, got {budget!r}"
        )


def _groups_of(params: Any) -> tuple[Any, torch.Tensor]:
    """Return the parameters or groups as lists, and the first parameter. Raises UsageError if devices differ."""
    if isinstance(params, torch.Tensor | torch.nn.Module):
        got = "a single tensor" if isinstance(params, torch.Tensor) else "a module: give model.parameters()"
        raise UsageError(f"params: expected an iterable of tensors or of group dicts, got {got}")
    groups = list(params)
    if groups and isinstance(groups[0], Mapping):
        members = [
            [each["params"]] if isinstance(each["params"], torch.Tensor) else list(each["params"]) for each in groups
        ]
        groups = [{**each, "params": found} for each, found in zip(groups, members, strict=True)]
    else:
        members = [groups]
    tensors = [member[1] if isinstance(member, tuple) else member for member in chain.from_iterable(members)]
    if not tensors:
        raise UsageError("params: expected at least one parameter, got none")
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise UsageError(
            f"params: expected all on one device, got {', '.join(sorted(map(str, devices)))}: make an optimizer for each device"
        )
    return groups, tensors[0]


def _kernel(kind: OptimizerClass, group: Mapping[str, Any]) -> OffloadedKernel:
    """Return the kernel for a parameter group with these settings.

    Adam and AdamW have the bits of torch's fused kernel unless the group says `fused=False` or `foreach=True`. Raises
    UsageError for a setting that cannot be offloaded.
    """
    settings = {**group, "params": [torch.zeros(1)]}
    for name in ("differentiable", "capturable"):
        if settings.get(name):
            raise UsageError(f"{kind.__name__}({name}=True) cannot be offloaded: leave it out")
    if kind in _ADAMS and settings.get("fused") is not False and not settings.get("foreach"):
        return kernel_for(kind, settings)
    return TorchKernel(kind, settings)


def _merged(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups with the settings of `saved` and their own parameters; see `Optimizer.load_state_dict`."""
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in saved]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"the loaded state has parameter groups of {sizes[1]} parameters, this optimizer of {sizes[0]}: it is of another "
            "model, or of other groups"
        )
    merged = []
    for own, other in zip(groups, saved, strict=True):
        group = copy.deepcopy({name: value for name, value in other.items() if name != "params"})
        kept = {name: own[name] for name in ("params", "param_names") if name in own and name not in group}
        merged.append(group | kept)
    return merged
