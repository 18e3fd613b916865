"""The optimizer as training loops see it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any, Literal, NoReturn, cast

import torch
import torch.distributed as torch_dist
from torch.distributed.tensor import DTensor

from zstore.engine.optim.state import OptimizerState
from zstore.engine.optim.update import StepSettings, Update
from zstore.engine.params.record import ParameterRecord
from zstore.engine.runtime.device import Streams, Transfers, streams_for
from zstore.errors import UsageError
from zstore.io import Files, map_large_blocks, user_path
from zstore.io.closing import Closing, closing_with
from zstore.store import StoreOptions, StoreStatistics, TensorStore

from .arguments import check_budget, check_kind, check_settings, groups_of
from .gradients import global_norm, laid_out, rows_of
from .local_state import LocalState, StateView
from .records import LocalRecord
from .registry import OptimizerClass, defaults_of, make_kernel


class Offloaded(torch.optim.Optimizer, Closing):
    """An optimizer of class `kind` over `params`, as `kind(params, **settings)` is, whose state is off the device.

    `device` "nvme" keeps the state in files under `path`, an existing folder on the drive to use that no other optimizer
    uses at the same time; "cpu" keeps it in host memory, and the excess over `host_budget_bytes` under `path`, if that is
    given. The budget counts transfer buffers and state in host memory.

    fp32 parameters are updated in place, with the bits of torch's class. Of bf16 and fp16 parameters an fp32 master is
    kept with the state, and the parameter is the master, rounded.

    `max_grad_norm` clips as `torch.nn.utils.clip_grad_norm_` does, over all ranks. Each rank holds the state of its part of
    each parameter; no rank waits for another.

    `close()` it, or use it in a `with` block. Raises UsageError for a class or a parameter that cannot be offloaded,
    RunFolderError for a folder that cannot be used, BudgetError if the state does not fit.
    """

    _step_supports_amp_scaling = True  # a GradScaler leaves unscaling, and skipping a step, to `step`

    def __init__(
        self,
        kind: OptimizerClass,
        params: Any,
        *,
        device: Literal["nvme", "cpu"] = "nvme",
        path: str | os.PathLike[str] | None = None,
        host_budget_bytes: int | None = None,
        max_grad_norm: float | None = None,
        _streams: Streams | None = None,
        _files: Files | None = None,
        **settings: Any,
    ) -> None:
        check_kind(kind)
        check_settings(device, path, max_grad_norm)
        check_budget(host_budget_bytes)
        self.kind = kind
        """The class whose update is carried out."""
        self._settings = settings
        self.max_grad_norm = max_grad_norm
        self.grad_norm: torch.Tensor | None = None
        """Norm of the gradients of the last step, 0-d in host memory, before they were clipped; None without clipping."""
        params, first = groups_of(params)
        streams = _streams or streams_for(first.device)
        options = _options(path, host_budget_bytes, first.device, streams)
        ending = ExitStack()  # without the optimizer, whose end closes it
        self._end = closing_with(self, ending.close)
        try:
            store = TensorStore(options, rank=_rank(), files=_files, cuda=streams.cuda_runtime)
            ending.callback(store.close)
            transfers = Transfers(streams, store.links, store.rooms)
            arrays = OptimizerState(store, [], transfers)
            arrays.owns_fp32 = True
            self._local = state = LocalState(arrays, "disk" if device == "nvme" else "host")
            self._torn: BaseException | None = None
            self._steps = 0
            self._view = StateView(state)
            super().__init__(params, defaults_of(kind, settings))
        except BaseException:
            self._end()
            raise

    @property
    def state(self) -> Any:
        """Each parameter's state, read from the store when it is requested. An assignment replaces all of it."""
        return self._view

    @state.setter
    def state(self, entries: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        if entries is not self._view:
            self._view.replace(entries)

    @property
    def store(self) -> TensorStore:
        """The store that holds the state."""
        return self._local.arrays.store

    # -- groups -------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The state of trained parameters is made at once."""
        self._require_open()
        number = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            self._local.kernels.append(make_kernel(self.kind, self._settings | self.param_groups[number]))
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

    # -- steps --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient (all ranks, with `max_grad_norm`); return the result of `closure`.

        Raises UsageError if an earlier update stopped half way, and any error of a drive.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_open()
        if self._torn is not None:
            raise UsageError(
                "a previous step failed partway, so that parameters and optimizer state are inconsistent: load both before "
                "continuing"
            ) from self._torn
        scale, is_finite = self._amp()
        for number, group in enumerate(self.param_groups):
            known = self._local.records
            self._add_records(number, [p for p in group["params"] if p.grad is not None and p not in known])
        records = self._local.records.items()
        rows = {record: rows_of(record, p.grad) for p, record in records if p.grad is not None}
        if is_finite:
            self._update(rows, self._factor(rows, scale))
        return loss

    def _update(self, rows: dict[LocalRecord, torch.Tensor], factor: float) -> None:
        """Update the parameters that have rows here, of gradients multiplied by `factor`."""
        records = list(rows)
        self._local.watch_memory(records)
        self._steps += 1
        settings = StepSettings.of(self.param_groups, step=self._steps, factor=factor)
        take = cast(Callable[[ParameterRecord], torch.Tensor | None], rows.pop)
        update = Update(self._local.arrays, records, settings, take)
        try:
            update.run()
        except BaseException as error:
            self._torn = error
            raise
        update.note_scalars(records)
        self._local.note_update(records)

    def _amp(self) -> tuple[float, bool]:
        """Return the factor by which a GradScaler has multiplied the gradients, and whether they are finite."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found is None:
            return 1.0, True
        return _number(scale, 1.0), _number(found, 0.0) == 0.0

    def _factor(self, rows: dict[LocalRecord, torch.Tensor], scale: float) -> float:
        """Return the factor of the gradients: the inverse of the scale, and the clip."""
        if self.max_grad_norm is None:
            return 1.0 / scale
        self.grad_norm = global_norm(laid_out(rows)) / scale
        # With the epsilon of `torch.nn.utils.clip_grad_norm_`.
        return float(torch.clamp(self.max_grad_norm / (self.grad_norm + 1e-6), max=1.0)) / scale

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state as torch's class does; tensors of the state are `StoredTensor`s, or DTensors of them."""
        self._require_open()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace groups' settings and state by those of `state_dict`, of this class or of torch's.

        Values that are this optimizer's own `StoredTensor`s were loaded in place. Raises UsageError if shapes differ.
        """
        self._require_open()
        loaded = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = before(self, loaded) or loaded
        self._torn = None
        self.__setstate__({"param_groups": _merged(self.param_groups, loaded["param_groups"])})
        self._local.replace_kernels([make_kernel(self.kind, self._settings | group) for group in self.param_groups])
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
            "an offloaded optimizer holds files and threads, and cannot be copied or pickled: take its state_dict()"
        )

    def __repr__(self) -> str:
        return super().__repr__().replace("Offloaded (", f"Offloaded {self.kind.__name__} (", 1)

    # -- end ----------------------------------------------------------------------------------------------------------

    def statistics(self) -> StoreStatistics:
        """Return the store's counters: bytes moved, and held on disk, in host memory and in buffers."""
        return self.store.statistics()

    def close(self) -> None:
        """Remove the state's files; a second call does nothing."""
        self._end()

    def _require_open(self) -> None:
        if not self._end.alive:
            raise UsageError(
                "the optimizer is closed, and its state is gone: make another one, and load a state_dict()"
            )


def _options(path: Any, host_budget_bytes: int | None, where: torch.device, streams: Streams) -> StoreOptions:
    if path is not None:
        map_large_blocks()
    return StoreOptions(
        run_path=None if path is None else user_path(path),
        host_budget_bytes=host_budget_bytes,
        device=str(where),
        pin_buffers=not streams.device_is_host,
    )


def _rank() -> int:
    return torch_dist.get_rank() if torch_dist.is_available() and torch_dist.is_initialized() else 0


def _number(value: Any, default: float) -> float:
    if value is None:
        return default
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


def _merged(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups with the settings of `saved` and their own parameters; see `Optimizer.load_state_dict`."""
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in saved]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"the loaded state has parameter groups of {sizes[1]} parameters, this optimizer of {sizes[0]}: it is of another "
            "model, or its groups were made otherwise"
        )
    merged = []
    for own, other in zip(groups, saved, strict=True):
        group = copy.deepcopy({name: value for name, value in other.items() if name != "params"})
        kept = {name: own[name] for name in ("params", "param_names") if name in own and name not in group}
        merged.append(group | kept)
    return merged
