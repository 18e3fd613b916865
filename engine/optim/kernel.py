"""Update kernels: the effect of one step, with its settings, on a tile of master, gradient and slots.

A kernel works on fp32 tiles of whole chunks, 1-D, without padding, in place. Tiles end at multiples of 16 elements,
so that vectorized code is bit-identical to a step over the whole tensor.
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

from zstore.errors import UsageError

from ..params.record import ParameterRecord
from ..plan.plan import ADAM_SLOTS
from ..runtime.native import HostKernel, StepTensors

Tensors = Sequence[torch.Tensor]
Scalars = dict[str, float]
"""Numbers that an optimizer keeps for a parameter besides slots, such as the step count; exact as Python numbers."""


class Lion(torch.optim.Optimizer):
    """Lion (https://arxiv.org/abs/2302.06675, algorithm 2), which keeps one moment:
    `update = sign(beta1 * moment + (1 - beta1) * gradient)`, then
    `moment = beta2 * moment + (1 - beta2) * gradient`. Weight decay is decoupled: weights are first multiplied by
    `1 - lr * weight_decay`.

    Each element is updated independently, so it works at every stage and tier. Its learning rate is usually a third to
    a tenth of AdamW's.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        check_arguments("Lion", lr=lr, weight_decay=weight_decay, betas=betas)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure` returned."""
        loss = call_closure(closure)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                gradient = -parameter.grad if group["maximize"] else parameter.grad
                moment = state["exp_avg"]
                update = (moment * beta1).add_(gradient, alpha=1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                moment.mul_(beta2).add_(gradient, alpha=1 - beta2)
        return loss


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """Return the result of a closure, run with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_arguments(name: str, *, betas: tuple[float, float], **numbers: float) -> None:
    """Raise UsageError for a negative number, or for betas outside of [0, 1)."""
    for argument, value in numbers.items():
        if not value >= 0:
            raise UsageError(f"{name}({argument}={value!r}): expected a number of at least 0")
    if not all(0 <= beta < 1 for beta in betas):
        raise UsageError(f"{name}(betas={betas!r}): expected two numbers, each from 0 to below 1")


ELEMENT_WISE = (SGD, Adagrad, RMSprop, NAdam, Adam, AdamW, Adamax, RAdam, Adadelta, ASGD, Rprop, Lion)
"""Optimizers whose update of an element depends only on that element's own history and on scalars."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings of one step, fixed when the step is decided: later changes apply to the next step."""

    step: int
    """Number of the step, from 1; for error messages."""
    factor: float
    """Factor by which gradients are multiplied, once, in fp32."""
    factors: Mapping[ParameterRecord, float] = field(default_factory=dict)
    """Factors for the gradients of some parameters, in place of `factor`."""
    groups: Sequence[Mapping[str, Any]]
    """Settings of each parameter group: lr, betas, weight decay and so on."""

    @staticmethod
    def of(
        groups: Sequence[Mapping[str, Any]],
        *,
        step: int,
        factor: float,
        factors: Mapping[ParameterRecord, float] | None = None,
    ) -> StepSettings:
        """Return a copy of the groups' current settings, without their parameters."""
        copies = [{name: _copy(value) for name, value in group.items() if name != "params"} for group in groups]
        rounded = {record: float(np.float32(value)) for record, value in (factors or {}).items()}
        return StepSettings(step=step, factor=float(np.float32(factor)), factors=rounded, groups=copies)

    def factor_of(self, record: ParameterRecord) -> float:
        """Return the factor by which a parameter's gradient is multiplied, once, in fp32."""
        return self.factors.get(record, self.factor)

    def differences(self, current: StepSettings) -> Iterator[tuple[int, str, Any, Any]]:
        """Yield group, name and both values of the settings that differ in `current`."""
        for index, (before, after) in enumerate(zip(self.groups, current.groups, strict=True)):
            for name, value in before.items():
                if name in after and _plain(after[name]) != _plain(value):
                    yield index, name, value, after[name]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value if type(value) in (int, float, bool, NoneType) else copy.deepcopy(value)


class ParameterStep:
    """One step of one parameter, or of several with the same scalars, tile by tile; `after` are the scalars after it.
    The base class is for steppers of whole tensors, and takes no tiles."""

    def __init__(self, after: Scalars) -> None:
        self._after = after

    def tiles(self, masters: Tensors, gradients: Tensors, slots: Sequence[Tensors]) -> None:
        """Update tiles of several parameters on one device in place, 1-D and fp32; each is bit-identical to its
        update alone. May change the gradients too."""
        raise UsageError("this optimizer steps whole tensors, not tiles")

    def scalars(self) -> Scalars:
        """Return the scalars of each parameter after the step, even if no tile has been processed."""
        return self._after


@dataclass(frozen=True)
class SlotArray:
    """An array of a parameter's optimizer state."""

    name: str
    dtype: torch.dtype = torch.float32
    entry: str = ""
    """Entry of the optimizer class's state to which it belongs."""
    shape: tuple[int, ...] | None = None
    """Its shape, if that differs from the parameter's: then the ranks divide it by its own rows."""


class SlotCodec:
    """Stores the slots of a parameter, tile by tile. This class stores them unchanged; `rules.codecs` has alternatives."""

    is_plain = True
    """Whether slots are stored unchanged."""

    def stored(self, slots: Sequence[SlotArray]) -> Sequence[SlotArray]:
        """Return the arrays in which a kernel's slots of a parameter are stored, in the same order."""
        return slots

    def of(self, name: str, step: int, first: int) -> SlotCodec:
        """Return the codec of parameter `name` in a step; `first`: global index of this rank's first element."""
        return self

    def update(
        self, step: ParameterStep, master: torch.Tensor, gradient: torch.Tensor, views: Tensors, first: int
    ) -> None:
        """Apply `step` to a tile that starts at this rank's element `first`; `views`: its parts of the stored arrays."""
        step.tiles([master], [gradient], [views])

    def put(self, values: Tensors, views: Tensors, first: int) -> None:
        """Set `views` of a tile that starts at this rank's element `first` to `values`, which may be overwritten."""
        for view, value in zip(views, values, strict=True):
            view.copy_(value)


class Kernel(ABC):
    """The update of the parameters of one group."""

    slots: tuple[str, ...] = ()
    """Names of its arrays for each parameter."""

    def arrays(self, numel: int, shape: Sequence[int]) -> Sequence[SlotArray]:
        """Return its arrays for a parameter of `shape`, of which this rank owns `numel` elements, in the order of
        `slots`. By default they are in fp32 and have the parameter's shape."""
        return [SlotArray(name, entry=name) for name in self.slots]

    @abstractmethod
    def initial(self) -> Scalars:
        """Return the scalars of a parameter that has never been updated."""

    @abstractmethod
    def start(self, group: Mapping[str, Any], scalars: Scalars) -> ParameterStep:
        """Begin a step of a parameter, with the current settings of its group."""


class FusedAdam(Kernel):
    """Adam, or AdamW if weight decay is `decoupled`, by torch's fused kernel; `corrects`: whether with bias correction."""

    slots: tuple[str, ...] = ADAM_SLOTS

    def __init__(
        self, decoupled: bool, *, amsgrad: bool = False, maximize: bool = False, corrects: bool = True
    ) -> None:
        self.decoupled = decoupled
        self._form = {"amsgrad": amsgrad, "maximize": maximize}
        self._corrects = corrects
        if amsgrad:
            self.slots = (*self.slots, "max_exp_avg_sq")

    def initial(self) -> Scalars:
        return {"step": 0.0}

    def present(self, scalars: Scalars) -> dict[str, Any]:
        """Return the scalars as the optimizer class itself keeps them."""
        return {"step": torch.tensor(scalars["step"])}

    def start(self, group: Mapping[str, Any], scalars: Scalars) -> ParameterStep:
        beta1, beta2 = group["betas"]
        settings = {name: float(group[name]) for name in ("lr", "weight_decay", "eps")}
        settings |= {"beta1": float(beta1), "beta2": float(beta2)}
        step = scalars["step"] + 1
        # After infinitely many steps both corrections are 1.
        return FusedAdamStep(self.decoupled, self._form, settings, step, step if self._corrects else math.inf)


class FusedAdamStep(ParameterStep):
    """A step by torch's fused kernel, which takes the step count as a tensor on the device."""

    def __init__(
        self, decoupled: bool, form: Mapping[str, bool], settings: Mapping[str, float], step: float, counted: float
    ) -> None:
        super().__init__({"step": step})
        self._settings = settings
        self._kernel = partial(torch._fused_adamw_ if decoupled else torch._fused_adam_, **form, **settings)
        self._decoupled = decoupled
        self._maximize = form["maximize"]
        self._counted = counted
        self._counts: dict[torch.device, torch.Tensor] = {}

    def one_pass(self, host: HostKernel, tensors: StepTensors, factor: float, num_threads: int) -> None:
        """Take the step of tensors that `host` supports, including casts and factor; see [Note: the host kernel]."""
        given = {"step": self._counted, "decoupled": self._decoupled, "factor": -factor if self._maximize else factor}
        host.update({**self._settings, **given}, tensors, num_threads)

    def tiles(self, masters: Tensors, gradients: Tensors, slots: Sequence[Tensors]) -> None:
        device = masters[0].device
        count = self._counts.get(device)
        if count is None:  # filled on the device: a copy from host memory would wait for it
            count = self._counts[device] = torch.full((), self._counted, device=device)
        averages, squares, *largest = zip(*slots, strict=True)
        self._kernel(masters, gradients, averages, squares, largest[0] if largest else (), (count,) * len(masters))


class TorchKernel(Kernel):
    """Any element-wise torch optimizer: an instance of its class steps proxy parameters over tile after tile."""

    _PROBE_NUMEL = 16

    def __init__(self, kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> None:
        # The step below needs values, which parameters of a planned model lack; a group may also be empty.
        devices = [parameter.device for parameter in group["params"][:1] if parameter.device.type != "meta"]
        self._proxy = torch.nn.Parameter(torch.zeros(self._PROBE_NUMEL, device=devices[0] if devices else "cpu"))
        accepted = inspect.signature(kind.__init__).parameters
        self._settings = tuple(name for name in group if name in accepted and name != "params")
        self._optimizer = kind([self._proxy], **{name: group[name] for name in self._settings})
        # The class's state before any step (Adagrad's sum), and its state after one (everything else).
        self._initial_state = dict(self._optimizer.state.get(self._proxy, {}))
        copies = {name: value.clone() for name, value in self._initial_state.items() if isinstance(value, torch.Tensor)}
        self._proxy.grad = torch.zeros_like(self._proxy)
        self._optimizer.step()
        self._step_state = {n: v for n, v in self._optimizer.state.get(self._proxy, {}).items() if v is not None}
        self._initial_state |= copies
        self._optimizer.state.clear()
        shape = (self._PROBE_NUMEL,)
        self.slots = tuple(n for n, v in self._step_state.items() if isinstance(v, torch.Tensor) and v.shape == shape)
        unsupported = [n for n, v in self._step_state.items() if n not in self.slots and torch.as_tensor(v).dim() > 0]
        if unsupported:
            raise UsageError(
                f"optimizer {kind.__name__}: its state {unsupported[0]!r} neither has the parameter's shape nor is a scalar, "
                "so it cannot be cut into tiles; use an element-wise optimizer"
            )

    def present(self, scalars: Scalars) -> dict[str, Any]:
        """Return the scalars as the optimizer class itself keeps them: tensors, or Python numbers of its types."""
        values: dict[str, Any] = {}
        for name in self._step_state:
            if name not in self.slots:
                initial = self._initial_state.get(name, 0.0)
                values[name] = self._typed(name, scalars.get(name, float(initial)))
        return values

    def initial(self) -> Scalars:
        """Return zstore's own count of updates: SGD has none, and its first step differs."""
        return {"updates": 0.0}

    def start(self, group: Mapping[str, Any], scalars: Scalars) -> ParameterStep:
        self._optimizer.param_groups[0].update({name: group[name] for name in self._settings if name in group})
        return _TorchStep(self, scalars)

    def tiles(self, scalars: Scalars, masters: Tensors, gradients: Tensors, slots: Sequence[Tensors]) -> Scalars:
        """Step a proxy for each tile, in one step of the optimizer class, which processes tensors on a device together;
        return the scalars after it, the same for every tile."""
        group = self._optimizer.param_groups[0]
        group["params"] = [self._proxy, *map(torch.nn.Parameter, masters[1:])]
        for proxy, master, gradient, views in zip(group["params"], masters, gradients, slots, strict=True):
            proxy.grad = None
            proxy.data = master
            proxy.grad = gradient
            self._optimizer.state[proxy] = self._state(scalars, dict(zip(self.slots, views, strict=True)))
        self._optimizer.step()
        after: dict[str, Any] = {}
        for proxy, views in zip(group["params"], slots, strict=True):
            after = self._optimizer.state.pop(proxy)
            for name, view in zip(self.slots, views, strict=True):
                if after[name] is not view:
                    view.copy_(after[name])
        group["params"] = [self._proxy]
        numbers = {n: float(v) for n, v in after.items() if n not in self.slots and v is not None}
        return numbers | {"updates": scalars["updates"] + 1}

    def probe(self, scalars: Scalars) -> Scalars:
        """Return the scalars after a step of a parameter that had `scalars` before it."""
        master, gradient, *slots = torch.zeros(2 + len(self.slots), 1, device=self._proxy.device)
        return self.tiles(scalars, [master], [gradient], [slots])

    def _state(self, scalars: Scalars, views: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return the state before the step; a first step starts from the class's own initial state."""
        if scalars["updates"] > 0:
            return {n: views[n] if n in views else self._typed(n, scalars[n]) for n in self._step_state}
        state: dict[str, Any] = {}
        for name, value in self._initial_state.items():
            if name in views:
                state[name] = views[name].fill_(value[0])
            else:
                state[name] = value.clone() if isinstance(value, torch.Tensor) else value
        return state

    def _typed(self, name: str, value: float) -> Any:
        """Return a scalar as the class itself keeps it: a tensor or a Python number of the same type."""
        like = self._step_state[name]
        return torch.full_like(like, value) if isinstance(like, torch.Tensor) else type(like)(value)


class _TorchStep(ParameterStep):
    """A step by a TorchKernel of parameters with the same scalars."""

    def __init__(self, kernel: TorchKernel, scalars: Scalars) -> None:
        super().__init__(scalars)
        self._kernel, self._before = kernel, scalars

    def tiles(self, masters: Tensors, gradients: Tensors, slots: Sequence[Tensors]) -> None:
        self._after = self._kernel.tiles(self._before, masters, gradients, slots)

    def scalars(self) -> Scalars:
        if self._after is self._before:  # no tile has been stepped, or this rank has no rows: any element will do
            self._after = self._kernel.probe(self._before)
        return self._after


def kernel_for(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> FusedAdam | TorchKernel:
    """Return the kernel that updates a parameter group as the optimizer class `kind` would.

    Raises UsageError naming the class if an update of a part of a tensor would differ from the class's.
    """
    if kind not in ELEMENT_WISE:
        names = ", ".join(known.__name__ for known in ELEMENT_WISE)
        raise UsageError(
            f"optimizer {kind.__name__} is not known to update elements independently, but state that is sharded (stages 1 "
            f"to 3) or offloaded is updated in tiles; use one of {names}; Adafactor, Muon, zstore.optim.Lamb or "
            "MuonWithAdam, whose tensors are gathered for the step; or stage 0 without offload, where it steps whole tensors"
        )
    if kind in (Adam, AdamW):
        decoupled = kind is AdamW or bool(group.get("decoupled_weight_decay", False))
        form = {name: bool(group.get(name)) for name in ("amsgrad", "maximize")}
        corrects = group.get("bias_correction") is not False  # torch's classes have no such argument, but a config has
        is_unfused = group.get("capturable") or group.get("differentiable")
        if not corrects or (not is_unfused and (group.get("fused") or not any(form.values()))):
            return FusedAdam(decoupled, **form, corrects=corrects)
    return TorchKernel(kind, group)
