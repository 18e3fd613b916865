"""DeepSpeed's optimizers: a call makes one of torch's, which the engine updates by one kernel wherever its state rests."""

from __future__ import annotations

from typing import Any

import torch

from zstore.engine.optim.classes.lamb import Lamb
from zstore.engine.optim.classes.lion import Lion
from zstore.engine.optim.classes.muon import MuonWithAdam, muon_class
from zstore.errors import UsageError

Betas = tuple[float, float]


class _ByMade(type):
    """The type of classes whose instances are the optimizers that a call of them makes, and engines' that have one."""

    makes: tuple[str, ...]

    def __instancecheck__(cls, instance: object) -> bool:
        return type(getattr(instance, "client", instance)).__name__ in cls.makes


class DeepSpeedCPUAdam(metaclass=_ByMade):
    """`DeepSpeedCPUAdam(params, ...)` is `torch.optim.AdamW`, with `adamw_mode=False` `torch.optim.Adam`."""

    makes = ("Adam", "AdamW")

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
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        return _adam(model_params, settings, decoupled=adamw_mode, corrects=bias_correction)


class FusedAdam(metaclass=_ByMade):
    """`FusedAdam(params, ...)` is `torch.optim.AdamW`, with `adam_w_mode=False` `torch.optim.Adam`."""

    makes = ("Adam", "AdamW")

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
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        return _adam(params, settings, decoupled=adam_w_mode, corrects=bias_correction)


class DeepSpeedCPUAdagrad(metaclass=_ByMade):
    """`DeepSpeedCPUAdagrad(params, ...)` is `torch.optim.Adagrad`. Raises UsageError for `amsgrad=True`."""

    makes = ("Adagrad",)

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


class DeepSpeedCPULion(metaclass=_ByMade):
    """`DeepSpeedCPULion(params, ...)` is `zstore.optim.Lion`."""

    makes = ("Lion",)

    def __new__(  # type: ignore[misc]
        cls,
        model_params: Any,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        """Return the optimizer; its moment is fp32 whatever `fp32_optimizer_states` says."""
        return Lion(model_params, lr=lr, betas=betas, weight_decay=weight_decay)


class FusedLion(metaclass=_ByMade):
    """`FusedLion(params, ...)` is `zstore.optim.Lion`."""

    makes = ("Lion",)

    def __new__(  # type: ignore[misc]
        cls,
        params: Any,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> torch.optim.Optimizer:
        """Return the optimizer; the engine clears gradients whatever `set_grad_none` says."""
        return Lion(params, lr=lr, betas=betas, weight_decay=weight_decay)


class FusedLamb(metaclass=_ByMade):
    """`FusedLamb(params, ...)` is `zstore.optim.Lamb`. Raises UsageError for `amsgrad=True` and `max_grad_norm`."""

    makes = ("Lamb",)

    def __new__(  # type: ignore[misc] # noqa: PLR0913, PLR0917 - DeepSpeed's arguments
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> torch.optim.Optimizer:
        """Return the optimizer."""
        if amsgrad:
            raise UsageError("FusedLamb(amsgrad=True): LAMB has no such form; leave it out")
        if max_grad_norm:
            raise UsageError(
                f"FusedLamb(max_grad_norm={max_grad_norm}): the engine clips: write gradient_clipping into the config"
            )
        return Lamb(params, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay, max_coeff, min_coeff)


class Muon(metaclass=_ByMade):
    """`Muon(params, ...)` is `torch.optim.Muon`, whose iteration is the standard one whatever `ns_method` says."""

    makes = ("Muon",)

    def __new__(  # type: ignore[misc]
        cls,
        params: Any,
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        ns_method: str = "gram",
    ) -> torch.optim.Optimizer:
        """Return the optimizer. Raises UsageError where torch has no Muon."""
        made: torch.optim.Optimizer = muon_class()(params, lr=lr, weight_decay=weight_decay, momentum=momentum)
        return made


class MuonWithAuxAdam(metaclass=_ByMade):
    """`MuonWithAuxAdam(groups)` is `zstore.optim.MuonWithAdam`, whose iteration is the standard one whatever `ns_method` of
    a group says."""

    makes = ("MuonWithAdam",)

    def __new__(cls, param_groups: Any) -> torch.optim.Optimizer:  # type: ignore[misc]
        """Return the optimizer."""
        return MuonWithAdam([{k: v for k, v in group.items() if k != "ns_method"} for group in param_groups])


def _adam(params: Any, settings: dict[str, Any], *, decoupled: bool, corrects: bool) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    made = kind(params, **settings)
    for group in made.param_groups if not corrects else ():
        group["bias_correction"] = False  # read by the engine
    return made
