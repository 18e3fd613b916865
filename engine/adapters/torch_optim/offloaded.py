"""The optimizer as training loops see it."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as torch_dist
from torch.distributed.tensor import DTensor

from zstore.engine.optim.state import OptimizerState
from zstore.engine.runtime.device import Streams, Transfers, streams_for
from zstore.errors import UsageError
from zstore.io import Files, map_large_blocks, user_path
from zstore.io.closing import Closing, closing_with
from zstore.store import StoreOptions, StoreStatistics, TensorStore

from .arguments import check_kind, check_numbers, check_settings, groups_of
from .block_kernel import BlockKernel
from .forward_hooks import ForwardHooks
from .gradients import LocalGradients, global_norm, laid_out
from .journal import OptimizerJournal
from .local_state import LocalState, OffloadedKernel, StateView
from .registry import OptimizerClass, averaging, defaults_of, make_kernel
from .stepping import InBackward, Rows, Stepping

Overlap = Literal["none", "forward", "backward"]


class Offloaded(torch.optim.Optimizer, Closing):
    """An optimizer of class `kind` over `params`, as `kind(params, **settings)` is, whose state is off the device.

    `device` "nvme" keeps the state in files under `path`, an existing folder on the drive to use that no other optimizer
    uses at the same time; "cpu" keeps it in host memory, and the excess over `host_budget_bytes` under `path`, if that is
    given. The budget counts transfer buffers and state in host memory.

    fp32 parameters are updated in place, with the bits of torch's class. Of bf16 and fp16 parameters an fp32 master is
    kept with the state, and the parameter is the master, rounded.

    `ema`, as 0.999, keeps an exponential moving average of the weights with this decay beside the state, in fp32: see
    `averaged_weights`.

    `max_grad_norm` clips as `torch.nn.utils.clip_grad_norm_` does, over all ranks. `free_grads` takes gradients into host
    memory as the backward makes them, so that `.grad` is None when it ends. `overlap` says when an update runs: see
    docs/offloaded-optimizer.md. Each rank holds the state of its part of each parameter; no rank waits for another.

    `journal` is a folder for the run's journal (docs/journal.md), by default there is none. Before `step()`
    `self.journal.note(loss=loss)` tells it values that an optimizer does not know.

    `close()` it, or use it in a `with` block. Raises UsageError for a class or a parameter that cannot be offloaded,
    RunFolderError for a folder that cannot be used, BudgetError if the state does not fit.
    """

    _step_supports_amp_scaling = True  # a GradScaler leaves unscaling, and skipping a step, to `step`

    def __init__(  # noqa: PLR0913 - the settings of the class come besides
        self,
        kind: OptimizerClass,
        params: Any,
        *,
        device: Literal["nvme", "cpu"] = "nvme",
        path: str | os.PathLike[str] | None = None,
        host_budget_bytes: int | None = None,
        max_grad_norm: float | None = None,
        ema: float | None = None,
        overlap: Overlap = "none",
        free_grads: bool = False,
        journal: str | os.PathLike[str] | None = None,
        _streams: Streams | None = None,
        _files: Files | None = None,
        **settings: Any,
    ) -> None:
        check_kind(kind, overlap)
        check_settings(device, path, overlap, max_grad_norm)
        check_numbers(host_budget_bytes, ema)
        self.kind = kind
        """The class whose update is carried out."""
        self._settings = settings
        self._ema = ema
        self._shows_averages = False
        self.max_grad_norm = max_grad_norm
        self.overlap = overlap
        self.free_grads = free_grads
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
            folder = None if journal is None else user_path(journal)
            self.journal = None if folder is None else OptimizerJournal(arrays, kind.__name__, folder)
            """The run's journal; None without a folder for it."""
            if self.journal is not None:
                ending.callback(self.journal.close)
            self._local = state = LocalState(arrays, "disk" if device == "nvme" else "host")
            in_backward = InBackward(state) if overlap == "backward" else None
            self._stepping = in_backward or Stepping(state, behind=overlap == "forward")
            ending.callback(self._stepping.close)
            if overlap == "forward":
                ending.callback(ForwardHooks(self._stepping, state.records).close)
            on_final = None if in_backward is None else in_backward.put
            self._gradients = LocalGradients(transfers, frees=free_grads, on_final=on_final)
            ending.callback(self._gradients.close)
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
            self._local.kernels.append(self._kernel_for(self.param_groups[number]))
            self._add_records(number, [p for p in self.param_groups[number]["params"] if p.requires_grad])
        except BaseException:
            del self.param_groups[number]
            self._local.remove_group(number)
            raise
        self._stepping.groups = self.param_groups

    def _kernel_for(self, group: dict[str, Any]) -> OffloadedKernel:
        """Return the kernel for a group, whose settings become those that the class itself makes of them."""
        kernel = make_kernel(self.kind, self._settings | group)
        if isinstance(kernel, BlockKernel):
            kernel.keep(group)
        return kernel if self._ema is None else averaging(self.kind, kernel, self._ema)

    def _add_records(self, number: int, parameters: Iterable[torch.Tensor]) -> None:
        group = self.param_groups[number]
        names = dict(zip(group["params"], group.get("param_names", ()), strict=False))
        for parameter in parameters:
            record = self._local.add(parameter, number, names.get(parameter))
            self._gradients.watch(record)

    # -- steps --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient (all ranks, with `max_grad_norm`); return the result of `closure`.

        Raises UsageError if an earlier update stopped half way, and any error of a drive.
        """
        began_s, journal = time.perf_counter(), self.journal
        loss = self._update(closure)
        if journal is not None:
            self._tell(journal, began_s, loss)
        return loss

    def _tell(self, journal: OptimizerJournal, began_s: float, loss: Any) -> None:
        if isinstance(loss, torch.Tensor | float):
            journal.note(loss=loss)
        skipped = getattr(self, "found_inf", None) is not None and not self._amp()[1]
        lr = self.param_groups[0].get("lr", math.nan)
        journal.step_ended(began_s=began_s, lr=lr, grad_norm=self.grad_norm, skipped=skipped)

    def _update(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_open()
        self._stepping.require_whole()
        self._stepping.wait()
        scale, is_finite = self._amp()
        for number, group in enumerate(self.param_groups):
            known = self._local.records
            self._add_records(number, [p for p in group["params"] if p.grad is not None and p not in known])
        rows = self._gradients.collect(self._local.records)
        if is_finite:
            self._stepping.run(rows, self._factor(rows, scale))
        return loss

    def _amp(self) -> tuple[float, bool]:
        """Return the factor by which a GradScaler has multiplied the gradients, and whether they are finite."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found is None:
            return 1.0, True
        if self.free_grads or self.overlap == "backward":
            raise UsageError(
                'a GradScaler looks at gradients between backward and step, when free_grads or overlap="backward" have taken '
                "them: leave these out"
            )
        return _number(scale, 1.0), _number(found, 0.0) == 0.0

    def _factor(self, rows: Rows, scale: float) -> float:
        """Return the factor of the gradients: the inverse of the scale, and the clip."""
        if self.max_grad_norm is None:
            return 1.0 / scale
        self.grad_norm = global_norm(laid_out(rows)) / scale
        # With the epsilon of `torch.nn.utils.clip_grad_norm_`.
        return float(torch.clamp(self.max_grad_norm / (self.grad_norm + 1e-6), max=1.0)) / scale

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Let parameters have their averages over the steps in a `with` block, to evaluate with; they are exchanged in place.

        In the block there is no step, and no state to read or load. Raises UsageError without `ema`.
        """
        self._require_open()
        if self._ema is None:
            raise UsageError("averaged_weights(): there are no averages: make the optimizer with ema=0.999")
        self._stepping.require_whole()
        self.wait()
        self._exchange_averages()
        try:
            yield
        finally:
            self._exchange_averages()

    def _exchange_averages(self) -> None:
        state = self._local
        state.watch_memory(state.records.values())
        state.arrays.exchange_averages()
        state.note_update(state.records.values())
        self._shows_averages = not self._shows_averages

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none and self._end.alive:
            self.wait()  # an update may still read the gradients
        super().zero_grad(set_to_none)

    def wait(self) -> None:
        """Wait until no update runs behind the last step: then code outside of a module's forward may read parameters.

        Raises the error that ended the update.
        """
        self._require_open()
        self._stepping.wait()

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
        self._stepping.forget()
        self.__setstate__({"param_groups": _merged(self.param_groups, loaded["param_groups"])})
        self._stepping.groups = self.param_groups
        self._local.replace_kernels([self._kernel_for(group) for group in self.param_groups])
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
        """Finish the update under way and remove the state's files; a second call does nothing."""
        self._end()

    def _require_open(self) -> None:
        if self._shows_averages:
            raise UsageError(
                "the parameters are their averages: end the block of `with optimizer.averaged_weights()` first"
            )
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
