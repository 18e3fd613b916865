"""DeepSpeed's optimizers and schedules: a call makes an optimizer of torch or zstore, which the engine updates by one kernel on
every tier, or a schedule that a config can name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from zstore.engine.config.config import load_config
from zstore.engine.config.optimizers import SCHEDULES
from zstore.engine.extras.whole_tensors import Lamb
from zstore.engine.optim.kernel import ELEMENT_WISE, Lion
from zstore.engine.training.lr_schedules import NamedSchedule, named_schedule
from zstore.errors import UsageError

Optimizer = torch.optim.Optimizer
_BY_KEYS = {
    frozenset(kind([torch.nn.Parameter(torch.empty(0, 0))]).defaults): kind
    for kind in (*ELEMENT_WISE, torch.optim.Adafactor, torch.optim.Muon, Lamb)
    if kind not in (torch.optim.Adam, torch.optim.AdamW)
}
"""Settings of a group -> the optimizer with exactly those."""
_WITHOUT_EFFECT = ("fp32_optimizer_states", "set_grad_none")
"""Ignored: state is fp32, and the engine clears gradients."""


class _Made(type):
    """The metaclass of classes whose calls create another optimizer or schedule; their instances are instances of the classes
    in `makes`, and engine optimizers around one. Arguments are named, or in DeepSpeed's `order`."""

    makes: tuple[str, ...]
    order: str
    make: Callable[..., Any]
    ignored: tuple[str, ...]

    def __call__(cls, *values: Any, **given: Any) -> Any:
        """Return the optimizer or schedule. Raises UsageError for arguments that have no counterpart here."""
        names = cls.order.split()
        named = dict(zip(names, values, strict=False))
        if len(values) > len(names) or named.keys() & given.keys():
            raise UsageError(f"{cls.__name__}(...): expected each of {', '.join(names)} at most once")
        named |= given
        positional = [named.pop(names[0])] if names[0] in named else []
        return cls.make(*positional, **{name: value for name, value in named.items() if name not in cls.ignored})

    def __instancecheck__(cls, instance: object) -> bool:
        return type(getattr(instance, "client", instance)).__name__ in cls.makes


def _made(
    name: str, makes: str, order: str, make: Callable[..., Any], ignored: tuple[str, ...] = _WITHOUT_EFFECT
) -> type:
    text = f"Its instances are: {makes}."
    members = {"makes": tuple(makes.split()), "order": order, "make": staticmethod(make), "ignored": ignored}
    return _Made(name, (), {**members, "__doc__": text})


def _adam(
    params: Any, *, bias_correction: bool = True, adam_w_mode: bool = True, adamw_mode: bool = True, **settings: Any
) -> Optimizer:
    params = list(params)
    if params and isinstance(params[0], dict):
        # accelerate creates a DeepSpeedCPUAdam from the groups of any offloaded optimizer: keep the original class.
        other = _BY_KEYS.get(frozenset(params[0]) - {"params", "initial_lr"})
        if other is not None:
            return other(params)
        _require_adams(params[0])
    kind = torch.optim.AdamW if adam_w_mode and adamw_mode else torch.optim.Adam
    made = kind(params, **{"weight_decay": 0.0, **settings})
    for group in () if bias_correction else made.param_groups:
        group["bias_correction"] = False  # for the engine
    return made


def _require_adams(group: Mapping[str, Any]) -> None:
    """Raise UsageError for a group whose settings show that another optimizer made it."""
    eps = group.get("eps", 0.0)
    if not isinstance(eps, (int, float, torch.Tensor)):
        names = ", ".join(kind.__name__ for kind in (torch.optim.Adam, torch.optim.AdamW, *_BY_KEYS.values()))
        raise UsageError(
            f"eps={eps!r} of a parameter group is not Adam's: accelerate makes DeepSpeedCPUAdam of an optimizer with offloaded "
            f"state, but the original class is none of {names}. Use one of these, in place of transformers' Adafactor "
            'torch\'s by "optimizer": {"type": "Adafactor"} in the config; or stage 0 without offload'
        )


def _adagrad(params: Any, *, amsgrad: bool = False, **settings: Any) -> Optimizer:
    if amsgrad:
        raise UsageError("DeepSpeedCPUAdagrad(amsgrad=True): Adagrad has no such variant; leave it out")
    return torch.optim.Adagrad(params, **settings)


def _lion(params: Any, **settings: Any) -> Optimizer:
    return Lion(params, **{"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0, **settings})


def _lamb(params: Any, *, amsgrad: bool = False, max_grad_norm: float = 0.0, **settings: Any) -> Optimizer:
    if amsgrad:
        raise UsageError("FusedLamb(amsgrad=True): LAMB has no such variant; leave it out")
    if max_grad_norm:
        raise UsageError(f"FusedLamb(max_grad_norm={max_grad_norm}): write gradient_clipping into the config")
    return Lamb(params, **settings)


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


VALID_LR_SCHEDULES = list(SCHEDULES)


def _schedule(name: str, order: str, *, derived: str = "") -> type:
    """Return the class whose call makes the engine's schedule of that name, from the config's `scheduler.params`."""

    def make(optimizer: Optimizer, **params: Any) -> NamedSchedule:
        config = {"scheduler": {"type": name, "params": params}}
        section: Any = load_config(config, name=f"{name}(...)").settings.scheduler
        before = [dict(group) for group in optimizer.param_groups]
        schedule = named_schedule(section, optimizer)
        if section.params.last_batch_iteration >= 0:  # the optimizer's settings apply until the first step
            for group, former in zip(optimizer.param_groups, before, strict=True):
                group.update(former)
        return schedule

    return _made(name, f"{name} {derived}".rstrip(), f"optimizer {order} last_batch_iteration", make, ignored=())


_WARMUP = "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type"
LRRangeTest = _schedule(
    "LRRangeTest", "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase"
)
OneCycle = _schedule(
    "OneCycle",
    "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
    "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate",
)
WarmupLR = _schedule("WarmupLR", _WARMUP, derived="WarmupDecayLR")
WarmupDecayLR = _schedule("WarmupDecayLR", f"total_num_steps {_WARMUP}")
WarmupCosineLR = _schedule(
    "WarmupCosineLR", "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type"
)
