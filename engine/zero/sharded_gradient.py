"""The training loop's view of gradients in `.grad`, and the placeholder for one that is not there as a whole tensor.

[Note: gradients between backward and step]
Between a backward and its `step()` each parameter that has a gradient shows it in `.grad`; after `step()` it is None.
If a rank has all of the mean over ranks in the parameter's own type, without a loss scale, `.grad` is that tensor: the
step uses the tensor that a training loop reads and writes there, and does not update a parameter whose `.grad` it sets to
None. The last backward of a step averages over ranks; before it, ranks do not hold the mean.

Otherwise `.grad` is a `ShardedGradient`, which has the parameter's shape, type and device, and no memory. Its 2-norm
is that of the whole mean gradient, unscaled, and multiplying it in place by a number scales that, so that
`torch.nn.utils.clip_grad_norm_` clips. All else raises. The first norm is taken by all ranks, in that call or in their
`step()`; it ends the accumulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from zstore.errors import UsageError

from ..params.record import ParameterRecord
from .gradient import Gradient, GradientStep, take_gradient

_aten: Any = torch.ops.aten


class GradientActs(Protocol):
    """The services of a run for `ShardedGradient`."""

    def gradient_norm(self, record: ParameterRecord) -> float:
        """Return the 2-norm of a parameter's gradient, as the step takes it (all ranks)."""

    def scale_gradient(self, record: ParameterRecord, factor: float) -> None:
        """Multiply a parameter's gradient by `factor` (all ranks)."""


class ShardedGradient(torch.Tensor):
    """A gradient without memory. See [Note: gradients between backward and step]."""

    record: ParameterRecord
    acts: GradientActs

    @staticmethod
    def of(record: ParameterRecord, acts: GradientActs) -> ShardedGradient:
        """Return the placeholder of a parameter's gradient."""
        made: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            ShardedGradient, record.shape, dtype=record.dtype, device=record.full.device
        )
        made.record, made.acts = record, acts
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Carry out an operation that a gradient without memory allows. Raises UsageError for all others."""
        act = _ACTS.get(func)
        found = None if act is None else act(*args, **(kwargs or {}))
        if found is None:
            raise UsageError(_refusal(func, args))
        return None if func is _aten._foreach_zero_.default else found  # which has no result in its schema

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGradient({self.record.name!r}, shape={tuple(self.shape)})"


def _refusal(func: Any, args: Sequence[Any]) -> str:
    flat = [one for arg in args for one in (arg if isinstance(arg, list | tuple) else [arg])]
    name = next((repr(one.record.name) for one in flat if isinstance(one, ShardedGradient)), "NAME")
    return (
        f"{func} on the gradient of parameter {name}: this rank does not have it as one tensor of the parameter's type, so "
        "that .grad gives its 2-norm and takes factors (as torch.nn.utils.clip_grad_norm_ does) and nothing else. Read it "
        f"by engine.get_gradient({name}) on all ranks; to change it, change the loss, or train at stage 0 without offload in "
        "fp32"
    )


def _norm(gradient: Any, order: Any = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if order not in (None, 2) or dims is not None or keepdim:
        return None
    norm = gradient.acts.gradient_norm(gradient.record)
    return torch.tensor(norm, dtype=dtype or torch.float32, device=gradient.device)


def _norms(gradients: Sequence[Any], order: Any = 2, dtype: Any = None) -> Any:
    return [_norm(gradient, order, dtype=dtype) for gradient in gradients] if order == 2 else None


def _factor(gradient: Any, factor: Any) -> float | None:
    """Return a factor as a number; None if it is not one, or is no factor of a gradient without memory."""
    if not isinstance(gradient, ShardedGradient) or (isinstance(factor, torch.Tensor) and factor.numel() != 1):
        return None
    return float(factor)


def _mul(gradient: Any, factor: Any) -> Any:
    number = _factor(gradient, factor)
    if number is None:
        return None
    gradient.acts.scale_gradient(gradient.record, number)
    return gradient


def _div(gradient: Any, divisor: Any) -> Any:
    number = _factor(gradient, divisor)
    return None if number is None else _mul(gradient, 1.0 / number if number else math.inf)


def _zero(gradient: Any) -> Any:
    gradient.record.parameter.grad = None  # as zero_grad() does with set_to_none, which the engine sees
    return gradient


def _each(gradients: Sequence[Any], factors: Any) -> Any:
    listed = list(factors) if isinstance(factors, list | tuple) else [factors] * len(gradients)
    numbers = [_factor(gradient, factor) for gradient, factor in zip(gradients, listed, strict=True)]
    return None if None in numbers else list(map(_mul, gradients, numbers))


_ACTS: Mapping[Any, Callable[..., Any]] = {
    _aten.detach.default: lambda gradient: gradient,
    _aten.linalg_vector_norm.default: _norm,
    _aten._foreach_norm.Scalar: _norms,
    _aten.mul_.Tensor: _mul,
    _aten.mul_.Scalar: _mul,
    _aten.div_.Tensor: _div,
    _aten.div_.Scalar: _div,
    _aten.zero_.default: _zero,
    _aten._foreach_zero_.default: lambda gradients: list(map(_zero, gradients)),
    _aten._foreach_mul_.Scalar: _each,
    _aten._foreach_mul_.ScalarList: _each,
    _aten._foreach_mul_.Tensor: _each,
}
"""By operation; one that returns None is not allowed in this form."""


class ShownGradients:
    """The `gradients` of the step so far in `.grad`, and the training loop's changes of them there. See [Note: gradients
    between backward and step]."""

    acts: GradientActs
    """Serves the loop's use of gradients that it cannot have whole."""

    def __init__(self, gradients: Mapping[ParameterRecord, Gradient], step: GradientStep) -> None:
        self._of = gradients
        self._step = step
        self.scales: dict[ParameterRecord, float] = {}
        """The loop's factors of gradients that it cannot have whole."""
        self.clipped: set[ParameterRecord] = set()
        """Whole gradients that were clipped in place."""
        self._placeholders: dict[ParameterRecord, ShardedGradient] = {}

    def show(self, *, whole: bool) -> None:
        """Put the gradients into `.grad`, as they are if they are `whole` and of the parameter's type."""
        for record, gradient in self._of.items():
            if gradient.is_agreed:
                held = gradient.values
                self._show(gradient, held if whole and held is not None and held.dtype == record.dtype else None)

    def _show(self, gradient: Gradient, values: torch.Tensor | None) -> None:
        """Put a gradient into `.grad`; None: a `ShardedGradient` in its place."""
        record = gradient.record
        if values is None:
            values = self._placeholders.get(record)
            if values is None:
                values = self._placeholders[record] = ShardedGradient.of(record, self.acts)
        record.parameter.grad = gradient.shown = values

    @property
    def are_cleared(self) -> bool:
        """Whether the training loop has set all gradients that were shown to None, as `zero_grad()` of torch does."""
        shown = [record for record, gradient in self._of.items() if gradient.shown is not None]
        return bool(shown) and all(record.parameter.grad is None for record in shown)

    def hide(self) -> None:
        """Take the gradients out of `.grad`, as the loop left them there, and keep them."""
        self.adopt()
        for record, gradient in self._of.items():
            if gradient.shown is not None:
                record.parameter.grad = gradient.shown = None

    def adopt(self) -> None:
        """Take over the gradients that the training loop put into `.grad` in place of those shown there.

        Raises UsageError if one is not whole on this rank.
        """
        for record, gradient in self._of.items():
            shown = gradient.shown
            if record.parameter.grad is shown:
                continue
            if isinstance(shown, ShardedGradient) or not self._step.is_whole:
                raise UsageError(
                    f"the .grad of parameter {record.name!r} was replaced or cleared between backward() and step(), but its "
                    "gradient is not whole on this rank, so that the step would not know. Multiply .grad in place by a number, "
                    "change the loss, or forget all with engine.zero_grad(); with requires_grad=False there is no gradient"
                )
            gradient.drop()
            if (found := take_gradient(record)) is not None:
                gradient.hold(found)
                self._show(gradient, found)

    def clip(self, factor: float) -> None:
        """Multiply the whole fp32 gradients by `factor` in place: a plain loop sees clipped ones too. Others are clipped
        in the update, whose bits are those of one product in fp32: `.grad` is their placeholder from now on."""
        shown = {record: gradient.shown for record, gradient in self._of.items()}
        whole = {r: one for r, one in shown.items() if one is not None and not isinstance(one, ShardedGradient)}
        here = {record: values for record, values in whole.items() if record.dtype == torch.float32}
        if factor != 1.0 and here:
            torch._foreach_mul_(list(here.values()), float(np.float32(factor)))
        self.clipped.update(here)
        for record in whole.keys() - here.keys():
            self._show(self._of[record], None)

    def forget(self) -> None:
        """Forget the loop's changes."""
        self.scales.clear()
        self.clipped.clear()
