"""Optimizer classes that torch lacks: Lion, the sign of a moment as the update, and LAMB, Adam whose step is scaled for each
tensor. Sources: Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2; You et al. 2019,
https://arxiv.org/abs/1904.00962, and for LAMB's limits and the place of the bias correction DeepSpeed's FusedLamb."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zstore.errors import UsageError


class Lion(torch.optim.Optimizer):
    """Lion, which keeps one moment: `update = sign(beta1 * moment + (1 - beta1) * gradient)`, then
    `moment = beta2 * moment + (1 - beta2) * gradient`. Weight decay is decoupled: weights lose `lr * weight_decay` of
    themselves first.

    Each element is updated by itself, so that it works at every stage and tier. Its rate is usually a third to a tenth of
    AdamW's.
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
        loss = called(closure)
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


def called(closure: Callable[[], Any] | None) -> Any:
    """Return what a closure returns, with gradients on; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_arguments(name: str, *, betas: tuple[float, float], **numbers: float) -> None:
    """Raise UsageError for a negative number, and for betas that are not from 0 to below 1."""
    for argument, value in numbers.items():
        if not value >= 0:
            raise UsageError(f"{name}({argument}={value!r}): expected a number of at least 0")
    if not all(0 <= beta < 1 for beta in betas):
        raise UsageError(f"{name}(betas={betas!r}): expected two numbers, each from 0 to below 1")


class Lamb(torch.optim.Optimizer):
    """LAMB with DeepSpeed's arguments.

    `update = moment / (sqrt(second moment) + eps) + weight_decay * weights`, or with `eps_inside_sqrt`
    `moment / sqrt(second moment + eps) + ...`. The weights lose `rate * factor * update`, where `rate` is
    `lr * sqrt(1 - beta2^t) / (1 - beta1^t)` (`lr` without `bias_correction`) and `factor` is the norm of the tensor's
    weights over that of its update, from `min_coeff` to `max_coeff`, and 1 where one of them is 0.

    The norms are of whole tensors: on an engine at stages 1 to 3 and offloaded, each tensor is updated whole by one rank.
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
        loss = called(closure)
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
    """Take step number `steps` of LAMB in place; return the factor of the tensor, a tensor without dimensions, which is 0
    where a norm was 0 and the step was taken with factor 1."""
    beta1, beta2 = group["betas"]
    moment.mul_(beta1).add_(gradient, alpha=1 - beta1)
    squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    update = moment / lamb_root(squares, group)
    update.add_(parameter, alpha=group["weight_decay"])
    rate = group["lr"]
    if group["bias_correction"]:
        rate = rate * math.sqrt(1 - beta2**steps) / (1 - beta1**steps)
    weights_norm, update_norm = parameter.norm(), update.norm()
    both = (weights_norm > 0) & (update_norm > 0)
    factor = (weights_norm / update_norm).clamp_(group["min_coeff"], group["max_coeff"])
    parameter.sub_(update.mul_(torch.where(both, factor, 1.0) * rate))
    return torch.where(both, factor, 0.0)


def lamb_root(squares: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Return what the moment is divided by."""
    eps = group["eps"]
    return (squares + eps).sqrt_() if group["eps_inside_sqrt"] else squares.sqrt().add_(eps)
