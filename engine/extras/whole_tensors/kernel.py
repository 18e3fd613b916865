"""Kernels of optimizers whose update needs a whole tensor: its norm, the sums over its rows and columns, or the matrix.

The class's own step runs over one whole tensor at a time; `step` decides on which rank, and brings it there.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...optim.kernel import Kernel, ParameterStep, Scalars, SlotArray, WholeStep
from ...optim.lamb import Lamb


def _slots(kind: type[torch.optim.Optimizer], shape: Sequence[int]) -> list[SlotArray]:
    """Return a class's arrays for a tensor of `shape`."""
    shapes: dict[str, tuple[int, ...] | None] = {"variance": None}
    if kind is Lamb:
        shapes = {"exp_avg": None, "exp_avg_sq": None}
    elif kind is torch.optim.Muon:
        shapes = {"momentum_buffer": None}
    elif len(shape) >= 2:
        shapes = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
    return [SlotArray(name, entry=name, shape=own) for name, own in shapes.items()]


class TensorKernel(Kernel):
    """The update of whole tensors by a class's own step: an instance of it steps one proxy parameter after the other."""

    def __init__(self, kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> None:
        self._kind: Any = kind
        self._proxy = torch.nn.Parameter(torch.zeros(1, 1))
        accepted = inspect.signature(kind.__init__).parameters
        self._settings = tuple(name for name in group if name in accepted and name != "params")
        self._optimizer: torch.optim.Optimizer = self._kind(
            [self._proxy], **{name: group[name] for name in self._settings}
        )
        self._count = "updates" if kind is torch.optim.Muon else "step"  # Muon keeps no step count
        self.slots = tuple(dict.fromkeys(slot.name for shape in ((1, 1), (1,)) for slot in _slots(kind, shape)))
        """Names of all arrays that a parameter may have."""

    def arrays(self, numel: int, shape: Sequence[int]) -> Sequence[SlotArray]:
        return _slots(self._kind, shape)

    def initial(self) -> Scalars:
        return {self._count: 0.0}

    def present(self, scalars: Scalars) -> dict[str, Any]:
        """Return the scalars of the class's own state."""
        return {} if self._count == "updates" else dict(scalars)

    def start(self, group: Mapping[str, Any], scalars: Scalars) -> ParameterStep:
        """Count the step; `update` does the work."""
        return WholeStep({self._count: scalars[self._count] + 1})

    def update(
        self,
        group: Mapping[str, Any],
        scalars: Scalars,
        master: torch.Tensor,
        gradient: torch.Tensor,
        slots: Mapping[str, torch.Tensor],
    ) -> None:
        """Step a tensor in place: `master`, `gradient` (which is changed too) and `slots` have their whole shapes, in fp32."""
        self._optimizer.param_groups[0].update({name: group[name] for name in self._settings if name in group})
        proxy, state = self._proxy, self._optimizer.state
        proxy.grad = None
        proxy.data = master
        proxy.grad = gradient
        if scalars[self._count] > 0:  # a first step starts from the class's own initial state
            state[proxy] = dict(slots)
            if self._count == "step":
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
