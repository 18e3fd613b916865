"""Optimizers whose update needs a whole tensor (its norm, sums over its rows and columns, or the matrix) although its rows
are on several ranks: each tensor has an owner rank, where the class's own step updates the whole tensor.

[Note: owners]
A round has one tensor per rank, largest first, and rank i owns the i-th one. Each round:
1. every rank reads its rows of master, slots and gradient of all tensors of the round, from any tier; the gradient
   in fp32 and scaled once (see [Note: the update]);
2. one exchange gives each owner its whole tensor, and the class's own step updates it on the compute device;
3. one exchange returns master and slots; every rank writes its rows and casts its rows of the parameter.
So the result is bit-identical to the class's on the whole tensor, on every tier, at every stage and on any number of ranks.
Memory is bounded by four copies of one tensor: read, received, whole, and to send back. If every rank has all rows, nothing
is exchanged, and each rank updates every tensor.

A rank that failed takes part in the remaining exchanges, since other ranks wait in them, and raises its error at the end.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zstore.errors import UsageError
from zstore.format import ALIGN_NUMEL, Grid, model_array, optimizer_array, round_up
from zstore.io.memory import as_torch
from zstore.ranks.world import World

from ..optim.changes import Changes
from ..optim.kernel import Kernel, ParameterStep, Scalars, SlotArray, call_closure, check_arguments, kernel_for
from ..optim.rules import Groups, Kind, Rule, Stepper, register
from ..optim.state import OptimizerState
from ..params.record import ParameterRecord
from ..plan.plan import Slots, TensorSlot
from ..runtime.device import GradientTiles


def _arrays_of(kind: type[torch.optim.Optimizer], shape: Sequence[int]) -> list[SlotArray]:
    """Return the arrays that a class needs for a tensor of `shape`."""
    shapes: dict[str, tuple[int, ...] | None] = {"variance": None}
    if kind is Lamb:
        shapes = {"exp_avg": None, "exp_avg_sq": None}
    elif kind is torch.optim.Muon:
        shapes = {"momentum_buffer": None}
    elif len(shape) >= 2:
        shapes = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
    return [SlotArray(name, entry=name, shape=slot_shape) for name, slot_shape in shapes.items()]


class TensorKernel(Kernel):
    """Updates whole tensors with the class's own step: an instance of the class updates them one by one through a proxy."""

    def __init__(self, kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> None:
        self._kind: Any = kind
        self._proxy = torch.nn.Parameter(torch.zeros(1, 1))
        accepted = inspect.signature(kind.__init__).parameters
        self._settings = tuple(name for name in group if name in accepted and name != "params")
        self._optimizer: torch.optim.Optimizer = self._kind(
            [self._proxy], **{name: group[name] for name in self._settings}
        )
        self._counter = "updates" if kind is torch.optim.Muon else "step"  # Muon has no step count
        self.slots = tuple(dict.fromkeys(slot.name for shape in ((1, 1), (1,)) for slot in _arrays_of(kind, shape)))
        """Names of all arrays that a parameter may have."""

    def arrays(self, numel: int, shape: Sequence[int]) -> Sequence[SlotArray]:
        return _arrays_of(self._kind, shape)

    def initial(self) -> Scalars:
        return {self._counter: 0.0}

    def present(self, scalars: Scalars) -> dict[str, Any]:
        """Return the scalars of the class's own state."""
        return {} if self._counter == "updates" else dict(scalars)

    def start(self, group: Mapping[str, Any], scalars: Scalars) -> ParameterStep:
        """Count the step; `update` does the work."""
        return ParameterStep({self._counter: scalars[self._counter] + 1})

    def update(
        self,
        group: Mapping[str, Any],
        scalars: Scalars,
        master: torch.Tensor,
        gradient: torch.Tensor,
        slots: Mapping[str, torch.Tensor],
    ) -> None:
        """Update a tensor in place: `master`, `gradient` (also modified) and `slots` have their full shapes, in fp32."""
        self._optimizer.param_groups[0].update({name: group[name] for name in self._settings if name in group})
        proxy, state = self._proxy, self._optimizer.state
        proxy.grad = None
        proxy.data = master
        proxy.grad = gradient
        if scalars[self._counter] > 0:  # a first step starts from the class's own initial state
            state[proxy] = dict(slots)
            if self._counter == "step":
                state[proxy]["step"] = torch.tensor(scalars["step"])
        try:
            self._optimizer.step()
            after = state[proxy]
            for name, values in slots.items():
                if after[name] is not values:
                    values.copy_(after[name])
            if proxy.data.data_ptr() != master.data_ptr():
                master.copy_(proxy.data)
        finally:
            state.pop(proxy, None)
            proxy.grad = None
            proxy.data = master.new_zeros(1, 1)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """A rank's rows of one array of a tensor, in a row of the exchange."""

    record: ParameterRecord
    slot: SlotArray | None
    """None for the master and the gradient."""
    shape: tuple[int, ...]
    """Shape of the whole array."""
    grid: Grid
    """Partitioning over the ranks that exchange."""
    offset: int
    """Offset of these rows in a row of the exchange."""

    @property
    def array(self) -> str:
        """Name of the array in the store; the gradient is not in the store."""
        name = self.record.name
        return model_array(name) if self.slot is None else optimizer_array(self.slot.name, name)


class _Tensor:
    """A tensor of a round: master, slots and gradient, in this order."""

    def __init__(self, state: OptimizerState, record: ParameterRecord) -> None:
        self.record = record
        shape = tuple(record.shape)
        self.parts: list[_Rows] = []
        self.returned_numel = self.numel = 0
        """Elements of a row without and with the gradient."""
        for slot in (None, *state.kernel_slots(record), None):
            array_shape = shape if slot is None or slot.shape is None else slot.shape
            grid = state.state_grid_of(record, array_shape)
            self.parts.append(_Rows(record=record, slot=slot, shape=array_shape, grid=grid, offset=self.numel))
            self.returned_numel = self.numel
            self.numel += round_up(grid.shard_numel, ALIGN_NUMEL)  # aligned like separate buffers


class TensorStep(Stepper):
    """The update for optimizers that need whole tensors (all ranks). See [Note: owners]."""

    def __init__(self, state: OptimizerState, world: World) -> None:
        self._state = state
        self._world = world
        self._owners = world.world_size if state.is_sharded else 1
        self._rank = world.rank if state.is_sharded else 0
        self._error: Exception | None = None

    def run(self, changes: Changes) -> None:
        """Run an update: first element-wise updates in tiles, then the whole tensors."""
        whole = [r for r in changes.records if r.numel and isinstance(self._state.kernel_of(r)[0], TensorKernel)]
        whole_set, self._error = set(whole), None
        element_wise = [record for record in changes.records if record not in whole_set]
        with self._deferring_errors():
            Changes(self._state, element_wise, changes.settings, changes.rows).run()
        whole.sort(key=lambda record: -record.numel)
        for first in range(0, len(whole), self._owners):
            self._round(changes, [_Tensor(self._state, record) for record in whole[first : first + self._owners]])
        if self._error is not None:
            raise self._error

    def _round(self, changes: Changes, tensors: Sequence[_Tensor]) -> None:
        device, owners = self._world.device, self._owners
        sent = torch.zeros(owners, max(tensor.numel for tensor in tensors), device=device)
        with self._deferring_errors():
            stored = self._stored_rows(tensors, sent)
            with self._state.open_pass([[part.array] for part, _ in stored], "read") as tiles:
                for tile in tiles:
                    rows = stored[tile.group][1][tile.first : tile.stop]
                    self._state.transfers.copy_into(rows, as_torch(tile.views[0]))
            for row, tensor in zip(sent, tensors, strict=False):
                self._read_gradient(changes, tensor.record, self._rows(tensor.parts[-1], row))
        received = results = sent
        if owners > 1:
            received = torch.empty_like(sent)
            self._world.all_to_all(received, sent, kind="all_to_all").wait()
            results = torch.zeros(owners, max(tensor.returned_numel for tensor in tensors), device=device)
        if self._rank < len(tensors) and self._error is None:
            with self._deferring_errors():
                self._step(changes, tensors[self._rank], received, results)
        del received
        if owners > 1:
            rows = sent.view(-1)[: results.numel()].view(results.shape)
            self._world.all_to_all(rows, results, kind="all_to_all").wait()
            results = rows
        if self._error is None:
            with self._deferring_errors():
                self._write(tensors, results, changes.settings.step)

    @contextmanager
    def _deferring_errors(self) -> Iterator[None]:
        """Defer the first error to the end, since other ranks wait in the next exchanges."""
        try:
            with torch.no_grad():
                yield
        except Exception as error:
            self._error = self._error or error

    def _rows(self, part: _Rows, row: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of an array within a row of the exchange."""
        return row[part.offset : part.offset + part.grid.shard_valid_numel(self._rank)]

    def _stored_rows(self, tensors: Sequence[_Tensor], rows: torch.Tensor) -> list[tuple[_Rows, torch.Tensor]]:
        """Return the masters and slots of which this rank has rows, each with its part of `rows`."""
        parts = [(part, self._rows(part, row)) for row, t in zip(rows, tensors, strict=False) for part in t.parts[:-1]]
        return [(part, part_rows) for part, part_rows in parts if part_rows.numel()]

    def _read_gradient(self, changes: Changes, record: ParameterRecord, target: torch.Tensor) -> None:
        if not record.owned_numel:
            return
        state, (rows,) = self._state, changes.rows([record])
        if rows is not None:
            target.copy_(GradientTiles(state.transfers, rows).tile(0, target.numel(), target))
        else:
            with state.open_pass([[state.spilled[record]]], "read") as tiles:
                for tile in tiles:
                    state.transfers.copy_into(target[tile.first : tile.stop], as_torch(tile.views[0]))
        if (factor := changes.settings.factor_of(record)) != 1.0:
            target.mul_(factor)

    def _step(self, changes: Changes, tensor: _Tensor, received: torch.Tensor, results: torch.Tensor) -> None:
        arrays = []
        for part in tensor.parts:
            rows = received[:, part.offset : part.offset + part.grid.shard_numel]
            arrays.append(rows.reshape(-1)[: math.prod(part.shape)].view(part.shape))
        kernel, group = self._state.kernel_of(tensor.record)
        if isinstance(kernel, TensorKernel):
            pairs = zip(tensor.parts[1:-1], arrays[1:-1], strict=True)
            slots = {part.slot.name: values for part, values in pairs if part.slot is not None}
            scalars = self._state.scalars[tensor.record]
            kernel.update(changes.settings.groups[group], scalars, arrays[0], arrays[-1], slots)
        if self._owners == 1:  # updated in place
            return
        for part, array in zip(tensor.parts[:-1], arrays[:-1], strict=True):
            flat, step = array.view(-1), part.grid.shard_numel
            for row, first in zip(results, range(0, flat.numel(), step), strict=False):
                rows = flat[first : first + step]
                row[part.offset : part.offset + rows.numel()] = rows

    def _write(self, tensors: Sequence[_Tensor], results: torch.Tensor, step_number: int) -> None:
        state, stored = self._state, self._stored_rows(tensors, results)
        arrays = []
        for part, _ in stored:
            # The parameter's stored rows are written together with its master.
            second = part.record.stored_array if part.slot is None and part.record.stored_array != part.array else None
            arrays.append([part.array] if second is None else [part.array, second])
        with state.open_pass(arrays, "fill") as tiles:
            for tile in tiles:
                part, part_rows = stored[tile.group]
                record, view, values = part.record, as_torch(tile.views[0]), part_rows[tile.first : tile.stop]
                if part.slot is not None and part.slot.shape is None and not state.codec.is_plain:
                    state.codec.of(record.name, step_number, record.owned_range[0]).put(
                        [values.to(view.device)], [view], tile.first
                    )
                    continue
                state.transfers.copy_into(view, values)
                if len(tile.views) > 1:
                    state.transfers.copy_into(as_torch(tile.views[1]), values)
                elif part.slot is None and record.stored_array is None and not state.is_master(record):
                    state.transfers.copy_into(record.owned()[tile.first : tile.stop], values)


_MUON = {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95}
_ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
_NOT_HIDDEN = ("embed", "lm_head")
"""Parts of the names of parameters outside hidden layers, as in DeepSpeed."""


class MuonWithAdam(torch.optim.Optimizer):
    """`torch.optim.Muon` for groups with `use_muon`, whose parameters are matrices, and `torch.optim.AdamW` for others.

    Groups take the arguments of their class, with DeepSpeed's defaults: lr 0.02 and momentum 0.95 for Muon; lr 0.0003, betas
    (0.9, 0.95) and eps 1e-10 for Adam; no weight decay. `split_for_muon` splits a model's parameters. Raises UsageError for a
    group without `use_muon`.
    """

    def __init__(self, params: Iterable[Mapping[str, Any]]) -> None:
        groups: list[dict[str, Any]] = []
        for given in params:
            group: Any = given
            kind: Any
            if not isinstance(group, Mapping) or not isinstance(group.get("use_muon"), bool):
                raise UsageError(
                    'MuonWithAdam: expected groups {"params": ..., "use_muon": True or False, ...}; '
                    "split_for_muon(model) splits the parameters"
                )
            settings = {name: value for name, value in given.items() if name not in ("params", "use_muon")}
            kind, defaults = (torch.optim.Muon, _MUON) if given["use_muon"] else (torch.optim.AdamW, _ADAM)
            optimizer = kind([{"params": given["params"]}], **{**defaults, **settings})  # which may be empty
            groups.append({**optimizer.param_groups[0], "use_muon": given["use_muon"]})
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure` returned."""
        loss = call_closure(closure)
        for group in self.param_groups:
            inner: Any = (torch.optim.Muon if group["use_muon"] else torch.optim.AdamW)([{"params": group["params"]}])
            # It works on this object's current groups and state, which a load may have replaced.
            inner.param_groups, inner.state = [group], self.state
            inner.step()
        return loss


def split_for_muon(
    model: nn.Module, parameters: Iterable[nn.Parameter] | None = None
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters for Muon and those for Adam, of all trained parameters or of `parameters`.

    Muon is for matrices of hidden layers, which excludes `nn.Embedding` and names with "embed" or "lm_head". A parameter's
    attribute `use_muon` overrides this. Raises UsageError if it is true for a parameter that is not a matrix.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    muon: list[nn.Parameter] = []
    adam: list[nn.Parameter] = []
    for parameter in model.parameters() if parameters is None else parameters:
        name = names.get(parameter, "").lower()
        hidden = parameter.dim() == 2 and parameter not in embeddings and not any(part in name for part in _NOT_HIDDEN)
        uses_muon = getattr(parameter, "use_muon", hidden)
        if uses_muon and parameter.dim() != 2:
            raise UsageError(
                f"parameter {names.get(parameter)!r} has use_muon = True, but Muon is for matrices, and its shape is "
                f"{tuple(parameter.shape)}: remove the attribute"
            )
        if parameter.requires_grad:
            (muon if uses_muon else adam).append(parameter)
    return muon, adam


def _muon_from_config(_: Kind, groups: Groups, arguments: Mapping[str, Any], model: nn.Module) -> MuonWithAdam:
    """Return an optimizer whose groups are split into one for Muon and one for Adam if they have parameters for both; a
    group without trained parameters becomes an empty group for Adam."""
    rates = {name: arguments[name] or arguments["lr"] for name in ("muon_lr", "adam_lr")}
    muon = {name: arguments[name] for name in ("momentum", "nesterov", "ns_steps", "adjust_lr_fn", "weight_decay")}
    adam = {name: arguments[name] for name in ("betas", "eps", "weight_decay")}
    result: Groups = []
    for group in groups:
        group_settings = {name: value for name, value in group.items() if name != "params"}
        tensors = [item[1] if isinstance(item, tuple) else item for item in group["params"]]
        split = split_for_muon(model, tensors)
        for parameters, (use_muon, settings) in zip(split, ((True, muon), (False, adam)), strict=True):
            rate = rates["muon_lr" if use_muon else "adam_lr"]
            rate_setting = {} if rate is None else {"lr": rate}
            overrides = {name: value for name, value in group_settings.items() if name in settings or name == "lr"}
            if parameters or not (use_muon or any(split)):
                result.append({**settings, **rate_setting, **overrides, "params": parameters, "use_muon": use_muon})
    return MuonWithAdam(result)


def _kernel(kind: Kind, group: Mapping[str, Any]) -> Kernel:
    if kind is MuonWithAdam:
        return TensorKernel(torch.optim.Muon, group) if group["use_muon"] else kernel_for(torch.optim.AdamW, group)
    return TensorKernel(kind, group)


def _slots(kernel: Kernel, shape: Sequence[int], _world_size: int) -> Slots:
    if isinstance(kernel, TensorKernel):
        return tuple(TensorSlot(slot.name, slot.shape) for slot in kernel.arrays(0, shape))
    return kernel.slots


class Lamb(torch.optim.Optimizer):
    """LAMB (https://arxiv.org/abs/1904.00962) with the arguments, the limits and the bias correction of DeepSpeed's FusedLamb.

    `update = moment / (sqrt(second moment) + eps) + weight_decay * weights`, or with `eps_inside_sqrt` `moment / sqrt(second
    moment + eps) + ...`. The weights lose `rate * factor * update`, where `rate` is `lr * sqrt(1 - beta2^t) / (1 - beta1^t)`
    (`lr` without `bias_correction`) and `factor` is the norm of the tensor's weights over its update's norm, clamped to
    [`min_coeff`, `max_coeff`], and 1 if either norm is 0.

    The norms are of whole tensors: in an engine at stages 1 to 3 or with offload, one rank updates each tensor as a whole.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - DeepSpeed's arguments
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "max_coeff": max_coeff, "min_coeff": min_coeff}
        check_arguments("Lamb", betas=betas, **numbers)
        switches = {"bias_correction": bias_correction, "eps_inside_sqrt": eps_inside_sqrt}
        super().__init__(params, {**numbers, **switches, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure` returned."""
        loss = call_closure(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter)}
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        lamb_step(parameter, gradient, state["exp_avg"], state["exp_avg_sq"], float(state["step"]), group)


def lamb_step(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    moment: torch.Tensor,
    squares: torch.Tensor,
    steps: float,
    group: Mapping[str, Any],
) -> torch.Tensor:
    """Take step number `steps` of LAMB in place; return the tensor's factor, a 0-dimensional tensor. It is 0 if a norm is 0,
    in which case the step used factor 1."""
    beta1, beta2 = group["betas"]
    moment.mul_(beta1).add_(gradient, alpha=1 - beta1)
    squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    update = moment / lamb_root(squares, group)
    update.add_(parameter, alpha=group["weight_decay"])
    rate = group["lr"]
    if group["bias_correction"]:
        rate = rate * math.sqrt(1 - beta2**steps) / (1 - beta1**steps)
    weights_norm, update_norm = parameter.norm(), update.norm()
    has_norms = (weights_norm > 0) & (update_norm > 0)
    factor = (weights_norm / update_norm).clamp_(group["min_coeff"], group["max_coeff"])
    parameter.sub_(update.mul_(torch.where(has_norms, factor, 1.0) * rate))
    return torch.where(has_norms, factor, 0.0)


def lamb_root(squares: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Return the divisor of the moment."""
    eps = group["eps"]
    return (squares + eps).sqrt_() if group["eps_inside_sqrt"] else squares.sqrt().add_(eps)


_RULE = Rule(
    kinds=(Lamb, torch.optim.Adafactor, MuonWithAdam),
    kernel=_kernel,
    slots=_slots,
    stepper=lambda _, state, world: TensorStep(state, world),
)
register(_RULE)
register(replace(_RULE, kinds=(torch.optim.Muon,), make=_muon_from_config))
