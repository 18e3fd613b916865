"""LAMB: Adam whose step is scaled for each tensor. Sources: You et al. 2019, https://arxiv.org/abs/1904.00962, and for the
limits and the place of the bias correction DeepSpeed's FusedLamb."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .lion import called, check_arguments


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
        (beta1, beta2), steps = group["betas"], float(state["step"])
        moment, squares = state["exp_avg"], state["exp_avg_sq"]
        moment.mul_(beta1).add_(gradient, alpha=1 - beta1)
        squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        inside = group["eps_inside_sqrt"]
        update = (squares + group["eps"]).sqrt_() if inside else squares.sqrt().add_(group["eps"])
        torch.div(moment, update, out=update)
        update.add_(parameter, alpha=group["weight_decay"])
        rate = group["lr"]
        if group["bias_correction"]:
            rate = rate * math.sqrt(1 - beta2**steps) / (1 - beta1**steps)
        weights_norm, update_norm = parameter.norm(), update.norm()
        factor = (weights_norm / update_norm).clamp_(group["min_coeff"], group["max_coeff"])
        factor = torch.where((weights_norm > 0) & (update_norm > 0), factor, 1.0)
        parameter.sub_(update.mul_(factor * rate))
