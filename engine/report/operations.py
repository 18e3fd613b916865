"""Floating-point operations that torch runs, by torch's own formulas.

[Note: what counts]
Matrix products, convolutions and attention, as in `torch.utils.flop_counter`, whose formulas these are: a multiplication and
an addition are two operations. Attention on the CPU, which torch leaves out there, has the same formula here. Element-wise
work and norms count nothing, and neither does the update.

Operations are told apart by autograd's state when they run. Without a backward under way they belong to the forward. In
one, those that run with gradients switched on repeat a forward (activation checkpointing); all others are the backward.

A function that torch.compile made runs as it would without the count. Only the products that it leaves to libraries are
seen, not those within its own kernels: compiled code is counted too low.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


@dataclass(frozen=True, kw_only=True)
class Operations:
    """Floating-point operations of a part of training. See [Note: what counts]."""

    forward: int = 0
    backward: int = 0
    recomputed: int = 0
    """Of forwards that the backward repeats."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.forward + self.backward + self.recomputed


Formula = Callable[..., int]


@cache
def _formulas() -> Mapping[Any, Formula]:
    aten = torch.ops.aten
    own: dict[Any, Formula] = {}
    # Missing in some versions of torch.
    if hasattr(aten, "_scaled_dot_product_flash_attention_for_cpu"):
        own[aten._scaled_dot_product_flash_attention_for_cpu] = lambda *args, **_: _of_shapes(sdpa_flop_count, args[:3])
        own[aten._scaled_dot_product_flash_attention_for_cpu_backward] = lambda *args, **_: _of_shapes(
            sdpa_backward_flop_count, args[:4]
        )
    return {**own, **flop_registry}


def _of_shapes(formula: Callable[..., int], tensors: Sequence[torch.Tensor]) -> int:
    return int(formula(*(tensor.shape for tensor in tensors)))


CAN_LEAVE_COMPILED = hasattr(TorchDispatchMode, "ignore_compile_internals")
"""Whether this torch runs compiled functions as usual beneath a count; else it would run them uncompiled."""


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts within its `with` blocks; it may be entered again and again. It does not change the computation.

    `note` is called with each number, "forward", "backward" or "recomputed" before it.
    """

    supports_higher_order_operators = True

    def __init__(self, note: Callable[[str, int], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._formulas = _formulas()
        self._counts = {"forward": 0, "backward": 0, "recomputed": 0}
        self._note = note

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return that compiled code stays so."""
        return True

    @property
    def counted(self) -> Operations:
        """The counts so far."""
        return Operations(**self._counts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = self._formulas.get(getattr(func, "_overloadpacket", func))
        # While torch.compile traces nothing is computed.
        if formula is not None and torch._guards.TracingContext.try_get() is None:
            part = "forward"
            if torch._C._current_graph_task_id() != -1:
                part = "recomputed" if torch.is_grad_enabled() else "backward"
            count = int(formula(*args, **kwargs, out_val=out))
            self._counts[part] += count
            if self._note is not None:
                self._note(part, count)
        return out


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module's call is compiled."""
    return getattr(module, "_compiled_call_impl", None) is not None
