"""1-bit Adam, 0/1 Adam and 1-bit LAMB as optimizers: parameter groups with settings, whose steps an engine takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zstore.errors import UsageError

from ...optim.lion import called, check_arguments

Betas = tuple[float, float]


class _OneBit(torch.optim.Optimizer):
    def __init__(self, params: Any, numbers: dict[str, float], counts: dict[str, int], others: dict[str, Any]) -> None:
        name = type(self).__name__
        check_arguments(name, betas=others["betas"], **numbers)
        for key, count in counts.items():
            if not count >= 1 or count != int(count):
                raise UsageError(f"{name}: expected {key} to be a whole number of at least 1, got {count!r}")
        super().__init__(params, {**numbers, **counts, **others})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Return the result of `closure`. Raises UsageError if a parameter has a gradient: its ranks' gradients are not
        averaged, and an engine must exchange their compressed form."""
        loss = called(closure)
        if any(parameter.grad is not None for group in self.param_groups for parameter in group["params"]):
            raise UsageError(
                f"{type(self).__name__} takes its steps in an engine, which exchanges what ranks send: pass it to "
                "zstore.initialize(optimizer=...) and call engine.step(), or use torch's AdamW or zstore.optim.Lamb"
            )
        return loss


class OneBitAdam(_OneBit):
    """1-bit Adam with DeepSpeed's arguments. See docs/optimizers.md."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        others = {"betas": betas, "bias_correction": bias_correction}
        super().__init__(params, numbers, {"freeze_step": freeze_step}, others)


class ZeroOneAdam(_OneBit):
    """0/1 Adam with DeepSpeed's arguments. See docs/optimizers.md."""

    def __init__(  # noqa: PLR0913, PLR0917 - DeepSpeed's arguments
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        var_freeze_step: int = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
    ) -> None:
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        counts = {
            "var_freeze_step": var_freeze_step,
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }
        super().__init__(params, numbers, counts, {"betas": betas, "bias_correction": bias_correction})


class OneBitLamb(_OneBit):
    """1-bit LAMB with DeepSpeed's arguments. See docs/optimizers.md."""

    def __init__(  # noqa: PLR0913, PLR0917 - DeepSpeed's arguments
        self,
        params: Any,
        lr: float = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "max_coeff": max_coeff, "min_coeff": min_coeff}
        numbers |= {"coeff_beta": coeff_beta, "factor_max": factor_max, "factor_min": factor_min}
        numbers["factor_threshold"] = factor_threshold
        others = {"betas": betas, "bias_correction": bias_correction, "eps_inside_sqrt": eps_inside_sqrt}
        super().__init__(params, numbers, {"freeze_step": freeze_step}, others)


ONE_BIT = (OneBitAdam, ZeroOneAdam, OneBitLamb)
