"""DeepSpeed's optimizers and schedules: calling one creates an optimizer of torch or zstore, which the engine updates with one
kernel on every tier, or a schedule that a config can name."""

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
_KIND_BY_SETTINGS = {
    frozenset(kind([torch.nn.Parameter(torch.empty(0, 0))]).defaults): kind
    for kind in (*ELEMENT_WISE, torch.optim.Adafactor, torch.optim.Muon, Lamb)
    if kind not in (torch.optim.Adam, torch.optim.AdamW)
}
"""Settings of a group -> the optimizer class with exactly those settings."""
_IGNORED = ("fp32_optimizer_states", "set_grad_none")
"""Ignored, since state is fp32 and the engine clears gradients."""


class _FactoryMeta(type):
    """Metaclass of classes that create another optimizer or schedule when called. `isinstance` accepts instances of the classes
    in `produces`, and engine optimizers that wrap one. Arguments are named, or in DeepSpeed's `order`."""

    produces: tuple[str, ...]
    order: str
    make: Callable[..., Any]
    ignored: tuple[str, ...]

    def __call__(cls, *values: Any, **keywords: Any) -> Any:
        """Return the optimizer or schedule. Raises UsageError for arguments that have no equivalent."""
        names = cls.order.split()
        named = dict(zip(names, values, strict=False))
        if len(values) > len(names) or named.keys() & keywords.keys():
            raise UsageError(f"{cls.__name__}(...): expected each of {', '.join(names)} at most once")
        named |= keywords
        positional = [named.pop(names[0])] if names[0] in named else []
        return cls.make(*positional, **{name: value for name, value in named.items() if name not in cls.ignored})

    def __instancecheck__(cls, instance: object) -> bool:
        return type(getattr(instance, "client", instance)).__name__ in cls.produces


def _maker(name: str, produces: str, order: str, make: Callable[..., Any], ignored: tuple[str, ...] = _IGNORED) -> type:
    text = f"Its instances are: {produces}."
    members = {"produces": tuple(produces.split()), "order": order, "make": staticmethod(make), "ignored": ignored}
    return _FactoryMeta(name, (), {**members, "__doc__": text})


def _adam(
    params: Any, *, bias_correction: bool = True, adam_w_mode: bool = True, adamw_mode: bool = True, **settings: Any
) -> Optimizer:
    params = list(params)
    if params and isinstance(params[0], dict):
        # accelerate creates a DeepSpeedCPUAdam from the groups of any offloaded optimizer: keep the original class.
        kind = _KIND_BY_SETTINGS.get(frozenset(params[0]) - {"params", "initial_lr"})
        if kind is not None:
            return kind(params)
        _require_adam_settings(params[0])
    kind = torch.optim.AdamW if adam_w_mode and adamw_mode else torch.optim.Adam
    optimizer = kind(params, **{"weight_decay": 0.0, **settings})
    for group in () if bias_correction else optimizer.param_groups:
        group["bias_correction"] = False  # for the engine
    return optimizer


def _require_adam_settings(group: Mapping[str, Any]) -> None:
    """Raise UsageError for a group whose settings show that another optimizer created it."""
    eps = group.get("eps", 0.0)
    if not isinstance(eps, (int, float, torch.Tensor)):
        names = ", ".join(kind.__name__ for kind in (torch.optim.Adam, torch.optim.AdamW, *_KIND_BY_SETTINGS.values()))
        raise UsageError(
            f"eps={eps!r} of a parameter group is not Adam's: accelerate converts an optimizer with offloaded state to "
            f"DeepSpeedCPUAdam, but the original class is none of {names}. Use one of these (not transformers' Adafactor but "
            'torch\'s, by "optimizer": {"type": "Adafactor"} in the config), or stage 0 without offload'
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
        raise UsageError(f"FusedLamb(max_grad_norm={max_grad_norm}): set gradient_clipping in the config")
    return Lamb(params, **settings)


DeepSpeedCPUAdam = _maker(
    "DeepSpeedCPUAdam", "Adam AdamW",
    "model_params lr bias_correction betas eps weight_decay amsgrad adamw_mode fp32_optimizer_states", _adam,
)  # fmt: skip
FusedAdam = _maker(
    "FusedAdam",
    "Adam AdamW",
    "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none",
    _adam,
)
DeepSpeedCPUAdagrad = _maker(
    "DeepSpeedCPUAdagrad", "Adagrad", "model_params lr eps weight_decay amsgrad fp32_optimizer_states", _adagrad
)
DeepSpeedCPULion = _maker("DeepSpeedCPULion", "Lion", "model_params lr betas weight_decay fp32_optimizer_states", _lion)
FusedLion = _maker("FusedLion", "Lion", "params lr betas weight_decay set_grad_none", _lion)
FusedLamb = _maker(
    "FusedLamb", "Lamb",
    "params lr bias_correction betas eps eps_inside_sqrt weight_decay max_grad_norm max_coeff min_coeff amsgrad", _lamb,
)  # fmt: skip


VALID_LR_SCHEDULES = list(SCHEDULES)


def _schedule(name: str, order: str, *, derived: str = "") -> type:
    """Return a class that creates the engine's schedule of that name from arguments as in `scheduler.params`."""

    def make(optimizer: Optimizer, **params: Any) -> NamedSchedule:
        config = {"scheduler": {"type": name, "params": params}}
        section: Any = load_config(config, name=f"{name}(...)").settings.scheduler
        settings_before = [dict(group) for group in optimizer.param_groups]
        schedule = named_schedule(section, optimizer)
        if section.params.last_batch_iteration >= 0:  # the optimizer's settings apply until the first step
            for group, settings in zip(optimizer.param_groups, settings_before, strict=True):
                group.update(settings)
        return schedule

    return _maker(name, f"{name} {derived}".rstrip(), f"optimizer {order} last_batch_iteration", make, ignored=())


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
