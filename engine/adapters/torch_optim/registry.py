"""The optimizer classes that may be offloaded, and the kernel of each."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from zstore.engine.extras.whole_tensors.kernel import TensorKernel
from zstore.engine.optim.kernel import ELEMENT_WISE, Averaging, FusedAdam, TorchKernel, kernel_for
from zstore.errors import UsageError

from .block_kernel import BlockKernel, Blocks

OptimizerClass = type[torch.optim.Optimizer]
_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
OF_MATRICES = (torch.optim.Muon,)
"""Classes that step whole matrices; see `whole_tensors`."""
_NUMEL, _CUT, _STEPS = 96, 32, 3
"""Sizes of the check of a registered class: elements, the place of the cut, and steps."""

_registered: dict[OptimizerClass, OptimizerClass | None] = {}
"""Classes of others, and the class of torch whose update each has, None for an update of its own."""


def _torchao_blocks(numel: int, settings: Mapping[str, Any]) -> int | None:
    block: int = settings.get("block_size", 256)
    return block if numel >= 4096 and numel % block == 0 else None


def _bitsandbytes_blocks(numel: int, settings: Mapping[str, Any]) -> int | None:
    return 256 if numel >= settings.get("min_8bit_size", 4096) else None


_in_blocks: dict[OptimizerClass, Blocks] = {}
"""Registered classes that keep their state in blocks."""
_LIBRARIES: dict[str, tuple[tuple[str, ...], Blocks]] = {
    "torchao": (("Adam8bit", "AdamW8bit"), _torchao_blocks),
    "bitsandbytes": (
        ("Adam8bit", "AdamW8bit", "Lion8bit", "RMSprop8bit", "SGD8bit", "Adagrad8bit"),
        _bitsandbytes_blocks,
    ),
}
"""Classes of others that are known without being registered."""
_REFUSED = {
    "bf16_stochastic_round": "random rounding gives other values for parts of a tensor than for the whole",
    "amsgrad": "the class itself takes no step with it",
    "is_paged": "offloaded state is paged by the store already",
}


def register(kind: OptimizerClass, *, like: OptimizerClass | None = None, block: Blocks | None = None) -> None:
    """Let `Offloaded` take optimizers of class `kind`, whose update of an element depends on that element's own history and
    on scalars alone.

    `like` is a class of torch.optim whose update it has, for a subclass that adds something else: that class's own
    kernel is used. Without it `kind` steps tiles itself; that it gives the same bits over parts of a tensor as over the
    whole is checked when an optimizer is made. Its state must be fp32 tensors of the parameter's shape, and numbers.

    `block` is for a class that keeps its state in blocks along the flat parameter, with a scale each: called with the
    number of elements of a parameter and the settings, it returns how many elements a block has, or None if such a
    parameter's state is not in blocks. Its state may be tensors of any type with one value an element or one a block,
    tensor subclasses made of such, constants, and step counts; it starts from zeros.
    """
    given: Any = kind
    if not (isinstance(given, type) and issubclass(given, torch.optim.Optimizer)):
        raise UsageError(f"register: expected a class derived from torch.optim.Optimizer, got {given!r}")
    if like is not None and like not in ELEMENT_WISE:
        names = ", ".join(known.__name__ for known in ELEMENT_WISE)
        raise UsageError(f"register: `like` must be one of torch.optim's {names}, got {like!r}")
    if like is not None and block is not None:
        raise UsageError(
            "register: `like` names a class of torch, whose state is not in blocks: leave out `like` or `block`"
        )
    _registered[kind] = like
    _in_blocks.pop(kind, None)
    if block is not None:
        _in_blocks[kind] = block


def defaults_of(kind: OptimizerClass, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the class makes of these, with the default implementation in the terms of torch's class."""
    if kind in _ADAMS and not any(settings.get(name) is not None for name in ("fused", "foreach", "differentiable")):
        settings = {**settings, "fused": True}
    return kind([torch.nn.Parameter(torch.zeros(1, 1))], **settings).defaults


def require_known(kind: OptimizerClass) -> None:
    """Raise UsageError for a class that cannot be offloaded."""
    if kind not in OF_MATRICES and not _blocks_of(kind):
        _known(kind)


def make_kernel(kind: OptimizerClass, group: Mapping[str, Any]) -> FusedAdam | TorchKernel | BlockKernel | TensorKernel:
    """Return the kernel for a parameter group with these settings.

    Adam and AdamW have the bits of torch's fused kernel unless the group says `fused=False` or `foreach=True`. Raises
    UsageError for a class or a setting that cannot be offloaded.
    """
    if kind in OF_MATRICES:
        return TensorKernel(kind, group)
    if blocks := _blocks_of(kind):
        return _block_kernel(kind, group, blocks)
    known = _known(kind)
    settings = {**group, "params": [torch.zeros(1)]}
    for name in ("differentiable", "capturable"):
        if settings.get(name):
            raise UsageError(f"{kind.__name__}({name}=True) cannot be offloaded: leave it out")
    if known in _ADAMS and settings.get("fused") is not False and not settings.get("foreach"):
        return kernel_for(known, settings)
    kernel = TorchKernel(known, settings)
    if known not in ELEMENT_WISE:
        _check_cuts(known, kernel, settings, _NUMEL)
    return kernel


def averaging(
    kind: OptimizerClass, kernel: FusedAdam | TorchKernel | BlockKernel | TensorKernel, ema: float
) -> Averaging:
    """Return a kernel that also averages masters. Raises UsageError if the state is in blocks, or steps are of whole
    matrices."""
    if isinstance(kernel, TensorKernel):
        raise UsageError(
            f"ema={ema}: masters are averaged in tiles, and {kind.__name__} steps whole matrices: leave it out"
        )
    if isinstance(kernel, BlockKernel):
        raise UsageError(
            f"ema={ema}: {kind.__name__} keeps its state in blocks, beside which nothing is averaged: leave it out"
        )
    return Averaging(kernel, ema)


def _known(kind: OptimizerClass) -> OptimizerClass:
    """Return the class whose update is carried out for `kind`."""
    if kind in ELEMENT_WISE:
        return kind
    if kind in _registered:
        return _registered[kind] or kind
    if (library := kind.__module__.partition(".")[0]) in _LIBRARIES:
        names = ", ".join(_LIBRARIES[library][0])
        raise UsageError(
            f"{kind.__module__}.{kind.__name__} cannot be offloaded: of {library} there are {names}. Others keep two values in "
            "a byte, 8-bit floats or pages of their own, look at whole tensors, or do what a class of torch.optim does"
        )
    names = ", ".join(each.__name__ for each in ELEMENT_WISE)
    raise UsageError(
        f"optimizer {kind.__name__} is not known to update each element by itself, but offloaded state is updated in tiles; "
        f"use one of {names}, torch's Muon for matrices, or where its update is element-wise "
        f"zstore.optim.register({kind.__name__})"
    )


def _blocks_of(kind: OptimizerClass) -> Blocks | None:
    names, blocks = _LIBRARIES.get(kind.__module__.partition(".")[0], ((), None))
    return _in_blocks.get(kind) or (blocks if kind.__name__ in names and kind not in _registered else None)


def _block_kernel(kind: OptimizerClass, group: Mapping[str, Any], blocks: Blocks) -> BlockKernel:
    for name, reason in _REFUSED.items():
        if group.get(name):
            raise UsageError(f"{kind.__name__}({name}=True) cannot be offloaded, for {reason}: leave it out")
    kernel = BlockKernel(kind, group, blocks)
    for numel in (kernel.numel_in_blocks, _NUMEL) if kind in _in_blocks else ():
        if numel is not None:
            _check_cuts(kind, kernel, group, numel)
    return kernel


def _check_cuts(kind: OptimizerClass, kernel: TorchKernel | BlockKernel, group: Mapping[str, Any], numel: int) -> None:
    """Raise UsageError if steps over two parts of a tensor, of whole blocks, give other values than the class gives it."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=generator)
    whole = torch.nn.Parameter(start.clone())
    accepted = [name for name in inspect.signature(kind.__init__).parameters if name in group and name != "params"]
    own, scalars = kind([whole], **{name: group[name] for name in accepted}), kernel.initial()
    block = kernel.block_of(numel) if isinstance(kernel, BlockKernel) else None
    arrays = kernel.arrays(numel, (numel,))
    slots = [torch.zeros(-(-numel // array.block), dtype=array.dtype) for array in arrays]
    cut = _CUT if block is None else numel // (2 * block) * block
    for _ in range(_STEPS):
        # Not alike everywhere: then a use of the largest element, or of a mean, shows.
        gradient = torch.randn(numel, generator=generator) * torch.linspace(0.1, 3.0, numel)
        whole.grad = gradient.clone()
        own.step()
        step = kernel.start(group, scalars)
        for first, stop in ((0, cut), (cut, numel)):
            parts = [slot[first // a.block : -(-stop // a.block)] for slot, a in zip(slots, arrays, strict=True)]
            step.tile(start[first:stop], gradient[first:stop].clone(), parts)
        scalars = step.scalars()
    if torch.equal(whole.detach(), start):
        return
    if isinstance(kernel, BlockKernel):
        raise UsageError(
            f"optimizer {kind.__name__} was registered with state in blocks of {block} elements, but steps over whole "
            "blocks give other values than over the whole: it looks beyond a block, or its state does not begin as zeros"
        )
    raise UsageError(
        f"optimizer {kind.__name__} was registered as element-wise, but steps over the parts of a tensor give other "
        "values than a step over the whole: it looks at more than one element, and cannot be offloaded"
    )
