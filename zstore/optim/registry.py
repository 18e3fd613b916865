"""Which optimizer classes may be offloaded, and the kernel that does what each does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zstore.engine.optim.kernel import ELEMENT_WISE, FusedAdam, Scalars, TorchKernel, kernel_for
from zstore.errors import UsageError

OptimizerClass = type[torch.optim.Optimizer]
_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_NUMEL, _CUT, _STEPS = 96, 32, 3
"""Of the check of a registered class: elements, where they are cut, and steps."""

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


def settings_of(kind: OptimizerClass, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the implementation that is used where none is asked for, as torch's class says it."""
    if kind in _ADAMS and not any(settings.get(name) is not None for name in ("fused", "foreach", "differentiable")):
        return {**settings, "fused": True}
    return dict(settings)


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
        kernel = kernel_for(known, settings)
        if isinstance(kernel, FusedAdam | TorchKernel):
            return kernel
    kernel = TorchKernel(known, settings)
    if known not in ELEMENT_WISE:
        _check_element_wise(known, kernel, settings)
    return kernel


def _known(kind: OptimizerClass) -> OptimizerClass:
    """Return the class whose update is carried out for `kind`."""
    if kind in ELEMENT_WISE:
        return kind
    if kind in _registered:
        return _registered[kind] or kind
    library = kind.__module__.partition(".")[0]
    if library in ("bitsandbytes", "torchao"):
        raise UsageError(
            f"{kind.__module__}.{kind.__name__} keeps its state in a type of its own, in blocks with a scale each, while what "
            "is offloaded is fp32: use torch.optim's class, whose state then takes disk or host memory instead"
        )
    names = ", ".join(each.__name__ for each in ELEMENT_WISE)
    raise UsageError(
        f"optimizer {kind.__name__} is not known to update each element by itself, but offloaded state is updated in tiles; "
        f"use one of {names}, or where its update is element-wise zstore.optim.register({kind.__name__})"
    )


def _check_element_wise(kind: OptimizerClass, kernel: TorchKernel, settings: Mapping[str, Any]) -> None:
    """Raise UsageError where steps over two parts of a tensor give other bits than over the whole."""
    parts = [_run(kernel, settings, [(0, _NUMEL)]), _run(kernel, settings, [(0, _CUT), (_CUT, _NUMEL)])]
    if any(not torch.equal(whole, cut) for whole, cut in zip(*parts, strict=True)):
        raise UsageError(
            f"optimizer {kind.__name__} was registered as element-wise, but steps over the parts of a tensor give other "
            "values than a step over the whole: it looks at more than one element, and cannot be offloaded"
        )


def _run(kernel: TorchKernel, settings: Mapping[str, Any], cuts: list[tuple[int, int]]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(_NUMEL, generator=generator)
    slots = [torch.zeros(_NUMEL) for _ in kernel.slots]
    scalars: Scalars = kernel.initial()
    for _ in range(_STEPS):
        # Not alike everywhere: what looks at the largest element, or at a mean, shows.
        gradient = torch.randn(_NUMEL, generator=generator) * torch.linspace(0.1, 3.0, _NUMEL)
        step = kernel.start(settings, scalars)
        for first, stop in cuts:
            step.tile(master[first:stop], gradient[first:stop].clone(), [slot[first:stop] for slot in slots])
        scalars = step.scalars()
    return [master, *slots]
