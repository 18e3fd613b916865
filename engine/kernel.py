"""Update kernels: what one step does to a tile of master, gradient and slots.

A kernel works on fp32 tiles of whole chunks, 1-D, without padding, in place. Tiles end at multiples of 16 elements,
so that vectorised code gives the bits that it gives over the whole tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from zstore.errors import UsageError

Scalars = dict[str, float]
"""What an optimizer keeps of a parameter beside its slots, as the step count or NAdam's product: exact as Python
numbers."""

ELEMENT_WISE = (
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.NAdam,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.RAdam,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Optimizers whose update of an element depends on that element's own history and on scalars alone."""


@dataclass
class TileUpdate:
    """One tile of one parameter: 1-D fp32 tensors of one length, changed in place (the gradient may be too)."""

    master: torch.Tensor
    gradient: torch.Tensor
    slots: Sequence[torch.Tensor]
    group: Mapping[str, Any]
    """The parameter group, for lr and the like."""
    scalars: Scalars
    """The parameter's scalars before the step; the same for each of its tiles."""


class Kernel(Protocol):
    """The update of the parameters of one group."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the arrays that it keeps of each parameter: the parameter's shape, fp32."""

    def initial(self) -> Scalars:
        """Return the scalars of a parameter that was never updated."""

    def update(self, tile: TileUpdate) -> Scalars:
        """Take one step on a tile; return the scalars after it, the same for each tile of a parameter."""


@dataclass(frozen=True)
class FusedAdam:
    """Adam, or AdamW where weight decay is `decoupled`, by torch's fused kernel."""

    decoupled: bool
    slots: tuple[str, ...] = field(default=("exp_avg", "exp_avg_sq"), init=False)

    def initial(self) -> Scalars:
        """See Kernel."""
        return {"step": 0.0}

    def update(self, tile: TileUpdate) -> Scalars:
        """See Kernel."""
        step = tile.scalars["step"] + 1
        group = tile.group
        kernel = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        kernel(
            [tile.master],
            [tile.gradient],
            [tile.slots[0]],
            [tile.slots[1]],
            [],
            [torch.tensor(step, device=tile.master.device)],
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            amsgrad=False,
            maximize=False,
        )
        return {"step": step}


class TorchKernel:
    """Any element-wise torch optimizer: an instance of its class steps one proxy parameter over tile after tile."""

    _PROBE_NUMEL = 16

    def __init__(self, kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> None:
        self._proxy = torch.nn.Parameter(torch.zeros(self._PROBE_NUMEL, device=group["params"][0].device))
        accepted = inspect.signature(kind.__init__).parameters
        self._settings = tuple(name for name in group if name in accepted and name != "params")
        self._optimizer = kind([self._proxy], **{name: group[name] for name in self._settings})
        # What the class makes before any step (Adagrad's sum) and what a step leaves behind (everything else).
        self._made = dict(self._optimizer.state.get(self._proxy, {}))
        made = {name: value.clone() for name, value in self._made.items() if isinstance(value, torch.Tensor)}
        self._proxy.grad = torch.zeros_like(self._proxy)
        self._optimizer.step()
        self._left = {n: v for n, v in self._optimizer.state.get(self._proxy, {}).items() if v is not None}
        self._made |= made
        self._optimizer.state.clear()
        self.slots = tuple(name for name, value in self._left.items() if self._is_slot(value))
        strange = [n for n, v in self._left.items() if n not in self.slots and torch.as_tensor(v).dim() > 0]
        if strange:
            raise UsageError(
                f"optimizer {kind.__name__}: its state {strange[0]!r} has neither the parameter's shape nor none, so it "
                "cannot be cut into tiles; use an element-wise optimizer"
            )

    def _is_slot(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == (self._PROBE_NUMEL,)

    def initial(self) -> Scalars:
        """See Kernel. `updates` is ours: SGD keeps no step count, and its first step is another one."""
        return {"updates": 0.0}

    def update(self, tile: TileUpdate) -> Scalars:
        """See Kernel. A first step starts from what the class itself makes."""
        self._optimizer.param_groups[0].update({name: tile.group[name] for name in self._settings})
        self._proxy.grad = None
        self._proxy.data = tile.master
        self._proxy.grad = tile.gradient
        self._optimizer.state[self._proxy] = self._state(tile)
        self._optimizer.step()
        after = self._optimizer.state.pop(self._proxy)
        for name, view in zip(self.slots, tile.slots, strict=True):
            if after[name] is not view:
                view.copy_(after[name])
        scalars = {n: float(v) for n, v in after.items() if n not in self.slots and v is not None}
        return scalars | {"updates": tile.scalars["updates"] + 1}

    def _state(self, tile: TileUpdate) -> dict[str, Any]:
        views = dict(zip(self.slots, tile.slots, strict=True))
        if tile.scalars["updates"] > 0:
            return {
                name: views[name] if name in views else self._typed(name, tile.scalars[name]) for name in self._left
            }
        state: dict[str, Any] = {}
        for name, value in self._made.items():
            if name in views:
                state[name] = views[name].fill_(value[0])
            else:
                state[name] = value.clone() if isinstance(value, torch.Tensor) else value
        return state

    def _typed(self, name: str, value: float) -> Any:
        """Return a scalar as the class itself keeps it: a tensor of its type, or a Python number of its type."""
        like = self._left[name]
        return torch.full_like(like, value) if isinstance(like, torch.Tensor) else type(like)(value)


def kernel_for(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> Kernel:
    """Return the kernel that updates a parameter group as the optimizer class `kind` would.

    Raises UsageError naming the class where an update over a part of a tensor is not what the class does.
    """
    if kind not in ELEMENT_WISE:
        names = ", ".join(known.__name__ for known in ELEMENT_WISE)
        raise UsageError(
            f"optimizer {kind.__name__} is not known to update each element by itself, but state is sharded and updated in "
            f"tiles; use one of {names}"
        )
    plain = not any(group.get(name, False) for name in ("amsgrad", "maximize", "capturable", "differentiable"))
    if kind in (torch.optim.Adam, torch.optim.AdamW) and plain:
        return FusedAdam(kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay", False)))
    return TorchKernel(kind, group)
