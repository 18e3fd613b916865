"""Floating-point operations that torch runs, by torch's own formulas.

[Note: what counts]
Matrix products, convolutions and attention, by the formulas of `torch.utils.flop_counter`: a multiplication and an addition
are two operations. Attention on the CPU, which torch leaves out there, has the same formula here. Element-wise work and norms
count nothing, and neither does the update. Torch's `FlopCounterMode` is not used, since beneath it a compiled function runs
uncompiled, so that the count would change the run.

Operations that run in a backward with gradients switched on repeat a forward (activation checkpointing) and do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

CAN_LEAVE_COMPILED = hasattr(TorchDispatchMode, "ignore_compile_internals")
"""Whether this torch runs compiled functions as usual beneath a count; else it would run them uncompiled."""


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts within its `with` blocks; it may be entered again and again. It does not change the computation."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward = 0
        """Operations outside of a backward."""
        self.backward = 0
        """Operations of backwards, without the forwards that they repeat."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return that compiled code stays so."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        # While torch.compile traces nothing is computed.
        if torch._guards.TracingContext.try_get() is None:
            count = _count(getattr(func, "_overloadpacket", func), args, kwargs, out)
            if torch._C._current_graph_task_id() == -1:
                self.forward += count
            elif not torch.is_grad_enabled():
                self.backward += count
        return out


def _count(operator: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the operations of a call; 0 for an operator without a formula."""
    aten = torch.ops.aten
    forward: Callable[..., int] = sdpa_flop_count
    backward: Callable[..., int] = sdpa_backward_flop_count
    if operator in flop_registry:
        return int(flop_registry[operator](*args, **kwargs, out_val=out))
    if operator is getattr(aten, "_scaled_dot_product_flash_attention_for_cpu", None):
        return int(forward(*(tensor.shape for tensor in args[:3])))
    if operator is getattr(aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None):
        return int(backward(*(tensor.shape for tensor in args[:4])))
    return 0


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module's call is compiled."""
    return getattr(module, "_compiled_call_impl", None) is not None
