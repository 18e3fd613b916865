"""Kernels of optimizers whose update needs a whole tensor: its norm, the sums over its rows and columns, or the matrix.

The class's own step runs over one whole tensor at a time; which rank that is, and how it gets there, is `tensor_step`'s.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zstore.errors import UsageError

from ..plan.plan import Slots, TensorSlot
from .classes.lamb import Lamb
from .classes.muon import MuonWithAdam
from .classes.one_bit import ONE_BIT
from .kernel import (
    ELEMENT_WISE,
    Averaging,
    Kernel,
    ParameterStep,
    Scalars,
    SlotArray,
    WholeStep,
    fp32_arrays,
    kernel_for,
)
from .one_bit.kernel import OneBitKernel
from .one_bit.rules import rule_for

_MUON: Any = getattr(torch.optim, "Muon", None)
_KINDS = [kind for kind in (Lamb, torch.optim.Adafactor, _MUON, MuonWithAdam) if kind is not None]


def needs_whole_tensors(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether a class is one that is stepped tensor by tensor, with state in the store."""
    return kind in (*_KINDS, *ONE_BIT)


def kernels_for(
    kind: type[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]], ema: float | None = None
) -> list[Kernel]:
    """Return the kernel of each group, with an average of masters of decay `ema`; parameters may be on the meta device.

    Raises what `kernel_for` raises, and UsageError for an average beside an optimizer that steps whole tensors.
    """
    if not needs_whole_tensors(kind):
        kernels = [kernel_for(kind, group) for group in groups]
        return [*kernels] if ema is None else [Averaging(kernel, ema) for kernel in kernels]
    if ema is not None:
        names = ", ".join(each.__name__ for each in ELEMENT_WISE)
        raise UsageError(
            f'"ema": {ema}: masters are averaged as tiles of them are updated, and {kind.__name__} steps whole tensors: leave '
            f"the key out, or use one of {names}"
        )
    if kind in ONE_BIT:
        return [OneBitKernel(rule_for(kind.__name__)) for _ in groups]
    found: list[Kernel] = []
    for group in groups:
        if kind is MuonWithAdam and not group["use_muon"]:
            found.append(kernel_for(torch.optim.AdamW, group))
        else:
            found.append(TensorKernel(_MUON if kind is MuonWithAdam else kind, group))
    return found


def _slots(kind: type[torch.optim.Optimizer], shape: Sequence[int]) -> list[SlotArray]:
    """Return what a class keeps of a tensor of `shape`."""
    if kind is Lamb:
        return fp32_arrays(("exp_avg", "exp_avg_sq"))
    if kind is _MUON:
        return fp32_arrays(("momentum_buffer",))
    if len(shape) < 2:
        return fp32_arrays(("variance",))
    rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
    return [SlotArray("row_var", entry="row_var", shape=rows), SlotArray("col_var", entry="col_var", shape=columns)]


class TensorKernel:
    """The update of whole tensors by a class's own step: an instance of it steps one proxy parameter after the other."""

    def __init__(self, kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> None:
        self._kind: Any = kind
        self._proxy = torch.nn.Parameter(torch.zeros(1, 1))
        accepted = inspect.signature(kind.__init__).parameters
        self._settings = tuple(name for name in group if name in accepted and name != "params")
        self._optimizer: torch.optim.Optimizer = self._kind(
            [self._proxy], **{name: group[name] for name in self._settings}
        )
        self._count = "updates" if kind is _MUON else "step"  # Muon keeps no step count
        self.slots = tuple(dict.fromkeys(slot.name for shape in ((1, 1), (1,)) for slot in _slots(kind, shape)))
        """Names of all arrays that there may be of a parameter; see `arrays_of`."""

    def arrays_of(self, shape: Sequence[int]) -> Sequence[SlotArray]:
        """Return the arrays that are kept of a parameter of `shape`."""
        return _slots(self._kind, shape)

    def arrays(self, numel: int) -> Sequence[SlotArray]:
        """See Kernel. Raises UsageError: what is kept follows from the parameter's shape."""
        raise UsageError("what is kept of a whole tensor follows from its shape")

    def initial(self) -> Scalars:
        """See Kernel."""
        return {self._count: 0.0}

    def present(self, scalars: Scalars) -> dict[str, Any]:
        """Return the scalars that the class itself keeps."""
        return {} if self._count == "updates" else dict(scalars)

    def start(self, group: Mapping[str, Any], scalars: Scalars) -> ParameterStep:
        """See Kernel; the step counts, and `update` does the work."""
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
        if scalars[self._count] > 0:  # a first step starts from what the class itself makes
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


def planned_slots(kernel: Kernel, shape: Sequence[int]) -> Slots:
    """Return what any kernel keeps of a parameter of `shape`, for the plan."""
    if isinstance(kernel, TensorKernel):
        return tuple(TensorSlot(slot.name, slot.shape) for slot in kernel.arrays_of(shape))
    if isinstance(kernel, OneBitKernel):
        return kernel.rule.slots
    return kernel.slots
