"""DeepSpeed's optimizers: a call makes one of torch's, or of zstore's, which the engine updates by one kernel on every tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zstore.engine.optim.classes.lamb import Lamb
from zstore.engine.optim.classes.lion import Lion
from zstore.engine.optim.classes.muon import MuonWithAdam
from zstore.errors import UsageError

from .names import by_place

Optimizer = torch.optim.Optimizer
_WITHOUT_EFFECT = ("fp32_optimizer_states", "set_grad_none", "ns_method")
"""State is fp32, the engine clears gradients, and Muon's iteration is the standard one, whatever these say."""


class _Made(type):
    """The type of classes a call of which makes another optimizer, and whose instances are those, and engines' that have
    one. Arguments are taken by name, or in DeepSpeed's `order`."""

    makes: tuple[str, ...]
    order: str
    make: Callable[..., Optimizer]

    def __call__(cls, *values: Any, **given: Any) -> Optimizer:
        """Return the optimizer. Raises UsageError for arguments that have no counterpart here."""
        named = by_place(cls.__name__, cls.order, values, given)
        params = named.pop(cls.order.partition(" ")[0])
        return cls.make(params, **{name: value for name, value in named.items() if name not in _WITHOUT_EFFECT})

    def __instancecheck__(cls, instance: object) -> bool:
        return type(getattr(instance, "client", instance)).__name__ in cls.makes


def _made(name: str, makes: str, order: str, make: Callable[..., Optimizer]) -> type:
    members = {"makes": tuple(makes.split()), "order": order, "make": staticmethod(make), "__doc__": f"Makes {makes}."}
    return _Made(name, (), members)


def _adam(
    params: Any, *, bias_correction: bool = True, adam_w_mode: bool = True, adamw_mode: bool = True, **settings: Any
) -> Optimizer:
    kind = torch.optim.AdamW if adam_w_mode and adamw_mode else torch.optim.Adam
    made = kind(params, **{"weight_decay": 0.0, **settings})
    for group in () if bias_correction else made.param_groups:
        group["bias_correction"] = False  # read by the engine
    return made


def _adagrad(params: Any, *, amsgrad: bool = False, **settings: Any) -> Optimizer:
    if amsgrad:
        raise UsageError("DeepSpeedCPUAdagrad(amsgrad=True): Adagrad has no such form; leave it out")
    return torch.optim.Adagrad(params, **settings)


def _lion(params: Any, **settings: Any) -> Optimizer:
    return Lion(params, **{"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0, **settings})


def _lamb(params: Any, *, amsgrad: bool = False, max_grad_norm: float = 0.0, **settings: Any) -> Optimizer:
    if amsgrad:
        raise UsageError("FusedLamb(amsgrad=True): LAMB has no such form; leave it out")
    if max_grad_norm:
        raise UsageError(f"FusedLamb(max_grad_norm={max_grad_norm}): write gradient_clipping into the config")
    return Lamb(params, **settings)


def _muon(params: Any, **settings: Any) -> Optimizer:
    made: Optimizer = torch.optim.Muon(params, **{"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95, **settings})
    return made


def _muon_with_adam(groups: Any) -> Optimizer:
    return MuonWithAdam([{key: value for key, value in group.items() if key != "ns_method"} for group in groups])


DeepSpeedCPUAdam = _made(
    "DeepSpeedCPUAdam", "Adam AdamW",
    "model_params lr bias_correction betas eps weight_decay amsgrad adamw_mode fp32_optimizer_states", _adam,
)  # fmt: skip
FusedAdam = _made(
    "FusedAdam",
    "Adam AdamW",
    "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none",
    _adam,
)
DeepSpeedCPUAdagrad = _made(
    "DeepSpeedCPUAdagrad", "Adagrad", "model_params lr eps weight_decay amsgrad fp32_optimizer_states", _adagrad
)
DeepSpeedCPULion = _made("DeepSpeedCPULion", "Lion", "model_params lr betas weight_decay fp32_optimizer_states", _lion)
FusedLion = _made("FusedLion", "Lion", "params lr betas weight_decay set_grad_none", _lion)
FusedLamb = _made(
    "FusedLamb", "Lamb",
    "params lr bias_correction betas eps eps_inside_sqrt weight_decay max_grad_norm max_coeff min_coeff amsgrad", _lamb,
)  # fmt: skip
Muon = _made("Muon", "Muon", "params lr weight_decay momentum ns_method", _muon)
MuonWithAuxAdam = _made("MuonWithAuxAdam", "MuonWithAdam", "param_groups", _muon_with_adam)
