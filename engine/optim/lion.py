"""Lion: the sign of a moment as the update. Source: Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2."""

from __future__ import annotations

from collections.abc import Callable
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
