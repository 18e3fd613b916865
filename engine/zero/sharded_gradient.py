"""The placeholder in `.grad` for a gradient that is not available as a whole tensor.

[Note: gradients between backward and step]
Between a backward and its `step()` each parameter that has a gradient shows it in `.grad`; after `step()` it is None.
If a rank has the whole mean over ranks in the parameter's own dtype, without a loss scale, `.grad` is that tensor: the
step uses the tensor that a training loop reads and writes there, and does not update a parameter whose `.grad` the loop has
set to None. The last backward of a step averages over ranks; before it, ranks do not have the mean.

Otherwise `.grad` is a `ShardedGradient`, which has the parameter's shape, dtype and device, but no storage. Its 2-norm is that
of the whole mean gradient, unscaled, and multiplying it in place by a number scales that gradient, so
`torch.nn.utils.clip_grad_norm_` works. Every other operation raises. All ranks compute the first norm, in that call or in
their `step()`; it ends the accumulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from zstore.errors import UsageError

from ..params.record import ParameterRecord

_aten: Any = torch.ops.aten


class GradientOwner(Protocol):
    """Carries out the operations that `ShardedGradient` allows."""

    def gradient_norm(self, record: ParameterRecord) -> float:
        """Return the 2-norm of a parameter's gradient, as the step will use it (all ranks)."""

    def scale_gradient(self, record: ParameterRecord, factor: float) -> None:
        """Multiply a parameter's gradient by `factor` (all ranks)."""


class ShardedGradient(torch.Tensor):
    """A gradient without storage. See [Note: gradients between backward and step]."""

    record: ParameterRecord
    owner: GradientOwner

    @staticmethod
    def of(record: ParameterRecord, owner: GradientOwner) -> ShardedGradient:
        """Return the placeholder of a parameter's gradient."""
        placeholder: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            ShardedGradient, record.shape, dtype=record.dtype, device=record.full.device
        )
        placeholder.record, placeholder.owner = record, owner
        return placeholder

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation that a gradient without storage allows. Raises UsageError for any other."""
        handler = _HANDLERS.get(func)
        result = None if handler is None else handler(*args, **(kwargs or {}))
        if result is None:
            raise UsageError(_refusal(func, args))
        return None if func is _aten._foreach_zero_.default else result  # which has no result in its schema

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGradient({self.record.name!r}, shape={tuple(self.shape)})"


def _refusal(func: Any, args: Sequence[Any]) -> str:
    flat = [value for arg in args for value in (arg if isinstance(arg, list | tuple) else [arg])]
    name = next((repr(value.record.name) for value in flat if isinstance(value, ShardedGradient)), "NAME")
    return (
        f"{func} on the gradient of parameter {name}: this rank does not have it as one tensor of the parameter's dtype, so "
        ".grad gives only its 2-norm, and can only be multiplied by a number (as torch.nn.utils.clip_grad_norm_ does). Read it "
        f"with engine.get_gradient({name}) on all ranks; to change it, change the loss, or train at stage 0 without offload in "
        "fp32"
    )


def _norm(gradient: Any, order: Any = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if order not in (None, 2) or dims is not None or keepdim:
        return None
    norm = gradient.owner.gradient_norm(gradient.record)
    return torch.tensor(norm, dtype=dtype or torch.float32, device=gradient.device)


def _norms(gradients: Sequence[Any], order: Any = 2, dtype: Any = None) -> Any:
    return [_norm(gradient, order, dtype=dtype) for gradient in gradients] if order == 2 else None


def _factor(gradient: Any, factor: Any) -> float | None:
    """Return a factor of a gradient without storage as a number; None for any other operand."""
    if not isinstance(gradient, ShardedGradient) or (isinstance(factor, torch.Tensor) and factor.numel() != 1):
        return None
    return float(factor)


def _mul(gradient: Any, factor: Any) -> Any:
    number = _factor(gradient, factor)
    if number is None:
        return None
    gradient.owner.scale_gradient(gradient.record, number)
    return gradient


def _div(gradient: Any, divisor: Any) -> Any:
    number = _factor(gradient, divisor)
    return None if number is None else _mul(gradient, 1.0 / number if number else math.inf)


def _zero(gradient: Any) -> Any:
    gradient.record.parameter.grad = None  # as zero_grad(set_to_none=True) does; the engine detects that
    return gradient


def _mul_all(gradients: Sequence[Any], factors: Any) -> Any:
    listed = list(factors) if isinstance(factors, list | tuple) else [factors] * len(gradients)
    numbers = [_factor(gradient, factor) for gradient, factor in zip(gradients, listed, strict=True)]
    return None if None in numbers else list(map(_mul, gradients, numbers))


_HANDLERS: Mapping[Any, Callable[..., Any]] = {
    _aten.detach.default: lambda gradient: gradient,
    _aten.linalg_vector_norm.default: _norm,
    _aten._foreach_norm.Scalar: _norms,
    _aten.mul_.Tensor: _mul,
    _aten.mul_.Scalar: _mul,
    _aten.div_.Tensor: _div,
    _aten.div_.Scalar: _div,
    _aten.zero_.default: _zero,
    _aten._foreach_zero_.default: lambda gradients: list(map(_zero, gradients)),
    _aten._foreach_mul_.Scalar: _mul_all,
    _aten._foreach_mul_.ScalarList: _mul_all,
    _aten._foreach_mul_.Tensor: _mul_all,
}
"""Handlers by operation; if a handler returns None, the operation is not allowed with these arguments."""
