"""`Offloaded`: a torch optimizer whose state is on disk or in host memory."""

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
from zstore.io.closing import Closing, make_finalizer
from zstore.store import Store, StoreOptions, StoreStatistics

from .local_state import LocalState, OffloadedKernel, StateView
from .stored_tensor import LocalRecord, gradient_rows

OptimizerClass = type[torch.optim.Optimizer]
_ADAMS = (torch.optim.Adam, torch.optim.AdamW)


class Offloaded(torch.optim.Optimizer, Closing):
    """An optimizer of class `kind`, like `kind(params, **settings)`, whose state is stored off the device.

    `device` "nvme" keeps the state in files under `path`, an existing folder that no other optimizer uses at the same time;
    "cpu" keeps it in host memory, and what exceeds `host_budget_bytes` under `path`, if given. The budget covers transfer
    buffers and state in host memory.

    fp32 parameters are updated in place, with the bits of torch's class. bf16 and fp16 parameters have an fp32 master in the
    state, and equal the rounded master.

    Each rank keeps the state of its part of each parameter; no rank waits for another.

    Call `close()`, or use it in a `with` block. Raises UsageError for a class or parameter that cannot be offloaded,
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
        """The torch class whose update is applied."""
        self._settings = settings
        params, first_parameter = _list_groups(params)
        streams = _streams or streams_for(first_parameter.device)
        if path is not None:
            map_large_blocks()
        options = StoreOptions(
            run_path=None if path is None else user_path(path),
            host_budget_bytes=host_budget_bytes,
            device=str(first_parameter.device),
            pin_buffers=not streams.device_is_host,
        )
        rank = torch_dist.get_rank() if torch_dist.is_available() and torch_dist.is_initialized() else 0
        cleanup = ExitStack()  # references the store, but not the optimizer
        self._end = make_finalizer(self, cleanup.close)
        try:
            store = Store(options, rank=rank, cuda=streams.cuda_runtime)
            cleanup.callback(store.close)
            transfers = Transfers(streams, store.links, store.rooms)
            arrays = OptimizerState(store, [], transfers, host_ranks=int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
            self._local = state = LocalState(arrays, "disk" if device == "nvme" else "host")
            self._step_error: BaseException | None = None
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
            raise UsageError("optimizer.state cannot be replaced: set an entry, or call load_state_dict()")

    @property
    def store(self) -> Store:
        """The store that holds the state."""
        return self._local.arrays.store

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and create the state of its trained parameters."""
        self._require_open()
        index = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            self._local.kernels.append(_kernel(self.kind, self._settings | self.param_groups[index]))
            self._add_records(index, [p for p in self.param_groups[index]["params"] if p.requires_grad])
        except BaseException:
            del self.param_groups[index]
            self._local.remove_group(index)
            raise

    def _add_records(self, number: int, parameters: Iterable[torch.Tensor]) -> None:
        group = self.param_groups[number]
        names = dict(zip(group["params"], group.get("param_names", ()), strict=False))
        for parameter in parameters:
            self._local.add(parameter, number, names.get(parameter))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the result of `closure`.

        Raises UsageError if an earlier update failed partway, and any I/O error.
        """
        loss = call_closure(closure)
        self._require_open()
        if self._step_error is not None:
            raise UsageError(
                "a previous step failed partway, so that parameters and optimizer state are inconsistent: load both before "
                "continuing"
            ) from self._step_error
        for number, group in enumerate(self.param_groups):
            existing = self._local.records
            self._add_records(number, [p for p in group["params"] if p.grad is not None and p not in existing])
        records = self._local.records.items()
        rows = {record: gradient_rows(record, p.grad) for p, record in records if p.grad is not None}
        self._update(rows)
        return loss

    def _update(self, rows: dict[LocalRecord, torch.Tensor]) -> None:
        """Update the parameters with the rows of their gradients."""
        records = list(rows)
        self._local.track_changes(records)
        self._steps += 1
        settings = StepSettings.of(self.param_groups, step=self._steps, factor=1.0)
        changes = Changes(self._local.arrays, records, settings, partial(map, cast(Any, rows.pop)))
        try:
            changes.run()
        except BaseException as error:
            self._step_error = error
            raise
        changes.note_scalars(records)
        for record in records:  # autograd must refuse a backward across the change
            torch.autograd.graph.increment_version(record.parameter)
            record.note_version()

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state as torch's class does; state tensors are `StoredTensor`s, or DTensors of them."""
        self._require_open()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the groups' settings and the state with `state_dict`, from this class or torch's.

        This optimizer's own `StoredTensor`s are skipped, since they are loaded in place. Raises UsageError if shapes differ.
        """
        self._require_open()
        loaded = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = pre_hook(self, loaded) or loaded
        self._step_error = None
        self.__setstate__({"param_groups": _merge_groups(self.param_groups, loaded["param_groups"])})
        self._local.replace_kernels([_kernel(self.kind, self._settings | group) for group in self.param_groups])
        saved = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        current = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(saved, current, strict=True):
            entry = loaded["state"].get(key)
            if parameter in self._local.records:
                self.state[parameter] = {} if entry is None else entry
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

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
                "the optimizer is closed and its state is deleted: create a new one, and load a state_dict()"
            )


def _check(kind: Any, device: str, path: Any, budget: Any) -> None:
    """Raise UsageError for a class that cannot be offloaded, or for invalid settings."""
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        got = f"an optimizer of class {type(kind).__name__}" if isinstance(kind, torch.optim.Optimizer) else repr(kind)
        raise UsageError(f"kind: expected a subclass of torch.optim.Optimizer, such as torch.optim.AdamW, got {got}")
    if kind not in ELEMENT_WISE:
        raise UsageError(
            f"optimizer {kind.__name__} is not known to be element-wise, but offloaded state is updated in tiles; "
            f"use one of {', '.join(kind.__name__ for kind in ELEMENT_WISE)}"
        )
    if device not in ("nvme", "cpu"):
        raise UsageError(f'device: expected "nvme" or "cpu", the tier of the state, got {device!r}')
    if device == "nvme" and path is None:
        raise UsageError('device="nvme" needs a path: pass an existing folder on the drive to use')
    if path is not None and not user_path(path).is_dir():
        raise UsageError(f"path: expected an existing folder, got {os.fspath(path)!r}; create it on the drive to use")
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget <= 0):
        raise UsageError(
            f"host_budget_bytes: expected a positive number of bytes, or None for no limit, got {budget!r}"
        )


def _list_groups(params: Any) -> tuple[Any, torch.Tensor]:
    """Return the parameters or groups as lists, and the first parameter. Raises UsageError if their devices differ."""
    if isinstance(params, torch.Tensor | torch.nn.Module):
        got = "a single tensor" if isinstance(params, torch.Tensor) else "a module: pass model.parameters()"
        raise UsageError(f"params: expected an iterable of tensors or of group dicts, got {got}")
    groups = list(params)
    if groups and isinstance(groups[0], Mapping):
        members = [
            [each["params"]] if isinstance(each["params"], torch.Tensor) else list(each["params"]) for each in groups
        ]
        groups = [{**group, "params": tensors} for group, tensors in zip(groups, members, strict=True)]
    else:
        members = [groups]
    tensors = [member[1] if isinstance(member, tuple) else member for member in chain.from_iterable(members)]
    if not tensors:
        raise UsageError("params: expected at least one parameter, got none")
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise UsageError(
            f"params: expected all on one device, got {', '.join(sorted(map(str, devices)))}: create one optimizer per device"
        )
    return groups, tensors[0]


def _kernel(kind: OptimizerClass, group: Mapping[str, Any]) -> OffloadedKernel:
    """Return the kernel for a parameter group with these settings.

    Adam and AdamW have the bits of torch's fused kernel unless the group sets `fused=False` or `foreach=True`. Raises
    UsageError for a setting that cannot be offloaded.
    """
    settings = {**group, "params": [torch.zeros(1)]}
    for name in ("differentiable", "capturable"):
        if settings.get(name):
            raise UsageError(f"{kind.__name__}({name}=True) cannot be offloaded: leave it out")
    if kind in _ADAMS and settings.get("fused") is not False and not settings.get("foreach"):
        return kernel_for(kind, settings)
    return TorchKernel(kind, settings)


def _merge_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups with the settings of `saved` and the current parameters; see `Optimizer.load_state_dict`."""
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in saved]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"the loaded state has parameter groups of {sizes[1]} parameters, this optimizer of {sizes[0]}: it is from another "
            "model, or from other groups"
        )
    merged = []
    for current, saved_group in zip(groups, saved, strict=True):
        group = copy.deepcopy({name: value for name, value in saved_group.items() if name != "params"})
        own_keys = {name: current[name] for name in ("params", "param_names") if name in current and name not in group}
        merged.append(group | own_keys)
    return merged
