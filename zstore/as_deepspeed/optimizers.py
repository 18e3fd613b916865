"""DeepSpeed's optimizers: a call makes one of torch's, which the engine updates by one kernel wherever its state rests."""

from __future__ import annotations

from typing import Any

import torch

from zstore.errors import UsageError

Betas = tuple[float, float]


class DeepSpeedCPUAdam:
    """`DeepSpeedCPUAdam(params, ...)` is `torch.optim.AdamW`, with `adamw_mode=False` `torch.optim.Adam`.

    Raises UsageError for `bias_correction=False` and `amsgrad=True`, which the engine does not do.
    """

    def __new__(  # type: ignore[misc] # noqa: PLR0913, PLR0917 - DeepSpeed's arguments
        cls,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        """Return the optimizer; moments are fp32 whatever `fp32_optimizer_states` says."""
        return _adam(
            cls.__name__,
            model_params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            decoupled=adamw_mode,
            refused={"bias_correction=False": not bias_correction, "amsgrad=True": amsgrad},
        )


class FusedAdam:
    """`FusedAdam(params, ...)` is `torch.optim.AdamW`, with `adam_w_mode=False` `torch.optim.Adam`.

    Raises UsageError for `bias_correction=False` and `amsgrad=True`, which the engine does not do.
    """

    def __new__(  # type: ignore[misc] # noqa: PLR0913, PLR0917 - DeepSpeed's arguments
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> torch.optim.Optimizer:
        """Return the optimizer; the engine clears gradients whatever `set_grad_none` says."""
        return _adam(
            cls.__name__,
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            decoupled=adam_w_mode,
            refused={"bias_correction=False": not bias_correction, "amsgrad=True": amsgrad},
        )


class DeepSpeedCPUAdagrad:
    """`DeepSpeedCPUAdagrad(params, ...)` is `torch.optim.Adagrad`. Raises UsageError for `amsgrad=True`."""

    def __new__(  # type: ignore[misc]
        cls,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        """Return the optimizer; its state is fp32 whatever `fp32_optimizer_states` says."""
        if amsgrad:
            raise UsageError("DeepSpeedCPUAdagrad(amsgrad=True): Adagrad has no such form; leave it out")
        return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


def _adam(
    name: str, params: Any, settings: dict[str, Any], *, decoupled: bool, refused: dict[str, bool]
) -> torch.optim.Optimizer:
    for what, asked in refused.items():
        if asked:
            raise UsageError(
                f"{name}({what}) is not supported: moments are always bias-corrected, by plain Adam; leave it out"
            )
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(params, **settings)
