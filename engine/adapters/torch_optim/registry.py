"""The optimizer classes that may be offloaded, and the kernel of each."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from zstore.engine.optim.kernel import ELEMENT_WISE, FusedAdam, TorchKernel, kernel_for
from zstore.errors import UsageError

OptimizerClass = type[torch.optim.Optimizer]
_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_NUMEL, _CUT, _STEPS = 96, 32, 3
"""Sizes of the check of a registered class: elements, the place of the cut, and steps."""

_registered: dict[OptimizerClass, OptimizerClass | None] = {}
"""Classes of others, and the class of torch whose update each has, None for an update of its own."""


def register(kind: OptimizerClass, *, like: OptimizerClass | None = None) -> None:
    """Let `Offloaded` take optimizers of class `kind`, whose update of an element depends on that element's own history and
    on scalars alone.

    `like` is a class of torch.optim whose update it has, for a subclass that adds something else: that class's own
    kernel is used. Without it `kind` steps tiles itself; that it gives the same bits over parts of a tensor as over the
    whole is checked when an optimizer is made. Its state must be fp32 tensors of the parameter's shape, and numbers.
    """
    given: Any = kind
    if not (isinstance(given, type) and issubclass(given, torch.optim.Optimizer)):
        raise UsageError(f"register: expected a class derived from torch.optim.Optimizer, got {given!r}")
    if like is not None and like not in ELEMENT_WISE:
        names = ", ".join(known.__name__ for known in ELEMENT_WISE)
        raise UsageError(f"register: `like` must be one of torch.optim's {names}, got {like!r}")
    _registered[kind] = like


def defaults_of(kind: OptimizerClass, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the class makes of these, with the default implementation in the terms of torch's class."""
    if kind in _ADAMS and not any(settings.get(name) is not None for name in ("fused", "foreach", "differentiable")):
        settings = {**settings, "fused": True}
    return kind([torch.nn.Parameter(torch.zeros(1, 1))], **settings).defaults


def require_known(kind: OptimizerClass) -> None:
    """Raise UsageError for a class that cannot be offloaded."""
    _known(kind)


def make_kernel(kind: OptimizerClass, group: Mapping[str, Any]) -> FusedAdam | TorchKernel:
    """Return the kernel for a parameter group with these settings.

    Adam and AdamW have the bits of torch's fused kernel unless the group says `fused=False` or `foreach=True`. Raises
    UsageError for a class or a setting that cannot be offloaded.
    """
    known = _known(kind)
    settings = {**group, "params": [torch.zeros(1)]}
    for name in ("differentiable", "capturable"):
        if settings.get(name):
            raise UsageError(f"{kind.__name__}({name}=True) cannot be offloaded: leave it out")
    if known in _ADAMS and settings.get("fused") is not False and not settings.get("foreach"):
        return kernel_for(known, settings)
    kernel = TorchKernel(known, settings)
    if known not in ELEMENT_WISE:
        _check_cuts(known, kernel, settings)
    return kernel


def _known(kind: OptimizerClass) -> OptimizerClass:
    """Return the class whose update is carried out for `kind`."""
    if kind in ELEMENT_WISE:
        return kind
    if kind in _registered:
        return _registered[kind] or kind
    names = ", ".join(each.__name__ for each in ELEMENT_WISE)
    raise UsageError(
        f"optimizer {kind.__name__} is not known to update each element by itself, but offloaded state is updated in tiles; "
        f"use one of {names}, or where its update is element-wise "
        f"zstore.optim.register({kind.__name__})"
    )


def _check_cuts(kind: OptimizerClass, kernel: TorchKernel, group: Mapping[str, Any]) -> None:
    """Raise UsageError if steps over two parts of a tensor give other values than the class gives it."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_NUMEL, generator=generator)
    whole = torch.nn.Parameter(start.clone())
    accepted = [name for name in inspect.signature(kind.__init__).parameters if name in group and name != "params"]
    own, scalars = kind([whole], **{name: group[name] for name in accepted}), kernel.initial()
    slots = [torch.zeros(_NUMEL) for _ in kernel.slots]
    for _ in range(_STEPS):
        # Not alike everywhere: then a use of the largest element, or of a mean, shows.
        gradient = torch.randn(_NUMEL, generator=generator) * torch.linspace(0.1, 3.0, _NUMEL)
        whole.grad = gradient.clone()
        own.step()
        step = kernel.start(group, scalars)
        for first, stop in ((0, _CUT), (_CUT, _NUMEL)):
            parts = [slot[first:stop] for slot in slots]
            step.tile(start[first:stop], gradient[first:stop].clone(), parts)
        scalars = step.scalars()
    if torch.equal(whole.detach(), start):
        return
    raise UsageError(
        f"optimizer {kind.__name__} was registered as element-wise, but steps over the parts of a tensor give other "
        "values than a step over the whole: it looks at more than one element, and cannot be offloaded"
    )
